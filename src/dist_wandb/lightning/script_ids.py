"""Base ids, passed from Lightning's main process to the processes that its ddp strategy starts of the same script."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from dist_wandb.errors import ReadError
from dist_wandb.topology.launch import Launch, node_identity
from dist_wandb.wandb_files.small_files import parse_json, read_small, write_small


class ScriptIds:
    """Base ids that Lightning's main process passes to the further processes of the script, one per logger.

    These need the id before any process group exists, and know of the main process only that it is their parent. So it
    keeps its ids in a small file named by its process id, in the directory for temporary files, until it ends. The
    environment, which they inherit, is the user's: nothing is written there.

    Args:
        directory: Where the file lies; the directory for temporary files when `None`.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._next = 0
        self._offered: list[str] = []
        self._written: tuple[int, Path] | None = None  # by which process, and where

    def take(self, proposal: str) -> tuple[int, str]:
        """The number of this process's next logger, and its base id: the parent's, else `proposal`, offered on."""
        number, self._next = self._next, self._next + 1
        launch = Launch.detect()
        if not launch.is_lightning_child:
            self.offer(number, proposal)
            return number, proposal
        ids = self._read(self._path(launch.parent_pid))
        return number, ids[number] if number < len(ids) and ids[number] else proposal

    def offer(self, number: int, base_id: str) -> None:
        """Pass the base id of logger `number` to processes started from now on."""
        if self._written is None or self._written[0] != os.getpid():
            self._offered = []
            self._written = os.getpid(), self._path(os.getpid())
            atexit.register(self._forget)
        self._offered += [""] * (number + 1 - len(self._offered))
        self._offered[number] = base_id
        with suppress(OSError):  # then further processes know the id once there is a process group
            write_small(self._written[1], json.dumps(self._offered).encode())

    def _path(self, process: int) -> Path:
        """The file of one user's process on one machine or container: several may share the directory."""
        place = hashlib.sha256(f"{node_identity()}/{os.getuid()}".encode()).hexdigest()[:12]
        return (self._directory or Path(tempfile.gettempdir())) / f"dist-wandb-{place}-{process}.json"

    def _read(self, path: Path) -> list[str]:
        """The ids in a file of this user's; none if there is no such file."""
        with suppress(OSError, ValueError, ReadError):
            found: Any = parse_json(read_small(path, owned=True))
            return [str(item) for item in found] if isinstance(found, list) else []
        return []

    def _forget(self) -> None:
        if self._written is not None and self._written[0] == os.getpid():  # not in a fork
            with suppress(OSError):
                self._written[1].unlink()
