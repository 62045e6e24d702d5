"""Write runs with all contents of a report: timings with a slow rank, values of ranks, media, and console output."""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offline_runs import sidecar_record
from PIL import Image
from record_files import Record, definition, end, header, pb, run, write_run

from dist_wandb.cli.report import build
from dist_wandb.cli.report.page import Part

START = 1_700_000_000


def one_run(top: Path, metrics: Sequence[str] = ("*",)) -> Part:
    runs: list[Part] = build([top], metrics=metrics)["runs"]
    (found,) = runs
    return found


def history(values: Mapping[str, Any]) -> Record:
    """Return a history row with exactly these values; as by wandb, a nested one is an item with several names."""
    record = pb.Record()
    pending = [([name], value) for name, value in values.items()]
    for names, value in pending:
        if isinstance(value, dict):
            pending += [([*names, name], inner) for name, inner in value.items()]
        else:
            item = record.history.item.add()
            item.nested_key.extend(names)
            item.value_json = json.dumps(value)
    return record


def sample(second: float, values: Mapping[str, float]) -> Record:
    record = pb.Record()
    record.stats.timestamp.FromMilliseconds(int((START + second) * 1000))
    for name, value in values.items():
        item = record.stats.item.add()
        item.key, item.value_json = name, json.dumps(value)
    return record


def printed(text: str) -> Record:
    record = pb.Record()
    record.output_raw.output_type, record.output_raw.line = pb.OutputRawRecord.STDOUT, text
    return record


def png(width: int = 32, height: int = 32, shift: int = 0) -> bytes:
    made = Image.new("RGB", (width, height))
    made.putdata([((x * 8 + shift) % 256, (y * 8) % 256, 120) for y in range(height) for x in range(width)])
    content = io.BytesIO()
    made.save(content, "PNG")
    return content.getvalue()


def jpeg() -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (24, 16), (200, 90, 40)).save(content, "JPEG")
    return content.getvalue()


def _sidecar(directory: Path, **values: Any) -> None:
    (directory / "dist-wandb.json").write_text(json.dumps(sidecar_record(**values)))


