"""What `dist-wandb sync` uploads."""
