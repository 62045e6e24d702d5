"""A process that starts children with every start method of Python; each logs into the run that was passed to it."""

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


def main(directory: str) -> None:
    with dist_wandb.init("tests", id="exp", dir=directory) as run:
        for method in METHODS:
            context: Any = multiprocessing.get_context(method)
            child = context.Process(target=work, args=(run, method))
            child.start()
            with context.Pool(2, initializer=use, initargs=(run,)) as pool:
                pool.map(work_in_pool, [(method, float(number)) for number in range(4)])
            child.join()
            assert child.exitcode == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
