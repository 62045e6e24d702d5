"""W&B runs: opening, writing and finishing what a `RunPlan` says. The only module that imports wandb."""

from __future__ import annotations

import difflib
import inspect
import json
import logging
import math
import os
import pickle
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from urllib.parse import quote, urlsplit, urlunsplit

from dist_wandb.config_values import given_values, told, understood
from dist_wandb.delivery import log_of, untaken, unwritten
from dist_wandb.errors import ConfigurationError, UnavailableError, suggest
from dist_wandb.policy import unit_run_id

if TYPE_CHECKING:
    import wandb
    from typing_extensions import Self

    from dist_wandb.policy import RunPlan
    from dist_wandb.record import Record
    from dist_wandb.topology import Topology

    Run: TypeAlias = wandb.Run
    AnyRun: TypeAlias = "wandb.Run | NullRun"

_log = logging.getLogger("dist_wandb")

Mode = Literal["online", "offline", "disabled"]

# What a primary tells of its run to ranks without one.
FACTS = frozenset(
    {
        *("id", "name", "url", "entity", "project", "project_url", "path", "group", "job_type", "tags", "notes"),
        *("dir", "start_time", "sweep_id", "offline", "disabled", "resumed"),
    }
)
SIDECAR_NAME = "dist-wandb.json"
_BEYOND_INIT_TIMEOUT = 30.0  # seconds
_FLUSH_INTERVAL = 1.0  # seconds until rows are on disk: what a killed process may lose. wandb's own is 15
_NO_CREDENTIALS = re.compile(r"api[ _]key|log ?in", re.IGNORECASE)  # to wandb, not to have any is wrong usage
_SIDECAR_FORMAT = 1
# W&B's client refuses the first seven; its documentation adds the backslash and the percent sign.
_FORBIDDEN_IN_IDS = ":;,#?/'\\%"
_WANDB_MODES: dict[str, Mode] = {
    "online": "online",
    "run": "online",
    "shared": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}
_OF_ONE_RUN = frozenset(
    f"WANDB_{name}"
    for name in (
        *("RUN_ID", "NAME", "NOTES", "TAGS", "RUN_GROUP", "JOB_TYPE", "SWEEP_ID", "RESUME", "SERVICE"),
        *("MODE", "SILENT", "QUIET", "X_LABEL", "X_PRIMARY", "X_UPDATE_FINISH_STATE"),
    )
)
_UPLOAD_PATIENCE = {  # W&B waits 2 s after the first failure, and twice as long after each further one
    f"WANDB_X_{client}_RETRY_MAX": "6" for client in ("GRAPHQL", "FILE_STREAM", "FILE_TRANSFER")
}
_DESCRIBING = ("entity", "project", "name", "notes", "tags", "group", "job_type", "dir", "mode", "resume", "config")
# Arguments of wandb.init in every supported version: only others are worth importing wandb for, to look.
_COMMON_INIT_ARGUMENTS = frozenset(
    {
        *("entity", "project", "dir", "id", "name", "notes", "tags", "group", "job_type"),
        *("config", "config_exclude_keys", "config_include_keys", "allow_val_change"),
        *("mode", "force", "reinit", "resume", "resume_from", "fork_from", "anonymous", "settings"),
        *("save_code", "tensorboard", "sync_tensorboard", "monitor_gym"),
    }
)


class NullRun:
    """Stands in for a W&B run on a rank that opens none.

    Every call on it is accepted and does nothing, at any depth of attributes and items, so that the same script runs
    on all ranks: ``run.config.update({...})``, ``run.summary["best"] = 0.9``. It is falsy, so ``if run:`` tells.

    What its primary tells of the run that this rank's numbers go to, it tells too: `id`, `name`, `url`, `entity`,
    `project`, `project_url`, `path`, `group`, `job_type`, `tags`, `notes`, `dir` (on the primary's node), `start_time`,
    `sweep_id`, `offline`, `disabled`, `resumed` and `config`. The first look waits for the primary to open its run,
    up to `join_timeout`; what the primary changes later shows within a heartbeat.

    Args:
        id: Id of the run that this rank's numbers go to, as far as it is known.
        name: Display name of that run.
        url: Address of that run.

    Example:
        With ``run_mode="auto"`` on two ranks::

            run = dist_wandb.init(run_mode="auto").run
            bool(run)  # rank 0: True; rank 1: False
            run.alert("done")  # rank 0: sends an alert; rank 1: does nothing
            run.id, run.project  # the same on both ranks
    """

    def __init__(self, id: str | None = None, name: str | None = None, url: str | None = None) -> None:  # noqa: A002
        self.__dict__["_known"] = {"id": id, "name": name, "url": url}
        self.__dict__["_ask"] = None

    @property
    def id(self) -> str | None:
        """Id of the run that this rank's numbers go to, as far as it is known."""
        found: str | None = self._fact("id")
        return found

    @property
    def name(self) -> str | None:
        """Display name of that run, as far as it is known."""
        found: str | None = self._fact("name")
        return found

    @name.setter
    def name(self, name: str) -> None:
        """Accept and forget."""

    @property
    def url(self) -> str | None:
        """Address of that run; `None` offline, and as far as it is not known."""
        found: str | None = self._fact("url")
        return found

    def show_config(self, config: object) -> None:
        """Have `config` read as the config of the run that this rank's numbers go to."""
        self.__dict__["config"] = config

    def show_facts(self, ask: Callable[[], Mapping[str, Any]], planned_id: str | None) -> None:
        """Have what `ask` returns, by name, read as what is known of the run that this rank's numbers go to.

        Args:
            ask: Tells what is known.
            planned_id: Id of the run as long as nothing is told.
        """
        self.__dict__["_ask"] = ask
        self.__dict__["_known"] = {**self.__dict__["_known"], "id": planned_id}

    def facts(self) -> Mapping[str, Any]:
        """What is known of the run that this rank's numbers go to, by the names that a `wandb.Run` has for it."""
        ask: Callable[[], Mapping[str, Any]] | None = self.__dict__["_ask"]
        told = ask() if ask is not None else {}
        return {**self.__dict__["_known"], **told}

    def _fact(self, name: str) -> Any:
        return self.facts().get(name)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or what another process gets, knows what was known then."""
        own = {name: value for name, value in self.__dict__.items() if name != "finish"}  # see before_finish
        return {**own, "_known": dict(self.facts()), "_ask": None}

    def __bool__(self) -> Literal[False]:
        return False

    def __call__(self, *_args: Any, **_kwargs: Any) -> NullRun:
        """Accept a call of anything."""
        return NullPart()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols like copy and pickle must see that they are not implemented
            raise AttributeError(name)
        if name in FACTS and "_ask" in self.__dict__:
            facts = self.facts()
            if name in facts:
                return facts[name]
        return NullPart()

    def __setattr__(self, name: str, value: Any) -> None:
        """Accept and forget."""

    def __getitem__(self, key: Any) -> NullRun:
        return NullPart()

    def __setitem__(self, key: Any, value: Any) -> None:
        """Accept and forget."""

    def __delitem__(self, key: Any) -> None:
        """Accept and forget."""

    def __contains__(self, key: object) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Let exceptions through."""

    def __repr__(self) -> str:
        return "NullRun()"


