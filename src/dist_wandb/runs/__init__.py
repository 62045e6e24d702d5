"""W&B runs: what the user asked for, opening, writing and finishing them. The only room that imports wandb."""
