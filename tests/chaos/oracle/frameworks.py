"""Compare fixed scripts of Lightning, Accelerate and the Hugging Face Trainer with what their own classes leave."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from oracle.comparing import Terms, X, compare
from oracle.running import Runs, played, started

_HERE = Path(__file__).parent
_LONGEST = 150.0  # seconds for a job, on a busy machine


@dataclass(frozen=True)
class Framework:
    name: str
    file: str  # the file that plays them
    scripts: tuple[str, ...]  # their names, which are the ids of their runs
    x: str = ""  # name of our x axis; empty if stock has the same one
    joined: frozenset[str] = frozenset()  # names that each call at one step has, if stock gives W&B no step
    unlike: frozenset[str] = frozenset()  # names whose values differ by nature
    starts_ranks: bool = False  # whether the framework starts the ranks itself


_TIMES = ("runtime", "samples_per_second", "steps_per_second")
_OF_TRAINER = frozenset(
    {
        *(f"{part}/{time}" for part in ("train", "eval") for time in _TIMES),
        *(f"train_{time}" for time in _TIMES),
        *("total_flos", "train/total_flos", "train/train_runtime", "train/train_samples_per_second"),
        *("train/train_steps_per_second",),
    }
)
"""Times, and numbers that grow with the number of ranks."""
_ARGUMENTS = frozenset({"local_rank", "logging_dir", "output_dir", "report_to"})
"""Arguments of a Trainer that must differ."""

FRAMEWORKS = (
    Framework(
        "Lightning",
        "fit.py",
        ("epochs", "experiment"),
        joined=frozenset({"trainer/global_step", "epoch"}),
        starts_ranks=True,
    ),
    Framework("Accelerate", "track.py", ("steps", "calls", "run"), x=X),
    Framework(
        "Trainer",
        "train.py",
        ("cadences", "own"),
        joined=frozenset({"train/global_step", "train/epoch"}),
        unlike=_OF_TRAINER | _ARGUMENTS,
    ),
)


def judge(framework: Framework, ranks: int = 2) -> list[str]:
    """Run the scripts of a framework with its own class and with ours, and return what differs."""
    with ThreadPoolExecutor(2) as pool:
        stock, ours = pool.map(lambda which: _played(framework, which, ranks), ("stock", "ours"))
    terms = Terms(
        x=framework.x,
        has_peers=ranks > 1,
        joined=framework.joined,
        unlike=framework.unlike,
    )
    return [
        f"{name}: {difference}" for name in framework.scripts for difference in compare(stock[name], ours[name], terms)
    ]


def _played(framework: Framework, which: str, ranks: int) -> Runs:
    ranks = 1 if which == "stock" or framework.starts_ranks else ranks
    script = _HERE / framework.file
    return played(framework.scripts, lambda directory: started(script, which, directory, ranks=ranks), _LONGEST)
