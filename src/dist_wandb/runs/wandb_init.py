"""The call of `wandb.init` for a `RunPlan`.

In a world of one, Lightning's integration passes exactly the user's arguments to `wandb.init`, except
``resume="auto"``, which no world passes on. In all other cases a copy of the user's settings is passed as well, with
limits that the user has not set: `finish_timeout`, and one second until rows are on disk. In a world of several ranks
the call also has id, group, name suffix, a separate directory for the rank (``DIR/wandb/rank-R``) if every rank writes
and, online, W&B's shared mode.

W&B's modes exclude each other. The user's mode is therefore determined first; offline and disabled are kept. Offline,
each rank writes an offline run of its own, and a sidecar next to it (`wandb_files.sidecar`) records label, primary and
finish flag for the upload. Online shared writers have a sidecar too, because their upload may be interrupted. W&B
labels system metrics when it records them, so offline writers of a shared run get their `x_label`, too; the other
properties of shared mode are applied by the upload.

A shared writer drops a `WANDB_SERVICE` inherited from another process: that service refuses a second writer.
"""

from __future__ import annotations

import inspect
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_wandb.errors import UnavailableError
from dist_wandb.job.model import Topology
from dist_wandb.notices import warn
from dist_wandb.runs import interception, requested, sweeps
from dist_wandb.runs.client_settings import check_workspace, hidden_values, one_line
from dist_wandb.runs.current_server import warn_of_workspace
from dist_wandb.runs.null_run import Run
from dist_wandb.runs.wandb_private import drop_inherited_service, with_warnings_alone
from dist_wandb.settings.plan import RunPlan, unit_run_id
from dist_wandb.wandb_files.sidecar import SIDECAR_NAME, Sidecar, write_sidecar

if TYPE_CHECKING:
    import wandb


_FLUSH_INTERVAL = 1.0  # seconds until rows are on disk; a killed process may lose newer rows. wandb's default is 15
_REFUSED = re.compile(r"\b(?:HTTP|error|status) (?:400|401|403|404|409|410|422)\b", re.IGNORECASE)
_SILENCE = re.compile(
    r"tim(?:ed|e) ?out|timeout|giving up|dial tcp|connect(?:ion|:)|no such host|network is|unreachable"
    r"|\bEOF\b|broken pipe|\b(?:HTTP|error|status) (?:429|5\d\d)\b",
    re.IGNORECASE,
)
_NO_CREDENTIALS = re.compile(r"api[ _]key|log ?in", re.IGNORECASE)  # wandb reports missing ones as wrong usage


def open_run(
    plan: RunPlan,
    topology: Topology,
    init_arguments: Mapping[str, Any],
    *,
    create_new: bool = False,  # even if this process has a run, which wandb would otherwise return
    upload_timeout: float | None = None,  # seconds, unless the user has set it; `None`: no settings but the user's
    offline: bool = False,  # regardless of the user's mode
) -> Run:
    """Open the run of a plan that opens one, or attaches to one. The given arguments are not changed.

    Raises `UnavailableError` if W&B could not open the run because its server does not answer, or refuses;
    `ConfigurationError` if W&B refuses a setting; `wandb.Error` if wandb does not accept the arguments.
    """
    if plan.has_writers:  # before the first use of wandb in this process, which reading the mode is
        drop_inherited_service()
    arguments = dict(init_arguments)
    if offline:
        arguments["mode"] = "offline"
    if topology.world_size > 1:
        arguments.update(_planned_arguments(plan, topology, arguments))
    if upload_timeout is not None:
        settings = arguments["settings"] = _copied_settings(arguments.get("settings"))
        # For a dead server, and for the loss of a killed rank.
        limits = {"finish_timeout": upload_timeout, "x_transaction_log_flush_interval": _FLUSH_INTERVAL}
        # Values that the user has set are kept; limits unknown to this version of wandb are left out.
        free = limits.keys() & type(settings).model_fields.keys() - settings.model_fields_set
        for name in [name for name in free if f"WANDB_{name.upper()}" not in os.environ]:
            setattr(settings, name, limits[name])
    if create_new and arguments.get("reinit") in (None, "default"):  # LightningCLI passes None if it is not in its file
        arguments["reinit"] = "create_new"
    _choose_directory(arguments, topology, is_own=topology.world_size > 1 and (plan.own_directory or plan.attaches))
    check_workspace()
    if plan.announces:
        warn_of_workspace(arguments)
    is_quiet = plan.is_one_of_several and not plan.announces
    with with_warnings_alone(init_arguments, on=is_quiet), sweeps.planned(arguments, plan) as planned_arguments:
        run = _init(planned_arguments)
    if topology.world_size > 1 and (run.offline or plan.has_writers) and not run.disabled:
        try:
            write_sidecar(Path(run.dir).parent, Sidecar.of(plan, topology))
        except OSError as error:
            warn(
                f"rank {topology.global_rank} could not write {SIDECAR_NAME} beside its run "
                f"({error.strerror or error}). Without it dist-wandb sync does not know the run's place in the job."
            )
    return run


