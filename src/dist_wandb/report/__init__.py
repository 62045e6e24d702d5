"""The report: the runs below a directory as one HTML file."""
