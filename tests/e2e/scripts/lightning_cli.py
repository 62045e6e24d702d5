"""LightningCLI, offline: print the config of the options, and fit with the printed one."""

import contextlib
import io
import os
import sys
from pathlib import Path

from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

LOGGER = {"project": "tests", "id": "exp", "offline": "true", "run_mode": "new", "reduce": "max", "tags": '["x"]'}
LIMITS = {"max_steps": 2, "limit_val_batches": 0, "accelerator": "cpu", "log_every_n_steps": 1}

if __name__ == "__main__":
    before = {name: value for name, value in os.environ.items() if "WANDB" in name}
    options = [f"--trainer.logger.{name}={value}" for name, value in LOGGER.items()]
    options += [f"--trainer.{name}={value}" for name, value in LIMITS.items()]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        LightningCLI(
            BoringModel, args=["fit", "--trainer.logger=dist_wandb.DistWandbLogger", *options, "--print_config"]
        )
    config = Path(sys.argv[1]) / "printed.yaml"
    config.write_text(printed.getvalue())
    LightningCLI(BoringModel, args=["fit", f"--config={config}"])
    after = {name: value for name, value in os.environ.items() if "WANDB" in name and name != "WANDB_SERVICE"}
    sys.stdout.write(f"\nSAW {after == {**before, 'WANDB_MODE': 'dryrun'}}\n")  # which the stock logger leaves, too
