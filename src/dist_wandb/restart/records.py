"""The record that one start of a job writes for a later one: validated when read, accessible only to this user."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dist_wandb.errors import ConfigurationError, ReadError
from dist_wandb.notices import Notices
from dist_wandb.runs import argument_checks
from dist_wandb.settings.plan import RANK_SCOPES, RUN_MODES
from dist_wandb.wandb_files.small_files import own_directory, parse_json, read_small, write_small

_log = logging.getLogger("dist_wandb")

_FORMAT = 1
_notices = Notices()


@dataclass(frozen=True)
class RestartRecord:
    """A record that one start of a job writes for a later one."""

    base_id: str  # from which all run ids of the job are made; in a world of one, the run's id
    session: str  # name of the session, because a job may have several
    project: str | None  # name of the W&B project, if the user gave one
    entity: str | None  # owner of the project, if the user gave one
    run_mode: str
    rank_scope: str
    world_size: int
    job: str | None  # the launcher's name for the job, by which it can be found again, if there is one
    requeues: int  # how often SLURM had requeued the job

    @classmethod
    def read(cls, path: Path) -> RestartRecord | None:
        """Read a record; `None` if there is none or, with a warning, if it is invalid or belongs to another user."""
        try:
            return cls.read_own(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, ReadError) as error:
            if _notices.is_first(path):
                _log.warning(
                    "dist_wandb: %s is not a valid restart record of this job (%s). It is ignored, and new runs are "
                    "opened. To continue a known run, pass id= and resume='allow'.",
                    path,
                    error,
                )
            return None

    @classmethod
    def read_own(cls, path: Path) -> RestartRecord:
        """Read a record of this process's user.

        Raises `FileNotFoundError` if there is none, `ReadError` if it is not a file or another user's, `ValueError` if
        it is not a restart record, or another `OSError`.
        """
        return cls.of(parse_json(read_small(path, owner=own_directory(path.parent))))

    @classmethod
    def of(cls, record: Any) -> RestartRecord:
        """Create a record from decoded JSON. Raises `ValueError` if it is not a restart record."""
        if not isinstance(record, dict) or record.get("format") != _FORMAT:
            raise ValueError(f"it is not a restart record of format {_FORMAT}")
        given: dict[str, Any] = {field.name: record.get(field.name) for field in fields(cls)}
        texts = ("base_id", "session", "run_mode", "rank_scope")
        numbers = ("world_size", "requeues")
        if not all(type(given[name]) is (str if name in texts else int) for name in texts + numbers):
            raise ValueError("a part is missing or has the wrong type")
        if not all(isinstance(given[name], str | None) for name in ("project", "entity", "job")):
            raise ValueError("a part is not text")
        if given["run_mode"] not in RUN_MODES or given["rank_scope"] not in RANK_SCOPES:
            raise ValueError("its mode or scope is unknown")
        try:
            argument_checks.check_id(given["base_id"], "base_id")
        except ConfigurationError as error:
            raise ValueError(str(error)) from None
        return cls(**given)

    def write(self, path: Path) -> None:
        """Write the record so that only this process's user can read and write it.

        Raises `ReadError` if the directory is a link or belongs to another user, and `OSError` if it cannot be written.
        """
        with suppress(FileExistsError):
            path.parent.parent.mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(mode=0o700)
        own_directory(path.parent)
        write_small(path, (json.dumps(self.as_json, indent=2) + "\n").encode())

    @property
    def as_json(self) -> dict[str, Any]:
        """The record as a JSON object."""
        return {"format": _FORMAT, **asdict(self)}
