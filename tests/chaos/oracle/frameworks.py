"""Compare fixed scripts of Lightning, Accelerate and the Hugging Face Trainer with what their own classes leave."""

from __future__ import annotations

import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from oracle.comparing import Difference, Terms, X, compare, side_by_side
from oracle.recorded import Recorded, recorded_runs
from oracle.running import python_path
from processes import clean_environment, run_job
from ranks import rank_commands

_HERE = Path(__file__).parent
_LONGEST = 150.0  # seconds for a job, on a busy machine


@dataclass(frozen=True)
class Framework:
    name: str
    file: str  # the file that plays them
    scripts: tuple[str, ...]  # their names, which are the ids of their runs
    x: str = ""  # name of our x axis; empty if stock has the same one
    axes: frozenset[str] = frozenset()  # names of the user's x axes
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
    Framework("Accelerate", "track.py", ("steps", "calls", "run"), x=X, axes=frozenset({"samples"})),
    Framework(
        "Trainer",
        "train.py",
        ("cadences", "own"),
        joined=frozenset({"train/global_step", "train/epoch"}),
        unlike=_OF_TRAINER | _ARGUMENTS,
    ),
)


@dataclass(frozen=True)
class FrameworkResult:
    name: str  # names of framework and script
    ranks: int
    differences: list[Difference]  # what differs from stock, except what is intended
    rows: str  # rows of both runs, side by side

    def __str__(self) -> str:
        found = "\n".join(f"  {one.kind}: {one.text}" for one in self.differences) or "  equal"
        return f"{self.name}, {self.ranks} ranks\n{found}\nall rows:\n{self.rows}"


def judge(framework: Framework, ranks: int = 2) -> list[FrameworkResult]:
    """Run the scripts of a framework with its own class and with ours, and compare them."""
    with ThreadPoolExecutor(2) as pool:
        stock, ours = pool.map(lambda which: _played(framework, which, ranks), ("stock", "ours"))
    terms = Terms(
        x=framework.x,
        has_peers=ranks > 1,
        axes=framework.axes,
        joined=framework.joined,
        unlike=framework.unlike,
    )
    return [
        FrameworkResult(
            f"{framework.name}, {name}",
            ranks,
            compare(stock[name], ours[name], terms),
            side_by_side(stock[name], ours[name], terms),
        )
        for name in framework.scripts
    ]


def _played(framework: Framework, which: str, ranks: int) -> dict[str, Recorded]:
    directory = Path(tempfile.mkdtemp(prefix="oracle-"))
    script = _HERE / framework.file
    try:
        if which == "stock" or framework.starts_ranks or ranks == 1:
            commands: tuple[list[str | Path], ...] = ([sys.executable, script, which, directory],)
        else:
            commands = rank_commands(script, which, directory, world_size=ranks)
        environment = clean_environment(WANDB_SILENT="true", PYTHONPATH=python_path())
        run_job(*commands, cwd=directory, environment=environment, timeout=_LONGEST).check()
        return recorded_runs(directory, list(framework.scripts))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
