"""The user's options, and the plan that follows from them. Pure: no wandb, no torch, no clock."""
