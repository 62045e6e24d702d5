"""Names that are not upstream's public ones, each used in one guarded place: these fail when upstream changes them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch.distributed as dist
import wandb

from dist_wandb import gloo, pictures
from dist_wandb.run import _fill_config, is_finished, takes

if TYPE_CHECKING:
    from tests.conftest import FakeWandb


@pytest.mark.usefixtures("bare_environment")
def test_wandb_tells_whether_a_run_is_finished(tmp_path: Path) -> None:
    run = wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(silent=True))
    assert not is_finished(run)
    run.finish()
    assert is_finished(run)


def test_wandb_has_a_config_that_can_be_asked_what_it_takes() -> None:
    assert takes(Path("a"))
    assert not takes(object())


def test_wandbs_config_can_be_filled_without_sending_anything(fake_wandb: FakeWandb) -> None:
    run: Any = fake_wandb.init(config={"lr": 0.1})
    _fill_config(run, {"lr": 0.2, "names": {1: "a"}})
    assert dict(run.config) == {"lr": 0.2, "names": {1: "a"}}
    assert run.config.sent == []


def test_wandbs_images_tell_what_they_have() -> None:
    """By private names of wandb's, each guarded: without them captions are lost, and images encoded twice."""
    image = wandb.Image(np.zeros((2, 2)), caption="x", boxes={"p": {"box_data": [], "class_labels": {0: "a"}}})
    assert pictures.caption(image) == "x"
    assert pictures.has_overlays(image)
    path = pictures._path_of(image)
    assert path is not None
    assert path.is_file()


def test_torchs_gloo_groups_can_be_told_an_address() -> None:
    """By private names, guarded: without them ranks on several hosts need names that resolve, or GLOO_SOCKET_IFNAME."""
    limit = timedelta(seconds=3)
    options = gloo._options(limit, "127.0.0.1")
    assert options is not limit
    assert (options._timeout, len(options._devices)) == (limit, 1)
    assert dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options).size() == 1
