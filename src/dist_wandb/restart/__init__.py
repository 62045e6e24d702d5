"""Which runs a restarted job continues."""
