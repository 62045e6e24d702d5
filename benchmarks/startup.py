"""Startup time: `import dist_wandb`, and opening the logger's run, compared with the stock WandbLogger.

The import is measured in new interpreters, compared with interpreters that do nothing. The runs are opened in
two-process ddp jobs: each job reports, per rank, the wall-clock time of the first use of `logger.experiment` in
Lightning's setup hook; the slower rank counts because a barrier follows. Jobs alternate, so that both loggers run under
the same conditions.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from benchmarks import common

_IMPORT = "import in a new interpreter, seconds"
_CODE = {"nothing": "pass", "dist_wandb": "import dist_wandb"}
_LONGEST_IMPORT = 0.060  # seconds more than an interpreter that does nothing
_TITLE = "opening a run, 2-process ddp, seconds"
_LOGGERS = ("stock", "dist_wandb")


def measure(options: common.Options) -> common.Result:
    """Start jobs with each logger, alternating."""
    seconds: dict[str, list[float]] = {logger: [] for logger in _LOGGERS}
    for logger in common.alternating(_LOGGERS, options.repeats):
        reports = common.run_ranks(__file__, {"logger": logger}, by_torchrun=False)
        seconds[logger].append(max(report["seconds"] for report in reports))
    result = common.Result("startup")
    result.add(_TITLE, seconds, against="stock")
    imports: dict[str, list[float]] = {what: [] for what in _CODE}
    for what in common.alternating(list(_CODE), options.of(7, 1)):
        imports[what].append(_interpreter(_CODE[what]))
    result.add(_IMPORT, imports)
    more = min(imports["dist_wandb"]) - min(imports["nothing"])  # other load on the machine only increases the time
    result.targets.append(common.Target("import dist_wandb, seconds more than nothing", _LONGEST_IMPORT, more))
    return result


def _interpreter(code: str) -> float:
    """Return the seconds that a new interpreter takes for `code`."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - begin


def job(arguments: dict[str, Any]) -> None:
    """Run one rank of a job that trains for one step."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import WandbLogger
    from torch.utils.data import DataLoader, TensorDataset

    from dist_wandb import DistWandbLogger

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            result: torch.Tensor = self.layer(batch[0]).mean() + batch_idx
            return result

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Timed(DistWandbLogger if arguments["logger"] == "dist_wandb" else WandbLogger):  # type: ignore[misc]
        """Records the time of the first use of `experiment`."""

        seconds: float | None = None

        @property
        def experiment(self) -> Any:
            start = time.perf_counter()
            run = super().experiment
            if self.seconds is None:
                self.seconds = time.perf_counter() - start
            return run

    logger = Timed(project="startup", save_dir=arguments["directory"], offline=True)
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_steps=1,
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.ones(4, 2))))
    common.report(arguments["directory"], trainer.global_rank, {"seconds": logger.seconds})


if __name__ == "__main__":
    common.main(measure, job, __doc__)
