"""Tables and images of all ranks."""
