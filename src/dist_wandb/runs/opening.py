"""Open the run of one rank: after its primary, with retries, and on disk if W&B cannot be reached.

Under `run_key` the primary of a unit publishes that its run is open, or why it is not. Before it calls W&B, it
publishes under `opening_key` how long that may take, so that the other ranks wait for it. The secondaries of a shared
run wait for both messages, open their runs, and add themselves to `attached_writers`. They retry, because the server
may not know the run yet.

If W&B cannot be reached, the run is opened offline with one warning. What its server answers about the arguments (no
such entity, no permission, a rewind that it refuses, a deleted id) is wandb's error, as an upload would fail, too. The
primary publishes whether its run is online or offline, so that no secondary waits for a dead server.
With ``strict=True`` it is an error instead, on all ranks of a shared run. This applies to failures of W&B only, not to
wrong arguments. wandb's process keeps the id of a run that could not be opened in use. It is torn down if no other run
is open; otherwise the other runs keep it, and the next run starts another process (`wandb_private.detach_service`).

With ``system_metrics="all-nodes"`` local rank 0 of each other node attaches to the run of `auto` as a writer without
rows.

Of the call of `wandb.init` (`RunOpener.attempt`): in a world of one, Lightning's integration passes exactly the user's
arguments, except ``resume="auto"``, which no world passes on. In all other cases a copy of the user's settings is
passed as well, with limits that the user has not set: `finish_timeout`, and one second until rows are on disk. In a
world of several ranks the call also has id, group, name suffix, a separate directory for the rank
(``DIR/wandb/rank-R``) if every rank writes and, online, W&B's shared mode.

W&B's modes exclude each other. The user's mode is therefore determined first; offline and disabled are kept. Offline,
each rank writes an offline run of its own, and a sidecar next to it (`wandb_files.sidecar`) records label, primary and
finish flag for the upload. Online shared writers have a sidecar too, because their upload may be interrupted. W&B
labels system metrics when it records them, so offline writers of a shared run get their `x_label`, too; the other
properties of shared mode are applied by the upload.

A shared writer drops a `WANDB_SERVICE` inherited from another process: that service refuses a second writer.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from dist_wandb.errors import ConfigurationError, RendezvousError, UnavailableError
from dist_wandb.job.job_store import JobStore, SharedList
from dist_wandb.job.topology import Topology
from dist_wandb.notices import warn
from dist_wandb.runs import client_settings, interception, requested, sweeps, wandb_private
from dist_wandb.runs.definitions import define_step_metric
from dist_wandb.runs.null_run import AnyRun, NullRun, Run
from dist_wandb.settings.options import Options
from dist_wandb.settings.plan import RunPlan, unit_run_id
from dist_wandb.wandb_files.sidecar import SIDECAR_NAME, Sidecar, write_sidecar

if TYPE_CHECKING:
    import wandb

_log = logging.getLogger("dist_wandb")

_RETRIES = 2  # of a secondary: the server may not know the run yet (wandb issues 9871, 10497)
_PAUSE = 1.0  # seconds before the first retry, doubled before the second
_FLUSH_INTERVAL = 1.0  # seconds until rows are on disk; a killed process may lose newer rows. wandb's default is 15
_REFUSED = re.compile(r"\b(?:HTTP|error|status) (?:400|401|403|404|409|410|422)\b", re.IGNORECASE)
_SILENCE = re.compile(
    r"tim(?:ed|e) ?out|timeout|giving up|dial tcp|connect(?:ion|:)|no such host|network is|unreachable"
    r"|\bEOF\b|broken pipe|\b(?:HTTP|error|status) (?:429|5\d\d)\b",
    re.IGNORECASE,
)
_NOT_INSTALLED = re.compile(r"\binstall\b")  # what sync_tensorboard or monitor_gym needs
_NO_CREDENTIALS = re.compile(r"api[ _]key|log ?in", re.IGNORECASE)  # wandb reports missing ones as wrong usage


class OpenedRun(TypedDict, total=False):
    """A primary's message about its run: that it is open, or could not be opened."""

    url: str | None  # `None` if the run is not on the server
    offline: bool  # whether it is not on the server
    first_row: int  # position on the x axis of the first row without a step
    error: str
    refused: bool  # by W&B's server, so that no rank goes offline


