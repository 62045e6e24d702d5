"""Ranks that are started individually: unlike under torchrun, a failing rank does not end the others."""

from __future__ import annotations

import sys
from pathlib import Path

from processes import free_port


def rank_commands(script: Path, *arguments: object, world_size: int) -> tuple[list[str | Path], ...]:
    """Return the commands that start `script` as the ranks of one node, like a launcher."""
    world = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "NODE_RANK": 0, "GROUP_RANK": 0}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    words = [str(argument) for argument in arguments]
    commands: list[list[str | Path]] = []
    for rank in range(world_size):
        variables = {"RANK": rank, "LOCAL_RANK": rank, **world, **meeting}
        assignments = [f"{name}={value}" for name, value in variables.items()]
        commands.append(["env", *assignments, sys.executable, script, *words])
    return tuple(commands)
