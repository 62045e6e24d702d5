"""The variables of all launchers in the environment, and warnings if they cast doubt on the topology of this process.

The startup warnings of a session and ``dist-wandb doctor`` use it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from dist_wandb.errors import TopologyError
from dist_wandb.topology.launchers import LAUNCHERS, RANKS_ALONE, SLURM, Environ, Launcher, Readings, started_by
from dist_wandb.topology.model import Topology

Status = Literal[
    "used",  # the ranks are taken from it
    "agrees",  # with the used one
    "contradicts",  # the used one, because it is stale or meant for another process
    # another rank of as many processes: either may be stale, such as `export RANK=$SLURM_PROCID` in a batch script
    "other rank",
    "outer",  # has probably started the used launcher, as srun or mpirun starts a torchrun on each node
    "incomplete",  # lacks the global rank or the world size
    "rank alone",  # a rank above 0 of a launcher whose variables do not give more
    "unreadable",  # a variable is malformed
    "not asked",  # would be used, but an earlier launcher is incomplete or unreadable
    "not this process",  # belongs to a batch shell, not to a process that the shell started
]


@dataclass(frozen=True)
class DetectedLauncher:
    """The variables of one launcher in the environment, and their status."""

    name: str
    variables: Environ  # those that are set
    status: Status
    reason: str = ""  # empty if there is nothing to add

    @property
    def assignments(self) -> str:
        """The variables as ``NAME=VALUE, NAME=VALUE``."""
        return ", ".join(f"{name}={value}" for name, value in self.variables.items())


def detected_launchers(environ: Environ | None = None) -> list[DetectedLauncher]:
    """Return all launchers that have variables in the environment, by descending priority."""
    environ = os.environ if environ is None else environ
    found: list[DetectedLauncher] = []
    used: tuple[Launcher, Readings] | None = None
    with suppress(TopologyError):
        used = started_by(environ)
    seen: set[str] = set()
    for launcher in LAUNCHERS:
        names = dict.fromkeys((*launcher.present, *launcher.variables.values()))
        own = {name: environ[name] for name in names if name in environ and name not in seen}
        if own and (launcher is SLURM or launcher.is_present(environ)):
            seen.update(own)
            found.append(DetectedLauncher(launcher.name, own, *_status_of(launcher, environ, used)))
    return found if used else [*found, *_ranks_alone(environ, seen)]


def doubts_of(found: Sequence[DetectedLauncher], topology: Topology) -> list[str]:
    """Return warnings about launchers that seem to have started this process as another rank than that of `topology`.

    The topology is that of the launchers' variables.
    """
    used = next((launcher for launcher in found if launcher.status == "used"), None)
    doubts: list[str] = []
    for launcher in found:
        if launcher.status == "rank alone":
            doubts.append(
                f"This process is treated as a job of its own, but {launcher.name}'s {launcher.reason}. If it is one "
                "of several ranks, open the run after init_process_group, or set RANK and WORLD_SIZE."
            )
        elif used is not None and launcher.status == "other rank":
            doubts.append(
                f"{used.name} and {launcher.name} give this process different ranks: {launcher.reason}. Unset those "
                f"that are stale: {used.assignments} (a batch script may have exported them); or {launcher.assignments}"
            )
        elif used is not None and launcher.status == "contradicts" and topology.world_size == 1:
            doubts.append(
                f"{used.name} makes this process a job of its own ({used.assignments}), but {launcher.name} seems to "
                f"have started it: {launcher.reason}. If it is one of several ranks, unset the former (an image or a "
                f"shell may have set them) or open the run after init_process_group; else unset {launcher.assignments}"
            )
    return doubts


def _status_of(launcher: Launcher, environ: Environ, used: tuple[Launcher, Readings] | None) -> tuple[Status, str]:
    if not launcher.is_present(environ):
        return (
            "not this process",
            "srun has not started this process: the variables are those of the job, or of its batch shell",
        )
    if used is not None and launcher is used[0]:
        return "used", ""
    try:
        readings = launcher.read(environ)
    except TopologyError as error:
        return "unreadable", str(error)
    if used is not None:
        return _compared(readings, used[1])
    if readings.missing:
        return "incomplete", f"the {' and '.join(readings.missing)} of this process is missing"
    return "not asked", "launchers before it have priority"


def _compared(readings: Readings, used: Readings) -> tuple[Status, str]:
    """Return the status of readings that are not used. An outer launcher may have set them: inner ones come first."""
    if readings.agrees_with(used):
        return "agrees", ""
    reason = f"it set {_ranks(readings)}, but {_ranks(used)} is used"
    if _ranks(readings) == _ranks(used):
        values = ((name, value, used.values.get(name, value)) for name, value in readings.values.items())
        reason = " and ".join(f"it set {name}={theirs}, not {ours}" for name, theirs, ours in values if theirs != ours)
    if not readings.missing:
        theirs, ours = readings.values["world_size"], used.values["world_size"]
        if theirs < ours or theirs == used.values.get("num_nodes", 1) > 1:
            return "outer", f"{reason}; it may have started the launcher that is used"
        if theirs == ours and readings.values["global_rank"] != used.values["global_rank"]:
            return "other rank", reason
    return "contradicts", reason


def _ranks_alone(environ: Environ, seen: set[str]) -> list[DetectedLauncher]:
    """Return launchers that give only a rank above 0, which shows that they have started other processes as well."""
    return [
        DetectedLauncher(
            launcher, {name: environ[name]}, "rank alone", f"{name}={environ[name]} shows that there are other ranks"
        )
        for name, launcher in RANKS_ALONE.items()
        if name not in seen and environ.get(name, "0").strip("0")
    ]


def _ranks(readings: Readings) -> str:
    return f"rank {readings.values.get('global_rank', '?')} of {readings.values.get('world_size', '?')}"
