"""Metrics of several ranks in one process: what is kept, merged, refused. For values see test_torchmetrics_sweep.py."""

from __future__ import annotations

import gc
import json
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from merging import Ranks
from processes import run_python
from torch import Tensor
from torchmetrics import (
    CatMetric,
    MaxMetric,
    MeanMetric,
    MeanSquaredError,
    Metric,
    MetricCollection,
    MetricTracker,
    MinMetric,
    PearsonCorrCoef,
    SumMetric,
)
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
)
from torchmetrics.wrappers import BootStrapper, MinMaxMetric

from dist_wandb.errors import ConfigurationError
from dist_wandb.payloads.framing import decode, encode, framed
from dist_wandb.payloads.metric_merging import Reduced
from dist_wandb.payloads.metrics import Snapshot, is_metric, take_snapshot

CLASSES = 4
Make = Callable[[], Any]
Data = Callable[[torch.Generator], tuple[Any, ...]]
Batch = tuple[Tensor, ...]


def numbers(generator: torch.Generator) -> Batch:
    return (torch.randn(6, generator=generator),)


def pairs(generator: torch.Generator) -> Batch:
    x = torch.randn(8, generator=generator)
    return x, x + torch.randn(8, generator=generator)


def classes(generator: torch.Generator) -> Batch:
    scores = torch.rand(12, CLASSES, generator=generator).softmax(-1)
    return scores, torch.randint(CLASSES, (12,), generator=generator)


class Odd(Metric):
    """States of all other kinds: a mean, and lists and tensors without a reduction or with a custom one."""

    level: Tensor
    seen: list[Tensor]
    last: Tensor
    mask: Tensor
    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("level", torch.tensor(2.0), dist_reduce_fx="mean")
        self.add_state("seen", [], dist_reduce_fx=None)
        self.add_state("last", torch.zeros(3), dist_reduce_fx=lambda stacked: stacked.prod(dim=0))
        self.add_state("mask", torch.tensor([False, False]), dist_reduce_fx="max")
        self.add_state("largest", torch.tensor(-(2**63)), dist_reduce_fx="max")

    def update(self, x: Tensor) -> None:
        self.level = self.level + x.mean()
        self.seen += [x[:2], x[2:]]
        self.last = x[:3]
        self.mask = x[:2] > 0
        self.largest = torch.tensor(2**62 + 1)

    def compute(self) -> dict[str, Tensor]:
        seen = torch.cat(self.seen) if len(self.seen) else torch.zeros(1)
        return {"level": self.level, "seen": seen, "last": self.last, "mask": self.mask, "largest": self.largest}


def collection() -> MetricCollection:
    return MetricCollection(
        {
            "acc": MulticlassAccuracy(CLASSES),
            "f1": MulticlassF1Score(CLASSES),
            "precision": MulticlassPrecision(CLASSES, average=None),
            "auroc": MulticlassAUROC(CLASSES),
        },
        prefix="val_",
    )


CASES: dict[str, tuple[Make, Data]] = {
    "mean": (MeanMetric, numbers),
    "min": (MinMetric, numbers),
    "max": (MaxMetric, numbers),
    "cat": (CatMetric, numbers),
    "confusion": (lambda: MulticlassConfusionMatrix(CLASSES), classes),
    "auroc": (lambda: MulticlassAUROC(CLASSES), classes),
    "pearson": (PearsonCorrCoef, pairs),
    "collection": (collection, classes),
    "bootstrap": (lambda: BootStrapper(MeanMetric(), 3), numbers),
    "composition": (lambda: MeanMetric() + SumMetric() * 2, numbers),
    "half": (lambda: MeanSquaredError().set_dtype(torch.float16), lambda g: tuple(x.half() for x in pairs(g))),
}


def ranks_of(make: Make, data: Data, updates: Sequence[int]) -> list[Any]:
    """Return one object for each simulated rank, with its number of updates."""
    template, ranks = make(), []
    for rank, count in enumerate(updates):
        metric, generator = deepcopy(template), torch.Generator().manual_seed(rank)
        torch.manual_seed(rank)  # bootstrapping draws random numbers itself
        for _ in range(count):
            metric.update(*data(generator))
        ranks.append(metric)
    return ranks


def merged(ranks: Sequence[Any]) -> dict[str, Any]:
    return Ranks(len(ranks)).log(ranks)


