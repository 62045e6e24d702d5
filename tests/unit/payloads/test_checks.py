"""Checks of steps and of names of rows."""

from __future__ import annotations

import re
from types import MappingProxyType

import numpy as np
import pytest

from dist_wandb.errors import ConfigurationError
from dist_wandb.payloads.scalars import check_row, checked_step


@pytest.mark.parametrize("step", [0, 1, 2**53, True, np.int64(7)])
def test_steps_become_python_integers(step: int) -> None:
    checked = checked_step(step, 0)
    assert checked == step
    assert type(checked) in (int, bool)


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (-1, "step=-1 on rank 3 is negative"),
        (2**53 + 1, f"step={2**53 + 1} on rank 3 is beyond 2**53"),
        (2**60, f"step={2**60} on rank 3 is beyond 2**53"),
        (1.0, "step=1.0 on rank 3 is not an integer"),
        ("1", "step='1' on rank 3 is not an integer"),
        (None, "step=None on rank 3 is not an integer"),
    ],
)
def test_invalid_steps_are_refused(step: object, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(problem)):
        checked_step(step, 3)


@pytest.mark.parametrize("row", [{}, {"loss": 1}, {"ü": 1, "loss": 2}, MappingProxyType({"loss": 1})])
def test_mappings_with_names_are_rows(row: object) -> None:
    check_row(row, 0)


@pytest.mark.parametrize("name", [1, None, "a\0", "ü\ud800", ("a",)])
def test_rows_with_invalid_names_are_refused(name: object) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"log was given the name {name!r} ") + ".* on rank 3"):
        check_row({"loss": 1, name: 2}, 3)


@pytest.mark.parametrize("row", [[("loss", 1)], "loss", None, 0.5])
def test_rows_that_are_not_mappings_are_refused(row: object) -> None:
    with pytest.raises(ConfigurationError, match=f"log was given {type(row).__name__} on rank 3"):
        check_row(row, 3)
