"""A session notes what the user writes into the summary of its run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dist_wandb
from dist_wandb.exchange.rows import Contribution


@pytest.mark.usefixtures("bare_environment")
def test_a_call_tells_how_many_writes_into_the_summary_it_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Any = dist_wandb.init(mode="offline", dir=str(tmp_path))
    put: list[Contribution] = []
    monkeypatch.setattr(run._exchange, "put", put.append)
    run.log({"loss": 0.5})
    run.summary["loss"] = 9
    run.run.summary.update({"loss": 8, "best": 1})
    run.log({"acc": 0.4})
    assert [contribution.follows for contribution in put] == [0, 2]
    run.run._log({"loss": 0.5})  # as the exchange writes the first row later
    run._exchange._rows.keep_summary(["loss"], 0, 0, is_open=False)
    assert run.summary["loss"] == 8
    run.finish()
