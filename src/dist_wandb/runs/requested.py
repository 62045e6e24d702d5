"""What the user requests from W&B, and checks of it: by arguments, else by settings, else by the environment.

`settings_in`, `in_code` (an argument, else a setting) and `in_environment` look into some of these, `text` and the
functions named after an argument into all.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from dist_wandb.errors import ConfigurationError, as_usage_error, suggest
from dist_wandb.notices import Notices, warn
from dist_wandb.payloads.scalars import WrongTypeError
from dist_wandb.runs.client_settings import (
    client_settings,
    destination,
    hidden_values,
    users_values,
    workspace_settings,
    workspace_values,
)
from dist_wandb.settings.config_values import plain
from dist_wandb.settings.options import LIMIT_NAMES, OPTION_NAMES

if TYPE_CHECKING:
    from wandb import Settings

# W&B's client refuses the first seven; its documentation adds the backslash and the percent sign.
_FORBIDDEN_IN_IDS = ":;,#?/'\\%"
_LONGEST_ID = 128  # characters. W&B documents this limit only for names
_LONGEST_ID_IN_BYTES = 192  # W&B puts the id into file names, which may have 255 bytes
# Settings that can expose the key on its way to the right server.
_TRANSPORT_SETTINGS = ("insecure_disable_ssl", "http_proxy", "https_proxy", "x_extra_http_headers")
_notices = Notices()
_SHOWN_OF_AN_ORIGIN = 200
# W&B's setting and environment variable by argument, where they are not named like it.
_SETTINGS = {
    "dir": "root_dir",
    **{name: f"run_{name}" for name in ("id", "name", "notes", "tags", "group", "job_type")},
}
_VARIABLES = {"id": "WANDB_RUN_ID", "group": "WANDB_RUN_GROUP"}
# The arguments whose values W&B's settings check.
_CHECKED = (
    *("name", "notes", "group", "job_type", "force", "save_code", "sync_tensorboard", "resume_from", "fork_from"),
    *("project", "entity", "dir", "tags", "resume", "reinit"),
)


class LoggerArguments(TypedDict, total=False):
    """Arguments of `wandb.init`, without those that Lightning's logger also has, for editors and type checkers."""

    entity: str | None
    notes: str | None
    tags: Sequence[str] | None
    config: Any  # a mapping, an `argparse.Namespace`, a dataclass, ..., or the path of a file
    config_exclude_keys: list[str] | None
    config_include_keys: list[str] | None
    allow_val_change: bool | None
    group: str | None
    job_type: str | None
    mode: Literal["online", "offline", "disabled"] | None
    force: bool | None
    reinit: bool | Literal["default", "return_previous", "finish_previous", "create_new"] | None
    resume: bool | Literal["allow", "never", "must", "auto"] | None
    resume_from: str | None
    fork_from: str | None
    save_code: bool | None
    tensorboard: bool | None
    sync_tensorboard: bool | None
    monitor_gym: bool | None
    settings: Settings | Mapping[str, Any] | None


class WandbArguments(LoggerArguments, total=False):
    """Arguments of `wandb.init` in every supported version, without `project`, which is one of ours."""

    dir: str | os.PathLike[str] | None
    id: str | None
    name: str | None
    anonymous: Any  # without effect in newer versions


def check_init_arguments(given: Mapping[str, Any], integration: str) -> None:
    # Arguments are also checked if `wandb.init` returns a run that is open. A `ConfigurationError` may name the
    # `integration`; for a config, it is that of wandb.
    import wandb

    if unknown := given.keys() - WandbArguments.__optional_keys__ - {"project"}:
        _check_against_signature(sorted(unknown), integration)
    if given.get("mode") == "shared":
        raise ConfigurationError(
            f"{integration} was given mode='shared', which is W&B's switch for one writer. Pass run_mode='shared': it "
            "sets W&B's mode, labels and primary on every rank."
        )
    if given.get("mode"):
        mode({"mode": given["mode"]})
    if given.get("id") is not None:
        check_id(given["id"], f"id={given['id']!r} given to {integration}")
    settings = given.get("settings")
    held = {_SETTINGS.get(name, name): given[name] for name in _CHECKED if given.get(name) is not None}
    if isinstance(held.get("run_tags"), str):  # `init` of all versions takes it, the settings of older ones do not
        held["run_tags"] = (held["run_tags"],)
    with hidden_values():
        getattr(wandb, "Settings", dict)(**{**(settings if isinstance(settings, Mapping) else {}), **held})  # or a mock
    config, without, only = (given.get(name) for name in ("config", "config_exclude_keys", "config_include_keys"))
    config = plain(config or {})
    if not isinstance(config, Mapping) or (without and only):  # such as a file that does not exist
        helper: Any = getattr(wandb, "helper", None)  # not visible to type checkers
        if helper is not None:
            helper.parse_config(config, exclude=without, include=only)


