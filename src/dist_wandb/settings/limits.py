"""Limits on how long a rank waits, and for how many rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from dist_wandb.errors import ConfigurationError, suggest

_LONGEST = 1e9  # the largest limit: 30 years in seconds; longer ones overflow in Python's and torch's clocks


def _check(name: str, value: object, kinds: tuple[type, ...], what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:  # type: ignore[operator]  # a number
        raise ConfigurationError(f"{name} must be a positive {what}, got {value!r}.")
    if value > _LONGEST:  # type: ignore[operator]  # a number
        raise ConfigurationError(f"{name} must be at most {_LONGEST:.0e}, got {value!r}.")


@dataclass(frozen=True)
class Limits:
    """Limits on how long a rank waits for other ranks and for W&B, and for how many rows. Times are in seconds.

    Pass it as ``limits=`` to `dist_wandb.init`, `DistWandbLogger` and `DistWandbTracker`, with the same values on all
    ranks.

    Args:
        join_timeout: How long to wait for ranks that have opened their session and do not arrive, and for what rank 0
            publishes. After it, the others begin without them.
        peer_timeout: How long a participating rank may keep the others waiting, because it does not answer or does not
            log a name that it usually logs. After it, they continue without it and mark their rows as degraded.
        finish_timeout: How long `finish` and `flush` wait for other ranks. `finish` then writes what is left, as long
            as W&B takes it, waits for the same time again for W&B to accept the remaining data, and reports the data
            that it did not accept. `None` for 60 s, and 600 s for the upload.
        max_pending_rows: How many rows may wait for ranks that have not logged them. Beyond this number, the oldest
            rows are written from the ranks that have. `log` takes as long as the exchange of a row while more rows
            wait to be exchanged. Without a reduction: how many rows may wait for wandb's own process while it is
            stalled; further rows are lost.
        heartbeat: Interval after which a rank that logs nothing takes part in an exchange anyway, so that rows which
            only other ranks log are written.

    Attributes:
        linger: How long a row waits for subsequent rows: exchanging many at once costs the training less than each one.
        grace: How long a rank has, at most `peer_timeout`, to publish its state after others have lost a rank.

    Raises:
        ConfigurationError: A limit that is not a positive number.
    """

    join_timeout: float = 60.0
    peer_timeout: float = 60.0
    finish_timeout: float | None = None
    max_pending_rows: int = 10_000
    heartbeat: float = 1.0
    linger: ClassVar[float] = 0.25
    grace: ClassVar[float] = 5.0

    def __post_init__(self) -> None:
        for name in ("join_timeout", "peer_timeout", "finish_timeout", "heartbeat"):
            if name != "finish_timeout" or self.finish_timeout is not None:
                _check(name, getattr(self, name), (int, float), "number of seconds")
        _check("max_pending_rows", self.max_pending_rows, (int,), "integer")

    @property
    def flush_timeout(self) -> float:
        """How long `finish` and `flush` wait for other ranks."""
        return 60.0 if self.finish_timeout is None else self.finish_timeout

    @property
    def upload_timeout(self) -> float:
        """How long `finish` waits for W&B to accept the remaining data. Checkpoints may take minutes."""
        return 600.0 if self.finish_timeout is None else self.finish_timeout


DEFAULT_LIMITS = Limits()
LIMIT_NAMES = tuple(field.name for field in fields(Limits))


def as_limits(given: object) -> Limits:
    """Return limits that were given as an object, or by name as in a configuration file."""
    if isinstance(given, Limits):
        return given
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"limits must be dist_wandb.Limits(...) or a mapping of its arguments, got {given!r}.")
    for name in given:
        if name not in LIMIT_NAMES:
            raise ConfigurationError(f"limits has an unknown name {name!r}. {suggest(name, LIMIT_NAMES)}")
    return Limits(**given)