class NullPart(NullRun):
    """Stands in for a part of a run, such as its summary or an artifact: all of it is of this kind, names included."""

    def _fact(self, name: str) -> Any:  # noqa: ARG002  # of a part nothing is known
        return NullPart()


def check_init_arguments(given: Mapping[str, Any], door: str) -> None:
    """Refuse arguments that `wandb.init` would not take, before anything is started.

    Args:
        given: Keyword arguments meant for `wandb.init`.
        door: Who was given them, for the message.

    Raises:
        ConfigurationError: An unknown argument (the nearest known one is named), ``mode="shared"``, or an id that W&B
            refuses.
    """
    unknown = [name for name in given if name not in _COMMON_INIT_ARGUMENTS]
    if unknown:
        _check_against_signature(unknown, door)
    if given.get("mode") == "shared":
        raise ConfigurationError(
            f"{door} was given mode='shared', which is W&B's switch for one writer. Pass run_mode='shared': it sets "
            "W&B's mode, labels and primary on every rank."
        )
    if given.get("id") is not None:
        check_id(given["id"], f"id={given['id']!r} given to {door}")


def _check_against_signature(unknown: list[str], door: str) -> None:
    import wandb

    parameters = inspect.signature(wandb.init).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in unknown:
        if name in _OUR_ARGUMENTS:
            raise ConfigurationError(
                f"{door} got the argument {name!r}, which is dist_wandb's own, not one of wandb.init. Give it to the "
                "constructor of the logger or tracker, or to dist_wandb.init."
            )
        if name not in parameters:
            nearest = difflib.get_close_matches(name, [*parameters, *_OUR_ARGUMENTS], n=1)
            hint = f"Did you mean {nearest[0]!r}?" if nearest else "See the documentation of wandb.init."
            raise ConfigurationError(f"{door} got the argument {name!r}, which wandb.init does not know. {hint}")


_TOLD_BY_TYPE = frozenset({int, float, str, bool, type(None), None})  # `None` for NaN, which is a type to wandb
_OUR_ARGUMENTS = (
    *("run_mode", "rank_scope", "reduce", "spread", "per_rank"),
    *("join_timeout", "peer_timeout", "finish_timeout", "max_pending_rows", "heartbeat"),
    *("config_sync", "system_metrics", "strict"),
)


def check_id(run_id: object, origin: str) -> str:
    """Return `run_id` if W&B takes it.

    Args:
        run_id: The id to check.
        origin: Where it came from, with its value, for the message.

    Raises:
        ConfigurationError: It is no text, is empty, begins or ends with white space, or has a character that W&B
            refuses in run ids.
    """
    if not isinstance(run_id, str):
        raise ConfigurationError(f"{origin} is {type(run_id).__name__}, but a run id is text. Pass a str.")
    if not run_id or run_id != run_id.strip():
        raise ConfigurationError(f"{origin} is empty, or has white space around it, which W&B refuses in run ids.")
    bad = [character for character in _FORBIDDEN_IN_IDS if character in run_id]
    if bad:
        proposal = re.sub(f"[{re.escape(_FORBIDDEN_IN_IDS)}]", "-", run_id)
        raise ConfigurationError(
            f"{origin} has {' and '.join(map(repr, bad))}, which W&B refuses in run ids. Use for example {proposal!r}."
        )
    return run_id


