"""One rank of plain PyTorch under any launcher: every mode and scope, before the process group exists and after.

It writes the predictions of `dist-wandb doctor` and the actual sessions into ``DIRECTORY/reports-RANK.json``.
"""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist
import torch.multiprocessing as mp
from processes import wait_until
from stored import EACH_ONCE, PATIENT, ROWS

import dist_wandb
from dist_wandb.cli import main as dist_wandb_command
from dist_wandb.errors import RendezvousError
from dist_wandb.job.topology import Topology

Report = dict[str, Any]
LONGEST = 120.0  # seconds


def doctor(run_mode: str, rank_scope: str) -> Report:
    """The report of `dist-wandb doctor --json` about this process."""
    with stdout_in_a_file() as output:
        code = dist_wandb_command(["doctor", "--json", "--run-mode", run_mode, "--rank-scope", rank_scope])
        sys.stdout.flush()
        output.seek(0)
        found = json.loads(output.read())
    return {"code": code, **{name: found.get(name) for name in ("topology", "plan", "errors", "warnings", "server")}}


@contextlib.contextmanager
def stdout_in_a_file() -> Iterator[TextIO]:
    """Redirect standard output into a file, without replacing `sys.stdout`: wandb keeps the first one that it sees."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(output.fileno(), 1)
        try:
            yield output
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)


def meet(place: Path) -> None:
    """Wait until all ranks are here: a rank that ends a session waits only 2 s for others that have not opened it."""
    who = Topology.detect()
    place.mkdir(exist_ok=True)
    (place / str(who.global_rank)).touch()
    wait_until(lambda: len(list(place.iterdir())) == who.world_size, LONGEST, f"{who.world_size} ranks in {place}")


def session(project: str, directory: str, run_mode: Any, rank_scope: Any) -> Report:
    """Open a session of this mode and scope, log rows, and return its topology and plan."""
    meet(Path(directory) / f"meet-{project}")
    about: dict[str, Any] = {"name": "nm", "tags": ["online"], "config": {"lr": 0.1}, "dir": directory}
    about["limits"] = {"heartbeat": PATIENT}
    try:
        with dist_wandb.init(project, run_mode=run_mode, rank_scope=rank_scope, **about) as run:
            for row in range(ROWS):
                run.log({"loss": 10.0 * run.topology.global_rank + row})
            sys.stdout.write("hello\n")  # the server knows writers by the labels of their lines
            topology = {name: value for name, value in asdict(run.topology).items() if name != "sources"}
            return {"topology": topology, "plan": asdict(run.plan), "error": None}
    except RendezvousError as error:
        return {"topology": None, "plan": None, "error": str(error)}


def sessions(when: str, directory: str) -> dict[str, Report]:
    """Open sessions of every mode and scope with the id of the environment, and one with a generated id."""
    reports = {
        f"{mode}-{scope}": session(f"{when}-{mode}-{scope}", directory, mode, scope) for mode, scope in EACH_ONCE
    }
    run_id = os.environ.pop("WANDB_RUN_ID")
    reports["generated"] = session(f"{when}-generated", directory, "new", "global")
    os.environ["WANDB_RUN_ID"] = run_id
    return reports


def predictions() -> dict[str, Report]:
    return {f"{mode}-{scope}": doctor(mode, scope) for mode, scope in EACH_ONCE}


def open_process_group() -> None:
    who = Topology.detect()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", rank=who.global_rank, world_size=who.world_size)


def spawned(rank: int, directory: str, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    main(directory, "after")


def main(directory: str, *when: str) -> None:
    reports: dict[str, Any] = {"predicted": predictions()}
    if "before" in when:
        reports["before"] = sessions("before", directory)
    if "after" in when:
        if not dist.is_initialized():
            open_process_group()
        reports["after"] = sessions("after", directory)
    rank = Topology.detect().global_rank
    (Path(directory) / f"reports-{rank}.json").write_text(json.dumps(reports))
    if dist.is_initialized():
        dist.barrier()  # rank 0 may host the store that others need for their last run
        dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        mp.spawn(spawned, args=(sys.argv[2], f"{sys.argv[2]}/store"), nprocs=2)  # type: ignore[no-untyped-call]
    else:
        main(*sys.argv[1:])
