from __future__ import annotations

import pytest

import dist_wandb
from dist_wandb import errors
from dist_wandb.errors import (
    ConfigurationError,
    DistWandbError,
    MissingExtraError,
    ReadError,
    RendezvousError,
    TopologyError,
    UnavailableError,
    UnsupportedVersionError,
    UploadError,
    suggest,
)

KINDS = (
    ConfigurationError,
    TopologyError,
    RendezvousError,
    MissingExtraError,
    UnsupportedVersionError,
    UnavailableError,
    ReadError,
    UploadError,
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_caught_by_the_base_and_keeps_its_message(kind: type[DistWandbError]) -> None:
    with pytest.raises(DistWandbError, match="what to do"):
        raise kind("what to do")


def test_no_kind_of_error_is_missing_from_these_tests_and_all_are_public() -> None:
    defined = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DistWandbError)}
    assert defined == {DistWandbError, *KINDS}
    assert {kind.__name__ for kind in defined} <= set(dist_wandb.__all__)


@pytest.mark.parametrize(("kind", "builtin"), [(ConfigurationError, ValueError), (MissingExtraError, ImportError)])
def test_errors_with_a_builtin_kin_are_caught_by_it(kind: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(kind, builtin)


def test_the_allowed_values_are_listed_in_order_with_the_nearest() -> None:
    assert suggest("share", ("auto", "shared", "new")) == ("Allowed: 'auto', 'shared', 'new'. Did you mean 'shared'?")


def test_case_does_not_hide_the_nearest_match() -> None:
    assert suggest("NEW", ("auto", "shared", "new")).endswith("Did you mean 'new'?")


@pytest.mark.parametrize("value", ["everything", None, 7, ["auto"]])
def test_nothing_is_suggested_where_nothing_is_near(value: object) -> None:
    assert suggest(value, ("shared", "new")) == "Allowed: 'shared', 'new'."