def brought_together(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    return Ranks(len(snapshots)).bring_together(snapshots)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_states_of_half_precision_are_merged() -> None:
    make, data = CASES["half"]
    ranks, (one,) = ranks_of(make, data, (2, 1)), ranks_of(make, data, (2,))
    one.update(*data(torch.Generator().manual_seed(1)))
    assert merged(ranks)[""] == pytest.approx(float(one.compute()), rel=1e-2)


def test_other_kinds_of_states_are_merged_as_in_torchmetrics() -> None:
    ranks = ranks_of(Odd, numbers, (2, 2, 2))
    assert merged(ranks) == {
        "/level": pytest.approx(float(sum(one.level for one in ranks)) / 3),
        "/seen": torch.cat([item for one in ranks for item in one.seen]).tolist(),
        "/last": torch.stack([one.last for one in ranks]).prod(dim=0).tolist(),
        "/mask": torch.stack([one.mask for one in ranks]).amax(dim=0).tolist(),
        "/largest": 2**62 + 1,
    }


@pytest.mark.parametrize("make", [SumMetric, CatMetric, Odd])
def test_states_that_were_set_without_an_update_count(make: Make) -> None:
    """A checkpoint restores states, but not the number of updates."""
    trained, loaded, empty = ranks_of(make, numbers, (1, 0, 0))
    for name, value in trained.metric_state.items():
        setattr(loaded, name, deepcopy(value))
    assert loaded.update_count == 0
    assert merged([loaded, empty]) == merged([trained, empty])


def test_large_integers_are_exact() -> None:
    ranks = ranks_of(lambda: MulticlassConfusionMatrix(2), lambda _: (torch.tensor([1]), torch.tensor([0])), (1, 1))
    ranks[0].confmat += 2**52
    assert merged(ranks)[""] == [[2**52, 2**52 + 2], [2**52, 2**52]]


@pytest.mark.parametrize("make", [MinMetric, MaxMetric])
@pytest.mark.parametrize("where", [0, 1])
def test_a_nan_among_extrema_is_kept(make: type[MinMetric | MaxMetric], where: int) -> None:
    ranks = ranks_of(lambda: make(nan_strategy="ignore"), numbers, (1, 1))
    name = next(iter(ranks[where].metric_state))
    setattr(ranks[where], name, torch.tensor(math.nan))
    assert math.isnan(merged(ranks)[""])


class Last(Metric):
    """A state without a reduction."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("last", torch.zeros(2), dist_reduce_fx=None)

    def update(self, x: Tensor) -> None:
        self.last = x

    def compute(self) -> Tensor:
        return self.last


@pytest.mark.parametrize(("updates", "wanted"), [((1,), [7, 8]), ((1, 1), [[7, 8], [7, 8]]), ((1, 0), [7, 8])])
def test_states_without_reduction_are_stacked_unless_there_is_only_one(updates: tuple[int, ...], wanted: Any) -> None:
    assert merged(ranks_of(Last, lambda _: (torch.tensor([7.0, 8.0]),), updates)) == {"": wanted}


# The user's object


def fingerprint(metric: Metric) -> Any:
    states = {name: value if isinstance(value, Tensor) else list(value) for name, value in metric.metric_state.items()}
    held = {name: id(value) for name, value in metric.metric_state.items()}
    flags = ("_computed", "_forward_cache", "_update_count", "_is_synced", "_cache", "_to_sync", "sync_on_compute")
    return deepcopy(states), held, [vars(metric)[name] for name in flags], metric.dist_sync_fn


@pytest.mark.parametrize("case", [*CASES, "forward"])
def test_the_users_object_is_unchanged(case: str) -> None:
    make, data = CASES.get(case, (MeanMetric, numbers))
    ranks = ranks_of(make, data, (1, 2))
    if case == "forward":
        ranks[0](torch.randn(3, requires_grad=True) * 2)  # its _forward_cache is not a leaf tensor
    members = [m for m in ranks[0].modules() if isinstance(m, Metric)]
    before = [fingerprint(metric) for metric in members]
    groups = deepcopy(getattr(ranks[0], "compute_groups", None))
    merged(ranks)
    for old, new in zip(before, (fingerprint(metric) for metric in members), strict=True):
        torch.testing.assert_close(old[0], new[0], equal_nan=True)
        assert old[1] == new[1]
        assert [repr(flag) for flag in old[2]] == [repr(flag) for flag in new[2]]
        assert old[3] is new[3]
    assert getattr(ranks[0], "compute_groups", None) == groups


@pytest.mark.parametrize("action", ["update", "reset", "forward"])
@pytest.mark.parametrize("case", ["mean", "confusion", "auroc", "pearson", "collection", "bootstrap"])
def test_later_changes_do_not_affect_a_snapshot(case: str, action: str) -> None:
    make, data = CASES[case]
    ranks = ranks_of(make, data, (2, 1))
    wanted = merged(ranks)
    snapshots = [take_snapshot(metric) for metric in ranks]
    for metric in ranks:
        arguments = () if action == "reset" else data(torch.Generator().manual_seed(9))
        getattr(metric, action)(*arguments)
    assert brought_together(snapshots) == wanted
    if action != "reset":
        assert merged(ranks) != wanted


def test_a_synchronised_metric_contributes_only_its_own_states() -> None:
    wanted = merged(ranks_of(SumMetric, numbers, (1, 1)))
    ranks = ranks_of(SumMetric, numbers, (1, 1))
    ranks[0].sync(lambda x, group: [x, x], distributed_available=lambda: True)  # noqa: ARG005
    assert merged(ranks) == wanted
    ranks[0].unsync()  # raises unless it is still synchronised


def test_a_snapshot_reads_nothing_from_a_device() -> None:
    """Tensors on the meta device have no numbers: reading one raises an error."""
    for make, _ in CASES.values():
        take_snapshot(make().to("meta"))
    with_list = CatMetric().to("meta")
    with_list.__dict__["value"] = [torch.empty(3, device="meta")]
    for metric in (MeanMetric().to("meta"), with_list):
        snapshot = take_snapshot(metric)
        with pytest.raises(NotImplementedError):
            snapshot.to_host()


def test_merging_never_synchronises_through_torchmetrics(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("torchmetrics synchronises")

    monkeypatch.setattr(Metric, "_sync_dist", fail)
    fail.__module__ = "torchmetrics.metric"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for make, data in [*CASES.values(), (lambda: MinMaxMetric(MeanMetric()), numbers)]:
            merged(ranks_of(make, data, (1, 1)))
        with pytest.raises(AssertionError):
            ranks_of(MeanMetric, numbers, (1,))[0].compute()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "options", [{"compute_with_cache": False}, {"sync_on_compute": False}, {"dist_sync_on_step": True}]
)
def test_options_of_metrics_do_not_affect_the_result(options: dict[str, Any]) -> None:
    ranks = ranks_of(lambda: SumMetric(**options), lambda _: (torch.tensor(2.0),), (1, 2))
    for metric in ranks:
        metric.process_group = sys.stdout  # a group cannot be copied, either
    assert merged(ranks) == {"": 6.0}


def test_inference_mode_does_not_affect_the_result() -> None:
    with torch.inference_mode():
        ranks = ranks_of(collection, classes, (2, 1))
        snapshots = [take_snapshot(metric) for metric in ranks]
    assert brought_together(snapshots) == merged(ranks_of(collection, classes, (2, 1)))


class Noted(MeanMetric):
    copies: ClassVar[list[weakref.ref[Metric]]] = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.copies.append(weakref.ref(self))


def test_the_private_copy_is_made_once_and_deleted_with_the_object() -> None:
    metric = Noted()
    metric.update(1.0)
    snapshots = [take_snapshot(metric), take_snapshot(metric)]
    (copied,) = Noted.copies
    del metric
    gc.collect()
    assert brought_together(snapshots) == {"": 1.0}
    del snapshots
    gc.collect()
    assert copied() is None


def test_metrics_added_to_a_collection_are_included() -> None:
    ranks = [MetricCollection({"a": SumMetric()}) for _ in range(2)]
    merged(ranks)
    for one in ranks:
        one.add_metrics({"b": MaxMetric()})
        one.update(3.0)
    assert merged(ranks) == {"/a": 6.0, "/b": 3.0}


@pytest.mark.parametrize(("updates", "warns"), [((0, 1), False), ((0, 0), True)])
def test_a_missing_update_warns_only_if_no_rank_has_one(updates: tuple[int, ...], warns: bool) -> None:
    ranks = ranks_of(MeanMetric, numbers, updates)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        merged(ranks)
    assert any("before the ``update``" in str(one.message) for one in caught) == warns


def test_a_metric_that_cannot_be_copied_is_named() -> None:
    metric = SumMetric()
    metric.stream = sys.stdout
    with pytest.raises(ConfigurationError, match="SumMetric cannot be copied"):
        take_snapshot(metric)


class Named(SumMetric):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_state(name, [], dist_reduce_fx=None)


def test_a_state_that_the_computing_rank_lacks_is_named(caplog: pytest.LogCaptureFixture) -> None:
    computing, other = Named("mine"), Named("others")
    other.update(torch.tensor(1.0))
    other.others = [torch.ones(2)]
    assert merged([computing, other]) == {}
    assert "Named has no state 'others' on the rank that computes it" in caplog.text


# Layouts


def test_states_of_a_compute_group_are_sent_once() -> None:
    ranks = ranks_of(collection, classes, (1,))
    assert sorted(map(len, ranks[0].compute_groups.values())) == [1, 3]
    sums = take_snapshot(ranks[0]).packed(0).sums
    assert len(sums) == 4 + 4 * CLASSES  # the updates of four metrics; four states of one
    dict(ranks[0].items())  # this makes copies of the states
    assert len(take_snapshot(ranks[0]).packed(0).sums) == 4 + 3 * 4 * CLASSES


def test_members_of_a_compute_group_updated_separately_are_sent_separately() -> None:
    ranks = [MetricCollection({"a": SumMetric(), "b": SumMetric()}) for _ in range(2)]
    for one in ranks:
        one.update(1.0)
    assert merged(ranks) == {"/a": 2.0, "/b": 2.0}  # the private copy is made while both share their state
    for one in ranks:
        one["b"].update(5.0)
    assert merged(ranks) == {"/a": 2.0, "/b": 12.0}


def test_ranks_may_share_states_differently() -> None:
    ranks = ranks_of(collection, classes, (2, 1, 2))
    dict(ranks[1].items())  # this makes copies of the states
    assert len({take_snapshot(one).packed(0).form for one in ranks}) == 2
    assert merged(ranks) == merged(ranks_of(collection, classes, (2, 1, 2)))


@pytest.mark.parametrize("other", [MulticlassF1Score(4), MetricCollection([MulticlassAccuracy(4)])])
def test_states_of_other_metrics_are_refused(other: Any, caplog: pytest.LogCaptureFixture) -> None:
    ranks = [MulticlassAccuracy(4), other]
    for one in ranks:
        one.update(*classes(torch.Generator()))
    assert merged(ranks) == {}
    assert "The gathered states of MulticlassAccuracy do not fit. Run the same code on all ranks" in caplog.text


# Values that are not merged


class Peculiar(SumMetric):
    def _sync_dist(self, *_: Any, **__: Any) -> None:
        raise AssertionError("torchmetrics synchronises")


def test_metrics_that_cannot_be_merged_are_computed_per_rank_and_averaged() -> None:
    ranks = ranks_of(Peculiar, numbers, (1, 3, 0))
    snapshots = [take_snapshot(metric) for metric in ranks]
    assert "Peculiar is not merged" in str(snapshots[0].fallback)
    wanted = (ranks[0].compute() + ranks[1].compute()) / 2  # a rank without updates does not count
    for metric in ranks:
        metric.reset()
    assert brought_together(snapshots) == {"": pytest.approx(float(wanted))}


def test_lists_are_averaged_element_by_element() -> None:
    snapshot = take_snapshot(Peculiar())
    blobs = [encode([json.dumps({"": [[1, 2], [3]], "/a": [1]})]), encode([json.dumps({"": [[3, 2], [4]], "/a": 1})])]
    got = snapshot.compute(blobs)
    assert got[""] == [[2, 2], [3.5]]
    assert math.isnan(got["/a"])
    with pytest.raises(ConfigurationError, match="The values of a metric that a rank sent cannot be read: "):
        snapshot.compute([encode(["loss=1"])])


# Wrappers with memory


def test_extremes_include_values_computed_by_the_ranks_themselves() -> None:
    ranks = [MinMaxMetric(MeanMetric()) for _ in range(2)]
    for metric, numbers_of_rank in zip(ranks, ((1.0, 5.0), (-3.0, 2.0)), strict=True):
        for number in numbers_of_rank:
            metric.update(number)
            metric.compute()
    assert merged(ranks) == {"/raw": 1.25, "/min": -3.0, "/max": 3.0}


def test_the_newest_metric_of_a_tracker_is_used() -> None:
    ranks = [MetricTracker(SumMetric(), maximize=True) for _ in range(2)]
    with pytest.raises(ConfigurationError, match=r"before its increment\(\) was called"):
        take_snapshot(ranks[0])
    for epoch in range(2):
        for tracker in ranks:
            tracker.increment()
            tracker.update(epoch + 1.0)
    assert merged(ranks) == {"": 4.0}


# Blobs

NUMBERS = ["bool", "bfloat16", "complex64", "complex128", "float16", "float32", "float64"]
NUMBERS += [f"{kind}{size}" for kind in ("int", "uint") for size in (8, 16, 32, 64)]
ITEMS: list[Any] = [
    torch.arange(6).reshape(2, 3).T,
    torch.tensor(1.5, dtype=torch.bfloat16),
    torch.tensor([True, False]),
    torch.empty(0, 3, dtype=torch.int8),
    [(4, 5), b"raw", "text", None, [torch.ones(2, dtype=torch.complex64)], torch.bfloat16],
]


def test_blobs_are_decoded_unchanged() -> None:
    numbers = [torch.tensor([0, 1, 1]).to(getattr(torch, name)) for name in NUMBERS]
    *back, others = decode(encode([*numbers, *ITEMS]))
    for old, new in zip((*numbers, *ITEMS[:4]), back, strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=0)
    assert (*others[:4], others[5]) == (*ITEMS[4][:4], ITEMS[4][5])
    assert torch.equal(others[4][0], torch.ones(2, dtype=torch.complex64))


def sent(*items: Any, raw: tuple[bytes, ...] = ()) -> bytes:
    return framed(json.dumps(items).encode(), *raw)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 40,
        encode(ITEMS)[:-1],
        encode(ITEMS) + b"x",
        *(sent(item) for item in (["bytes", -3], ["bytes", "3"], ["eval", "1"], ["value"], ["value", [1]], 3)),
        *(sent(item) for item in (["dtype", "load"], ["dtype"], ["dtype", "quint4x2"], ["list", [[]]], ["list"])),
        *(sent(["tensor", "float32", shape]) for shape in ([10**12], ["a"], [1])),
        *(
            sent(["tensor", "float32", shape], raw=(b"1234",))
            for shape in ([-1, -1], [True], {"1": 1}, [0, 2**62], [1] * 65)
        ),
        sent(["tensor", "load", [1]]),
        sent(["tensor", "qint8", [2]], raw=(b"12",)),
        sent(["tensor", ["float32"], [1]], raw=(b"1234",)),
        sent(["bytes", True], raw=(b"1",)),
        sent(["value", 1], raw=(b"1",)),
        framed(b"[1e400]"),
        b"",
        (400000).to_bytes(8, "little") + b"[" * 400000,
    ],
)
def test_malformed_blobs_are_refused(data: bytes) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        decode(data)


def test_bools_are_normalised_whatever_their_bytes() -> None:
    (back,) = decode(sent(["tensor", "bool", [3]], raw=(b"\x00\x01\x07",)))
    assert back.view(torch.uint8).tolist() == [0, 1, 1]


def test_values_that_cannot_be_sent_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="holds a object, which cannot be sent to other ranks"):
        encode([[object()]])
    for item in (torch.zeros(2).to(torch.float8_e5m2), torch.float8_e5m2):
        with pytest.raises(ConfigurationError, match="holds float8_e5m2 numbers, which cannot be sent to other"):
            encode([item])


@pytest.mark.parametrize(
    "items", [[], [torch.ones(1)] * 2, [torch.ones(1)], ["text"], [[1]], [[1], [2]], [torch.ones(3)] * 8]
)
def test_gathered_states_that_do_not_fit_are_refused(items: list[Any]) -> None:
    for make in (CatMetric, PearsonCorrCoef):
        snapshot = take_snapshot(ranks_of(make, pairs if make is PearsonCorrCoef else numbers, (1,))[0])
        own = snapshot.packed(0)
        with pytest.raises(ConfigurationError):
            snapshot.compute([b"".join(own.blob), encode(items)], Reduced(own.sums, own.maxima, 2))


# Recognition of metrics


def test_is_metric_recognises_metrics_and_collections() -> None:
    yes = (MeanMetric(), MetricCollection([SumMetric()]), MeanMetric() + 1, MinMaxMetric(SumMetric()))
    assert [is_metric(value) for value in (*yes, 1, 1.5, True, "a", None, torch.ones(2), MeanMetric)] == [True] * 4 + [
        False
    ] * 7


def test_is_metric_imports_neither_torch_nor_torchmetrics() -> None:
    code = (
        "import sys; from dist_wandb.payloads.metrics import is_metric; "
        "assert not is_metric(object()); assert not is_metric(1);"
        "print('torch' in sys.modules, 'torchmetrics' in sys.modules)"
    )
    assert run_python(code) == "False False"
