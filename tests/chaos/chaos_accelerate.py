"""One rank of a random Accelerate job."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from accelerate import Accelerator
from chaos_rank import break_off, see_others_begin
from drawing import draw, value_of
from ledger import Ledger, watch_messages

from dist_wandb import DistWandbTracker


def main(seed: str, directory: str) -> None:
    spec, rank = draw(int(seed)), int(os.environ["RANK"])
    ledger = Ledger(Path(directory), rank)
    watch_messages(ledger)
    tracker = DistWandbTracker(
        id="s0",
        dir=str(Path(directory) / "runs"),
        **spec.options,
    )
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("chaos")
    ledger.write("opened", session=0)
    (Path(directory) / f"opened-{rank}").touch()
    for row in range(spec.rows):
        for fault in spec.faults_of(rank):
            if fault.row == row:
                if rank == 0:
                    see_others_begin(spec, Path(directory))
                break_off(ledger, fault)
        time.sleep(spec.lag(rank, row))
        names = ["loss", *(["own_0"] if rank == 0 else [])]
        values = {name: value_of(rank, row) for name in names}
        number = ledger.intend(0, {name: (row, value) for name, value in values.items()}, step=row)
        accelerator.log(values, step=row)
        ledger.done(number)
        time.sleep(spec.pace)
    ledger.write("end")
    if spec.faults:  # `end_training` is a collective, which a dead rank does not join
        tracker.finish()
    else:
        accelerator.end_training()
    if rank == 0:
        time.sleep(0.5)  # this rank hosts the store


if __name__ == "__main__":
    main(*sys.argv[1:])
