"""The start of a tracker: its rank, its arguments for `wandb.init`, and ranks on which `init_trackers` is not called.

Under Megatron-LM Accelerate's main process is the last rank, if `PartialState` knows about Megatron-LM. In 1.0 to 1.15
only `AcceleratorState` knows: there the main process stays rank 0, for us and for Accelerate.

Published scripts call it under ``if accelerator.is_main_process``, and log on all ranks. Each of the other ranks polls
the job's store for the next session of the main process (`next_job`). Until it is published, rows wait here, and the
script gets a stand-in for the run. Then the rank opens its session with the options of the main process, and logs the
waiting rows. `log` never waits for the store: a thread queries it.

A rank that has not joined before joins in its `finish`, because the main process waits for it. A rank skips sessions
that the main process has finished without it, so that session numbers stay equal on all ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from accelerate import PartialState
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import DistributedType

from dist_wandb.errors import RendezvousError, TopologyError
from dist_wandb.job.timed_caller import BackgroundPoll, poll
from dist_wandb.job.topology import Leader, Topology
from dist_wandb.job.units import Mesh
from dist_wandb.notices import users_line, warn
from dist_wandb.payloads.devices import as_tensor
from dist_wandb.payloads.metrics import is_metric
from dist_wandb.payloads.scalars import copied_row
from dist_wandb.runs.null_run import AnyRun
from dist_wandb.runs.requested import check_init_arguments, reinit
from dist_wandb.runs.run_metadata import running_run
from dist_wandb.session.api import INIT, join_init, opened_as
from dist_wandb.session.config.targets import EarlyConfig
from dist_wandb.session.job_description import NextJob, fall_behind, miss_job, next_job, take
from dist_wandb.session.opener import open_session
from dist_wandb.session.registry import current, open_sessions, process_end
from dist_wandb.session.session import Session
from dist_wandb.settings.options import Options

INTEGRATION = "DistWandbTracker"
_RETURNS = ("default", "return_previous")
_PAUSE = 0.05  # seconds between the first queries of the store
_MOST_ROWS = 1000  # kept on a rank that waits for the main process to call init_trackers


def current_topology() -> Topology:
    """The topology of this rank, always from `PartialState`, because `debug_launcher` sets RANK=0 in every process."""
    state = PartialState()
    if state.num_processes == 1:  # as Accelerate makes each process without a GPU and without ``cpu=True``
        with contextlib.suppress(TopologyError):  # stale variables, which Accelerate does not read either
            launched = Topology.from_environ()
            if launched is not None and launched.world_size > 1:
                warnings.warn(
                    f"The launcher started {launched.world_size} processes ({launched.origin('world_size')}), but "
                    "Accelerate runs each of them on its own: they train separately, and each opens a run. Without a "
                    "GPU, pass Accelerator(cpu=True).",
                    stacklevel=2,
                )
    # Megatron-LM has losses on the last rank only, which is therefore Accelerate's main process.
    leader: Leader = "last" if state.distributed_type == DistributedType.MEGATRON_LM else "first"
    return Topology.from_framework(state.process_index, state.num_processes, "accelerate.PartialState", leader=leader)


def current_mesh() -> Mesh | None:
    """The mesh of Accelerate's `ParallelismConfig`; `None` without a mesh and in versions that do not have them."""
    return getattr(AcceleratorState(), "device_mesh", None) if is_initialized() else None


