"""Make the charts and heat maps of one run from the curves of its files."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from dist_wandb.cli.report.files import MAIN_AXES, TIME, FileForReport, seconds_of
from dist_wandb.cli.report.page import DIGITS_OF_X, Part, line_of, plain, shortened
from dist_wandb.cli.report.thinning import Blame, Curve, Stretches, cells, edges_of
from dist_wandb.settings.reduction import DEGRADED
from dist_wandb.wandb_files.finding import natural_order
from dist_wandb.wandb_files.selection import of_rank, spreads_among
from dist_wandb.wandb_files.stragglers import RANK, Timing, has_marked

_PARTS_OF_BAND, _PARTS_OF_HEAT = 256, 96
_STRETCHES_OF_LINES = 2000  # of one chart
_MOST_LINES = 1024  # of one chart
_MOST_HEAT_MAPS, _MOST_HEAT_CELLS = 24, 200_000  # of one run
_TIME = re.compile(
    r"(?:^|[/_.\- ])(?:time|times|timing|seconds?|secs?|ms|latency|duration)(?:[/_.\- ]|$)", re.IGNORECASE
)
_FIRST = (RANK, "time/step", "time/data", "time/forward", "time/optimizer")


@dataclass
class _MetricCurves:
    axis: str
    reduced: dict[str, Curve] = field(default_factory=dict)  # "": the values themselves; "/min" and "/max"
    ranks: dict[str, Curve] = field(default_factory=dict)  # by the name of a rank, or of a part of it (a GPU)


class Drawing:
    """The curves of one run, by metric, from files of its writers; if `is_job`, each file is one rank's own run."""

    def __init__(self, files: Sequence[tuple[str, FileForReport]], is_job: bool, world: int | None) -> None:
        self.metrics: dict[str, _MetricCurves] = {}
        self.axes: dict[str, Curve] = {}  # of the first writer
        self._first = files[0][0]
        self.system: dict[str, _MetricCurves] = defaultdict(partial(_MetricCurves, "minutes"))
        self.world = world
        self.blames: dict[str, Blame] = {blame.name: blame for _, file in files for blame in file.blames}
        began = min((file.sampled_from for _, file in files if file.system), default=0.0)
        for writer, file in files:
            self._add_history(writer, file, is_job)
            for (name, part), curve in file.system.items():
                curve.shift((file.sampled_from - began) / 60)
                _put(self.system[plain(name)].ranks, f"{writer} · {plain(part)}" if part else writer, curve)

    def slowest(self, timings: Mapping[str, Timing]) -> list[Part]:
        """Return the slowest rank of each timing metric that has values of ranks or names a rank."""
        of_curves = (_blame(name, drawn) for name, drawn in self.metrics.items() if len(drawn.ranks) > 1)
        blames = {blame.name: blame for blame in of_curves if blame is not None} | self.blames
        is_judged = has_marked(timings) or (RANK in blames and bool(blames[RANK].rows))
        found = (
            {**one, "stands_out": one["stands_out"] and (one["name"] == RANK or not is_judged)}
            for blame in blames.values()
            if _TIME.search(blame.name) and (one := blame.slowest(self.world))
        )
        return sorted(found, key=lambda one: (_importance(one["name"]), -one["share"]))[:50]

    def _add_history(self, writer: str, file: FileForReport, is_job: bool) -> None:
        role = file.shared_as
        axes = {curve.axis for curve in file.curves.values()} | {*MAIN_AXES, TIME, DEGRADED}
        label = f"{role.label}/" if role and role.label else None
        spread = ("/min", "/max", "/argmax_rank")  # a deviation is a metric of its own
        parts = {f"{base}{part}": (base, part) for base in spreads_among(file.curves) for part in spread}
        for name, curve in file.curves.items():
            if name in axes:
                if curve.axis == "_step" and writer == self._first:
                    _put(self.axes, name, curve)
                continue
            metric, part = parts.get(name, (name, ""))
            rank = None  # of a line of its own
            if is_job or (role and not role.primary) or (label and name.startswith(label)):
                metric, rank = name.removeprefix(label or ""), writer
            elif found := of_rank(name):
                metric, rank = found[1], f"rank {int(found[0].rpartition('-')[2])}"
            elif part == "/argmax_rank":
                continue
            drawn = self.metrics.setdefault(metric, _MetricCurves(curve.axis))
            if rank is None:
                _put(drawn.reduced, part, curve)
            else:
                _put(drawn.ranks, rank, curve)


def _put(curves: dict[str, Curve], name: str, curve: Curve) -> None:
    if name in curves:  # of a resumed run
        curves[name].absorb(curve)
    elif len(curves) < _MOST_LINES:
        curves[name] = curve


def charts_of(metrics: Mapping[str, _MetricCurves]) -> list[Part]:
    return [_chart(name, metrics[name]) for name in sorted(metrics, key=natural_order)]


def axes_of(drawing: Drawing, started: str | None) -> dict[str, Part]:
    """Return the values of the x axes over ``_step``, with W&B's clock in minutes since the start."""
    points = {plain(name): curve.points() for name, curve in drawing.axes.items()}
    if times := points.get(TIME):
        begin = min(times[0][1], seconds_of(started) or math.inf)
        points[TIME] = [(step, (time - begin) / 60) for step, time in times]
    return {name: line_of(found, DIGITS_OF_X) for name, found in points.items() if found}


