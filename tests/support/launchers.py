"""The launchers that tests use, or whose variables they set. ``docs/evidence.md`` has a table of them.

``python tests/support/launchers.py`` rewrites the table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from processes import Command, free_port, torchrun, with_variables
from stored import EACH_ONCE

How = Literal["real", "processes", "variables"]
When = Literal["before", "after"]
Environ = Mapping[str, str]

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "evidence.md"
_UNIT = ROOT / "tests" / "unit"
_SLURM: dict[str, list[dict[str, str]]] = json.loads((_UNIT / "slurm_22_05.json").read_text())["layouts"]
_RECORDED: dict[str, Any] = json.loads((_UNIT / "recorded_variables.json").read_text())["launchers"]
_BIN = Path(sys.executable).parent
_TORCHRUN: Command = [sys.executable, "-m", "torch.distributed.run"]
_MARKS = ("<!-- the table begins -->\n", "<!-- the table ends -->\n")
_MEETS = " (ranks meet)"
_IN_WORDS = {"real": "**run**", "processes": "simulated", "variables": "read"}


@dataclass(frozen=True)
class Launcher:
    """One way to start a job of several ranks."""

    name: str  # in the table
    how: How  # whether tests start jobs with it, start processes with its variables, or only read its variables
    layouts: tuple[tuple[int, ...], ...]  # that are tested: the number of ranks on each node
    start: Callable[[Command], list[Command]] | None = None  # returns the commands of a job
    variables: Callable[[tuple[int, ...]], list[Environ]] | None = None  # of every rank of a layout
    when: tuple[When, ...] = ("before", "after")  # a process group is initialised
    meets: bool = False  # whether ranks can communicate before that, through a store of the launcher
    names_job: bool = False  # whether ranks derive the same id without communication
    local_ranks: tuple[int, ...] = ()  # of each global rank, if they are not consecutive on each node

    def commands(self, script: Path, *arguments: object) -> list[Command]:
        words: Command = [script, *(str(argument) for argument in arguments), *self.when]
        if self.start is not None:
            return self.start(words)
        assert self.variables is not None
        everywhere = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return [with_variables({**everywhere, **rank}, *words) for rank in self.variables(self.layouts[0])]

    def cells(self) -> set[tuple[str, str, str]]:
        """Return the promises of the table: `(when, run mode, rank scope)`."""
        return {(when, mode, scope) for when in self.when for mode, scope in EACH_ONCE}


def variables(pairs: str) -> dict[str, str]:
    """Return variables that are written as ``NAME=VALUE NAME=VALUE``."""
    return dict(pair.split("=") for pair in pairs.split())


def _ranks(layout: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    places = ((node, local) for node, size in enumerate(layout) for local in range(size))
    return ((rank, node, local) for rank, (node, local) in enumerate(places))


# --- started for real -------------------------------------------------------------------------------------------------


def _torchrun_by_environment(words: Command) -> list[Command]:
    """torchrun as configured by Kubeflow's Trainer, where each rank has one visible device."""
    place = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    return [
        with_variables(
            {**place, "PET_NODE_RANK": str(node), "PET_NPROC_PER_NODE": str(size)},
            "-m",
            *("torch.distributed.run", "--virtual-local-rank", *words),
        )
        for node, size in enumerate((1, 3))
    ]


def _torchrun_elastic(words: Command) -> list[Command]:
    meeting = f"127.0.0.1:{free_port()}"
    place: Command = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--rdzv-id", "uneven"]
    return [[*_TORCHRUN, *place, "--nproc-per-node", size, *words] for size in ("2", "3")]


def _accelerate_launch(words: Command) -> list[Command]:
    options = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    port = f"--main_process_port={free_port()}"
    return [[sys.executable, "-m", "accelerate.commands.launch", *options, port, *words]]


def _spawn(words: Command) -> list[Command]:
    script, directory, *_ = words
    return [[sys.executable, script, "spawn", directory]]


def _open_mpi(words: Command) -> list[Command]:
    """Open MPI 5 by its launcher PRRTE, because MPICH has installed its own `mpirun` under the same path."""
    options = ["--personality", "ompi", "--allow-run-as-root", "--oversubscribe", "-n", "4"]
    return [[*_meeting_place(), _BIN / "prterun", *options, sys.executable, *words]]


def _mpich(words: Command) -> list[Command]:
    return [[*_meeting_place(), _BIN / "mpiexec.hydra", "-n", "4", sys.executable, *words]]


def _meeting_place() -> Command:
    return ["env", "MASTER_ADDR=127.0.0.1", f"MASTER_PORT={free_port()}"]


