"""`dist-wandb show`: runs as cards, as a table or as rows, and while they are written."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from offline_runs import sidecar_record, write_rank
from record_files import end, framed, header, make_run, row, run, serialised, write_run
from report_runs import history
from stored import read_run
from upload_runs import CONFIRMED, ENDED, log_of_attempt, rows

from dist_wandb.cli import main
from dist_wandb.wandb_files.sidecar import end_stall, write_stall

Capture = pytest.CaptureFixture[str]
ESCAPE = r"\x1b\[[0-9;]*m"


def shown(capsys: Capture, *argv: object, code: int = 0) -> str:
    assert main(["show", *map(str, argv)]) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Write seven runs that were started one after the other, in an order that differs from that of their ids."""
    for number, rare in enumerate(({}, {}, {}, {}, {"a_rare": 7}, {}, {})):
        begun = run(f"r{6 - number}", config={"lr": 10.0**-number, "same": True, "net": {"depth": number}, **rare})
        begun.run.start_time.FromSeconds(1_700_000_000 + number)
        begun.run.display_name = f"night-{number}"
        ends = [end(int(number == 3))] if number != 5 else []
        rows = [row(0, {"loss": float(number)})]
        write_run(tmp_path / "sweep", f"r{6 - number}", records=[header(), begun, *rows, *ends])
    return tmp_path / "sweep"


def test_secrets_of_the_config_are_shown_only_if_requested(tmp_path: Path, capsys: Capture) -> None:
    hidden = {"hf_token": "s3cret", "db": {"password": "s3cret"}, "list": [{"api_key": "s3cret"}]}
    for run_id in ("a", "b"):
        given = {**hidden, "hf_token": f"s3cret-{run_id}", "lr": 0.1}
        write_run(tmp_path, run_id, records=[header(), run(run_id, config=given), row(0, {"loss": 1.0}), end()])
    for options in (["--json"], ["--compare"], ["--details"]):
        assert "s3cret" not in shown(capsys, tmp_path, *options)
    config = json.loads(shown(capsys, tmp_path, "--json"))["runs"][0]["config"]
    assert config == {"hf_token": "…", "db": {"password": "…"}, "list": [{"api_key": "…"}], "lr": 0.1}
    assert json.loads(shown(capsys, tmp_path, "--json", "--secrets"))["runs"][0]["config"]["db"] == hidden["db"]
    assert "s3cret-a" in shown(capsys, tmp_path, "--compare", "--secrets")


# --- single runs ------------------------------------------------------------------------------------------------------


def written(top: Path, run_id: str, *rows: dict[str, Any], exit_code: int | None = 0, **described: Any) -> Path:
    """Write a run with the given history rows; return its file."""
    ends = [] if exit_code is None else [end(exit_code)]
    records = [header(), run(run_id, **described), *map(history, rows), *ends]
    return write_run(top, run_id, records=records) / f"run-{run_id}.wandb"


def test_a_run_is_shown_with_its_metrics_and_counts_of_values_that_are_not_finite(
    tmp_path: Path, capsys: Capture
) -> None:
    rows = [{"loss": 2.0, "rank-10/loss": 1, "rank-2/loss": 1, "_step": 0}, {"loss": 0.5}, {"loss": 1.25}]
    path = written(tmp_path, "abc", *rows, display_name="night", project="digits", run_group="sweep")
    lines = shown(capsys, tmp_path).splitlines()
    assert lines[:3] == [
        "● abc  night",
        "  finished · 3 rows · project digits · group sweep",
        f"  {path.parent}",
    ]
    assert [line.split() for line in lines[3:]] == [
        ["metric", "last", "min", "max", "values", "trend"],
        ["─" * len(lines[3].removeprefix("  "))],
        ["loss", "1.25", "0.5", "2", "3", "█▁▅"],
        ["rank-2/loss", "1", "1", "1", "1", "▄"],
        ["rank-10/loss", "1", "1", "1", "1", "▄"],
        [],
        f"1 run below {tmp_path}: 1 finished".split(),
    ]
    written(tmp_path / "b", "b", {"loss": 1.0, "lr": 0.1}, {"loss": "NaN", "lr": 0.1}, {"loss": "Infinity", "lr": 0.1})
    cells = [line.split() for line in shown(capsys, tmp_path / "b").splitlines()]
    assert ["metric", "last", "min", "max", "values", "NaN/inf", "trend"] in cells
    assert ["loss", "inf", "1", "inf", "3", "2", "▄··"] in cells
    assert ["lr", "0.1", "0.1", "0.1", "3", "▄▄▄"] in cells


