"""What the user asked for, and what it means here. Pure: no wandb, no torch, no clock."""
