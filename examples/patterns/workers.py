"""Processes that a script starts log into its run: pass it to them like any other argument.

    python workers.py pool                            # the workers of a multiprocessing.Pool
    python workers.py child --start-method spawn      # one multiprocessing.Process

Their rows arrive in the run of the process that opened it, if they log before it finishes the run. This also works in
the ranks of a torchrun job: values are reduced with those from the children of the other ranks.
"""

from __future__ import annotations

import argparse
import multiprocessing
from functools import partial

from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
from sklearn.model_selection import cross_val_score
from sklearn.svm import SVC

import dist_wandb


def pool_of_workers() -> None:
    """Each worker of a pool logs its results. (The run may also be passed by `initializer` and `initargs`.)"""
    with dist_wandb.init("digits", name="pool") as run:
        with multiprocessing.Pool(2) as pool:
            accuracies = pool.map(partial(cross_validate, run), [0.01, 0.1, 1.0, 10.0])
        run.summary["best"] = max(accuracies)


def cross_validate(run: dist_wandb.Session, strength: float) -> float:
    digits = load_digits()
    accuracy = float(cross_val_score(SVC(C=strength), digits.data, digits.target, cv=3).mean())
    run.log({"C": strength, "accuracy": accuracy})
    return accuracy


def child_process() -> None:
    """A child process gets the run as an argument; parent and child log at the same time."""
    with dist_wandb.init("digits", name="child") as run:
        child = multiprocessing.Process(target=train, args=(run, "child", 1e-3))
        child.start()
        train(run, "parent", 1e-5)
        child.join()


def train(run: dist_wandb.Session, name: str, alpha: float) -> None:
    digits = load_digits()
    model = SGDClassifier(alpha=alpha, random_state=0)
    for epoch in range(5):
        model.partial_fit(digits.data[:1400], digits.target[:1400], classes=range(10))
        run.log({f"{name}/accuracy": model.score(digits.data[1400:], digits.target[1400:])}, step=epoch)


PATTERNS = {"pool": pool_of_workers, "child": child_process}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("patterns", nargs="+", choices=PATTERNS)
    parser.add_argument("--start-method", default="spawn", choices=multiprocessing.get_all_start_methods())
    args = parser.parse_args()
    multiprocessing.set_start_method(args.start_method)
    for pattern in args.patterns:
        PATTERNS[pattern]()
