"""What a session and the processes that its rank has started tell each other, and where."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass

LOG, FLUSH = "log", "flush"  # kinds of messages
HANDSHAKE = 5.0  # seconds that a child gets to show that it knows the key, and waits until it is let in


@dataclass(frozen=True)
class Address:
    """Where a session's process takes what its children log.

    Args:
        place: Of the socket.
        key: Known to this job's processes alone.
    """

    place: Any
    key: bytes = field(repr=False)
