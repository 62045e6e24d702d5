"""Draw the figures of docs/evidence.md from the measurements: benchmarks/measured/*.json to docs/images/*.svg.

pip install matplotlib
python -m benchmarks.plots
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
IMAGES = HERE.parent / "docs" / "images"
BLUE, ORANGE, GREEN, GREY = "#2a6fdb", "#d9741a", "#2e8b57", "#808080"  # visible on white and on black


def main() -> None:
    """Draw all figures."""
    mpl.rcParams.update(
        {
            "svg.hashsalt": "dist_wandb",  # the same figure from the same numbers
            "savefig.transparent": True,
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "lines.marker": "o",
            **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY),
        }
    )
    simulated = json.loads((HERE / "measured" / "simulated.json").read_text(encoding="utf-8"))
    real = json.loads((HERE / "measured" / "real_ranks.json").read_text(encoding="utf-8"))["runs"]
    IMAGES.mkdir(exist_ok=True)
    _draw("scaling_store", lambda axes: _store(axes, simulated, real))
    _draw("scaling_rows", lambda axes: _rows(axes, simulated))


def _store(axes: Sequence[Any], simulated: Sequence[Any], real: Sequence[Any]) -> None:
    undisturbed = [job for job in simulated if not job["killed"] and not job["late"]]
    keys, cpu = axes
    _line(keys, undisturbed, lambda job: job["keys"]["mean"], BLUE, "simulated, mean")
    _line(keys, real, lambda job: job["keys_median"], ORANGE, "real processes, median")
    one = [job for job in simulated if len(job["killed"]) == 1]
    _line(keys, [job for job in one if job["killed"] == [9]], lambda job: job["keys"]["mean"], GREY, "one rank dies")
    _finish(keys, "keys of the job's store asked by a rank, from init to finish", 260)
    _line(cpu, real, lambda job: 1000 * job["store_cpu_s"] / job["ranks"], ORANGE, "real processes, one run each")
    _finish(cpu, "processor time of the store's process for a rank, ms", 5)


def _rows(axes: Sequence[Any], simulated: Sequence[Any]) -> None:
    undisturbed = [job for job in simulated if not job["killed"] and not job["late"] and job["ranks"] > 2]
    sent, after = axes
    _line(sent, undisturbed, lambda job: job["bytes_of_a_row"]["median"] / 1024, BLUE, "median rank")
    _line(sent, undisturbed, lambda job: job["bytes_of_a_row"]["most"] / 1024, ORANGE, "the rank that sends most")
    _finish(sent, "KiB that a rank sends for a row of 20 numbers", 80)
    for label, colour, is_it in (
        ("a rank", BLUE, lambda job: job["killed"] == [9]),
        ("the first rank of a node", GREEN, lambda job: job["killed"] == [8]),
        ("a node of 8", ORANGE, lambda job: len(job["killed"]) > 1),
    ):
        _line(after, list(filter(is_it, simulated)), lambda job: job["last_row"], colour, f"{label} dies")
    for line, dashes in zip(after.get_lines(), ("-", "--", ":"), strict=True):  # they are nearly equal
        line.set_linestyle(dashes)
    _finish(after, "seconds from a death to the next row of all others", 10)


def _line(axes: Any, jobs: Sequence[Any], number: Callable[[Any], float], colour: str, label: str) -> None:
    axes.plot([job["ranks"] for job in jobs], [number(job) for job in jobs], color=colour, label=label)


def _finish(axes: Any, title: str, top: float) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlabel("ranks")
    axes.set_title(title, fontsize=10, loc="left")
    ranks = sorted({int(rank) for line in axes.get_lines() for rank in line.get_xdata()})
    axes.set_xticks(ranks, [f"{rank:,}" for rank in ranks], fontsize=8)
    axes.minorticks_off()
    axes.set_ylim(0, top)
    axes.grid(visible=True, color=GREY, alpha=0.25)
    axes.legend(frameon=False, fontsize=9)


def _draw(name: str, draw: Callable[[Sequence[Any]], None]) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    draw(axes)
    figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
