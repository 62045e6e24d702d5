"""Read runs, their rows and their sidecars."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from limits import Limit
from offline_runs import sidecar_record
from record_files import content_of, of_json
from stored import read_files, read_history, read_run, touch

from dist_wandb.errors import ReadError
from dist_wandb.wandb_files import reading
from dist_wandb.wandb_files.reading import largest_step
from dist_wandb.wandb_files.sidecar import read_sidecar
from dist_wandb.wandb_files.small_files import Directory

WriteRun = Callable[..., Path]

HEADER = {"type": "header", "header": {}}
RUN = {"type": "run", "run": {"run_id": "abc", "display_name": "night", "project": "digits", "run_group": "sweep"}}
SIDECAR = sidecar_record()


def history(**item: Any) -> dict[str, Any]:
    return {"type": "history", "history": {"item": item}}


def ended(exit_code: int = 0) -> dict[str, Any]:
    return {"type": "exit", "exit": {"exit_code": exit_code}}


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Return a function that writes a run file with records."""

    def write(*records: dict[str, Any] | bytes, run_id: str = "abc") -> Path:
        path = tmp_path / f"offline-run-{run_id}" / f"run-{run_id}.wandb"
        path.parent.mkdir()
        path.write_bytes(content_of(one if isinstance(one, bytes) else of_json(one) for one in records))
        return path

    return write


# --- read_run ---------------------------------------------------------------------------------------------------------


def test_the_last_run_record_and_all_config_records_hold(write_run: WriteRun) -> None:
    first = {"type": "run", "run": {"run_id": "abc", "config": {"update": {"lr": 0.1, "net": {"a": 1}, "_wandb": {}}}}}
    config = {"type": "config", "config": {"update": {"net": {"b": 2}}}}
    renamed = {"type": "run", "run": {"run_id": "abc", "display_name": "new", "job_type": "eval", "tags": ["x"]}}
    run = read_run(write_run(HEADER, first, config, renamed))
    assert (run.name, run.job_type, run.tags) == ("new", "eval", ("x",))
    assert run.config == {"lr": 0.1, "net": {"b": 2}}


def test_the_number_of_metrics_is_limited_and_patterns_select_them(write_run: WriteRun, limit: Limit) -> None:
    limit(reading, MOST_METRICS=3)
    path = write_run(RUN, history(**{f"m{number}": number for number in range(5)}, last=1))
    run = read_run(path)
    assert (list(run.metrics), run.has_more_metrics) == (["last", "m0", "m1"], True)
    run = read_run(path, metrics=["last", "m4"])
    assert (list(run.metrics), run.has_more_metrics) == (["last", "m4"], False)
    assert read_run(write_run(RUN, history(**{"x" * 1001: 1, "y": 1}), run_id="long")).has_more_metrics


def test_a_config_that_is_too_large_is_left_out_in_part(write_run: WriteRun, limit: Limit) -> None:
    limit(reading, _LARGEST_CONFIG=100)
    updates = [{name: "x" * 40} for name in "abc"] + [{"a": 1}, {"d": ["x" * 20] * 2}]
    run = read_run(write_run(RUN, *({"type": "config", "config": {"update": update}} for update in updates)))
    assert (sorted(run.config), run.config["a"]) == (["a", "b", "d"], 1)
    assert run.problems == ("1 values of its config are left out because it is too large",)


def test_a_file_with_too_many_values_is_refused(write_run: WriteRun, limit: Limit) -> None:
    limit(reading, MOST_VALUES=9, _BETWEEN_CHECKS=2)
    path = write_run(RUN, *(history(loss=number, acc=1) for number in range(6)))
    _, errors = read_files([path])
    assert str(errors[path]).endswith("abc.wandb: Its metrics have more than 9 values. Request fewer names.")
    assert read_run(path, metrics=["loss"]).rows == 6
    assert read_run(path, metrics=()).metrics == {}


def test_only_numbers_of_the_user_are_metrics(write_run: WriteRun) -> None:
    row = {
        "loss": 1,
        "_step": 0,
        "_runtime": 0.5,
        "text": "abc",
        "flag": True,
        "none": None,
        "list": [1, 2],
        "image._type": "image-file",
        "image.width": 28,
        "image_count": 3,
        "kind._type": 4,
    }
    run = read_run(write_run(RUN, history(**row)))
    assert list(run.metrics) == ["image_count", "kind._type", "loss"]


def test_rows_without_a_run_record_are_shown_under_the_id_of_the_file(write_run: WriteRun) -> None:
    run = read_run(write_run(HEADER, history(a=1), run_id="x-1"))
    assert (run.run_id, run.rows) == ("x-1", 1)
    assert "run record is lost" in run.problems[0]


