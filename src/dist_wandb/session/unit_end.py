"""How the ranks of a unit report their ends, so that its run ends last and with the right exit code.

A rank that fails reports its exit code before it does anything else at its end: the first failure of a unit is claimed
in the store, and is the exit code of the unit's run (``run_mode="new"`` keeps each run to itself). Secondaries report
that they write nothing more. The primary waits for that, within `finish_timeout` and not for ranks that its exchange
has lost, and finishes last. A rank that fails waits for nobody.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING

from dist_wandb.errors import RendezvousError
from dist_wandb.session.exit_codes import FAILED
from dist_wandb.store.polling import poll
from dist_wandb.store.shared_list import SharedList
from dist_wandb.store.timed_caller import STORE_PATIENCE, briefly

if TYPE_CHECKING:
    from dist_wandb.settings.plan import Unit
    from dist_wandb.store.job_store import JobStore

_PAUSE = 0.02  # seconds between two looks whether writers have ended


class UnitEnd:
    """What the ranks of a unit report to each other about their ends.

    Ranks only ever set and look up keys of the job's store: nobody waits for a rank that is known to be gone, and where
    the store is gone, so is what could be reported.

    Args:
        store: The session's keys in the job's store; `None` where there is no store.
        unit: The unit, seen from this rank.
    """

    def __init__(self, store: JobStore | None, unit: Unit) -> None:
        self._store = store
        self._unit = unit

    def report(self, exit_code: int | None) -> int | None:
        """Report how this rank ends, before it does. Of several failures the first counts: others follow from it.

        Returns:
            `exit_code`; if it is that of a failure, that of the first one.
        """
        store = self._store
        if not exit_code or store is None:
            return exit_code
        return int(briefly(lambda: store.claim(self._key("failed"), exit_code), exit_code))

    def report_written(self) -> None:
        """Report that this rank writes nothing more into the unit's run."""
        store = self._store
        if store is not None:
            briefly(lambda: self._written(store).append(self._unit.index), 0)

    def await_writers(self, deadline: float, writers: Collection[int]) -> bool:
        """Wait for other ranks of the unit to have called `report_written`.

        Args:
            deadline: Until when, by the monotonic clock.
            writers: Their indices in the unit.

        Returns:
            Whether they have.
        """
        store = self._store
        if store is None or not writers:
            return True
        written = self._written(store)

        def have_written() -> bool | None:
            written.news()
            return set(writers).issubset(written.values) or None

        def wait() -> bool:
            with suppress(RendezvousError):
                return bool(poll(have_written, deadline - time.monotonic(), _PAUSE))
            return True

        return briefly(wait, False, max(0.0, deadline - time.monotonic()) + STORE_PATIENCE)

    def exit_code(self, gone: Collection[int]) -> int:
        """The exit code of the first rank that failed; 1 if some are gone without having reported; else 0.

        Without a store, or where each rank has a run of its own, no other rank counts.
        """
        store = self._store
        if store is None:
            return 0
        reported = briefly(lambda: store.try_get(self._key("failed")), None)
        return int(reported or (FAILED if gone else 0))

    def _key(self, what: str) -> str:
        return f"end/{self._unit.name}/{what}"

    def _written(self, store: JobStore) -> SharedList:
        """The ranks that write nothing more, by their indices."""
        return SharedList(store, self._key("written"))
