"""Rows with values that W&B cannot write: the rest of the row is not lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import wandb

from dist_wandb.job.topology import Topology
from dist_wandb.payloads.cells import Picture
from dist_wandb.payloads.gathers import MergedImages
from dist_wandb.runs.writer import RunWriter
from dist_wandb.settings.plan import plan_run


class Picky:
    """A run that raises before it accepts anything, as wandb does; a row stays open until it is committed."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.calls = 0
        self.error: Exception | None = None
        self._open: dict[str, Any] = {}

    def log(self, row: dict[str, Any], commit: bool | None = None) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error
        json.dumps({name: str(value) if isinstance(value, wandb.Html) else value for name, value in row.items()})
        if any(isinstance(value, wandb.Html) for value in row.values()):
            raise OSError(28, "No space left on device")
        self._open |= row
        if commit is not False:
            self.rows.append(self._open)
            self._open = {}


@pytest.fixture
def run() -> Picky:
    return Picky()


def writer(run: Any) -> RunWriter:
    return RunWriter(run, plan_run(Topology.single(), "auto", "global", "base"), "global_step", 3)


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr either")


@pytest.mark.parametrize("commit", [None, True])
def test_values_that_cannot_be_written_become_text_in_one_row(
    run: Picky, caplog: pytest.LogCaptureFixture, commit: bool | None
) -> None:
    holds_itself: list[Any] = []
    holds_itself.append(holds_itself)
    odd = {"bytes": b"\xff", "self": holds_itself, "error": ValueError("x"), "none": None, "list": [1]}
    rows = writer(run)
    for step in range(2):
        rows.write({"loss": 0.5, **odd}, step, commit=commit)
    texts = {"bytes": r"b'\xff'", "self": "[[...]]", "error": "ValueError('x')", "none": None, "list": [1]}
    assert run.rows == [{"loss": 0.5, **texts, "global_step": step} for step in range(2)]
    for name in ("bytes", "self", "error"):
        assert caplog.text.count(f"W&B cannot write {name!r} on rank 3, of type") == 1
    assert "Traceback" not in caplog.text


def test_an_uncommitted_row_stays_uncommitted(run: Picky) -> None:
    rows = writer(run)
    rows.write({"odd": {1, 2}, "a": 1.0}, None, commit=False)
    assert run.rows == []
    rows.write({"b": 2.0}, 5)
    assert run.rows == [{"odd": "{1, 2}", "a": 1.0, "b": 2.0, "global_step": 5}]


def test_media_and_values_without_a_repr_are_left_out(run: Picky, caplog: pytest.LogCaptureFixture) -> None:
    page = wandb.Html("<p>", inject=False)
    writer(run).write({"loss": 0.5, "page": page, "pages": [page], "odd": Unspeakable()}, 7)
    assert run.rows == [{"loss": 0.5, "global_step": 7}]
    message = "W&B cannot write 'page' on rank 3, of type Html: OSError(28, 'No space left on device'). It is left out"
    assert message in caplog.text


def test_an_error_that_no_value_causes_is_raised(run: Picky, caplog: pytest.LogCaptureFixture) -> None:
    run.error = RuntimeError("the run is finished")
    for row in ({"loss": 0.5}, {"loss": 0.5, "list": [1]}):
        with pytest.raises(RuntimeError, match="the run is finished"):
            writer(run).write(row, 7)
    assert caplog.text == ""


def test_changing_names_do_not_cause_endless_warnings(run: Picky, caplog: pytest.LogCaptureFixture) -> None:
    rows = writer(run)
    for step in range(50):
        rows.write({f"odd {step}": object()}, step)
    assert len(run.rows) == 50
    assert caplog.text.count("W&B cannot write") == 11
    assert caplog.text.count("Further names are not reported.") == 1


def test_without_a_directory_for_pictures_the_rest_of_the_row_is_written(
    run: Picky, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    picture = Picture(b"not a PNG", {}, {})
    a_writer = writer(run)
    a_writer.write({"loss": 0.5, "pictures": MergedImages([picture])}, 7)
    assert run.rows == [{"loss": 0.5, "global_step": 7}]
    assert a_writer.lost.total() == 1


def test_a_row_of_nothing_that_can_be_written_is_left_out(run: Picky) -> None:
    a_writer = writer(run)
    a_writer.write({"page": wandb.Html("<p>")}, 6)
    a_writer.write({"loss": 0.5}, 7)
    assert run.rows == [{"loss": 0.5, "global_step": 7}]
    assert a_writer.lost.total() == 1