def test_a_file_that_is_no_run_is_refused_with_its_path_and_reason(write_run: WriteRun, tmp_path: Path) -> None:
    with pytest.raises(ReadError, match=r"x: the \.wandb file cannot be read: File name too long\.$"):
        read_history(tmp_path / ("x" * 300))
    with pytest.raises(ReadError, match=r"none.wandb: is not a file"):
        read_run(tmp_path / "none.wandb")
    with pytest.raises(ReadError, match=r"run-empty.wandb: is empty: the run was killed at its start"):
        read_run(touch(tmp_path / "offline-run-empty" / "run-empty.wandb"))
    with pytest.raises(ReadError, match=r"run-new.wandb: does not contain a run yet \(\d+ bytes\)"):
        read_run(write_run(HEADER, run_id="new"))
    hurt = write_run(HEADER, run_id="hurt")
    hurt.write_bytes(hurt.read_bytes()[:-1] + b"?")
    with pytest.raises(ReadError, match=r"its \d+ bytes contain no readable data of a run: skipped corrupt"):
        read_run(hurt)


# --- read_each, read_history -----------------------------------------------------------------------------------------


def test_history_has_every_row_in_order_with_floats_for_what_is_not_finite(write_run: WriteRun) -> None:
    path = write_run(RUN, history(_step=0, loss="NaN", text="ok"), history(_step=1, loss="-Infinity"), ended())
    first, second = read_history(path)
    assert math.isnan(first.pop("loss"))
    assert first == {"_step": 0, "text": "ok"}
    assert second == {"_step": 1, "loss": -math.inf}


def test_the_largest_step_of_a_file_is_an_exact_integer(write_run: WriteRun) -> None:
    values = ["NaN", "Infinity", "-Infinity", 1e300, 10**400, "7", None, [8], True, 4, 5.0, -3]
    path = write_run(RUN, *(history(x=value, other=9) for value in values), history(other=10))
    assert largest_step(path, "x") == 5
    assert largest_step(path, "missing") is None


# --- read_sidecar -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"format": 1', "delimiter"),
        ("[]", "not a JSON object"),
        (json.dumps({**SIDECAR, "format": 2}), "format 2, while this version reads 1"),
        (json.dumps({"format": 1}), "'run_id' is missing"),
        (json.dumps({**SIDECAR, "label": 7}), "label=7, which is not of type str or None"),
        (json.dumps({**SIDECAR, "global_rank": True}), "global_rank=True, which is not of type int"),
        (json.dumps({**SIDECAR, "primary": 1}), "primary=1, which is not of type bool"),
        (json.dumps({**SIDECAR, "world_size": None}), "world_size=None, which is not of type int"),
        (json.dumps({**SIDECAR, "world_size": 10**10}), "world_size=10000000000, which is not between 0 and 1000000"),
        (json.dumps({**SIDECAR, "local_rank": -1}), "local_rank=-1, which is not between"),
        (json.dumps({**SIDECAR, "world_size": 1}), "rank 1 of 1"),
        (json.dumps({**SIDECAR, "label": "rank\0-1"}), "label='rank\\x00-1', which dist_wandb never writes"),
        (json.dumps({**SIDECAR, "label": "rank\x1b-1"}), "label='rank\\x1b-1', which dist_wandb never writes"),
        (json.dumps({**SIDECAR, "group": "x" * 1001}), "group='xxxxx"),
        (
            json.dumps({**SIDECAR, "run_mode": "\x1b]0;x"}),
            "run_mode='\\x1b]0;x', which is not one of auto, shared, new",
        ),
        (json.dumps({**SIDECAR, "rank_scope": "\x9b2J"}), "rank_scope='\\x9b2J', which is not one of global, worker"),
        (json.dumps({**SIDECAR, "base_id": "a\x1b[2J"}), "base_id='a\\x1b[2J', which dist_wandb never writes"),
        (json.dumps({**SIDECAR, "format": "x" * 10_000}), "...xxxxxxxxxxxxx', while this version reads 1"),
    ],
)
def test_a_malformed_sidecar_is_a_problem_of_a_run_that_is_still_shown(
    write_run: WriteRun, text: str, reason: str
) -> None:
    path = write_run(RUN, history(a=1))
    (path.parent / "dist-wandb.json").write_text(text)
    with pytest.raises(ReadError) as caught:
        read_sidecar(Directory.at(path.parent))
    assert reason in str(caught.value)
    run = read_run(path)
    assert (run.rows, run.sidecar, run.problems) == (1, None, (str(caught.value),))
