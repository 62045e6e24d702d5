"""Lightning under torchrun: every mode in worker scope in turn, a new Trainer with a new logger each."""

import sys
from pathlib import Path

import fit_and_test

from dist_wandb.settings.plan import RUN_MODES

if __name__ == "__main__":
    for run_mode in RUN_MODES:
        fit_and_test.main(str(Path(sys.argv[1]) / f"{run_mode}-worker"), "ddp", run_mode, "worker", sys.argv[2])