def _check_against_signature(unknown: list[str], integration: str) -> None:
    import wandb

    for name in unknown:
        if name in LIMIT_NAMES:
            raise ConfigurationError(
                f"{integration} got the argument {name!r}, which is one of the limits. Pass "
                f"limits=dist_wandb.Limits({name}=...)."
            )
    parameters = inspect.signature(wandb.init).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in unknown:
        if name in OPTION_NAMES:
            raise ConfigurationError(
                f"{integration} got the argument {name!r}, which belongs to dist_wandb, not to wandb.init. Give it "
                "to the constructor of the logger or tracker, or to dist_wandb.init."
            )
        if name not in parameters:
            nearest = difflib.get_close_matches(name, [*parameters, *OPTION_NAMES, *LIMIT_NAMES], n=1)
            hint = f"Did you mean {nearest[0]!r}?" if nearest else "See the documentation of wandb.init."
            raise WrongTypeError(f"{integration} got the argument {name!r}, which wandb.init does not know. {hint}")


def check_id(run_id: object, origin: str) -> str:
    if len(origin) > _SHOWN_OF_AN_ORIGIN:
        origin = f"{origin[:_SHOWN_OF_AN_ORIGIN]}…"
    if not isinstance(run_id, str):
        raise ConfigurationError(f"{origin} is {type(run_id).__name__}, but a run id is text. Pass a str.")
    if not run_id or run_id != run_id.strip():
        error = ConfigurationError(f"{origin} is empty, or has white space around it, which W&B refuses in run ids.")
        raise as_usage_error(error)
    bad = " and ".join(repr(character) for character in _FORBIDDEN_IN_IDS if character in run_id)
    if bad:
        proposal = re.sub(f"[{re.escape(_FORBIDDEN_IN_IDS)}]", "-", run_id)[:_LONGEST_ID]
        error = ConfigurationError(f"{origin} has {bad}, which W&B refuses in run ids. Use for example {proposal!r}.")
        raise as_usage_error(error)
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
        raise ConfigurationError(f"{origin} names a directory, but W&B names files after the run id. Use another id.")
    return run_id


Mode = Literal["online", "offline", "disabled"]
_BEYOND_INIT_TIMEOUT = 30.0  # seconds
_NAMES = ("project", "entity", "group", "name")  # with the id, what tells runs apart
_REINIT_BEFORE = {"true": "finish_previous", "false": "return_previous"}
_WANDB_MODES: dict[str, Mode] = {
    "online": "online",
    "run": "online",
    "shared": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}


def in_code(init_arguments: Mapping[str, Any], name: str) -> Any:  # an argument, else the setting for it
    argument = init_arguments.get(name)
    return settings_in(init_arguments).get(_SETTINGS.get(name, name)) if argument in (None, "") else argument


def in_environment(name: str) -> tuple[str, str | None]:
    found = _VARIABLES.get(name, f"WANDB_{name.upper()}")
    return found, os.environ.get(found)


def _anywhere(init_arguments: Mapping[str, Any], name: str) -> Any:
    found = in_code(init_arguments, name)
    return in_environment(name)[1] if found in (None, "") else found


def text(init_arguments: Mapping[str, Any], name: str) -> str | None:
    found = _anywhere(init_arguments, name)
    return str(found) if found else None


def run_id(init_arguments: Mapping[str, Any]) -> str | None:
    found = in_code(init_arguments, "id")
    if found is None and init_arguments.get("resume_from"):  # W&B rewinds that run, so the opened run has its id
        found = str(init_arguments["resume_from"]).partition("?")[0]
    if found is not None:
        return check_id(found, f"id={found!r}")
    name, found = in_environment("id")
    return check_id(found, f"{name}={found!r}") if found else None


def resume(init_arguments: Mapping[str, Any]) -> str | None:  # W&B's `True` is "auto"
    found = _anywhere(init_arguments, "resume")
    return "auto" if found is True else str(found) if found else None


def reinit(init_arguments: Mapping[str, Any]) -> str:
    found = _anywhere(init_arguments, "reinit")
    text = str("default" if found in (None, "") else found)
    return _REINIT_BEFORE.get(text.lower(), text)


def continues(init_arguments: Mapping[str, Any]) -> bool:
    return resume(init_arguments) in ("allow", "must", "auto")


def first_step(init_arguments: Mapping[str, Any]) -> int:  # 0 without a point to rewind or fork
    found = (in_code(init_arguments, name) for name in ("resume_from", "fork_from"))
    point = next(filter(None, found), None)  # "RUN?_step=5", or an object of wandb
    return 0 if point is None else int(float(str(getattr(point, "value", point)).rpartition("=")[2])) + 1


