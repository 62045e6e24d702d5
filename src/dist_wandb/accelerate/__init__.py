"""The integration with Hugging Face Accelerate. Importing it makes the name "dist_wandb" known to Accelerate."""

from dist_wandb.accelerate.tracker import DistWandbTracker as DistWandbTracker