def test_states_are_shown_and_metrics_are_chosen_by_pattern(tmp_path: Path, capsys: Capture) -> None:
    written(tmp_path, "a", {"val/loss": 1, "val/acc": 1, "train/loss": 1, "epoch": 1}, exit_code=3)
    written(tmp_path, "b", {"other": 1}, exit_code=None)
    written(tmp_path, "c")
    out = shown(capsys, tmp_path, "--metric", "val/*", "--metric", "epoch")
    assert all(name in out for name in ("val/loss", "val/acc", "epoch"))
    assert "train/loss" not in out
    assert "failed (exit code 3) · 1 row" in out
    assert "no end recorded (running, or killed) · 1 row" in out
    assert out.count("no metric matches") == 2
    assert shown(capsys, tmp_path).count("no metric was logged") == 1
    assert "3 runs below" in out
    assert ": 1 finished, 1 failed, 1 without a recorded end\n" in out


def test_files_that_cannot_be_read_are_named_and_the_others_shown(tmp_path: Path, capsys: Capture) -> None:
    log_of_attempt(read_run(written(tmp_path, "good", {"loss": 1})), rows(1), CONFIRMED, *ENDED)
    empty, garbage = written(tmp_path, "empty"), written(tmp_path, "junk")
    empty.write_bytes(b"")
    garbage.write_bytes(b"junk, longer")
    sidecar = written(tmp_path, "half").parent / "dist-wandb.json"
    sidecar.write_text("{")
    out = shown(capsys, tmp_path, code=1)
    assert f"✗ not readable  {empty}: is empty" in out
    assert f"✗ not readable  {garbage}: does not start like a .wandb file." in out
    assert f"  ! {sidecar}: not in dist_wandb's format" in out
    assert "● good\n  finished · 1 row · uploaded · project tests\n" in out
    assert "2 runs below" in out
    assert ": 2 finished, 2 files not readable\n" in out
    (tmp_path / "nothing").mkdir()
    for place, message in {
        empty: "None of the runs below",
        tmp_path / "nothing": "No W&B run was found below",
        tmp_path / "none": "none': No such file or directory",
    }.items():
        assert main(["show", str(place)]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_only_the_first_1000_metrics_are_shown_and_the_others_counted(tmp_path: Path, capsys: Capture) -> None:
    written(tmp_path, "a", {f"m{number}": number for number in range(1234)})
    out = shown(capsys, tmp_path)
    assert "m999 " in out
    assert "m1000 " not in out
    assert "and 234 beyond these: --metric GLOB picks" in out
    out = shown(capsys, tmp_path, "--metric", "m12*")
    assert "m1233 " in out
    assert "--metric" not in out
    assert len(json.loads(shown(capsys, tmp_path, "--json"))["runs"][0]["metrics"]) == 1234


def test_a_stream_that_cannot_encode_a_sparkline_causes_no_error(tmp_path: Path) -> None:
    written(tmp_path, "a", {"loss": 1})
    command, environment = [sys.executable, "-m", "dist_wandb", "show", str(tmp_path)], {**os.environ}
    environment["PYTHONIOENCODING"] = "latin-1"
    done = subprocess.run(command, env=environment, capture_output=True, encoding="latin-1", check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "? a\n  finished · 1 row · project tests\n" in done.stdout


def test_runs_are_printed_as_json(tmp_path: Path, capsys: Capture) -> None:
    rows: list[dict[str, Any]] = [*({"loss": value} for value in range(64)), {"loss": "NaN"}]
    path = written(tmp_path, "a", *rows, exit_code=1, config={"lr": 0.1}, job_type="train")
    job = {"rank_scope": "worker", "global_rank": 3, "node_rank": 1, "world_size": 4, "num_nodes": 2}
    sidecar = sidecar_record(label="worker-1-rank-1", primary=False, **job)
    (path.parent / "dist-wandb.json").write_text(json.dumps(sidecar))
    empty = written(tmp_path, "empty")
    empty.write_bytes(b"")
    found = json.loads(shown(capsys, tmp_path, "--json", code=1), parse_constant=pytest.fail)
    assert [entry["path"] for entry in found["unreadable"]] == [str(empty)]
    assert "is empty" in found["unreadable"][0]["reason"]
    (one,) = found["runs"]
    assert (one["path"], one["run_id"], one["state"], one["exit_code"]) == (str(path), "a", "failed", 1)
    assert (one["rows"], one["config"], one["job_type"], one["uploaded"]) == (65, {"lr": 0.1}, "train", False)
    (writer,) = one["writers"]
    assert (writer["label"], writer["rank"], writer["files"]) == ("worker-1-rank-1", 3, [str(path)])
    assert writer["sidecar"]["run_mode"] == "shared"
    loss = one["metrics"]["loss"]
    assert (loss["count"], loss["not_finite"], loss["last"], loss["smallest"], loss["largest"]) == (65, 1, "NaN", 0, 63)
    assert len(loss["trend"]) == 32


# --- shared runs ------------------------------------------------------------------------------------------------------


def test_a_shared_run_is_one_card_with_its_writers(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rank(tmp_path, 0, *(row(step, {"rank-0/loss": 1.0}) for step in range(3)))
    write_rank(tmp_path, 1, row(0, {"rank-1/loss": 2.0}), ended=3)
    write_rank(tmp_path, 10, ended=None)
    lines = shown(capsys, tmp_path).splitlines()
    place = "wandb/offline-run-20260101_000000-exp"
    assert lines[:6] == [
        "● exp",
        "  finished · 4 rows · project tests · shared/global · 3 writers of 1024 ranks",
        f"  {tmp_path}",
        f"  ● rank-0   finished, 3 rows, rank 0, node 0, primary  rank-0/{place}",
        f"  ● rank-1   failed (exit code 3), 1 row, rank 1, node 0  rank-1/{place}",
        f"  ● rank-10  without a recorded end, no rows, rank 10, node 0  rank-10/{place}",
    ]
    names = [line.split()[0] for line in lines[8:-2]]
    assert names == ["global_step", "loss", "rank-0/loss", "rank-1/loss"]  # ranks follow the name that they belong to
    assert lines[-1] == f"1 run in 3 files below {tmp_path}: 1 finished"
    monkeypatch.chdir(tmp_path)
    out = shown(capsys, tmp_path / "rank-0", "./rank-1")  # named in different ways
    assert f"\n  {tmp_path}\n  ● rank-0" in out
    assert "primary  rank-0/wandb/" in out


def test_only_the_extremes_of_many_ranks_are_shown(tmp_path: Path, capsys: Capture) -> None:
    for rank in range(20):
        values = {f"rank-{rank}/loss": float((rank * 7) % 20)}
        write_rank(tmp_path, rank, row(0, values), ended=4 if rank == 19 else 0)
    out = shown(capsys, tmp_path)
    assert out.count("  ● rank-") == 16
    assert "● rank-19  failed (exit code 4)" in out
    assert "and 4 writers more" in out
    lasts = [float(line.split()[1]) for line in out.splitlines() if line.startswith("  rank-")]
    assert lasts == [*range(8), *range(12, 20)]
    assert "loss: of 20 ranks those with the 8 lowest and highest last values are shown" in out


def test_the_slow_rank_is_named(tmp_path: Path, capsys: Capture) -> None:
    times = {"time/step": 0.1, "time/straggler_excess": 0.03}
    rows = [row(step, {**times, "time/straggler_rank": 2 if step % 10 else 3}) for step in range(40)]
    for rank in range(4):
        write_rank(tmp_path, rank, *(rows if rank == 0 else ()))
    out = shown(capsys, tmp_path)
    message = (
        "\n  rank 2 held the others up in 36 of 40 rows (time/straggler_rank), busy 0.03 s longer than the others\n"
    )
    assert out.count(message) == 1


def test_the_last_stalls_of_a_run_are_shown_with_whether_they_are_over(tmp_path: Path, capsys: Capture) -> None:
    files = make_run(tmp_path).parent / "files"
    files.mkdir(exist_ok=True)
    for rank in range(4):
        path = write_stall(files, rank, f"312 s. Rank {rank} sleeps.\x1b[2J{'_' * 10**4}", ["_" * 10**7])
        path = path.rename(files / f"stall-20260101-00000{rank}-rank-{rank}.txt")
    end_stall(str(path), 412.3)
    lines = [line for line in shown(capsys, tmp_path).splitlines() if "stood still" in line or "earlier" in line]
    assert [re.sub(r"20[-: +\d]+:", "TIME:", line, count=1) for line in lines[-2:]] == [
        f"  stood still TIME: 312 s. Rank 3 sleeps.\\x1b[2J{'_' * 274}… The training went on after 412 s. {path}",
        "  and 1 earlier stall",
    ]
    found = json.loads(shown(capsys, tmp_path, "--json"))["runs"][0]["stalls"]
    assert [(one["message"][:29], one["lasted"]) for one in found] == [
        (f"312 s. Rank {rank} sleeps.\\x1b[2J_", 412 if rank == 3 else None) for rank in (1, 2, 3)
    ]
    assert len(lines) == 4


def test_the_spread_over_ranks_is_in_the_line_of_its_metric(tmp_path: Path, capsys: Capture) -> None:
    spread = {"loss/min": 0.25, "loss/max": 0.75, "loss/std": 0.25, "loss/argmax_rank": 3.0}
    write_run(tmp_path, "r", records=[header(), run("r"), row(0, {"loss": 0.5, **spread, "lr/min": 0.1, "lr": 0.2})])
    lines = shown(capsys, tmp_path).splitlines()
    (loss,) = [line.split() for line in lines if "loss" in line]
    assert loss[:8] == ["loss", "0.5", "0.5", "0.5", "0.25", "to", "0.75", "(rank"]
    assert [line.split()[0] for line in lines if "lr" in line] == ["lr", "lr/min"], (
        "an incomplete spread is shown as names of its own"
    )
    picked = shown(capsys, tmp_path, "--metric", "loss/*")
    assert [line.split()[0] for line in picked.splitlines() if "loss" in line] == sorted(spread)


# --- selection of runs ------------------------------------------------------------------------------------------------


def order_in(out: str) -> list[str]:
    return [line.split()[1] for line in out.splitlines() if line.startswith("●")]


def test_many_runs_are_a_table_of_differences_with_the_oldest_first(sweep: Path, capsys: Capture) -> None:
    out = shown(capsys, sweep)
    titles = out.splitlines()[0].split()
    assert titles == ["run", "name", "state", "started", "rows", "lr", "net.depth", "a_rare", "global_step", "loss"]
    assert order_in(out) == ["r6", "r5", "r4", "r3", "r2", "r1", "r0"]
    (line,) = (line.split() for line in out.splitlines() if line.split()[1:2] == ["r2"])
    assert line == ["●", "r2", "night-4", "finished", "2023-11-14", "22:13", "1", "0.0001", "4", "7", "0", "4"]
    assert f"7 runs below {sweep}: 5 finished, 1 failed, 1 without a recorded end" in out
    assert shown(capsys, sweep, "--details").count("\n  metric ") == 7
    assert "net.depth" in (pair := shown(capsys, sweep, "r5", "r4", "--compare"))
    assert "state" not in pair


@pytest.mark.parametrize(
    ("argv", "ids"),
    [
        (["--last"], ["r0"]),
        (["r3", "night-1"], ["r5", "r3"]),
        (["night-[12]"], ["r5", "r4"]),
        (["--state", "failed"], ["r3"]),
        (["--where", "lr>=0.01", "--where", "loss!=0"], ["r5", "r4"]),
        (["--where", "net.depth==6", "--where", "name==night-*", "--where", "same=True"], ["r0"]),
        (["--where", "name=night-*", "--where", "config.lr<1e-4", "--sort", "loss"], ["r1", "r0"]),
        (["--where", "never=1"], []),
        (["--where", "never!=1", "--sort", "lr", "--reverse", "--last"], ["r0"]),
        (["--compare", "--sort", "loss", "--reverse"], ["r0", "r1", "r2", "r3", "r4", "r5", "r6"]),
        (["--compare", "--reverse"], ["r0", "r1", "r2", "r3", "r4", "r5", "r6"]),
        (["--compare", "--sort", "id"], ["r0", "r1", "r2", "r3", "r4", "r5", "r6"]),
    ],
)
def test_runs_are_chosen_and_sorted(argv: list[str], ids: list[str], sweep: Path, capsys: Capture) -> None:
    out = shown(capsys, sweep, *argv)
    assert order_in(out) == ids
    of_all = "" if len(ids) == 7 else " of 7"
    assert f"{len(ids) or 'no'} run{'' if len(ids) == 1 else 's'}{of_all} below" in out


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["nobody"], "No run has the id or the name 'nobody'"),
        (["nihgt-3"], "Did you mean 'night-3'?"),
        (["--sort", "los"], "No run has the value 'los' to sort by. Known: 'id', "),
        (["--sort", "net.deph"], "Did you mean 'net.depth'?"),
        (["--metric", "loss", "--metric", "lsos"], "Did you mean 'loss'?"),
        (["--rows", "loss", "lsos"], "No run has a metric 'lsos'. Known: 'global_step', 'loss'. Did you mean 'loss'?"),
        (["--rows", "losses*", "--json"], "Did you mean 'loss'?"),
        (["--where", "loss"], "'loss' is not a condition"),
        (["--csv"], "--csv is for rows"),
        (["--follow", "--json"], "--follow prints no JSON"),
    ],
)
def test_invalid_arguments_are_reported(argv: list[str], reason: str, sweep: Path, capsys: Capture) -> None:
    assert main(["show", str(sweep), *argv]) == 2
    assert reason in capsys.readouterr().err