@dataclass(frozen=True)
class RunOpener:
    """Opens the run of one rank."""

    options: Options
    topology: Topology
    plan: RunPlan
    job_store: JobStore | None
    arguments: Mapping[str, Any]  # of `wandb.init`
    complete: Callable[[Mapping[str, Any]], Mapping[str, Any]]  # adds the config, known only after the primary's run
    create_new: bool  # whether this process may already have another run
    is_alone: bool  # whether no other run of this process is open
    as_given: bool  # whether wandb gets only the user's settings
    is_current: bool = True  # whether ``wandb.run`` may be the run

    def open(self) -> AnyRun:
        """Open the run.

        Online, a secondary of a shared run waits until the primary has opened it: if it attaches earlier, it may lose
        rows (wandb issue 12269). If the primary's run is on disk, so are the others.

        Raises `wandb.errors.CommError` if W&B's server refused the run because of the arguments, `ConfigurationError`
        if it refused that of this rank's primary, `UnavailableError` on all ranks of the unit if W&B cannot be reached
        and `strict` is set, and `RendezvousError` if the primary did not open the run in time.
        """
        if not self.plan.opens_run:
            run = NullRun()
            run.show(_given=requested.settings_in(self.arguments))
            return run
        try:
            return self._open()
        except UnavailableError as error:
            if self.options.strict:
                self._publish({"error": str(error)})
                raise
            rank = self.topology.global_rank
            # A writer beside the primary had right arguments.
            if self.plan.primary and is_answer(error.__cause__):
                self._publish({"error": str(error), "refused": True})
                self._drop_failed_run()
                _log.error(
                    "dist_wandb: W&B's server refused the run of rank %d: %s. This concerns what init was given: "
                    "entity, project, id, resume_from, fork_from or the API key. Correct it, or pass mode='offline' to "
                    "write the run to disk only.",
                    rank,
                    error,
                )
                raise error.__cause__ or error from None
            warn(
                f"rank {rank} could not open its run: {error}. Continuing offline; upload the run later with "
                "dist-wandb sync. Pass strict=True to make it an error."
            )
        except Exception as error:
            self._publish({"error": client_settings.without_values(error)})  # wrong arguments: no rank has to wait
            raise
        self._drop_failed_run()
        try:
            return self.attempt(offline=True)
        except UnavailableError as error:
            warn(f"rank {rank} cannot write its run to disk either: {error}. It is not logged.")
            return NullRun()

    def attach(self) -> AnyRun:
        """Attach to the unit's run for the hardware metrics of this node, if planned. A failure only warns."""
        if not self.plan.attaches:
            return NullRun()
        try:
            return self._open()
        except (UnavailableError, RendezvousError) as error:
            warn(f"rank {self.topology.global_rank} does not record the hardware of its node: {error}")
            self._drop_failed_run()
            return NullRun()

    def again(self, run_id: str, config: Mapping[str, Any], step_metric: str | None) -> AnyRun:
        # W&B may have generated the id.
        kept = {name: value for name, value in self.arguments.items() if name not in ("fork_from", "resume_from")}
        arguments = {**kept, "config": config, "id": run_id}
        run = replace(self, arguments=arguments, complete=lambda given: given, create_new=True).attempt(offline=True)
        if step_metric is not None:
            define_step_metric(run, step_metric)
        return run

    def publish(self, url: str | None, *, offline: bool, writer: int, first_row: int = 0) -> None:
        # This is for ranks without a run and the other writers of a shared run. `writer` is the index of this rank in
        # its unit.
        self._publish_start()
        self._publish({"url": url, "offline": offline, "first_row": first_row})
        if self.plan.has_writers and self.job_store is not None:
            attached_writers(self.job_store, self.plan).append_once(writer)

    def _open(self) -> AnyRun:
        if self.plan.has_writers:  # before the first use of wandb in this process, which reading a setting is
            wandb_private.drop_inherited_service()
        offline, is_secondary = False, self.plan.has_writers and not self.plan.primary
        if is_secondary and self.job_store is not None and requested.mode(self.arguments) == "online":
            within = self.job_store.wait_get(opening_key(self.plan), "its primary")
            published = self.job_store.wait_get(run_key(self.plan), "its primary", float(within))
            if published.get("refused"):
                raise ConfigurationError(
                    f"Rank {self.topology.global_rank} opens no run, because W&B's server refused that of its primary: "
                    f"{published['error']}. Correct the argument of init that this concerns."
                )
            if "error" in published:
                raise UnavailableError(f"its primary could not open the run: {published['error']}")
            offline = published["offline"]
        self._publish_start()
        for number in range(_RETRIES if is_secondary else 0):
            try:
                return self.attempt(offline=offline)
            except UnavailableError as error:
                _log.debug("dist_wandb: rank %d tries again: %s", self.topology.global_rank, error)
            self._drop_failed_run()
            time.sleep(_PAUSE * 2**number)
        return self.attempt(offline=offline)

    def attempt(self, *, offline: bool) -> Run:
        # `offline`: regardless of the user's mode. Raises `UnavailableError` if W&B's server does not answer, or
        # refuses. Raises wandb's own errors, and `ConfigurationError`, about the arguments.
        plan, topology, is_job = self.plan, self.topology, self.topology.world_size > 1
        arguments = dict(self.complete(self.arguments))
        if offline:
            arguments["mode"] = "offline"
        if is_job or offline or not self.as_given:
            import wandb

            given = arguments.get("settings")
            with client_settings.hidden_values():
                given = wandb.Settings(**given) if isinstance(given, Mapping) else given or wandb.Settings()
            settings = arguments["settings"] = given.model_copy()
            if is_job:
                _follow(plan, topology, arguments, settings)
            # For a dead server, and for the loss of a killed rank.
            limits = {
                "finish_timeout": self.options.limits.upload_timeout,
                "x_transaction_log_flush_interval": _FLUSH_INTERVAL,
            }
            # Values that the user has set are kept; limits unknown to this version of wandb are left out.
            free = limits.keys() & type(settings).model_fields.keys() - settings.model_fields_set
            for name in [name for name in free if f"WANDB_{name.upper()}" not in os.environ]:
                setattr(settings, name, limits[name])
        # LightningCLI passes None if it is not in its file.
        if self.create_new and arguments.get("reinit") in (None, "default"):
            arguments["reinit"] = "create_new"  # even if this process has a run, which wandb would otherwise return
        _choose_directory(arguments, topology, is_own=is_job and (plan.own_directory or plan.attaches))
        client_settings.check_workspace()
        if plan.announces:
            requested.warn_of_workspace(arguments)
        is_quiet = plan.is_one_of_several and not plan.announces
        with wandb_private.with_warnings_alone(self.arguments, on=is_quiet), sweeps.planned(arguments, plan) as planned:
            run = _init(planned)
        if is_job and (run.offline or plan.has_writers) and not run.disabled:
            try:
                write_sidecar(Path(run.dir).parent, Sidecar.of(plan, topology))
            except OSError as error:
                warn(
                    f"rank {topology.global_rank} could not write {SIDECAR_NAME} beside its run "
                    f"({error.strerror or error}). Without it dist-wandb sync does not know the run's place in the job."
                )
        return run

    def _drop_failed_run(self) -> None:
        # The id of the failed run is in use by wandb's process.
        if self.is_alone:
            wandb_private.tear_down_service()
        else:
            wandb_private.detach_service()

    def _publish_start(self) -> None:
        if self.job_store is not None and self.plan.announces and self.plan.opens_run:
            self.job_store.publish(opening_key(self.plan), requested.init_timeout(self.arguments))

    def _publish(self, message: OpenedRun) -> None:
        if self.job_store is not None and self.plan.announces:
            self.job_store.publish(run_key(self.plan), message)


