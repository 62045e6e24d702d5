"""W&B runs: opening, writing and finishing what a `RunPlan` says. The only module that imports wandb."""

from __future__ import annotations

import atexit
import difflib
import errno
import inspect
import json
import logging
import math
import os
import pickle
import re
import stat
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from configparser import ConfigParser
from configparser import Error as ParserError
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from urllib.parse import quote, urlsplit

from dist_wandb.errors import ConfigurationError, ReadError, UnavailableError, suggest
from dist_wandb.runs.destination import Destination, is_address, is_same_server, refusal_of, without_password
from dist_wandb.runs.interception import Handler, Interception, intercept, original
from dist_wandb.runs.rescue import Rescue
from dist_wandb.settings.config_values import given_values, is_plain, told, understood
from dist_wandb.settings.config_withheld import MISSING, filled, withheld
from dist_wandb.settings.plan import unit_run_id
from dist_wandb.wandb_files.debug_log import log_of, untaken, unwritten
from dist_wandb.wandb_files.environment import own_environment
from dist_wandb.wandb_files.sidecar import SIDECAR_NAME
from dist_wandb.wandb_files.small_files import LIMIT, read_small, write_small

if TYPE_CHECKING:
    from types import ModuleType

    import wandb
    from typing_extensions import Self

    from dist_wandb.runs.axes import Axes
    from dist_wandb.runs.destination import Origin
    from dist_wandb.runs.record import Record
    from dist_wandb.settings.plan import RunPlan
    from dist_wandb.topology.model import Topology

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
STEP_METRIC = "global_step"
"""Name of the x axis of runs, unless a door has one of its own."""
_METHODS = frozenset({"alert", "config", "define_metric", "finish", "log", "log_artifact", "save", "summary", "watch"})
_OF_THE_MODULE = frozenset({"log", "define_metric"})  # what wandb has as a function, too, of the run it was opened with
_BEYOND_INIT_TIMEOUT = 30.0  # seconds
_FLUSH_INTERVAL = 1.0  # seconds until rows are on disk: what a killed process may lose. wandb's own is 15
_NO_CREDENTIALS = re.compile(r"api[ _]key|log ?in", re.IGNORECASE)  # to wandb, not to have any is wrong usage
_SIDECAR_FORMAT = 1
_ON_THE_WAY = ("insecure_disable_ssl", "http_proxy", "https_proxy", "x_extra_http_headers")  # to the right server
_LOST_SOCKET = frozenset({errno.EBADF, errno.ENOTCONN, errno.EPIPE, errno.ESHUTDOWN})
_LOST_SERVICE = frozenset({"MailboxClosedError", "HandleAbandonedError", "SockClientClosedError"})  # wandb's, private
_SETUP = "wandb.sdk.wandb_setup"
_MEDIA_DIRECTORY = "wandb-media"  # the end of its name
# W&B's client refuses the first seven; its documentation adds the backslash and the percent sign.
_FORBIDDEN_IN_IDS = ":;,#?/'\\%"
_LONGEST_ID = 128  # characters. W&B states a limit for names alone, which is this one
_LONGEST_ID_IN_BYTES = 192  # W&B names files by it, with more before and behind: 255 bytes is the most for those
_SHOWN_OF_AN_ORIGIN = 200
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

    Its `summary` reads what was written into it on this rank, else the defaults of `get`; what is logged does not show
    in it.

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

    @property
    def summary(self) -> NullSummary:
        """What was written into the summary on this rank, so that ranks which write the same read the same."""
        summary: NullSummary = self.__dict__.setdefault("_summary", NullSummary())
        return summary

    @summary.setter
    def summary(self, summary: object) -> None:
        """Accept and forget."""

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
        own = {name: value for name, value in self.__dict__.items() if name not in ("finish", "log")}  # see go_first
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

    def __dir__(self) -> list[str]:
        return sorted(public_names(self))

    def __repr__(self) -> str:
        return "NullRun()"


class NullPart(NullRun):
    """Stands in for a part of a run, such as an artifact: all of it is of this kind, names included.

    As a number it is NaN: it can be computed with, and no comparison with it is true.
    """

    def get(self, name: object, default: Any = None) -> Any:  # noqa: ARG002  # of a part nothing is known
        """The default; without one, what accepts every use."""
        return NullPart() if default is None else default

    def keys(self) -> tuple[Any, ...]:
        """No names."""
        return ()

    def values(self) -> tuple[Any, ...]:
        """No values."""
        return ()

    def items(self) -> tuple[Any, ...]:
        """No names and values."""
        return ()

    def _fact(self, name: str) -> Any:  # noqa: ARG002  # of a part nothing is known
        return NullPart()

    def _computed(self, *_others: object) -> NullPart:
        return NullPart()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _computed
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _computed
    __neg__ = __pos__ = __abs__ = __round__ = _computed

    def _compared(self, _other: object) -> bool:
        _tell_of_unknown()
        return False

    __lt__ = __le__ = __gt__ = __ge__ = _compared

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (int, float, str)):
            _tell_of_unknown()
        return self is other

    __hash__ = object.__hash__

    def __float__(self) -> float:
        _tell_of_unknown()
        return math.nan

    def __int__(self) -> int:
        _tell_of_unknown()
        return 0

    def __format__(self, spec: str) -> str:
        try:
            return format(math.nan, spec) if spec else repr(self)
        except ValueError:  # one for text, or for whole numbers
            return repr(self)


