"""Names that are not upstream's public ones, each used in one guarded place: these fail when upstream changes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import wandb

from dist_wandb.run import is_finished


@pytest.mark.usefixtures("bare_environment")
def test_wandb_tells_whether_a_run_is_finished(tmp_path: Path) -> None:
    run = wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(silent=True))
    assert not is_finished(run)
    run.finish()
    assert is_finished(run)
