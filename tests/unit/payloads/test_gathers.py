"""Tables and images of all ranks: copying, encoding, decoding and merging, without other processes."""

from __future__ import annotations

import datetime as dt
import enum
import logging
import math
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import wandb
from devices import StandIn
from fakes import TWO, FakeWandb, Job, on_ranks
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from processes import wait_until

from dist_wandb.errors import ConfigurationError
from dist_wandb.exchange.attachments import Attachments, FusedGathers
from dist_wandb.exchange.protocol.calls import Key, Series
from dist_wandb.exchange.transport import members_of
from dist_wandb.payloads import cells, gathers
from dist_wandb.payloads.cells import Part
from dist_wandb.payloads.framing import framed, unframed
from dist_wandb.payloads.gathers import decoded, differ, fair, gathered, gathered_table, whole
from dist_wandb.runs import wandb_media


def sent(value: gathers.Gathered, rank: int = 0) -> Part:
    return decoded_of(logged(value), rank)


def logged(value: gathers.Gathered, make_image: Callable[..., Any] = wandb_media.image) -> gathers.Gathered:
    value.use(0, make_image)
    return value


def decoded_of(value: gathers.Gathered, rank: int = 0) -> Part:
    return decoded(value.kind, value.encoded().as_bytes(rank))


def pixels(image: wandb.Image) -> Image.Image:
    assert image.image is not None
    return image.image


def rows_of(table: Any) -> list[list[Any]]:
    return [list(row) for row in table.data]


# --- logged values ----------------------------------------------------------------------------------------------------


class Level(enum.IntEnum):
    HIGH = 3


class Name(str):
    __slots__ = ()


class Moment(dt.datetime):
    """A datetime of another library."""


class MissingDate(dt.datetime):
    """Like pandas' `NaT`: a datetime that differs from itself, and has no date."""

    __hash__ = None  # type: ignore[assignment]  # not needed

    def __ne__(self, other: object) -> bool:
        return True

    def date(self) -> dt.date:
        raise ValueError("there is no date")


UTC = dt.timezone.utc
CELLS: list[tuple[Any, Any]] = [
    (1, 1),
    (2**70, 2**70),
    (True, True),
    (None, None),
    ("é\n\0", "é\n\0"),
    (0.1, 0.1),
    (math.inf, math.inf),
    (-math.inf, -math.inf),
    (np.float32(0.5), 0.5),
    (np.int64(7), 7),
    (np.bool_(True), True),
    (np.str_("x"), "x"),
    (np.array(3), 3),
    (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
    (np.array(["a", None], dtype=object), ["a", None]),
    (torch.tensor(2), 2),
    (torch.tensor([[1.5, 2.5]], requires_grad=True), [[1.5, 2.5]]),
    (Level.HIGH, 3),
    (Name("x"), "x"),
    ((1, "a", [None, torch.tensor([1])]), [1, "a", [None, [1]]]),
    ({"a": {"b": (1, np.int32(2))}}, {"a": {"b": [1, 2]}}),
    (dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC), dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)),
    (dt.date(2026, 1, 2), dt.date(2026, 1, 2)),
    (Moment(2026, 1, 2, 3, tzinfo=UTC), dt.datetime(2026, 1, 2, 3, tzinfo=UTC)),
    (MissingDate(2026, 1, 2), None),
    ([dt.date(2026, 1, 2), MissingDate(2026, 1, 2)], ["2026-01-02", None]),
]


@pytest.mark.parametrize(("cell", "arrives"), CELLS, ids=[str(cell) for cell, _ in CELLS])
def test_cells_arrive_with_value_and_type(cell: Any, arrives: Any) -> None:
    value = gathered([[cell, "beside"]], ["cell", "other"])
    assert value.replaced == []
    (row,) = sent(value).items
    assert row == [arrives, "beside"]
    assert type(row[0]) is type(arrives)


def test_nan_cells_arrive() -> None:
    ((cell,),) = sent(gathered([[math.nan]], ["cell"])).items
    assert math.isnan(cell)


@pytest.mark.parametrize("cell", [1j, {1, 2}, b"raw", Fraction(1, 3), {(1, 2): 3}, torch.tensor([1j])])
def test_other_cells_are_replaced_by_their_repr(cell: Any) -> None:
    value = gathered([[cell, [cell]]], ["cell", "inner"])
    assert sent(value).items == [[repr(cell), [repr(cell)]]]
    assert value.replaced == [type(cell).__name__]


