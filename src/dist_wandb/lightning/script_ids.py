"""Pass base ids from Lightning's main process to the further processes of the script that its ddp strategy starts.

Config and metadata of a run that is open already are passed as well: those processes may read them before `fit`.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dist_wandb.errors import ReadError
from dist_wandb.topology.launch import Launch, node_identity
from dist_wandb.wandb_files.small_files import LIMIT, parse_json, read_small, write_small


class ScriptIds:
    """Base ids that Lightning's main process passes to the further processes of the script, one per logger.

    These processes need the id before a process group exists, and know only that the main process is their parent. So
    the main process keeps its ids, until it ends, in a small file named after its process id, in the directory for
    temporary files, or in another `directory`. The environment, which the processes inherit, belongs to the user:
    nothing is written there.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._next = 0
        self._offered: list[str | list[Any]] = []
        self._written: tuple[int, Path] | None = None  # the process that wrote the file, and its path

    def next_id(self, proposal: str) -> tuple[int, str]:
        """Return number and base id of the next logger: the parent's id, else `proposal`, which is then passed on."""
        number, self._next = self._next, self._next + 1
        launch = Launch.detect()
        if not launch.is_lightning_child:
            self.offer(number, proposal)
            return number, proposal
        ids = self._read(self._path(launch.parent_pid))
        return number, ids[number][0] if number < len(ids) and ids[number][0] else proposal

    def run_of(self, number: int) -> Mapping[str, Any]:
        """Return what the main process has told of the run of logger `number`; nothing if it has not opened it."""
        launch = Launch.detect()
        offered = self._read(self._path(launch.parent_pid)) if launch.is_lightning_child else []
        run = offered[number][1] if number < len(offered) else None
        return run if isinstance(run, dict) else {}

    def offer(self, number: int, base_id: str, run: Mapping[str, Any] | None = None) -> None:
        """Pass the base id of logger `number`, and what to tell of its run, to processes started from now on."""
        if self._written is None or self._written[0] != os.getpid():
            self._offered = []
            self._written = os.getpid(), self._path(os.getpid())
            atexit.register(self._remove_file)
        self._offered += [""] * (number + 1 - len(self._offered))
        self._offered[number] = base_id if run is None else [base_id, run]
        content = json.dumps(self._offered).encode()
        if len(content) > LIMIT:
            self._offered[number] = base_id
            content = json.dumps(self._offered).encode()
        with suppress(OSError):  # without the file, further processes get the id once there is a process group
            write_small(self._written[1], content)

    def _path(self, process: int) -> Path:
        """The file of one process of one user on one machine or container: several may share the directory."""
        owner = hashlib.sha256(f"{node_identity()}/{os.getuid()}".encode()).hexdigest()[:12]
        return (self._directory or Path(tempfile.gettempdir())) / f"dist-wandb-{owner}-{process}.json"

    def _read(self, path: Path) -> list[tuple[str, Any]]:
        """The ids and runs in a file that belongs to this user; empty without such a file."""
        with suppress(OSError, ValueError, ReadError):
            found: Any = parse_json(read_small(path, owned=True))
            items = found if isinstance(found, list) else []
            offered = [item if isinstance(item, list) else [item, None] for item in items]
            return [(str(base_id), run) for base_id, run in offered]
        return []

    def _remove_file(self) -> None:
        if self._written is not None and self._written[0] == os.getpid():  # not in a fork
            with suppress(OSError):
                self._written[1].unlink()
