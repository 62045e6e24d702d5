"""Which ranks open which W&B runs. Pure: the only module that makes decisions by rank and run mode.

Also tells of jobs that a run mode does not suit. Sources: W&B's documentation states that 300 concurrent client
connections were tested as a hard limit ("Log distributed training experiments"), and recommends at most about 10,000
runs in a project ("How many runs can I create per project?").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from dist_wandb.errors import ConfigurationError, TopologyError, suggest
from dist_wandb.job.topology import Topology

RunMode = Literal["auto", "shared", "new"]
RankScope = Literal["global", "worker"]

RUN_MODES: tuple[RunMode, ...] = ("auto", "shared", "new")
RANK_SCOPES: tuple[RankScope, ...] = ("global", "worker")
_T = TypeVar("_T")
MOST_WRITERS = 300
MOST_RUNS = 10_000
MANY_RUNS = 1_000  # ten starts of the job reach MOST_RUNS


@dataclass(frozen=True)
class RunPlan:
    """What one rank does with W&B.

    Args:
        run_mode: The run mode behind this plan.
        rank_scope: The rank scope behind this plan.
        base_id: The base id of the job; `None` if this rank does not know it.
        run_id: Id of the run that this rank opens; `None` if it opens no run, or if W&B generates the id (a world of
            one).
        group: Group of the run.
        announces: Whether this rank prints the start line of its unit.
        opens_run: Whether this rank opens a W&B run.
        shared: Whether several ranks write into this run (W&B's shared mode).
        label: This rank's name within a shared run.
        primary: Whether this rank writes the plain names of its run, and completes it.
        name_suffix: Suffix of the display name, to distinguish sibling runs.
        hardware: Label under which this rank records the hardware of its node in the unit's run; `None` for W&B's
            default: the process that opens a run records the hardware of its own node.
        is_trial: Whether the unit's run, or in `new` this rank's, is the trial of a sweep: its id is the base id.
        unit_name: Name of the unit; empty if the job has only one.
    """

    run_mode: RunMode
    rank_scope: RankScope
    base_id: str | None
    run_id: str | None
    group: str | None
    announces: bool
    opens_run: bool = True
    shared: bool = False
    label: str | None = None
    primary: bool = True
    name_suffix: str = ""
    hardware: str | None = None
    is_trial: bool = False
    unit_name: str = ""

    @property
    def needs_base_id(self) -> bool:
        """Whether the plan of this rank, one of several, uses the base id, so that all ranks must agree on it first."""
        return self.opens_run or self.hardware is not None

    @property
    def has_writers(self) -> bool:
        """Whether several processes write into the unit's run, which requires W&B's shared mode."""
        return self.shared or self.hardware is not None

    @property
    def is_one_of_several(self) -> bool:
        """Whether other ranks of the unit have a W&B client as well, of which only the first one prints everything."""
        return self.own_directory or self.hardware is not None

    @property
    def own_directory(self) -> bool:
        """Whether this rank needs a separate directory below the W&B directory."""
        return self.shared or (self.run_mode == "new" and bool(self.name_suffix))

    @property
    def attaches(self) -> bool:
        """Whether this rank opens no run, but attaches to the unit's run to record the hardware of its node."""
        return self.hardware is not None and not self.opens_run


def check_choice(name: str, value: object, known: Sequence[_T]) -> _T:
    """Return the value of an argument if it is a known one; raise a `ConfigurationError` that lists them otherwise."""
    for choice in known:
        if value == choice:
            return choice
    raise ConfigurationError(f"{name}={value!r} is unknown. {suggest(value, map(str, known))}")


def needs_layout(topology: Topology, run_mode: RunMode, rank_scope: RankScope, *, all_nodes: bool = False) -> bool:
    """Return whether the plan depends on the layout of ranks over nodes, rather than on the global rank alone."""
    return topology.world_size > 1 and (rank_scope == "worker" or run_mode == "shared" or all_nodes)


def plan_run(
    topology: Topology,
    run_mode: str,
    rank_scope: str,
    base_id: str | None,
    *,
    group: str | None = None,
    all_nodes: bool = False,
    unit: Sequence[int] | None = None,
    in_sweep: bool = False,
) -> RunPlan:
    """Decide which run, if any, a rank opens.

    Args:
        topology: The rank, and the layout of all ranks over nodes.
        run_mode: `"auto"`: one run per unit; `"shared"`: one run per unit, written by all its ranks; `"new"`: one run
            per rank.
        rank_scope: `"global"`: the whole job is one unit; `"worker"`: each node is a unit.
        base_id: The base id of the job. It may be `None` only if the plan does not need it: in a world of one, and on
            ranks that open no run.
        group: The user's own group. In `"new"` it replaces the base id in the groups; the other modes use it unchanged.
        all_nodes: Whether the run of `"auto"` also has the hardware metrics of nodes other than the primary's.
        unit: Global ranks of the unit that this rank was given, such as its data-parallel group; `None` for all ranks,
            or all ranks of its node. Only the unit with the job's primary (`Topology.coordinator`) is logged: ranks of
            other units hold copies of the model's parts, and do not contribute to its runs.
        in_sweep: Whether an agent of a sweep has started the job, and given the base id to its trial: the run of the
            job's primary.

    Returns:
        The plan. A world of one process always has one ordinary run; on one node both scopes are the same.

    Raises:
        ConfigurationError: Unknown mode or scope, or a primary that is not in its unit.
        TopologyError: The plan depends on an unknown node rank or local rank.

    Example:
        Rank 5 of two nodes with four processes each (node 1, local rank 1), base id ``exp``::

            mode    global                              worker
            auto    no run                              no run
            shared  run exp, label worker-1-rank-1      run exp-worker-1, label worker-1-rank-1
            new     run exp-rank-5 in the group exp     run exp-worker-1-rank-1 in the group exp-worker-1
    """
    mode = check_choice("run_mode", run_mode, RUN_MODES)
    scope = check_choice("rank_scope", rank_scope, RANK_SCOPES)
    if needs_layout(topology, mode, scope, all_nodes=all_nodes):
        needs_size = scope == "worker" or topology.leader == "last"
        needed = ("num_nodes", "node_rank", "local_rank", *(["local_world_size"] * needs_size))
        for name in needed if topology.num_nodes != 1 else ():
            if getattr(topology, name) is None:  # a node rank assumed to be 0 would write into another node's run
                raise TopologyError(
                    f"run_mode={mode!r} with rank_scope={scope!r} needs the {name} of rank {topology.global_rank} of "
                    f"{topology.world_size} ({topology.origin('global_rank')}), but it is not known. Initialise "
                    "torch.distributed before the run is opened, so that the ranks can exchange their layout, or start "
                    "the job with torchrun."
                )
    check_unit(topology, scope, unit)
    own = unit_of(topology, scope, unit)
    name, leads = own.name, own.index == 0
    leader = 0 if topology.leader == "first" else (topology.local_world_size or 0) - 1
    records = all_nodes and mode == "auto" and scope == "global" and topology.num_nodes != 1
    hardware = f"worker-{topology.node_rank}" if records and topology.local_rank == leader else None
    has_coordinator = not name or topology.coordinator in own.ranks
    is_trial = in_sweep and (topology.is_coordinator if mode == "new" else has_coordinator)
    plan = RunPlan(mode, scope, base_id, base_id, group, leads, hardware=hardware, is_trial=is_trial, unit_name=name)
    if topology.world_size == 1:
        return plan
    if base_id is None and (hardware is not None or (own.is_member and (leads or mode != "auto"))):
        raise ConfigurationError(
            f"run_mode={mode!r} makes the run id of rank {topology.global_rank} from a base id, but none was given."
        )
    if not own.is_member:
        return replace(plan, opens_run=False, run_id=None, group=None, primary=False)
    if mode == "new":
        suffix = _join(name, f"rank-{topology.local_rank if name else topology.global_rank}")
        run_id = base_id if is_trial else _join(base_id, suffix)
        group = _join(group or base_id, name)
        return replace(plan, run_id=run_id, group=group, name_suffix=suffix)
    plan = replace(plan, run_id=base_id if is_trial else _join(base_id, name), name_suffix=name, primary=leads)
    if mode == "shared":
        node = "" if topology.num_nodes == 1 else f"worker-{topology.node_rank}-"
        label = f"{node}rank-{topology.local_rank if node else topology.global_rank}"
        return replace(plan, shared=True, label=label)
    return plan if leads else replace(plan, opens_run=False, run_id=None, group=None)


def check_unit(topology: Topology, scope: RankScope, unit: Sequence[int] | None) -> None:
    """Refuse a unit together with the scope `"worker"`, and a unit without the job's primary on that primary."""
    if unit is None:
        return
    if scope == "worker":
        raise ConfigurationError(
            'unit= and rank_scope="worker" both decide which ranks belong together. Give only one of them.'
        )
    if topology.is_coordinator and topology.global_rank not in unit:
        raise ConfigurationError(
            f"Rank {topology.global_rank} is the primary of the job, but it is not in unit={list(unit)[:20]}. Name one "
            "of these as the primary: primary_rank=..."
        )


def unit_run_id(plan: RunPlan) -> str | None:
    """Return the id of the run that receives the unit's numbers, even on a rank without a run; `None` if unknown."""
    if plan.opens_run or plan.base_id is None:
        return plan.run_id
    return plan.base_id if plan.is_trial else _join(plan.base_id, plan.name_suffix)


@dataclass(frozen=True)
class Unit:
    """The ranks whose numbers belong together, from the point of view of one rank inside or outside of the unit."""

    name: str  # equal on all ranks of the unit; empty if the job has only one unit
    index: int  # of this rank in the unit: 0 for the primary, -1 for a rank outside of the unit
    size: int
    global_rank: int  # of this rank
    ranks: Sequence[int]  # global ranks by index: in the order of the job, except that the primary comes first
    ranks_per_node: int | None = None  # number of consecutive ranks on each node, for messages; `None` if unknown

    @property
    def is_member(self) -> bool:
        return self.index >= 0

    def global_rank_of(self, index: int) -> int:
        """Return the global rank of an index in the unit, assuming that ranks of a node are consecutive."""
        return self.ranks[index]


def unit_of(topology: Topology, rank_scope: RankScope, unit: Sequence[int] | None = None) -> Unit:
    """Return the unit that a rank belongs to. For the scope `"worker"` the layout over nodes must be known."""
    name = ""
    if rank_scope == "worker" and topology.num_nodes != 1:
        name, size = f"worker-{topology.node_rank}", _known(topology.local_world_size)
        first = topology.global_rank - _known(topology.local_rank)
        ranks: Sequence[int] = range(first, first + size)
        primary = ranks[0] if topology.leader == "first" else ranks[-1]
    else:
        ranks, primary = range(topology.world_size) if unit is None else sorted(set(unit)), topology.coordinator
    is_outside = unit is not None and not {topology.global_rank, topology.coordinator} <= set(unit)
    if not is_outside and primary != ranks[0]:
        at = ranks.index(primary)
        ranks = (*ranks[at:], *ranks[:at])
    index = -1 if is_outside else ranks.index(topology.global_rank)
    per_node = None
    if topology.knows_layout and topology.num_nodes != 1:  # as far as this rank's own layout shows it
        sizes = (topology.local_world_size, topology.num_nodes, topology.node_rank, topology.local_rank)
        size, nodes, node, local = map(_known, sizes)
        is_even = size * nodes == topology.world_size and node * size + local == topology.global_rank
        per_node = size if is_even else None
    return Unit(name, index, len(ranks), topology.global_rank, ranks, per_node)


def _join(*parts: str | None) -> str:
    return "-".join(part for part in parts if part)


def _known(value: int | None) -> int:
    assert value is not None, "the layout is checked before a unit is made"  # noqa: S101  # an invariant, not input
    return value


def too_large(
    topology: Topology, plan: RunPlan, largest_node: int | None, unit: Sequence[int] | None = None
) -> str | None:
    """Return why a job is too large for its run mode (`plan`: any rank's with a run), and what to use instead."""
    by_node = plan.rank_scope == "worker" and topology.num_nodes is not None
    members = topology.world_size if unit is None else len(unit)
    runs = members if plan.run_mode == "new" else topology.num_nodes if by_node else 1
    if runs is not None and runs > MANY_RUNS:
        return (
            f'run_mode="{plan.run_mode}" with rank_scope="{plan.rank_scope}" opens {runs:,} runs at each start of this '
            f'job, but W&B recommends at most about {MOST_RUNS:,} runs in a project. Use run_mode="auto" with '
            'rank_scope="global": one run, with the metrics of all ranks.'
        )
    writers = largest_node if by_node else members
    if not plan.shared or writers is None or writers <= MOST_WRITERS:
        return None
    worker = f'rank_scope="worker", for a run of each node with {largest_node} writers, or '
    fits = not by_node and largest_node is not None and largest_node <= MOST_WRITERS
    return (
        f'run_mode="shared" opens a run with {writers:,} writers, but W&B has tested at most {MOST_WRITERS} '
        f'connections to one. Use {worker if fits else ""}run_mode="auto": one writer, with the metrics of all ranks.'
    )


def runs_outside_sweep(topology: Topology, plan: RunPlan) -> str | None:
    """Return which runs of a job, started by a sweep's agent, do not belong to the sweep; `None` if all do.

    Topology and plan are those of the job's primary.
    """
    by_node = plan.rank_scope == "worker" and (topology.num_nodes or 1) > 1
    if not plan.is_trial or topology.world_size == 1 or not (plan.run_mode == "new" or by_node):
        return None
    whose = f"rank {topology.global_rank}" if plan.run_mode == "new" else f"node {topology.node_rank}"
    others = "ranks" if plan.run_mode == "new" else "nodes"
    where = f", and are in its group {plan.group!r}" if plan.run_mode == "new" and not by_node else ""
    return (
        f"An agent of a sweep has started this job, and W&B accepts one run as a trial: the run {plan.base_id!r} of "
        f"{whose}. The runs of the other {others} have ids derived from it and the trial's values{where}, but are "
        'not part of the sweep. With run_mode="auto" or "shared" and rank_scope="global" all ranks share one run.'
    )