@pytest.mark.newest  # wandb 0.19 needs torchvision for tensors
def test_later_changes_do_not_affect_gathered_values() -> None:
    inner, array, tensor, picture = [1], np.ones(2), torch.ones(2), Image.new("L", (2, 2), 5)
    rows = [[inner, array, tensor, picture]]
    value = gathered(rows, ["list", "array", "tensor", "image"])
    panel = gathered([array.reshape(1, 2), tensor.reshape(1, 1, 2), picture])
    inner.append(2)
    array += 1
    tensor += 1
    picture.putpixel((0, 0), 9)
    rows.append([])
    ((*plain, image),) = sent(value).items
    assert plain == [[1], [1.0, 1.0], [1.0, 1.0]]
    expected = (5, *(pixels(wandb.Image(made)).getpixel((0, 0)) for made in (np.ones((1, 2)), torch.ones(1, 1, 2))))
    found = [cells.opened_image(item.value).getpixel((0, 0)) for item in (image, *sent(panel).items)]
    assert found == [expected[0], *expected[1:], expected[0]]


class Frame:
    columns = ("a", "b")

    def __len__(self) -> int:
        return 2

    def itertuples(self, *, index: bool, name: str | None) -> Iterator[tuple[Any, ...]]:
        assert (index, name) == (False, None)
        return iter([(1, "x"), (2, "y")])


def test_tables_of_wandb_frames_and_arrays_are_accepted() -> None:
    frame = Frame()
    for value in (
        gathered(wandb.Table(columns=["a", "b"], data=[[1, "x"], [2, "y"]])),
        gathered(frame),
        gathered_table(["ignored"], [[0]], frame),
        gathered_table(["a", "b"], [(1, "x"), (2, "y")]),
    ):
        assert sent(value)[1:] == (["a", "b"], 2, [[1, "x"], [2, "y"]])
    assert sent(gathered_table(["a", "b"], np.array([[1, 2]]))).items == [[1, 2]]
    assert sent(gathered_table()).columns == wandb.Table().columns
    cut = [gathered(frame, limit=1), gathered_table(["a", "b"], [[1, "x"], [2]], limit=1)]
    assert [sent(value)[2:] for value in cut] == [(2, [[1, "x"]])] * 2


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (
            lambda: gathered([[1, 2], [3]], ["a", "b"]),
            r"Row 1 of the table has 1 cells, but its columns are \['a', 'b'\]",
        ),
        (lambda: gathered([1], ["a"]), "Row 0 of the table is int"),
        (lambda: gathered(["ab"], ["a", "b"]), "Row 0 of the table is str"),
        (lambda: gathered([{"a": 1}], ["a"]), "Row 0 of the table is dict"),
        (lambda: gathered([], [1.5]), "neither text nor integers"),  # type: ignore[list-item]
        (lambda: gathered("rows", ["a"]), "given str as its rows"),
        (lambda: gathered([[1]], ["a"], limit=0), "limit=0 is not a number of rows"),
        (lambda: gathered([[1]], ["a"], limit="all"), "limit='all'"),  # type: ignore[arg-type]
        (lambda: gathered([[1]], ["a"], caption=["x"]), "caption with a table"),
        (lambda: gathered(3), "given int, but takes"),
        (lambda: gathered([object()]), "given object among images"),
        (lambda: gathered([np.zeros((2, 2))], caption=["a", "b"]), "caption has 2 items for 1 images"),
        (lambda: gathered([np.zeros((2, 2))], masks=[{}]), "'masks' is not an argument that can be gathered"),
    ],
)
def test_invalid_tables_and_images_are_refused_at_once(log: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        log()


def test_images_need_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigurationError, match="pip install pillow"):
        gathered([np.zeros((2, 2))])
    assert sent(gathered([])).items == []


# --- images -----------------------------------------------------------------------------------------------------------


def test_pillow_knows_png_before_an_image_is_encoded() -> None:
    """Threads that encode the first images at the same time would load it at the same time."""
    code = """from PIL import Image; from dist_wandb.payloads import cells
cells.png_of(0, {}, lambda _: exit(".png" not in Image.EXTENSION))"""
    assert subprocess.call((sys.executable, "-c", code)) == 0


def file_with(color: int, directory: Path) -> Path:
    Image.new("L", (3, 2), color).save(directory / "image.bmp")
    return directory / "image.bmp"


class Figure:
    def savefig(self, file: Any, *, format: str) -> None:  # noqa: A002  # matplotlib's name
        Image.new("RGB", (3, 2), (1, 2, 3)).save(file, format=format)


