"""Reading runs, their rows and their sidecars: `read_runs`, and the files themselves, written by hand."""

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
from offline_runs import sidecar_record, write_rank
from record_files import Record, end, header, of_json, row, run, write_run
from stored import read_files, read_history, read_run, touch

import dist_wandb
from dist_wandb import ConfigurationError, LocalRun, MissingExtraError, ReadError, read_runs
from dist_wandb.wandb_files import reading
from dist_wandb.wandb_files.reading import TREND_LENGTH, history_of, joined, largest_step, trend_of
from dist_wandb.wandb_files.selection import by_rank
from dist_wandb.wandb_files.sidecar import read_sidecar
from dist_wandb.wandb_files.small_files import Directory

pytestmark = pytest.mark.newest  # wandb 0.31 is the first that reads its own files


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
    begun = run("b", display_name="<b>&")
    begun.run.start_time.FromSeconds(1_700_000_001)
    write_run(tmp_path / "a", "b", records=[header(), begun, row(0), row(1), end()])
    runs = dist_wandb.read_runs([str(tmp_path), tmp_path / "a"])  # in the order of their start
    assert repr(runs).splitlines()[1:] == [" <dist_wandb.LocalRun 'b' '<b>&' finished, 2 rows>]"]
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


def test_history_has_the_requested_columns_and_the_axis_and_none_where_a_row_lacks_a_value(shared: LocalRun) -> None:
    assert shared.history("loss", writer="rank-0") == {"global_step": [0, 1, 2], "loss": [1.0, 0.0, -1.0]}
    assert shared.history("rank-10/loss") == {"global_step": [0], "rank-10/loss": [10.0]}
    columns = shared.history(["rank-2/loss"], writer=2)
    assert columns["global_step"] == [0, 1]
    assert columns["rank-2/loss"][0] == 2.0
    assert math.isnan(columns["rank-2/loss"][1])
    assert shared.history(["rank-*/loss", "never"], writer=10) == {
        "global_step": [0], "never": [None], "rank-10/loss": [10.0]
    }  # fmt: skip
    columns = shared.history(["rank-*/loss", "never"])
    assert columns["global_step"] == [0, 1, 2, 0, 1, 0]
    assert columns["rank-0/loss"] == [0.5, 0.5, 0.5, None, None, None]
    assert "loss" not in columns
    assert set(shared.history(writer=0)) == {"global_step", "loss", "rank-0/loss"}
    assert shared.history("_step", writer=0)["_step"] == [0, 1, 2]
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


def test_the_summary_has_last_values_and_values_set_by_the_script(tmp_path: Path) -> None:
    summary = of_json({"type": "summary", "summary": {"update": {"best": 5, "gone": 1}}})
    removal = of_json({"type": "summary", "summary": {}})
    removal.summary.remove.add().key = "gone"
    write_run(
        tmp_path, records=[header(), run(), row(0, {"loss": 2.0}), summary, row(1, {"loss": "Infinity"}), removal]
    )
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


def test_data_frames_are_made_of_the_columns_by_libraries_that_must_be_installed(
    shared: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda columns: ("pandas", columns)))
    monkeypatch.setitem(
        sys.modules, "polars", SimpleNamespace(DataFrame=lambda columns, **options: ("polars", columns, options))
    )
    assert shared.to_pandas("loss", writer=0) == ("pandas", shared.history("loss", writer=0))
    assert shared.to_polars("loss")[:2] == ("polars", shared.history("loss"))
    for library in ("pandas", "polars"):
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
    many = [3, 1, 3.0, math.nan, 3, *range(10_000)]
    assert history_of(many, counted=True).counts[:2] == ((3, 4), (1, 2))
    assert len(history_of(many, counted=True).counts) <= 4096
    assert history_of(many).counts == ()
    assert trend_of([1.7e308] * 4 * TREND_LENGTH) == pytest.approx([1.7e308] * TREND_LENGTH)  # does not overflow


