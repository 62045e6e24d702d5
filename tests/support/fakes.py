"""Stand-ins for wandb, whose runs record how they are used, and for the job's store; the types of their fixtures."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch.distributed as dist
import wandb
from counting import Outage

from dist_wandb.job.job_store import JobStore
from dist_wandb.job.topology import Topology
from dist_wandb.runs.definitions import STEP_METRIC
from dist_wandb.runs.run_metadata import chosen_config
from dist_wandb.session.opener import open_session
from dist_wandb.session.session import Session
from dist_wandb.settings.options import Limits, Options


def ranks(number: int) -> list[Topology]:
    """Return the ranks of a job on one node."""
    return [Topology(rank, rank, 0, number, number, 1) for rank in range(number)]


TWO, THREE = ranks(2), ranks(3)
Job = Callable[..., list[Session]]


def open_rank(
    rank: int | Topology,
    *,
    number: int | None = 1,
    wandb_init: Any = None,
    limits: Mapping[str, Any] = MappingProxyType({}),
    step_metric: str | None = STEP_METRIC,
    create_new: bool = True,
    **options: Any,
) -> Session:
    """Open the session of one rank, of two unless its topology is given, on this thread."""
    chosen = Options(limits=Limits(**{"join_timeout": 20.0, **limits}), **options)
    topology = TWO[rank] if isinstance(rank, int) else rank
    further: dict[str, Any] = {"number": number, "step_metric": step_metric, "create_new": create_new}
    return open_session(chosen, wandb_init or {}, integration="test", topology=topology, **further)


def on_ranks(world_size: int, function: Callable[[int], Any]) -> list[Any]:
    """Call a function for all ranks at once, each in a separate thread; return the results in rank order."""
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(function, range(world_size)))


class FakeConfig(wandb.Config):  # type: ignore[misc, name-defined]  # not visible to type checkers
    """wandb's own config without a backend; `sent` is what it would have sent to W&B."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        object.__setattr__(self, "sent", [])
        object.__setattr__(self, "failures", [])  # exceptions that the next attempts to send raise
        super().update(dict(values))
        self._set_callback(self._send)

    def _send(self, key: str | None = None, val: Any = None, data: Mapping[str, Any] | None = None) -> None:
        message = json.loads(json.dumps({key: val} if data is None else data))  # raises as wandb does
        if self.failures:
            raise self.failures.pop()
        self.sent.append(message)

    def __eq__(self, other: object) -> bool:
        return dict(self) == other

    __hash__ = None  # type: ignore[assignment]  # as dicts

    def _load_defaults(self) -> None:
        """Do nothing: there is no file of defaults."""


def _mode_of(settings: wandb.Settings | Mapping[str, Any] | None) -> str | None:
    if settings is None or isinstance(settings, Mapping):
        return (settings or {}).get("mode")
    return settings.mode if "mode" in settings.model_fields_set else None


class FakeRun:
    """Records how it is used. Like a `wandb.Run`, it accepts no other attributes."""

    def __init__(
        self, arguments: dict[str, Any], number: int, directory: Path, sweep: Mapping[str, Any] | None = None
    ) -> None:
        mode = arguments.get("mode") or _mode_of(arguments.get("settings")) or os.environ.get("WANDB_MODE") or "online"
        self.offline = mode in ("offline", "dryrun")
        self.disabled = mode == "disabled"
        self.id = arguments.get("id") or f"made-by-wandb-{number}"
        self.name = arguments.get("name")
        self.url = f"https://wandb.example/team/digits/runs/{self.id}" if mode in ("online", "shared") else None
        self.dir = str(directory / f"run-{number}" / "files")
        Path(self.dir).mkdir(parents=True)
        self.config = FakeConfig(chosen_config(arguments))  # as wandb does
        self.sweep_id = "sweep" if sweep else None
        if sweep:
            self.config.update_locked(sweep, user="sweep", _allow_val_change=True)
        self.resumed = False
        self.starting_step = 0
        self.summary: dict[str, Any] = {}
        self.logged: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.defined: list[tuple[str, dict[str, Any]]] = []
        self.alerts: list[tuple[Any, ...]] = []
        self.exit_codes: list[int | None] = []
        self.done: list[tuple[str, Any]] = []  # other calls, in order
        self._is_finished = False

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows that wandb would write: what is not committed is a part of the next row."""
        rows: list[dict[str, Any]] = []
        is_open = False
        for row, kwargs in self.logged:
            rows = [*rows[:-1], {**rows[-1], **row}] if is_open else [*rows, row]
            is_open = kwargs.get("commit") is False
        return rows

    def log(self, row: dict[str, Any], **kwargs: Any) -> None:
        self.logged.append(({name: value for name, value in row.items() if name != "_timestamp"}, kwargs))

    def define_metric(self, name: str, **kwargs: Any) -> None:
        if kwargs.get("summary") == "best":
            raise wandb.Error("Unhandled define_metric() arg: summary op: best")
        self.defined.append((name, kwargs))

    def alert(self, title: str, text: str, level: Any = None, wait_duration: Any = None) -> None:
        self.alerts.append((title, text, level, wait_duration))

    def _label(self, code: str) -> None:
        self.done.append(("label", code))

    def _telemetry_callback(self, message: Any) -> None:
        """Do nothing: wandb's module calls it at some uses of the run."""

    def end_by_wandb(self) -> None:
        """End it as `wandb.finish` does, which the session does not see."""
        self._is_finished = True

    def __enter__(self) -> FakeRun:  # noqa: PYI034
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._finish(exit_code=int(kind is not None))  # as wandb's

    def finish(self, exit_code: int | None = None, quiet: bool | None = None) -> None:  # noqa: ARG002  # as wandb 0.19
        self._finish(exit_code)

    def _finish(self, exit_code: int | None = None) -> None:
        if not self._is_finished:  # as wandb's
            self.exit_codes.append(exit_code)
        self._is_finished = True
        module: Any = wandb
        if module.run is self:
            module.run, module.log, module.define_metric, module.alert = None, *[before_init] * 3