class LateJoin:
    """Arguments and session of a tracker; on a rank that is not started, its rows and the search for the session."""

    _poll: BackgroundPoll[NextJob | Session]

    def __init__(self, options: Options, arguments: Mapping[str, Any]) -> None:
        self.options: Options = options  # the rank's own, until those of the main process are known
        self.session: Session | None = None  # once it is open, until it is finished
        self.rows: deque[tuple[Mapping[str, Any], int | None, dict[str, Any]]] = deque(maxlen=_MOST_ROWS)
        self.config: dict[str, Any] = {}  # written before the session is open
        self._actions: deque[Callable[[AnyRun], Any]] = deque(maxlen=_MOST_ROWS)  # of the script, for the run
        self._own = arguments  # of `wandb.init`, given to the constructor: they take precedence
        self._given: dict[str, Any] = {}
        self.requested: dict[str, Any] = {}  # the arguments of `init_trackers` when the run was opened
        self._goes_on = False  # whether the rank, which was not started, uses the session of an earlier tracker
        self._await_next()
        process_end.register()  # it waits for the query that is under way, also if no session is ever opened here

    @property
    def arguments(self) -> dict[str, Any]:
        return {**self._given, **self._own}

    def set_config(self, config: Mapping[str, Any]) -> None:  # unless the constructor was given one
        self._given = {"config": config, **self._given}

    def set_requested(self, project: str, init_kwargs: Mapping[str, Any], *, is_open: bool) -> None:
        # A run that is open already continues unchanged, with a warning.
        requested, before = {"project": project, **init_kwargs}, self.requested
        if not is_open:
            check_init_arguments(init_kwargs, "init_trackers")
            self._given = self.requested = requested
            return
        # Compared by their text, because `==` of a user's objects may do anything.
        new = [name for name, value in requested.items() if name != "config" and repr(value) != repr(before.get(name))]
        if new:
            warnings.warn(
                f"init_trackers was called again on rank {PartialState().process_index} with another "
                f"{', '.join(map(repr, new))}, but its run is open and continues unchanged. To open another run, call "
                "tracker.finish() on all ranks first.",
                stacklevel=5,
            )

    @property
    def is_possible(self) -> bool:
        """Whether this rank may log before it is started."""
        return not PartialState().is_main_process

    def find(self, within: float | None = None) -> Session | None:
        # On a rank that may join late, opens the session once the main process has published it. Waits `within` seconds
        # for the thread that queries the store; with `None`, queries the store here, and if rows wait, up to
        # `join_timeout` for the main process, which is behind.
        if not self.is_possible:
            return self.session
        if self.session is not None and self.session not in open_sessions():  # the main process has ended it
            self.session = None
            if not self._goes_on:
                fall_behind(INTEGRATION)  # the main process may have opened the last one
            self._await_next()
        if self.session is None:
            try:
                self._join(within)
            except RendezvousError:  # the job has ended and its store is gone, but the training may continue
                self._await_next()
        if self.session is not None and self.config:
            written, self.config = self.config, {}
            self.session.config.update(written, allow_val_change=True)
        while self.session is not None and self._actions:
            self._actions.popleft()(self.session.run)
        return self.session

    def act(self, action: Callable[[AnyRun], Any]) -> None:
        self._actions.append(action)
        self.find(0.0)

    def wait(self, within: float) -> Session | None:  # `within` seconds; 0: only once
        return poll(self.find, within, _PAUSE, PartialState().num_processes)

    def open(self, found: NextJob | None = None) -> None:
        """Open the session on this rank: the one that was `found`, or the main process's next one."""
        topology = current_topology()
        options = self.options.in_mesh(current_mesh(), topology.global_rank)
        if found is None:  # skips sessions that took place without this rank
            self.session = join_init(options, topology, INTEGRATION)
        else:
            self.session = opened_as(found, options, topology) if found.integration == INIT else None
        self._goes_on = self.session is not None
        if self.session is None:
            arguments = self.arguments
            is_used = options.run_mode == "auto" and current() is None and reinit(arguments) in _RETURNS
            running = running_run() if is_used else None  # of wandb's own `init`, which returns it again
            self.session = open_session(
                options,
                arguments,
                integration=INTEGRATION,
                topology=topology,
                number=None if found is None else take(found),
                proposed_id=None if running is None else running.id,
                create_new=running is None,
            )
        self._await_next()

    def log(self, values: Mapping[str, Any], step: int | None, arguments: Mapping[str, Any]) -> None:
        session = self.find(0.0)
        if session is None:
            if not self.rows:
                atexit.unregister(self.drop_rows)
                atexit.register(self.drop_rows)
            if len(self.rows) == _MOST_ROWS:  # the oldest one is dropped
                self._warn_of_dropped_rows()
            self.rows.append((_copied(values), step, _copied(arguments)))
        else:
            session.log(values, step, **arguments)

    def _join(self, within: float | None) -> None:
        """Use the session that is open here, or open the one that the main process has published; log waiting rows."""
        session = current()
        if session is not None and session.opened_at is not None:  # by the script
            found: NextJob | Session | None = session
        elif within is None:
            found = self._next(self.options.limits.join_timeout if self.rows else 0.0)
        else:
            found = self._poll.result(within)
        self._goes_on = isinstance(found, Session)
        if isinstance(found, Session):
            self.session = found
        elif found is not None:
            self.options = found.options(self.options)
            self.open(found)
        while self.session is not None and self.rows:
            self.log(*self.rows.popleft())

    def _await_next(self) -> None:
        """Search anew: for the session after the one that is open from now on, if one is."""
        self._poll = BackgroundPoll(self._next, _PAUSE, lambda: PartialState().num_processes)

    def _next(self, within: float = 0.0) -> NextJob | Session | None:
        """Read the main process's next session; if there is none, the session of an earlier tracker that goes on."""
        session, limit = current(), self.options.limits.join_timeout
        within = within if session is None else 0.0
        job = next_job((INTEGRATION, INIT), current_topology(), limit, within, has_rows=bool(self.rows))
        if job is None and session is not None and not session.is_ending():
            return session
        return job

    def drop_rows(self) -> None:
        if self.rows:
            self._warn_of_dropped_rows()
            self.rows.clear()
            miss_job(INTEGRATION)

    def _warn_of_dropped_rows(self) -> None:
        number = f"{len(self.rows)} rows{' and more' if len(self.rows) == _MOST_ROWS else ''}"
        message = (
            f"Rank {PartialState().process_index} logged {number}, but the main process has not called "
            "accelerator.init_trackers, or has ended its run, so they are dropped. Call it before the first log."
        )
        warn(message, users_line(), may_raise=False)  # neither the training nor its end may fail because of it


class ConfigOnceStarted(EarlyConfig):
    """The source of the config on a rank that joins late."""

    def __init__(self, late_join: LateJoin) -> None:
        super().__init__(lambda: late_join.find(0.0), lambda: late_join.config)
        self._late_join = late_join

    def read(self, name: str | None = None) -> Mapping[str, Any]:
        within = self._late_join.options.limits.join_timeout
        if name not in self._late_join.config and self._late_join.wait(within) is None:
            warnings.warn(
                f"The config was read on rank {PartialState().process_index}, but the main process did not call "
                f"accelerator.init_trackers within {within:g} s, so the config is empty. Call it before "
                "the config is read.",
                stacklevel=4,
            )
        return super().read(name)


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy values that the user may change before they are logged. Waits for no device."""
    copies: dict[str, Any] = {}
    for name, value in values.items():
        if (tensor := as_tensor(value)) is not None:  # it stays one, because a weight has to
            copies[name] = tensor.detach().clone()
        elif isinstance(value, Mapping) and not is_metric(value):
            copies[name] = _copied(value)
        else:
            copies.update(copied_row({name: value}, PartialState().process_index))
    return copies
