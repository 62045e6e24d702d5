"""Hosts of a job, as network namespaces of this machine; loopback, with a warning, if they cannot be created."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from processes import Script, free_port, rank_commands, words_of

INTERFACE = "net0"  # the interface of each host, in addition to loopback
_MARK = "DIST_WANDB_TEST_HOST"
_NAMES = re.compile(r"dwt(\d+)-\w+")  # prefix of the namespaces of the test run with this process id
_PATIENCE = 20  # seconds for one command
_NAMED = 'hostname "$0" && exec "$@"'  # $0 is the name


class _NotPossibleError(Exception):
    """This machine, or this user, cannot create namespaces."""


@dataclass(frozen=True)
class Hosts:
    """Hosts that reach each other, each with its own address, interface and name.

    Their names do not resolve to an address that others can reach, as on many clusters.
    """

    addresses: tuple[str, ...]  # the address of each host; on loopback they are all equal
    why_loopback: str = ""  # why several hosts are simulated on one; empty if they are not

    @property
    def are_real(self) -> bool:
        """Whether each host has its own network stack."""
        return not self.why_loopback

    @property
    def interface(self) -> str:
        """Return the name of the interface by which a host reaches the others."""
        return INTERFACE if self.are_real else "lo"

    def on(self, host: int, *command: str | Path) -> list[str | Path]:
        marked: list[str | Path] = ["env", f"{_MARK}={host}", *command]
        if not self.are_real:
            return marked
        inside = ["ip", "netns", "exec", _namespace(f"h{host}"), "unshare", "--uts", "sh", "-c", _NAMED, f"host-{host}"]
        return [*inside, *marked]

    def cut(self, host: int) -> None:
        """Cut off a host: nothing reaches it, and no connection is closed. On loopback, its processes are stopped."""
        if self.are_real:
            _ip("-n", _namespace("switch"), "link", "set", f"h{host}", "down")
        else:
            self._signal(host, signal.SIGSTOP)

    def mend(self, host: int) -> None:
        if self.are_real:
            _ip("-n", _namespace("switch"), "link", "set", f"h{host}", "up")
        else:
            self._signal(host, signal.SIGCONT)

    def _signal(self, host: int, number: signal.Signals) -> None:
        mark = f"{_MARK}={host}".encode()
        for process in [path for path in Path("/proc").iterdir() if path.name.isdigit()]:
            with contextlib.suppress(OSError):  # it has ended, or may not be read
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), number)


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """Create hosts, and remove them. Hosts of killed test runs are removed as well.

    Namespaces need root. If they cannot be created, all hosts are this machine's loopback, with a warning.
    """
    _sweep()
    try:
        made = _make(count)
    except _NotPossibleError as error:
        _sweep()
        made = Hosts(("127.0.0.1",) * count, str(error))
        warnings.warn(f"{count} hosts were loopback, as namespaces cannot be made here: {error}", stacklevel=3)
    try:
        yield made
    finally:
        _sweep()


def _make(count: int) -> Hosts:
    """Create hosts, and a switch in its own namespace: bridge filters of this machine (Docker's) do not apply there."""
    switch = _namespace("switch")
    _ip("netns", "add", switch)
    _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    _ip("-n", switch, "link", "set", "bridge", "up")
    addresses = tuple(f"10.77.0.{host + 1}" for host in range(count))
    for host, address in enumerate(addresses):
        name, port = _namespace(f"h{host}"), f"h{host}"
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", switch)
        _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
        _ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
        _ip("-n", name, "link", "set", INTERFACE, "up")
    made = Hosts(addresses)
    _call(*made.on(0, "true"))  # whether commands can be run there
    return made


def _namespace(what: str) -> str:
    return f"dwt{os.getpid()}-{what}"


def _sweep() -> None:
    """Remove namespaces of ended test runs. They contain all that a test run creates."""
    with contextlib.suppress(_NotPossibleError):
        for line in _ip("netns", "list").splitlines():
            name = line.split()[0] if line.split() else ""
            owner = _NAMES.fullmatch(name)
            if owner and (int(owner[1]) == os.getpid() or not Path(f"/proc/{owner[1]}").exists()):
                _ip("netns", "delete", name)


def _ip(*words: str) -> str:
    return _call("ip", *words)


def _call(*command: str | Path) -> str:
    words = [str(word) for word in command]
    if shutil.which(words[0]) is None:
        raise _NotPossibleError(f"there is no command {words[0]}")
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE, check=True)
    except subprocess.CalledProcessError as error:
        raise _NotPossibleError(f"{' '.join(words)}: {error.stderr.strip()}") from None
    except subprocess.TimeoutExpired:
        raise _NotPossibleError(f"{' '.join(words)}: no answer within {_PATIENCE} s") from None
    return done.stdout


def torchrun_on(
    made: Hosts, script: Script, *arguments: object, processes: Sequence[int]
) -> tuple[list[str | Path], ...]:
    """Return the commands that start `script` under torchrun on each host, with a number of processes per host."""
    port = str(free_port())
    meeting = ["--nnodes", str(len(processes)), "--master-addr", made.addresses[0], "--master-port", port]
    launcher: list[str | Path] = [sys.executable, "-m", "torch.distributed.run", *meeting]
    return tuple(
        made.on(
            host, *launcher, "--node-rank", str(host), "--nproc-per-node", str(number), *words_of(script, *arguments)
        )
        for host, number in enumerate(processes)
    )


def ranks_on(
    made: Hosts, script: Script, *arguments: object, per_host: int, **variables: object
) -> list[list[str | Path]]:
    """Return the commands that start `script` as ranks on each host, without a launcher."""
    layout = (per_host,) * len(made.addresses)
    variables = {"MASTER_ADDR": made.addresses[0], **variables}
    commands = rank_commands(script, *arguments, layout=layout, variables=variables)
    return [made.on(rank // per_host, *command) for rank, command in enumerate(commands)]