def before_init(*_: Any, **__: Any) -> None:
    """A stand-in for wandb's functions while there is no run."""
    raise wandb.Error("You must call wandb.init() first")


_LIMITS = {"finish_timeout", "x_transaction_log_flush_interval"}


def _without_limits(arguments: Mapping[str, Any]) -> dict[str, Any]:
    settings = arguments.get("settings")
    has_limits_only = isinstance(settings, wandb.Settings) and settings.model_fields_set <= _LIMITS
    return {name: value for name, value in arguments.items() if name != "settings" or not has_limits_only}


class FakeWandb:
    """The arguments of `wandb.init`, and the runs that it returned."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.stored_mode = "online"  # as written by `wandb offline` and similar commands
        self.arguments: list[dict[str, Any]] = []  # without settings that contain only the limits
        self.settings: list[wandb.Settings | Mapping[str, Any] | None] = []
        self.environments: list[dict[str, str]] = []
        self.runs: list[FakeRun] = []
        self.sweep: dict[str, Any] = {}  # the values that an agent sets for the next run
        self.defaults: dict[str, Any] = {}  # those of a file `config-defaults.yaml`
        self.sets_globals = False  # as wandb does; not if ranks are threads of one process
        self.torn_down = 0  # how often wandb's own process was ended
        self._one_at_a_time = threading.Lock()  # ranks may be threads

    def init(self, **arguments: Any) -> FakeRun:
        with self._one_at_a_time:
            run = FakeRun(arguments, len(self.runs), self.directory, self.sweep)
            if self.defaults:
                run.config.setdefaults(self.defaults)
            self.settings.append(arguments.get("settings"))
            self.arguments.append(_without_limits(arguments))
            self.environments.append(dict(os.environ))
            self.runs.append(run)
            if self.sets_globals and arguments.get("reinit") != "create_new":
                module: Any = wandb
                module.run, module.log, module.define_metric, module.alert = run, run.log, run.define_metric, run.alert
            return run

    def teardown(self, exit_code: int | None = None) -> None:  # noqa: ARG002  # as wandb's
        self.torn_down += 1

    def setup(self) -> SimpleNamespace:
        return SimpleNamespace(settings=wandb.Settings(mode=self.stored_mode, init_timeout=90.0))  # type: ignore[arg-type]


class Meeting:
    """How ranks that are threads of this process meet."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        # may be replaced; it returns a rank's access to the store, or `None` while there is none
        self.store_of: Callable[[int], dist.Store | None] = lambda _: self.store

    def outage(self) -> Outage:
        """Return the outage of the store, for ranks that meet from now on."""
        outage = Outage(self.store)
        self.store_of = outage.store_of
        return outage

    def find(self, namespace: str, topology: Topology, timeout: float) -> JobStore | None:
        """Do as `JobStore.find`."""
        store = self.store_of(topology.global_rank)
        return None if store is None else JobStore(store, namespace, topology, timeout)
