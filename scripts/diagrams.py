"""Draw diagrams of each run mode for two nodes with two ranks (``docs/images/mode_*.svg``) from the run plans.

Run `python scripts/diagrams.py` after a change of the plans; `tests/unit/test_docs.py` compares the diagrams.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from dist_wandb.job.topology import Topology
from dist_wandb.settings.plan import RANK_SCOPES, RUN_MODES, RunPlan, plan_run

IMAGES = Path(__file__).parents[1] / "docs" / "images"
NODES, RANKS_OF_NODE = 2, 2
WIDTH, HEIGHT = 720, 236
RANK_WIDTH, RANK_HEIGHT = 112, 34
NODE_TOP, RANK_TOP, RUN_TOP, RUN_HEIGHT = 44, 78, 168, 48
INK, BLUE, ORANGE, PALE, NODE = "#1f2733", "#2a6fdb", "#c8640f", "#e8f0fd", "#f3f4f6"


def drawn() -> dict[str, str]:
    """Return the diagrams by file name."""
    return {f"mode_{mode}_{scope}.svg": _picture(mode, scope) for mode in RUN_MODES for scope in RANK_SCOPES}


def main() -> None:
    """Write all diagrams."""
    for name, picture in drawn().items():
        (IMAGES / name).write_text(picture, encoding="utf-8")


def _picture(mode: str, scope: str) -> str:
    plans = [plan_run(topology, mode, scope, "exp") for topology in _topologies()]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="13" fill="{INK}">'
    )
    title = f'<title>run_mode="{mode}", rank_scope="{scope}": {_summary(plans)}</title>'
    parts = [*_nodes(), *_exchange(plans, mode), *_runs(plans), *_ranks(plans)]
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>'
    return "\n".join([head, title, background, *parts, "</svg>", ""])


def _summary(plans: list[RunPlan]) -> str:
    runs = dict.fromkeys(plan.run_id for plan in plans if plan.opens_run)
    return f"{len(plans)} ranks on {NODES} nodes; runs: {', '.join(map(str, runs))}"


def _topologies() -> list[Topology]:
    size = NODES * RANKS_OF_NODE
    return [
        Topology(rank, rank % RANKS_OF_NODE, rank // RANKS_OF_NODE, size, RANKS_OF_NODE, NODES) for rank in range(size)
    ]


def _middle(rank: int) -> int:
    """Return the horizontal position of a rank."""
    of_node = WIDTH // NODES
    return of_node * (rank // RANKS_OF_NODE) + of_node * (2 * (rank % RANKS_OF_NODE) + 1) // (2 * RANKS_OF_NODE)


def _nodes() -> Iterator[str]:
    width = WIDTH // NODES
    for node in range(NODES):
        left = node * width + 10
        yield f'<rect x="{left}" y="{NODE_TOP}" width="{width - 20}" height="82" rx="6" fill="{NODE}"/>'
        yield f'<text x="{left + 8}" y="{NODE_TOP + 17}" font-size="11">node {node}</text>'


def _ranks(plans: list[RunPlan]) -> Iterator[str]:
    for rank, plan in enumerate(plans):
        left, colour = _middle(rank) - RANK_WIDTH // 2, BLUE if plan.opens_run else "#9aa3af"
        yield (
            f'<rect x="{left}" y="{RANK_TOP}" width="{RANK_WIDTH}" height="{RANK_HEIGHT}" rx="5" fill="#ffffff" '
            f'stroke="{colour}" stroke-width="{2 if plan.opens_run else 1}"/>'
        )
        yield _text(_middle(rank), RANK_TOP + 22, f"rank {rank}")


def _runs(plans: list[RunPlan]) -> Iterator[str]:
    writers: dict[str, list[int]] = {}
    for rank, plan in enumerate(plans):
        if plan.opens_run and plan.run_id is not None:
            writers.setdefault(plan.run_id, []).append(rank)
    for run_id, ranks in writers.items():
        middle, group = sum(map(_middle, ranks)) // len(ranks), plans[ranks[0]].group
        width = max(RANK_WIDTH, 7 * len(run_id) + 26)
        for rank in ranks:
            start, end = _middle(rank), middle + (_middle(rank) - middle) // 6
            line = f"M{start} {RANK_TOP + RANK_HEIGHT} L{end} {RUN_TOP}"
            yield f'<path d="{line}" stroke="{BLUE}" stroke-width="2" fill="none"/>'
        yield (
            f'<rect x="{middle - width // 2}" y="{RUN_TOP}" width="{width}" height="{RUN_HEIGHT}" rx="5" '
            f'fill="{PALE}" stroke="{BLUE}"/>'
        )
        yield _text(middle, RUN_TOP + 21, run_id, weight="600", size=12)
        yield _text(middle, RUN_TOP + 38, f"run, group {group}" if group else "run", size=11)


def _exchange(plans: list[RunPlan], mode: str) -> Iterator[str]:
    """Draw which ranks send their values to which primary for the reduction; in `new` each rank keeps its own."""
    if mode == "new":
        return
    primary = 0
    for rank, plan in enumerate(plans):
        if plan.primary and plan.opens_run:
            primary = rank
            continue
        start, end, high = _middle(rank), _middle(primary), 8
        yield (
            f'<path d="M{start} {RANK_TOP} C{start} {high}, {end} {high}, {end} {RANK_TOP}" stroke="{ORANGE}" '
            'stroke-width="1.5" stroke-dasharray="5 4" fill="none"/>'
        )


def _text(middle: int, y: int, text: str, *, weight: str = "400", size: int = 13) -> str:
    looks = f'text-anchor="middle" font-weight="{weight}" font-size="{size}"'
    return f'<text x="{middle}" y="{y}" {looks}>{escape(text)}</text>'


if __name__ == "__main__":
    main()
