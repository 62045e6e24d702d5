"""The runs that a restarted job continues."""
