"""``dist-wandb plan``: print which W&B run every rank would open."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from dist_wandb.cli.command import add_command, console, number_of, print_json, table
from dist_wandb.errors import ConfigurationError, visible
from dist_wandb.job.ranges import ranges_of
from dist_wandb.job.topology import Topology
from dist_wandb.job.units import ranks_along
from dist_wandb.runs import sweeps
from dist_wandb.runs.requested import check_id
from dist_wandb.settings.options import Options
from dist_wandb.settings.plan import RANK_SCOPES, RUN_MODES, RunPlan, plan_run, runs_outside_sweep, too_large, unit_of

_MOST_SHOWN = 64  # ranks with a line each; in larger jobs, ranks that do the same share a line


def add_to(commands: Any) -> None:
    parser = add_command(
        commands,
        "plan",
        _run,
        summary="print which W&B run every rank would open",
        about="Print, for every rank of a job, which W&B run it would open. Nothing is started or written.",
        example="--nodes 2 --procs-per-node 4 --run-mode shared --rank-scope worker",
    )
    parser.add_argument("--nodes", type=_positive, metavar="N", help="number of nodes (default: 1)")
    parser.add_argument("--procs-per-node", type=_positive, metavar="M", help="processes on every node (default: 1)")
    parser.add_argument(
        "--layout",
        type=_layout,
        metavar="M0,M1,...",
        help="processes on each node, for unequal nodes; instead of --nodes and --procs-per-node",
    )
    parser.add_argument(
        "--run-mode", default="auto", metavar="MODE", help=f"{', '.join(RUN_MODES)} (default: %(default)s)"
    )
    parser.add_argument(
        "--rank-scope", default="global", metavar="SCOPE", help=f"{', '.join(RANK_SCOPES)} (default: %(default)s)"
    )
    parser.add_argument(
        "--mesh",
        type=_mesh,
        metavar="DIM=SIZE,...",
        help="dimensions of the DeviceMesh, such as dp=4,tp=2; the last one varies fastest",
    )
    parser.add_argument(
        "--unit",
        metavar="DIM,...",
        help="dimensions of the mesh along which numbers are reduced (default: those with dp in their name)",
    )
    parser.add_argument("--primary-rank", type=int, metavar="R", help="global rank of the primary; -1 for the last one")
    parser.add_argument(
        "--id", help="base id that run ids are made from (default: exp; in a sweep the id of the trial, WANDB_RUN_ID)"
    )
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="plan a trial of a W&B sweep, whose agent provides the id (default if WANDB_SWEEP_ID is set)",
    )
    parser.add_argument("--group", help="group of the runs, as given to wandb.init")
    parser.add_argument("--name", help="display name of the run, as given to wandb.init")
    parser.add_argument("--all", action="store_true", help=f"print a line per rank even for more than {_MOST_SHOWN}")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(arguments: argparse.Namespace) -> int:
    layout = _layout_of(arguments)
    in_sweep = arguments.sweep or sweeps.is_trial()
    base_id = arguments.id if arguments.id is not None else sweeps.trial_id() or "exp"
    check_id(base_id, f"--id {base_id!r}")
    options = Options(arguments.run_mode, arguments.rank_scope, primary_rank=arguments.primary_rank)
    mode, scope = options.run_mode, options.rank_scope
    # Numbered node by node, as by torchrun.
    positions = [(node, local_rank) for node, processes in enumerate(layout) for local_rank in range(processes)]
    topologies = [
        Topology(rank, local_rank, node, len(positions), layout[node], len(layout)).led_by(options.primary_rank)
        for rank, (node, local_rank) in enumerate(positions)
    ]
    units = _units(arguments, len(topologies))
    plans = [
        plan_run(topology, mode, scope, base_id, group=arguments.group, unit=unit, in_sweep=in_sweep)
        for topology, unit in zip(topologies, units, strict=True)
    ]
    ranks = [
        _rank(topology, plan, arguments.name, is_counted=unit_of(topology, scope, unit).is_member)
        for topology, plan, unit in zip(topologies, plans, units, strict=True)
    ]
    writers = [plan for plan in plans if plan.opens_run]
    counts = {
        "runs": len({plan.run_id for plan in writers}),
        "groups": len({plan.group for plan in writers} - {None}),
        "writers": len(writers),
    }
    primary = topologies[0].coordinator
    doubts = (
        too_large(topologies[primary], plans[primary], max(layout), units[primary]),
        runs_outside_sweep(topologies[primary], plans[primary]),
    )
    warnings = [doubt for doubt in doubts if doubt]
    if arguments.json:
        about = {"run_mode": mode, "rank_scope": scope, "layout": layout, **counts, "warnings": warnings}
        print_json({**about, "ranks": ranks})
        return 0
    out = console()
    out.print(_table(ranks, layout, each=arguments.all or len(ranks) <= _MOST_SHOWN))
    ends = ", ".join(number_of(count, what.removesuffix("s")) for what, count in counts.items())
    where = f"{number_of(len(ranks), 'rank')} on {number_of(len(layout), 'node')}"
    out.print(Text(f"\n{where}: {ends}"), soft_wrap=True)
    for warning in warnings:
        out.print(Text(f"! {warning}"), soft_wrap=True)
    return 0


def _layout_of(arguments: argparse.Namespace) -> list[int]:  # processes on each node
    if arguments.layout is not None:
        if arguments.nodes is not None or arguments.procs_per_node is not None:
            raise ConfigurationError(
                "--layout cannot be combined with --nodes and --procs-per-node. Give either --layout or those two."
            )
        layout: list[int] = arguments.layout
        return layout
    nodes = arguments.nodes or 1
    if not arguments.mesh or arguments.procs_per_node is not None:
        return [arguments.procs_per_node or 1] * nodes
    ranks = math.prod(arguments.mesh.values())
    if ranks % nodes:
        raise ConfigurationError(
            f"--mesh has {ranks} ranks, which cannot be divided equally among --nodes {nodes}. Give --layout instead."
        )
    return [ranks // nodes] * nodes


def _units(arguments: argparse.Namespace, world_size: int) -> list[tuple[int, ...] | None]:
    """For each rank, the ranks of its unit; `None` for all ranks, or for those of its node."""
    mesh: dict[str, int] | None = arguments.mesh
    if mesh is None:
        if arguments.unit is not None:
            raise ConfigurationError(
                f"--unit {arguments.unit} names dimensions of a mesh. Give --mesh, such as dp=4,tp=2."
            )
        return [None] * world_size
    if math.prod(mesh.values()) != world_size:
        raise ConfigurationError(
            f"--mesh has {math.prod(mesh.values())} ranks, but the job has {world_size}. Give both the same number."
        )
    names = arguments.unit.split(",") if arguments.unit is not None else [name for name in mesh if "dp" in name]
    return [ranks_along(mesh, names, rank) for rank in range(world_size)]


def _rank(topology: Topology, plan: RunPlan, name: str | None, *, is_counted: bool) -> dict[str, Any]:
    suffix = f"-{plan.name_suffix}" if plan.name_suffix else ""
    return {
        "global_rank": topology.global_rank,
        "local_rank": topology.local_rank,
        "node_rank": topology.node_rank,
        "opens_run": plan.opens_run,
        "run_id": plan.run_id,
        "name": f"{name}{suffix}" if name and plan.opens_run else None,
        "group": plan.group,
        "shared": plan.shared,
        "label": plan.label,
        "primary": plan.primary,
        "numbers": "counted" if is_counted else "left out",
    }


def _table(ranks: Sequence[Mapping[str, Any]], layout: Sequence[int], *, each: bool) -> Table:
    # One line per rank; else one for all ranks that do the same, with the first and the last value of each column.
    # Optional columns appear only if a rank has a value, and "numbers" if those of some ranks do not count.
    columns = [name for name in ("run_id", "name", "group", "label") if any(rank[name] for rank in ranks)]
    columns += ["numbers"] * any(rank["numbers"] == "left out" for rank in ranks)
    shown = table()
    for heading in ("rank", "node", "local rank") if each else ("ranks", "of them"):
        shown.add_column(
            heading, justify="left" if heading == "ranks" else "right", overflow="ellipsis" if each else "fold"
        )
    for heading in (*columns, "writes"):
        shown.add_column(heading.replace("_", " "), overflow="fold")
    alike: dict[object, list[Mapping[str, Any]]] = {}
    for rank in ranks:
        alike.setdefault(rank["global_rank"] if each else (_what_it_writes(rank), rank["numbers"]), []).append(rank)
    for members in alike.values():
        first, last = members[0], members[-1]
        which = [ranges_of([rank["global_rank"] for rank in members]), f"{len(members):,}"]
        if each:
            which = [str(first[name]) for name in ("global_rank", "node_rank", "local_rank")]
        ends = [dict.fromkeys((first[name] or "-", last[name] or "-")) for name in columns]
        shown.add_row(
            *map(Text, which),
            *(Text(visible(" … ".join(values))) for values in ends),
            Text(_what_it_writes(first)),
            style="" if first["opens_run"] else "dim",
            end_section=each and first["local_rank"] == layout[first["node_rank"]] - 1,
        )
    return shown


def _what_it_writes(rank: Mapping[str, Any]) -> str:
    if not rank["opens_run"]:
        return "nothing"
    if not rank["shared"]:
        return "own run"
    return "shared run, primary" if rank["primary"] else "shared run"


def _positive(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _mesh(text: str) -> dict[str, int]:
    pairs = [part.partition("=") for part in text.split(",")]
    sizes = {name.strip(): _positive(size) for name, _, size in pairs if name.strip()}
    if len(sizes) != len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} does not name each dimension once. Give, for example, dp=4,tp=2")
    return sizes


def _layout(text: str) -> list[int]:
    try:
        return [_positive(part) for part in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(
            f"{error}, in {text!r}. Give the processes of each node, separated by commas: 3,5"
        ) from None
