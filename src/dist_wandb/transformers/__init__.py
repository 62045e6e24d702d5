"""The integration with the Hugging Face Trainer. Importing it makes ``report_to="dist_wandb"`` work."""

from dist_wandb.transformers.callback import DistWandbCallback as DistWandbCallback
