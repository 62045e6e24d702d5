"""`read_runs` on record files written by hand, with W&B's own reader."""

from __future__ import annotations

import json
import logging
import math
import sys
from operator import methodcaller
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from limits import Limit
from offline_runs import write_rank
from record_files import Record, end, header, new_record, row, run, write_run

import dist_wandb
from dist_wandb import ConfigurationError, LocalRun, MissingExtraError, ReadError, read_runs
from dist_wandb.wandb_files import reading
from dist_wandb.wandb_files.reading import history_of, joined
from dist_wandb.wandb_files.selection import by_rank

pytestmark = pytest.mark.newest  # wandb 0.31 is the first that reads its own files


def summary(**values: Any) -> Record:
    record = new_record()
    for name, value in values.items():
        update = record.summary.update.add()
        update.key, update.value_json = name, json.dumps(value)
    return record


@pytest.fixture
def shared(tmp_path: Path) -> LocalRun:
    """A shared run of three ranks: rank 0 is the primary, rank 2 failed, rank 10 was killed."""
    write_rank(tmp_path, 10, row(0, {"rank-10/loss": 10.0}), ended=None)
    write_rank(tmp_path, 2, row(0, {"rank-2/loss": 2.0}), row(1, {"rank-2/loss": "NaN"}), ended=3)
    write_rank(tmp_path, 0, *(row(step, {"loss": 1.0 - step, "rank-0/loss": 0.5}) for step in range(3)))
    (found,) = read_runs(tmp_path)
    return found


def test_runs_are_shown_in_a_line_and_as_a_table(shared: LocalRun, tmp_path: Path) -> None:
    assert repr(shared) == "<dist_wandb.LocalRun 'exp' finished, 6 rows>"
    assert max(map(len, map(repr, (*shared.writers, *shared.metrics.values())))) < 200
    html_of = methodcaller("_repr_html_")
    write_run(tmp_path, "b", display_name="<b>&")
    runs = read_runs(tmp_path)
    assert repr(runs).splitlines()[1:] == [" <dist_wandb.LocalRun 'b' '<b>&' finished, 3 rows>]"]
    assert "<td>b</td><td>&lt;b&gt;&amp;</td><td></td><td>finished</td>" in html_of(runs)
    assert "<td>exp</td>" in html_of(shared)


def test_the_files_of_a_shared_run_are_one_run(shared: LocalRun) -> None:
    assert (shared.id, shared.project, shared.labels) == ("exp", "tests", ("rank-0", "rank-2", "rank-10"))
    assert [(w.rank, w.node, w.primary, w.state, w.rows) for w in shared.writers] == [
        (0, 0, True, "finished", 3),
        (2, 0, False, "failed", 2),
        (10, 0, False, "unfinished", 1),
    ]
    assert (shared.state, shared.exit_code, shared.rows) == ("finished", 0, 6)
    assert shared.config == {"lr": 0.1, "rank": 0}  # the primary's holds
    assert shared.files == tuple(w.path for w in shared.writers)
    assert shared.started == "2023-11-14T22:13:20Z"
    assert {"loss", "rank-0/loss", "rank-2/loss", "rank-10/loss"} <= shared.metrics.keys()
    assert (shared.metrics["loss"].count, shared.metrics["rank-2/loss"].not_finite) == (3, 1)


def test_a_shared_run_without_its_primary_ends_as_the_worst_of_its_writers(tmp_path: Path) -> None:
    write_rank(tmp_path, 1)
    write_rank(tmp_path, 2, ended=4)
    (found,) = read_runs(tmp_path)
    assert (found.state, found.exit_code) == ("failed", 4)
    write_rank(tmp_path, 3, row(0), ended=None)
    (found,) = read_runs(tmp_path)
    assert (found.state, found.exit_code) == ("unfinished", None)


def test_history_has_the_requested_columns_and_the_axis(shared: LocalRun) -> None:
    assert shared.history("loss", writer="rank-0") == {"global_step": [0, 1, 2], "loss": [1.0, 0.0, -1.0]}
    assert shared.history("rank-10/loss") == {"global_step": [0], "rank-10/loss": [10.0]}
    columns = shared.history(["rank-2/loss"], writer=2)
    assert columns["global_step"] == [0, 1]
    assert columns["rank-2/loss"][0] == 2.0
    assert math.isnan(columns["rank-2/loss"][1])


def test_history_by_patterns_has_none_where_a_row_lacks_a_value(shared: LocalRun) -> None:
    columns = shared.history(["rank-*/loss", "never"])
    assert columns["global_step"] == [0, 1, 2, 0, 1, 0]
    assert columns["rank-0/loss"] == [0.5, 0.5, 0.5, None, None, None]
    assert columns["rank-10/loss"] == [None, None, None, None, None, 10.0]
    assert columns["never"] == [None] * 6
    assert "loss" not in columns


def test_history_leaves_out_names_of_wandb_unless_requested(shared: LocalRun) -> None:
    assert set(shared.history(writer=0)) == {"global_step", "loss", "rank-0/loss"}
    assert shared.history("_step", writer=0)["_step"] == [0, 1, 2]


