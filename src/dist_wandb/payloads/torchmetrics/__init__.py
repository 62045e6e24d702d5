"""Metrics and collections of torchmetrics: their states, and the values computed from the states of all ranks."""