@pytest.mark.newest  # wandb 0.19 needs torchvision for tensors
@pytest.mark.parametrize(
    "image",
    [
        torch.randint(0, 255, (3, 4, 5)),
        torch.rand(1, 4, 5),
        np.random.default_rng(0).integers(0, 255, (4, 5, 3), dtype=np.uint8),
        np.random.default_rng(0).integers(0, 255, (4, 5), dtype=np.uint8),
        np.zeros((4, 5, 4), dtype=np.uint8),
        Image.new("RGBA", (3, 2), (1, 2, 3, 4)),
        Image.new("CMYK", (3, 2), (10, 20, 30, 40)),
        wandb.Image(np.full((4, 5, 3), 7, dtype=np.uint8)),
        wandb.Image(np.full((4, 5, 3), 7, dtype=np.uint8), file_type="jpg"),
    ],
    ids=lambda image: f"{type(image).__name__} {getattr(image, 'shape', getattr(image, 'mode', ''))}",
)
def test_images_arrive_as_wandb_shows_them(image: Any) -> None:
    is_cmyk = getattr(image, "mode", None) == "CMYK"
    shown = image.convert("RGB") if is_cmyk else pixels(wandb.Image(image))
    (picture,) = sent(gathered([image])).items
    arrived = cells.opened_image(picture.value)
    assert arrived.format == "PNG"
    assert (arrived.mode, arrived.size, arrived.tobytes()) == (shown.mode, shown.size, shown.tobytes())


def test_files_and_figures_are_read_at_once(tmp_path: Path) -> None:
    value = gathered([str(file_with(7, tmp_path)), file_with(7, tmp_path), Figure()])
    file_with(9, tmp_path)
    opened = [cells.opened_image(picture.value) for picture in sent(value).items]
    assert [image.getpixel((0, 0)) for image in opened] == [7, 7, (1, 2, 3)]
    with pytest.raises(FileNotFoundError):
        gathered([tmp_path / "missing.png"])


@pytest.mark.newest  # wandb 0.19 needs torchvision for tensors
def test_captions_and_boxes_are_sent_with_images() -> None:
    boxes = {"predictions": {"box_data": [{"position": {"minX": np.float32(0.5)}, "class_id": 1}]}}
    image = wandb.Image(np.zeros((2, 2)), caption="own")
    value = gathered([image, image], caption=[None, "given"], boxes=[boxes, None], mode=["L", None])
    first, second = sent(value).items
    assert first.beside == {
        "caption": "own",
        "boxes": {"predictions": {"box_data": [{"position": {"minX": 0.5}, "class_id": 1}]}},
    }
    assert second.beside == {"caption": "given"}
    assert value.replaced == []
    covered = wandb.Image(np.zeros((2, 2)), masks={"p": {"mask_data": np.zeros((2, 2), dtype=int)}})
    assert gathered([covered]).replaced == ["boxes or masks"]


@pytest.mark.newest  # wandb 0.19 needs torchvision for tensors
def test_encoding_leaves_no_files_behind(tmp_path: Path) -> None:
    paths = [tmp_path / "first.png", tmp_path / "second.png"]
    left = iter(paths)

    def in_known_file(value: Any, *arguments: Any, **named: Any) -> Any:
        path = next(left)
        pixels(wandb_media.image(value, *arguments, **named)).save(path)
        return wandb.Image(str(path))

    decoded_of(logged(gathered([np.zeros((4, 4, 3)), torch.rand(3, 4, 4)]), in_known_file))
    assert list(left) == []
    assert [path.exists() for path in paths] == [False, False]
    Image.new("L", (4, 4)).save(paths[0])
    sent(gathered([wandb.Image(str(paths[0]))]))
    assert paths[0].exists(), "the file of the user's image is still there"


@pytest.mark.newest  # wandb 0.19 shows tensors with torchvision only
def test_a_value_is_ready_after_the_device_has_finished_and_images_are_encoded() -> None:
    with StandIn().used() as device:
        with device.occupied(), device.no_waiting():
            table = logged(gathered([[device.tensor(7).expand(1), [device.tensor(8)]]], ["a", "b"]))
            images = logged(gathered([device.tensor(1).expand(3, 4, 4)], grouping=[device.tensor(9)]))
            assert [value.is_ready() or value.has_arrived() for value in (table, images)] == [False, False]
        for value in (table, images):
            wait_until(value.is_ready, 30)
        assert decoded_of(table).items == [[[7.0], [8.0]]]
        assert [image.beside for image in decoded_of(images).items] == [{"grouping": 9.0}]


