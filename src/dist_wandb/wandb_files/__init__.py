"""What W&B leaves on disk: found, read without trust, and completed."""