def _chart(name: str, drawn: _MetricCurves) -> Part:
    ranks = {rank: drawn.ranks[rank] for rank in sorted(drawn.ranks, key=natural_order)}
    most = max(16, _STRETCHES_OF_LINES // max(1, len(ranks)))
    reduced = [drawn.reduced.get(part) for part in ("", "/min", "/max")]
    curves = [curve for curve in (*reduced, *ranks.values()) if curve is not None]
    drawn_from = Stretches(*map(np.concatenate, zip(*(curve.stretches() for curve in curves), strict=True)))
    lines = {rank: line_of(curve.points(most)) for rank, curve in ranks.items()}
    line, low, high = (None if curve is None else line_of(curve.points()) for curve in reduced)
    if len(ranks) > 1 and low is None and high is None:
        mean, low, high = _band([curve.stretches(most) for curve in ranks.values()])
        line = line or mean
    return {
        "name": plain(name),
        "axis": plain(drawn.axis),
        "line": line,  # the reduced values, or the mean of the ranks' lines; `None` if there are neither
        "band": (low, high) if low and high else None,
        "ranks": lines,  # by the name of a rank, or of a part of it (a GPU)
        "last": shortened(curves[0].last),
        "least": shortened(min(drawn_from.smallest[:, 1].tolist(), default=math.nan)),
        "most": shortened(max(drawn_from.largest[:, 1].tolist(), default=math.nan)),
        "gaps": sum(curve.gaps for curve in curves),  # values that are not finite
        "thinned": bool((drawn_from.number > 1).any()),  # whether the lines have fewer points than were logged
    }


def _band(ranks: Sequence[Stretches]) -> tuple[Part, Part, Part]:
    edges = edges_of(ranks, _PARTS_OF_BAND)
    of_ranks = np.stack([cells(stretches, edges) for stretches in ranks]) if edges else np.empty((1, 0, 4))
    is_known = np.isfinite(of_ranks[..., 0])
    places = np.flatnonzero(is_known.any(axis=0))
    found, count = of_ranks[:, places], is_known[:, places].sum(axis=0)
    firsts, means, low, high = np.moveaxis(found, -1, 0)
    is_exact = len(edges) - 1 < _PARTS_OF_BAND  # a part has about one point of each rank
    middles = (np.array(edges[:-1]) + edges[1:])[places] / 2
    x = np.nanmin(firsts, axis=0) if is_exact else middles
    values = np.nansum(means / count, axis=0), np.nanmin(low, axis=0), np.nanmax(high, axis=0)
    mean, smallest, largest = (line_of(zip(x.tolist(), one.tolist(), strict=True)) for one in values)
    return mean, smallest, largest


def heat_maps_of(drawing: Drawing) -> list[Part]:
    """Return the heat maps of the metrics that name a rank or have a line for each rank: timings first, system last."""
    curves = drawing.metrics | {f"system: {name}": drawn for name, drawn in drawing.system.items()}
    own = {name: drawn for name, drawn in curves.items() if len(drawn.ranks) > 1}
    found: list[Part] = []
    room = _MOST_HEAT_CELLS
    for name in sorted({*drawing.blames, *own}, key=lambda name: (_importance(name), natural_order(name))):
        # Of a metric that has both, the ranks' own values are shown.
        heat = _heat_map(name, own[name]) if name in own else drawing.blames[name].heat_map(drawing.world)
        room -= sum(map(len, heat["cells"])) if heat else 0
        if found and (room < 0 or len(found) == _MOST_HEAT_MAPS):
            break
        found += [heat] if heat else []
    return found


def _heat_map(name: str, drawn: _MetricCurves) -> Part | None:
    # The means of the ranks' own values in each part of the x axis, `None` in one without values. The edges are the
    # start of the first part, and the end of each.
    ranks = sorted(drawn.ranks, key=natural_order)
    stretches = [drawn.ranks[rank].stretches() for rank in ranks]
    edges = edges_of(stretches, _PARTS_OF_HEAT)
    if not edges:
        return None
    means = [cells(of_rank, edges)[:, 1].tolist() for of_rank in stretches]
    rows = [[None if math.isnan(mean) else shortened(mean, 4) for mean in of_rank] for of_rank in means]
    places = {"axis": plain(drawn.axis), "ranks": ranks, "edges": [shortened(edge, 8) for edge in edges]}
    return {"name": plain(name), "kind": "value", **places, "cells": rows}


def _blame(name: str, drawn: _MetricCurves) -> Blame | None:
    """Return which rank has the largest of the ranks' own values in each part of the x axis, if it is a timing."""
    heat = _heat_map(name, drawn) if _TIME.search(name) else None
    if heat is None or not all(re.fullmatch(r"rank \d+", rank) for rank in heat["ranks"]):
        return None
    values = np.array(heat["cells"], float)  # NaN for `None`
    is_whole = np.isfinite(values).all(axis=0)
    values = values[:, is_whole]
    means = values.mean(axis=0)
    ranks = np.array([float(rank.split()[1]) for rank in heat["ranks"]])[values.argmax(axis=0)]
    return Blame(name, drawn.axis, np.array(heat["edges"][:-1])[is_whole], ranks, values.max(axis=0) - means, means)


def _importance(name: str) -> tuple[int, str]:
    """A sort key: timings first, system metrics last."""
    if name in _FIRST:
        return _FIRST.index(name), ""
    return (len(_FIRST), "") if name.startswith("time/") else (len(_FIRST) + 1 + name.startswith("system: "), "")
