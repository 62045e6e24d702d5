"""Copies of W&B's record files without their first lines: records of all sizes, and damage at every position."""

from __future__ import annotations

import random
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits import Limit
from record_files import BLOCK, framed, varint

from dist_wandb.errors import ReadError
from dist_wandb.wandb_files import record_file
from dist_wandb.wandb_files.record_file import copy_without, field_of, records_of

HISTORY, SUMMARY, STATS, OUTPUT_RAW, EXIT, ENVIRONMENT = 2, 3, 7, 13, 18, 26


def record(kind: int, content: bytes, number: int = 300) -> bytes:
    """Return a protobuf message as W&B writes it: record number, contents, and then a note about the run."""
    return varint(1 << 3) + varint(number) + field_of(kind, content) + field_of(200, b"\n\x01p")


def output(line: str) -> bytes:
    """Return a record of console output; its time stamp contains a byte that looks like a line break but is none."""
    return record(OUTPUT_RAW, b"\x08\x01" + field_of(2, b"\x08\x0a\x10\x0a") + field_of(3, line.encode()))


def copied(directory: Path, content: bytes, **first: int) -> bytes:
    source, target = directory / "run-exp.wandb", directory / "copy.wandb"
    source.write_bytes(content)
    with source.open("rb") as opened, target.open("wb") as copy:
        copy_without(opened, copy, None, **first)
    return target.read_bytes()


@given(sizes=st.lists(st.integers(0, 3 * BLOCK) | st.integers(BLOCK - 40, BLOCK), max_size=6))
def test_a_copy_of_all_records_equals_the_file(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    content = framed([record(SUMMARY, bytes(size)) for size in sizes])
    assert copied(tmp_path_factory.mktemp("log"), content) == content


def test_the_first_lines_of_each_stream_are_left_out_and_the_end_comes_last(tmp_path: Path) -> None:
    rows = [record(HISTORY, b"row %d" % number) for number in range(5)]
    samples = [record(STATS, b"sample %d" % number) for number in range(3)]
    others = [record(17, b"the run"), record(SUMMARY, b"summary"), record(EXIT, b"")]
    lines = [output("one"), output(" line\n"), output("two\nthree\n"), output("four\n")]
    mixed = [others[0], *rows[:3], samples[0], *lines[:2], others[1], *rows[3:], *samples[1:], *lines[2:], others[2]]
    left = [others[0], rows[2], others[1], *rows[3:], *samples[1:], lines[3], others[2]]
    assert copied(tmp_path, framed(mixed), history=2, events=1, console=2) == framed(left)
    hurt = record(OUTPUT_RAW, b"\x1a\x7fone\n")  # its lines are not counted
    lines = [output("one\n"), output("two\n")]
    assert copied(tmp_path, framed([hurt, *lines]), console=1) == framed(lines[1:])
    # W&B's uploader drops what follows the end; wandb writes records about the machine there if a run was short.
    machine = record(ENVIRONMENT, b"machine")
    assert copied(tmp_path, framed([rows[0], others[2], machine])) == framed([rows[0], machine, others[2]])


@pytest.mark.parametrize("lost", [1, 3, 6, 7, 8, 30])
def test_an_incomplete_record_is_left_out(tmp_path: Path, lost: int) -> None:
    records = [record(HISTORY, b"a row of some length, number %d" % number) for number in range(3)]
    assert copied(tmp_path, framed(records)[:-lost]) == framed(records[:2])


def test_reading_continues_with_the_block_after_damage(tmp_path: Path) -> None:
    schedule = random.Random(0)
    records = [record(HISTORY, schedule.randbytes(500), number) for number in range(300)]
    content = bytearray(framed(records))
    content[BLOCK + 100 : BLOCK + 120] = bytes(20)
    left = copied(tmp_path, bytes(content))
    in_a_block = BLOCK // len(records[-1])
    assert any(
        left == framed(records[:first] + records[first + lost :])
        for first in (in_a_block - 1, in_a_block, in_a_block + 1)
        for lost in (in_a_block, in_a_block + 1, in_a_block + 2)
    )


# --- what no wandb writes ---------------------------------------------------------------------------------------------


NEVER_WRITTEN = {
    "a tag alone": b"\x08",
    "a number without its end": b"\xff",
    "a number of 320 kB": b"\xff" * 320_000 + b"\x01",
    "a number of 70 bits": b"\x08" + b"\xff" * 9 + b"\x7f",
    "a text longer than the record": b"\x12\x7f" + b"row",
    "a fixed number cut off": b"\x0d\x00",
    "the field 0": b"\x00\x01",
    "an unknown type": b"\x0f\x01",
}


@pytest.mark.parametrize("content", NEVER_WRITTEN.values(), ids=NEVER_WRITTEN.keys())
def test_an_invalid_message_with_a_valid_checksum_is_left_out(tmp_path: Path, content: bytes) -> None:
    rows = [record(HISTORY, b"first"), record(HISTORY, b"last")]
    assert copied(tmp_path, framed([rows[0], content, rows[1]])) == framed(rows)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        *((content, r"does not start like a \.wandb file") for content in (b"", b":W&B", b"something else")),
        (framed([varint(25 << 3 | 3) + record(HISTORY, b"row")]), r"contains a record .*a group \(field 25\)"),
        (framed([b"\x08\x01" * 1001]), "contains a record .*more than 1000 fields"),
        (framed([record(HISTORY, bytes(3 * BLOCK))]), f"a record of more than {3 * BLOCK} bytes"),
    ],
    ids=["empty", "short", "other", "a group", "fields", "too large"],
)
def test_a_file_that_wandb_never_writes_is_refused(tmp_path: Path, limit: Limit, content: bytes, reason: str) -> None:
    limit(record_file, MOST_BYTES=3 * BLOCK)
    with pytest.raises(ReadError, match=reason):
        copied(tmp_path, content)
    whole = framed([record(HISTORY, bytes(3 * BLOCK - 20))])
    assert copied(tmp_path, whole) == whole


def test_a_record_of_many_blocks_takes_at_most_three_times_its_memory(tmp_path: Path) -> None:
    """The blocks were once added and cut off one by one, which took quadratic time."""
    content = framed([record(HISTORY, bytes(32 * 2**20))])
    (tmp_path / "run-exp.wandb").write_bytes(content)
    begun = time.thread_time()
    tracemalloc.start()
    with (tmp_path / "run-exp.wandb").open("rb") as source, (tmp_path / "copy").open("wb") as target:
        copy_without(source, target)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 3 * len(content)
    assert time.thread_time() - begun < 10  # it once took 17 s on an idle machine; it takes 0.2 s
    assert (tmp_path / "copy").read_bytes() == content


@pytest.mark.parametrize("part", [b"", b"\x12\x00", field_of(10, b"\x0a\x10" + bytes(16))])
def test_a_file_of_tiny_parts_is_not_read_without_end(tmp_path: Path, limit: Limit, part: bytes) -> None:
    path = tmp_path / "run-exp.wandb"
    path.write_bytes(framed([part] * 20_000))
    assert len(list(records_of(path))) == 20_000
    limit(record_file, SECONDS=0.001, SECONDS_PER_MIB=0.0)
    with pytest.raises(ReadError, match="takes more than 0 s of processor time"):
        list(records_of(path))
