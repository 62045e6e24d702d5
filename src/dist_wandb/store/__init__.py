"""The job's key-value store, through which ranks communicate before and outside the training's process groups."""
