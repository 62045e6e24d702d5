"""The command line: dist-wandb plan, doctor, show, report and sync."""

from dist_wandb.cli.commands import main as main