def test_a_value_is_encoded_where_no_thread_can_be_started() -> None:
    """As while the interpreter shuts down, since Python 3.12."""
    table = logged(gathered([[7, "a"]], ["n", "text"]))
    with patch.object(threading.Thread, "start", side_effect=RuntimeError("can't create new thread")):
        assert table.is_ready()
    assert decoded_of(table).items == [[7, "a"]]


# --- bytes ------------------------------------------------------------------------------------------------------------


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.lists(JSON, min_size=2, max_size=2), max_size=5), st.integers(0, 2**20))
def test_any_rows_arrive(rows: list[list[Any]], rank: int) -> None:
    part = sent(gathered(rows, ["a", 1]), rank)
    assert part == Part(rank, ["a", 1], len(rows), rows)


HEAD = b'[0, ["a", "b"], 1]'


IMAGES = b"[0, [], 1]"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        framed(b""),
        framed(b'[1e400, ["a"], 0]'),
        framed(b'[0, ["a"], 1e400]'),
        framed(b'[-1, ["a"], 0]'),
        framed(b'[0, ["a"], true]'),
        framed(b'[0, ["a"], 9007199254740992]'),
        framed(b'[0, "ab", 0]'),
        framed(b'[0, [["a"], "b"], 0]'),
        pytest.param(framed(b"[" * 200_000), id="deep"),
        framed(HEAD, b""),
        framed(HEAD, framed(b'["ab", [], []]')),
        framed(HEAD, framed(b"[[1], [], []]")),
        framed(HEAD, framed(b"[[1, 2], [], [1]]")),
        framed(HEAD, framed(b'[["2026-01-01", 2], [], [-2]]')),
        framed(HEAD, framed(b"[[1, 2], [[1e400, {}]], []]", b"png")),
        framed(HEAD, framed(b"[[1, 2], [[0, []]], []]", b"png")),
        framed(HEAD, framed(b'[[1, 2], [[0, {"file_type": "svg"}]], []]', b"png")),
        framed(IMAGES, framed(b"[[null], [[0, []]], []]", b"png")),
        framed(IMAGES, framed(b'[[null], [[0, {"data_or_path": "x"}]], []]', b"png")),
        framed(IMAGES, framed(b'[[null], [[0, {"caption": ]], []]', b"png")),
        framed(IMAGES, framed(b'[["/etc/passwd"], [], []]')),  # in place of an image
    ],
)
def test_unreadable_bytes_are_refused_with_a_message(data: bytes) -> None:
    with pytest.raises(ConfigurationError, match=r"bytes that a rank sent as a table or images cannot be read"):
        decoded("images" if IMAGES in data else "table", data)


class Peer:
    """A group of this rank, which is the first, and a peer that sends given bytes."""

    rank = 0

    def __init__(self, amounts: bytes, data: bytes | None) -> None:
        self._amounts, self._data = amounts, data

    def tally(self, own: bytes) -> dict[bytes, frozenset[int]]:
        return members_of([own, self._amounts])

    def collect(self, own: bytes) -> list[bytes]:
        if self._data is None:
            raise ConfigurationError("Member 1 of the group announced 9 bytes")
        return [own, self._data]


@pytest.mark.parametrize("amounts", [b"", b"[]", b"[[1, 1e400, 5]]", b"[[1, -1, 5]]", b"[[1, 2]]", b"7", b"[" * 999])
def test_invalid_amounts_of_a_peer_affect_only_its_own_part(amounts: bytes) -> None:
    one, key = FusedGathers(Attachments(0, Counter()), merges=True), Key(Series("t", "table").text, 1, 0)
    one.keep(key, logged(gathered([[1]], ["a"])))
    one.exchange([key], Peer(amounts, framed(b"")))  # type: ignore[arg-type]  # the part of a group that is needed
    assert one.values.pop(key, ({}, 0))[0]["t"].rows == [[0, 1]]


@pytest.mark.parametrize("data", [None, framed(framed(b'[1e400, ["a"], 0]'))])
def test_an_invalid_part_of_a_peer_affects_only_its_table(data: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    lost = Counter[str]()
    one, key = FusedGathers(Attachments(0, lost), merges=True), Key(Series("t", "table").text, 1, 0)
    one.keep(key, logged(gathered([[1]], ["a"])))
    one.exchange([key], Peer(b"[[1, 20, 5]]", data))  # type: ignore[arg-type]
    assert one.values.pop(key, ({}, 0))[0] == {}
    assert "'t'" in caplog.text
    assert lost == {"that could not be put together": 1}


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=9), st.integers(0, 3000))
def test_the_limit_is_shared_fairly(wanted: list[int], limit: int) -> None:
    shares = fair(wanted, limit)
    assert sum(shares) == min(limit, sum(wanted))
    assert all(0 <= share <= most for share, most in zip(shares, wanted, strict=True))
    least = min((share for share, most in zip(shares, wanted, strict=True) if share < most), default=limit)
    assert all(share <= least + 1 for share in shares), "a rank that gets less than it wants gets as much as any other"


