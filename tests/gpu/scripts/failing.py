"""A rank logs rows, then its device fails. Arguments: the kind of device, and the directory."""

from __future__ import annotations

import sys
from pathlib import Path

import devices

import dist_wandb

ROWS = 20


def main(kind: str, directory: Path) -> None:
    with devices.used(kind) as device:
        session = dist_wandb.init(project="gpu", dir=directory)
        for step in range(ROWS):
            session.log({"loss": device.tensor(step)}, step=step)
        assert session.flush()
        device.work(0.5)
        cell = dist_wandb.gathered([[device.tensor(1).expand(2)]], ["cell"])
        session.log({"loss": device.tensor(ROWS), "table": cell}, step=ROWS)  # may be lost with the device
        device.fail()
        for step in range(ROWS + 1, ROWS + 1000):
            session.log({"loss": device.tensor(step)}, step=step)
            device.tensor(step).item()
        sys.stdout.write("the device has not failed\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