def told_to_others(init_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that describe the job, for ranks that were given none or others; only what JSON can hold."""
    described = {name: init_arguments[name] for name in _DESCRIBING if init_arguments.get(name) is not None}
    if "dir" in described:
        described["dir"] = os.fspath(described["dir"])
    if not isinstance(described.get("config", ""), str):
        values = given_values(described["config"])
        described["config"] = {key: value for key, value in values.items() if _is_json({key: value})}
    return {name: value for name, value in described.items() if _is_json(value)}


def _is_json(value: object) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value or isinstance(value, (list, tuple)))
    except (TypeError, ValueError):
        return False


def takes(value: object) -> bool:
    """Whether W&B can hold a value in the config of a run. Asked of a config that belongs to no run."""
    import wandb

    kind = _kind_of_config()
    if kind is None or isinstance(value, wandb.Artifact):
        return True
    probe = kind()
    try:
        probe.update({"value": value}, allow_val_change=True)
        json.dumps(probe["value"], default=_json_of_builtin)
    except Exception:  # noqa: BLE001  # values have code of their own, which may raise anything
        return False
    return True


def _kind_of_config() -> type[Any] | None:
    """The class of the configs of runs. wandb has this name for all to use, but does not say so to type checkers."""
    import wandb

    return getattr(wandb, "Config", None)


def _json_of_builtin(value: object) -> Any:
    """What W&B makes of objects of Python that JSON does not know."""
    if isinstance(value, (set, frozenset)):
        return list(value)
    if isinstance(value, complex):
        return str(value)
    raise TypeError(type(value).__name__)


def is_wandbs_own(error: Exception) -> bool:
    """Whether W&B raised an error on purpose, such as that over a config value that may not be changed."""
    import wandb

    return isinstance(error, wandb.Error)


def is_wandbs_config(config: object) -> bool:
    """Whether this is the config of a run of wandb's; not one that says it is, in somebody's tests."""
    kind = _kind_of_config()
    return kind is not None and issubclass(type(config), kind)


def wanted_id(init_arguments: Mapping[str, Any]) -> str | None:
    """The run id the user asked for: the argument, else the settings, else `WANDB_RUN_ID`; `None` for none."""
    given = init_arguments.get("id") or _user_setting(init_arguments, "run_id")
    given = _forked_id(init_arguments) if given is None else given
    if given is not None:
        return check_id(given, f"id={given!r}")
    in_environment = os.environ.get("WANDB_RUN_ID")
    return check_id(in_environment, f"WANDB_RUN_ID={in_environment!r}") if in_environment else None


def _forked_id(init_arguments: Mapping[str, Any]) -> str | None:
    """The run that `resume_from` names: W&B rewinds that run, so its id is this one's."""
    resume_from = init_arguments.get("resume_from")
    return str(resume_from).partition("?")[0] if resume_from else None


def wanted_resume(init_arguments: Mapping[str, Any]) -> str | None:
    """What the user said of resuming: the argument, else the settings, else `WANDB_RESUME`; `None` for nothing.

    Returns:
        `"allow"`, `"must"`, `"never"`, or `"auto"`, as which W&B takes `True`.
    """
    given = init_arguments.get("resume")
    if given is None:
        given = _user_setting(init_arguments, "resume") or os.environ.get("WANDB_RESUME")
    return "auto" if given is True else str(given) if given else None


def continues(init_arguments: Mapping[str, Any]) -> bool:
    """Whether the arguments let W&B go on with a run that is there already."""
    return wanted_resume(init_arguments) in ("allow", "must", "auto")


def rewinds(init_arguments: Mapping[str, Any]) -> bool:
    """Whether the user names a moment of a run to go on from, which excludes `resume`."""
    names = ("resume_from", "fork_from")
    return any(init_arguments.get(name) or _user_setting(init_arguments, name) for name in names)


def wanted_project(init_arguments: Mapping[str, Any]) -> str | None:
    """The project the user asked for: the argument, else the settings, else `WANDB_PROJECT`; `None` for none."""
    return _wanted(init_arguments, "project", "project", "WANDB_PROJECT")


def wanted_entity(init_arguments: Mapping[str, Any]) -> str | None:
    """The owner the user asked for: the argument, else the settings, else `WANDB_ENTITY`; `None` for none."""
    return _wanted(init_arguments, "entity", "entity", "WANDB_ENTITY")


def wanted_group(init_arguments: Mapping[str, Any]) -> str | None:
    """The group the user asked for: the argument, else the settings, else `WANDB_RUN_GROUP`; `None` for none."""
    return _wanted(init_arguments, "group", "run_group", "WANDB_RUN_GROUP")


def wanted_name(init_arguments: Mapping[str, Any]) -> str | None:
    """The display name the user asked for: the argument, else the settings, else `WANDB_NAME`; `None` for none."""
    return _wanted(init_arguments, "name", "run_name", "WANDB_NAME")


def wanted_mode(init_arguments: Mapping[str, Any]) -> Mode:
    """Which W&B mode the user wants: the argument, else the settings, `WANDB_MODE`, or what ``wandb offline`` wrote.

    Raises:
        ConfigurationError: A mode W&B does not know, or an empty `WANDB_MODE`.
    """
    mode = init_arguments.get("mode") or _user_setting(init_arguments, "mode") or _mode_outside()
    if mode not in _WANDB_MODES:
        raise ConfigurationError(f"The W&B mode {mode!r} is unknown. {suggest(mode, _WANDB_MODES)}")
    return _WANDB_MODES[mode]


def _mode_outside() -> str:
    import wandb

    if os.environ.get("WANDB_MODE") == "":
        raise ConfigurationError("WANDB_MODE is set but empty, which W&B refuses. Unset it, or set it to 'offline'.")
    return os.environ.get("WANDB_MODE") or str(wandb.setup().settings.mode)


def _wanted(init_arguments: Mapping[str, Any], argument: str, setting: str, variable: str) -> str | None:
    value = init_arguments.get(argument) or _user_setting(init_arguments, setting) or os.environ.get(variable)
    return str(value) if value else None


def _user_setting(init_arguments: Mapping[str, Any], name: str) -> Any:
    """A value the user put into `settings`; not one that wandb fills in by itself."""
    settings = init_arguments.get("settings")
    if settings is None:
        return None
    if isinstance(settings, Mapping):
        return settings.get(name)
    return getattr(settings, name, None) if name in settings.model_fields_set else None


@dataclass(frozen=True)
class Setup:
    """How wandb is set up in this environment.

    Args:
        mode: What `wandb.init` would do: `"online"`, `"offline"` or `"disabled"`; `None` if it would raise.
        problem: Why it would; empty otherwise.
        base_url: Address of the server, without a password that it may have.
        entity: Owner of new runs, if one is set.
        project: Project of new runs, if one is set.
        key: The API key, if there is one.
        key_from: Where it comes from.
        inherits_service: Whether another process has told this one to use its wandb process.
    """

    mode: Mode | None
    problem: str
    base_url: str
    entity: str | None
    project: str | None
    key: str | None = field(repr=False)
    key_from: str | None
    inherits_service: bool


def setup() -> Setup:
    """Find out how wandb is set up in this environment. Opens nothing, and asks no server."""
    import wandb

    try:
        mode, settings = wanted_mode({}), wandb.setup().settings
    except Exception as error:  # noqa: BLE001  # ours, pydantic's, or what an inherited WANDB_SERVICE leads to
        return Setup(None, _without_input(error), "", None, None, None, None, _inherits_service())
    url = without_password(str(settings.base_url))
    key, key_from = (settings.api_key, "WANDB_API_KEY") if settings.api_key else _key_in_netrc(url)
    return Setup(mode, "", url, settings.entity, settings.project, key, key_from, _inherits_service())


def without_password(url: str) -> str:
    """An address without the name and the password that it may have."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _without_input(error: Exception) -> str:
    """What an error says, on one line. pydantic's would also repeat the values, which may be secrets."""
    errors = getattr(error, "errors", None)
    if not callable(errors):
        return _one_line(error)
    told = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in errors())
    return f"W&B refuses what its settings (WANDB_*, or its settings file) say of {'; '.join(told)}"


