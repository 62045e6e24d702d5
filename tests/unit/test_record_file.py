"""W&B's record files, copied without their first lines: with records of every size, and damaged in every place."""

from __future__ import annotations

import random
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_wandb.errors import ReadError
from dist_wandb.record_file import NOTHING, Lines, copy_without

HEADER = b":W&B\xe1\xbe\x00"
BLOCK = 32_768
HISTORY, SUMMARY, STATS, OUTPUT_RAW, EXIT = 2, 3, 7, 13, 18


def varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def record(kind: int, content: bytes, number: int = 300) -> bytes:
    """A protobuf message as W&B writes it: its number, its contents, and a note about the run behind them."""
    return varint(1 << 3) + varint(number) + field(kind, content) + field(200, b"\n\x01p")


def output(line: str) -> bytes:
    """What was printed; the time stamp in it has a byte that is no line break but looks like one."""
    return record(OUTPUT_RAW, b"\x08\x01" + field(2, b"\x08\x0a\x10\x0a") + field(3, line.encode()))


def log(records: list[bytes]) -> bytes:
    """The format, written once more, and in another way."""
    content = bytearray(HEADER)
    for message in records:
        begin, is_first = 0, True
        while True:
            left = BLOCK - len(content) % BLOCK
            if left < 7:
                content += bytes(left)
                continue
            chunk = message[begin : begin + left - 7]
            is_last = begin + len(chunk) == len(message)
            kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[is_first, is_last]
            content += struct.pack("<IHB", zlib.crc32(bytes([kind]) + chunk), len(chunk), kind) + chunk
            begin, is_first = begin + len(chunk), False
            if is_last:
                break
    return bytes(content)


def copied(directory: Path, content: bytes, first: Lines = NOTHING) -> bytes:
    source, target = directory / "run-exp.wandb", directory / "copy.wandb"
    source.write_bytes(content)
    copy_without(source, target, first)
    return target.read_bytes()


@given(sizes=st.lists(st.integers(0, 3 * BLOCK) | st.integers(BLOCK - 40, BLOCK), max_size=6))
def test_a_copy_of_everything_is_the_same(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    content = log([record(SUMMARY, bytes(size)) for size in sizes])
    assert copied(tmp_path_factory.mktemp("log"), content) == content


def test_the_first_lines_of_each_stream_are_left_out(tmp_path: Path) -> None:
    rows = [record(HISTORY, b"row %d" % number) for number in range(5)]
    samples = [record(STATS, b"sample %d" % number) for number in range(3)]
    others = [record(17, b"the run"), record(SUMMARY, b"summary"), record(EXIT, b"")]
    lines = [output("one"), output(" line\n"), output("two\nthree\n"), output("four\n")]
    mixed = [others[0], *rows[:3], samples[0], *lines[:2], others[1], *rows[3:], *samples[1:], *lines[2:], others[2]]
    left = [others[0], rows[2], others[1], *rows[3:], *samples[1:], lines[3], others[2]]
    assert copied(tmp_path, log(mixed), Lines(history=2, events=1, console=2)) == log(left)


def test_more_lines_than_there_are_leave_none(tmp_path: Path) -> None:
    assert copied(tmp_path, log([record(HISTORY, b"row"), record(EXIT, b"")]), Lines(9, 9, 9)) == log(
        [record(EXIT, b"")]
    )


@pytest.mark.parametrize("lost", [1, 3, 6, 7, 8, 30])
def test_a_record_that_was_not_written_to_its_end_is_left_out(tmp_path: Path, lost: int) -> None:
    records = [record(HISTORY, b"a row of some length, number %d" % number) for number in range(3)]
    assert copied(tmp_path, log(records)[:-lost]) == log(records[:2])


def test_after_damage_the_next_block_goes_on(tmp_path: Path) -> None:
    schedule = random.Random(0)
    records = [record(HISTORY, schedule.randbytes(500), number) for number in range(300)]
    content = bytearray(log(records))
    content[BLOCK + 100 : BLOCK + 120] = bytes(20)
    left = copied(tmp_path, bytes(content))
    in_a_block = BLOCK // len(records[-1])
    assert any(
        left == log(records[:first] + records[first + lost :])
        for first in (in_a_block - 1, in_a_block, in_a_block + 1)
        for lost in (in_a_block, in_a_block + 1, in_a_block + 2)
    )


def test_a_record_over_several_blocks_of_which_one_is_damaged_is_left_out(tmp_path: Path) -> None:
    records = [record(HISTORY, b"first"), record(HISTORY, bytes(3 * BLOCK)), record(HISTORY, b"last")]
    content = bytearray(log(records))
    content[BLOCK + 50] ^= 0xFF
    assert copied(tmp_path, bytes(content)) == log([records[0], records[2]])


@pytest.mark.parametrize("content", [b"", b":W&B", b"something else"])
def test_what_is_no_record_file_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ReadError, match=r"run-exp\.wandb: does not begin like a \.wandb file"):
        copied(tmp_path, content)


def test_lines_add_up_and_none_are_false() -> None:
    assert Lines(1, 2, 3) + Lines(10, 20, 30) == Lines(11, 22, 33)
    assert not Lines()
    assert Lines(console=1)
