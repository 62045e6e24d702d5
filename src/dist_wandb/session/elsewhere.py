"""What ranks without a run ask of it: their alerts reach the run, and files that they save are reported as not saved.

A rank without a run appends its alerts to a list in the job's store. The unit's primary reads the list when the
exchange reports that some rank has published something, and before it ends the run, so the list costs nothing unless
there are alerts. The same alert of several ranks is sent once, as if the script had one process.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dist_wandb.errors import RendezvousError
from dist_wandb.job.job_store import SharedList
from dist_wandb.job.timed_caller import STORE_PATIENCE, TimedCaller, UnansweredError, briefly
from dist_wandb.runs import interception, wandb_private
from dist_wandb.runs.null_run import NullRun
from dist_wandb.runs.opening import run_key
from dist_wandb.runs.requested import check_alert

if TYPE_CHECKING:
    from dist_wandb.runs.null_run import AnyRun
    from dist_wandb.session.job_link import JobLink

_log = logging.getLogger("dist_wandb")

_SAVING = ("save", "log_artifact", "log_model", "log_code")
_FETCHING = ("use_artifact", "use_model")


class Elsewhere:
    """Handles calls on a rank without a run, and on the primary the alerts of such ranks."""

    def __init__(self, link: JobLink, run: Callable[[], AnyRun], *, takes_all: bool) -> None:
        self.sent: int = 0  # alerts that this rank has published for its primary
        self._link = link
        self._run = run
        self.takes_all: bool = takes_all  # that is logged, as wandb's disabled run
        self._list: SharedList | None = None  # from its first use to the last
        self._seen: Counter[tuple[str, str, str]] = Counter()  # alerts of this rank
        self._passed_on: set[tuple[str, str, str, int]] = set()  # alerts that this primary has sent
        self._published = 0.0  # as of the last `deliver`

    def take(self, metrics: Mapping[str, Any]) -> None:
        """Give whatever was logged, also after the end, to the summary of a disabled run."""
        run = self._run()
        take = run.summary.update if isinstance(run, NullRun) else interception.original(run, "log")
        take(dict(metrics))

    def handlers(self, run: AnyRun, watch: Callable[[Any], None]) -> dict[str, Callable[..., Any]]:
        """Return handlers of a run's methods by name. `watch` is called with what ``run.watch`` logs."""
        if self._link.topology.world_size == 1 or self.takes_all:  # rows are written at once, or nowhere
            return {}
        if not run:
            return {"alert": self._alert, **{name: self._reported(name) for name in (*_SAVING, *_FETCHING)}}

        def take(log_now: Any, data: Any, step: Any = None, commit: Any = None, **others: Any) -> None:
            if step is None and wandb_private.is_watched(data, commit):
                watch(data)
            else:
                log_now(data, step, commit, **others)

        of_primary = {"alert": self._alert_of_primary} if self._link.plan.run_mode == "auto" else {}
        return {**of_primary, wandb_private.LOG: take}

    def deliver(self, published: float = math.inf) -> None:
        """Send other ranks' alerts to this rank's run, if any rank has `published` since (infinity: in any case)."""
        if published == self._published or self._link.plan.run_mode != "auto" or not self._run():
            return
        self._published = published
        try:
            found = self._shared()
            new = [] if found is None else found.read_new()
        except (RendezvousError, UnansweredError) as error:
            _log.debug("dist_wandb: rank %d cannot read alerts: %s", self._link.topology.global_rank, error)
            return
        finally:
            if published == math.inf:
                self._list = None  # releases its connection
        for one in new:
            if isinstance(one, dict) and isinstance(one.get("title"), str) and isinstance(one.get("number"), int):
                self._send(one)

    def _send(self, alert: dict[str, Any]) -> None:
        title, text, level = (str(alert.get(name) or "") for name in ("title", "text", "level"))
        if self._is_new((title, text, level, alert["number"])):
            wait = alert.get("wait_duration")
            arguments = {"level": level or None, "wait_duration": wait if isinstance(wait, (int, float)) else None}
            try:
                interception.original(self._run(), "alert")(title, text, **arguments)
            except Exception as error:  # noqa: BLE001  # must not affect the training
                _log.warning("dist_wandb: an alert of another rank could not be sent: %r: %r", title, error)

    def _is_new(self, alert: tuple[str, str, str, int]) -> bool:
        is_new = alert not in self._passed_on
        self._passed_on.add(alert)
        return is_new

    def _numbered(self, title: object, text: object, level: object) -> tuple[str, str, str, int]:
        """Return an alert of this rank as texts, with how often this rank has given it."""
        key = (str(title), str(text or ""), str(getattr(level, "value", level) or ""))
        self._seen[key] += 1
        return (*key, self._seen[key])

    def _alert_of_primary(
        self, send: Callable[..., None], title: str, text: str, level: Any = None, wait_duration: Any = None
    ) -> None:
        check_alert(level, wait_duration)  # also if another rank has sent it
        if self._is_new(self._numbered(title, text, level)):
            send(title, text, level, wait_duration)

    def _alert(self, _: Any, title: str, text: str, level: Any = None, wait_duration: Any = None) -> None:
        check_alert(level, wait_duration)
        title, text, level, number = self._numbered(title, text, level)
        wait = wait_duration.total_seconds() if isinstance(wait_duration, timedelta) else wait_duration
        alert = {"title": title, "text": text, "level": level, "wait_duration": wait, "number": number}
        try:
            shared = self._shared()
            if shared is not None:
                shared.append(alert)
                self.sent += 1
                return
            problem: object = "there is no store of the job, so call init_process_group first"
        except (RendezvousError, UnansweredError) as error:
            problem = error
        _log.warning(
            "dist_wandb: the alert %r of rank %d did not reach the rank that has the run: %s.",
            title,
            self._link.topology.global_rank,
            problem,
        )

    def _shared(self) -> SharedList | None:
        """Return the list of the alerts, on a connection of its own: the training must not wait behind a read."""
        if self._list is None and self._link.store is not None:
            store = self._link.store.beside("alerts", TimedCaller(STORE_PATIENCE))
            self._list = SharedList(store, run_key(self._link.plan))
        return self._list

    def _reported(self, name: str) -> Callable[..., Any]:
        """Return a handler that reports a call without effect, on the first rank of the unit that makes it."""
        reported = False

        def report(do_nothing: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal reported
            if not reported:
                reported = True
                store, rank = self._link.store, self._link.topology.global_rank
                key = f"{run_key(self._link.plan)}/without a run/{name}"
                if store is None or briefly(lambda: store.claim(key, rank) == rank, otherwise=True):
                    self._report(name)
            return do_nothing(*args, **kwargs)

        return report

    def _report(self, name: str) -> None:
        rank, unit = self._link.topology.global_rank, self._link.unit
        primary = unit.ranks[0] if unit.is_member else self._link.topology.coordinator
        if name in _FETCHING:
            _log.warning(
                "dist_wandb: rank %d called %s, which returns nothing there, because only rank %d has a run. Read it "
                "with wandb.Api().artifact(...), which every rank can, or on rank %d only.",
                *(rank, name, primary, primary),
            )
            return
        _log.warning(
            "dist_wandb: rank %d called %s, which saves nothing there, because only rank %d has a run. If each rank "
            "has files of its own, such as a part of a checkpoint, pass run_mode='shared' to save those of all ranks. "
            "If not, call %s on rank %d only.",
            *(rank, name, primary, name, primary),
        )