def _key_in_netrc(base_url: str) -> tuple[str | None, str | None]:
    host = urlsplit(base_url).hostname or ""
    for path in filter(None, (os.environ.get("NETRC"), "~/.netrc", "~/_netrc")):
        with suppress(OSError, NetrcParseError):
            entry = netrc(Path(path).expanduser()).authenticators(host)
            if entry:
                return entry[2], path
    return None, None


def open_run(
    plan: RunPlan,
    topology: Topology,
    init_arguments: Mapping[str, Any],
    *,
    create_new: bool = False,
    upload_timeout: float | None = None,
    offline: bool = False,
) -> AnyRun:
    """Open what the plan says.

    Args:
        plan: What this rank does with W&B.
        topology: Who this rank is. In a world of one, `wandb.init` gets exactly `init_arguments`.
        init_arguments: Keyword arguments of `wandb.init`, as the user gave them. Nothing in them is changed.
        create_new: Whether the run is made beside one that this process already has. Otherwise wandb's own rule
            holds: it hands out the run that is there.
        upload_timeout: How long the run's end may wait for the server, in seconds, unless the user's settings say so;
            `None` gives wandb no settings but the user's.
        offline: Whether to open it offline, whatever the user asked for.

    Returns:
        The W&B run, or a `NullRun` where the plan opens none.

    Raises:
        UnavailableError: W&B could not open the run: its server does not answer, or refuses.
        wandb.Error: wandb does not take the arguments.
    """
    if not plan.opens_run and not plan.attaches:
        return NullRun()
    if plan.has_writers:  # before the first use of wandb in this process, as the mode is read with wandb's help
        forget_inherited_service()
    arguments = dict(init_arguments)
    if offline:
        arguments["mode"] = "offline"
    if topology.world_size > 1:
        arguments.update(_planned_arguments(plan, topology, arguments))
    if upload_timeout is not None:
        arguments["settings"] = _settings_with_limits(arguments.get("settings"), upload_timeout)
    if create_new and arguments.get("reinit") is None:  # LightningCLI passes None for all that is not in its config
        arguments["reinit"] = "create_new"
    _make_directory(arguments)
    run = _init(arguments)
    if topology.world_size > 1 and (run.offline or plan.has_writers) and not run.disabled:
        try:
            _write_sidecar(run, plan, topology)
        except OSError as error:
            _log.warning(
                "dist_wandb: rank %d could not write %s beside its run (%s). Without it dist-wandb sync does not know "
                "the run's place in the job.",
                topology.global_rank,
                SIDECAR_NAME,
                error.strerror or error,
            )
    return run


