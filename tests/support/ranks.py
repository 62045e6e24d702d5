"""Ranks that are started individually: unlike under torchrun, a failing rank does not end the others."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from processes import Script, free_port, words_of

Command = list[str | Path]
NONE: Mapping[str, object] = MappingProxyType({})


def with_variables(variables: Mapping[str, object], script: Script, *arguments: object) -> Command:
    """Return the command that runs a script, or a module after ``-m``, with environment variables."""
    assignments = [f"{name}={value}" for name, value in variables.items()]
    return ["env", *assignments, sys.executable, *words_of(script, *arguments)]


def rank_commands(
    script: Script,
    *arguments: object,
    world_size: int = 1,
    layout: Sequence[int] = (),
    variables: Mapping[str, object] = NONE,
) -> tuple[Command, ...]:
    """Return the commands that start `script` as ranks, like a launcher: on one node, or on those of a `layout`."""
    layout = layout or (world_size,)
    world = {"WORLD_SIZE": sum(layout), "GROUP_WORLD_SIZE": len(layout)}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    commands: list[Command] = []
    for node, size in enumerate(layout):
        for local in range(size):
            place = {"RANK": len(commands), "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": size}
            place |= {"NODE_RANK": node, "GROUP_RANK": node}
            commands.append(with_variables({**place, **world, **meeting, **variables}, script, *arguments))
    return tuple(commands)
