"""What the script does with its run between calls of `log` whose rows are not written yet: in the order of the calls.

Definitions of metrics wait for the rows of the calls before them. Writes into the summary are kept in order with the
rows, and reads of it find what was logged last.

A row of several ranks is written after its call of `log`. If the user has written into the summary meanwhile, W&B would
replace that by the row's value. So it is written again, after a row that ended before it in the user's script.

A row ends where it does in wandb: at its call, or if that leaves it open, at the next call for another row.

A read answers with what this rank has logged under a name last, until the row of that call has ended; if
`define_metric` asked for the largest value, say, with the largest that this rank has logged.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from functools import partial, reduce
from typing import Any, NamedTuple

from dist_wandb.payloads.devices import PLAIN, Later, LaterValue, known
from dist_wandb.payloads.scalars import Paths, nested
from dist_wandb.runs import interception, wandb_private
from dist_wandb.runs.null_run import AnyRun, NullRun
from dist_wandb.runs.wandb_media import shown_values
from dist_wandb.settings.options import Current
from dist_wandb.settings.reduction import Definitions

_log = logging.getLogger("dist_wandb")
_OVER = object()  # marks a value whose row has ended
_restores = Current("restores", default=False)  # whether this thread writes newer values


class _Write(NamedTuple):
    """A write, or a deletion, of one value: its number, the path of names to the value, and wandb's record of it."""

    number: int
    path: tuple[str, ...]
    record: Any


class _LoggedCall(NamedTuple):
    """A call of `log`: the position of its row, and those of its values whose row has not ended."""

    x: int | None
    row: dict[str, Any]


class Statistics(LaterValue):
    """The numbers that this rank has logged under a name whose summary `define_metric` has defined, for reads."""

    _MOST_WAITING = 64  # numbers on a device that are not asked for again and again

    def __init__(self, shown: tuple[str, ...]) -> None:
        self.shown = shown  # such as `("max", "mean")`
        self._waiting: deque[Any] = deque(maxlen=4096)
        self._found: dict[str, Any] = {}

    def add(self, value: Any) -> None:  # does not wait for a device
        if isinstance(value, (int, float, Later)):
            self._waiting.append(value)
        while self._waiting and (
            type(self._waiting[0]) is not Later
            or (len(self._waiting) > self._MOST_WAITING and self._waiting[0].is_ready())
        ):
            self._found = _with(self._found, self._waiting.popleft())

    def value(self) -> dict[str, Any]:
        """Return what the summary has, by name. Waits for devices. Another thread may add numbers."""
        found = reduce(_with, list(self._waiting), self._found)
        return {name: found[name] for name in self.shown if name in found}


def _with(found: dict[str, Any], value: Any) -> dict[str, Any]:
    number = value.number() if type(value) is Later else value
    count, total = found.get("count", 0) + 1, found.get("total", 0) + number
    smallest, largest = found.get("min", number), found.get("max", number)
    return {
        "count": count,
        "total": total,
        "mean": total / count,
        "first": found.get("first", number),
        "last": number,
        "min": smallest if number >= smallest or math.isnan(smallest) else number,
        "max": largest if number <= largest or math.isnan(largest) else number,
    }


class _OpenNames:
    """The names of the row that has not ended, and where it lies."""

    def __init__(self) -> None:
        self.x: int | None = None
        self._names: dict[str, None] = {}

    def add(self, names: Iterable[str], x: int | None, *, is_open: bool) -> dict[str, None]:
        """Add names of a row, which continues the open one if that lies there; return those whose row has ended."""
        before, given, continues = self._names, dict.fromkeys(names), x == self.x
        names = {**before, **given}
        self._names, self.x = ({} if not is_open else names if continues else given), x
        return names if not is_open else {} if continues else before


class _Corrected:
    """Numbers of a name whose summary is defined: W&B's largest, say, counts what rows had before their correction."""

    _MOST_ROWS = 4096  # that may still correct themselves

    def __init__(self) -> None:
        self.is_due = False  # whether W&B has counted a number that was corrected
        self._older: dict[str, Any] = {}  # the statistics of the rows before
        self._rows: dict[int, Any] = {}  # by serial

    def add(self, number: Any, serial: int, *, corrects: bool) -> None:
        self.is_due |= corrects
        self._rows[serial] = number
        if len(self._rows) > self._MOST_ROWS:
            self._older = _with(self._older, self._rows.pop(next(iter(self._rows))))

    def summary(self, shown: tuple[str, ...]) -> dict[str, Any]:
        """Return the summary, by name; nothing if W&B's is right, or has what is not computed here."""
        found = reduce(_with, self._rows.values(), self._older) if self.is_due else {}
        return {name: found[name] for name in shown} if found.keys() >= set(shown) else {}


