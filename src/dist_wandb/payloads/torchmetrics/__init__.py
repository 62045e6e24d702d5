"""torchmetrics' metrics and collections: their states, and the values computed from all ranks' states."""
