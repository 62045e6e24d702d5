"""``dist-wandb doctor``: print this process's rank, the run it would open, wandb's setup, and W&B's answer.

W&B's server is asked for the owner of the API key. `wandb.Api` is not used: it needs a key, uses proxies even for this
host, retries beyond any time limit, and reads answers of any size.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from http.client import HTTPException
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from rich.table import Table
from rich.text import Text

from dist_wandb.cli.command import add_command, add_trust_argument, console, print_json
from dist_wandb.errors import ConfigurationError, DistWandbError, visible
from dist_wandb.job.launch import DetectedLauncher, Launch, detected_launchers, doubts_of, job_name
from dist_wandb.job.topology import Topology
from dist_wandb.runs import client_settings, requested, sweeps
from dist_wandb.settings.config_values import without_passwords, without_values
from dist_wandb.settings.options import Options
from dist_wandb.settings.plan import (
    RANK_SCOPES,
    RUN_MODES,
    RankScope,
    RunMode,
    RunPlan,
    needs_layout,
    plan_run,
    runs_outside_sweep,
    too_large,
)

PACKAGES = ("dist-wandb", "wandb", "torch", "torchmetrics", "lightning", "pytorch-lightning", "accelerate")
GENERATED = "ID"  # placeholder for the id that the ranks agree on when they open their runs
_REFUSED = (401, 403)
_NOT_ACCEPTED = "authentication failed: run `wandb login` or set WANDB_API_KEY"
_LONGEST_ANSWER = 1024 * 1024  # bytes


@dataclass(frozen=True)
class Diagnosis:
    """The expected result of calling `dist_wandb.init` in this process now."""

    topology: Topology | None  # `None` after an error
    launchers: tuple[DetectedLauncher, ...]
    plan: RunPlan | None  # `None` after an error, or if it depends on other ranks
    setup: dict[str, Any]  # how wandb is set up here: the mode, which is `None` if `init` would raise, and so on
    server: Server | None  # the answer of W&B's server; `None` if it was not asked
    versions: dict[str, str | None]  # of Python and of packages; `None` for those that are not installed
    errors: tuple[str, ...]  # errors that `init` would raise, and refused requests
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        return {"sources": found["topology"].pop("sources"), **found} if self.topology else found


def examine(
    run_mode: RunMode | None = None,
    rank_scope: RankScope | None = None,
    *,
    timeout: float = 5.0,
    trusted_server: str | None = None,
) -> Diagnosis:
    """Diagnose a call of `dist_wandb.init` here, without opening anything; with a `timeout` of 0, W&B is not asked."""
    errors: list[str] = []
    topology = plan = None
    try:
        Launch.detect()
        topology = Topology.detect()
    except DistWandbError as error:
        errors.append(str(error))
    found = tuple(map(_masked_launcher, detected_launchers()))
    try:
        options = Options.among({"run_mode": run_mode, "rank_scope": rank_scope})
        mode, scope = options.run_mode, options.rank_scope
        if topology is not None:
            plan = _plan(topology, mode, scope)
    except ConfigurationError as error:
        errors.append(str(error))
    server = to = None
    setup: dict[str, Any] = dict.fromkeys(("mode", "problem", "entity", "project", "key_from"))
    try:
        setup["mode"], settings = requested.mode({}), client_settings.client_settings()
        to = client_settings.destination(trusted_server)
        setup |= {"problem": "", "entity": settings.entity, "project": settings.project, "key_from": to.key_from}
    except ConfigurationError as error:
        setup |= {"mode": None, "problem": without_values(str(error))}
        errors.append(setup["problem"])
    setup |= {"inherits_service": client_settings.inherits_service(), "has_key": bool(to and to.key is not None)}
    setup |= {"base_url": to.shown if to else "", "base_url_from": to.source if to else ""}
    setup["takes_key"] = to is not None and not to.refusal
    if to is not None and timeout and setup["mode"] == "online":
        if not to.refusal:
            server = ask(to.shown, to.key, timeout)
        else:
            errors.append(f"The server was not asked. {to.refusal}")
    versions: dict[str, str | None] = {"python": platform.python_version(), **dict.fromkeys(PACKAGES)}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    diagnosis = Diagnosis(topology, found, plan, setup, server, versions, tuple(map(without_values, errors)), ())
    warnings = [*_about_launchers(diagnosis), *_about_wandb(diagnosis)]
    if plan is not None and topology is not None:
        doubts = (too_large(topology, plan, topology.local_world_size), runs_outside_sweep(topology, plan))
        warnings += filter(None, doubts)
    return replace(diagnosis, warnings=tuple(map(without_passwords, warnings)))


def _masked_launcher(launcher: DetectedLauncher) -> DetectedLauncher:
    """A launcher without what may be a password: wrong values of variables, which may be meant for others."""
    values = {name: without_values(f"{name}={value}").partition("=")[2] for name, value in launcher.variables.items()}
    return replace(launcher, variables=values, reason=without_values(launcher.reason))


def _plan(topology: Topology, run_mode: RunMode, rank_scope: RankScope) -> RunPlan | None:
    if needs_layout(topology, run_mode, rank_scope) and not topology.knows_layout:
        return None  # the ranks exchange the layout when they open their runs
    base_id = requested.run_id({}) or (GENERATED if topology.world_size > 1 else None)
    group = requested.text({}, "group")
    return plan_run(topology, run_mode, rank_scope, base_id, group=group, in_sweep=sweeps.is_trial())


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
        is_in_plan = plan is not None and plan.opens_run and (plan.run_mode, plan.rank_scope) != ("auto", "global")
        if plan is not None and is_in_plan and plan.base_id == GENERATED and job_name(topology) is None:
            what += ", and without id= or WANDB_RUN_ID they cannot agree on a run id, which is an error"
        yield f"{used.name} has no store for the ranks: before init_process_group, {what}."


def _about_wandb(found: Diagnosis) -> Iterator[str]:
    setup, server, address = found.setup, found.server, found.setup["base_url"]
    if setup["mode"] == "online" and not setup["has_key"]:
        yield f"There is no API key for {address}. Run `wandb login`, or set WANDB_MODE=offline."
    if server is not None and server.problem:
        what = "does not answer" if not server.answers else "reports a problem"
        yield f"The server {address} {what}: {server.problem}. Runs would be written to disk."
    if setup["inherits_service"]:
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
    query = json.dumps({"query": "query Viewer { viewer { username entity } }", "variables": {}}).encode()
    request = Request(f"{base_url.rstrip('/')}/graphql", query, {"Content-Type": "application/json"})  # noqa: S310
    if key:  # not sent to the target of a redirect
        request.add_unredirected_header("Authorization", f"Basic {b64encode(f'api:{key}'.encode()).decode()}")
    # As wandb does: through the proxies of the environment, except for this host.
    opener = build_opener(ProxyHandler({})) if client_settings.is_loopback(base_url) else build_opener()
    try:
        with opener.open(request, timeout=timeout) as answer:
            text = answer.read(_LONGEST_ANSWER)
    except HTTPError as error:
        refused = error.code in _REFUSED
        problem = _NOT_ACCEPTED if refused and key else f"it answers with {error.code} {error.reason}"
        return Server(answers=True, problem="" if refused and not key else problem)
    except OSError as error:
        return Server(answers=False, problem=str(getattr(error, "reason", error)) or type(error).__name__)
    except (HTTPException, ValueError) as error:  # their texts may contain parts of a proxy's password
        problem = f"{type(error).__name__}. Are WANDB_BASE_URL, and HTTPS_PROXY where it is set, right?"
        return Server(answers=False, problem=problem)
    try:
        viewer = (json.loads(text).get("data") or {}).get("viewer") or {}
    except (ValueError, AttributeError):
        return Server(answers=True, problem="it does not answer like a W&B server. Is WANDB_BASE_URL right?")
    user = viewer.get("username") or viewer.get("entity")
    return Server(answers=True, user=user, problem="" if user or not key else _NOT_ACCEPTED)


def add_to(commands: Any) -> None:
    parser = add_command(
        commands,
        "doctor",
        _run,
        summary="print this process's rank and the run it would open, and check wandb's setup",
        about="Print which rank this process would be if it called dist_wandb.init now, and from which source, "
        "which run it would open, whether wandb is configured and its server answers, and warnings. Start it as you "
        "start your script. Nothing is opened or written. Exit code 1 if init would raise an error, or if the server "
        "was not asked because it may not get the API key.",
        example="--run-mode shared",
    )
    parser.add_argument("--run-mode", metavar="MODE", help=f"{', '.join(RUN_MODES)} (default: as dist_wandb.init)")
    parser.add_argument("--rank-scope", metavar="SCOPE", help=f"{', '.join(RANK_SCOPES)} (default: as dist_wandb.init)")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=5.0,
        metavar="S",
        help="time limit for W&B's server in seconds; 0 not to ask it (default: 5)",
    )
    add_trust_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(arguments: argparse.Namespace) -> int:
    found = examine(
        arguments.run_mode,
        arguments.rank_scope,
        timeout=arguments.timeout,
        trusted_server=arguments.trust_server,
    )
    if arguments.json:
        print_json(found.as_json(), without_passwords)
    else:
        out = console()
        out.print(_findings(found), soft_wrap=True)
        for style, mark, sentences in (("red", "✗", found.errors), ("yellow", "!", found.warnings)):
            for sentence in sentences:
                out.print(Text.assemble((f"{mark} ", style), visible(sentence)), soft_wrap=True)
    return 1 if found.errors else 0


def _findings(found: Diagnosis) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    launchers = [
        f"{one.name}: {one.status}{f', because {one.reason}' if one.reason else ''} ({one.assignments})"
        for one in found.launchers
    ]
    for name, lines in (
        ("this process", _who(found)),
        ("would open", [_what_it_opens(found)]),
        ("launchers", launchers or ["none"]),
        ("wandb", _wandb_in_words(found)),
        ("versions", [", ".join(f"{name} {known}" for name, known in found.versions.items() if known)]),
    ):
        table.add_row(name, Text(visible(without_passwords(lines[0]))))
        for line in lines[1:]:
            table.add_row("", Text(visible(without_passwords(line)), style="dim"))
    table.add_row()
    return table


def _who(found: Diagnosis) -> list[str]:
    topology = found.topology
    if topology is None:
        return ["unknown: see below"]
    if topology.world_size == 1:
        return ["the only process of its job"]
    known = {"local rank": topology.local_rank, "node": topology.node_rank}
    places = [f"{name} {value}" for name, value in known.items() if value is not None]
    of_nodes = f" of {topology.num_nodes}" if topology.node_rank is not None and topology.num_nodes else ""
    who = f"rank {topology.global_rank} of {topology.world_size}"
    sources = (f"{name}={getattr(topology, name)} from {source}" for name, source in topology.sources.items())
    return [", ".join([who, *places]) + of_nodes, *sources]


def _what_it_opens(found: Diagnosis) -> str:
    plan = found.plan
    if plan is None:
        return "unknown" if found.errors else "decided when the ranks exchange their layout over nodes"
    how = f"run_mode={plan.run_mode}, rank_scope={plan.rank_scope}"
    if not plan.opens_run:
        return f"nothing: its numbers go to another rank's run ({how})"
    which = f"the run {plan.run_id}" if plan.run_id else "a run with an id made by W&B"
    if plan.base_id == GENERATED:
        how += f"; {GENERATED} is made when runs are opened"
    role = (f", as {plan.label}" + (", the primary" if plan.primary else "")) if plan.shared else ""
    return f"{which}{role}{f', in the group {plan.group}' if plan.group else ''} ({how})"


def _wandb_in_words(found: Diagnosis) -> list[str]:
    setup, server = found.setup, found.server
    if not setup["base_url"]:
        return ["would raise: see below"]
    key = f"API key from {setup['key_from']}" if setup["key_from"] else "no API key"
    facts = [setup["mode"], f"{setup['base_url']} (from {setup['base_url_from']})", key]
    if server is not None:
        facts.append(
            (f"logged in as {server.user}" if server.user else "it answers") if server.answers else "no answer"
        )
    of_runs = (f"{name} {setup[name]}" for name in ("entity", "project") if setup[name])
    return [", ".join(filter(None, facts)), *of_runs]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds of at least 0")
    return seconds