class SummaryWrites:
    """The user's last writes into the summary: the user's threads add them, another one writes them again.

    So are the values of newer rows, if an older one is written after them: it waited for some rank, or corrects itself.

    Reads find what this rank logged last under each name, until the row of that call has ended. The user's threads add
    calls, and one other thread ends their rows. No thread waits for another one: a fork could have left a lock held. So
    a value is taken out of its own call, which a later call may have replaced meanwhile.
    """

    def __init__(self, axis: str | None = None) -> None:
        self._axis = axis  # the name under which the run has the positions of rows
        self.paths: Paths = {}  # of the names that are nested in the run
        self.definitions = Definitions(axis)
        # Of writes so far, and of actions that were put off. A call of `log` with this number follows all of them.
        self.count: int = 0
        self._numbers = itertools.count(1)
        # By the first name of their paths; only the user's threads change it.
        self._writes: dict[str, tuple[_Write, ...]] = {}
        self._replaced: dict[str, int] = {}  # by name: the number of the last write that a later row has replaced
        self._open = _OpenNames()
        # The newest plain value of each name, by the order of the calls, if rows are not written in it: with the serial
        # of its newest row; `None`: media, say.
        self._newest: dict[str, tuple[int, Any]] = {}
        self._corrected: dict[str, _Corrected] = {}  # of the names whose summary is defined
        self._replacing = _OpenNames()  # these and those with newer values, in the open row: W&B takes them at its end
        # By number, or by what they set: on a rank without a run, they are for the run that this rank may open yet.
        self._actions: dict[Any, tuple[int, Callable[[AnyRun], Any]]] = {}
        self._run: AnyRun | None = None
        self._write: Callable[[Any], None] | None = None
        self._calls: dict[str, _LoggedCall] = {}  # the last call of each name
        self._statistics: dict[str, Statistics] = {}  # of names whose summary is not the last value

    def follow(self, run: AnyRun) -> list[Callable[[], None]]:
        self._run = run
        if isinstance(run, NullRun):
            run.summary.note_by(lambda name, value: self.put_off(lambda run: run.summary.update({name: value}), name))
            return []
        summary: Any = getattr(run, "summary", None)
        written, read = wandb_private.SUMMARY_WRITTEN, wandb_private.SUMMARY_READ
        handlers: dict[str, interception.Handler] = {written: self._note, read: self._read}
        attributes = getattr(summary, "__dict__", {})  # other ways would ask wandb's process for a value
        known = [name for name in handlers if callable(attributes.get(name))]
        if written not in known:
            return []
        if self._write is not None:  # it has the rows of the lost run, but not these writes
            self._actions[0] = 0, lambda _: self._write_again(self._writes.copy(), 0)
        undo = [interception.intercept(summary, name, handlers[name]) for name in known]
        self._write = interception.original(summary, written)
        return undo

    def define(self, name: str, given: Mapping[str, Any]) -> None:
        self.definitions = self.definitions.followed_by(name, given, self.count)  # another thread reads it
        for one, statistics in self._statistics.items():
            statistics.shown = self.definitions.summary_of(one)

    def show(self, row: Mapping[str, Any], x: int | None) -> None:
        """Answer reads with the values of a call of `log` until its row, at position `x`, has ended."""
        row, defined = dict(row), dict[str, Statistics]()
        for name in list(row) if self.definitions.given else ():
            shown = self.definitions.summary_of(name)
            if shown == ("none",):
                del row[name]
            elif shown:
                defined[name] = self._statistics.setdefault(name, Statistics(shown))
                defined[name].add(row[name])
        if isinstance(self._run, NullRun):
            self._run.summary.show(row, self.paths, defined)
        else:
            self._calls.update(dict.fromkeys(row, _LoggedCall(x, row)))

    def _read(self, read: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        # `read` returns what wandb's own process has.
        logged = {name: call.row.get(name, _OVER) for name, call in self._calls.copy().items()}
        last = {name: value for name, value in logged.items() if value is not _OVER}
        found = {name: value for name, one in self._statistics.items() if name in last and (value := one.value())}
        shown = self.definitions.summary_of
        plain = {name: value for name, value in last.items() if name not in self._statistics or not shown(name)}
        return nested(known({**shown_values(plain), **found}), self.paths, read())

    def put_off(self, action: Callable[[AnyRun], Any], key: Any = None) -> None:
        """Carry out an action after the rows of the calls before it, and before those of the calls after it.

        It replaces the last one with this key.
        """
        number = next(self._numbers)
        self._actions.pop(key, None)
        self._actions[number if key is None else key] = number, action
        self.count = number

    def continue_from(self, former: SummaryWrites, run: AnyRun) -> None:
        """Do with a run what was put off on a rank without one, at the same place among the rows, yet to be written."""
        self.paths.update(former.paths)
        for number, action in former._actions.copy().values():
            self._numbers = itertools.count(number)
            self._do(partial(action, run))
        self._numbers, self.count = itertools.count(former.count + 1), former.count

    def act(self, follows: float | None) -> None:
        """Carry out the actions before a row; see `keep` for `follows`."""
        for key, (number, action) in self._actions.copy().items() if self._actions else ():
            if self._run and number <= (follows or 0) and self._actions.pop(key, None) is not None:
                self._do(partial(action, self._run))

    def _note(self, write: Callable[[Any], None], record: Any) -> None:
        if _restores():
            for item in record.update:
                item.key = self.paths.get(item.key[0], item.key)
            write(record)
            return
        number = next(self._numbers)
        for kind in ("update", "remove"):
            for item in getattr(record, kind):
                first, path = item.key[0], tuple(item.key)
                one = copy(record)
                one.update, one.remove = ([item], []) if kind == "update" else ([], [item])
                others = [other for other in self._writes.get(first, ()) if other.path[: len(path)] != path]
                self._writes[first] = (*others, _Write(number, path, one))
                for name, call in self._calls.copy().items():  # wandb has the value now, and all within it
                    if self.paths.get(name, (name,))[: len(path)] == path:
                        call.row.pop(name, None)
        self.count = number
        write(record)  # last: a row that is written before this has no effect, and one that is written later finds it

    def keep(
        self,
        row: Mapping[str, Any],
        follows: int | None,
        x: int | None,
        *,
        is_open: bool,
        corrects: bool = False,
        serial: int | None = None,
        joined: Mapping[str, int] | None = None,
    ) -> None:
        """Write again what a row has replaced that was just written, but ended before these writes.

        `follows`: how many writes precede the row's call of `log`; `None` for a row of other ranks, which has no place
        in the user's script and replaces all of them. `x`: the row's position. `is_open`: the row does not end with
        this call. `corrects`: the row was written before, and keeps the place that it had then. `serial`: of rows of
        several ranks, the larger the newer: what an older one has replaced is written again, too. `joined`: the serials
        of the last calls for its names, before which no other row is newer.
        """
        if serial is not None:
            names, shown = self._outdated(row, x, serial, joined or {}), self.definitions.summary_of
            for name, value in row.items() if self.definitions.given else ():
                if shown(name) and isinstance(value, (int, float)):
                    self._corrected.setdefault(name, _Corrected()).add(value, serial, corrects=corrects)
                    names.append(name)
            ended = self._replacing.add(names, x, is_open=is_open)
            right = {name: one.summary(shown(name)) for name, one in self._corrected.items() if name in ended}
            newest = {name: right.get(name) if shown(name) else self._newest[name][1] for name in ended}
            self._restore({name: value for name, value in newest.items() if value not in (None, {})})
        if corrects:
            self._write_again(self._first(row), 0)
        elif follows is None:
            self._replaced.update((name, self.count) for name in self._first(row) if name in self._writes)
        else:
            places = x, self._open.x
            ended = self._open.add(row, x, is_open=is_open)
            for name in ended:  # they are left to wandb
                if (call := self._calls.get(name)) is not None and call.x in places:
                    call.row.pop(name, None)
            for name, value in row.items() if is_open else ():  # the numbers of all ranks
                if (call := self._calls.get(name)) is not None and call.x == x and name in call.row:
                    call.row[name] = value
            if self._writes:
                self._write_again(self._first(ended), follows)

    def _outdated(self, row: Mapping[str, Any], x: int | None, serial: int, joined: Mapping[str, int]) -> list[str]:
        """Return the names of a row that have newer values; keep the other values of it."""
        values = row if x is None or self._axis is None else {self._axis: x, **row}
        outdated, last = list[str](), min(joined.values(), default=serial)
        for name, value in values.items():
            if name in self._newest and self._newest[name][0] > joined.get(name, last):
                outdated.append(name)
            else:
                self._newest[name] = serial, value if type(value) in PLAIN else None
        return outdated

    def _restore(self, values: Mapping[str, Any]) -> None:
        """Write values in place of those that a row has just left in the summary."""
        if values and self._run is not None and self._write is not None:
            with _restores.by(True):
                self._do(partial(self._run.summary.update, dict(values)))
            self._write_again(self._first(values), 0)

    def _first(self, names: Iterable[str]) -> Iterable[str]:
        """Return the first names of the paths of a row's names."""
        return dict.fromkeys([self.paths.get(name, (name,))[0] for name in names]) if self._writes else ()

    def _write_again(self, names: Iterable[str], follows: int) -> None:
        for name in names:
            if name in self._writes:
                done = self._replaced[name] = max(follows, self._replaced.get(name, 0))
                while later := [write for write in self._writes[name] if write.number > done]:
                    for write in later:
                        if self._write is not None:
                            self._do(partial(self._write, write.record))
                    done = later[-1].number  # the user may have written again meanwhile, before this

    def _do(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception:  # noqa: BLE001  # the run has ended, or wandb's process has; rows must still be written
            _log.debug("dist_wandb: the run could not be changed between two rows", exc_info=True)
