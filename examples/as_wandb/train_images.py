"""An image classifier in the style of timm's train.py. The only change is ``import dist_wandb as wandb``.

python train_images.py --log-wandb
torchrun --nproc_per_node 2 train_images.py --log-wandb
"""

import argparse
import csv
import logging
import os
from collections import OrderedDict
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

try:
    import dist_wandb as wandb

    has_wandb = True
except ImportError:
    has_wandb = False

_logger = logging.getLogger("train")

parser = argparse.ArgumentParser(description="Train an image classifier")
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--output", default="output", help="where the summary is written")
parser.add_argument("--experiment", default="digits", help="name of the experiment, and of the W&B run")
parser.add_argument("--log-wandb", action="store_true", help="log training and validation metrics to wandb")
parser.add_argument("--wandb-project", default="images")
parser.add_argument("--wandb-tags", default=[], type=str, nargs="+")
parser.add_argument("--wandb-resume-id", default="", help="if resuming a run, its id")


class AverageMeter:
    """Computes and stores the average."""

    def __init__(self):
        self.sum = self.count = 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count


def is_primary(args):
    return args.rank == 0


def reduce_tensor(tensor, n):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    return rt / n


def init_distributed_device(args):
    args.distributed = "WORLD_SIZE" in os.environ and int(os.environ["WORLD_SIZE"]) > 1
    args.rank, args.world_size = 0, 1
    if args.distributed:
        dist.init_process_group(backend="gloo")
        args.rank, args.world_size = dist.get_rank(), dist.get_world_size()


def create_loader(data, args, *, is_training):
    images, targets = data
    dataset = TensorDataset(images, targets)
    sampler = DistributedSampler(dataset, shuffle=is_training, seed=args.seed) if args.distributed else None
    return DataLoader(dataset, args.batch_size, sampler=sampler, shuffle=is_training and sampler is None)


def update_summary(epoch, train_metrics, eval_metrics, filename, lr, *, write_header=False, log_wandb=False):
    rowd = OrderedDict(epoch=epoch)
    rowd.update([("train_" + k, v) for k, v in train_metrics.items()])
    rowd.update([("eval_" + k, v) for k, v in eval_metrics.items()])
    rowd["lr"] = lr
    if log_wandb:
        wandb.log(rowd)
    with Path(filename).open(mode="a", encoding="utf-8") as cf:
        dw = csv.DictWriter(cf, fieldnames=rowd.keys())
        if write_header:
            dw.writeheader()
        dw.writerow(rowd)


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args):
    losses_m = AverageMeter()
    model.train()
    if args.distributed:
        loader.sampler.set_epoch(epoch)
    for images, target in loader:
        loss = loss_fn(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        reduced = reduce_tensor(loss.detach(), args.world_size) if args.distributed else loss.detach()
        losses_m.update(reduced.item(), images.size(0))
    return OrderedDict([("loss", losses_m.avg)])


@torch.no_grad()
def validate(model, loader, loss_fn, args):
    losses_m, top1_m = AverageMeter(), AverageMeter()
    model.eval()
    for images, target in loader:
        output = model(images)
        loss = loss_fn(output, target)
        acc1 = (output.argmax(1) == target).float().mean() * 100
        if args.distributed:
            loss, acc1 = reduce_tensor(loss, args.world_size), reduce_tensor(acc1, args.world_size)
        losses_m.update(loss.item(), images.size(0))
        top1_m.update(acc1.item(), images.size(0))
    return OrderedDict([("loss", losses_m.avg), ("top1", top1_m.avg)])


def main():
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = parser.parse_args()
    init_distributed_device(args)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed + args.rank)

    digits = load_digits()
    images, targets = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    loader_train = create_loader((images[:1500], targets[:1500]), args, is_training=True)
    loader_eval = create_loader((images[1500:], targets[1500:]), args, is_training=False)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10))
    if args.distributed:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    loss_fn = nn.CrossEntropyLoss()

    output_dir = None
    if is_primary(args):
        output_dir = Path(args.output) / args.experiment
        output_dir.mkdir(parents=True, exist_ok=True)
        if args.log_wandb:
            if has_wandb:
                wandb.init(
                    project=args.wandb_project,
                    name=args.experiment,
                    config=args,
                    tags=args.wandb_tags,
                    resume="must" if args.wandb_resume_id else None,
                    id=args.wandb_resume_id or None,
                )
            else:
                _logger.warning("You've requested to log metrics to wandb but package not found.")

    best_metric = None
    for epoch in range(args.epochs):
        train_metrics = train_one_epoch(epoch, model, loader_train, optimizer, loss_fn, args)
        eval_metrics = validate(model, loader_eval, loss_fn, args)
        if output_dir is not None:
            _logger.info("Train: %d  Loss: %.3g  Acc@1: %.1f", epoch, train_metrics["loss"], eval_metrics["top1"])
            update_summary(
                epoch,
                train_metrics,
                eval_metrics,
                filename=output_dir / "summary.csv",
                lr=optimizer.param_groups[0]["lr"],
                write_header=best_metric is None,
                log_wandb=args.log_wandb and has_wandb,
            )
            best_metric = max(best_metric or 0.0, eval_metrics["top1"])
        scheduler.step()
    if best_metric is not None:
        _logger.info("*** Best metric: %.1f", best_metric)


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
