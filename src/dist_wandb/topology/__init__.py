"""Who this process is among all ranks: what the launcher, the framework and torch.distributed say of it."""
