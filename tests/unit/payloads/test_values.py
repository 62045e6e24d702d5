"""`log` copies values on the training thread: later changes have no effect, and it never waits."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torchmetrics
import wandb
from devices import OnStandIn, StandIn
from fakes import FakeWandb, Job, on_ranks
from processes import wait_until

from dist_wandb.errors import ConfigurationError
from dist_wandb.job.topology import Topology
from dist_wandb.payloads.devices import HostCopy, Later, whole
from dist_wandb.payloads.scalars import Paths, copied_row, copied_weight, flattened, is_number, nested

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
]


def same(value: object, expected: object) -> bool:
    return type(value) is type(expected) and value == expected


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.5, 7, True, False, -0.0, 2**80, math.inf, "text", ""])
def test_python_values_are_unchanged(value: object) -> None:
    assert same(copied_row({"x": value}, 0)["x"], value)
    assert same(copied_row({"x": value, "other": [1]}, 0)["x"], value)  # together with a value that is not a number


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.float16(0.5), 0.5),
        (np.int64(7), 7),
        (np.uint8(7), 7),
        (np.bool_(True), True),
        (torch.tensor(True), True),
        (np.array(0.5), 0.5),
        (np.array(7), 7),
        (np.str_("text"), "text"),
        (Fraction(1, 4), 0.25),
    ],
    ids=lambda value: f"{type(value).__name__} {value}",
)
def test_scalars_of_other_libraries_become_python_numbers(value: object, expected: object) -> None:
    assert same(copied_row({"x": value}, 0)["x"], expected)


def test_the_mean_of_masked_numbers_only_is_not_zero() -> None:
    assert math.isnan(copied_row({"iou": np.ma.masked_invalid([math.nan]).mean()}, 0)["iou"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)], ids=str)
def test_tensors_of_one_element_become_python_numbers(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.full(shape, 3, dtype=dtype)
    assert same(copied_row({"x": tensor}, 0)["x"], 3.0 if dtype.is_floating_point else 3)


def test_a_tensor_of_a_graph_is_detached() -> None:
    loss = (torch.tensor(0.25, requires_grad=True) * 2).sum()
    assert same(copied_row({"loss": loss}, 0)["loss"], 0.5)
    assert same(copied_row({"p": torch.nn.Parameter(torch.tensor([0.5]))}, 0)["p"], 0.5)


# --- other than numbers -----------------------------------------------------------------------------------------------


def test_mappings_are_flattened_with_dots() -> None:
    row = {"val": {"loss": 0.5, "per": {"class": np.int64(7)}}, "lr": 0.1, "none": {}, "text": {"a": "b", 1: 2}}
    paths: Paths = {}
    flat = copied_row(flattened(row, paths, 0), 0)
    assert flat == {"val.loss": 0.5, "val.per.class": 7, "lr": 0.1, "text.a": "b", "text.1": 2}
    assert list(paths) == [*list(flat)[:2], *list(flat)[3:]]


def test_flattened_rows_become_what_they_were_within_other_values() -> None:
    row = {"a": {"b": {"c": 1.0}}, "v": {"w": {"mean": torchmetrics.MeanMetric()}, "n": 2.0}, "f.g": 3}
    paths: Paths = {}
    flat = flattened(row, paths, 0)
    assert (list(flat), nested(flat, paths)) == (["a.b.c", "v.w.mean", "v.n", "f.g"], row)
    before = {"a": {"b": {"c": 0, "d": 0}}, "v": 1}
    assert nested(flat, paths, before) == {**row, "a": {"b": {"c": 1.0, "d": 0}}}


def test_complex_numbers_do_not_count_as_numbers() -> None:
    vector = torch.tensor([1j, 2.0])
    taken = copied_row(
        {"python": 1j, "numpy": np.complex64(1j), "array": np.array(1j), "tensor": torch.tensor(1j), "v": vector}, 0
    )
    vector += 1
    assert {taken[name] for name in ("python", "numpy", "array")} == {1j}
    assert (taken["tensor"], taken["v"].tolist()) == (torch.tensor(1j), [1j, 2.0])
    assert not any(map(is_number, taken.values()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_vectors_of_dtypes_unknown_to_numpy_become_float32(dtype: torch.dtype) -> None:
    taken = copied_row({"x": torch.ones(2).to(dtype)}, 0)["x"]
    assert (taken.dtype, taken.tolist()) == (torch.float32, [1.0, 1.0])


def test_lists_are_copied_with_their_items() -> None:
    array, tensor, inner, media = np.zeros(2), torch.zeros(()), [1], wandb.Html("<p>", inject=False)
    taken = copied_row({"list": [array, tensor, inner, {"a": array}, media], "tuple": (tensor, "text")}, 0)
    array += 1
    tensor += 1
    inner.append(2)
    assert (taken["list"][0].tolist(), taken["list"][1].item(), taken["list"][2]) == ([0, 0], 0, [1])
    assert taken["list"][3]["a"].tolist() == [0, 0]
    assert taken["list"][4] is media
    assert taken["tuple"] == (torch.tensor(0.0), "text")


@pytest.mark.parametrize(("around", "is_copied"), [(7, True), (8, False)])
@pytest.mark.parametrize("wrap", [lambda value: [value], lambda value: {0: value}], ids=["list", "mapping"])
def test_containers_are_copied_to_a_depth_of_eight(wrap: Callable[[Any], Any], around: int, is_copied: bool) -> None:
    innermost = [1.0]
    value: Any = innermost
    for _ in range(around):
        value = wrap(value)
    taken = copied_row({"x": value}, 0)["x"]
    for _ in range(around):
        taken = taken[0]
    assert taken == innermost
    assert (taken is not innermost) is is_copied


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (None, None),
        (0, 0),
        (0.5, 0.5),
        (32, 32),
        (True, 1.0),
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(32), 32.0),
        (np.array(32), 32.0),
        (torch.tensor(32), 32),
        (torch.tensor([0.5], dtype=torch.bfloat16, requires_grad=True), 0.5),
        ({}, {}),
        ({"loss": 3, "acc": torch.tensor(2.0)}, {"loss": 3, "acc": 2.0}),
    ],
    ids=str,
)
def test_a_weight_is_a_number_or_numbers_by_name(weight: object, expected: object) -> None:
    assert copied_weight(weight, 0) == expected


@pytest.mark.parametrize(
    "weight",
    [-1, -0.5, math.nan, math.inf, -math.inf, np.float32(-1), torch.tensor(-1), torch.tensor(math.nan), Fraction(-1)],
    ids=str,
)
def test_a_weight_that_is_negative_or_not_finite_is_refused(weight: object) -> None:
    with pytest.raises(ConfigurationError, match=r"^weight=.* on rank 3 is negative or not finite"):
        copied_weight(weight, 3)
    with pytest.raises(ConfigurationError, match=r"^weight\['loss'\]=.* on rank 3 is negative or not finite"):
        copied_weight({"acc": 1, "loss": weight}, 3)


@pytest.mark.parametrize(
    ("weight", "shown"),
    [
        ([1, 2], "[1, 2]"),
        ("3", "'3'"),
        (1j, "1j"),
        (np.complex64(1j), "1j"),
        (torch.tensor(1j), "a tensor of shape () and torch.complex"),
        (torch.zeros(2), "a tensor of shape (2,)"),
        (torch.zeros(0), "a tensor of shape (0,)"),
        (np.zeros(2), "ndarray of shape (2,)"),
        (object, "<class 'object'>"),
    ],
    ids=str,
)
def test_a_weight_that_is_not_one_number_is_refused(weight: object, shown: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^weight was given .*{re.escape(shown)}.* on rank 3"):
        copied_weight(weight, 3)
    with pytest.raises(ConfigurationError, match=rf"^weight\['loss'\] was given .*{re.escape(shown)}.* on rank 3"):
        copied_weight({"acc": 1, "loss": weight}, 3)


# --- tensors on a device ----------------------------------------------------------------------------------------------


def on_device(value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype).as_subclass(OnStandIn)


@pytest.fixture
def device() -> Iterator[StandIn]:
    with StandIn().used() as stand_in:
        yield stand_in


def test_each_dtype_of_a_device_is_copied_once_and_names_keep_their_order(device: StandIn) -> None:
    metrics = {
        "a": on_device(1.0),
        "between": 0.5,
        "b": on_device(2**53, torch.int64),
        "c": on_device(3.0),
        "d": on_device(4.0),
    }
    with device.occupied(), device.no_waiting():
        taken = copied_row(metrics, 0)
        assert list(taken) == ["a", "between", "b", "c", "d"]
        assert len(device.copies) == 2
    assert [taken[name].number() for name in ("d", "a", "b", "c", "a")] == [4.0, 1.0, 2**53, 3.0, 1.0]


def test_a_copy_is_ready_once_its_event_has_passed(device: StandIn) -> None:
    with device.occupied():
        copy = HostCopy(on_device([1.0, 2.0]))
        assert not copy.is_ready()
    copy.tensor()
    assert copy.is_ready()
    wait_until(HostCopy(on_device([1.0])).is_ready, 30)


def test_a_copy_without_events_can_always_be_read(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "privateuseone")
    with device.no_waiting():
        copy = HostCopy(on_device([1.0, 2.0]))
        assert copy.is_ready()
    copy.tensor()


@pytest.mark.parametrize("value", [[1.0, 2.0], 1j], ids=["of two elements", "complex"])
def test_an_invalid_weight_is_refused_without_waiting(device: StandIn, value: Any) -> None:
    with device.no_waiting(), pytest.raises(ConfigurationError, match=r"^weight was given .* on rank 3"):
        copied_weight(on_device(value), 3)


def test_weights_on_a_device_are_read_later(device: StandIn) -> None:
    with device.occupied(), device.no_waiting():
        one = copied_weight(on_device([32]), 0)
        by_name = copied_weight({"loss": on_device(0.5), "acc": 2}, 0)
        assert isinstance(one, Later)
    assert same(one.number(), 32)
    assert (by_name["loss"].number(), by_name["acc"]) == (0.5, 2)


# --- distributed tensors: logged if this rank has a complete copy, refused if it has a part, never gathered -----------


class FakeDTensor(torch.Tensor):
    """This rank's part of a distributed tensor, like a `DTensor`. Gathering the full tensor would wait forever."""

    placements: tuple[SimpleNamespace, ...]

    @classmethod
    def of(cls, local: torch.Tensor, *is_replicate: bool) -> FakeDTensor:
        """A tensor on a mesh with one dimension for each answer."""
        tensor = local.as_subclass(cls)
        tensor.placements = tuple(SimpleNamespace(is_replicate=lambda is_=is_: is_) for is_ in is_replicate)
        return tensor

    def detach(self) -> FakeDTensor:
        return FakeDTensor.of(self.as_subclass(torch.Tensor).detach(), *(p.is_replicate() for p in self.placements))

    def to_local(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def item(self) -> float:
        raise AssertionError("may wait for other ranks")


WHOLE = FakeDTensor.of(torch.tensor(2.5, requires_grad=True), True, True)
PART = FakeDTensor.of(torch.tensor(2.5), True, False)


def test_a_part_of_a_tensor_is_refused_without_communication() -> None:
    message = (
        r"'norm' is a DTensor of which rank 3 has only a part \(its placements are .*\.full_tensor\(\) on every rank"
    )
    with pytest.raises(ConfigurationError, match=message):
        copied_row({"norm": PART}, 3)
    with pytest.raises(ConfigurationError, match="weight is a DTensor of which rank 3"):
        copied_weight(PART, 3)


@pytest.mark.parametrize("reduce", ["mean", None])
def test_a_session_logs_replicated_tensors_with_and_without_reduction(
    fake_wandb: FakeWandb, job: Job, reduce: Any
) -> None:
    sessions = job([Topology(rank, rank, 0, 2, 2, 1) for rank in (0, 1)], reduce=reduce)
    for session in sessions:
        session.log({"loss": WHOLE}, step=0, weight=WHOLE)
        with pytest.raises(ConfigurationError, match="'loss' is a DTensor"):
            session.log({"loss": PART}, step=1)
    on_ranks(2, lambda rank: sessions[rank].finish())
    assert [row["loss"] for row in fake_wandb.runs[0].rows] == [2.5]


@pytest.mark.parametrize("is_captured", [True, False])
def test_a_tensor_of_a_cuda_graph_that_is_captured_is_refused(is_captured: bool) -> None:
    tensor: Any = SimpleNamespace(is_cuda=True)
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=is_captured):
        if not is_captured:
            assert whole("'loss'", tensor, 3) is tensor
            return
        with pytest.raises(ConfigurationError, match="'loss' was logged on rank 3 while a CUDA graph is captured"):
            whole("'loss'", tensor, 3)
