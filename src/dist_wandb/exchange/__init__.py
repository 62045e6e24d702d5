"""The exchange: it combines the numbers of all ranks."""
