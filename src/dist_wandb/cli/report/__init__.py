"""Write the runs below a directory as one HTML file."""
