"""The session of one logger, and `logger.experiment` on a rank without a run.

The session is opened once the ranks are known, also by copies of the logger in other processes.

A logger is created before the Trainer has started its processes, so its session goes through up to three states:

- *None.* The run has not been requested, or this is not the first process and its rank is not known.
- *Provisional.* The ranks are not known, but this is the process that a world of one would be, so its session is the
  session of a world of one. The next session adopts its run if the plan has the same run; otherwise it is an error.
- *Final.* The ranks are known, from torch.distributed or a launcher. The session stays open until the end.

A copy of the logger in a process of ddp_spawn begins without a session, and with the run of its parent, if the parent
holds one for all of them (`LaunchState`): so fit and test are one run in `auto` mode. In other modes the new processes
of each stage open the same ids again, which W&B continues. A logger that was given an id does not take over the run of
another logger of this process. A copy within a process shares the final session, and so does a logger that uses the run
of another one: with sessions of their own, rows of the two would be in another order on each rank.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from functools import cached_property
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary

from lightning_utilities.core.rank_zero import rank_zero_warn

from dist_wandb.errors import ConfigurationError
from dist_wandb.job.job_identity import make_id
from dist_wandb.job.launch import Launch
from dist_wandb.job.topology import Topology
from dist_wandb.job.units import Mesh
from dist_wandb.lightning import launching
from dist_wandb.lightning.launching import LaunchState, is_spawning, known_topology, told_of
from dist_wandb.lightning.name_spaces import OfLightning, is_a
from dist_wandb.runs import requested, run_metadata, sweeps, wandb_private
from dist_wandb.runs.null_run import AnyRun, NullPart, NullRun, Run
from dist_wandb.session import inherited_rank
from dist_wandb.session.config.targets import ConfigView, EarlyConfig
from dist_wandb.session.opener import open_session
from dist_wandb.session.registry import current, holds, open_sessions
from dist_wandb.session.restart import RestartStore
from dist_wandb.session.session import Session
from dist_wandb.settings.options import Options
from dist_wandb.settings.plan import RunPlan

INTEGRATION = "DistWandbLogger"
_STOCK_PROJECT = "lightning_logs"  # the default of both loggers, which nobody has asked for
_STEP_METRIC = "trainer/global_step"
# Attributes of a run, and methods whose result, that scripts use.
GIVE_BACK = frozenset(
    {
        *("use_artifact", "log_artifact", "link_artifact", "upsert_artifact", "finish_artifact", "link_model"),
        *("use_model", "define_metric", "log_code", "save", "restore", "status", "display", "to_html", "settings"),
        *("get_url", "get_project_url", "get_sweep_url", "project_name"),  # of older versions
    }
)
# Sessions of this process, by the number of the logger and the process that gave it.
_final: WeakValueDictionary[tuple[int, int], Session] = WeakValueDictionary()


class SessionHolder:
    """Opens and holds the session of one logger."""

    def __init__(self, options: Options, arguments: dict[str, Any], *, is_offline: bool) -> None:
        self.options: Options = options
        self.session: Session | None = None  # once it is open
        self.launch: LaunchState = LaunchState()
        self._arguments = arguments  # of `wandb.init`, as the stock logger has them
        self._is_offline = is_offline
        self._requested_id: str | None = arguments.get("id")
        # name of the x axis; with tensorboard, its own are used
        self.axis: str | None = None if arguments.get("sync_tensorboard") else _STEP_METRIC
        self.number: int  # index of the logger in the script
        self.base_id: str  # of all runs, as far as it is known here
        self.number, self.base_id = launching.script_ids.next_id(self._requested_id or make_id())
        is_main = self.launch.is_first_process and not Launch.detect().is_lightning_child
        if self._requested_id is None and is_main:  # an earlier start of the job may be continued
            earlier = RestartStore(
                f"{INTEGRATION}/{self.number}", self.options, Topology.single(), self._arguments
            ).find()
            if earlier is not None:
                self.base_id = earlier.record.base_id
                launching.script_ids.offer(self.number, self.base_id)

    def for_copy(self, run: Run | None) -> SessionHolder:
        copied = SessionHolder.__new__(SessionHolder)
        copied.__dict__.update(self.__dict__, session=None, launch=self.launch.for_copy(run, self._other_axis(run)))
        return copied

    def prepare_spawn(self, run: Run | None) -> None:
        """Let the spawned processes open the runs; raise if one is open here, but they need runs of their own."""
        if is_spawning() and self.session is None:
            self.launch.has_children = True
        elif is_spawning() and run is not None:
            raise _opened_too_early(run.id, self.options.run_mode, "its own runs in those processes")

    @cached_property
    def early_config(self) -> dict[str, Any]:
        """Before the session is open, what this rank was given, a sweep's values and rank 0's. It may be changed."""
        theirs = run_metadata.with_own_secrets(launching.script_ids.run_of(self.number), self._arguments)
        return {**run_metadata.chosen_config(self._arguments), **sweeps.values(), **theirs.get("config", {})}

    def early_metadata(self) -> dict[str, Any]:
        """Before the session is open, the metadata that this rank requests, then that of rank 0's run."""
        arguments, run_id = sweeps.trial_arguments(self._arguments), sweeps.trial_id() or self.known_id
        theirs = run_metadata.from_json(launching.script_ids.run_of(self.number).get("metadata", {}))
        return {**run_metadata.as_requested(arguments, run_id, is_offline=self._is_offline), **theirs}

    @property
    def known_id(self) -> str | None:
        """Id of the run that receives this rank's numbers, if it is known; else the requested id."""
        if self.session is not None:
            return self.session.id
        knows_base_id = self.launch.has_children or Launch.detect().is_lightning_child
        return self.base_id if knows_base_id else self._requested_id

    def open(self, run: Run | None) -> Session | None:
        # Until the ranks are known, this is, in the first process, a session of a world of one. `run` is the one that
        # is open in this process: of the provisional session, or the user's.
        session = self.session
        if session is not None and session.topology.world_size > 1:
            if not session.has_store:  # checked first, because this method is called for every row
                session.connect_late(self._init_arguments(session.topology), INTEGRATION, self.number)
            return session
        topology = known_topology() if session is None else inherited_rank.in_group()
        if session is not None and (topology is None or topology.world_size == 1):
            return session
        if topology is None and not self.launch.is_first_process:
            return None
        return self._open(topology or Topology.single(), run)

    def leave(self, exit_code: int | None) -> None:
        """Finish the session, unless other loggers of this process use it."""
        session, self.session = self.session, None
        _final.pop((self.number, self.launch.home), None)
        if session is not None and session not in _final.values():
            session.finish(exit_code=exit_code)

    def announce(self) -> None:
        """Print the line at the start, once it is final: a world of one may grow until the first row is logged."""
        if self.session is not None and not self.launch.is_announced:
            self.launch.is_announced = True
            self.session.announce(self.launch.location)

    def _open(self, topology: Topology, run: Run | None) -> Session:
        if topology.world_size > 1:
            self.options = self.options.in_mesh(_mesh_in_use(), topology.global_rank)
        if self.launch.is_child and topology.global_rank and self.options.is_run_of_rank_0:
            wandb_private.leave_run()
            run = None
        provisional, running = self.session, run_metadata.running_run()
        final = self._final_session() if topology.world_size > 1 else None
        if final is not None:
            self.session, self.launch.is_announced = final, True
            _final[self.number, self.launch.home] = final
            if provisional is not None:
                provisional.release()
            return final
        # Whether the run of this process is another logger's, and not the one requested from this logger.
        is_requested = running is None or self._requested_id in (None, running.id)
        is_another = provisional is None and not is_requested and holds(running)
        available = None if is_another else self._available_run(run)
        proposed_id = self.base_id
        if available is not None:
            base_ids = (one.plan.base_id for one in open_sessions() if one.run is available)
            proposed_id = next(base_ids, None) or str(available.id)
        if self._is_offline and run is None:
            requested.set_offline()
        session = self.session = open_session(
            self.options,
            self._init_arguments(topology),
            integration=INTEGRATION,
            topology=topology,
            step_metric=self.axis,
            other_axis=self._other_axis(available),
            number=self.number,
            proposed_id=proposed_id,
            adopt=lambda plan: self._adopt(available, plan),
            # Not in a fork: the parent process continues to use the run.
            owns_adopted=provisional is not None and provisional.owns_run and not self.launch.is_child,
            create_new=topology.world_size > 1 or is_another,
            led_by_trainer=True,  # which catches SIGTERM to save a checkpoint
            may_restart=topology.world_size > 1 or requested.resume(self._arguments) == "auto",  # else as stock
        )
        if provisional is not None:
            provisional.release()
        if session.owns_run and self.axis is None and provisional is None:
            session.run.define_metric("*", step_metric="global_step")  # tensorboard's, as the stock logger
        self.base_id = session.plan.base_id or (str(session.run.id) if session.run else self.base_id)
        if topology.world_size == 1:
            launching.script_ids.offer(self.number, str(self.base_id), told_of(session.run))
        else:
            _final[self.number, self.launch.home] = session
            session.expect_config(vars(self).get("early_config", {}))
            self.announce()
        return session

    def _final_session(self) -> Session | None:
        """The session of a copy of this logger, or of the logger whose run this one uses."""
        mine = _final.get((self.number, self.launch.home))
        if mine is not None and mine in open_sessions():
            return mine
        for other in open_sessions():
            is_meant = other in _final.values() and self._requested_id in (None, other.plan.base_id or other.id)
            if is_meant and other.options == self.options and other.is_returned(None, None, disabled=False):
                self._warn_of_use(other.run)
                other.expect_config(vars(self).get("early_config", {}))
                return other
        return None

    def _init_arguments(self, topology: Topology) -> dict[str, Any]:
        """The stock logger's arguments in a world of one; else with its defaults, and without an unset `anonymous`."""
        if topology.world_size == 1:
            return self._arguments
        arguments = {name: value for name, value in self._arguments.items() if name != "anonymous" or value}
        stock = {"resume": "allow", **({"mode": "offline"} if self._is_offline else {})}  # the stock logger's defaults
        unset = {name: value for name, value in stock.items() if arguments.get(name) is None}  # as by LightningCLI
        return {**arguments, **unset}

    def _available_run(self, run: Run | None) -> Run | None:
        """The run of this process to use: the provisional one, the user's, or the running one, as the stock logger."""
        if self.session is not None or run is not None:
            return run
        held = current()
        may_use = self.options.is_run_of_rank_0 or (held is not None and held.plan.run_mode == self.options.run_mode)
        running = run_metadata.running_run() if may_use else None
        if running is not None:
            self._warn_of_use(running)
        return running

    def _other_axis(self, run: Run | None) -> str | None:
        """The x axis of the script's session with a run, on which its charts are drawn, if it is not the logger's."""
        axes = [session.axis for session in open_sessions() if run is not None and session.run is run]
        return next((axis for axis in axes if axis not in (None, self.axis)), self.launch.other_axis)

    def _warn_of_use(self, running: AnyRun) -> None:
        asked = {name: value for name, value in self._arguments.items() if value != _STOCK_PROJECT}
        ignored = run_metadata.without_effect(asked, running)
        rank_zero_warn(
            "There is a wandb run already in progress, and DistWandbLogger will use it"
            f"{f', so these arguments have no effect: {ignored}' if ignored else ''}. If this is not desired, call "
            "`wandb.finish()` before the logger is used."
        )

    def _adopt(self, available: Run | None, plan: RunPlan) -> Run | None:
        """The run to use instead of opening one: `available`, or the parent's in a process of ddp_spawn."""
        if available is None:
            parents_run = self.launch.parents_run
            return wandb_private.unpickled_run(parents_run) if parents_run and plan.run_mode == "auto" else None
        if self.session is not None and (plan.shared or plan.run_id != available.id):
            raise _opened_too_early(available.id, plan.run_mode, f"the run {plan.run_id!r} here")
        return available