def _init(arguments: Mapping[str, Any]) -> Run:
    """Call `wandb.init`; turn failures of W&B, but not wrong arguments, into an `UnavailableError`."""
    import wandb

    # "auto" would read and write ``wandb-resume.json`` of whoever owns it; `restart` has looked for the id already.
    given = {**arguments, "resume": "allow"} if requested.resume(arguments) == "auto" else dict(arguments)
    # Some versions warn of ``anonymous=None`` because it differs from the default.
    init: Any = interception.undecorated(wandb, "init")  # another session may serve a rank without a run
    parameter = inspect.signature(init, follow_wrapped=False).parameters.get("anonymous")
    if given.get("anonymous") is None and parameter is not None and parameter.default is not None:
        given.pop("anonymous", None)
    try:
        with hidden_values():
            run: Run = init(**given)
            return run
    except (TypeError, ValueError):  # unknown arguments or settings
        raise
    except wandb.errors.UsageError as error:
        if not _NO_CREDENTIALS.search(str(error)):
            raise
        raise UnavailableError(one_line(error)) from error
    except Exception as error:  # a dead or refusing server, a dead process of wandb's own, a bug in wandb
        raise UnavailableError(one_line(error)) from error


def is_answer(error: BaseException | None) -> bool:
    """Return whether an error is what W&B's server answers about the arguments, so that a later upload fails, too."""
    import wandb

    if isinstance(error, wandb.errors.Error) and _REFUSED.search(str(error)):  # also after its last attempt
        return True
    # Without an answer, or with one of a server that is down or busy (5xx, 429), wandb has tried until it timed out.
    return isinstance(error, wandb.errors.CommError) and not _SILENCE.search(str(error))


def _planned_arguments(plan: RunPlan, topology: Topology, given: Mapping[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = {"id": unit_run_id(plan)}
    name = requested.value(given, "name")
    if name and plan.name_suffix:
        arguments["name"] = f"{name}-{plan.name_suffix}"
    if plan.group is not None:
        arguments["group"] = plan.group
    arguments.update(_branches(plan, given))
    if plan.attaches:
        arguments["reinit"] = "create_new"  # wandb.run stays unchanged: this rank has no run
    has_own_directory = plan.own_directory or plan.attaches
    mode = requested.mode(given) if has_own_directory or plan.has_writers else None
    if has_own_directory and mode != "disabled":  # in a common directory, equal ids at equal times would collide
        arguments["dir"] = str(requested.wandb_directory(given) / f"rank-{topology.global_rank}")
    if plan.has_writers and mode != "disabled":
        settings = arguments["settings"] = _copied_settings(given.get("settings"))
        if not plan.primary:
            for name in {"resume_from", "fork_from"} & settings.model_fields_set:
                setattr(settings, name, None)  # see `_branches`
        settings.x_label = (
            plan.label or plan.hardware
        )  # offline too: system metrics are labelled when they are recorded
        if mode == "online":
            settings.mode, arguments["mode"] = "shared", None
            settings.x_primary = settings.x_update_finish_state = plan.primary
    return arguments


def _branches(plan: RunPlan, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the branch points of a run: of several writers, the primary alone rewinds or forks it."""
    branches = {name: given[name] for name in ("resume_from", "fork_from") if isinstance(given.get(name), str)}
    if plan.has_writers and not plan.primary:
        return dict.fromkeys(branches)
    if not plan.name_suffix:
        return {}
    parts = {name: value.partition("?") for name, value in branches.items()}
    return {name: f"{run}-{plan.name_suffix}{mark}{point}" for name, (run, mark, point) in parts.items()}


def _copied_settings(given: wandb.Settings | Mapping[str, Any] | None) -> wandb.Settings:
    import wandb

    with hidden_values():
        return wandb.Settings(**given) if isinstance(given, Mapping) else (given or wandb.Settings()).model_copy()


def _choose_directory(arguments: dict[str, Any], topology: Topology, *, is_own: bool) -> None:
    """Create the directory, or choose a new private one if it cannot be used, as `dir` of the arguments.

    wandb would create it only after a warning about a missing git repository. Instead of a directory that it cannot
    write to it would use the shared temporary directory, where it follows and removes files that anybody can leave. If
    `dir` is the rank's own, with a fixed name, a link in its place, or in it, is not followed.
    """
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
