"""The command line: dist-wandb plan, doctor, show and sync."""

from dist_wandb.cli.commands import main as main