class NullSummary(NullPart):
    """The summary of a run on a rank without it: what is written there can be read there."""

    def get(self, name: object, default: Any = None) -> Any:
        """What this rank has written under a name, else the default."""
        return self._own().get(name, default)

    def keys(self) -> Any:
        """Names that this rank has written."""
        return self._own().keys()

    def values(self) -> Any:
        """What this rank has written."""
        return self._own().values()

    def items(self) -> Any:
        """Names and values that this rank has written."""
        return self._own().items()

    def update(self, *values: Any, **others: Any) -> None:
        """Write values, here alone."""
        self._own().update(*values, **others)

    def _own(self) -> dict[Any, Any]:
        own: dict[Any, Any] = self.__dict__.setdefault("_written", {})
        return own

    def __getattr__(self, name: str) -> Any:
        own = self._own()
        return own[name] if name in own else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._own()[name] = value

    def __getitem__(self, key: Any) -> Any:
        return self._own()[key] if key in self else NullPart()

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own()[key] = value

    def __delitem__(self, key: Any) -> None:
        self._own().pop(key, None)

    def __contains__(self, key: object) -> bool:
        return key in self._own()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._own())

    def __len__(self) -> int:
        return len(self._own())


_has_told_of_unknown = False
_has_warned_of_workspace = False


def _tell_of_unknown() -> None:
    """Say once that a script goes by what this rank cannot know: other ranks may go another way."""
    global _has_told_of_unknown  # noqa: PLW0603  # once in a process
    if not _has_told_of_unknown:
        _has_told_of_unknown = True
        _log.warning(
            "dist_wandb: a value of the run, such as one of its summary, was compared or used as a number on a rank "
            "without a run, which does not have it: it counts as NaN there. Ranks that go different ways by it may "
            "wait for each other. Read it with a default, as in run.summary.get(name, 0), and write it on all ranks.",
        )


def public_names(run: AnyRun) -> set[str]:
    """The names that a W&B run has for its users; of a stand-in as well, as far as wandb is known."""
    if run or not isinstance(run, NullRun):
        return {name for name in dir(run) if not name.startswith("_")}
    kind = getattr(getattr(sys.modules.get("wandb.sdk"), "wandb_run", None), "Run", None)
    return {name for name in (*FACTS, *_METHODS, *dir(kind)) if not name.startswith("_")}


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
        ConfigurationError: It is no text, is empty, begins or ends with white space, is too long, or has a character
            that W&B refuses in run ids, or that cannot be printed.
    """
    if len(origin) > _SHOWN_OF_AN_ORIGIN:
        origin = f"{origin[:_SHOWN_OF_AN_ORIGIN]}…"
    if not isinstance(run_id, str):
        raise ConfigurationError(f"{origin} is {type(run_id).__name__}, but a run id is text. Pass a str.")
    if not run_id or run_id != run_id.strip():
        raise ConfigurationError(f"{origin} is empty, or has white space around it, which W&B refuses in run ids.")
    bad = [character for character in _FORBIDDEN_IN_IDS if character in run_id]
    if bad:
        proposal = re.sub(f"[{re.escape(_FORBIDDEN_IN_IDS)}]", "-", run_id)
        raise ConfigurationError(
            f"{origin} has {' and '.join(map(repr, bad))}, which W&B refuses in run ids. Use for example "
            f"{proposal[:_LONGEST_ID]!r}."
        )
    unprintable = sorted({character for character in run_id if not character.isprintable()})
    if unprintable:
        raise ConfigurationError(
            f"{origin} has {' and '.join(map(ascii, unprintable[:3]))}, which cannot be printed. "
            "Use letters and digits."
        )
    if len(run_id) > _LONGEST_ID or len(run_id.encode()) > _LONGEST_ID_IN_BYTES:
        raise ConfigurationError(
            f"{origin} has {len(run_id)} characters ({len(run_id.encode())} bytes), but a run id may have "
            f"{_LONGEST_ID} ({_LONGEST_ID_IN_BYTES} bytes) at most. Shorten it."
        )
    if run_id in (".", ".."):
        raise ConfigurationError(f"{origin} names a directory, but files are named by a run id. Use another one.")
    return run_id


def told_to_others(init_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that describe the job, for ranks that were given none or others; only what JSON can hold."""
    described = {name: init_arguments[name] for name in _DESCRIBING if init_arguments.get(name) is not None}
    if "dir" in described:
        described["dir"] = os.fspath(described["dir"])
    config = described.pop("config", None)
    described = {name: value for name, value in described.items() if _is_json(value)}
    if config is not None:
        described["config"] = config if isinstance(config, str) else _plain_part(chosen_config(init_arguments))
    return described


