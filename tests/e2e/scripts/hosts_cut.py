"""One rank whose host, or another, is cut off from the network: it continues to log into the runs of job and host.

The training uses no collectives: nothing but the logging depends on the other hosts.
"""

import json
import logging
import sys
import time
from pathlib import Path

import torch.distributed as dist
from pulse import Pulse

import dist_wandb

PULSE = Pulse()


def main(directory: str, rows: str, pace: str) -> None:
    logging.basicConfig(format="AT %(created).2f %(message)s")
    dist.init_process_group("gloo")
    rank, slowest = dist.get_rank(), 0.0
    limits = dist_wandb.Limits(peer_timeout=3.0, join_timeout=15.0, finish_timeout=6.0, heartbeat=0.2)
    job = dist_wandb.init("tests", id="job", dir=directory, reinit="create_new", limits=limits)
    host = dist_wandb.init("tests", rank_scope="worker", id="host", dir=directory, reinit="create_new", limits=limits)
    for step in range(int(rows)):
        begun = time.monotonic()
        job.log({"loss": step + float(rank)}, step=step)
        host.log({"loss": step + float(rank)}, step=step)
        slowest = max(slowest, PULSE.own(begun, time.monotonic()))
        if step == 10:  # the others are there, and means flow
            Path(f"begun-{rank}").write_text(str(job.flush(10.0)))
        time.sleep(float(pace))
    took = []
    for run in (job, host):
        begun = time.monotonic()
        run.finish()
        took.append(round(PULSE.own(begun, time.monotonic()), 2))
    sys.stdout.write(f"\nENDED {json.dumps({'rank': rank, 'log': slowest, 'finish': took, 'at': time.time()})}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
