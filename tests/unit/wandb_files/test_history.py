"""History rows that are decoded without W&B's reader equal those of W&B's reader."""

from __future__ import annotations

import math
import os
import random
import threading
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from record_files import Record, content_of, end, framed, header, new_record, row, run, serialised

from dist_wandb.errors import ReadError
from dist_wandb.wandb_files import history, inspection, record_file
from dist_wandb.wandb_files.reading import read_run, with_floats
from dist_wandb.wandb_files.record_file import field_of

pytestmark = pytest.mark.newest  # wandb 0.31 is the first that reads its own files

NUMBERS = [
    *(0, -1, 7, 1.5, -0.0, 5.0, 1e3, 1e-300, 1e21, 1e20, 1e22, 2**53 + 1, 2**60 + 1, 2**63, 2**64, -(2**63), 10**30),
    *(math.nan, math.inf, -math.inf, 0.1, 1e-7, 1795477853.6973689, 123456789012345680000),
]
JSON = [b"5.0", b"1E5", b"0.10", b"1e400", b"-1e400", b"-0", b"1.7954778536973689e+09", b"2e+09", b" 7 ", b"12345678.0"]
OTHERS = [
    "text",
    'quoted "\n\\',
    "µ☃",
    "\x00\x1b[2J",
    True,
    False,
    None,
    [1, [2.5, None]],
    {"a": {"b": "c"}},
    "x" * 500,
]
NAMES = ["loss", "val/acc", "a.b", "ünïcode", "あ", "x" * 130, "_runtime", "\t", '"', "\n\x12\x01a"]


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small files be split, too."""
    monkeypatch.setattr(inspection, "LARGE", 0)


def file_of(tmp_path: Path, records: Iterable[Record | bytes]) -> Path:
    path = tmp_path / "offline-run-1-exp" / "run-exp.wandb"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content_of([header(), run(), *records, end()]))
    return path


def rows_of(path: Path, **options: Any) -> tuple[list[dict[str, Any]], list[str]]:
    found: list[dict[str, Any]] = []

    def take(record: dict[str, Any]) -> None:
        if record["type"] == "history":
            items = record["history"].get("item", {})
            found.append(items if isinstance(items, dict) else {})  # not decoded, which all readers of rows skip

    problems = inspection.inspect(path, take, **options)
    return found, problems


def comparable(rows: Iterable[dict[str, Any]]) -> list[dict[str, str]]:
    """Return values with their types, and with NaN equal to NaN."""
    return [{name: repr(with_floats(value)) for name, value in row.items()} for row in rows]


def both_ways(path: Path) -> list[dict[str, str]]:
    """Return the rows, after checking that both ways to read them have the same result."""
    by_reader, problems = rows_of(path)
    decoded, found = rows_of(path, in_order=False)
    assert comparable(decoded) == comparable(by_reader)
    assert found == problems
    return comparable(decoded)


def nested(names: Iterable[str], value: bytes) -> bytes:
    """Return an item of a row."""
    return field_of(1, b"".join(field_of(2, name.encode()) for name in names) + field_of(16, value))


def of_items(*items: bytes) -> bytes:
    return field_of(2, b"".join(items))


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_each_number_equals_that_of_the_reader(tmp_path: Path, number: float) -> None:
    rows = both_ways(file_of(tmp_path, [row(0, {"x": number}), row(1, {"x": number})]))
    assert [set(found) for found in rows] == [{"loss", "global_step", "_step", "x"}] * 2


def test_each_notation_of_a_number(tmp_path: Path) -> None:
    records = [row(step, {"x": text}) for step, text in enumerate([*JSON, *JSON])]
    assert [found["x"] for found in both_ways(file_of(tmp_path, records))[: len(JSON)]] == [
        *("5", "100000", "0.1", "inf", "-inf", "0", "1795477853.6973689", "2000000000", "7", "12345678")
    ]


LOOSE = [b"00", b"01", b"-00", b"1.", b"1.e5", b"-01.5", b"01E5", b" 01 ", b"[01, 1.]", b'{"b": 007}', b'["01", 01]']
ODD = [
    b"",
    b"  ",
    b"1 2",
    b"nan",
    b"-NaN",
    b"+1",
    b".5",
    b"1e",
    b"0x1",
    b"1_0",
    b"-",
    b"1.5.2",
    b"tru",
    b'"\x01"',
    b"[1,]",
]
INSIDE = [b"NaN", b"-Infinity", b"9223372036854775808", b"-9223372036854775809", b"1e400", b"5.0", b"1e20", b"2e+09"]
SURROGATES = [b'"\\ud800"', b'"\\ud83d\\ude00 \\ud800x"', b'{"\\ud800": "\\udfff"}']


def item(name: bytes, value: bytes) -> bytes:
    return field_of(1, field_of(1, name) + field_of(16, value))


def test_values_that_wandb_does_not_write_equal_those_of_the_reader(tmp_path: Path) -> None:
    values = [
        *LOOSE,
        *ODD,
        *SURROGATES,
        *(b"[%s]" % one for one in INSIDE),
        *(b'{"a": [%s, 0.5]}' % one for one in INSIDE),
    ]
    rows = [of_items(item(b"x", value), item(b"y", b"1")) for value in values]
    assert len(both_ways(file_of(tmp_path, rows))) == len(values)


def test_no_item_hides_another_one(tmp_path: Path) -> None:
    """The rest of a row looks like its step if it begins within a name, at a byte 0x12 and the number of bytes left."""
    number = item(b"n", b"1.5")
    size = len(item(b"y" * 60, b'"text"'))
    before = len(number) - 4  # of the name: tags and lengths precede it
    name = (b"y" * before + bytes([0x12, size - 2])).ljust(60, b"y")
    rows = [of_items(number), of_items(item(name, b'"text"'), number)]
    assert [len(row) for row in both_ways(file_of(tmp_path, rows))] == [1, 2]


def test_random_rows_equal_those_of_the_reader(tmp_path: Path) -> None:
    chance = random.Random(11)
    names = [b"a", b"b", b"\x12", b"\x12\x01", b"\n\x01a", b"a\x12\x05", b"n" * 130, "é".encode(), b""]
    values = [*LOOSE, *ODD, *SURROGATES, *INSIDE, *JSON, b'"text"', b"1", b"0.5", b"true"]
    rows = []
    for _ in range(3000):
        items = [item(chance.choice(names), chance.choice(values)) for _ in range(chance.randint(0, 5))]
        if chance.random() < 0.2:
            items.append(nested(chance.choices(["a", "b.c", "\x12"], k=chance.randint(1, 3)), chance.choice(values)))
        rows.append(of_items(*items))
    assert len(both_ways(file_of(tmp_path, rows))) == 3000


def test_damaged_rows_are_skipped_as_by_the_reader(tmp_path: Path) -> None:
    """The reader refuses a row that is no valid message in any part, also in parts that are not shown."""
    chance = random.Random(1)
    sound = serialised([row(step, {"val/acc": b"1e3", "é": "text", "n": [1, 2]}) for step in range(50)])
    step_of = [
        field_of(2, inside)
        for inside in (b"", b"\x08\x05", b"\x08\x80\x00", b"\x09", b"\x0f", b"\x08\x80", b"\xc3\xa9")
    ]
    item = nested(["a"], b"1")
    odd = [of_items(item, step) for step in step_of]
    odd += [
        of_items(item, field_of(200, inside)) for inside in (b"", field_of(1, b"id"), field_of(1, b"\xff"), b"\x07")
    ]
    odd += [of_items(field_of(1, field_of(number, b"\xff") + item[2:])) for number in (1, 2, 7, 8, 9, 16)]
    odd += [
        of_items(field_of(1, field_of(2, b"a")), broken)
        for broken in (item, b"\x0f", field_of(1, field_of(2, b"\xff")))
    ]
    damaged: list[bytes] = []
    while len(damaged) < 3000:
        record = bytearray(chance.choice(sound))
        for place in chance.sample(range(3, len(record)), chance.randint(1, 3)):
            record[place] = chance.choice([chance.randrange(256), 0x08, 0x0A, 0x12, 0x82, 0xFF])
        damaged.append(bytes(record))
    path = file_of(tmp_path, [*odd, *damaged])
    (by_reader, problems), (decoded, found) = rows_of(path), rows_of(path, in_order=False)
    assert comparable(decoded) == comparable(by_reader)
    assert problems
    assert found


def test_names_and_values_of_all_kinds_in_many_rows(tmp_path: Path) -> None:
    chance = random.Random(7)
    records: list[Record | bytes] = []
    for step in range(2000):
        values = {chance.choice(NAMES): chance.choice([*NUMBERS, *OTHERS]) for _ in range(chance.randint(0, 6))}
        record = row(step, values)
        if step % 3 == 0:
            record.history.step.num = step
        chance.shuffle(items := list(record.history.item))
        del record.history.item[:]
        record.history.item.extend(items)
        records.append(record)
    assert len(both_ways(file_of(tmp_path, records))) == 2000


@pytest.mark.parametrize(
    "items",
    [
        [nested(["val", "loss"], b"1")],
        [nested(["val", "loss"], b"1"), nested(["val.loss"], b"2")],
        [nested(["a"], b"1"), nested(["a"], b"2")],
        [nested(["a"], b"1"), nested(["a", "b"], b"2")],
        [nested([""], b"1")],
        [nested(["a"], b"no JSON")],
        [field_of(1, field_of(1, b"key") + field_of(16, b"1"))],
        [field_of(1, field_of(16, b"1") + field_of(2, b"value first"))],
        [field_of(1, field_of(2, b"a") + field_of(16, b"1") + field_of(16, b"2"))],
        [field_of(1, field_of(2, b"a") + field_of(16, b"1") + field_of(2, b"b"))],
        [nested(["a"], b"1"), field_of(9, b"unknown")],
        [field_of(1, field_of(2, b"a") + field_of(16, b"1") + field_of(9, b"unknown"))],
        [],
    ],
    ids=[
        *("nested", "of one name", "twice", "name and group", "no name", "text", "key", "value first", "two values"),
        "value in the middle",
        *("unknown field", "unknown field of an item", "empty"),
    ],
)
def test_items_of_each_form(tmp_path: Path, items: list[bytes]) -> None:
    """Each form is read twice, because names are cached, and among numbers."""
    plain = nested(["plain"], b"1.5")
    odd = [of_items(plain, *items), of_items(*items, plain), of_items(*items)]
    rows = both_ways(file_of(tmp_path, [*odd, of_items(nested(["a"], b"1"))]))
    assert len(rows) == 4
    assert rows[3] == {"a": "1"}


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
    rows, problems = rows_of(file_of(tmp_path, [of_items(good), field_of(2, bad), of_items(good)]), in_order=False)
    assert rows == [{"a": 1.25}] * 2
    assert problems == ["1 of its rows are malformed, and are skipped"]


def test_a_lone_surrogate_is_replaced(tmp_path: Path) -> None:
    """Python parses a lone surrogate in JSON, but cannot encode it."""
    rows, _ = rows_of(file_of(tmp_path, [row(0, {"x": b'"\\ud800"', "y": b'["\\ud83d\\ude00"]'})]), in_order=False)
    assert rows[0]["x"] == "\ufffd"  # as W&B's reader prints it
    assert rows[0]["y"] == ["\U0001f600"]


def test_new_names_are_in_alphabetical_order_as_from_the_reader(tmp_path: Path) -> None:
    path = file_of(tmp_path, [of_items(nested(["b"], b"1"), nested(["a"], b"2"))])
    assert list(rows_of(path, in_order=False)[0][0]) == list(rows_of(path)[0][0]) == ["a", "b"]


def test_rows_follow_other_records_and_unneeded_kinds_are_skipped(tmp_path: Path) -> None:
    summary, stats = new_record(), new_record()
    summary.summary.update.add(key="loss", value_json="1")
    stats.stats.item.add(key="cpu", value_json="1")
    path = file_of(tmp_path, [row(0), summary, stats, row(1)])
    kinds: list[str] = []

    def note(record: dict[str, Any]) -> None:
        kinds.append(record["type"])

    inspection.inspect(path, note, in_order=False)
    assert kinds == ["header", "run", "exit", "history", "history"]
    kinds.clear()
    inspection.inspect(path, note, in_order=False, skipped=inspection.UNUSED - {"stats"})
    assert kinds == ["header", "run", "stats", "exit", "history", "history"]


def test_a_record_with_more_than_a_row_is_left_to_the_reader(tmp_path: Path) -> None:
    both = row(0)
    both.num = 3
    path = tmp_path / "run-exp.wandb"
    records = [*serialised([header(), run()]), both.SerializeToString() + field_of(200, b""), *serialised([row(1)])]
    path.write_bytes(framed(records))
    assert len(both_ways(path)) == 2


def test_values_that_are_nested_too_deeply_are_skipped_and_reported(tmp_path: Path) -> None:
    deep = b"[" * 100 + b"]" * 100
    path = file_of(tmp_path, [row(0), row(1, {"x": deep}), row(2)])
    rows, problems = rows_of(path, in_order=False)
    assert [found["_step"] for found in rows] == [0, 2]
    assert problems == ["1 of its rows, with too deeply nested values, are skipped"]


@pytest.mark.parametrize("what", ["damaged", "cut off", "cut off in a header", "no record file"])
def test_a_damaged_file_is_left_to_the_reader(tmp_path: Path, what: str) -> None:
    path = file_of(tmp_path, [row(step) for step in range(2000)])
    content = bytearray(path.read_bytes())
    if what == "damaged":
        content[40_000] ^= 1
    elif what == "no record file":
        content[:4] = b"abcd"
    else:
        content = content[: -(10 if what == "cut off" else end().ByteSize() + 5)]
    path.write_bytes(content)
    assert history.split(path, tmp_path / "copy" / "others.wandb", (), threading.Event()) is None
    if what == "no record file":
        with pytest.raises(ReadError, match="cannot read it"):
            rows_of(path, in_order=False)
    else:
        assert len(both_ways(path)) > 500


@pytest.mark.parametrize("limit", ["_MOST_COPIED", "_LARGEST_RECORD"])
def test_a_file_with_very_large_parts_is_left_to_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    path = file_of(tmp_path, [row(0, {"x": "x" * 100_000})])
    assert history.split(path, tmp_path / "copy" / "others.wandb", (), threading.Event()) == 1
    monkeypatch.setattr(history, limit, 1)
    assert history.split(path, tmp_path / "again" / "others.wandb", (), threading.Event()) is None
    assert len(both_ways(path)) == 1


@pytest.mark.parametrize("what", ["sound", "damaged"])
def test_records_that_are_no_rows_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """W&B's reader and the parsing of its output take longest for many small records."""
    many = [field_of(10, field_of(1, b"alert")) for _ in range(20)]
    path = file_of(tmp_path, [*many, *(row(step) for step in range(30)), *(field_of(2, b"") for _ in range(20))])
    if what == "damaged":
        path.write_bytes(path.read_bytes()[:-3])
    assert len(rows_of(path, in_order=False, skipped=())[0]) == 50
    monkeypatch.setattr(record_file, "MOST_OTHERS", 30)
    with pytest.raises(ReadError, match=r"run-exp\.wandb: has more than 30 records that are neither rows nor .*, or"):
        rows_of(path, in_order=False, skipped=())


