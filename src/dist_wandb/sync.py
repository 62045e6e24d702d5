"""Between `log` and the written row: how a rank's contributions become rows of its unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dist_wandb.run import RunWriter


@dataclass(frozen=True)
class Contribution:
    """What one rank says in one call of `log`.

    Args:
        metrics: Values by name.
        step: Place on the x axis; `None` for none.
        commit: As in `wandb.Run.log`; `None` leaves it to wandb.
    """

    metrics: Mapping[str, Any]
    step: int | None
    commit: bool | None = None


class Exchange(Protocol):
    """Takes the contributions of one rank and sees to it that finished rows are written, in order."""

    def put(self, contribution: Contribution) -> None:
        """Take a contribution. Does not wait for other ranks."""

    def flush(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds until all that was put is written; return whether it is."""

    def close(self, timeout: float | None = None) -> bool:
        """As `flush`; nothing may be put afterwards."""


class StraightThrough:
    """The exchange of a unit without other ranks: what is put is written at once, on the calling thread."""

    def __init__(self, writer: RunWriter) -> None:
        self._writer = writer

    def put(self, contribution: Contribution) -> None:
        """Write the contribution as one row."""
        self._writer.write(contribution.metrics, contribution.step, commit=contribution.commit)

    def flush(self, timeout: float | None = None) -> bool:  # noqa: ARG002  # the protocol has it
        """Nothing is ever pending."""
        return True

    def close(self, timeout: float | None = None) -> bool:  # noqa: ARG002  # the protocol has it
        """Nothing is ever pending."""
        return True
