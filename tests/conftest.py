"""Shared fixtures: an environment without launchers, a stand-in for wandb, ranks as threads."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import oldest
import processes
import pytest
import scheduling
import torch
import torch.distributed as dist
import wandb
import warm
from fakes import FakeRun, FakeWandb, Job, Meeting, before_init, on_ranks, open_rank
from hypothesis import HealthCheck, settings
from limits import Limit, set_limits
from new_process import begin_new_process
from units import live_exchanges
from wandb_server import WandbServer

from dist_wandb.exchange import interface, turns
from dist_wandb.exchange.membership import generations
from dist_wandb.exchange.transport import gloo
from dist_wandb.job import job_identity
from dist_wandb.job.job_store import JobStore
from dist_wandb.job.topology import Topology
from dist_wandb.session import inherited_rank
from dist_wandb.session.sections import StepTimings
from dist_wandb.session.session import Session
from dist_wandb.session.stalls import watcher

collect_ignore = ["e2e/test_trl.py"] if sys.version_info < (3, 11) else []  # trl 1.16 needs 3.11

_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "NODE_RANK", "GROUP_", "CROSS_", "ROLE_", "MASTER_")
_FAMILIES = ("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI", "MPI_", "WANDB_", "DIST_WANDB_")
_RARE_FAMILIES = ("HOROVOD_", "JSM_", "MV2_", "PALS_", "FLUX_", "PET_")

# Processes that are killed, torchrun, and wandb leave files in the directory for temporary files. So each process that
# runs tests has one of its own, which is removed at the end. Its name is short, because sockets are made there.
_TEMPORARY = tempfile.mkdtemp(prefix="dwt-")
Path(_TEMPORARY).chmod(0o755)  # for other users, as whom some tests go on
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest keeps those of the last tests
os.environ["TMPDIR"] = tempfile.tempdir = _TEMPORARY

# torch looks up the name of every client of a store, while the store waits. A name server may lose queries if it gets
# hundreds at once, so they time out after one second instead of five, here and in all jobs.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Threads of torch wait for each other by spinning, also while other tests need the processor. Without the variable,
# Accelerate and Lightning would set another number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# Tests check behaviour, not times, because machines that run tests are busy.
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")


@pytest.fixture(scope="session", autouse=True)
def _state_of_nobody(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tests' uploads out of the user's upload log."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove variables of launchers, wandb and this package, whether inherited or set by a test."""
    wandb.teardown()  # of earlier tests: otherwise, the variable with its process would return after its end
    monkeypatch.setenv("WANDB_MODE", "")
    for name in list(os.environ):
        if name.startswith(_LAUNCHERS + _FAMILIES + _RARE_FAMILIES):
            monkeypatch.delenv(name)


class ImpatientGroup(gloo.GlooGroup):
    """A group that waits one second at most for its members to connect, because it cannot be ended meanwhile."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: float,
        is_over: Callable[[], bool],
        address: str | None = None,
        forming: float = 1.0,
    ) -> None:
        super().__init__(store, rank, size, timeout, is_over, address, min(forming, 1.0))


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    """Set limits and times, constants of a module, for one test: ``limit(reading, MOST_VALUES=8)``."""
    return functools.partial(set_limits, monkeypatch)


@pytest.fixture
def unhandled_sigterm() -> Iterator[None]:
    """Restore SIGTERM's handler, in case other tests have left sessions open."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files: an empty one, until the test puts something into it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # so that the variable is read again
    return tmp_path


