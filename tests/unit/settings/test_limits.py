"""Limits: their checks, and the two waits that finish_timeout bounds."""

import re
from typing import Any

import pytest

import dist_wandb
from dist_wandb.errors import ConfigurationError
from dist_wandb.settings.options import LIMIT_NAMES, Limits


@pytest.mark.parametrize("value", [2e9, float("inf")])
def test_limits_too_large_for_clocks_are_refused(value: float) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"peer_timeout must be at most 1e+09, got {value!r}.")):
        Limits(peer_timeout=value)


@pytest.mark.parametrize(("given", "flush", "upload"), [(None, 60.0, 600.0), (60.0, 60.0, 60.0), (5, 5, 5)])
def test_finish_timeout_bounds_the_ranks_and_the_upload(given: float | None, flush: float, upload: float) -> None:
    limits = Limits(finish_timeout=given)
    assert (limits.flush_timeout, limits.upload_timeout) == (flush, upload)


@pytest.mark.parametrize("name", LIMIT_NAMES)
def test_a_separate_limit_is_refused_with_a_hint_to_limits(name: str) -> None:
    given: dict[str, Any] = {name: 7}
    message = (
        f"dist_wandb.init got the argument {name!r}, which is one of the limits. Pass limits=dist_wandb.Limits({name}="
    )
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        dist_wandb.init(**given)