@given(st.lists(st.integers(1, 50), max_size=10), st.integers(0, 12), st.integers(0, 200))
def test_a_cut_keeps_the_first_items_within_both_limits(sizes: list[int], number: int, room: int) -> None:
    encoded = gathers.Encoded([b"x" * size for size in sizes], sum(sizes), [], len(sizes), 99)
    kept = [len(item) for item in unframed(encoded.within(room, number).as_bytes(0))[1:]]
    assert kept == sizes[: len(kept)]
    assert len(kept) <= number
    assert sum(kept) <= room
    is_whole = len(kept) == min(number, len(sizes))
    assert is_whole or sum(sizes[: len(kept) + 1]) > room


# --- merged values ----------------------------------------------------------------------------------------------------


def test_columns_are_matched_by_name_and_those_of_empty_tables_are_ignored() -> None:
    parts = [
        Part(0, ["Input"], 0, []),
        Part(1, ["a", "b"], 1, [[1, 2]]),
        Part(5, ["b", "c"], 2, [[3, 4], [5, 6]]),
    ]
    assert whole("table", parts) == (["rank", "a", "b", "c"], [[1, 1, 2, None], [5, None, 3, 4], [5, None, 5, 6]])
    assert differ(parts)
    assert not differ(parts[:2])
    assert whole("table", parts[:1]) == (["rank", "Input"], [])


def test_columns_of_the_same_name_and_the_users_rank_column_are_kept() -> None:
    parts = [Part(0, ["rank", "a", "a"], 1, [[7, 1, 2]]), Part(1, ["a", "rank"], 1, [[3, 8]])]
    assert whole("table", parts) == (["global_rank", "rank", "a", "a"], [[0, 7, 1, 2], [1, 8, 3, None]])


def has_types_of(found: wandb.Table, expected: wandb.Table) -> bool:
    """Return whether two tables are equal once they have no rows: those with NaN are never equal."""
    del found.data[:], expected.data[:]
    return bool(found == expected)


@given(st.lists(st.tuples(*[st.sampled_from([1, 0.5, math.nan, None, "x", True])] * 2), max_size=12))
@example([(math.nan, "x"), (0.5, None), (None, "x")])
def test_wandb_finds_the_same_types_in_a_selection_of_rows(rows: list[tuple[Any, Any]]) -> None:
    data: list[list[Any]] = [list(row) for row in rows]
    try:
        expected = wandb.Table(columns=["a", "b"], data=data)
    except TypeError:
        expected = wandb.Table(columns=["a", "b"], data=data, allow_mixed_types=True)
    found = wandb_media.table_of_any(["a", "b"], data)
    assert found.data is data
    assert has_types_of(found, expected)


def test_wandb_checks_all_rows_if_a_selection_is_not_enough() -> None:
    data: list[list[Any]] = [[[None]], [[1, 2]]]
    found = wandb_media.table_of_any(["a"], data)
    assert has_types_of(found, wandb.Table(columns=["a"], data=data))


# --- sessions and integrations ----------------------------------------------------------------------------------------


def test_each_run_has_its_own_rows_without_reduction(
    fake_wandb: FakeWandb, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    sessions = job(TWO, lambda _: {"id": "exp"}, run_mode="new")
    for rank, session in enumerate(sessions):
        session.log({"loss": float(rank), "t": gathered([[rank]], ["a"])}, step=1)
    on_ranks(2, lambda rank: sessions[rank].release())
    found = [(run.id, rows_of(row["t"])) for run in fake_wandb.runs for row in run.rows if "t" in row]
    assert sorted(found) == [("exp-rank-0", [[0, 0]]), ("exp-rank-1", [[1, 1]])]
    assert caplog.text.count("without a reduction does not gather") == 1


def test_gathering_without_reduction_is_refused_if_ranks_have_no_run(job: Job) -> None:
    sessions = job(TWO, lambda _: {"id": "exp"}, reduce=None)
    for session in sessions:
        with pytest.raises(ConfigurationError, match="reduce=None disables gathering"):
            session.log({"t": gathered([[1]], ["a"])}, step=1)


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "dist_wandb")
