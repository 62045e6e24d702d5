"""How a stand-in was started, read from ``/proc``, and whether a forked child can match it."""

from __future__ import annotations

import itertools
import os
import resource
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["script", "-c", "-m"]

_LIMITS = tuple(sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}))
_RIGHTS = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
_ENTERED = ("net", "uts", "ipc", "mnt")  # in this order: `mnt` changes the paths of the others
_NAMESPACES = (*_ENTERED, "user", "pid", "cgroup")
_SMALL = ("from multiprocessing.resource_tracker import", "from multiprocessing.forkserver import")

# Variables that modules read on import, and how values that differ from the server's take effect.
_APPLIED = frozenset(
    {
        *("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"),  # set again in Lightning and torchmetrics
        *("TMPDIR", "TEMP", "TMP"),  # `tempfile` reads them again; wandb's directory for media is recreated
        *("TZ", "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "PYTHONDONTWRITEBYTECODE"),
        *("PYTHONSAFEPATH",) * (sys.version_info >= (3, 11)),
        "HOME",  # cached settings of Accelerate and fsspec; `accelerate launch` reads one, and starts cold
        *("PATH", "PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES"),  # read again when needed
        *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),  # scikit-learn sets them on import
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",  # read when needed
    }
)
# Read by iteration over all variables, and by C libraries when they are loaded.
_FAMILIES = (
    *("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "FSSPEC_", "TQDM_", "OMP_", "GOMP_", "KMP_", "GOTO_", "OPENBLAS_"),
    *("MKL_", "MKLDNN_", "ONEDNN_", "DNNL_", "GFORTRAN_", "NPY_", "NUMPY_", "ATEN_", "C10_", "PYTORCH_", "TORCH_"),
)
_WITHOUT_EFFECT = (
    "TORCH_NCCL_",  # read later, by torch's NCCL groups
    "GFORTRAN_UNBUFFERED_",  # output of programs in Fortran; MPICH sets one
)


@dataclass(frozen=True)
class Known:
    """The state of the server."""

    environment: Mapping[str, str]  # its variables before the imports
    read: frozenset[str]  # names of the variables read during the imports
    made: Mapping[str, str]  # variables set by the libraries
    modules: frozenset[str]  # top-level names of all imported modules
    rights: tuple[str, ...]  # users, groups and capabilities
    namespaces: Mapping[str, str]  # its namespaces by kind


@dataclass(frozen=True)
class Request:
    """How a stand-in was started."""

    pid: int  # process id of the stand-in
    stand_in: str  # path of the stand-in
    kind: Kind  # kind of the program
    target: str  # the script, the module or the code
    arguments: tuple[str, ...]  # the arguments after the target
    words: tuple[str, ...]  # all arguments, as given
    unbuffered: bool  # whether `-u` is among them
    environment: Mapping[str, str]  # environment variables
    directory: str  # working directory
    descriptors: tuple[int, ...]  # numbers of the open files
    umask: int  # mask for new files
    blocked: frozenset[int]  # blocked signals
    ignored: frozenset[int]  # ignored signals
    processors: frozenset[int]  # processors that it may use
    limits: Mapping[int, tuple[int, int]]  # resource limits that differ from the server's
    niceness: int  # priority, as for `nice`
    namespaces: Mapping[str, int]  # descriptors of the namespaces that differ from the server's, by kind

    @property
    def search_path(self) -> list[str]:
        """The entries before the standard library on `sys.path`."""
        first = [] if self.environment.get("PYTHONSAFEPATH") and sys.version_info >= (3, 11) else [self._own_entry()]
        python_path = self.environment.get("PYTHONPATH")
        entries = python_path.split(os.pathsep) if python_path else []
        absolute = [os.path.join(self.directory, entry) if entry else self.directory for entry in entries]  # noqa: PTH118
        return [*first, *dict.fromkeys(map(os.path.normpath, absolute))]

    def _own_entry(self) -> str:
        if self.kind == "-c":
            return ""
        if self.kind == "-m":
            return self.directory
        return os.path.dirname(os.path.realpath(os.path.join(self.directory, self.target)))  # noqa: PTH118, PTH120


class ColdError(Exception):
    """A fork cannot match the request."""


def rights_of(pid: int) -> tuple[str, ...]:
    status = _status(pid)
    return tuple(status.get(name, "") for name in _RIGHTS)


def namespaces_of(pid: int) -> dict[str, str]:
    return {
        kind: str(Path(f"/proc/{pid}/ns/{kind}").readlink())
        for kind in _NAMESPACES
        if Path(f"/proc/{pid}/ns/{kind}").exists()
    }


def read_request(pid: int, descriptors: Iterable[int], known: Known) -> Request:
    """Return the request of a stand-in.

    Raises:
        ColdError: A forked child cannot match it; the text is the reason.
        OSError: The stand-in has ended.
    """
    process = Path(f"/proc/{pid}")
    _, _, stand_in, *words = (process / "cmdline").read_bytes().decode(errors="surrogateescape").split("\0")[:-1]
    unbuffered, kind, target, arguments = _parsed(words)
    status = _status(pid)
    directory = str((process / "cwd").readlink())
    if kind == "script" and not os.path.isfile(os.path.join(directory, target)):  # noqa: PTH113, PTH118
        raise ColdError("there is no such script")
    variables = _variables((process / "environ").read_bytes())
    _check_variables(variables, known)
    if target == "accelerate.commands.launch" and variables.get("HOME") != known.environment.get("HOME"):
        raise ColdError("accelerate launch reads a file below HOME")
    if rights_of(pid) != known.rights:
        raise ColdError("other rights")
    request = Request(
        pid=pid,
        stand_in=stand_in,
        kind=kind,
        target=target,
        arguments=tuple(arguments),
        words=tuple(words),
        unbuffered=unbuffered or bool(variables.get("PYTHONUNBUFFERED")),
        environment=variables,
        directory=directory,
        descriptors=tuple(descriptors),
        umask=int(status["Umask"], 8),
        blocked=_signals(status["SigBlk"]),
        ignored=_signals(status["SigIgn"]),
        processors=frozenset(os.sched_getaffinity(pid)),
        limits={kind: limit for kind, limit in _limits(pid) if limit != resource.getrlimit(kind)},
        niceness=os.getpriority(os.PRIO_PROCESS, pid),
        namespaces={},
    )
    _check_modules(request.search_path, directory, known.modules)
    return request


def open_namespaces(pid: int, known: Known) -> dict[str, int]:
    """Open the namespaces of a process that differ from the server's, and return their descriptors.

    Raises:
        ColdError: The server cannot enter them.
    """
    others = [kind for kind, name in namespaces_of(pid).items() if known.namespaces.get(kind) != name]
    if others and (os.geteuid() != 0 or not set(others) <= set(_ENTERED)):
        raise ColdError(f"other namespaces: {' '.join(others)}")
    return {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in _ENTERED if kind in others}


def _parsed(words: list[str]) -> tuple[bool, Kind, str, list[str]]:
    options = list(itertools.takewhile({"-u", "-B"}.__contains__, words))
    if "-B" in options and not sys.flags.dont_write_bytecode:
        raise ColdError("-B, but not for the server")
    match words[len(options) :]:
        case ["-c", target, *arguments] if not target.startswith(_SMALL):
            return "-u" in options, "-c", target, arguments
        case ["-m", target, *arguments]:
            return "-u" in options, "-m", target, arguments
        case [target, *arguments] if target.endswith(".py") and not target.startswith("-"):
            return "-u" in options, "script", target, arguments
    raise ColdError(f"neither script, module nor code: {words[:2]}")


def _check_variables(variables: Mapping[str, str], known: Known) -> None:
    counts = known.read | {name for name in {*variables, *known.environment} if name.startswith(_FAMILIES)}
    for name in sorted(counts - _APPLIED):
        mine, yours = known.environment.get(name), variables.get(name)
        if mine != yours and yours != known.made.get(name, mine) and not name.startswith(_WITHOUT_EFFECT):
            raise ColdError(f"{name} is read by imports: {yours!r} is not {mine!r}")


def _check_modules(search_path: Iterable[str], directory: str, modules: Collection[str]) -> None:
    """Raise if a module that is already imported would have been found elsewhere."""
    for entry in search_path:
        place = os.path.join(directory, entry)  # noqa: PTH118
        for name, suffix in _importable(place):
            if name in modules:
                raise ColdError(f"{place} has a module {name}{suffix}")


def _importable(place: str) -> Iterator[tuple[str, str]]:
    try:
        entries = os.listdir(place)  # noqa: PTH208
    except OSError:
        return
    for entry in entries:
        name, dot, suffix = entry.partition(".")
        is_module = suffix.endswith(("py", "pyc", "so"))
        if is_module or (not dot and os.path.exists(os.path.join(place, entry, "__init__.py"))):  # noqa: PTH110, PTH118
            yield name, dot + suffix


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _variables(environ: bytes) -> dict[str, str]:
    entries = environ.decode(errors="surrogateescape").split("\0")
    return {name: value for name, equals, value in (entry.partition("=") for entry in entries) if equals}


def _signals(mask: str) -> frozenset[int]:
    bits = int(mask, 16)
    return frozenset(number for number in range(1, 65) if bits >> (number - 1) & 1)


def _limits(pid: int) -> Iterator[tuple[int, tuple[int, int]]]:
    for kind in _LIMITS:
        yield kind, resource.prlimit(pid, kind)