def with_own_secrets(described: Mapping[str, Any], init_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What `told_to_others` made of the arguments on another rank, with what is not told as this rank was given it."""
    config = described.get("config")
    if not isinstance(config, dict):
        return dict(described)
    own = chosen_config(init_arguments)
    values = {name: filled(value, own.get(name, MISSING)) for name, value in config.items()}
    return {**described, "config": {name: value for name, value in values.items() if value is not MISSING}}


def _plain_part(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of values those that JSON can hold, tuples as W&B's lists, without secrets; the run's config tells the rest."""
    values = {name: withheld(name, value, value) for name, value in values.items()}
    return {
        name: value if _is_json({name: value}) else told(value)
        for name, value in values.items()
        if _is_json({name: value}) or is_plain(value)
    }


def chosen_config(init_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Names and values of the argument `config`, without what W&B is told to leave out."""
    values = given_values(init_arguments.get("config"))
    without, only = init_arguments.get("config_exclude_keys"), init_arguments.get("config_include_keys")
    return {name: value for name, value in values.items() if name not in (without or ()) and (not only or name in only)}


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


def check_sweep(run_mode: str, rank_scope: str, topology: Topology) -> None:
    """Refuse several runs where an agent of a W&B sweep has started this process: there W&B ignores the ids of runs.

    Args:
        run_mode: The run mode.
        rank_scope: The rank scope.
        topology: Who this rank is. Nodes that are not known yet count as one.

    Raises:
        ConfigurationError: The job would open several runs, all of which W&B would write into one.
    """
    sweep = os.environ.get("WANDB_SWEEP_ID")
    opens_several = run_mode == "new" or (rank_scope == "worker" and (topology.num_nodes or 1) > 1)
    if sweep and topology.world_size > 1 and opens_several:
        raise ConfigurationError(
            f"run_mode={run_mode!r} with rank_scope={rank_scope!r} opens several runs, but an agent of the sweep "
            f"{sweep!r} has started this job (WANDB_SWEEP_ID on rank {topology.global_rank}), and W&B then ignores "
            "their ids: all would be written into the agent's one run. Pass run_mode='auto' or 'shared' with "
            "rank_scope='global'."
        )


def wanted_resume(init_arguments: Mapping[str, Any]) -> str | None:
    """What the user said of resuming: the argument, else the settings, else `WANDB_RESUME`; `None` for nothing.

    Returns:
        `"allow"`, `"must"`, `"never"`, or `"auto"`, as which W&B takes `True`.
    """
    given = init_arguments.get("resume")
    if given is None:
        given = _user_setting(init_arguments, "resume") or os.environ.get("WANDB_RESUME")
    return "auto" if given is True else str(given) if given else None


def says_reinit(init_arguments: Mapping[str, Any]) -> bool:
    """Whether the user says what is to become of a run that is open already."""
    given = init_arguments.get("reinit")
    if given is None:
        given = _user_setting(init_arguments, "reinit") or os.environ.get("WANDB_REINIT")
    return given not in (None, "", "default")


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

    if os.environ.get("WANDB_MODE") == "":
        raise ConfigurationError("WANDB_MODE is set but empty, which W&B refuses. Unset it, or set it to 'offline'.")
    return os.environ.get("WANDB_MODE") or str(_settings().mode)


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
        server: The server, who named it, and whether the API key may go there; `None` if `wandb.init` would raise.
        entity: Owner of new runs, if one is set.
        project: Project of new runs, if one is set.
        key: The API key, if there is one.
        key_from: Where it comes from.
        inherits_service: Whether another process has told this one to use its wandb process.
    """

    mode: Mode | None
    problem: str
    server: Destination | None
    entity: str | None
    project: str | None
    key: str | None = field(repr=False)
    key_from: str | None
    inherits_service: bool


def setup(trusted: str | None = None) -> Setup:
    """Find out how wandb is set up in this environment. Opens nothing, and asks no server.

    Args:
        trusted: The server that the user allows the API key to go to in any case, if any.
    """
    try:
        mode, settings = wanted_mode({}), _settings()
        server = destination(trusted=trusted)
    except Exception as error:  # noqa: BLE001  # ours, pydantic's, or what an inherited WANDB_SERVICE leads to
        return Setup(None, without_input(error), None, None, None, None, None, _inherits_service())
    key, key_from = _api_key(settings, server.shown)
    return Setup(mode, "", server, settings.entity, settings.project, key, key_from, _inherits_service())


def destination(init_arguments: Mapping[str, Any] | None = None, *, trusted: str | None = None) -> Destination:
    """Find out which server W&B's client would talk to, who named it, and whether the API key may go there.

    The user names a server by `WANDB_BASE_URL`, in the user's own settings file, or by leaving W&B's default. Anything
    else that wandb goes by, above all ``./wandb/settings``, may be a stranger's: to a server named there alone the key
    goes only if it is noted down for that host in the user's netrc, or if the user says so. To no server it goes over
    plain http, except on this host, or if the user says so. The user says so with ``--trust-server URL``
    (`dist_wandb.runs.destination.TRUST_OPTION`), the same for all commands. Opens nothing, and asks no server.

    Args:
        init_arguments: Keyword arguments of `wandb.init`, whose `settings` may name a server.
        trusted: The value of ``--trust-server``, if it was given.

    Returns:
        The server. Where `refusal` is not empty, neither the key nor runs may go there.

    Raises:
        ConfigurationError: wandb refuses its settings, or the address is one that not everybody reads alike.
    """
    try:
        settings = _settings()
    except Exception as error:  # noqa: BLE001  # pydantic's, or what an inherited WANDB_SERVICE leads to
        raise ConfigurationError(without_input(error)) from None
    given = _user_setting(init_arguments or {}, "base_url")
    url = str(given or settings.base_url)
    if not is_address(url):
        raise ConfigurationError(
            "W&B's settings name a server by an address that not everybody reads alike: it has several '@', or "
            "characters that belong into no address. See WANDB_BASE_URL, and base_url in wandb/settings."
        )
    origin: Origin
    origin, source = ("argument", "settings=") if given else _who_named(url)
    refusal = refusal_of(url, origin, source, has_own_key=_has_own_key(settings, url), trusted=trusted)
    return Destination(url, without_password(url), origin, source, refusal)


def _settings() -> wandb.Settings:
    """W&B's settings outside of any run, which it reads once in a process.

    Raises:
        ConfigurationError: A settings file of the current directory is nothing that can be read to its end.
    """
    import wandb

    check_workspace()
    return wandb.setup().settings


def check_workspace() -> None:
    """Refuse a settings file of the current directory over which wandb would wait for ever, or eat all memory.

    Raises:
        ConfigurationError: It is a pipe, a device or the like, or too large.
    """
    for place in _workspace_settings():
        with suppress(OSError):  # it is not there, as a rule
            found = place.stat()  # a link to a file is fine, as for wandb
            if not stat.S_ISREG(found.st_mode) or found.st_size > LIMIT:
                raise ConfigurationError(
                    f"{place}, which W&B reads its settings from, is no ordinary file of at most {LIMIT} bytes. Remove "
                    "it, or start from another directory."
                )


def _workspace_settings() -> list[Path]:
    """Where wandb may find settings of the current directory, also where `WANDB_DIR` names another one."""
    return [Path(directory, "settings").absolute() for directory in (".wandb", "wandb")]


def warn_of_workspace(init_arguments: Mapping[str, Any]) -> None:
    """Say once in a process which settings of the current directory alone decide who gets the API key of an online run.

    W&B goes by them, and whoever starts a training in a directory mostly knows it; but a key that is gone is gone.
    """
    global _has_warned_of_workspace  # noqa: PLW0603  # once in a process
    places = [place for place in _workspace_settings() if place.exists()]
    if _has_warned_of_workspace or not places:
        return
    found = []
    with suppress(ConfigurationError):  # wandb.init says it
        if wanted_mode(init_arguments) != "online":
            return
        server = destination(init_arguments)
        if server.origin == "workspace settings" and not server.takes_key:
            found.append(f"base_url ({server.shown})")
        found += [name for name in _ON_THE_WAY if _is_from(places, name, init_arguments)]
    if found:
        _has_warned_of_workspace = True
        _log.warning(
            "dist_wandb: %s of %s decides where your runs and your API key go, which nothing of your own names. If it "
            "is not yours, end the job and make a new key. If it is, set it in the environment (WANDB_BASE_URL), or in "
            "your own settings file, to have this warning gone.",
            " and ".join(found),
            " and ".join(map(str, places)),
        )


def _is_from(places: Iterable[Path], name: str, init_arguments: Mapping[str, Any]) -> bool:
    """Whether settings files of the current directory alone say something."""
    if _user_setting(init_arguments, name) is not None or f"WANDB_{name.upper()}" in os.environ:
        return False
    own = {_setting_in(path, name, Path.read_bytes) for path in _users_settings()}
    return any(_setting_in(place, name, read_small) not in {None, *own} for place in places)


def _who_named(url: str) -> tuple[Origin, str]:
    """Who named the server that wandb goes by. Only what the user is known to have named counts as that."""
    import wandb

    in_environment = os.environ.get("WANDB_BASE_URL")
    if in_environment and _is_read_as(in_environment, url):
        return "environment", "WANDB_BASE_URL"
    own = [(path, _setting_in(path, "base_url", Path.read_bytes)) for path in _users_settings()]  # links, in one's home
    for path, named in own:
        if named and _is_read_as(named, url):
            return "user settings", str(path)
    default = str(wandb.Settings.model_fields["base_url"].default)
    if not any(named for _, named in own) and is_same_server(default, url):
        return "default", "W&B's default"
    for place in _workspace_settings():
        if _is_read_as(_setting_in(place, "base_url", read_small) or "", url):
            return "workspace settings", str(place)
    return "elsewhere", "wandb's settings"


def _is_read_as(named: str, url: str) -> bool:
    """Whether wandb makes `url` of the address that somebody has written down: it rewrites some."""
    import wandb

    if is_same_server(named, url):
        return True
    try:
        return is_same_server(str(wandb.Settings(base_url=named).base_url), url)
    except Exception:  # noqa: BLE001  # wandb's validation raises more than pydantic's errors
        return False


def _users_settings() -> list[Path]:
    """The user's own settings files, which belong to no project. Older versions of wandb know the second alone."""
    directories = (os.environ.get("WANDB_CONFIG_DIR"), "~/.config/wandb")
    with suppress(RuntimeError):  # nobody's home
        return [Path(directory).expanduser() / "settings" for directory in directories if directory]
    return []


def own_entities() -> frozenset[str]:
    """The owners of runs that the user has named: by `WANDB_ENTITY`, or in the user's own settings file.

    What a settings file of the current directory names does not count: that may be a stranger's.
    """
    named = [_setting_in(path, "entity", Path.read_bytes) for path in _users_settings()]
    return frozenset(filter(None, (os.environ.get("WANDB_ENTITY"), *named)))


def default_entity() -> str | None:
    """The owner of runs that name none, whoever has set it: `own_entities` says whether the user has."""
    try:
        entity: str | None = _settings().entity
    except Exception as error:  # noqa: BLE001  # pydantic's, or what an inherited WANDB_SERVICE leads to
        raise ConfigurationError(without_input(error)) from None
    return entity


def artifact_staging() -> Path:
    """Where W&B puts files of artifacts aside until they are uploaded."""
    import wandb

    return Path(wandb.env.get_data_dir()).absolute() / "artifacts" / "staging"


def _setting_in(path: Path, name: str, read: Callable[[Path], bytes]) -> str | None:
    """What a settings file of W&B's says, read as wandb reads it."""
    parser = ConfigParser()
    try:
        parser.read_string(read(path).decode("utf-8"))
        return parser.get("default", name, fallback=None)
    except (OSError, ValueError, ParserError, ReadError):
        return None


def _api_key(settings: wandb.Settings, url: str) -> tuple[str | None, str | None]:
    """The API key that wandb would send to a server, and where it comes from."""
    if settings.api_key:
        in_environment = settings.api_key == os.environ.get("WANDB_API_KEY")
        return settings.api_key, "WANDB_API_KEY" if in_environment else "a settings file of W&B's"
    return _key_in_netrc(url)


def _has_own_key(settings: wandb.Settings, url: str) -> bool:
    """Whether the key that wandb would send is the one of the user's netrc for this host, and none for any host."""
    if settings.api_key or settings.identity_token_file:
        return False
    names = _names_in_netrc(without_password(url))
    return any(name in names and name != "default" for _, hosts in _netrcs() for name in hosts)


def without_input(error: Exception) -> str:
    """What an error says, on one line. pydantic's would also repeat the values, which may be secrets."""
    errors = getattr(error, "errors", None)
    if not callable(errors):
        return _one_line(error)
    told = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in errors())
    return f"W&B refuses what its settings (WANDB_*, settings=, its settings files) say of {'; '.join(told)}"


def _key_in_netrc(base_url: str) -> tuple[str | None, str | None]:
    for path, hosts in _netrcs():
        for name in (*_names_in_netrc(base_url), "default"):
            if name in hosts:
                return hosts[name][2], path
    return None, None


def _netrcs() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The files of keys by host that there are."""
    for path in filter(None, (os.environ.get("NETRC"), "~/.netrc", "~/_netrc")):
        with suppress(OSError, RuntimeError, NetrcParseError):
            yield path, netrc(Path(path).expanduser()).hosts


def _names_in_netrc(base_url: str) -> tuple[str, str]:
    """By which names a server has its key in netrc: newer versions of wandb write the port as well."""
    parts = urlsplit(base_url)
    return parts.netloc, parts.hostname or ""


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
    check_workspace()
    if plan.announces:
        warn_of_workspace(arguments)
    with _with_warnings_alone(on=plan.has_writers and not plan.announces and not _says_what_to_show(init_arguments)):
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


@contextmanager
def _with_warnings_alone(*, on: bool) -> Iterator[None]:
    """Have wandb print warnings and errors, but no information, meanwhile."""
    if not on:
        yield
        return
    import wandb

    settings = wandb.setup().settings
    wandb.termsetup(settings.model_copy(update={"show_info": False}), None)
    try:
        yield
    finally:
        wandb.termsetup(settings, None)  # as wandb.setup does


def _says_what_to_show(init_arguments: Mapping[str, Any]) -> bool:
    """Whether the user has said what wandb is to print."""
    names = ("quiet", "silent", "show_info")
    return any(
        _user_setting(init_arguments, name) is not None or f"WANDB_{name.upper()}" in os.environ for name in names
    )


def quiet_end(run: AnyRun, plan: RunPlan, init_arguments: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Leave out what wandb prints at the end of a run, but warnings, where it helps nobody.

    That is on all ranks but one of a shared run, and offline on that one too, as "wandb sync" is not how to upload it.
    What the user has said of it in the arguments or the environment holds.
    """
    is_one_of_several = plan.has_writers and (not plan.announces or is_offline(run))
    return _with_warnings_alone(on=bool(run) and is_one_of_several and not _says_what_to_show(init_arguments))


def how_to_upload(run: AnyRun, plan: RunPlan, topology: Topology) -> str | None:
    """How a shared run on disk is uploaded, as a line for one of its ranks; `None` where there is nothing to say."""
    if not run or not plan.has_writers or not plan.announces or is_disabled(run) or not is_offline(run):
        return None
    directory = Path(run.dir).parent.parents[2] if plan.shared else Path(run.dir).parent.parent
    has_nodes = plan.rank_scope == "global" and (topology.num_nodes or 1) > 1
    together = ", with those of all nodes together" if has_nodes else ""
    return (
        f"dist_wandb: the run {run.id} is on disk, in several files{together}. Upload it with: "
        f"dist-wandb sync {directory}"
    )


def _without_stale(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out an `anonymous` that says nothing, where wandb warns of it: there `None` is not its default any more."""
    import wandb

    parameter = inspect.signature(wandb.init, follow_wrapped=False).parameters.get("anonymous")
    if arguments.get("anonymous") is not None or parameter is None or parameter.default is None:
        return arguments
    return {name: value for name, value in arguments.items() if name != "anonymous"}


def init_timeout(init_arguments: Mapping[str, Any]) -> float:
    """How long opening a run may take, in seconds: wandb needs some more than its own limit to give up."""
    given = _user_setting(init_arguments, "init_timeout") or _settings().init_timeout
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


def set_service_aside() -> None:
    """Have the next run written by a wandb process of its own, as the one that there is holds the id of a failed run.

    Runs that are open stay with theirs. wandb has only a private name for it; where that is missing, nothing is done.
    """
    setup = sys.modules.get(_SETUP)
    if hasattr(setup, "_singleton"):
        setup._singleton = None  # type: ignore[union-attr]  # noqa: SLF001  # no public way
        os.environ.pop("WANDB_SERVICE", None)


def is_served_now(run: AnyRun) -> bool:
    """Whether a run is written by the process that a new one would be written by; also where wandb does not tell."""
    mine, now = getattr(run, "_wl", None), getattr(sys.modules.get(_SETUP), "_singleton", None)
    return mine is None or now is None or mine is now


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


def state_directory() -> Path:
    """Where what dist_wandb has to remember of this user's uploads is kept: ``$XDG_STATE_HOME/dist-wandb``.

    As the XDG base directory specification says, a relative path in the variable counts as none.
    """
    told = Path(os.environ.get("XDG_STATE_HOME") or "")
    return (told if told.is_absolute() else Path("~/.local/state").expanduser()) / "dist-wandb"


def runtime_directory() -> Path | None:
    """Where this user's sockets belong, ``$XDG_RUNTIME_DIR``; `None` if the variable names no directory."""
    told = Path(os.environ.get("XDG_RUNTIME_DIR") or "")
    return told if told.is_absolute() and told.is_dir() else None


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
    content = json.dumps(record, indent=2) + "\n"
    write_small(directory / SIDECAR_NAME, content.encode(), mode=0o666)  # for whoever may read the run beside it


def upload_environment(
    directory: Path,
    *,
    shared: bool,
    label: str | None,
    primary: bool,
    finishes: bool,
    resume: str | None,
    server: str | None = None,
) -> dict[str, str]:
    """The environment in which ``wandb sync`` uploads one file as what it is; made from that of this process.

    Settings of one run (its id, name, tags, group, …) are left out, because they would be meant for another one. Python
    takes no code from the directory in which it is started. Settings files of the current directory do not count: one
    that names a proxy, and has certificates not checked, would get the API key on its way to the right server.
    Without settings by the user, W&B gives up after about two minutes without a server, instead of two hours.

    Args:
        directory: Where W&B is to keep its log, for this user alone.
        shared: Whether the file is that of a writer of a shared run.
        label: The writer's label; `None` in a plain run.
        primary: Whether the writer is the shared run's primary, or the run is a plain one.
        finishes: Whether the end of the file is the end of the run.
        resume: W&B's ``resume``, for a plain run that goes on; `None` for a run of its own.
        server: The server's address; `None` for the one of the user's own settings, or W&B's.

    Returns:
        A copy of the environment.
    """
    environment = {name: value for name, value in own_environment().items() if name not in _OF_ONE_RUN}
    roles = {"X_PRIMARY": primary, "X_UPDATE_FINISH_STATE": finishes}
    environment.update({f"WANDB_{name}": str(value).lower() for name, value in roles.items()})
    environment["WANDB_MODE"] = "shared" if shared else "online"
    environment["WANDB_DIR"] = str(directory)
    if label is not None:
        environment["WANDB_X_LABEL"] = label
    if resume is not None:
        environment["WANDB_RESUME"] = resume
    if server is not None:
        environment["WANDB_BASE_URL"] = server
    for name, value in _UPLOAD_PATIENCE.items():
        environment.setdefault(name, value)
    (directory / "wandb").mkdir(parents=True, exist_ok=True)
    return environment


def define_step_metric(run: AnyRun, step_metric: str) -> None:
    """Make `step_metric` the x axis of every metric that the user defines no other for.

    For ``trainer/global_step`` as Lightning's own logger does it: W&B writes its last value into rows without one. Of
    rows that go through a session all have `global_step`, and into others W&B is not to write any.
    """
    if hasattr(run, "define_metric"):  # a stand-in for a run, in somebody's tests, may not have it
        run.define_metric(step_metric)
        run.define_metric("*", step_metric=step_metric, step_sync=step_metric != STEP_METRIC)


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


def say_offline() -> None:
    """Say "offline" to wandb as Lightning's own logger does, for whatever this process opens from now on."""
    os.environ["WANDB_MODE"] = "dryrun"


def is_finished(run: AnyRun) -> bool:
    """Whether a run has been finished, by us or by the user. wandb tells it by a private name only."""
    return bool(run) and bool(getattr(run, "_is_finished", False))


def go_first(run: AnyRun, handlers: Mapping[str, Handler]) -> Callable[[], None]:
    """Have methods of a run handled by a session, as often as somebody calls them on the run by itself.

    The methods of this very object are covered; its class stays as it is, and so do other runs. So is ``wandb.log``
    (and ``wandb.define_metric``) where ``wandb.run`` is this run; the former also where this process has no run.

    Args:
        run: The run, or a `NullRun`.
        handlers: By the name of a method what is called in its place, with the original method and the arguments.

    Returns:
        Takes it back. wandb's functions are then what they were, unless wandb has changed them meanwhile.
    """
    take_back = [take for name, handler in handlers.items() for take in _go_first(run, name, handler)]

    def take_all_back() -> None:
        for take in take_back:
            take()

    return take_all_back


def _go_first(run: AnyRun, name: str, handler: Handler) -> Iterator[Callable[[], None]]:
    if not _has_method(run, name):  # a stand-in for a run, in somebody's tests
        return
    interception, take_back = intercept(run, name, handler)
    yield take_back
    module = sys.modules.get("wandb")
    running = getattr(module, "run", None)
    if module is None or name not in _OF_THE_MODULE or not hasattr(module, name):
        return
    if running is None and name == "log":
        yield intercept(module, name, handler)[1]
    elif running is run and running is not None:
        vars(module)[name] = interception.method
        yield lambda: _restore(module, name, interception)


def _has_method(run: AnyRun, name: str) -> bool:
    """Whether a run has a method that may be covered: a mock's `log` is looked at by who made the mock."""
    if not hasattr(run, "__dict__") or not hasattr(run, name):
        return False
    return isinstance(run, NullRun) or name == "finish" or callable(getattr(type(run), name, None))


def _restore(module: ModuleType, name: str, interception: Interception) -> None:
    """Have one of wandb's functions be that of its run again, unless wandb has changed it, or other sessions go on."""
    if interception.is_idle and vars(module).get(name) is interception.method:
        vars(module)[name] = interception.original


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


def is_loss_of_service(error: Exception) -> bool:
    """Whether an error says that the connection to wandb's own process is lost.

    That is no sure sign where values of the user's were written, as these have code of their own: see
    `has_lost_service`.
    """
    if isinstance(error, OSError):  # older versions: BrokenPipeError; newer ones: ConnectionResetError
        return isinstance(error, ConnectionError) or error.errno in _LOST_SOCKET
    return type(error).__name__ in _LOST_SERVICE


def has_lost_service(run: AnyRun, error: Exception) -> bool:
    """Whether a call of `run` failed because wandb's own process is gone, rather than for what was written.

    In doubt the run is asked: a call that adds nothing to the row in progress fails as well if the process is gone.
    """
    if not isinstance(error, OSError) or not is_loss_of_service(error):
        return is_loss_of_service(error)
    try:
        original(run, "log")({}, commit=False)  # the session's own way takes rows of a run that is gone as well
    except Exception as second:  # noqa: BLE001  # whatever wandb makes of it
        return is_loss_of_service(second)
    return False


def restore_media_directory(error: FileNotFoundError) -> bool:
    """Make the directory again in which wandb prepares the files of tables and media, if it is what was missing.

    Returns:
        Whether it was missing, and is there again.
    """
    path = Path(str(error.filename or ""))
    if not path.parent.name.endswith(_MEDIA_DIRECTORY) or path.parent.exists():
        return False
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path.parent.exists()


def disarm_exit_hooks() -> None:
    """In a forked process: have wandb not end at its exit what belongs to the parent.

    There it would remove the parent's directory for media and, before 0.20, stop the parent's wandb process. wandb has
    only private names for both.
    """
    media = getattr(sys.modules.get("wandb.sdk.data_types._private"), "MEDIA_TMP", None)
    with suppress(AttributeError):
        atexit.unregister(media.cleanup)  # type: ignore[union-attr]
        media._finalizer.detach()  # type: ignore[union-attr]  # noqa: SLF001  # no public way
    singleton = getattr(sys.modules.get(_SETUP), "_singleton", None)
    with suppress(AttributeError):
        unregister = singleton._connection._cleanup  # type: ignore[union-attr]  # noqa: SLF001
        if unregister is not None:
            unregister()


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
    address = getattr(run, "url", None) if is_online(run) else None
    shown: str | None = _shown_url(address)
    return shown


def _shown_url(address: Any) -> Any:
    """An address of W&B's without the password of the server's, which it is made from."""
    return without_password(address) if isinstance(address, str) and "@" in address else address


def facts_of(run: AnyRun) -> dict[str, Any]:
    """What is to be known of a run on ranks without one: of `FACTS` what JSON can hold."""
    asked = FACTS if is_online(run) else FACTS - {"url", "project_url"}  # wandb warns when an offline run is asked
    facts = {name: getattr(run, name, None) for name in sorted(asked)}
    facts.update({name: _shown_url(facts[name]) for name in ("url", "project_url") if name in facts})
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
        rank: This rank's index in the job, for messages.
    """

    def __init__(self, run: AnyRun | Record | Axes, plan: RunPlan, step_metric: str | None, rank: int = 0) -> None:
        self.label = plan.label
        self.is_primary = plan.primary
        self.has_own_run = plan.run_mode == "new"
        self._run = run
        self.step_metric = step_metric
        self._rescue = Rescue(is_media, rank)

    @property
    def has_run(self) -> bool:
        """Whether there is a run to write into."""
        return bool(self._run)

    def write_plain(self, row: Mapping[str, Any], x: int | None) -> None:
        """Write one row as it is.

        Args:
            row: Values by the names they are to have.
            x: Its place on the x axis; `None` leaves the x axis out of the row.
        """
        if self._run:
            axis = {} if self.step_metric is None or x is None else {self.step_metric: x}
            self._log({**row, **axis})

    def write(self, metrics: Mapping[str, Any], step: int | None, *, commit: bool | None = None) -> None:
        """Write one row.

        Args:
            metrics: What this rank logged, by the names that it is to have.
            step: Its place on the x axis; `None` leaves the x axis out of the row.
            commit: As in `wandb.Run.log`; `None` leaves it to wandb.
        """
        if not self._run:
            return
        row = dict(metrics)
        if self.step_metric is not None and step is not None:
            row[self.step_metric] = step
        self._log(row) if commit is None else self._log(row, commit=commit)

    def _log(self, row: dict[str, Any], **kwargs: Any) -> None:
        try:
            self._run.log(row, **kwargs)
        except Exception as error:  # noqa: BLE001  # raised again, if no value is the cause
            self._rescue.write(self._run.log, row, error, **kwargs)
