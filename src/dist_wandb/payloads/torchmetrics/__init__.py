"""torchmetrics' metrics and collections: their states, and what is computed of all ranks' states."""
