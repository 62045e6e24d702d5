"""Ranks that are started individually: unlike under torchrun, a failing rank does not end the others."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from processes import Finished, free_port, started


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


def run_ranks(
    commands: Sequence[Sequence[str | Path]],
    *,
    until: Sequence[int],
    cwd: Path,
    environment: Mapping[str, str],
    timeout: float,
) -> Finished:
    """Run ranks until those named in `until` have ended, then kill the rest; fail after `timeout` seconds.

    Returns:
        The exit codes of all ranks, -9 for those killed at the end, and all output.
    """
    with started(*commands, cwd=cwd, environment=environment) as job:
        deadline = time.monotonic() + timeout
        try:
            for rank in until:
                job.processes[rank].wait(max(0.1, deadline - time.monotonic()))
            in_time = True
        except subprocess.TimeoutExpired:
            in_time = False
        job.kill()
        output = "\n".join(process.communicate()[0] for process in job.processes)
        codes = tuple(process.returncode for process in job.processes)
    assert in_time, f"ranks {list(until)} not finished after {timeout:g} s, exit codes {codes}\n{output}"
    return Finished(codes, output)
