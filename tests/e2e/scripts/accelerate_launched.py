"""One training without `end_training`, by each of Accelerate's launchers of functions."""

import os
import sys
from pathlib import Path

from accelerate import Accelerator, debug_launcher, notebook_launcher
from processes import free_port

from dist_wandb.accelerate import DistWandbTracker

STEPS = 4


def train(directory: str, name: str) -> None:
    tracker = DistWandbTracker(id=name, dir=directory, run_mode="shared")  # which needs the layout over nodes
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("tests")
    rank = accelerator.process_index
    for step in range(STEPS):
        accelerator.log({"loss": 10.0 * rank + step}, step=step)
    accelerator.wait_for_everyone()
    topology = tracker.session.topology
    seen = f"{name} rank {rank} of {topology.world_size} on {topology.num_nodes} node"
    (Path(directory) / f"saw-{name}-{rank}").write_text(seen)


def main(directory: str) -> None:
    debug_launcher(train, (directory, "debug"), num_processes=2)
    os.environ["ACCELERATE_USE_CPU"] = "yes"
    notebook_launcher(train, (directory, "notebook"), num_processes=2, use_port=str(free_port()))


if __name__ == "__main__":
    main(*sys.argv[1:])
