"""dist_wandb's own files in a run's directory: the sidecar, with data about the writer of an offline run, and stalls.

The file of a stall has its time, the verdict, an empty line, all stacks, and that it is over. Only its beginning and
its end are read, of which the contents are not trusted.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from dist_wandb.errors import ReadError, visible
from dist_wandb.job.topology import Topology
from dist_wandb.settings.plan import RANK_SCOPES, RUN_MODES, RunPlan, unit_run_id
from dist_wandb.wandb_files.small_files import Directory, open_ordinary, parse_json, read_small, write_small

SIDECAR_NAME = "dist-wandb.json"
_FORMAT = 1  # of the sidecar; the only one that this version supports
_LARGEST_WORLD = 1_000_000
_LONGEST_TEXT = 1000  # characters
_PRINTABLE = frozenset({"label", "run_id", "base_id"})
_KNOWN: dict[str, tuple[str, ...]] = {"run_mode": RUN_MODES, "rank_scope": RANK_SCOPES}

_MOST_STALLS = 3  # that are read, the last ones
_STALL = re.compile(r"stall-\d{8}-\d{6}-rank-\d{1,7}\.txt")
_OVER = re.compile(rb"\nThe training went on after (\d{1,9}) s\.\n\Z")
_HEAD, _TAIL = 8192, 64  # bytes
_LONGEST_TIME, _LONGEST_MESSAGE = 32, 300  # characters
_MOST_ENTRIES = 10_000  # of a directory


@dataclass(frozen=True)
class Sidecar:
    """The writer of a run: its rank, its job, and how its file is uploaded."""

    run_id: str | None  # `None` if W&B made it
    base_id: str | None  # the id that all run ids of the job are made from; `None` if W&B made the run's id
    run_mode: str  # `"auto"`, `"shared"` or `"new"`
    rank_scope: str  # `"global"` or `"worker"`
    shared: bool  # whether several ranks wrote to the run, each into a separate file
    label: str | None  # the writer's name within a shared run
    primary: bool  # whether the writer wrote the plain names of the run, and its exit code is that of the run
    group: str | None
    global_rank: int
    local_rank: int | None  # if known
    node_rank: int | None  # if known
    world_size: int
    num_nodes: int | None  # if known

    @classmethod
    def of(cls, plan: RunPlan, topology: Topology) -> Sidecar:
        own = {"run_id": unit_run_id(plan), "shared": plan.has_writers, "label": plan.label or plan.hardware}
        known = {**vars(topology), **vars(plan), **own}
        return cls(**{field.name: known[field.name] for field in fields(cls)})

    @classmethod
    def from_json(cls, record: Any) -> Sidecar:
        if not isinstance(record, dict):
            raise ValueError("not a JSON object")  # noqa: TRY004  # an error of the file's content
        if record.get("format") != _FORMAT:
            raise ValueError(f"format {reprlib.repr(record.get('format'))}, while this version reads {_FORMAT}")
        sidecar = cls(**{field.name: _checked(record, field.name, str(field.type)) for field in fields(cls)})
        if sidecar.global_rank >= sidecar.world_size:
            raise ValueError(f"rank {sidecar.global_rank} of {sidecar.world_size}")
        return sidecar


def write_sidecar(run_directory: Path, sidecar: Sidecar) -> None:
    content = json.dumps({"format": _FORMAT, **asdict(sidecar)}, indent=2) + "\n"
    write_small(run_directory / SIDECAR_NAME, content.encode(), mode=0o666)  # as readable as the run's own files


def read_sidecar(run_directory: Directory) -> Sidecar | None:
    path = run_directory.path / SIDECAR_NAME
    try:
        return Sidecar.from_json(parse_json(read_small(path, within=run_directory)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ReadError(
            f"{path}: not in dist_wandb's format ({error}), so the label and role of this writer are unknown. "
            "Restore the file, or remove it to treat this as an ordinary run."
        ) from None


def _checked(record: Mapping[str, Any], name: str, annotation: str) -> Any:
    if name not in record:
        raise ValueError(f"{name!r} is missing")
    value = record[name]
    if type(value).__name__.removesuffix("Type") not in annotation.split(" | "):  # of None: NoneType
        raise ValueError(f"{name}={reprlib.repr(value)}, which is not of type {annotation.replace('|', 'or')}")
    if type(value) is int and not 0 <= value <= _LARGEST_WORLD:
        raise ValueError(f"{name}={reprlib.repr(value)}, which is not between 0 and {_LARGEST_WORLD}")
    if type(value) is str and (
        len(value) > _LONGEST_TEXT or "\0" in value or (name in _PRINTABLE and not value.isprintable())
    ):
        raise ValueError(f"{name}={reprlib.repr(value)}, which dist_wandb never writes")
    if name in _KNOWN and value not in _KNOWN[name]:
        raise ValueError(f"{name}={reprlib.repr(value)}, which is not one of {', '.join(_KNOWN[name])}")
    return value


class StoredStall(NamedTuple):
    """A stall of a run."""

    time: str
    message: str
    lasted: int | None  # seconds; `None` if the training is not known to have gone on
    path: str

    def __str__(self) -> str:
        over = "" if self.lasted is None else f" The training went on after {self.lasted} s."
        return f"{self.time}: {self.message}{over} {self.path}"


def write_stall(folder: Path, rank: int, message: str, stacks: Iterable[str]) -> Path:
    """Write the file of a stall at once, before the job may be killed; return its path."""
    path = folder.absolute() / f"stall-{time.strftime('%Y%m%d-%H%M%S')}-rank-{rank}.txt"
    content = "\n".join([time.strftime("%Y-%m-%d %H:%M:%S %z"), message, "", *stacks])
    write_small(path, content.encode("utf-8", "replace"), mode=0o644)
    return path


def end_stall(path: str, seconds: float) -> None:
    with os.fdopen(open_ordinary(Path(path), os.O_WRONLY | os.O_APPEND), "ab") as file:
        file.write(f"\nThe training went on after {seconds:.0f} s.\n".encode())


def stalls_of(directories: Iterable[Directory]) -> tuple[list[StoredStall], int]:
    """Return the last stalls in the directories of a run's writers, the oldest first, and the number of all."""
    found: dict[Path, Directory] = {}
    for run in directories:
        with suppress(OSError, ReadError), run.opened("files") as folder, os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, _MOST_ENTRIES)]
            found |= {run.path / "files" / name: run for name in names if _STALL.fullmatch(name)}
    stalls = []
    for path in sorted(found, key=lambda path: path.name)[-_MOST_STALLS:]:
        with suppress(OSError, ReadError), os.fdopen(open_ordinary(path, within=found[path]), "rb") as file:
            when, message, *_ = [*file.read(_HEAD).decode("utf-8", "replace").split("\n"), ""]
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            over = _OVER.search(file.read(_TAIL))
            lasted = int(over[1]) if over else None
            if len(message) > _LONGEST_MESSAGE:
                message = f"{message[: _LONGEST_MESSAGE - 1]}…"
            stalls.append(StoredStall(visible(when[:_LONGEST_TIME]), visible(message), lasted, str(path)))
    return stalls, len(found)
