"""The run of ``wandb.run``; a run's address and state; what other ranks get to know of it and of `init`'s arguments."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from dist_wandb.runs import requested
from dist_wandb.runs.client_settings import settings_here, without_password
from dist_wandb.settings.config_values import encoded, filled, given_values, publishable, without_secrets
from dist_wandb.settings.plan import RunPlan

if TYPE_CHECKING:
    from dist_wandb.runs.null_run import AnyRun, Run

_ADDRESSES = frozenset({"url", "project_url", "sweep_url"})
METADATA = _ADDRESSES | frozenset(
    {
        *("id", "name", "entity", "project", "path", "group", "job_type", "tags", "notes"),
        *("dir", "sync_dir", "start_time", "sweep_id", "offline", "disabled", "resumed", "starting_step"),
    }
)
"""Attributes of a run that its primary publishes for ranks without one."""
SUMMARY = "summary"  # published with these: what a resumed run had in it
_OF_RUN = frozenset({"id", "name", "group", "job_type", "notes", "tags", "url"})  # "run_id" and so on in settings
_SETTINGS = _OF_RUN | {"project", "entity", "project_url", "resumed", "sweep_id"}
_COMPUTED = frozenset({"run_url", "project_url", "files_dir", "sync_dir", "wandb_dir", "_offline"})  # by wandb
_ARTIFACT = "artifactVersion"  # the type of a dict in a config that W&B replaces by an artifact
_DESCRIBING = ("entity", "project", "name", "notes", "tags", "group", "job_type", "dir", "mode", "resume", "config")


def running_run() -> Run | None:
    module = sys.modules.get("wandb")  # without an import there is no run
    return getattr(module, "run", None) or None  # another thread may be importing it; a stand-in of ours is falsy


def of_wandb(name: str) -> Any:
    import wandb

    try:
        return getattr(wandb, name)
    except AttributeError:
        raise AttributeError(
            f"module 'dist_wandb' has no attribute {name!r}, and wandb {wandb.__version__} has none either"
        ) from None


def of_its_run(name: str, why_not: Callable[[], str]) -> Callable[..., Any]:
    """Return the function of wandb that acts on ``wandb.run``; without a run, raise wandb's error and say why not."""
    if running_run() is None:
        import wandb

        raise wandb.Error(f"You must call wandb.init() before wandb.{name}(). {why_not()}")
    function: Callable[..., Any] = of_wandb(name)
    return function


def starting_step(run: AnyRun) -> int:
    step: object = getattr(run, "starting_step", 0)
    return step if isinstance(step, int) else 0


def location(run: AnyRun, plan: RunPlan | None = None) -> str:
    if not run:
        return "nowhere"
    if is_disabled(run):
        return "nowhere, because W&B is disabled"
    if not is_offline(run):
        return str(url(run) or "at an unknown address")
    directory = Path(run.dir).parent
    if plan is not None and plan.shared:  # its directory is DIR/wandb/rank-R/wandb/offline-run-...
        return f"offline, a file for each rank below {directory.parents[2]}"
    return f"offline, in {directory}"


def is_disabled(run: AnyRun) -> bool:
    return bool(getattr(run, "disabled", False))  # a mock of a run has none


def is_offline(run: AnyRun) -> bool:
    return bool(getattr(run, "offline", False))  # a mock of a run has none


def is_online(run: AnyRun) -> bool:
    return bool(run) and not is_offline(run) and not is_disabled(run)


def url(run: AnyRun) -> str | None:  # wandb warns about reading it offline
    address: str | None = _shown_url(getattr(run, "url", None)) if is_online(run) else None
    return address


def _shown_url(address: Any) -> Any:
    # W&B copies user name and password from the server's address.
    return without_password(address) if isinstance(address, str) and "@" in address else address


def metadata_of(run: AnyRun) -> dict[str, Any]:
    read = METADATA if is_online(run) else METADATA - _ADDRESSES  # wandb warns about reading them offline
    values = {name: getattr(run, name, None) for name in read}
    values.update({name: _shown_url(values[name]) for name in read & _ADDRESSES})
    return {name: values.get(name) for name in sorted(METADATA) if is_json(values.get(name))}


