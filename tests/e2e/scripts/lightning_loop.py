"""Lightning under torchrun: every mode and scope in turn, a new Trainer with a new logger each."""

import sys
from pathlib import Path

import fit_and_test
from stored import COMBINATIONS

if __name__ == "__main__":
    for run_mode, rank_scope in COMBINATIONS:
        fit_and_test.main(
            str(Path(sys.argv[1]) / f"{run_mode}-{rank_scope}"), "ddp", run_mode, rank_scope, num_nodes=sys.argv[2]
        )
