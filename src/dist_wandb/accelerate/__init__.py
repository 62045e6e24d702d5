"""The integration with Hugging Face Accelerate. Its import makes the name "dist_wandb" known to Accelerate."""

from dist_wandb.accelerate.tracker import DistWandbTracker as DistWandbTracker