def settings_of(metadata: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run as far as its metadata has them, and with them and its own what this process has."""
    found = {f"run_{name}" if name in _OF_RUN else name: metadata[name] for name in metadata.keys() & _SETTINGS}
    if metadata.get("dir"):
        path = Path(metadata["dir"])
        for name in ("files_dir", "sync_dir", "wandb_dir", "root_dir"):
            found[name], path = str(path), path.parent
    if "offline" in metadata:
        found["_offline"] = metadata["offline"]
        found["mode"] = "disabled" if metadata.get("disabled") else "offline" if metadata["offline"] else "online"
    given = {name: value for name, value in found.items() if name not in _COMPUTED}
    here = settings_here({**own, **given, "x_start_time": metadata.get("start_time")})
    if "sync_dir" in found:  # the start that W&B has in its name may be another second
        here = {
            name: one.replace(here["sync_dir"], found["sync_dir"]) if isinstance(one, str) else one
            for name, one in here.items()
        }
    return {**here, **{name: value for name, value in found.items() if value is not None or name not in _COMPUTED}}


def as_requested(arguments: Mapping[str, Any], run_id: str | None, *, is_offline: bool) -> dict[str, Any]:
    """Return the metadata of a run that is not open yet, as far as the arguments of `wandb.init` determine it."""
    texts = {name: requested.text(arguments, name) for name in ("entity", "project", "name", "group")}
    mode = "offline" if is_offline else requested.mode_if_given(arguments)
    return {
        **dict.fromkeys(METADATA),
        **{name: arguments.get(name) for name in ("job_type", "notes")},
        **texts,
        "id": run_id,
        "path": "/".join(filter(None, (texts["entity"], texts["project"], run_id))),
        "tags": tuple(arguments.get("tags") or ()),
        "dir": str(requested.wandb_directory(arguments)),
        "offline": mode == "offline",
        "disabled": mode == "disabled",
        "resumed": False,
        "starting_step": 0,
    }


def without_effect(arguments: Mapping[str, Any], run: AnyRun) -> str:
    without = []
    for name, value in requested.naming(arguments).items():
        parts, theirs = value if isinstance(value, (list, tuple)) else [value], getattr(run, name, None)
        if theirs and any(str(part) not in str(theirs) for part in parts):  # a name may have been completed
            without.append(f"{name}={value!r}")
    config, given = given_values(getattr(run, "config", None)), chosen_config(arguments)
    held = {name: config.get(name) for name in given}
    without += ["config"] * (json.dumps(held, default=str) != json.dumps(given, default=str))
    return ", ".join(without)


def from_json(received: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result of `metadata_of` that was read from JSON, with lists as tuples, as for W&B's tags."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in received.items()}


def group_url(run: AnyRun, group: str | None) -> str | None:
    address = url(run)
    if address is None or group is None:
        return None
    project, _, _ = address.partition("/runs/")
    return f"{project}/groups/{quote(group, safe='')}"


def arguments_for_others(init_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those arguments that describe the job and that JSON can hold, for other ranks."""
    described = {name: init_arguments[name] for name in _DESCRIBING if init_arguments.get(name) is not None}
    if "dir" in described:
        described["dir"] = os.fspath(described["dir"])
    config = described.pop("config", None)
    described = {name: value for name, value in described.items() if is_json(value)}
    if isinstance(config, str):
        described["config"] = config
    elif config is not None:  # what JSON can hold, without secrets, with tuples as lists; the run's config has the rest
        values = without_secrets(chosen_config(init_arguments))
        described["config"] = {name: value for name, value in values.items() if is_json({name: value})}
    return described


def with_own_secrets(described: Mapping[str, Any], init_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a result of `arguments_for_others` from another rank with this rank's own secrets."""
    config = described.get("config")
    if not isinstance(config, dict):
        return dict(described)
    own = chosen_config(init_arguments)
    rest, (_, withheld) = without_secrets(own), publishable(own, own)
    order = dict.fromkeys(name for name in own if name in config or name not in rest)
    return {**described, "config": filled({**order, **config}, withheld, own)}


def chosen_config(init_arguments: Mapping[str, Any]) -> dict[str, Any]:
    values = given_values(init_arguments.get("config"))
    without, only = init_arguments.get("config_exclude_keys"), init_arguments.get("config_include_keys")
    return {name: value for name, value in values.items() if name not in (without or ()) and (not only or name in only)}


def is_json(value: object) -> bool:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        return False
    return isinstance(value, (list, tuple)) or text == json.dumps(encoded(value)) or bool(json.loads(text) == value)


def can_hold(value: object) -> bool:
    import wandb

    kind = getattr(wandb, "Config", None)  # the name is public, but wandb hides it from type checkers
    is_artifact = isinstance(value, wandb.Artifact) or (isinstance(value, dict) and value.get("_type") == _ARTIFACT)
    if kind is None or value is None or is_artifact or isinstance(value, (str, float)):
        return True
    probe = kind()  # belongs to no run
    try:
        probe.update({"value": value}, allow_val_change=True)
        json.dumps(
            probe["value"],
            default=lambda one: list(one) if isinstance(one, (set, frozenset)) else complex.__repr__(one),
        )
    except Exception:  # noqa: BLE001  # values execute their own code, which may raise anything
        return False
    return True
