"""What only the stand-in for a device can show."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from devices import StandIn

import dist_wandb

Rows = Callable[[], list[dict[str, Any]]]


@pytest.mark.parametrize("wait", ["item", "cpu", "tolist", "__float__", "__bool__"])
def test_it_notices_who_waits(wait: str) -> None:
    with StandIn().used() as device, device.no_waiting(), pytest.raises(AssertionError, match="waits for the device"):
        getattr(device.tensor(1), wait)()


def test_rows_of_a_device_without_events_are_written(session: dist_wandb.Session, rows: Rows) -> None:
    with StandIn().used() as device, mock.patch.object(torch, "privateuseone", SimpleNamespace()):
        with device.no_waiting():
            for step in range(5):
                session.log({"number": device.tensor(step), "vector": device.tensor(step).expand(2)})
        found = rows()
    assert [(row["number"], row["vector"]) for row in found] == [(step, [step, step]) for step in range(5)]


def test_no_memory_of_copies_is_kept_once_they_are_read(session: dist_wandb.Session) -> None:
    with StandIn().used() as device:
        cells, image = [[device.tensor(1).expand(2)]], device.tensor(1).expand(3, 4, 4)
        table, images = dist_wandb.gathered(cells, ["cell"]), dist_wandb.gathered([image])
        session.log({"number": device.tensor(1), "vector": device.tensor(1).expand(2), "list": [device.tensor(1)]})
        session.log({"table": table, "images": images})
        assert len(device.copies) == 5
        session.finish()
        gc.collect()
        assert not device.copies, [gc.get_referrers(copy) for copy in device.copies]
