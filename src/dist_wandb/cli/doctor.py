"""``dist-wandb doctor``: print this process's rank, the run it would open, and wandb's setup."""

from __future__ import annotations

import argparse
import math
from typing import Any

from rich.table import Table
from rich.text import Text

from dist_wandb.cli.command import Command, add_json_argument, add_trust_argument, console, print_json
from dist_wandb.cli.diagnosis import GENERATED, Diagnosis, examine
from dist_wandb.errors import visible
from dist_wandb.settings.config_secrets import without_passwords
from dist_wandb.settings.plan import RANK_SCOPES, RUN_MODES

_COLUMN_GAP = 2


def _add_arguments(parser: argparse.ArgumentParser) -> None:
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
    add_json_argument(parser)


def _run(arguments: argparse.Namespace) -> int:
    found = examine(
        arguments.run_mode,
        arguments.rank_scope,
        timeout=arguments.timeout or None,
        trusted_server=arguments.trust_server,
    )
    if arguments.json:
        print_json(_masked(found.as_json()))
    else:
        out = console()
        out.print(_findings(found), soft_wrap=True)
        for style, mark, sentences in (("red", "✗", found.errors), ("yellow", "!", found.warnings)):
            for sentence in sentences:
                out.print(Text.assemble((f"{mark} ", style), visible(sentence)), soft_wrap=True)
    return 1 if found.errors else 0


def _findings(found: Diagnosis) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, _COLUMN_GAP, 0, 0))
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


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _masked(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked(item) for item in value]
    return without_passwords(value) if isinstance(value, str) else value


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
    if setup.server is None:
        return ["would raise: see below"]
    key = f"API key from {setup.key_from}" if setup.key_from else "no API key"
    facts = [setup.mode, f"{setup.server.shown} (from {setup.server.source})", key]
    if server is not None:
        facts.append(
            (f"logged in as {server.user}" if server.user else "it answers") if server.answers else "no answer"
        )
    of_runs = {"entity": setup.entity, "project": setup.project}
    return [", ".join(filter(None, facts)), *(f"{name} {value}" for name, value in of_runs.items() if value)]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds of at least 0")
    return seconds


COMMAND = Command(
    name="doctor",
    summary="print this process's rank and the run it would open, and check wandb's setup",
    description="Print which rank this process would be if it called dist_wandb.init now, and from which source, "
    "which run it would open, whether wandb is configured and its server answers, and warnings. Start it as you "
    "start your script. Nothing is opened or written. Exit code 1 if init would raise an error, or if the server was "
    "not asked because it may not get the API key.",
    example="--run-mode shared",
    add_arguments=_add_arguments,
    run=_run,
)
