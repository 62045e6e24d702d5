"""One config on all ranks."""