def holder_of(logger: object) -> SessionHolder | None:
    holder = getattr(logger, "_holder", None)
    return holder if isinstance(holder, SessionHolder) else None


def _opened_too_early(run_id: str, run_mode: str, needs: str) -> ConfigurationError:
    return ConfigurationError(
        f"The run {run_id!r} was opened by logger.experiment before the Trainer started its processes, but "
        f"run_mode={run_mode!r} needs {needs}. Use logger.experiment from setup() on; pass config with "
        "log_hyperparams(), which waits for the run."
    )


def _mesh_in_use() -> Mesh | None:
    """Find the `DeviceMesh` of the strategy that a Trainer is setting up; `None` without one."""
    # Lightning asks its loggers for their experiments before it passes them its module, which leads to the Trainer, and
    # does not pass itself. So the Trainer is looked up in the calling frames. If Lightning's functions have no such
    # variable, the unit is all ranks, as without a mesh, and tests/e2e/test_meshes.py fails.
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        for name in ("trainer", "self"):
            is_lightnings = frame.f_globals.get("__name__", "").startswith(("lightning.", "pytorch_lightning."))
            trainer = frame.f_locals.get(name) if is_lightnings else None
            if trainer is not None and is_a(trainer, "Trainer"):
                with suppress(RuntimeError):  # not set up yet
                    return getattr(trainer.strategy, "device_mesh", None)
                return None
        frame = frame.f_back
    return None


class NullExperiment(NullRun, OfLightning):
    """`experiment` on a rank without a run. Lightning expects a `DummyExperiment` there.

    As in Lightning's class, methods return `None`, except those whose result scripts use (`GIVE_BACK`). It refers to
    the holder, not to a session, because scripts keep an experiment that they got before the ranks were known.
    """

    stock = "loggers.logger.DummyExperiment"

    def __init__(self, holder: SessionHolder) -> None:
        super().__init__()
        self.show(_successor=lambda: None if holder.session is None else holder.session.run)
        self.show(config=ConfigView(EarlyConfig(lambda: holder.session, lambda: holder.early_config)))
        self.show_metadata(holder.early_metadata, None)

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return _Nothing() if isinstance(found, NullPart) and name not in GIVE_BACK else found


class _Nothing(NullPart):
    """An attribute of the stand-in that accepts any call and returns `None`."""

    def __call__(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing."""
