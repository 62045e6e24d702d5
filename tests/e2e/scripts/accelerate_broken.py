"""A training of Accelerate in which a rank raises, while the main process waits for it in a collective."""

import sys

from accelerate import Accelerator

from dist_wandb.accelerate import DistWandbTracker

STEPS = 4


def main(directory: str) -> None:
    accelerator = Accelerator(cpu=True, log_with=DistWandbTracker(id="broken", dir=directory))
    if accelerator.is_main_process:
        accelerator.init_trackers("tests")
    for step in range(STEPS):
        accelerator.log({"loss": float(accelerator.process_index + step)}, step=step)
        accelerator.wait_for_everyone()
    accelerator.get_tracker("dist_wandb").session.flush(together=True)
    if accelerator.process_index == 1:
        raise RuntimeError("rank 1 has had enough")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
