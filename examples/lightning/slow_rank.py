"""Which rank holds the others up? Train as in ``train_digits.py``, with one rank slowed down on purpose.

    python slow_rank.py                     # four processes; rank 2 takes 30 % longer to prepare a batch
    python slow_rank.py --slowdown 0        # four equal processes: no rank is named

Each batch is delayed, as if its images were read over a network: the digits that come with scikit-learn are too small
to make a rank slow.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from lightning import Trainer, seed_everything
from torch.utils.data import DataLoader
from train_digits import DigitClassifier, load_data, mode_without_login

from dist_wandb import DistWandbLogger

PREPARED = 0.05  # seconds that a rank takes to prepare a batch


class SlowedDown(DigitClassifier):
    def __init__(self, slow_rank: int, slowdown: float, epochs: int) -> None:
        super().__init__(epochs=epochs, lr=1e-2)
        self.slow_rank = slow_rank
        self.slowdown = slowdown

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:  # noqa: ARG002  # Lightning's hook
        if self.trainer.training:
            time.sleep(PREPARED * (1 + self.slowdown * (self.global_rank == self.slow_rank)))
        return batch


def main() -> None:
    args = parse_args()
    mode = mode_without_login()
    seed_everything(0)
    logger = DistWandbLogger(project="digits", name="slow-rank", save_dir=args.log_dir, mode=mode, timings=True)
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=args.devices,
        max_epochs=args.epochs,
        log_every_n_steps=3,
        logger=logger,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train, val = load_data()
    model = SlowedDown(args.slow_rank, args.slowdown, args.epochs)
    trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True), DataLoader(val, batch_size=32))
    logger.experiment.finish()
    if trainer.is_global_zero:
        print(f"\nValidation accuracy: {trainer.callback_metrics['val/accuracy']:.3f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--devices", type=int, default=4, help="processes")
    parser.add_argument("--slow-rank", type=int, default=2, help="the rank that is slowed down")
    parser.add_argument("--slowdown", type=float, default=0.3, help="by which factor it takes longer for a batch")
    parser.add_argument("--epochs", type=int, default=10, help="epochs of training")
    parser.add_argument("--log-dir", type=Path, default="runs", help="where the run is written")
    return parser.parse_args()


if __name__ == "__main__":
    main()
