"""Columns as data frames of libraries that dist_wandb does not need otherwise."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from dist_wandb.errors import MissingExtraError


def pandas_frame(columns: Mapping[str, list[Any]]) -> Any:
    """Make a `pandas.DataFrame`.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    return _library("pandas").DataFrame(dict(columns))


def polars_frame(columns: Mapping[str, list[Any]]) -> Any:
    """Make a `polars.DataFrame`. A column of several types gets the one that holds them all.

    Raises:
        MissingExtraError: polars is not installed.
    """
    return _library("polars").DataFrame(dict(columns), strict=False, infer_schema_length=None)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise MissingExtraError(
            f"to_{name} needs {name}, which is not installed. Run: pip install {name}. "
            "history() returns the same columns without it."
        ) from None
