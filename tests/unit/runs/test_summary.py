"""The user's writes into the summary keep their place among the rows, which are written later."""

from __future__ import annotations

from typing import Any

import pytest
from wandb.sdk.wandb_summary import Summary

from dist_wandb.payloads.scalars import nested
from dist_wandb.runs.null_run import NullRun
from dist_wandb.runs.summary import SummaryWrites


class Written(Summary):
    """wandb's summary of a run below."""

    def __init__(self, run: Run) -> None:
        super().__init__(lambda: run.values)
        self._set_update_callback(run.write)


class Run:
    """A run with wandb's summary, whose values are here; a row replaces them as in wandb."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.records: list[Any] = []
        self.failure: type[Exception] | None = None  # of the user's next write
        self.summary = Written(self)

    def write(self, record: Any) -> None:
        if self.failure is not None:
            raise self.failure(record)
        self.records.append(record)
        for item in (*record.update, *record.remove):
            *parents, name = item.key
            values = self.values
            for parent in parents:
                values = values.setdefault(parent, {})
            if item in record.update:
                values[name] = item.value
            else:
                values.pop(name, None)


class Script:
    """A script whose rows are written later."""

    def __init__(self, axis: str | None = None) -> None:
        run: Any = Run()
        self.run = run
        self.axis = axis
        self.writes = SummaryWrites(axis)
        self.writes.follow(run)

    @property
    def summary(self) -> Any:
        return self.run.summary

    @property
    def values(self) -> dict[str, Any]:
        return self.run.values  # type: ignore[no-any-return]

    def log(self, **row: Any) -> tuple[dict[str, Any], int]:
        return row, self.writes.count

    def write(self, *calls: tuple[dict[str, Any], int | None], x: int | None = 0, **place: Any) -> None:
        for row, follows in calls:
            self.writes.act(follows)
            axis = {} if self.axis is None or x is None else {self.axis: x}
            self.values.update(nested({**row, **axis}, self.writes.paths, self.values))
            self.writes.keep(row, follows, x, **{"is_open": False, **place})


@pytest.fixture
def script() -> Script:
    return Script()


def test_a_row_of_a_later_call_replaces_it(script: Script) -> None:
    first = script.log(loss=0.5)
    script.summary.update({"loss": 9, "best": 1})
    second = script.log(loss=0.4)
    script.write(first, second)
    assert script.values == {"loss": 0.4, "best": 1}


def test_rows_may_be_written_in_another_order(script: Script) -> None:
    first = script.log(loss=0.5)
    script.summary["loss"] = 9
    script.write(script.log(acc=1), first)
    assert script.values == {"loss": 9, "acc": 1}


def test_parts_of_a_value_are_written_again_in_their_order(script: Script) -> None:
    script.write(script.log(a={"b": 1, "c": 1}))
    call = script.log(a={"b": 2, "c": 2})
    script.summary["a"]["b"] = 5
    script.summary["a"]["c"] = 6
    del script.summary["a"]["b"]
    script.write(call)
    assert script.values == {"a": {"c": 6}}
    call = script.log(a={"b": 3, "c": 3})
    script.summary["a"] = {"d": 1}
    script.write(call)
    assert script.values == {"a": {"d": 1}}


def test_rows_and_writes_of_nested_values_are_kept_in_order(script: Script) -> None:
    script.writes.paths.update({"a.b": ("a", "b"), "a.c": ("a", "c")})
    first = script.log(**{"a.b": 2, "a.c": 2})
    script.writes.show(first[0], 0)
    assert dict(script.summary)["a"]["c"] == 2
    script.summary["a"]["b"] = 5
    assert dict(script.summary["a"]) == {"b": 5, "c": 2}
    script.write(first)
    assert script.values == {"a": {"b": 5, "c": 2}}
    script.summary["a"] = {"d": 1}
    assert dict(script.summary["a"]) == {"d": 1}
    script.write(script.log(**{"a.b": 3}))
    assert script.values == {"a": {"d": 1, "b": 3}}


def test_a_row_that_is_left_open_replaces_what_was_written_before_its_end(script: Script) -> None:
    """As in wandb, where a row with a step ends with the next step."""
    first = script.log(loss=0.5)
    script.summary["loss"] = 9
    second = script.log(acc=1)
    script.summary["acc"] = 8
    script.write(first, x=0, is_open=True)
    script.run.values["loss"] = 0.5  # the end of the first row
    script.write(second, x=1, is_open=True)
    assert script.values["loss"] == 0.5


def test_a_row_that_is_continued_has_not_ended(script: Script) -> None:
    calls = script.log(loss=0.5), script.log(acc=1)
    script.summary["loss"] = 9
    script.write(*calls, x=0, is_open=True)
    assert script.values == {"loss": 0.5, "acc": 1}
    script.write(script.log(acc=2), x=1)
    assert script.values == {"loss": 0.5, "acc": 2}


def test_a_row_that_was_left_open_and_has_ended_does_not_replace_later_writes(script: Script) -> None:
    first, second = script.log(loss=0.5), script.log(acc=1)
    script.summary["loss"] = 9
    script.write(first, x=0, is_open=True)
    script.run.values["loss"] = 0.5
    script.write(second, x=1, is_open=True)
    assert script.values == {"loss": 9, "acc": 1}


def test_a_corrected_row_keeps_its_place(script: Script) -> None:
    first = script.log(loss=0.5)
    script.summary["loss"] = 9
    script.write(first)
    script.write(({"loss": 0.6}, None), corrects=True)
    assert script.values == {"loss": 9}
    script.write(script.log(loss=0.4))
    script.write(({"loss": 0.3}, None), corrects=True)
    assert script.values == {"loss": 0.3}


def test_another_run_in_its_place_gets_all_writes(script: Script) -> None:
    script.summary.update({"best": 1, "loss": 9})
    script.run = Run()
    script.writes.follow(script.run)
    script.write(script.log(acc=1))
    assert script.values == {"acc": 1, "best": 1, "loss": 9}
    script.write(script.log(loss=0.5))
    script.run = Run()
    script.writes.follow(script.run)
    script.write(script.log(acc=2))
    assert script.values == {"acc": 2, "best": 1}  # a row has replaced the loss


def test_an_error_of_wandb_is_the_users_but_not_that_of_a_row(script: Script) -> None:
    call = script.log(loss=0.5)
    script.run.failure = OSError
    with pytest.raises(OSError, match="loss"):
        script.summary["loss"] = 9
    script.write(call)
    assert script.values == {"loss": 0.5}


def test_newer_values_are_written_again_after_an_older_row() -> None:
    """Once that row has ended, unless the user has written something else meanwhile."""
    script = Script("global_step")
    script.writes.paths["a.b"] = "a", "b"
    script.writes.define("best", {"summary": "max"})
    newer = {"loss": 0.1, "a.b": 3, "best": 1, "lr": 0.5, "table": object()}
    script.write((newer, 0), x=3, serial=7)
    script.summary["lr"] = 0.25
    older = {"loss": 0.2, "a.b": 2, "best": 4, "lr": 1, "table": None, "text": "a"}
    script.write((older, 0), x=2, serial=5, is_open=True)
    assert script.values["loss"] == 0.2, "wandb writes it when its row ends"
    script.write(({}, None), x=None, serial=0)
    expected = {"loss": 0.1, "a": {"b": 3}, "best": 4, "lr": 0.25, "table": None, "text": "a", "global_step": 3}
    assert script.values == expected
    script.write(({"loss": 0.3}, 1), x=1, serial=5, corrects=True)
    assert script.values == expected
    script.write(({"loss": 0.4}, 1), x=1, serial=8)
    assert script.values == {**expected, "loss": 0.4, "global_step": 1}, "the user's step goes back"


@pytest.mark.parametrize("run", [NullRun(), object()])
def test_a_run_without_wandbs_summary_is_left_alone(run: Any) -> None:
    writes = SummaryWrites()
    assert not writes.follow(run)
    writes.keep({"loss": 0.5}, 0, 0, is_open=False)
    assert writes.count == 0


def test_reads_find_what_was_logged_or_written_last_until_its_row_has_ended(script: Script) -> None:
    shown, calls = script.writes.show, 3
    for step in range(calls):
        shown({"loss": float(step), f"own/{step}": 1}, step)
    assert script.summary["loss"] == calls - 1
    script.summary["loss"] = 9
    assert script.summary["loss"] == 9
    shown({"loss": 0.5}, calls)
    script.write(({"loss": 0.1, "own/0": 7}, 0), x=0)
    assert (script.summary["loss"], script.summary["own/0"], script.summary["own/1"]) == (0.5, 7, 1)
    script.write(({"loss": 0.25}, 1), x=calls)
    assert (script.summary["loss"], script.summary["own/1"]) == (0.25, 1)


def test_reads_lack_what_a_definition_keeps_out_of_the_summary() -> None:
    script = Script()
    script.writes.define("hidden", {"summary": "none"})
    script.writes.define("best", {"summary": "max"})
    script.writes.show({"hidden": 1.0, "best": "text", "loss": 2.0}, 0)
    assert dict(script.summary) == {"loss": 2.0}
    script.writes.define("loss", {"summary": "max"})  # after it was logged: wandb's answer is not known here
    assert dict(script.summary) == {"loss": 2.0}
    peer, writes = NullRun(), SummaryWrites()
    writes.follow(peer)
    writes.define("hidden", {"summary": "none"})
    writes.show({"hidden": 1.0, "loss": 2.0}, 0)
    assert dict(peer.summary) == {"loss": 2.0}
    assert peer.summary.get("hidden", 0) == 0


def test_a_defined_summary_does_not_count_what_was_corrected() -> None:
    script = Script()
    script.writes.paths["val.acc"] = ("val", "acc")
    script.writes.define("loss", {"summary": "max,mean"})
    script.writes.define("val.acc", {"summary": "min"})
    script.writes.define("best", {"summary": "best,max"})

    def write(serial: int, row: dict[str, Any], wandbs: dict[str, Any], **place: Any) -> None:
        script.values.update(wandbs)  # what wandb's process makes of the row
        script.writes.keep(row, 0, serial, serial=serial, **{"is_open": False, **place})

    wrong = {"loss": {"max": 9, "mean": 9}, "val": {"acc": {"min": 1}}, "best": {"max": 7}}
    write(1, {"loss": 9, "val.acc": 1, "best": 1}, wrong)
    write(2, {"loss": 1}, {"loss": {"max": 9, "mean": 5}})
    assert not script.run.records, "nothing was corrected"
    write(1, {"loss": 3, "val.acc": 2, "best": 2}, wrong, corrects=True)
    assert script.values == {"loss": {"max": 3, "mean": 2}, "val": {"acc": {"min": 2}}, "best": {"max": 7}}
    write(3, {"loss": 5}, {}, is_open=True)
    write(4, {"other": 1}, {"loss": {"max": 9, "mean": 6}})  # the row before has ended
    assert script.values["loss"] == {"max": 5, "mean": 3}
    writes = len(script.run.records)
    write(5, {"other": 1}, {})
    assert len(script.run.records) == writes, "only after rows that wandb's process has counted"
