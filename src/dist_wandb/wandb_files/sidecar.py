"""The sidecar: a file in an offline run's directory with dist_wandb's data about the writer."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dist_wandb.errors import ReadError
from dist_wandb.settings.plan import RANK_SCOPES, RUN_MODES, RunPlan, unit_run_id
from dist_wandb.topology.model import Topology
from dist_wandb.wandb_files.small_files import Directory, parse_json, read_small, write_small

SIDECAR_NAME = "dist-wandb.json"
SIDECAR_FORMAT = 1
"""The only sidecar format that this version supports."""

_LARGEST_WORLD = 1_000_000
_LONGEST_TEXT = 1000  # characters
_PRINTABLE = frozenset({"label", "run_id", "base_id"})
_KNOWN: dict[str, tuple[str, ...]] = {"run_mode": RUN_MODES, "rank_scope": RANK_SCOPES}


@dataclass(frozen=True)
class Sidecar:
    """The writer of a run: its rank, its job, and how its file is uploaded."""

    run_id: str | None  # `None` if W&B made it
    base_id: str | None  # the id that all run ids of the job are made from; `None` if W&B made the run's id
    run_mode: str  # `"auto"`, `"shared"` or `"new"`
    rank_scope: str  # `"global"` or `"worker"`
    shared: bool  # whether several ranks wrote to the run, each into a separate file
    label: str | None  # the writer's name within a shared run
    primary: bool  # whether the writer wrote the plain names of the run
    update_finish_state: bool  # whether the writer's exit code is that of the run
    group: str | None
    global_rank: int
    local_rank: int | None  # if known
    node_rank: int | None  # if known
    world_size: int
    num_nodes: int | None  # if known

    @classmethod
    def of(cls, plan: RunPlan, topology: Topology) -> Sidecar:
        """Return the sidecar of one rank."""
        return cls(
            run_id=unit_run_id(plan),
            base_id=plan.base_id,
            run_mode=plan.run_mode,
            rank_scope=plan.rank_scope,
            shared=plan.has_writers,
            label=plan.label or plan.hardware,
            primary=plan.primary,
            update_finish_state=plan.primary,
            group=plan.group,
            global_rank=topology.global_rank,
            local_rank=topology.local_rank,
            node_rank=topology.node_rank,
            world_size=topology.world_size,
            num_nodes=topology.num_nodes,
        )

    @classmethod
    def from_json(cls, record: Any) -> Sidecar:
        """Check a parsed sidecar. Raises `ValueError` if it is not in dist_wandb's format."""
        if not isinstance(record, dict):
            raise ValueError("not a JSON object")  # noqa: TRY004  # an error of the file's content
        if record.get("format") != SIDECAR_FORMAT:
            raise ValueError(f"format {reprlib.repr(record.get('format'))}, while this version reads {SIDECAR_FORMAT}")
        sidecar = cls(**{field.name: _checked(record, field.name, str(field.type)) for field in fields(cls)})
        if sidecar.global_rank >= sidecar.world_size:
            raise ValueError(f"rank {sidecar.global_rank} of {sidecar.world_size}")
        return sidecar


def write_sidecar(run_directory: Path, sidecar: Sidecar) -> None:
    """Write a sidecar into a run's directory. Raises `OSError`."""
    content = json.dumps({"format": SIDECAR_FORMAT, **asdict(sidecar)}, indent=2) + "\n"
    write_small(run_directory / SIDECAR_NAME, content.encode(), mode=0o666)  # as readable as the run's own files


def read_sidecar(run_directory: Directory) -> Sidecar | None:
    """Read the sidecar in a run's directory; `None` if there is none. Raises `ReadError` if it is invalid."""
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
