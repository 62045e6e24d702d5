"""The files of the ranks of a shared run, written by hand as record files."""

from __future__ import annotations

import json
from pathlib import Path

from offline_runs import sidecar_record
from record_files import Record, end, header, new_record, row, run, write_run


def step_axis(name: str) -> Record:
    """Return the record that makes a name the x axis of all metrics."""
    record = new_record()
    record.metric.glob_name, record.metric.step_metric = "*", name
    return record


def write_rank(top: Path, rank: int, *records: Record, ended: int | None = 0, run_id: str = "exp") -> Path:
    """Write the file of one rank of a shared run whose primary is rank 0.

    Args:
        top: The directory for the files of all ranks.
        rank: The rank, also its label.
        records: Its rows.
        ended: Its exit code; `None` to record no end.
        run_id: Id of the run.

    Returns:
        The ``.wandb`` file.
    """
    begin = [header(), run(run_id, config={"lr": 0.1, "rank": rank}), step_axis("global_step")]
    ending = [] if ended is None else [end(ended)]
    directory = write_run(top / f"rank-{rank}", run_id, records=[*begin, *records, *ending])
    is_primary = rank == 0
    changes = {"label": f"rank-{rank}", "primary": is_primary}
    sidecar = sidecar_record(run_id=run_id, base_id=run_id, global_rank=rank, world_size=1024, **changes)
    (directory / "dist-wandb.json").write_text(json.dumps(sidecar))
    return directory / f"run-{run_id}.wandb"


def write_slow_job(top: Path, ranks: int = 4, *, slow: int = 2, rows: int = 40) -> None:
    """Write a shared run in which one rank is the slowest in nine of ten rows."""
    for rank in range(ranks):
        records = []
        for step in range(rows):
            values = {f"rank-{rank}/loss": float(rank)}
            if rank == 0:
                values |= {"time/step": 0.1, "time/straggler_excess": 0.03}
                values["time/straggler_rank"] = slow if step % 10 else (slow + 1) % ranks
            records.append(row(step, values))
        write_rank(top, rank, *records)