def _init(arguments: Mapping[str, Any]) -> Run:
    """Call `wandb.init`, telling failures of W&B from those of arguments."""
    import wandb

    try:
        return wandb.init(**_without_stale(arguments))
    except (TypeError, ValueError):  # arguments, or settings, that wandb does not know
        raise
    except wandb.errors.UsageError as error:
        if not _NO_CREDENTIALS.search(str(error)):
            raise
        raise UnavailableError(_one_line(error)) from error
    except Exception as error:  # a dead or refusing server, a dead process of wandb's own, a fault of wandb's
        raise UnavailableError(_one_line(error)) from error


def _without_stale(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out an `anonymous` that says nothing, where wandb warns of it: there `None` is not its default any more."""
    import wandb

    parameter = inspect.signature(wandb.init, follow_wrapped=False).parameters.get("anonymous")
    if arguments.get("anonymous") is not None or parameter is None or parameter.default is None:
        return arguments
    return {name: value for name, value in arguments.items() if name != "anonymous"}


def init_timeout(init_arguments: Mapping[str, Any]) -> float:
    """How long opening a run may take, in seconds: wandb needs some more than its own limit to give up."""
    import wandb

    given = _user_setting(init_arguments, "init_timeout") or wandb.setup().settings.init_timeout
    return float(given) + _BEYOND_INIT_TIMEOUT


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def clear_away() -> None:
    """Make wandb forget its own process after that failed: otherwise the id stays taken.

    Runs of this process that are open end by it, so it is to be called only where there are none, or where they are
    lost in any case.
    """
    import wandb

    with suppress(Exception):  # it is gone, or half gone
        wandb.teardown()
    os.environ.pop("WANDB_SERVICE", None)  # of that process, which wandb names there


def _planned_arguments(plan: RunPlan, topology: Topology, given: Mapping[str, Any]) -> dict[str, Any]:
    """What the plan changes in the arguments of `wandb.init`."""
    arguments: dict[str, Any] = {"id": unit_run_id(plan)}
    name = wanted_name(given)
    if name and plan.name_suffix:
        arguments["name"] = f"{name}-{plan.name_suffix}"
    if plan.group is not None:
        arguments["group"] = plan.group
    if plan.attaches:
        arguments["reinit"] = "create_new"  # wandb.run stays what it is: this rank has no run
    has_own_directory = plan.own_directory or plan.attaches
    mode = wanted_mode(given) if has_own_directory or plan.has_writers else None
    if has_own_directory and mode != "disabled":
        arguments["dir"] = _own_directory(given, topology)
    if wanted_resume(given) == "auto":  # the id is known: W&B's own note of it would be one process's
        arguments["resume"] = "allow"
    if plan.has_writers and mode == "online":
        arguments["mode"] = None
        arguments["settings"] = _shared_settings(given.get("settings"), plan)
    elif plan.has_writers and mode == "offline":
        arguments["settings"] = _labelled_settings(given.get("settings"), plan)
    return arguments


def _copied_settings(given: wandb.Settings | Mapping[str, Any] | None) -> wandb.Settings:
    import wandb

    return wandb.Settings(**given) if isinstance(given, Mapping) else (given or wandb.Settings()).model_copy()


def _settings_with_limits(given: wandb.Settings | Mapping[str, Any] | None, upload_timeout: float) -> wandb.Settings:
    """A copy of the user's settings that bounds what a dead server, or a killed rank, costs.

    What the user has set, also in the environment, stays; so does what this version of wandb does not know.
    """
    settings = _copied_settings(given)
    limits = {"finish_timeout": upload_timeout, "x_transaction_log_flush_interval": _FLUSH_INTERVAL}
    for name in limits.keys() & type(settings).model_fields.keys() - settings.model_fields_set:
        if f"WANDB_{name.upper()}" not in os.environ:
            setattr(settings, name, limits[name])
    return settings


def _labelled_settings(given: wandb.Settings | Mapping[str, Any] | None, plan: RunPlan) -> wandb.Settings:
    """A copy of the user's settings with this rank's label: system metrics get it when they are taken, not later."""
    settings = _copied_settings(given)
    settings.x_label = plan.label or plan.hardware
    return settings


def _shared_settings(given: wandb.Settings | Mapping[str, Any] | None, plan: RunPlan) -> wandb.Settings:
    """A copy of the user's settings with W&B's shared mode switched on for this rank."""
    settings = _labelled_settings(given, plan)
    settings.mode = "shared"
    settings.x_primary = plan.primary
    settings.x_update_finish_state = plan.primary
    return settings


def _own_directory(given: Mapping[str, Any], topology: Topology) -> str:
    """A directory below the W&B directory that no other rank writes to: equal ids at equal times would collide."""
    return str(wandb_directory(given) / f"rank-{topology.global_rank}")


def wandb_directory(init_arguments: Mapping[str, Any]) -> Path:
    """The directory below which a job's run directories lie."""
    root = init_arguments.get("dir") or _user_setting(init_arguments, "root_dir") or os.environ.get("WANDB_DIR") or "."
    return Path(root) / "wandb"


def _make_directory(arguments: Mapping[str, Any]) -> None:
    """Make the directory that the user named: wandb would too, but warns first that it is no git repository's."""
    if arguments.get("dir") and "disabled" not in (arguments.get("mode"), os.environ.get("WANDB_MODE")):
        with suppress(OSError):  # wandb says what it does about a directory it cannot write to
            Path(arguments["dir"]).mkdir(parents=True, exist_ok=True)


def forget_inherited_service() -> None:
    """Drop `WANDB_SERVICE` where another process put it, so that this rank talks to a wandb process of its own.

    To be called before the first use of wandb in this process, also before its settings are read.

    Ranks that are children of one process which used wandb would share that process's service, and it refuses a run
    id that a sibling has open: "run ID X is in use". The service writes its owner's process id into the variable.
    """
    if _inherits_service():
        del os.environ["WANDB_SERVICE"]


def _inherits_service() -> bool:
    owner = re.match(r"\d+-(\d+)-", os.environ.get("WANDB_SERVICE", ""))
    return owner is not None and int(owner[1]) != os.getpid()


def _write_sidecar(run: Run, plan: RunPlan, topology: Topology) -> None:
    """Record beside a run what its file does not hold, so that it can be uploaded truthfully later."""
    directory = Path(run.dir).parent
    record = {
        "format": _SIDECAR_FORMAT,
        "run_id": unit_run_id(plan),
        "base_id": plan.base_id,
        "group": plan.group,
        "shared": plan.has_writers,
        "label": plan.label or plan.hardware,
        "primary": plan.primary,
        "update_finish_state": plan.primary,
        "run_mode": plan.run_mode,
        "rank_scope": plan.rank_scope,
        "global_rank": topology.global_rank,
        "local_rank": topology.local_rank,
        "node_rank": topology.node_rank,
        "world_size": topology.world_size,
        "num_nodes": topology.num_nodes,
    }
    unfinished = directory / f".{SIDECAR_NAME}.tmp"
    unfinished.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(directory / SIDECAR_NAME)


def upload_environment(
    directory: Path, *, shared: bool, label: str | None, primary: bool, finishes: bool, resume: str | None
) -> dict[str, str]:
    """The environment in which ``wandb sync`` uploads one file as what it is; made from that of this process.

    Settings of one run (its id, name, tags, group, …) are left out, because they would be meant for another one.
    Without settings by the user, W&B gives up after about two minutes without a server, instead of two hours.

    Args:
        directory: Where W&B is to keep its log. The settings that ``wandb login`` or ``wandb offline`` left in the
            project's W&B directory are copied there.
        shared: Whether the file is that of a writer of a shared run.
        label: The writer's label; `None` in a plain run.
        primary: Whether the writer is the shared run's primary, or the run is a plain one.
        finishes: Whether the end of the file is the end of the run.
        resume: W&B's ``resume``, for a plain run that goes on; `None` for a run of its own.

    Returns:
        A copy of the environment.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _OF_ONE_RUN}
    roles = {"X_PRIMARY": primary, "X_UPDATE_FINISH_STATE": finishes}
    environment.update({f"WANDB_{name}": str(value).lower() for name, value in roles.items()})
    environment["WANDB_MODE"] = "shared" if shared else "online"
    environment["WANDB_DIR"] = str(directory)
    if label is not None:
        environment["WANDB_X_LABEL"] = label
    if resume is not None:
        environment["WANDB_RESUME"] = resume
    for name, value in _UPLOAD_PATIENCE.items():
        environment.setdefault(name, value)
    (directory / "wandb").mkdir(parents=True, exist_ok=True)
    for name in ("wandb", ".wandb"):
        settings = Path(os.environ.get("WANDB_DIR") or ".", name, "settings")
        if settings.is_file():
            shutil.copy(settings, directory / "wandb")
    return environment


def define_step_metric(run: AnyRun, step_metric: str) -> None:
    """Make `step_metric` the x axis of every metric, as Lightning's own logger does for ``trainer/global_step``."""
    if hasattr(run, "define_metric"):  # a stand-in for a run, in somebody's tests, may not have it
        run.define_metric(step_metric)
        run.define_metric("*", step_metric=step_metric, step_sync=True)


def define_tensorboard_steps(run: AnyRun) -> None:
    """Make the steps of tensorboard the x axis of every metric, as Lightning's own logger does."""
    if hasattr(run, "define_metric"):
        run.define_metric("*", step_metric="global_step")


def is_silent() -> bool:
    """Whether the user asked wandb, by `WANDB_SILENT`, to print nothing."""
    return os.environ.get("WANDB_SILENT", "").lower() in ("true", "1", "yes")


def running_run() -> Run | None:
    """The run that `wandb.run` names in this process, if any."""
    module = sys.modules.get("wandb")  # nobody has opened a run without importing it
    return module.run if module is not None else None


@contextmanager
def offline_by_environment(*, on: bool) -> Iterator[None]:
    """Say "offline" as Lightning's own logger does, by `WANDB_MODE`, but take it back afterwards."""
    before = os.environ.get("WANDB_MODE")
    if on:
        os.environ["WANDB_MODE"] = "dryrun"
    try:
        yield
    finally:
        if on and before is None:
            del os.environ["WANDB_MODE"]
        elif on and before is not None:
            os.environ["WANDB_MODE"] = before


def is_finished(run: AnyRun) -> bool:
    """Whether a run has been finished, by us or by the user. wandb tells it by a private name only."""
    return bool(run) and bool(getattr(run, "_is_finished", False))


def before_finish(run: AnyRun, act: Callable[[int | None], None]) -> Callable[[], None]:
    """Have something done before the user finishes a run by itself: ``run.finish()``, ``wandb.finish()``, or a new run.

    The run's `finish` is covered by one of this very object; its class stays as it is, and so do other runs.

    Args:
        run: The run, or a `NullRun`.
        act: Called with the exit code that the user gave. It may finish the run, and be called by several threads.

    Returns:
        Takes it back.
    """
    own = vars(run).get("finish") if hasattr(run, "__dict__") else None  # disabled runs of older versions have one
    original = getattr(run, "finish", None)

    def finish(exit_code: int | None = None, **kwargs: Any) -> None:
        act(exit_code)
        if original is not None and not is_finished(run):
            original(exit_code=exit_code, **kwargs)

    def take_back() -> None:
        if vars(run).get("finish") is finish:
            vars(run).pop("finish")
            if own is not None:
                vars(run)["finish"] = own

    if not hasattr(run, "finish") or not hasattr(run, "__dict__"):  # a stand-in for a run, in somebody's tests
        return lambda: None
    vars(run)["finish"] = finish  # a NullRun forgets attributes that are set
    return take_back


def finish(run: AnyRun, exit_code: int | None) -> str | None:
    """End a run.

    Args:
        run: The run, or a `NullRun`.
        exit_code: What W&B is to show; `None` for that of the process.

    Returns:
        What went wrong, and what to do, as a sentence; `None` if W&B has all of the run.

    Raises:
        OSError: wandb's own process is gone.
    """
    if not hasattr(run, "finish"):  # a stand-in for a run, in somebody's tests
        return None
    run.finish(exit_code=exit_code)
    if not run or is_disabled(run):
        return None
    directory = Path(str(run.dir)).parent
    given_up = (unwritten if is_offline(run) else untaken)(log_of(directory))
    if not given_up:
        return None
    reasons = "; ".join(f"{what}: {reason}" for what, reason in given_up.items())
    if is_offline(run):
        return f"not all of the run {run.id} could be written to disk ({reasons}). What is missing is lost."
    return (
        f"W&B's server did not take all of the run {run.id} ({reasons}). It is on disk. Once the server answers, "
        f"upload it with: dist-wandb sync {directory}"
    )


def code_of_exit() -> int | None:
    """What `sys.exit` was called with, as far as wandb has noticed: it puts a function of its own in its place."""
    noticed = getattr(getattr(sys.exit, "__self__", None), "exit_code", None)
    return noticed if isinstance(noticed, int) else None


def last_logged(run: AnyRun, name: str) -> int | None:
    """The whole number that was logged last under `name` before the run was resumed; `None` for a new run."""
    value: object = run.summary.get(name) if run and run.resumed else None  # type: ignore[no-untyped-call]
    return int(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def pickled(run: AnyRun | None) -> bytes | None:
    """What a child process needs to go on writing into `run`, or `None` where the run cannot be handed on."""
    try:
        return pickle.dumps((run, told(given_values(getattr(run, "config", None))))) if run else None
    except (pickle.PicklingError, AttributeError, TypeError):  # a stand-in for a run, in somebody's tests
        return None


def unpickled(data: bytes) -> Run | None:
    """The run of the parent process, in the child, attached to the parent's service.

    Returns:
        The run; `None`, with a warning, where wandb cannot attach to it.
    """
    run: Run
    run, config = pickle.loads(data)  # noqa: S301  # written by `pickled` in the parent of this very process
    try:
        _ = getattr(run, "config", None)  # wandb attaches at the first use
    except Exception as error:  # noqa: BLE001  # one of wandb's own: WANDB_SERVICE is gone from the environment, or it
        _log.warning("dist_wandb: this process opens the run of its parent anew, as wandb says: %s", _one_line(error))
        return None
    if config:
        _fill_config(run, understood(config))
    return run


def _fill_config(run: Run, values: Mapping[str, Any]) -> None:
    """Put values into the config of an attached run, which wandb leaves empty.

    They are in W&B already, perhaps with newer values that another child has set, so they must not be sent again.
    wandb has only a private method that does not.
    """
    update = getattr(run.config, "_update", None)
    if update is not None:
        update(dict(values), allow_val_change=True, ignore_locked=True)


def where(run: AnyRun, plan: RunPlan | None = None) -> str:
    """Where a run is to be found, as text: its address, or the directory it is written to."""
    if not run:
        return "nowhere"
    if is_disabled(run):
        return "nowhere, as W&B is disabled"
    if not is_offline(run):
        return str(url(run) or "at an unknown address")
    directory = Path(run.dir).parent
    if plan is not None and plan.shared:  # see _own_directory
        return f"offline, a file for each rank below {directory.parents[2]}"
    return f"offline, in {directory}"


def is_disabled(run: AnyRun) -> bool:
    """Whether a run goes nowhere. A stand-in for a run, in somebody's tests, may not say."""
    return bool(getattr(run, "disabled", False))


def is_offline(run: AnyRun) -> bool:
    """Whether a run is on disk alone. A stand-in for a run, in somebody's tests, may not say."""
    return bool(getattr(run, "offline", False))


def is_online(run: AnyRun) -> bool:
    """Whether W&B's server has a run, rather than a disk or nobody."""
    return bool(run) and not is_offline(run) and not is_disabled(run)


def url(run: AnyRun) -> str | None:
    """Address of a run in W&B; `None` for one that has none. wandb warns when an offline run is asked."""
    return getattr(run, "url", None) if is_online(run) else None


def facts_of(run: AnyRun) -> dict[str, Any]:
    """What is to be known of a run on ranks without one: of `FACTS` what JSON can hold."""
    asked = FACTS if is_online(run) else FACTS - {"url", "project_url"}  # wandb warns when an offline run is asked
    facts = {name: getattr(run, name, None) for name in sorted(asked)}
    return {name: facts.get(name) for name in sorted(FACTS) if _is_json(facts.get(name))}


def understood_facts(told: Mapping[str, Any]) -> dict[str, Any]:
    """What `facts_of` said, from JSON: W&B's tags are a tuple."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in told.items()}


def group_url(run: AnyRun, group: str | None) -> str | None:
    """Address of the page of a group of runs in W&B; `None` offline, or where there is no group."""
    address = url(run)
    if address is None or group is None:
        return None
    project, _, _ = address.partition("/runs/")
    return f"{project}/groups/{quote(group, safe='')}"


def images(values: Iterable[Any]) -> list[Any]:
    """Arrays or PIL images as W&B's."""
    import wandb

    return [wandb.Image(value) for value in values]


def image(value: Any, files: Path | None = None, **arguments: Any) -> Any:
    """A W&B image.

    Args:
        value: What `wandb.Image` takes, or the bytes of a PNG, which are not encoded anew.
        files: Directory for a file of these bytes; it is needed until the image is logged.
        **arguments: Of `wandb.Image`.
    """
    import wandb

    if isinstance(value, bytes) and files is not None:
        path = files / f"{uuid.uuid4().hex}.png"
        path.write_bytes(value)
        value = str(path)
    return wandb.Image(value, **arguments)


def table(columns: list[str | int] | None, data: list[list[Any]] | None, dataframe: Any) -> Any:
    """A W&B table, from `columns` and `data` or from `dataframe`."""
    import wandb

    return wandb.Table(columns=columns, data=data, dataframe=dataframe)


def table_of_any(columns: list[str | int], data: list[list[Any]]) -> Any:
    """A W&B table, also of columns that have cells of different types.

    wandb finds out the types of columns row by row, which takes long. Of numbers, text and the like a few rows tell the
    same as all.
    """
    import wandb

    telling = _telling_rows(data)
    try:
        found = wandb.Table(columns=columns, data=telling)
    except TypeError:
        found = wandb.Table(columns=columns, data=telling, allow_mixed_types=True)
    found.data = data
    return found


def _telling_rows(data: list[list[Any]]) -> list[list[Any]]:
    """Rows that have, in each column, all types of cells; all rows where types are not all there is to tell."""
    seen: set[tuple[Any, ...]] = set()
    telling = []
    for row in data:
        kinds = tuple([None if type(cell) is float and math.isnan(cell) else type(cell) for cell in row])
        if kinds not in seen:
            if not _TOLD_BY_TYPE.issuperset(kinds):
                return data
            seen.add(kinds)
            telling.append(row)
    return telling


def is_media(value: object) -> bool:
    """Whether a value is one of wandb's own objects (an image, a table), or a list with one."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(type(item).__module__.partition(".")[0] == "wandb" for item in values)


class RunWriter:
    """Writes the rows of one rank into its run.

    Args:
        run: The run, or what stands for it; a `NullRun` on a rank without one.
        plan: Tells whether the plain names are this rank's to write, and its label in a shared run.
        step_metric: Name of the x axis in every row; `None` for none.

    Example:
        Row ``{"loss": 0.5}`` of step 7 in a shared run: rank 0, the primary, writes ``loss`` and ``rank-0/loss``;
        rank 1 writes ``rank-1/loss``.
    """

    def __init__(self, run: AnyRun | Record, plan: RunPlan, step_metric: str | None) -> None:
        self.label = plan.label
        self.is_primary = plan.primary
        self._run = run
        self._step_metric = step_metric

    def write_plain(self, row: Mapping[str, Any], x: int | None) -> None:
        """Write one row as it is.

        Args:
            row: Values by the names they are to have.
            x: Its place on the x axis; `None` leaves the x axis out of the row.
        """
        if self._run:
            axis = {} if self._step_metric is None or x is None else {self._step_metric: x}
            self._run.log({**row, **axis})

    def write(self, metrics: Mapping[str, Any], step: int | None, *, commit: bool | None = None) -> None:
        """Write one row.

        Args:
            metrics: What this rank logged.
            step: Its place on the x axis; `None` leaves the x axis out of the row.
            commit: As in `wandb.Run.log`; `None` leaves it to wandb.
        """
        if not self._run:
            return
        row = dict(metrics) if self.label is None else self._labelled(metrics)
        if self._step_metric is not None and step is not None:
            row[self._step_metric] = step
        self._run.log(row) if commit is None else self._run.log(row, commit=commit)

    def _labelled(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Every rank's numbers under its label; on the primary beside the plain names, media under those alone."""
        own = {
            f"{self.label}/{name}": value
            for name, value in metrics.items()
            if name != self._step_metric and (not self.is_primary or _is_number(value))
        }
        plain = metrics if self.is_primary else {name: metrics[name] for name in metrics if name == self._step_metric}
        return {**plain, **own}


def _is_number(value: Any) -> bool:
    """Plain numbers, mappings, numpy scalars and tensors of one element, without importing numpy or torch."""
    if isinstance(value, (int, float, Mapping)):  # W&B makes numbers of nested names out of a mapping
        return True
    return hasattr(value, "item") and getattr(value, "shape", None) in ((), (1,))
