"""The diagnosis of ``dist-wandb doctor``: this process's rank, the run it would open, wandb's setup, and W&B's answer.

W&B's server is asked for the owner of the API key. `wandb.Api` is not used: it needs a key, uses proxies even for this
host, retries beyond any time limit, and reads answers of any size.
"""

from __future__ import annotations

import json
import os
import platform
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from http.client import HTTPException
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from dist_wandb.errors import ConfigurationError, DistWandbError
from dist_wandb.runs import current_server, requested, sweeps
from dist_wandb.runs.destination import is_loopback
from dist_wandb.settings.config_secrets import without_passwords, without_values
from dist_wandb.settings.options import rank_scope_or_default, run_mode_or_default
from dist_wandb.settings.plan import (
    RankScope,
    RunMode,
    RunPlan,
    beside_trial,
    check_rank_scope,
    check_run_mode,
    needs_layout,
    plan_run,
    too_large,
)
from dist_wandb.topology.launch import DetectedLauncher, Launch, detected_launchers, doubts_of, job_name
from dist_wandb.topology.model import Topology

PACKAGES = ("dist-wandb", "wandb", "torch", "torchmetrics", "lightning", "pytorch-lightning", "accelerate")
GENERATED = "ID"
"""Placeholder for the id that the ranks agree on when they open their runs."""

_REFUSED = (401, 403)
_NOT_ACCEPTED = "authentication failed: run `wandb login` or set WANDB_API_KEY"
_LONGEST_ANSWER = 1024 * 1024  # bytes


@dataclass(frozen=True)
class Diagnosis:
    """The expected result of calling `dist_wandb.init` in this process now."""

    topology: Topology | None  # `None` after an error
    launchers: tuple[DetectedLauncher, ...]
    plan: RunPlan | None  # `None` after an error, or if it depends on other ranks
    setup: current_server.Setup
    server: Server | None  # the answer of W&B's server; `None` if it was not asked
    versions: dict[str, str | None]  # of Python and of packages; `None` for those that are not installed
    errors: tuple[str, ...]  # errors that `init` would raise, and refused requests
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The diagnosis as JSON values, without the API key."""
        topology, setup, server = self.topology, self.setup, self.setup.server
        known = ("mode", "problem", "entity", "project", "key_from", "inherits_service")
        own = {
            "launchers": [asdict(launcher) for launcher in self.launchers],
            "plan": self.plan and asdict(self.plan),
            "setup": {
                **{name: getattr(setup, name) for name in known},
                "has_key": setup.key is not None,
                "base_url": server.shown if server is not None else "",
                "base_url_from": server.source if server is not None else "",
                "takes_key": server is not None and server.takes_key,
            },
            "server": self.server and asdict(self.server),
            "versions": self.versions,
            "errors": self.errors,
            "warnings": self.warnings,
        }
        if topology is None:
            return {"topology": None, **own}
        fields = asdict(topology)
        return {"sources": fields.pop("sources"), "topology": fields, **own}


def examine(
    run_mode: RunMode | None = None,
    rank_scope: RankScope | None = None,
    *,
    timeout: float | None = 5.0,
    trusted_server: str | None = None,
) -> Diagnosis:
    """Diagnose a call of `dist_wandb.init` here, without opening anything; without `timeout`, W&B is not asked."""
    errors: list[str] = []
    topology = plan = None
    try:
        Launch.detect()
        topology = Topology.detect()
    except DistWandbError as error:
        errors.append(str(error))
    found, setup = tuple(map(_masked, detected_launchers())), current_server.setup(trusted_server)
    setup = replace(setup, problem=without_values(setup.problem))
    try:
        mode = check_run_mode(run_mode_or_default(run_mode))
        scope = check_rank_scope(rank_scope_or_default(rank_scope))
        if topology is not None:
            plan = _plan(topology, mode, scope)
    except ConfigurationError as error:
        errors.append(str(error))
    if setup.problem:
        errors.append(setup.problem)
    server = None
    if setup.server is not None and timeout and setup.mode == "online":
        if setup.server.takes_key:
            server = ask(setup.server.shown, setup.key, timeout)
        else:
            errors.append(f"The server was not asked. {setup.server.refusal}")
    diagnosis = Diagnosis(topology, found, plan, setup, server, _versions(), tuple(map(without_values, errors)), ())
    warnings = [*_about_launchers(diagnosis), *_about_wandb(diagnosis)]
    if plan is not None and topology is not None:
        doubts = (too_large(topology, plan, topology.local_world_size), beside_trial(topology, plan))
        warnings += filter(None, doubts)
    return replace(diagnosis, warnings=tuple(map(without_passwords, warnings)))


def _masked(launcher: DetectedLauncher) -> DetectedLauncher:
    """A launcher without what may be a password: wrong values of variables, which may be meant for others."""
    values = {name: without_values(f"{name}={value}").partition("=")[2] for name, value in launcher.variables.items()}
    return replace(launcher, variables=values, reason=without_values(launcher.reason))


def _plan(topology: Topology, run_mode: RunMode, rank_scope: RankScope) -> RunPlan | None:
    if needs_layout(topology, run_mode, rank_scope) and not topology.knows_layout:
        return None  # the ranks exchange the layout when they open their runs
    base_id = requested.run_id({}) or (GENERATED if topology.world_size > 1 else None)
    group = requested.value({}, "group")
    return plan_run(topology, run_mode, rank_scope, base_id, group=group, in_sweep=sweeps.is_trial())


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        found[package] = None
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _about_launchers(found: Diagnosis) -> Iterator[str]:
    topology = found.topology
    if topology is not None:
        yield from doubts_of(found.launchers, topology)
    is_alone = topology is not None and topology.world_size == 1
    for launcher in found.launchers:
        variables = launcher.assignments
        if launcher.status == "unreadable" or (launcher.status == "contradicts" and not is_alone):
            yield f"{launcher.name} has left variables that are ignored: {launcher.reason}. Unset them: {variables}"
        elif launcher.status == "not this process" and is_alone:
            yield f"{launcher.name}'s variables are set ({variables}), but {launcher.reason}. It is a job of its own."
    used = next((launcher for launcher in found.launchers if launcher.status == "used"), None)
    if topology is not None and used is not None and topology.world_size > 1:
        yield from _about_meeting(found, topology, used)


def _about_meeting(found: Diagnosis, topology: Topology, used: DetectedLauncher) -> Iterator[str]:
    """Warn if ranks must exchange data, and whether they can."""
    # Of their process group, or of torchrun's agent.
    has_store = topology.origin("global_rank") == "torch.distributed" or Launch.detect().agent_store is not None
    if not topology.knows_layout:
        instead = "the ranks exchange it when the run is opened."
        if not has_store:
            instead = "open the run after init_process_group, so that the ranks exchange it; before, it is an error."
        yield (
            f"{used.name} does not provide the node rank of this process. In rank_scope='worker', and in "
            f"run_mode='shared', {instead}"
        )
    if not has_store:
        what, plan = "their numbers cannot be reduced", found.plan
        is_without_id = plan is not None and plan.base_id == GENERATED and job_name(topology) is None
        if is_without_id and plan.opens_run and (plan.run_mode, plan.rank_scope) != ("auto", "global"):
            what += ", and without id= or WANDB_RUN_ID they cannot agree on a run id, which is an error"
        yield f"{used.name} has no store for the ranks: before init_process_group, {what}."


def _about_wandb(found: Diagnosis) -> Iterator[str]:
    setup, server = found.setup, found.server
    address = setup.server.shown if setup.server is not None else ""
    if setup.mode == "online" and setup.key is None:
        yield f"There is no API key for {address}. Run `wandb login`, or set WANDB_MODE=offline."
    if server is not None and server.problem:
        what = "does not answer" if not server.answers else "reports a problem"
        yield f"The server {address} {what}: {server.problem}. Runs would be written to disk."
    if setup.inherits_service:
        yield (
            "WANDB_SERVICE is inherited, so W&B would use another process's wandb service. With run_mode='shared' it "
            "is ignored, because that service refuses two writers of one run."
        )
    directory = requested.wandb_directory({}).absolute()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        yield (
            f"The run directory {str(directory)!r} is not writable, so runs are written to a new temporary one. Set "
            "WANDB_DIR, or pass dir=."
        )


@dataclass(frozen=True)
class Server:
    """The answer of W&B's server."""

    answers: bool
    user: str | None = None  # owner of the API key; `None` if the server does not accept the key
    problem: str = ""


