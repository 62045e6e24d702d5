"""The rounds by which ranks bring contributions together. Pure: no threads, no clock, no torch, no wandb."""
