"""How long, and how much, the exchange of metrics waits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """How long, and how much, the exchange waits. Times are in seconds.

    Args:
        join_timeout: For ranks that have not opened their session yet, before the others begin without them.
        peer_timeout: For a rank that takes part but does not answer, or does not log a name that it usually does.
        finish_timeout: For the other ranks when the session is finished or flushed.
        max_pending_rows: Rows that wait for other ranks; beyond it the oldest are finished with those who are there.
            Where nothing is brought together: rows that wait for wandb's own process, or a device.
        heartbeat: After which a rank that has nothing to say takes part in a round all the same.
        linger: How long a row waits for the next ones, where rows follow each other quickly: several rounds in a row
            cost the training less than each by itself.
    """

    join_timeout: float = 60.0
    peer_timeout: float = 60.0
    finish_timeout: float = 60.0
    max_pending_rows: int = 10_000
    heartbeat: float = 1.0
    linger: float = 0.05
