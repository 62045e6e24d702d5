"""W&B runs: the requests of the user, opening, writing and finishing. The only room that imports wandb."""