def ask(base_url: str, key: str | None, timeout: float) -> Server:
    """Ask W&B's server for the owner of the API key, by its GraphQL query `viewer`, within `timeout` seconds."""
    query = json.dumps({"query": "query Viewer { viewer { username entity } }", "variables": {}}).encode()
    request = Request(f"{base_url.rstrip('/')}/graphql", query, {"Content-Type": "application/json"})  # noqa: S310
    if key:  # not sent to the target of a redirect
        request.add_unredirected_header("Authorization", f"Basic {b64encode(f'api:{key}'.encode()).decode()}")
    # As wandb does: through the proxies of the environment, except for this host.
    opener = build_opener(ProxyHandler({})) if is_loopback(base_url) else build_opener()
    try:
        with opener.open(request, timeout=timeout) as answer:
            text = answer.read(_LONGEST_ANSWER)
    except HTTPError as error:
        refused = error.code in _REFUSED
        problem = _NOT_ACCEPTED if refused and key else f"it answers with {error.code} {error.reason}"
        return Server(answers=True, problem="" if refused and not key else problem)
    except URLError as error:
        return Server(answers=False, problem=str(error.reason))
    except OSError as error:
        return Server(answers=False, problem=str(error) or type(error).__name__)
    except (HTTPException, ValueError) as error:  # their texts may contain parts of a proxy's password
        problem = f"{type(error).__name__}. Are WANDB_BASE_URL, and HTTPS_PROXY where it is set, right?"
        return Server(answers=False, problem=problem)
    try:
        viewer = (json.loads(text).get("data") or {}).get("viewer") or {}
    except (ValueError, AttributeError):
        return Server(answers=True, problem="it does not answer like a W&B server. Is WANDB_BASE_URL right?")
    user = viewer.get("username") or viewer.get("entity")
    return Server(answers=True, user=user, problem="" if user or not key else _NOT_ACCEPTED)
