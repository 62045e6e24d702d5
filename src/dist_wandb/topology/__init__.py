"""The position of this process among all ranks: from the launcher, the framework or torch.distributed."""