def test_an_unknown_writer_is_an_error(shared: LocalRun) -> None:
    with pytest.raises(ConfigurationError, match=r"no writer 'rank-1'.*'rank-10'"):
        shared.history("loss", writer="rank-1")


def test_history_of_too_many_values_is_refused(shared: LocalRun, limit: Limit) -> None:
    limit(reading, MOST_VALUES=8)
    assert len(shared.history("loss", writer=0)["loss"]) == 3
    with pytest.raises(ReadError, match="Request fewer names"):
        shared.history()
    limit(reading, MOST_METRICS=1)
    with pytest.raises(ReadError, match="More than 1 names match"):
        shared.history("rank-*")


def test_the_parts_of_a_resumed_run_follow_each_other(tmp_path: Path) -> None:
    later, before = header(), header()
    again = run("exp", config={"lr": 0.2})
    again.run.start_time.FromSeconds(1_800_000_000)
    write_run(tmp_path, records=[later, again, row(3, {"loss": 3.0}), end()], stamp="20250101_000000")
    write_run(tmp_path, records=[before, run("exp"), row(1, {"loss": 1.0})], stamp="20260101_000000")
    write_run(tmp_path / "other", "other")
    found, other = sorted(read_runs(tmp_path), key=lambda each: each.id)
    assert (found.state, found.config, other.id) == ("finished", {"lr": 0.2}, "other")
    assert found.history("loss") == {"_step": [1, 3], "loss": [1.0, 3.0]}
    assert found.metrics["loss"].trend == (1.0, 3.0)


def test_runs_are_sorted_by_their_start(tmp_path: Path) -> None:
    for run_id, seconds in (("b", 3), ("a", 2), ("c", 1)):
        begun = run(run_id)
        begun.run.start_time.FromSeconds(seconds)
        write_run(tmp_path, run_id, records=[header(), begun, end()])
    assert [found.id for found in dist_wandb.read_runs(str(tmp_path))] == ["c", "a", "b"]
    assert [found.id for found in read_runs([tmp_path, tmp_path / "wandb"])] == ["c", "a", "b"]


def test_the_summary_has_last_values_and_values_set_by_the_script(tmp_path: Path) -> None:
    records = [header(), run(), row(0, {"loss": 2.0}), summary(best=5, gone=1), row(1, {"loss": "Infinity"})]
    removal = new_record()
    removal.summary.remove.add().key = "gone"
    write_run(tmp_path, records=[*records, removal])
    (found,) = read_runs(tmp_path)
    assert found.summary == {"loss": math.inf, "global_step": 1, "best": 5}


def test_an_unreadable_file_is_reported_without_effect_on_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_run(tmp_path, "good")
    (write_run(tmp_path, "empty") / "run-empty.wandb").write_bytes(b"")
    errors: list[ReadError] = []
    assert [found.id for found in read_runs(tmp_path, report=errors.append)] == ["good"]
    assert ["is empty" in str(error) for error in errors] == [True]
    with caplog.at_level(logging.WARNING, "dist_wandb"):
        read_runs(tmp_path)
    assert caplog.text.count("is empty") == 1
    with pytest.raises(ReadError, match="No W&B run was found below"):
        read_runs(tmp_path / "wandb" / "offline-run-20260101_000000-good" / "files")


def test_data_frames_are_made_of_the_columns(shared: LocalRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda columns: ("pandas", columns)))
    monkeypatch.setitem(
        sys.modules, "polars", SimpleNamespace(DataFrame=lambda columns, **options: ("polars", columns, options))
    )
    assert shared.to_pandas("loss", writer=0) == ("pandas", shared.history("loss", writer=0))
    assert shared.to_polars("loss")[:2] == ("polars", shared.history("loss"))


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_library_that_is_not_installed_is_named(
    library: str, shared: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)  # as if it could not be found
    with pytest.raises(MissingExtraError, match=f"pip install {library}"):
        getattr(shared, f"to_{library}")("loss")


def test_statistics_of_parts_are_those_of_all_values() -> None:
    found = joined([history_of([1.0, math.nan, 5.0]), history_of([-2.0] * 600)])
    assert (found.count, found.not_finite, found.last, found.smallest, found.largest) == (603, 1, -2.0, -2.0, 5.0)
    assert found.trend[0] != -2.0
    assert set(found.trend[-140:]) == {-2.0}
    assert len(found.trend) <= 260
    counted = joined([history_of([3.0, 1.0, 3.0], counted=True), history_of([1.0] * 4, counted=True)])
    assert counted.counts == ((1.0, 5), (3.0, 2))


def test_names_of_ranks_follow_the_plain_name() -> None:
    names = ["rank-10/val/acc", "a", "worker-1-rank-2/a", "rank-2/val/acc", "val/acc", "rank-1/only", "z"]
    assert by_rank(names) == [
        "a", "worker-1-rank-2/a", "rank-1/only", "val/acc", "rank-2/val/acc", "rank-10/val/acc", "z"
    ]  # fmt: skip
