"""How the ranks of a unit report their ends, so that its run ends last and with the right exit code.

A rank that fails publishes its exit code before anything else at its end. The first failure of a unit is claimed in the
store and becomes the exit code of the unit's run; with ``run_mode="new"``, each run has its own. Secondaries publish
that they write nothing more. The primary waits for that, up to `finish_timeout` and not for ranks that its exchange has
lost, and finishes last. A rank that fails does not wait for others.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING

from dist_wandb.errors import RendezvousError
from dist_wandb.session.process_end import FAILED
from dist_wandb.store.polling import poll
from dist_wandb.store.shared_list import SharedList
from dist_wandb.store.timed_caller import STORE_PATIENCE, briefly

if TYPE_CHECKING:
    from dist_wandb.settings.plan import Unit
    from dist_wandb.store.job_store import JobStore

_PAUSE = 0.02  # seconds between two polls for writers that have ended


class UnitEnd:
    """The messages of a unit's ranks about their ends.

    Ranks only set and read keys of the job's store: none waits for a rank that is known to be gone, and without the
    store nothing can be reported.
    """

    def __init__(self, store: JobStore | None, unit: Unit) -> None:
        self._store = store
        self._unit = unit

    def report(self, exit_code: int | None) -> int | None:
        """Publish this rank's exit code, before it ends. Returns it; if it is a failure, the unit's first failure.

        The first of several failures counts, because others follow from it.
        """
        store = self._store
        if not exit_code or store is None:
            return exit_code
        return int(briefly(lambda: store.claim(self._key("failed"), exit_code), exit_code))

    def report_written(self) -> None:
        """Publish that this rank writes nothing more into the unit's run."""
        store = self._store
        if store is not None:
            briefly(lambda: self._written(store).append(self._unit.index), 0)

    def await_writers(self, deadline: float, writers: Collection[int]) -> bool:
        """Wait until other ranks, by their indices in the unit, have called `report_written`; return whether they have.

        The deadline is a time of the monotonic clock.
        """
        store = self._store
        if store is None or not writers:
            return True
        written = self._written(store)

        def have_written() -> bool | None:
            written.read_new()
            return set(writers).issubset(written.values) or None

        def wait() -> bool:
            with suppress(RendezvousError):
                return bool(poll(have_written, deadline - time.monotonic(), _PAUSE))
            return True

        return briefly(wait, False, max(0.0, deadline - time.monotonic()) + STORE_PATIENCE)

    def exit_code(self, gone: Collection[int]) -> int:
        """Return the exit code of the first rank that failed; 1 if some are gone without a report; otherwise 0.

        Without a store, or if each rank has its own run, other ranks do not count.
        """
        store = self._store
        if store is None:
            return 0
        reported = briefly(lambda: store.try_get(self._key("failed")), None)
        return int(reported or (FAILED if gone else 0))

    def _key(self, what: str) -> str:
        return f"end/{self._unit.name}/{what}"

    def _written(self, store: JobStore) -> SharedList:
        """Return the list of the indices of ranks that write nothing more."""
        return SharedList(store, self._key("written"))