def naming(init_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the requested values, by argument, that tell runs apart."""
    found = {"id": run_id(init_arguments), **{name: text(init_arguments, name) for name in _NAMES}}
    found.update({name: init_arguments.get(name) for name in ("job_type", "tags")})
    return {name: one for name, one in found.items() if one is not None}


def mode_if_given(init_arguments: Mapping[str, Any]) -> Mode | None:
    in_files = (*workspace_values("mode").values(), *users_values("mode").values())  # wandb.setup would import it
    return _WANDB_MODES.get(str(_anywhere(init_arguments, "mode") or next(filter(None, in_files), None)))


def mode(init_arguments: Mapping[str, Any]) -> Mode:
    found = _anywhere(init_arguments, "mode")
    if found == "":
        raise ConfigurationError("WANDB_MODE is set but empty, which W&B refuses. Unset it, or set it to 'offline'.")
    found = found or str(client_settings().mode)
    if found not in _WANDB_MODES:
        raise ConfigurationError(f"The W&B mode {found!r} is unknown. {suggest(found, _WANDB_MODES)}")
    return _WANDB_MODES[found]


def settings_in(init_arguments: Mapping[str, Any]) -> dict[str, Any]:  # without wandb's defaults
    settings = init_arguments.get("settings") or {}
    if isinstance(settings, Mapping):
        return dict(settings)
    return {name: getattr(settings, name, None) for name in getattr(settings, "model_fields_set", ())}


def replaced_label(init_arguments: Mapping[str, Any], run_mode: str, ranks: int) -> str | None:
    # `None` if the user has set none. Several ranks may not ask W&B, but this package, for a run that all write into.
    if ranks == 1:
        return None
    mode, origin = _value_and_origin(init_arguments, "mode")
    if mode == "shared" and not init_arguments.get("mode") and run_mode != "shared":
        raise ConfigurationError(
            f"mode='shared' ({origin}) is W&B's switch for one writer, but {ranks} ranks open the run with "
            f"run_mode={run_mode!r}. Pass run_mode='shared' instead: it sets W&B's mode, labels and primary on every "
            "rank."
        )
    label, origin = _value_and_origin(init_arguments, "x_label")
    return f"x_label={label!r} ({origin})" if label is not None and run_mode == "shared" else None


def _value_and_origin(init_arguments: Mapping[str, Any], name: str) -> tuple[Any, str]:
    given, variable = settings_in(init_arguments).get(name), f"WANDB_{name.upper()}"
    given, origin = (os.environ.get(variable), variable) if given is None else (given, "settings")
    if given is None and re.match(rf"\d+-{os.getpid()}-", os.environ.get("WANDB_SERVICE", "")):  # wandb is set up here
        return getattr(client_settings(), name, None), "wandb.setup"
    return given, origin


def warn_of_workspace(init_arguments: Mapping[str, Any]) -> None:
    """Warn once if only the current directory's settings decide who gets the API key: a stolen one stays stolen."""
    paths = [path for path in workspace_settings() if path.exists()]
    if not paths:
        return
    found, given = [], settings_in(init_arguments)
    with suppress(ConfigurationError):  # wandb.init raises it
        if mode(init_arguments) != "online":
            return
        if given.get("base_url") is None:
            server = destination()
            if server.refusal and server.source in map(str, paths):
                found.append(f"base_url ({server.shown})")
        for name in _TRANSPORT_SETTINGS:
            is_set = given.get(name) is not None or f"WANDB_{name.upper()}" in os.environ
            if not is_set and set(workspace_values(name).values()) - set(users_values(name).values()):
                found.append(name)
    if found and _notices.is_first("workspace"):
        warn(
            f"{' and '.join(found)} of {' and '.join(map(str, paths))} decides where your runs and your API key go, "
            "and your own settings do not name it. If that file is not yours, end the job and create a new key. If it "
            "is, set the same value in the environment (WANDB_BASE_URL) or in your own settings file, and this warning "
            "will not appear again."
        )


def init_timeout(init_arguments: Mapping[str, Any]) -> float:  # seconds
    given = settings_in(init_arguments).get("init_timeout") or client_settings().init_timeout
    return float(given) + _BEYOND_INIT_TIMEOUT


def set_offline() -> None:
    os.environ["WANDB_MODE"] = "dryrun"  # as Lightning's own logger does, for all later runs of this process


def wandb_directory(init_arguments: Mapping[str, Any]) -> Path:
    return Path(_anywhere(init_arguments, "dir") or ".") / "wandb"
