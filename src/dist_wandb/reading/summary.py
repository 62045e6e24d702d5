"""The summary of a run, as its files record it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dist_wandb.wandb_files.inspection import inspect
from dist_wandb.wandb_files.reading import MOST_METRICS, with_floats

_LONGEST_NAME = 1000  # characters


def summary_of(paths: Iterable[Path]) -> dict[str, Any]:
    """Read the summary that files lead to, without W&B's own names; at most 20,000 names are kept.

    Args:
        paths: The files; what a later one has replaces what an earlier one has.

    Raises:
        ReadError: A file cannot be read.
        UnsupportedVersionError: The installed wandb cannot print ``.wandb`` files.
    """
    summary: dict[str, Any] = {}

    def on_record(record: dict[str, Any]) -> None:
        kind = record["type"]
        if kind == "summary":
            _update(summary, record["summary"])
        elif kind == "history":  # a killed process may have written no summary
            _update(summary, {"update": record["history"].get("item")})

    for path in paths:
        inspect(path, on_record, skipped=())
    return summary


def _update(summary: dict[str, Any], record: Mapping[str, Any]) -> None:
    update, removed = record.get("update"), record.get("remove")
    for name, value in (update if isinstance(update, dict) else {}).items():
        is_kept = name in summary or len(summary) < MOST_METRICS
        if name[:1] != "_" and is_kept and len(name) <= _LONGEST_NAME:
            summary[name] = with_floats(value)
    for item in removed if isinstance(removed, list) else []:
        name = item.get("key") if isinstance(item, dict) else None
        if isinstance(name, str):
            summary.pop(name, None)