# --- by their variables -----------------------------------------------------------------------------------------------


def _slurm(layout: tuple[int, ...]) -> list[Environ]:
    """As recorded: see ``tests/unit/slurm_22_05.json``."""
    return list(_SLURM[SLURM_COMMANDS[layout]])


SLURM_COMMANDS = {
    (2, 2): "srun -N2 -n4 --ntasks-per-node=2",
    (4,): "srun -N1 -n4",
    (3, 1): "srun -N2 -n4 -m plane=3",
}


def _recorded(launcher: str) -> Callable[[tuple[int, ...]], list[Environ]]:
    """As recorded: see ``tests/unit/recorded_variables.json``."""
    return lambda layout: list(_RECORDED[launcher]["layouts"]["+".join(map(str, layout))])


def _pytorch_job(layout: tuple[int, ...]) -> list[Environ]:
    """One process per pod, without torchrun; the pods of this test share a host.

    Source: ``setPodEnv`` in ``pkg/controller.v1/pytorch/envvar.go`` of kubeflow/training-operator.
    """
    world = {"WORLD_SIZE": str(sum(layout)), "PET_NPROC_PER_NODE": "1", "PET_NNODES": str(sum(layout))}
    return [{**world, "RANK": str(rank), "PET_NODE_RANK": str(rank)} for rank, _, _ in _ranks(layout)]


LAUNCHERS = (
    Launcher("torchrun --standalone", "real", ((2,),), lambda words: [*torchrun(*words)], when=("after",)),
    Launcher("torchrun, static, two nodes", "real", ((2, 2),), lambda words: [*torchrun(*words, nodes=2)], meets=True),
    Launcher(
        "torchrun --virtual-local-rank, by PET_* (Kubeflow Trainer), uneven nodes",
        "real",
        ((1, 3),),
        _torchrun_by_environment,
        meets=True,
    ),
    Launcher("torchrun --nnodes 1:2, c10d, uneven nodes", "real", ((2, 3),), _torchrun_elastic, when=("after",)),
    Launcher("accelerate launch", "real", ((2,),), _accelerate_launch, meets=True),
    Launcher("mp.spawn", "real", ((2,),), _spawn, when=("after",)),
    Launcher("Open MPI: mpirun", "real", ((4,),), _open_mpi, names_job=True),
    Launcher("MPICH: mpiexec", "real", ((4,),), _mpich),
    Launcher("SLURM: srun, as recorded", "processes", ((2, 2),), variables=_slurm, names_job=True),
    Launcher("SLURM: srun, as recorded", "variables", ((4,), (3, 1)), variables=_slurm),
    Launcher(
        "DeepSpeed, as recorded",
        "processes",
        ((1, 3),),
        variables=_recorded("DeepSpeed"),
        local_ranks=(0, 1, 2, 0),  # on uneven nodes, the local rank is a remainder of the global rank
    ),
    Launcher("DeepSpeed, as recorded", "variables", ((2,), (1, 1), (2, 2)), variables=_recorded("DeepSpeed")),
    Launcher("Kubeflow PyTorchJob without torchrun", "processes", ((2,),), variables=_pytorch_job, when=("after",)),
    Launcher("Composer, as recorded", "variables", ((2,), (2, 2), (1, 3)), variables=_recorded("Composer")),
    Launcher("Ray Train, as recorded", "variables", ((2,), (4,)), variables=_recorded("Ray Train")),
)
JOBS = tuple(launcher for launcher in LAUNCHERS if launcher.how != "variables")


def table() -> str:
    """Return the matrix of launchers in Markdown; each line holds for every run mode and rank scope."""
    lines = [_row("launcher", "ranks of each node", "run opened", "every mode and scope"), "|---" * 4 + "|\n"]
    for launcher in LAUNCHERS:
        layouts = ", ".join(" + ".join(map(str, layout)) for layout in launcher.layouts)
        lines.append(_row(launcher.name, layouts, _circumstances(launcher), _IN_WORDS[launcher.how]))
    return "".join(lines)


def _circumstances(launcher: Launcher) -> str:
    if launcher.how == "variables":
        return ""
    return ", ".join(f"{when}{_MEETS * (when == 'before' and launcher.meets)}" for when in launcher.when)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def table_in(text: str) -> str:
    return text.partition(_MARKS[0])[2].partition(_MARKS[1])[0]


if __name__ == "__main__":
    before, _, after = DOCUMENT.read_text(encoding="utf-8").partition(_MARKS[0])
    DOCUMENT.write_text(before + _MARKS[0] + table() + _MARKS[1] + after.partition(_MARKS[1])[2], encoding="utf-8")