def run_key(plan: RunPlan) -> str:
    return f"run/{plan.unit_name}"  # of the unit's primary, also if each rank has a run


def attached_writers(job_store: JobStore, plan: RunPlan) -> SharedList:
    return SharedList(job_store, f"{run_key(plan)}/writers")  # their indices in the unit, each once


def opening_key(plan: RunPlan) -> str:
    return f"{run_key(plan)}/opening"


def _init(arguments: Mapping[str, Any]) -> Run:
    import wandb

    # "auto" would read and write ``wandb-resume.json`` of whoever owns it; `restart` has looked for the id already.
    given = {**arguments, "resume": "allow"} if requested.resume(arguments) == "auto" else dict(arguments)
    # Some versions warn of ``anonymous=None`` because it differs from the default.
    init: Any = interception.original(wandb, "init")  # another session may serve a rank without a run
    given_init = getattr(init, "__wrapped__", init)  # the one that others may have put there
    parameter = inspect.signature(given_init, follow_wrapped=False).parameters.get("anonymous")
    if given.get("anonymous") is None and parameter is not None and parameter.default is not None:
        given.pop("anonymous", None)
    try:
        with client_settings.hidden_values():
            run: Run = init(**given)
            return run
    except (TypeError, ValueError):  # unknown arguments or settings
        raise
    except Exception as error:  # a dead or refusing server, a dead process of wandb's own, a bug in wandb
        is_usage = isinstance(error, wandb.errors.UsageError) and not _NO_CREDENTIALS.search(str(error))
        if is_usage or (isinstance(error, wandb.errors.Error) and _NOT_INSTALLED.search(str(error))):
            raise
        # A failure of W&B, not of the arguments.
        raise UnavailableError(client_settings.one_line(error)) from error