@pytest.fixture
def ended_exchanges(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End the exchanges of sessions that a test does not finish, without waiting for other ranks."""
    monkeypatch.setattr(gloo, "GlooGroup", ImpatientGroup)
    yield
    exchanges = live_exchanges()
    with ThreadPoolExecutor(len(exchanges) or 1) as pool:  # all at the same time
        for exchange in exchanges:
            pool.submit(exchange.close, 0.0, failed=True)
    for exchange in exchanges:
        exchange.leave(failed=True)
    assert all(exchange.has_ended for exchange in exchanges), "a thread of an exchange is still running after its test"


@pytest.fixture
def parts(bare_environment: None, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> list[str | None]:  # noqa: ARG001
    """The parts of training steps that were entered with `timings=True`; None outside them."""
    found: list[str | None] = []
    enter = StepTimings.enter

    def noted(self: StepTimings, part: Any) -> None:
        enter(self, part)
        found.append(self.part)

    monkeypatch.setattr(StepTimings, "enter", noted)
    return found


_OF_RANKS_AS_THREADS: tuple[tuple[Any, str, object], ...] = (
    (inherited_rank, "announce", lambda: None),  # the process that they are starts jobs
    (generations, "APART", 1.0),  # most tests know which ranks come
    (interface, "LAST_WRITES", 20.0),  # a thread may be delayed, also at its end
    (turns, "NEW_NAME_HEARTBEATS", 1000),  # rows that ranks log one after the other belong together
    (watcher, "begin", lambda *_: None),  # they would have one each
)


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin as in a new process, in which wandb has no run; wandb's module is afterwards what it was before."""
    begin_new_process(monkeypatch)
    module: Any = wandb
    before = dict(vars(module))
    module.run = None
    yield
    monkeypatch.undo()  # first: a test may have patched wandb's module, too
    vars(module).update(before)  # also what sessions have set that a test did not finish


@pytest.fixture
def fake_wandb(
    bare_environment: None,  # noqa: ARG001  # used for its effect
    new_process: None,  # noqa: ARG001  # used for its effect
    ended_exchanges: None,  # noqa: ARG001  # used for its effect
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> FakeWandb:
    """Replace `wandb.init`, keeping its signature. Nothing of wandb is started."""
    fake = FakeWandb(tmp_path / "fake-wandb")

    @functools.wraps(wandb.init, updated=())  # without the mark of a session that a simulation left open
    def init(**arguments: Any) -> FakeRun:
        return fake.init(**arguments)

    module: Any = wandb
    module.init, module.setup, module.teardown = init, fake.setup, fake.teardown
    module.log = module.define_metric = module.alert = before_init
    for room, name, value in _OF_RANKS_AS_THREADS:
        monkeypatch.setattr(room, name, value)
    monkeypatch.chdir(tmp_path)
    return fake


@pytest.fixture
def meeting(fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> Meeting:  # noqa: ARG001  # goes first
    meeting = Meeting()
    monkeypatch.setattr(JobStore, "find", meeting.find)
    monkeypatch.setattr(job_identity, "node_identity", lambda: "host")
    return meeting


@pytest.fixture
def store(meeting: Meeting) -> dist.Store:
    """A store through which ranks that are threads of this process meet."""
    return meeting.store


@pytest.fixture
def job(store: dist.Store, limit: Limit) -> Job:  # noqa: ARG001  # they meet there
    """Open the same session on every rank at once."""

    def open_all(
        topologies: list[Topology],
        arguments: Callable[[int], dict[str, Any]] = lambda _: {},
        *,
        limits: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> list[Session]:
        limits = {"join_timeout": 30.0, "finish_timeout": 30.0, "heartbeat": 0.05, **limits}
        if len(topologies) == topologies[0].world_size:
            limit(generations, APART=15.0)  # a thread of a rank may be delayed

        def open_one(rank: int) -> Session:
            return open_rank(topologies[rank], wandb_init=arguments(rank), limits=limits, create_new=False, **options)

        return on_ranks(len(topologies), open_one)

    return open_all


@pytest.fixture
def wandb_server() -> Iterator[WandbServer]:
    """A stand-in for the W&B server. The test fails if a client sends an unknown request."""
    with WandbServer() as server:
        yield server
    assert server.unknown == []


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude what collection imports, over a million objects that stay, from garbage collection.

    From here on, `sys.executable` starts cold, even if this process did not: in tests, only `processes` starts warm
    interpreters. A controller, whose workers run all tests, has started these already.
    """
    sys.executable = warm.cold(sys.executable)
    multiprocessing.set_executable(sys.executable)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start with the slowest tests. Tests that show nothing new with the oldest versions run with the newest only."""
    items.sort(key=scheduling.order)
    if "newest" in config.getoption("markexpr"):
        left_out = {path for path in {item.path for item in items} if oldest.shows_nothing_new(path)}
        for item in items:
            if item.path in left_out:
                item.add_marker("newest")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> scheduling.SharedJobsScheduling | None:
    """Keep tests of one job on one worker, with ``--dist loadgroup``."""
    return scheduling.SharedJobsScheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_configure(config: pytest.Config) -> None:
    """Make child processes interruptible: a shell's background job inherits and passes on an ignored SIGINT.

    One warm interpreter serves all workers of a run.
    """
    config.add_cleanup(functools.partial(shutil.rmtree, _TEMPORARY, ignore_errors=True))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        run = contextlib.ExitStack()
        run.enter_context(warm.served())
        config.add_cleanup(run.close)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Set whether a test's jobs start cold, before its fixtures start them."""
    processes.starts_cold = item.get_closest_marker("cold") is not None


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run in which a test was skipped: a missing package must not look like a passing test."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