def test_names_of_ranks_follow_the_plain_name() -> None:
    names = ["rank-10/val/acc", "a", "worker-1-rank-2/a", "rank-2/val/acc", "val/acc", "rank-1/only", "z"]
    assert by_rank(names) == [
        "a", "worker-1-rank-2/a", "rank-1/only", "val/acc", "rank-2/val/acc", "rank-10/val/acc", "z"
    ]  # fmt: skip


# --- single files -----------------------------------------------------------------------------------------------------


def file_of(top: Path, *records: Record, run_id: str = "abc") -> Path:
    return write_run(top, run_id, records=records) / f"run-{run_id}.wandb"


def history(**item: Any) -> Record:
    return of_json({"type": "history", "history": {"item": item}})


def test_the_last_run_record_and_all_config_records_hold(tmp_path: Path) -> None:
    first = run("abc", config={"lr": 0.1, "net": {"a": 1}, "_wandb": {}})
    config = of_json({"type": "config", "config": {"update": {"net": {"b": 2}}}})
    renamed = run("abc", display_name="new", job_type="eval")
    renamed.run.tags.append("x")
    found = read_run(file_of(tmp_path, header(), first, config, renamed))
    assert (found.name, found.job_type, found.tags) == ("new", "eval", ("x",))
    assert found.config == {"lr": 0.1, "net": {"b": 2}}


def test_only_numbers_of_the_user_are_metrics_up_to_a_number_and_patterns_select_them(
    tmp_path: Path, limit: Limit
) -> None:
    values = {"loss": 1, "_step": 0, "_runtime": 0.5, "text": "abc", "flag": True, "none": None, "list": [1, 2]}
    values |= {"image._type": "image-file", "image.width": 28, "image_count": 3, "kind._type": 4}
    found = read_run(file_of(tmp_path, run(), history(**values)))
    assert list(found.metrics) == ["image_count", "kind._type", "loss"]
    limit(reading, MOST_METRICS=3)
    path = file_of(tmp_path, run(), history(**{f"m{number}": number for number in range(5)}, last=1), run_id="many")
    for metrics, names in ((("*",), ["last", "m0", "m1"]), (("last", "m4"), ["last", "m4"])):
        found = read_run(path, metrics=metrics)
        assert (list(found.metrics), found.has_more_metrics) == (names, len(names) == 3)
    assert read_run(file_of(tmp_path, run(), history(**{"x" * 1001: 1, "y": 1}), run_id="long")).has_more_metrics


def test_a_config_that_is_too_large_is_left_out_in_part_and_too_many_values_are_refused(
    tmp_path: Path, limit: Limit
) -> None:
    limit(reading, _LARGEST_CONFIG=100, MOST_VALUES=9, _BETWEEN_CHECKS=2)
    updates = [{name: "x" * 40} for name in "abc"] + [{"a": 1}, {"d": ["x" * 20] * 2}]
    configs = [of_json({"type": "config", "config": {"update": update}}) for update in updates]
    path = file_of(tmp_path, run(), *configs, *(history(loss=number, acc=1) for number in range(6)))
    _, errors = read_files([path])
    assert str(errors[path]).endswith("abc.wandb: Its metrics have more than 9 values. Request fewer names.")
    assert read_run(path, metrics=()).metrics == {}
    found = read_run(path, metrics=["loss"])
    assert (found.rows, sorted(found.config), found.config["a"]) == (6, ["a", "b", "d"], 1)
    assert found.problems == ("1 values of its config are left out because it is too large",)


def test_rows_without_a_run_record_are_shown_under_the_id_of_the_file(tmp_path: Path) -> None:
    found = read_run(file_of(tmp_path, header(), history(a=1), run_id="x-1"))
    assert (found.run_id, found.rows) == ("x-1", 1)
    assert "run record is lost" in found.problems[0]


