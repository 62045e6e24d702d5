"""W&B runs: the user's arguments, and opening, writing and finishing runs. The only room that imports wandb."""
