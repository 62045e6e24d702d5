"""Distributed tensors are logged if this rank has a complete copy, refused if it has a part, and never gathered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from fakes import FakeWandb, Job, on_ranks

from dist_wandb.errors import ConfigurationError
from dist_wandb.job.topology import Topology
from dist_wandb.payloads.devices import whole
from dist_wandb.payloads.scalars import copied_row, copied_weight


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