def test_a_file_that_is_no_run_is_refused_with_its_path_and_reason(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match=r"x: the \.wandb file cannot be read: File name too long\.$"):
        read_history(tmp_path / ("x" * 300))
    with pytest.raises(ReadError, match=r"none.wandb: is not a file"):
        read_run(tmp_path / "none.wandb")
    with pytest.raises(ReadError, match=r"run-empty.wandb: is empty: the run was killed at its start"):
        read_run(touch(tmp_path / "offline-run-empty" / "run-empty.wandb"))
    with pytest.raises(ReadError, match=r"run-new.wandb: does not contain a run yet \(\d+ bytes\)"):
        read_run(file_of(tmp_path, header(), run_id="new"))
    hurt = file_of(tmp_path, header(), run_id="hurt")
    hurt.write_bytes(hurt.read_bytes()[:-1] + b"?")
    with pytest.raises(ReadError, match=r"its \d+ bytes contain no readable data of a run: skipped corrupt"):
        read_run(hurt)


def test_history_has_every_row_in_order_and_the_largest_step_is_an_exact_integer(tmp_path: Path) -> None:
    path = file_of(tmp_path, run(), history(_step=0, loss="NaN", text="ok"), history(_step=1, loss="-Infinity"), end())
    first, second = read_history(path)
    assert math.isnan(first.pop("loss"))
    assert first == {"_step": 0, "text": "ok"}
    assert second == {"_step": 1, "loss": -math.inf}
    values = ["NaN", "Infinity", "-Infinity", 1e300, 10**400, "7", None, [8], True, 4, 5.0, -3]
    rows = (history(x=value, other=9) for value in values)
    path = file_of(tmp_path, run(), *rows, history(other=10), run_id="steps")
    assert (largest_step(path, "x"), largest_step(path, "missing")) == (5, None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ('{"format": 1', "delimiter"),
        ("[]", "not a JSON object"),
        ('{"format": 1}', "'run_id' is missing"),
        ({"format": 2}, "format 2, while this version reads 1"),
        ({"label": 7}, "label=7, which is not of type str or None"),
        ({"global_rank": True}, "global_rank=True, which is not of type int"),
        ({"primary": 1}, "primary=1, which is not of type bool"),
        ({"world_size": None}, "world_size=None, which is not of type int"),
        ({"world_size": 10**10}, "world_size=10000000000, which is not between 0 and 1000000"),
        ({"local_rank": -1}, "local_rank=-1, which is not between"),
        ({"world_size": 1}, "rank 1 of 1"),
        ({"label": "rank\0-1"}, "label='rank\\x00-1', which dist_wandb never writes"),
        ({"label": "rank\x1b-1"}, "label='rank\\x1b-1', which dist_wandb never writes"),
        ({"group": "x" * 1001}, "group='xxxxx"),
        ({"run_mode": "\x1b]0;x"}, "run_mode='\\x1b]0;x', which is not one of auto, shared, new"),
        ({"rank_scope": "\x9b2J"}, "rank_scope='\\x9b2J', which is not one of global, worker"),
        ({"base_id": "a\x1b[2J"}, "base_id='a\\x1b[2J', which dist_wandb never writes"),
        ({"format": "x" * 10_000}, "...xxxxxxxxxxxxx', while this version reads 1"),
    ],
)
def test_a_malformed_sidecar_is_a_problem_of_a_run_that_is_still_shown(
    tmp_path: Path, changes: str | dict[str, Any], reason: str
) -> None:
    path = file_of(tmp_path, run(), history(a=1))
    text = changes if isinstance(changes, str) else json.dumps(sidecar_record(**changes))
    (path.parent / "dist-wandb.json").write_text(text)
    with pytest.raises(ReadError) as caught:
        read_sidecar(Directory.at(path.parent))
    assert reason in str(caught.value)
    found = read_run(path)
    assert (found.rows, found.sidecar, found.problems) == (1, None, (str(caught.value),))