def test_a_full_disk_does_not_prevent_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record_file.Writer, "write", full)
    assert len(both_ways(file_of(tmp_path, [row(0)]))) == 1


def test_rows_that_are_appended_during_reading_are_ignored(tmp_path: Path) -> None:
    """The added data may be incomplete."""
    path = file_of(tmp_path, [row(step) for step in range(10)])
    more = framed(serialised([row(step) for step in range(10, 20)]))[7:-3]

    def grow(record: dict[str, Any]) -> None:
        if record["type"] == "run":
            with path.open("ab") as file:
                file.write(more)
        elif record["type"] == "history":
            rows.append(record["history"]["item"]["_step"])

    rows: list[int] = []
    assert inspection.inspect(path, grow, in_order=False) == []
    assert rows == list(range(10))


def test_a_file_that_shrinks_during_reading_is_an_error(tmp_path: Path) -> None:
    path = file_of(tmp_path, [row(step) for step in range(10)])

    def shrink(record: dict[str, Any]) -> None:
        if record["type"] == "run":
            os.truncate(path, 100)

    with pytest.raises(ReadError, match=r"run-exp\.wandb: has changed while it was read"):
        inspection.inspect(path, shrink, in_order=False)


def test_reading_of_rows_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_BETWEEN_CHECKS", 10)
    path = file_of(tmp_path, [row(step) for step in range(1000)])
    stopped = threading.Event()
    rows: list[Any] = []

    def stop(record: dict[str, Any]) -> None:
        if record["type"] == "history":
            rows.append(record)
            stopped.set()

    with pytest.raises(ReadError, match=r"run-exp\.wandb: was not read to its end because reading was interrupted"):
        inspection.inspect(path, stop, stopped, in_order=False)
    assert 1 <= len(rows) <= 20


def test_names_without_number_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_MOST_NAMES", 5)
    records = [row(step, {f"name{step % 20}": step}) for step in range(100)]
    assert len(both_ways(file_of(tmp_path, records))) == 100


def test_small_files_and_followed_ones_are_not_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "LARGE", history.LARGE)
    monkeypatch.setattr(inspection, "split", lambda *_: pytest.fail("it was split"))
    path = file_of(tmp_path, [row(0)])
    assert len(rows_of(path, in_order=False)[0]) == 1
    monkeypatch.setattr(inspection, "LARGE", 0)
    assert len(rows_of(path, in_order=False, follow=True)[0]) == 1


def test_a_large_file_gives_the_same_run_whether_split_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is split because of its size, without any setting."""
    chance = random.Random(3)
    rows = [row(step, {f"m{number}": chance.gauss(0, 1) for number in range(20)}) for step in range(2500)]
    path = file_of(tmp_path, rows)
    assert path.stat().st_size > history.LARGE
    texts = []
    for large in (history.LARGE, 2**60):
        monkeypatch.setattr(inspection, "LARGE", large)
        found = read_run(path)
        texts.append(repr((found, *map(asdict, found.metrics.values()))))
    assert texts[0] == texts[1]
