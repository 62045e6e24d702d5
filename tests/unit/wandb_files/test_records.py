"""Records equal those that W&B's own reader prints, and what is damaged or hostile is skipped and reported."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import wandb
from limits import Limit
from record_files import Record, content_of, end, framed, header, new_record, of_json, row, run, serialised

from dist_wandb.errors import ReadError
from dist_wandb.wandb_files import records
from dist_wandb.wandb_files.record_file import field_of
from dist_wandb.wandb_files.records import PAUSE, read_records

pytestmark = pytest.mark.newest  # wandb 0.31 is the first that reads its own files
READER = Path(wandb.__file__).parent / "bin" / "wandb-core"

JSON = [b"5.0", b"1E5", b"0.10", b"1e400", b"-1e400", b"-0", b"1.7954778536973689e+09", b"2e+09", b" 7 ", b"12345678.0"]


def file_of(tmp_path: Path, records: Iterable[Record | bytes]) -> Path:
    path = tmp_path / "offline-run-1-exp" / "run-exp.wandb"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content_of([header(), run(), *records, end()]))
    return path


def rows_of(path: Path, **options: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of a file, and its problems."""
    problems: list[str] = []
    return [contents for kind, contents in read_records(path, problems, **options) if kind == "history"], problems


def printed(path: Path) -> list[dict[str, Any]]:
    options = ["leet", "inspect", "--no-observability", "--json", "--run-file"]
    command = [str(READER), *options, str(path), str(path.parents[1])]
    environment = {**os.environ, "WANDB_ERROR_REPORTING": "false", "WANDB_DIR": str(path.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=True)
    return list(map(json.loads, done.stdout.splitlines()))


def comparable(rows: Iterable[dict[str, Any]]) -> list[dict[str, str]]:
    """Return values as text with their types, but large integers as floats, as which the reader prints them."""

    def integer(text: str) -> Any:
        return int(text) if abs(int(text)) < 2**63 else float(text)

    def printed(value: Any) -> str:
        text = json.dumps(json.loads(json.dumps(value), parse_int=integer), sort_keys=True)
        return text.strip('"') if text.strip('"') in ("NaN", "Infinity", "-Infinity") else text

    return [{name: printed(value) for name, value in row.items()} for row in rows]


def both_ways(path: Path) -> list[dict[str, str]]:
    """Return the rows, after checking that W&B's reader prints the same; it leaves out rows that it does not decode."""
    expected = [record["history"].get("item") for record in printed(path) if record["type"] == "history"]
    rows, _ = rows_of(path)
    assert comparable(rows) == comparable(row if isinstance(row, dict) else {} for row in expected)
    return comparable(rows)


def nested(names: Iterable[str], value: bytes) -> bytes:
    return field_of(1, b"".join(field_of(2, name.encode()) for name in names) + field_of(16, value))


def of_items(*items: bytes) -> bytes:
    return field_of(2, b"".join(items))


ODD = [b"", b"  ", b"1 2", b'"\x01"', *b"nan -NaN +1 .5 1e 0x1 1_0 - 1.5.2 tru [1,]".split()]
INSIDE = [b"NaN", b"-Infinity", b"9223372036854775808", b"-9223372036854775809", b"1e400", b"5.0", b"1e20", b"2e+09"]
SURROGATES = [b'"\\ud800"', b'"\\ud83d\\ude00 \\ud800x"', b'{"\\ud800": "\\udfff"}']


def item(name: bytes, value: bytes) -> bytes:
    return field_of(1, field_of(1, name) + field_of(16, value))


def test_no_item_hides_another_one_and_new_names_are_in_alphabetical_order(tmp_path: Path, limit: Limit) -> None:
    """The rest of a row looks like its step if it begins within a name, at a byte 0x12 and the number of bytes left."""
    number = item(b"n", b"1.5")
    size = len(item(b"y" * 60, b'"text"'))
    before = len(number) - 4  # of the name: tags and lengths precede it
    name = (b"y" * before + bytes([0x12, size - 2])).ljust(60, b"y")
    rows = [of_items(number), of_items(item(name, b'"text"'), number)]
    assert [len(row) for row in both_ways(file_of(tmp_path, rows))] == [1, 2]
    assert list(rows_of(file_of(tmp_path, [of_items(nested(["b"], b"1"), nested(["a"], b"2"))]))[0][0]) == ["a", "b"]
    limit(records, _MOST_NAMES=5)  # names without number take no memory
    assert len(both_ways(file_of(tmp_path, [row(step, {f"name{step % 20}": step}) for step in range(100)]))) == 100


def test_random_rows_equal_those_of_the_reader(tmp_path: Path) -> None:
    chance = random.Random(11)
    names = [b"a", b"b", b"\x12", b"\x12\x01", b"\n\x01a", b"a\x12\x05", b"n" * 130, "é".encode(), b""]
    values = [*ODD, *SURROGATES, *INSIDE, *JSON, b'"text"', b"1", b"0.5", b"true"]
    values += [whole % one for one in INSIDE for whole in (b"[%s]", b'{"a": [%s, 0.5]}')]
    rows = []
    for _ in range(3000):
        items = [item(chance.choice(names), chance.choice(values)) for _ in range(chance.randint(0, 5))]
        if chance.random() < 0.2:
            items.append(nested(chance.choices(["a", "b.c", "\x12"], k=chance.randint(1, 3)), chance.choice(values)))
        items += [field_of(2, b"\x08\x03")] * (chance.random() < 0.3)  # the row's step
        rows.append(of_items(*items))
    assert len(both_ways(file_of(tmp_path, rows))) == 3000


@pytest.mark.parametrize("cut", ["length of an item", "length of a value", "end"])
def test_items_with_contradicting_lengths_are_not_numbers(tmp_path: Path, cut: str) -> None:
    """The pattern for numbers also matches items with wrong lengths: such rows are decoded field by field."""
    good = nested(["a"], b"1.25")
    bad = {
        "length of an item": good[:1] + bytes([good[1] - 1]) + good[2:],
        "length of a value": good.replace(b"\x82\x01\x041.25", b"\x82\x01\x031.25"),
        "end": good + b"\x12\x02\x08",
    }[cut]
    assert bad != good
    rows, problems = rows_of(file_of(tmp_path, [of_items(good), field_of(2, bad), of_items(good)]))
    assert rows == [{"a": 1.25}] * 2
    assert problems == ["1 of its records, not in W&B's format, are skipped"]


def test_all_kinds_of_records_are_those_that_the_reader_prints(tmp_path: Path) -> None:
    config = {"lr": 0.1, "net": {"depth": [1, 2.0]}, "text": "µ\n"}
    time = {"start_time": "2023-11-14T22:13:20.500Z"}
    about = {"run_id": "exp", "entity": "e", "project": "p", "run_group": "g", "job_type": "j", "display_name": "d"}
    where = {"python": "3", "program": "p", "code_path_local": "c", "host": "h", "gpu_type": "t", "args": ["--a", "1"]}
    made: list[dict[str, Any]] = [
        {"type": "run", "run": {**about, **time, "tags": ["x", "y"], "notes": "n", "config": {"update": config}}},
        {"type": "config", "config": {"update": {"lr": 0.2, "nan": float("nan")}}},
        {"type": "summary", "summary": {"update": {"loss": 1, "map": {"a": 1.0}}}},
        {"type": "stats", "stats": {"item": {"cpu": 0.5}, "timestamp": "2023-11-14T22:13:20.000000120Z"}},
        {"type": "metric", "metric": {"glob_name": "*", "step_metric": "x"}},
        {"type": "output_raw", "output_raw": {"line": "a\r\n"}},
        {"type": "environment", "environment": {**where, "gpu_count": 8}},
        {"type": "exit", "exit": {"exit_code": -1}},
        {"type": "exit", "exit": {}},
    ]
    together = new_record()
    together.run.git.commit, together.run.branch_point.run = "abc", "other"
    joined = [of_json({"type": "run", "run": {name: name}}).SerializeToString() for name in ("run_id", "project")]
    path = tmp_path / "run-exp.wandb"
    last = [*serialised([together]), b"".join(joined), joined[0] + serialised([end(3)])[0]]
    path.write_bytes(framed([*serialised(map(of_json, made)), *last]))
    problems: list[str] = []
    found = list(read_records(path, problems, skipped=()))
    expected = [(record["type"], record[record["type"]]) for record in printed(path)]
    expected[0][1]["start_time"] = "2023-11-14T22:13:20.500000Z"
    expected[3][1]["timestamp"] = "2023-11-14T22:13:20Z"  # it has no nanoseconds
    expected[5][1].pop("output_type")
    expected[8][1].clear()
    assert (found, problems) == (expected, [])
    assert not {kind for kind, _ in read_records(path)} & records.UNUSED


def test_times_and_texts_that_no_wandb_writes_are_left_out(tmp_path: Path) -> None:
    odd = run()
    odd.run.start_time.seconds, odd.run.start_time.nanos = 2**62, -1
    removed = new_record()
    removed.summary.remove.add(key="a")
    bad_text = serialised([run()])[0].replace(b"tests", b"\xff\xff\xff\xff\xff")
    problems: list[str] = []
    found = list(read_records(file_of(tmp_path, [odd, removed, bad_text, b"\xf2\x07\x00", b""]), problems, skipped=()))
    assert problems == ["1 of its records, not in W&B's format, are skipped"]
    assert found[1:3] == [
        ("run", {"run_id": "exp", "project": "tests", "start_time": None}),
        ("summary", {"remove": ["a"]}),
    ]
    assert [kind for kind, _ in found] == ["run", "run", "summary", "exit"]


@pytest.mark.parametrize("what", ["damaged", "zeros", "cut off", "cut off in a header", "no record file", "short"])
def test_a_damaged_file_is_read_as_far_as_the_reader_does(tmp_path: Path, what: str) -> None:
    path = file_of(tmp_path, [row(step) for step in range(2000)])
    content = bytearray(path.read_bytes())
    if what == "damaged":
        content[40_000] ^= 1
    elif what == "zeros":
        content += bytes(100)
    elif what == "no record file":
        content[:4] = b"abcd"
    else:
        content = content[: {"cut off": -10, "short": 3}.get(what, -(end().ByteSize() + 5))]
    path.write_bytes(content)
    if what == "no record file":
        with pytest.raises(ReadError, match=r"run-exp\.wandb: does not start like a \.wandb file"):
            rows_of(path)
        return
    rows, problems = rows_of(path)
    assert comparable(rows) == comparable(one["history"]["item"] for one in printed(path) if one["type"] == "history")
    damaged = "skipped corrupt data (of a wrong checksum or length)"
    cut = "reached the end of an incomplete .wandb file (the run may still be active or was interrupted)"
    assert problems == {"damaged": [damaged], "zeros": []}.get(what, [cut])


def test_records_that_are_too_deep_or_too_long_are_skipped_and_reported(tmp_path: Path, limit: Limit) -> None:
    limit(records, _LARGEST_RECORD=100_000)
    deep = b"[" * 100 + b"]" * 100
    path = file_of(tmp_path, [row(0), row(1, {"x": deep}), row(2, {"x": "x" * 100_000}), row(3)])
    rows, problems = rows_of(path)
    assert [found["_step"] for found in rows] == [0, 3]
    assert problems == [
        "1 of its records, of more than 100000 bytes, are skipped",
        "1 of its records, with too deeply nested values, are skipped",
    ]


def test_a_file_is_followed_byte_by_byte(tmp_path: Path) -> None:
    """Each record is read once it is complete, also one that a block's end divides, and after damage."""
    path = file_of(tmp_path, [row(step, {"x": "x" * 3000}) for step in range(30)])
    whole = bytearray(path.read_bytes())
    whole[40_000] ^= 1
    expected, _ = rows_of(path)
    path.write_bytes(b"")
    found: list[Any] = []
    read = read_records(path, follow=True)
    with path.open("ab", 0) as file:
        for begin in range(0, len(whole), 97):
            file.write(whole[begin : begin + 97])
            found += [contents for kind, contents in iter(lambda: next(read), PAUSE) if kind == "history"]
    assert 15 < len(found) < len(expected)
    assert [one for one in expected if one in found] == found
