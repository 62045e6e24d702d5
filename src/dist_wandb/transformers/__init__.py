"""The integration with the Hugging Face Trainer. Its import makes ``report_to="dist_wandb"`` known to transformers."""

from dist_wandb.transformers.callback import DistWandbCallback as DistWandbCallback
