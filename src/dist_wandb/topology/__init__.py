"""Who this process is among all ranks: from the launcher, the framework or torch.distributed."""