def is_answer(error: BaseException | None) -> bool:
    """Return whether an error is what W&B's server answers about the arguments, so that a later upload fails, too."""
    import wandb

    if isinstance(error, wandb.errors.Error) and _REFUSED.search(str(error)):  # also after its last attempt
        return True
    # Without an answer, or with one of a server that is down or busy (5xx, 429), wandb has tried until it timed out.
    return isinstance(error, wandb.errors.CommError) and not _SILENCE.search(str(error))


def _follow(plan: RunPlan, topology: Topology, arguments: dict[str, Any], settings: wandb.Settings) -> None:
    name, has_own_directory = requested.text(arguments, "name"), plan.own_directory or plan.attaches
    mode = requested.mode(arguments) if has_own_directory or plan.has_writers else None
    arguments["id"] = unit_run_id(plan)
    if name and plan.name_suffix:
        arguments["name"] = f"{name}-{plan.name_suffix}"
    if plan.group is not None:
        arguments["group"] = plan.group
    for branch in ("resume_from", "fork_from"):
        point = arguments.get(branch)
        if plan.has_writers and not plan.primary:  # the primary alone rewinds or forks the run
            arguments.update({branch: None} if point else {})
            if getattr(settings, branch, None) is not None:
                setattr(settings, branch, None)
        elif plan.name_suffix and isinstance(point, str):
            run, mark, step = point.partition("?")
            arguments[branch] = f"{run}-{plan.name_suffix}{mark}{step}"
    if plan.attaches:
        arguments["reinit"] = "create_new"  # wandb.run stays unchanged: this rank has no run
    if has_own_directory and mode != "disabled":  # in a common directory, equal ids at equal times would collide
        arguments["dir"] = str(requested.wandb_directory(arguments) / f"rank-{topology.global_rank}")
    if plan.has_writers and mode != "disabled":
        # Offline too: system metrics are labelled when they are recorded.
        settings.x_label = plan.label or plan.hardware
        if mode == "online":
            settings.mode, arguments["mode"] = "shared", None
            settings.x_primary = settings.x_update_finish_state = plan.primary


def _choose_directory(arguments: dict[str, Any], topology: Topology, *, is_own: bool) -> None:
    # wandb would create it only after a warning about a missing git repository. Instead of a directory that it cannot
    # write to it would use the shared temporary directory, where it follows and removes files that anybody can leave.
    # If `dir` is the rank's own, with a fixed name, a link in its place, or in it, is not followed.
    if requested.mode_if_given(arguments) == "disabled":
        return
    directory = requested.wandb_directory(arguments)
    root = directory.parent
    with suppress(OSError):
        root.mkdir(parents=True, exist_ok=True)
    parts = [root, directory] if directory.exists() else [root]
    is_link = is_own and (root.is_symlink() or directory.is_symlink())
    if not is_link and all(os.access(part, os.R_OK | os.W_OK | os.X_OK) for part in parts):
        return
    with suppress(OSError):  # wandb reports it
        arguments["dir"] = tempfile.mkdtemp(prefix="wandb-")
        warn(
            f"rank {topology.global_rank} cannot write to {directory}, so its run is written to {arguments['dir']}, a "
            "new directory that only this user can enter. Pass dir= with a writable directory."
        )
