"""Opening a session, in steps that may each refuse. All integrations open their sessions here (`SessionOpener.open`).

1. *Arguments* are checked before anything starts.
2. *Meeting* (`job.job_store`): the session's name, and the layout over nodes (`job_identity`). If the session has moved
   to another primary meanwhile, that one is opened instead.
3. *Config* (`config.sync`): the coordinator's is published, with which the other ranks compare theirs.
4. *Earlier start* (`restart`): only the coordinator looks for one, in files that perhaps only some nodes see.
5. *Plan* (`settings.plan`): pure, and made once, after the coordinator has published its base id, mode, scope and
   describing arguments (`job_description`). No later code asks for the rank again.
6. *Run* (`runs.opening`), or a `NullRun`, and the parts of the session around it.
7. *Start*: rows are accepted, the run and the restart record are published, each unit's primary prints a line.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from dist_wandb.errors import ConfigurationError, RendezvousError
from dist_wandb.exchange.membership.generations import GenerationStore, keys_of, publish_opened
from dist_wandb.job import leftovers
from dist_wandb.job.job_identity import agree_on_base_id, id_of_job, learn_layout, make_id, refuse, wait_base_id
from dist_wandb.job.job_store import JobStore
from dist_wandb.job.launch import Launch, detected_launchers, doubts_of
from dist_wandb.job.topology import Topology
from dist_wandb.notices import users_line, warn
from dist_wandb.runs import interception, requested, run_metadata, sweeps, wandb_private
from dist_wandb.runs.definitions import STEP_METRIC, define_step_metric
from dist_wandb.runs.null_run import AnyRun, Run
from dist_wandb.runs.opening import RunOpener, run_key
from dist_wandb.session import inherited_rank, job_description, registry, restart
from dist_wandb.session.config.sync import ConfigSync
from dist_wandb.session.job_link import MOVED, JobLink, move
from dist_wandb.session.notices import print_line
from dist_wandb.session.own_run import OwnRun
from dist_wandb.session.session import Session
from dist_wandb.settings.options import Options
from dist_wandb.settings.plan import RunPlan, Unit, check_unit, needs_layout, runs_outside_sweep, too_large, unit_of


def open_session(
    options: Options, init_arguments: Mapping[str, Any], *, topology: Topology | None = None, **further: Any
) -> Session:
    """Open a session of this rank, which is detected unless a framework knows it; `further`: see `SessionOpener`.

    Raises `ConfigurationError` for arguments that cannot be honoured, `TopologyError` if this process's rank is not
    sufficiently known, and `RendezvousError` if the ranks could not agree within `join_timeout`.
    """
    return SessionOpener(options, init_arguments, topology or identify(), **further).open()


def identify() -> Topology:
    """Detect rank and layout; warn if a launcher contradicts them. A process started by a rank is a job of its own."""
    found, holder = inherited_rank.known()
    topology = found or Topology.single()
    if holder is not None:
        print_line(
            f"dist_wandb: process {os.getpid()} was started by process {holder}, which holds the rank whose variables "
            "or process group it has inherited. So it logs to a run of its own, as with wandb."
        )
        return topology
    if topology.origin("global_rank") == "torch.distributed":
        return topology
    if topology.world_size == 1 and multiprocessing.parent_process() is not None:
        warn(
            f"{multiprocessing.current_process().name} was started by another process, but its rank is not known, so "
            "it is treated as a separate job. If it is one of several ranks, open the run after init_process_group, "
            "or set RANK and WORLD_SIZE.",
            users_line(),
        )
    else:
        for doubt in doubts_of(detected_launchers(), topology):
            warn(doubt, users_line())
    return topology


@dataclass(eq=False, repr=False)
class SessionOpener:
    """Opens one session."""

    options: Options
    init_arguments: Mapping[str, Any]
    topology: Topology
    _: KW_ONLY
    integration: str  # its name, for messages and to keep the sessions of integrations apart
    step_metric: str | None = STEP_METRIC  # name of the x axis; `None` for none
    other_axis: str | None = None  # that of the session which has opened the run to use, if it is another one
    number: int | None = None  # of the session among the integration's sessions of this job; counted otherwise
    proposed_id: str | None = None  # base id to use on the coordinator unless the user asked for one
    adopt: Callable[[RunPlan], Run | None] = lambda _: None  # may return a run that is open, to be used instead
    owns_adopted: bool = False  # whether that run is to be ended with the session, as if the session had opened it
    create_new: bool = True  # if this process has a run already, which `wandb.init` would return
    may_restart: bool = True  # this start may continue the runs of an earlier one, and a later start those of this one
    # A trainer handles SIGTERM, and its integration calls `Session.announce`. In a world of one, `wandb.init` gets
    # exactly `init_arguments`, without the settings that limit the cost of an unreachable server or a killed process.
    led_by_trainer: bool = False
    # The session of this rank that moves to this one: the training goes on, even if the job's store is gone.
    predecessor: Session | None = None
    store_answers: bool = True  # as far as it is known

    def open(self) -> Session:
        self._check_arguments()
        self._meet()
        if (moved_to := self._moved_to()) is not None:
            late = self._as_late()
            return self._reopened(moved_to) if late is None else late.open()
        self._compare_config()
        self._find_earlier_start()
        self._plan()
        with ExitStack() as until_started:
            session = self.assemble(until_started)
            self._link.move = lambda primary_rank: move(self.predecessor or session, self._reopened, primary_rank)
            self._start(session)
        return session

    def _check_arguments(self) -> None:
        if self.topology.is_unconnected:
            # A process of Lightning's without a process group yet. The first one ran the same line as a job of its own,
            # before it started the others: no rank meets this one.
            if not self.options.is_run_of_rank_0:
                raise ConfigurationError(
                    f"{self.integration} was called on rank {self.topology.global_rank} before Lightning had connected "
                    f"the ranks, but run_mode={self.options.run_mode!r} with primary_rank={self.options.primary_rank} "
                    "needs all of them. Pass these options to DistWandbLogger, or start the script with torchrun."
                )
            self.options = replace(self.options, unit=(0,))
        self._topology = self.topology.led_by(self.options.primary_rank)
        label = requested.replaced_label(self.init_arguments, self.options.run_mode, self.topology.world_size)
        if label is not None and self.topology.is_coordinator:
            warn(
                f"{label} is not used: with run_mode='shared' each rank has a label of its own, such as rank-0. Leave "
                "it out; per_rank selects the names that are written under labels.",
                users_line(),
            )
        self._arguments = sweeps.trial_arguments(self.init_arguments)
        if not self._topology.is_coordinator:
            sweeps.forget_missing_values()
        if self.topology.world_size > 1:
            inherited_rank.announce()

    def _meet(self) -> None:
        """Find the job's store and, if the plan needs it, learn from it how the ranks lie on nodes."""
        options, all_nodes = self.options, self.options.system_metrics == "all-nodes"
        self._name, self._store = job_description.name_and_store(
            options, self._topology, self.integration, self.number, store_answers=self.store_answers
        )
        job_description.check_trial(self._store, self._topology)
        restart.check_resume(self._arguments, options, self._topology, has_store=self._store is not None)
        if self._store is not None:
            needed = needs_layout(self._topology, options.run_mode, options.rank_scope, all_nodes=all_nodes)
            self._topology = learn_layout(self._store, self._topology, needed=needed)
        try:
            check_unit(self._topology, options.rank_scope, options.unit_ranks)
        except ConfigurationError as error:
            refuse(self._store, self._topology, str(error))
            raise

    def _compare_config(self) -> None:
        store, run = self._store, requested.naming(self._arguments)
        is_disabled = requested.mode_if_given(self._arguments) == "disabled"  # as a guard: only others log
        run["mode"] = "disabled" if is_disabled else "online or offline"
        config = run_metadata.chosen_config(self._arguments)
        self._config_sync = ConfigSync(self.options, self._topology, config, run)
        self._config_sync.connection.find = lambda: store
        self._config_sync.compare()

    def _find_earlier_start(self) -> None:
        topology, has_store = self._topology, self._store is not None
        self._restart_store: restart.RestartStore | None = None
        self._earlier: restart.Earlier | None = None  # start whose runs this one continues
        if topology.is_coordinator and self.may_restart and (topology.world_size > 1 or not inherited_rank.holder()):
            self._restart_store = restart.RestartStore(self._name, self.options, topology, self._arguments)
            if restart.can_look_back(self.options, topology, has_store=has_store):
                self._earlier = self._restart_store.find()
        self._arguments = restart.continued(self._arguments, self._earlier, topology, has_store=has_store)

    def _plan(self) -> None:
        options, topology = self.options, self._topology
        base_id = self._base_id()
        self._arguments = job_description.complete(options, topology, self._store, self._arguments)
        plan = job_description.plan_of(topology, options, base_id, requested.text(self._arguments, "group"))
        if topology.is_coordinator:
            doubt = too_large(topology, plan, topology.local_world_size, options.unit_ranks)
            not_kept = sweeps.unused_arguments(self.init_arguments)
            for message in filter(None, (doubt, not_kept, runs_outside_sweep(topology, plan))):
                warn(message, users_line())
        link = self._link = JobLink(options, topology, plan, self._store, self._name, is_counted=self.number is None)
        # Of several units, the trial, or the run to be rewound, may be another one's.
        is_bound = link.unit.name and (sweeps.is_trial() or requested.first_step(self._arguments))
        link.may_move = options.run_mode == "auto" and not is_bound
        link.report_opened()

    def _base_id(self) -> str | None:
        """The base id if this rank's plan needs it. The coordinator also publishes it for ranks that need it."""
        options, topology, requested_id = self.options, self._topology, requested.run_id(self._arguments)
        if topology.world_size == 1:
            return requested_id
        name = self._name  # without a store, the id is made from it and the launcher's name for the job
        if (requeues := Launch.detect().requeues) and requested.resume(self._arguments) == "never":
            name = f"{name}/{requeues}"
        if not job_description.needs_base_id(topology, options):
            return requested_id or (None if self._store is not None else id_of_job(name, topology))
        if self._store is None and options.run_mode == "auto" and options.rank_scope == "global":  # in no other's plan
            return requested_id or id_of_job(name, topology) or self.proposed_id or make_id()
        return agree_on_base_id(self._store, topology, requested_id, self.proposed_id, name)

    def assemble(self, until_started: ExitStack) -> Session:
        """Open the run, and assemble the session; `until_started` is left once that has started."""
        link, config_sync, plan = self._link, self._config_sync, self._link.plan
        step_metric, predecessor = self.step_metric, self.predecessor
        adopted = self.adopt(plan) if plan.opens_run else None
        before = run_metadata.running_run()
        is_beside = self._topology.world_size > 1 and before is not None
        has_run = any(session.run for session in registry.open_sessions()) or is_beside
        opener = RunOpener(
            self.options,
            self._topology,
            plan,
            self._store,
            self._arguments,
            complete=lambda arguments: config_sync.completed(arguments, plan, link.unit.name),
            create_new=self.create_new and has_run,
            is_alone=not has_run and before is None,
            as_given=self.led_by_trainer,
            is_current=requested.reinit(self._arguments) != "create_new",
        )
        with interception.new_runs_log(predecessor.log) if predecessor else nullcontext():
            run = adopted or opener.open()
            if predecessor is not None:  # on another thread than the training's, which may log to it already
                log_first = interception.logs_first(predecessor.log)
                until_started.callback(interception.intercept_methods(run, {"log": log_first}))
        attached = opener.attach()
        is_new = adopted is None and run is not before
        is_owned = is_new or (adopted is not None and self.owns_adopted)
        if is_new and step_metric is not None:
            define_step_metric(run, step_metric)
        first_row = 0
        if step_metric == STEP_METRIC or (step_metric is not None and wandb_private.is_wandbs(run)):
            first_row = self._first_row(run, step_metric)
            wandb_private.set_starting_step(run, first_row)
        config_sync.connection.find = link.find_store
        config_sync.connection.await_primary = link.wait
        if self._topology.is_unconnected:  # reads get what this rank was given, as on rank 0
            run_id = requested.run_id(self._arguments)
            config_sync.metadata = run_metadata.as_requested(self._arguments, run_id, is_offline=False)
            config_sync.close()
        own = OwnRun(run, link, opener, config_sync, attached, is_owned, step_metric, first_row, self.other_axis)
        return Session(own, self._restart_store)

    def _first_row(self, run: AnyRun, axis: str) -> int:
        """Where rows without a step start on an axis. The primary of a shared run determines it for all its writers."""
        plan = self._link.plan
        if not plan.shared or plan.primary or self._store is None:
            return restart.next_row(run, self._arguments, axis)
        if not requested.continues(self._arguments) and not requested.first_step(self._arguments):
            return 0
        try:
            return int(self._store.wait_get(run_key(plan), "its primary").get("first_row", 0))
        except RendezvousError as error:
            warn(f"rows without a step start at 0 under this rank's label: {error}")
            return 0

    def _start(self, session: Session) -> None:
        try:
            session.start((self.predecessor or session).log)
            with suppress(RendezvousError) if self.predecessor else nullcontext():
                session.report_run()
            job_description.check_trial(self._store, self._topology)
            shares_run = any(one.run is session.run for one in registry.open_sessions() if one is not session)
            if (
                self._restart_store is not None
                and session.owns_run
                and not shares_run  # else the session that opened the run has left the record
                and session.run
                and not run_metadata.is_disabled(session.run)
            ):
                self._restart_store.leave(session.plan.base_id or str(session.run.id))
                if self._earlier is not None:
                    print_line(self._earlier.announcement(self._topology.world_size), session.run)
            if not self.led_by_trainer:
                session.announce()
                registry.process_end.catch_sigterm()
        except BaseException:
            if session in registry.shutdowns:  # no caller has it
                registry.shutdowns[session].end_with_process(registry.FAILED, failed=True)
            raise

    # With another primary: see `job_link.move`

    def _moved(self, primary_rank: int) -> SessionOpener:
        """Return what opens the session in which the ranks continue with another primary.

        The ranks of one of several nodes become the unit of that session. Their run keeps its id and name.
        """
        unit, options = self._unit(), replace(self.options, rank_scope="global", system_metrics="primary")
        name, given = f"{self._name}{MOVED}", self.init_arguments
        options = replace(options, primary_rank=primary_rank)
        if unit.name:
            own = {"id": requested.run_id(self._arguments), "name": requested.text(self._arguments, "name")}
            with suppress(RendezvousError, ConfigurationError):  # the job's primary is missing, too
                own["id"] = wait_base_id(self._store, self._topology, 0.0) if self._store else own["id"]
            own = {argument: f"{value}-{unit.name}" for argument, value in own.items() if value}
            name, given, options = f"{name}/{unit.name}", {**given, **own}, replace(options, unit=sorted(unit.ranks))
        return replace(
            self, options=options, init_arguments=given, integration=name, number=1, proposed_id=None, predecessor=None
        )

    def _reopened(self, primary_rank: int, predecessor: Session | None = None) -> Session:
        moved = replace(self._moved(primary_rank), predecessor=predecessor)
        try:
            return moved.open()
        except RendezvousError:  # its host has ended meanwhile
            return replace(moved, store_answers=False).open()

    def _unit(self) -> Unit:
        return unit_of(self._topology, self.options.rank_scope, self.options.unit_ranks)

    def _moved_to(self) -> int | None:
        """Return the rank that has become the primary, because this one, which should be, comes too late for it."""
        store = self._store
        if store is None or self.options.run_mode != "auto" or (unit := self._unit()).index != 0:
            return None
        keys = store.below(keys_of(unit))
        publish_opened(keys, unit)
        first = GenerationStore(keys, unit.index).get(0)
        return None if first is None or first.members or first.source is None else unit.ranks[first.source]

    def _as_late(self) -> SessionOpener | None:
        """Return what opens a session of this rank alone, if the one with the other primary has ended already.

        Its run is another one: under the id of the run that has ended, it would replace it.
        """
        moved, rank = self._moved(0), self._topology.global_rank
        store = JobStore.find(f"{moved.integration}/1", self._topology, self.options.limits.join_timeout)
        if not job_description.ask(store, leftovers.is_over, False):
            return None
        warn(
            f"rank {rank} opened its session after the other ranks had ended theirs, so what it logs is in a run of "
            "its own. Open the same runs in the same order on all ranks.",
            users_line(),
        )
        own = {"id": f"{asked}-{rank}"} if (asked := requested.run_id(self._arguments)) else {}
        options = replace(moved.options, unit=(rank,), primary_rank=rank)
        name, given = f"{self.integration}{MOVED}/late", {**self.init_arguments, **own}
        return replace(moved, options=options, init_arguments=given, integration=name)