def test_without_a_directory_the_usual_places_are_searched(
    sweep: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(["show", "r1"]) == 1
    message = capsys.readouterr().err
    assert "There is no directory 'r1'" in message
    assert "none of ./wandb, $WANDB_DIR and ./lightning_logs" in message
    monkeypatch.chdir(sweep)
    assert order_in(shown(capsys, "r1")) == ["r1"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_DIR", str(sweep))
    assert order_in(shown(capsys, "--last")) == ["r0"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_at_any_width_ids_and_numbers_are_whole_and_left_out_columns_are_named(
    width: int, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm", "COLUMNS": str(width)}.items():
        monkeypatch.setenv(name, value)
    ids = [f"{'x' * 20}-{number}" for number in range(7)]
    spread = {"loss/min": 1.2345e-11, "loss/max": 0.077246, "loss/std": 1.2345e-11, "loss/argmax_rank": 3}
    values = {"loss": 0.077246, "val/accuracy": -1.2345e-11, **spread}
    for number, run_id in enumerate(ids):
        begun = run(run_id, config={"lr": 1.2345e-11 * number, "optimizer": number}, display_name=run_id, run_group="g")
        write_run(tmp_path, run_id, records=[header(), begun, row(0, values), row(1, values), end()])
    outs = [shown(capsys, tmp_path), *(shown(capsys, tmp_path, ids[0], *argv) for argv in ([], ["--rows", *values]))]
    for out in outs:
        lines = re.sub(ESCAPE, "", out).splitlines()
        words = {word for line in lines for word in line.split()}
        assert set(ids if out == outs[0] else ids[:1]) <= words
        assert {"0.077246", "7.407e-11" if out == outs[0] else "0.077246"} <= words
        assert any(line.startswith(("left out", "  left out")) for line in lines) is (width < 120 or out == outs[0])
        table = lines[lines.index(next(line for line in lines if "───" in line)) :]
        assert max(len(line) for line in table if str(tmp_path) not in line) <= width
    write_run(tmp_path, "x" * 125)  # is folded, so that the others keep their columns
    first = [re.findall(f"{ids[0]}.*", re.sub(ESCAPE, "", out)) for out in (outs[0], shown(capsys, tmp_path))]
    assert first[0] == first[1]
    write_run(tmp_path, "x" * 64)
    assert "x" * 64 in re.sub(ESCAPE, "", shown(capsys, tmp_path)).split()


def test_runs_of_a_job_with_a_run_for_each_rank_are_below_one_heading(tmp_path: Path, capsys: Capture) -> None:
    for rank in range(3):
        for job in ("a", "b"):
            run_id = f"{job}-rank-{rank}"
            ending = [] if (job, rank) == ("b", 1) else [end()]
            place = write_run(tmp_path / run_id, run_id, records=[header(), run(run_id), row(0), *ending])
            of_job = {"run_mode": "new", "base_id": job, "global_rank": rank, "world_size": 8}
            of_job = sidecar_record(run_id=run_id, shared=False, label=None, primary=True, **of_job)
            (place / "dist-wandb.json").write_text(json.dumps(of_job))
    ranks = [f"{job}{end}" for job in "ab" for end in ("", "-rank-0", "-rank-1", "-rank-2")]
    out = shown(capsys, tmp_path)
    assert order_in(out) == ranks
    assert out.count("3 runs of 8 ranks") == 2
    assert order_in(shown(capsys, tmp_path, "--details")) == [rank for rank in ranks if "-" in rank]
    for how in (["--details"], [*ranks[1:4], "--follow"]):
        assert shown(capsys, tmp_path, *how).count("job a  3 runs of 8 ranks\n") == 1
    assert order_in(shown(capsys, tmp_path, "--sort", "id", "--reverse"))[0] == "b-rank-2"


# --- rows -------------------------------------------------------------------------------------------------------------


def test_the_rows_of_names_are_printed_as_csv_json_and_a_table(tmp_path: Path, capsys: Capture) -> None:
    rows = [row(0, {"loss": 1.0, "text": "a,b"}), row(1, {"loss": "NaN", "hist": [1, 2]})]
    write_run(tmp_path, "a", records=[header(), run("a"), *rows])
    write_run(tmp_path, "b", records=[header(), run("b"), row(5, {"val/acc": 0.5})])
    lines = list(csv.reader(io.StringIO(shown(capsys, tmp_path, "--rows", "loss", "val/*", "text", "hist", "--csv"))))
    assert lines == [
        ["run", "_step", "loss", "text", "hist", "val/acc"],
        ["a", "0", "1", "a,b", "", ""],
        ["a", "1", "NaN", "", "[1, 2]", ""],
        ["b", "5", "0.16666666666666666", "", "", "0.5"],
    ]
    found = json.loads(shown(capsys, tmp_path, "a", "--rows", "loss", "--json"))
    assert found == [{"run_id": "a", "project": "tests", "columns": {"_step": [0, 1], "loss": [1, "NaN"]}}]
    table = shown(capsys, tmp_path, "a", "--rows", "loss").splitlines()
    assert [line.split() for line in table if line] == [
        ["●", "a"],
        ["_step", "loss"],
        ["─" * 11],
        ["0", "1"],
        ["1", "NaN"],
    ]


def test_rows_are_printed_while_they_are_read_and_a_closed_pipe_is_silent(tmp_path: Path) -> None:
    path = make_run(tmp_path, rows=20_000)
    command = [sys.executable, "-m", "dist_wandb", "show", str(tmp_path), "--rows", "loss"]
    for is_closed in (True, False):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert [process.stdout.readline().split() for _ in range(4)][3] == ["0", "1"]
            if is_closed:
                process.stdout.close()
            else:  # it has filled the pipe, and has not read on
                os.truncate(path, 100)
            _, err = process.communicate(timeout=240)
        assert process.returncode == 1
        assert ("has changed while it was read" in err, bool(err)) == (not is_closed, not is_closed)


def test_texts_of_files_cannot_inject_control_characters_or_formulas(tmp_path: Path, capsys: Capture) -> None:
    evil = "=1+\x1b]0;x\x07[/x]\u202e"
    for number in range(6):
        begun = run(f"r{number}", config={evil: f"{evil}{number}"}, display_name=evil, run_group=evil)
        write_run(tmp_path, f"r{number}", records=[header(), begun, row(0, {evil: evil, "loss": 1.0, "=x": 1.0})])
    names = [evil, "=x", "loss"]
    for argv in ([], ["--details"], ["--rows", *names], ["--rows", *names, "--csv"], ["--compare", "--metric", "*"]):
        out = shown(capsys, tmp_path, *argv)
        assert {char for char in out if not (char.isprintable() or char == "\n")} == set()
        assert "\\x1b" in out
    cells = [
        cell for line in csv.reader(io.StringIO(shown(capsys, tmp_path, "--rows", *names, "--csv"))) for cell in line
    ]
    assert not [cell for cell in cells if cell.startswith("=")]


# --- runs that are being written --------------------------------------------------------------------------------------


@pytest.fixture
def following(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path, bytes]]:
    """Follow a run; yield the process of the command, the run's file, and the bytes that are not written yet."""
    records = [header(), run(), *(row(step) for step in range(3))]
    path = write_run(tmp_path, records=records) / "run-exp.wandb"
    rest = framed(serialised([*records, row(3), row(4), end()])).removeprefix(path.read_bytes())
    command = [sys.executable, "-m", "dist_wandb", "show", "--follow", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process, path, rest
        finally:
            process.kill()


@pytest.mark.slow
def test_a_run_is_followed_until_it_ends(following: tuple[subprocess.Popen[str], Path, bytes]) -> None:
    process, path, rest = following
    assert process.stdout is not None
    assert "exp  goes on · 3 rows · global_step 2 · loss 0.33333" in process.stdout.readline()
    with path.open("ab") as file:
        file.write(rest)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert "exp  finished · 5 rows" in out
    assert "● exp\n  finished · 5 rows · project tests\n" in out


def test_the_run_that_was_started_last_is_followed_also_if_it_has_no_record_yet(tmp_path: Path) -> None:
    """W&B writes the first records into the file only after some seconds."""
    write_run(tmp_path, "resumed", stamp="20250101_000000")
    later = run("other")
    later.run.start_time.seconds += 60
    write_run(tmp_path, "other", records=[header(), later, row(0), end()], stamp="20250101_000100")
    path = write_run(tmp_path, "resumed", stamp="20250101_000200") / "run-resumed.wandb"
    content = path.read_bytes()
    path.write_bytes(content[:7])
    command = [sys.executable, "-m", "dist_wandb", "show", "--follow", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "resumed  finished · 3 rows" in process.stdout.readline()  # of the first file
        path.write_bytes(content)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert "● resumed  a sound run\n" not in out
    assert "\n  finished · 6 rows · project tests\n" in out
    assert "not readable" not in out


def test_a_resumed_run_may_be_the_last_one_and_a_file_of_any_name_is_followed(tmp_path: Path, capsys: Capture) -> None:
    for run_id, day in (("resumed", 0), ("other", 1), ("resumed", 2)):
        begun = run(run_id)
        begun.run.start_time.seconds += day * 86_400
        place = write_run(tmp_path, run_id, records=[header(), begun, row(0), end()], stamp=f"2025010{day}_000000")
    assert order_in(shown(capsys, tmp_path, "--last")) == ["resumed"]
    (place / "run-resumed.wandb").write_bytes(b"damaged")  # the other file of the run is shown
    out = shown(capsys, tmp_path, "--follow", code=1)
    assert ("● resumed\n  finished · 1 row" in out, out.count("✗ not readable")) == (True, 1)
    copy = make_run(tmp_path, "copied").rename(tmp_path / "copy.wandb")
    assert "● copied\n  finished · 3 rows" in shown(capsys, copy, "--follow")


def test_an_interrupt_ends_following_immediately(following: tuple[subprocess.Popen[str], Path, bytes]) -> None:
    process, _, _ = following
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, "interrupted" in err) == (130, True)
