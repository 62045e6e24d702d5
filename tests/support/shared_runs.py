"""The files of the ranks of a shared run, written by hand as record files."""

from __future__ import annotations

import json
from pathlib import Path

from offline_runs import sidecar_record
from record_files import Record, definition, end, header, run, write_run


def write_rank(top: Path, rank: int, *records: Record, ended: int | None = 0) -> Path:
    """Write and return the file of one rank of a shared run whose primary is rank 0; `ended` is its exit code."""
    begin = [header(), run(config={"lr": 0.1, "rank": rank}), definition()]
    ending = [] if ended is None else [end(ended)]
    directory = write_run(top / f"rank-{rank}", records=[*begin, *records, *ending])
    is_primary = rank == 0
    changes = {"label": f"rank-{rank}", "primary": is_primary}
    sidecar = sidecar_record(run_id="exp", base_id="exp", global_rank=rank, world_size=1024, **changes)
    (directory / "dist-wandb.json").write_text(json.dumps(sidecar))
    return directory / "run-exp.wandb"
