"""Uploads of runs from disk, for `dist-wandb sync`."""
