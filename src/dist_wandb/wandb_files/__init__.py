"""Find and read the files of W&B runs, which are not trusted, and write dist_wandb's sidecars."""
