"""A process whose children of every start method of Python, and workers of a DataLoader, log into its run."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import dist_wandb

METHODS = ("spawn", "fork", "forkserver")
_given: list[dist_wandb.Session] = []


def work(run: dist_wandb.Session, method: str) -> None:
    for step in range(3):
        run.log({f"{method}/child": float(step)}, step=step)


def use(run: dist_wandb.Session) -> None:
    _given[:] = [run]


def work_in_pool(job: tuple[str, float]) -> None:
    method, number = job
    _given[0].log({f"{method}/pool": number})


class Logging:
    """A dataset whose items log in the worker that creates them."""

    def __init__(self, run: dist_wandb.Session) -> None:
        self.run = run

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        self.run.log({"in_worker": float(index)}, step=index)
        if index >= 6:  # the last one of each of two workers
            assert self.run.flush()
            self.run.finish()  # ends nothing here
        return float(index)


def main(directory: str) -> None:
    from torch.utils.data import DataLoader  # here, because each spawned child imports this module

    with dist_wandb.init("tests", id="exp", dir=directory) as run:
        for method in METHODS:
            context: Any = multiprocessing.get_context(method)
            child = context.Process(target=work, args=(run, method))
            child.start()
            with context.Pool(2, initializer=use, initargs=(run,)) as pool:
                pool.map(work_in_pool, [(method, float(number)) for number in range(4)])
            child.join()
            assert child.exitcode == 0
        data: Any = Logging(run)
        assert len(list(DataLoader(data, num_workers=2, multiprocessing_context="fork"))) == 8
        run.log({"after": 1.0})


if __name__ == "__main__":
    main(*sys.argv[1:])
