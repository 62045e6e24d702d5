"""Take the screenshots of reports (``docs/images/report_*.png``) with headless Chromium, of runs made by the tests.

Run `python scripts/screenshots.py` after a change of the report's appearance. The runs are made from fixed seeds.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
sys.path.insert(0, str(ROOT / "tests" / "support"))

from browser import Page, chromium  # noqa: E402
from report_runs import reduced_run, shared_run, sweep  # noqa: E402

from dist_wandb.cli import main as dist_wandb  # noqa: E402


def main() -> None:
    """Take all screenshots."""
    with tempfile.TemporaryDirectory() as directory, chromium() as page:
        top = Path(directory)
        reduced_run(top / "night-7", "night-7", slow=2, group=None, steps=120)  # rows from 120 on are degraded
        _take(page, top / "night-7", "report_slow_rank", (820, 492), beside="#ranks")
        reduced_run(top / "four", "baseline", slow=None)
        reduced_run(top / "four", "slow-node", slow=2, lr=0.05, seed=3)
        shared_run(top / "four", "shared-4", slow=1)
        _take(page, top / "four", "report_4_ranks", (1000, 1110))
        sweep(top / "thirty")
        _take(page, top / "thirty", "report_30_runs", (1280, 1080))
        reduced_run(top / "many", "big", ranks=256, slow=137, steps=120)
        _take(page, top / "many", "report_256_ranks", (1000, 760), beside="#ranks")


def _take(page: Page, runs: Path, name: str, size: tuple[int, int], *, beside: str | None = None) -> None:
    report = runs.parent / f"{name}.html"
    os.chdir(runs.parent)  # the page shows the given path
    if dist_wandb(["report", runs.name, "-o", report.name]):
        raise SystemExit(1)
    page.size(*size)
    page.open(report)
    page.run("document.documentElement.style.scrollbarWidth = 'none'")
    page.wait("document.querySelectorAll('.main-svg').length > 0")
    if beside is not None:  # charts are drawn when they come near, which moves later sections
        there = f"document.querySelector({beside!r})"
        page.wait(f"{there}.scrollIntoView(), {there}.querySelectorAll('.main-svg').length > 0")
    page.run("new Promise((done) => setTimeout(done, 1500))")
    if beside is not None:
        page.run(f"{there}.scrollIntoView(), scrollBy(0, 32)")
        page.run("new Promise((done) => setTimeout(done, 500))")
    picture = IMAGES / f"{name}.png"
    page.screenshot(picture)
    Image.open(picture).convert("RGB").quantize(256).save(picture, optimize=True)


if __name__ == "__main__":
    main()
