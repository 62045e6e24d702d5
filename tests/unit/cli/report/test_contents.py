"""The contents of a report, also of hostile runs: charts, ranks, config, console, tables and images."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from limits import Limit
from offline_runs import sidecar_record
from record_files import definition, end, header, row, run, write_run
from report_runs import history, one_run, png, printed, reduced_run, sample, shared_run, sweep, timed_run

from dist_wandb.cli.report import build, media
from dist_wandb.cli.report.page import LARGEST, Part, page_of, plotly_script
from dist_wandb.errors import ReadError
from dist_wandb.wandb_files import reading
from dist_wandb.wandb_files.sidecar import end_stall, write_stall
from dist_wandb.wandb_files.small_files import read_small

pytestmark = pytest.mark.newest  # wandb 0.31 is the first that reads its own files
ESCAPES = "\x1b[31m<img src=x onerror=alert(1)>\x07"


def charts(found: Part) -> dict[str, Part]:
    return {chart["name"]: chart for chart in found["charts"]}


def test_a_reduced_run_has_all_contents(tmp_path: Path) -> None:
    reduced_run(tmp_path, ranks=4, slow=2, steps=140)
    found = one_run(tmp_path)
    assert (found["state"], found["rows"], found["world"], found["mode"]) == ("finished", 141, 4, "auto/global")
    degraded = found["degraded"]
    assert (degraded["rows"], degraded["most"], degraded["spans"]) == (12, 1, [(120, 131)])
    assert not any(writer["uploaded"] for writer in found["writers"])
    loss = charts(found)["train/loss"]
    for x, low, middle, high in zip(
        loss["line"]["x"], loss["band"][0]["y"], loss["line"]["y"], loss["band"][1]["y"], strict=True
    ):
        assert low <= middle <= high, x
    assert "train/loss/min" not in charts(found)
    assert "train/loss/std" in charts(found)
    assert [(one["name"], one["ranks"], one["stands_out"]) for one in found["slowest"]] == [
        ("time/straggler_rank", [2], True),
        ("time/step", [2], False),  # by the rule for timings
        ("time/forward", [2], False),
    ]
    for pattern in ("*", "time/busy", "train/*"):  # as `show`, whatever is drawn
        (said,) = build([tmp_path], [pattern])["runs"][0]["findings"]
        assert said.startswith("rank 2 held the others up in 140 of 140 rows (time/straggler_rank), busy 0.0")
    assert found["heat"][0]["name"] == "time/straggler_rank"
    assert [chart["name"] for chart in found["system"]] == ["cpu", "gpu.gpu", "memory_percent"]
    assert set(found["system"][1]["ranks"]) == {f"rank 0 · gpu {number}" for number in range(4)}
    assert [image["name"] for image in found["images"]] == ["batch", "batch", "sample"]
    assert [(image["source"].partition(";")[0], image["width"], image["height"]) for image in found["images"]] == [
        ("data:image/png", 32, 32),
        ("data:image/jpeg", 24, 16),
        ("data:image/png", 32, 32),
    ]
    assert base64.b64decode(found["images"][2]["source"].partition(",")[2]) == png()
    assert [table["rows"][0] for table in found["tables"]] == [["0", "class 0", "0.5"]]
    assert found["console"][0]["lines"][0].startswith("step 0: loss 2.0")
    assert found["config"] == {"lr": "0.1", "model.depth": "12", "model.width": "768", "seed": "7"}


def test_the_rank_with_the_largest_times_is_a_finding_and_no_chance(tmp_path: Path) -> None:
    for marked in (True, False):
        timed_run(tmp_path / str(marked), marked=marked)
        found = one_run(tmp_path / str(marked))
        (data,) = [one for one in found["slowest"] if one["name"] == "time/data"]
        assert (data["ranks"], data["share"], data["by_chance"], data["stands_out"]) == ([2], 1.0, False, not marked)
        section = "time/busy" if marked else "time/data"
        assert found["findings"][0].startswith(f"rank 2 has the largest {section} in 40 of 40 rows")
        assert [heat["kind"] for heat in found["heat"] if heat["name"] == "time/data"] == ["value"], (
            "the ranks' own, once"
        )


def test_stalls_of_all_writers_are_in_the_run_without_escape_sequences(tmp_path: Path) -> None:
    shared_run(tmp_path, ranks=2, slow=None, steps=3)
    for rank, folder in enumerate(sorted(tmp_path.rglob("files"))):
        end_stall(str(write_stall(folder, rank, f"Rank {rank} sleeps.{ESCAPES}", ["all stacks"])), 4.2)
    found = [problem for writer in one_run(tmp_path)["writers"] for problem in writer["problems"]]
    assert ["Rank 0 sleeps." in one for one in found] == [True, False]
    assert all(one.startswith("stood still 20") and "went on after 4 s. " in one for one in found)
    assert not any("\x1b" in one or "all stacks" in one for one in found)


def test_files_of_a_shared_run_are_one_with_a_line_for_each_rank(tmp_path: Path) -> None:
    shared_run(tmp_path, ranks=3, slow=1, steps=30)
    found = one_run(tmp_path)
    assert [writer["name"] for writer in found["writers"]] == ["rank 0", "rank 1", "rank 2"]
    time = charts(found)["time/step"]
    assert list(time["ranks"]) == ["rank 0", "rank 1", "rank 2"]
    assert all(len(line["x"]) == 30 for line in time["ranks"].values())
    assert [(one["name"], one["ranks"], one["stands_out"]) for one in found["slowest"]] == [("time/step", [1], True)]
    assert {heat["name"] for heat in found["heat"]} >= {"time/step", "loss", "system: cpu"}
    assert found["differing"] == ["local_rank"]
    assert found["config"]["local_rank"] == "rank 0: 0 · rank 1: 1 · rank 2: 2"
    assert [console["lines"] for console in found["console"]] == [["I am rank-0"], ["I am rank-1"], ["I am rank-2"]]


def test_runs_of_a_job_with_a_run_for_each_rank_are_one(tmp_path: Path) -> None:
    for rank in range(3):
        records = [header(), run(f"exp-rank-{rank}", run_group="exp"), definition(), *map(row, range(5)), end(rank)]
        directory = write_run(tmp_path, f"exp-rank-{rank}", records=records)
        role: dict[str, Any] = {"shared": False, "label": None, "primary": True}
        record = sidecar_record(run_mode="new", run_id=f"exp-rank-{rank}", global_rank=rank, world_size=3, **role)
        (directory / "dist-wandb.json").write_text(json.dumps({**record, "group": "exp"}))
    found = one_run(tmp_path)
    assert (found["name"], found["state"], len(found["writers"])) == ("exp", "failed", 3)
    loss = charts(found)["loss"]
    assert list(loss["ranks"]) == ["rank 0", "rank 1", "rank 2"]
    assert loss["line"]["y"] == [1, 0.5, 0.333333, 0.25, 0.2]


def test_the_axis_of_an_exact_name_precedes_that_of_the_longest_pattern_and_a_missing_one_is_the_step(
    tmp_path: Path,
) -> None:
    exact = definition("", "seen")
    exact.metric.name = "val/acc"
    names = ("loss", "val/loss", "val/acc", "global_step", "epoch", "seen")
    definitions = [definition(), definition("val/*", "epoch"), exact, definition("test/*", "nowhere")]
    rows = [history({**dict.fromkeys(names, step), "test/loss": step, "_step": 3 + step}) for step in range(2)]
    write_run(tmp_path, records=[header(), run(), *definitions, *rows, end()])
    found = charts(one_run(tmp_path))
    assert {name: chart["axis"] for name, chart in found.items()} == {
        "loss": "global_step",
        "val/loss": "epoch",
        "val/acc": "seen",
        "test/loss": "_step",
    }
    line = found["test/loss"]["line"]
    assert (line["x"], line["y"]) == ([3, 4], [0, 1])


def test_a_corrected_row_replaces_the_earlier_one_and_ranks_in_names_are_lines_of_ranks(tmp_path: Path) -> None:
    rows = [
        history({"loss": loss, "rank-0/acc": 1.0, "rank-1/acc": 3.0, "global_step": step})
        for step, loss in ((0, 1.0), (1, 2.0), (2, 3.0), (1, 2.5))
    ]
    write_run(tmp_path, records=[header(), run(), definition(), *rows, end()])
    found = charts(one_run(tmp_path))
    assert (found["loss"]["line"]["x"], found["loss"]["line"]["y"]) == ([0, 1, 2], [1, 2.5, 3])
    assert set(found["acc"]["ranks"]) == {"rank 0", "rank 1"}
    assert (found["acc"]["line"]["x"], found["acc"]["line"]["y"]) == ([0, 1, 2], [2, 2, 2])


@pytest.mark.parametrize("pattern", ["*", "*_rank", "io/*"])
def test_a_heat_map_shows_when_a_rank_had_the_largest_value(tmp_path: Path, pattern: str) -> None:
    ranks = [*([1] * 500), *([3] * 500), -1, 1.5, 10**9]  # the last three are none
    rows = [
        history({"io/time": 1.0, "io/time/max": 1.5, "io/time/argmax_rank": rank, "global_step": step})
        for step, rank in enumerate(ranks)
    ]
    directory = write_run(tmp_path, records=[header(), run(), definition(), *rows, end()])
    role = {"shared": False, "label": None, "run_mode": "auto", "world_size": 6}
    (directory / "dist-wandb.json").write_text(json.dumps(sidecar_record(**role)))
    found = one_run(tmp_path, metrics=[pattern])
    (heat,) = found["heat"]
    assert heat["ranks"] == [f"rank {rank}" for rank in range(6)]
    assert len(heat["edges"]) == len(heat["cells"][0]) + 1 <= 129
    middle = next(place for place, edge in enumerate(heat["edges"]) if edge >= 500)
    assert set(heat["cells"][1][: middle - 1]) == set(heat["cells"][3][middle:-1]) == {0.5}
    assert set(heat["cells"][1][middle:]) == set(heat["cells"][0]) == {0.0}
    (slowest,) = found["slowest"]
    assert (slowest["who"], slowest["excess"]) == ("ranks 1, 3", 0.5)
    assert slowest["share"] == pytest.approx(1000 / 1003)


@pytest.mark.filterwarnings("error")
def test_huge_values_are_drawn(tmp_path: Path) -> None:
    rows = [
        history({"loss": (-1.7e308, 1.7e308)[step % 2], "rank-0/x": 1.7e308, "rank-1/x": 1.7e308, "_step": step})
        for step in range(3000)
    ]
    write_run(tmp_path, records=[header(), run(), *rows, end()])
    found = charts(one_run(tmp_path))
    line = found["loss"]["line"]
    assert set(line["y"]) == {1.7e308, -1.7e308}
    assert (found["x"]["least"], found["x"]["most"]) == (1.7e308, 1.7e308)


def test_a_file_with_too_many_values_is_not_read(tmp_path: Path, limit: Limit) -> None:
    limit(reading, MOST_VALUES=20, _BETWEEN_CHECKS=2)
    write_run(tmp_path, records=[header(), run(), *(row(step, {"x": 1, "y": 2}) for step in range(6)), end()])
    with pytest.raises(ReadError, match=r"more than 20 values. Request fewer names"):
        build([tmp_path])
    assert list(charts(build([tmp_path], ["loss"])["runs"][0])) == ["loss"]


def test_a_label_that_only_begins_like_the_name_of_a_rank_is_a_line_and_no_rank(tmp_path: Path) -> None:
    for rank, label in enumerate(("rank x", "rank ")):
        items = [history({"time/step": 1.0 + rank, "global_step": step}) for step in range(10)]
        records = [header(), run(), definition(), *items, end()]
        directory = write_run(tmp_path, records=records, stamp=f"20260101_00000{rank}")
        role = {"run_mode": "auto", "label": label, "primary": False, "global_rank": rank, "world_size": 2}
        (directory / "dist-wandb.json").write_text(json.dumps(sidecar_record(**role)))
    found = one_run(tmp_path)
    assert set(charts(found)["time/step"]["ranks"]) == {"rank x", "rank "}
    assert found["slowest"] == []


def test_a_resumed_run_is_one_in_the_state_of_its_last_start(tmp_path: Path) -> None:
    for start in range(2):
        items = [
            history({"loss": step, "global_step": step, "_step": step}) for step in range(3 * start, 3 * start + 3)
        ]
        items += [sample(600 * start + second, {"cpu": 50.0 + start}) for second in (0, 60)]
        stamp = f"20260101_00000{start}"
        begun = run(display_name=f"start {start}")
        write_run(tmp_path, records=[header(), begun, definition(), *items, end(1 - start)], stamp=stamp)
    found = one_run(tmp_path)
    line = charts(found)["loss"]["line"]
    assert (len(found["writers"]), line["x"]) == (2, [0, 1, 2, 3, 4, 5])
    assert (found["name"], found["state"], found["heat"]) == ("start 1", "finished", [])
    assert found["axes"]["global_step"]["x"] == [0, 1, 2, 3, 4, 5]
    (system,) = found["system"][0]["ranks"].values()
    assert (system["x"], system["y"]) == ([0, 1, 10, 11], [50, 50, 51, 51])  # minutes


def test_hostile_texts_become_plain_text(tmp_path: Path) -> None:
    records = [
        header(),
        run(display_name=ESCAPES, run_group=ESCAPES, config={ESCAPES: ESCAPES}),
        history({ESCAPES: 1.0, "_step": 0, "deep": {"a": {"b": {"c": {"d": 1.0}}}}}),
        history({"x" * 500: 1.0, "_step": "NaN"}),
        printed(ESCAPES),
        end(),
    ]
    write_run(tmp_path, records=records)
    found = one_run(tmp_path)
    shown = "<img src=x onerror=alert(1)>\N{REPLACEMENT CHARACTER}"
    assert (found["name"], found["group"], found["config"]) == (shown, shown, {shown: shown})
    assert set(charts(found)) == {shown, "deep.a.b.c.d"}
    assert found["console"][0]["lines"] == [shown]
    assert found["notes"] == ["at least 1 metrics beyond the first 2000, or with long names (--metric GLOB picks)"]


def test_facts_axes_and_config_of_a_run_are_known_but_its_secrets_only_if_requested(tmp_path: Path) -> None:
    sweep(tmp_path / "sweep", runs=1, steps=20)
    found = one_run(tmp_path / "sweep")
    assert found["facts"]["command"] == "train.py '--api_key=…' --max-tokens 9 --token '…' --lr=0.1"
    assert {name: found["facts"][name] for name in ("host", "GPUs", "notes")} == {
        "host": "node-0",
        "GPUs": "8 x NVIDIA H100",
        "notes": "a baseline",
    }
    assert {name: line["y"][:2] for name, line in found["axes"].items()} == {
        "global_step": [0, 10],
        "epoch": [0, 0],
        "_timestamp": [0, 0.05],
    }
    (shown,) = build([tmp_path / "sweep"], secrets=True)["runs"]
    assert "--api_key=hidden-key --max-tokens 9 --token hidden-token" in shown["facts"]["command"]
    given = {"hf_token": "s3cret", "db": {"password": "s3cret", "port": 1}, "list": [{"api_key": "s3cret"}], "lr": 0.1}
    write_run(tmp_path / "config", records=[header(), run(config=given), row(0, {"loss": 1.0}), end()])
    hidden = {"hf_token": "…", "db.password": "…", "db.port": "1", "list": '[{"api_key": "…"}]', "lr": "0.1"}
    assert one_run(tmp_path / "config")["config"] == hidden
    (shown,) = build([tmp_path / "config"], secrets=True)["runs"]
    assert {shown["config"][name] for name in ("hf_token", "db.password")} == {"s3cret"}


def test_console_output_is_shown_as_by_a_terminal_without_colors(tmp_path: Path) -> None:
    texts = {
        "a": "ab",
        "b\n": "",
        "10 %\r50 %\r100 %\n": "100 %",  # the last state of a progress bar
        "done\r\n": "done",
        "\x1b[31mred\x1b[0m\n": "red",
        "\x1b]0;title\x07text\n": "text",
        "a\x1bcb\n": "a\N{REPLACEMENT CHARACTER}cb",
        "bell\x07\n": "bell\N{REPLACEMENT CHARACTER}",
        "abc\u202etxt\n": "abc\N{REPLACEMENT CHARACTER}txt",
        "<b>&amp;\nno": "<b>&amp;",
        " end": "no end",
    }
    write_run(tmp_path, records=[header(), run(), *map(printed, texts), end()])
    assert one_run(tmp_path)["console"][0]["lines"] == [line for line in texts.values() if line]


def test_the_last_lines_are_kept_and_all_are_counted(tmp_path: Path) -> None:
    texts = ["".join(f"{number}\n" for number in range(5000)), "x" * 10**6]
    write_run(tmp_path, records=[header(), run(), *map(printed, texts), end()])
    (console,) = one_run(tmp_path)["console"]
    assert (console["dropped"], len(console["lines"])) == (4001, 1000)
    assert (console["lines"][-2], len(console["lines"][-1])) == ("4999", 500)


def test_the_consoles_of_many_runs_fit_into_the_page(tmp_path: Path) -> None:
    """A sweep of some hundred runs, each of which has printed a thousand lines, has once had no report."""
    lines = printed("".join(f"epoch 1 step {step} loss 0.1234 {'x' * 400}\n" for step in range(1000)))
    for number in range(50):
        write_run(tmp_path, f"r{number}", records=[header(), run(f"r{number}"), lines, end()])
    report = build([tmp_path])
    assert len(page_of(report, plotly_script())) < LARGEST
    assert {len(one["console"][0]["lines"]) for one in report["runs"]} == {400}
    assert {one["console"][0]["lines"][-1].split()[3] for one in report["runs"]} == {"999"}


# --- tables and images of a directory in which others may write -------------------------------------------------------

HEAD = b"\x89PNG\r\n\x1a\n"
VALUE = {"_type": "table-file", "path": "media/table/one.table.json"}


def write_table(directory: Path, text: str) -> Path:
    table = directory / "files" / "media" / "table" / "one.table.json"
    table.parent.mkdir(parents=True)
    table.write_text(json.dumps({"columns": ["text"], "data": [[text]]}))
    return table


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_folder_that_becomes_a_link_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    """It is replaced just before the file is opened: after all checks of its path."""
    directory = write_run(tmp_path / "runs", records=[header(), run(), history({"shown": VALUE}), end()])
    private, table = write_table(tmp_path / "private", "secret"), write_table(directory, "public")

    def racing(path: Path, **options: Any) -> bytes:
        folder = table.parents[level - 1]
        folder.rename(tmp_path / "moved")
        folder.symlink_to(private.parents[level - 1])
        return read_small(path, **options)

    (before,) = build([tmp_path / "runs"])["runs"]
    assert before["tables"][0]["rows"] == [["public"]]
    monkeypatch.setattr(media, "read_small", racing)
    (after,) = build([tmp_path / "runs"])["runs"]
    assert (after["images"], after["tables"]) == ([], [])
    assert after["notes"] == ["1 media files that are links, too large, or cannot be read"]


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def small_png(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return HEAD + chunk(b"IHDR", header) + chunk(b"IDAT", b"x") + chunk(b"IEND", b"")


def media_run(top: Path, path: str) -> Path:
    value = {"_type": "image-file", "path": path}
    return write_run(top, records=[header(), run(), history({"img": value, "_step": 0}), end()])


@pytest.mark.parametrize("path", ["../../../../secret.png", "link/secret.png", "media/link.png", "/etc/passwd", "a\0b"])
def test_no_image_outside_the_run_directory_is_shown(tmp_path: Path, path: str) -> None:
    (tmp_path / "secret.png").write_bytes(png())
    directory = media_run(tmp_path / "runs", path)
    (directory / "files" / "link").symlink_to(tmp_path)
    (directory / "files" / "media").mkdir()
    (directory / "files" / "media" / "link.png").symlink_to(tmp_path / "secret.png")
    found = one_run(tmp_path / "runs")
    assert found["images"] == []
    assert len(found["notes"]) == 1


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (None, "missing"),
        (b"\x89PNG" + bytes(2**20), "too large"),
        (b"", "not valid PNG"),
        (HEAD, "not valid PNG"),
        (b"GIF89a" + bytes(100), "not valid PNG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>", "not valid PNG"),
        (HEAD + chunk(b"IDAT", b"x") + chunk(b"IEND", b""), "not valid PNG"),
        (HEAD + b"\xff\xff\xff\xffIHDR" + bytes(20), "not valid PNG"),
        (small_png(0, 1), "not valid PNG"),
        (small_png(16_385, 1), "not valid PNG"),
        (small_png(16_000, 16_000), "not valid PNG"),
        (b"\xff\xd8\xff\xd9", "not valid PNG"),
        (b"\xff\xd8" + b"\xff\xe0\x00\x00" * 1000 + b"\xff\xd9", "not valid PNG"),
    ],
)
def test_an_invalid_image_is_reported(tmp_path: Path, content: bytes | None, note: str) -> None:
    directory = media_run(tmp_path, "a.png")
    if content is not None:
        (directory / "files" / "a.png").write_bytes(content)
    found = one_run(tmp_path)
    assert found["images"] == []
    assert note in found["notes"][0]


@pytest.mark.parametrize("content", ["[]", "{}", '{"columns": 1, "data": []}', "[" * 100_000, "\x80"])
def test_an_invalid_table_is_reported(tmp_path: Path, content: str) -> None:
    value = {"_type": "table-file", "path": "t.json"}
    directory = write_run(tmp_path, records=[header(), run(), history({"t": value, "_step": 0}), end()])
    (directory / "files" / "t.json").write_bytes(content.encode("latin-1"))
    assert one_run(tmp_path)["notes"] == ["1 tables that are not in W&B's format"]