def reduced_run(
    top: Path,
    run_id: str = "exp",
    *,
    ranks: int = 4,
    slow: int | None = 2,
    steps: int = 200,
    seed: int = 1,
    group: str | None = "sweep-7",
    lr: float = 0.1,
) -> Path:
    """Write a run of mode `auto`: reduced values and spread, timings, degraded rows, media, console, system metrics."""
    draw = random.Random(seed)
    records = [header(), run(run_id, display_name=run_id, run_group=group or "", config=_config(lr)), definition()]
    for step in range(steps):
        times = [0.1 + abs(draw.gauss(0, 0.004)) + (0.03 if rank == slow else 0.0) for rank in range(ranks)]
        loss = 2.0 * math.exp(-step / 60) + 0.05 * draw.random()
        losses = [loss + draw.gauss(0, 0.05) for _ in range(ranks)]
        worst = max(range(ranks), key=times.__getitem__)
        middle = sorted(times)[ranks // 2]
        row = {
            "global_step": step,
            **_spread("train/loss", losses),
            **_spread("time/step", times),
            **_spread("time/forward", [time * 0.4 for time in times]),
            "time/busy": 0.1,
            "train/lr": lr * 0.5 * (1 + math.cos(step / steps * math.pi)),
            "_step": step,
            "_timestamp": START + step,
        }
        if slow is not None and worst == slow:
            row |= {"time/straggler_rank": worst, "time/straggler_excess": times[worst] - middle}
        if step % 20 == 0:
            row |= {"val/accuracy": 1 - math.exp(-step / 50), "val/loss": loss * 1.1}
        if 120 <= step < 132:
            row["dist_wandb/degraded"] = 1
        records.append(history(row))
        records.append(printed(f"step {step}: \x1b[32mloss {loss:.4f}\x1b[0m\n"))
        if step % 10 == 0:
            gpus = {f"system.gpu.{rank}.gpu": 90 + draw.random() * 5 for rank in range(min(ranks, 8))}
            records.append(sample(step, {**gpus, "system.cpu": 20 + draw.random(), "system.memory_percent": 41.5}))
    table = {"_type": "table-file", "path": "media/table/predictions.table.json", "ncols": 3, "nrows": 3}
    picture = {"_type": "image-file", "path": "media/images/sample.png", "width": 32, "height": 32, "caption": "a cat"}
    several = {
        "_type": "images/separated",
        "filenames": ["media/images/a.png", "media/images/b.jpg"],
        "captions": ["a"],
    }
    records.append(
        history({"global_step": steps, "predictions": table, "sample": picture, "batch": several, "_step": steps})
    )
    directory = write_run(top, run_id, records=[*records, end()])
    files = directory / "files" / "media"
    (files / "table").mkdir(parents=True)
    (files / "images").mkdir()
    content = {"columns": ["id", "label", "score"], "data": [[number, f"class {number}", 0.5] for number in range(3)]}
    (files / "table" / "predictions.table.json").write_text(json.dumps(content))
    (files / "images" / "sample.png").write_bytes(png())
    (files / "images" / "a.png").write_bytes(png(shift=90))
    (files / "images" / "b.jpg").write_bytes(jpeg())
    job = {"run_mode": "auto", "shared": False, "label": None, "primary": True}
    _sidecar(
        directory, **job, run_id=run_id, base_id=run_id, global_rank=0, local_rank=0, world_size=ranks, group=group
    )
    return directory


def shared_run(top: Path, run_id: str = "shared", *, ranks: int = 4, slow: int | None, steps: int = 100) -> None:
    """Write a shared run: each rank has a file, with its own values under its label."""
    for rank in range(ranks):
        draw = random.Random(rank)
        label = f"rank-{rank}"
        records = [header(), run(run_id, display_name=run_id, config=_config(0.05, rank)), definition()]
        for step in range(steps):
            time = 0.2 + abs(draw.gauss(0, 0.003)) + (0.06 if rank == slow else 0.0)
            row: dict[str, Any] = {"global_step": step, f"{label}/time/step": time, "_step": step}
            row[f"{label}/loss"] = math.exp(-step / 40) + draw.gauss(0, 0.02)
            if rank == 0:
                row["loss"] = math.exp(-step / 40)
            records.append(history(row))
            if step % 10 == 0:
                records.append(sample(step, {f"system.cpu/l:{label}": 30 + 3 * rank + draw.random()}))
        records.append(printed(f"I am {label}\n"))
        directory = write_run(top, run_id, records=[*records, end()], stamp=f"20260101_0000{rank % 60:02d}-{rank}")
        role = {"primary": rank == 0}
        place = {"global_rank": rank, "local_rank": rank % 8, "node_rank": rank // 8, "num_nodes": -(-ranks // 8)}
        _sidecar(directory, run_id=run_id, base_id=run_id, label=label, world_size=ranks, **role, **place)


def sweep(top: Path, runs: int = 30, steps: int = 40) -> None:
    """Write runs of one process with different configs: curves over a step and an epoch, single values, and facts."""
    for number in range(runs):
        draw = random.Random(number)
        rate, optimizer = 10 ** draw.uniform(-4, -1), ("adam", "sgd", "lion")[number % 3]
        settings = {"lr": rate, "optim": {"name": optimizer}, "batch": 2 ** (4 + number % 4), "layers": 12}
        facts = {"run_group": "sweep", "notes": "a baseline" if not number else ""}
        first = run(f"s{number:02d}", display_name=f"sweep-{number:02d}", config=settings, **facts)
        first.run.tags.append("night")
        first.run.start_time.FromSeconds(START + 600 * number)
        best = 0.2 + abs(math.log10(rate) + 2.5) / 4 + 0.1 * (number % 3)
        records = [header(), first, environment(number), definition("val/*", "epoch"), definition("*")]
        for step in range(steps):
            loss = best + 2 * math.exp(-step * rate**0.3 / 2) + draw.gauss(0, 0.02)
            seconds = START + 600 * number + step * (3 + number / 10)
            row = {"global_step": 10 * step, "_step": step, "_timestamp": seconds, "epoch": step // 10}
            row |= {"train/loss": loss, "train/loss/std": 0.1, "time/step": 0.3 + draw.random() / 50, "train/lr": rate}
            if step % 10 == 9:
                row |= {"val/accuracy": 1 - best / 2 - 0.5 / (step + 1), "val/loss": loss * 1.1}
            records.append(history(row))
        records.append(history({"test/accuracy": 1 - best / 2, "_step": steps, "_timestamp": seconds}))
        write_run(top, f"s{number:02d}", records=[*records, end(int(number == 7))])


def environment(number: int) -> Record:
    record = pb.Record()
    about = record.environment
    about.host, about.python, about.program = f"node-{number % 2}", "CPython 3.11.7", "train.py"
    about.gpu_count, about.gpu_type, about.git.commit = 8, "NVIDIA H100", "5ed799f4fd71"
    about.args.extend(["--api_key=hidden-key", "--max-tokens", "9", "--token", "hidden-token", "--lr=0.1"])
    return record


def timed_run(top: Path, *, marked: bool) -> None:
    """Write a run whose ranks wait in a backward pass for rank 2, which loads its data twice as long."""
    times = {"time/data": [0.03, 0.03, 0.06], "time/backward": [0.03, 0.031, 0.001], "time/step": [0.061] * 3}
    busy = [0.5, 0.5, 1.0] if marked else [0.99, 1.0, 0.99]
    records = []
    for step in range(40):
        shift = step % 3 if not marked else 0  # the busiest rank, and the one that waits longest, change
        turned = {name: values if name == "time/data" else [*values[2:], *values[:2]] for name, values in times.items()}
        rows = [_spread(name, values) for name, values in (turned if shift else times).items()]
        rows.append(_spread("time/busy", [*busy[shift:], *busy[:shift]]))
        own = {f"rank-{rank}/time/data": value for rank, value in enumerate(times["time/data"])}
        records.append(history({"global_step": step, **{k: v for row in rows for k, v in row.items()}, **own}))
    directory = write_run(top, records=[header(), run(), definition(), *records, end()])
    _sidecar(directory, shared=False, label=None, world_size=3)


def _spread(name: str, values: list[float]) -> dict[str, float]:
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
    rank = max(range(len(values)), key=values.__getitem__)
    return {
        name: mean,
        f"{name}/min": min(values),
        f"{name}/max": max(values),
        f"{name}/std": deviation,
        f"{name}/argmax_rank": rank,
    }


def _config(lr: float, rank: int | None = None) -> dict[str, Any]:
    return {"lr": lr, "model": {"depth": 12, "width": 768}, "seed": 7, **({} if rank is None else {"local_rank": rank})}
