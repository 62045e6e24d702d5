"""Private names of other packages, each used in one guarded place. These tests fail when upstream changes them."""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
import torch.distributed as dist
import wandb
from fakes import FakeWandb
from processes import wait_until
from wandb.integration.torch import wandb_torch
from wandb.proto import wandb_internal_pb2
from wandb.sdk import data_types

from dist_wandb.exchange.transport import BrokenError
from dist_wandb.exchange.transport.gloo import FORMING_MORE, GlooGroup
from dist_wandb.payloads import cells
from dist_wandb.runs.interception import intercept
from dist_wandb.runs.run_metadata import can_hold
from dist_wandb.runs.summary import SummaryWrites
from dist_wandb.runs.wandb_private import (
    FINISH,
    LOG,
    detach_service,
    is_finished,
    is_locked,
    leave_run,
    tear_down_service_of,
)
from dist_wandb.runs.wandb_private import fill_config as _fill_config
from dist_wandb.session.stalls.evidence import Collectives
from dist_wandb.wandb_files import records


@pytest.mark.usefixtures("bare_environment")
def test_wandbs_names_and_the_hooks_of_watch_leave_an_inherited_run(tmp_path: Path) -> None:
    run, layer = (
        wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(silent=True)),
        torch.nn.Linear(1, 1),
    )
    run.watch(layer, log="all", log_freq=1)
    leave_run()
    layer(torch.ones(1, 1)).sum().backward()
    assert wandb.run is None
    with pytest.raises(wandb.Error):
        wandb.log({"loss": 1.0})
    run.finish()


@pytest.mark.usefixtures("bare_environment")
def test_all_ways_of_finishing_a_run_call_one_method(tmp_path: Path) -> None:
    """A row that is still open is written first."""
    called: list[str] = []
    for end in ("finish", "__exit__"):
        run = wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(silent=True))

        def handler(finish: Any, *args: Any, **kwargs: Any) -> None:
            called.append("_finish")
            finish(*args, **kwargs)

        intercept(run, FINISH, handler)
        assert not is_finished(run)
        getattr(run, end)(*() if end == "finish" else (None, None, None))
        assert is_finished(run)
    assert called == ["_finish"] * 2


def test_the_hooks_of_watch_log_through_one_method() -> None:
    source = inspect.getsource(wandb_torch.TorchHistory.log_tensor_stats)
    assert f"wandb.run.{LOG}(" in source, "adapt wandb_private.is_watched"


@pytest.mark.newest
def test_wandb_logs_artifacts_of_tables_through_two_methods() -> None:
    source = inspect.getsource(getattr(wandb.Run, "_log_artifact"))  # noqa: B009  # private
    assert "self._public_api()._set_artifact_save_handle(" in source, "adapt wandb_private.adapt"
    assert 'InternalArtifact(f"run-{run.id}-{key}", "run_table")' in inspect.getsource(data_types.utils)


def test_wandbs_config_can_be_checked_for_values_it_accepts() -> None:
    assert can_hold(Path("a"))
    assert not can_hold(object())
    assert can_hold("wandb-artifact://team/data:v0"), "W&B replaces it by the artifact"
    assert can_hold({"_type": "artifactVersion", "id": "a", "version": "v0", "sequenceName": "data", "usedAs": "x"})


def test_wandbs_config_tells_which_values_are_a_sweeps_and_is_filled_without_sending_anything(
    fake_wandb: FakeWandb,
) -> None:
    """Uses a guarded private name. Without it, none counts as a sweep's."""
    run: Any = fake_wandb.init(config={"lr": 0.1, "batch": 8})
    run.config.update_locked({"lr": 0.5}, user="sweep", _allow_val_change=True)
    assert [is_locked(run.config, name) for name in ("lr", "batch")] == [True, False]
    before = list(run.config.sent)
    _fill_config(run, {"batch": 16, "names": {1: "a"}})
    assert dict(run.config) == {"lr": 0.5, "batch": 16, "names": {1: "a"}}
    assert run.config.sent == before


@pytest.mark.usefixtures("bare_environment")
def test_wandbs_summary_calls_back_at_each_write(tmp_path: Path) -> None:
    """Uses guarded private names of wandb. Without them, rows that are written later replace what the user wrote."""
    run: Any = wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(silent=True))
    summary: Any = run.summary
    writes = SummaryWrites()
    removals = writes.follow(run)
    assert removals, "read wandb/sdk/wandb_summary.py of this version, then adapt SUMMARY_WRITTEN"
    run.log({"loss": 0.5, "a": {"b": 1, "c": 1}, "gone": 1})
    summary["loss"] = 9
    summary["a"]["b"] = 5
    summary.update({"acc": 1, "best": 2})
    del summary["gone"]
    assert writes.count == 4
    row = {"loss": 0.4, "a": {"b": 2, "c": 2}, "acc": 0, "gone": 2}
    run.log(row)
    writes.keep(row, 0, 1, is_open=False)
    assert {name for name in summary.keys() if not name.startswith("_")} == {"loss", "a", "acc", "best"}  # noqa: SIM118
    assert [summary[name] for name in ("loss", "acc", "best")] == [9, 1, 2]
    assert dict(summary["a"]) == {"b": 5, "c": 2}
    for remove in removals:
        remove()
    summary["loss"] = 10
    assert (writes.count, summary["loss"]) == (4, 10)
    run.finish()
    assert not SummaryWrites().follow(wandb.init(mode="disabled"))


_FORKS = """
import os, sys, wandb, dist_wandb
run = dist_wandb.init(project="digits", mode="offline")
def row(step):
    return {"loss": step, "table": wandb.Table(columns=["a"], data=[[step]])}
run.log(row(0), step=0)
for step in range(1, 3):
    child = os.fork()
    if child == 0:
        sys.exit(0)  # by the exit hooks that wandb has left
    os.waitpid(child, 0)
    assert os.path.isdir(sys.modules["wandb.sdk.data_types._private"].MEDIA_TMP.name)
    run.log(row(step), step=step)
run.run.log({})  # raises if the child has ended wandb's process
run.finish()
"""


def _run(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
@pytest.mark.usefixtures("bare_environment")
def test_exit_of_a_forked_process_does_not_affect_the_parents_run(tmp_path: Path) -> None:
    """Uses guarded private names of wandb. Without them, a fork's end removes the parent's media files."""
    done = _run(_FORKS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr  # wandb's exit hook does not complain about the fork either
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 1


_IMPORTS = """
import os, signal, sys, dist_wandb
from pathlib import Path
run = dist_wandb.init(project="digits", mode="offline")
run.log({"loss": 0.5})
children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
(core,) = [int(pid) for pid in children if "wandb-core" in Path(f"/proc/{pid}/cmdline").read_text()]
os.kill(core, signal.SIGKILL)
os.waitpid(core, 0)
import catboost, mmcv  # the first report may still be accepted
run.log({"loss": 0.4})
run.finish()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("bare_environment")
def test_imports_do_not_fail_because_wandbs_process_is_gone(tmp_path: Path) -> None:
    """Uses a guarded private name of wandb, whose hooks report the imports of known packages."""
    for name in ("catboost", "mmcv"):
        (tmp_path / f"{name}.py").touch()
    done = _run(_IMPORTS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Lost wandb's own process on rank 0" in done.stderr


@pytest.mark.usefixtures("bare_environment")
def test_a_run_can_be_written_by_a_wandb_process_of_its_own(tmp_path: Path) -> None:
    """Uses a guarded private name. Without it, an id stays in use in wandb's process if its run could not be opened."""
    settings = wandb.Settings(silent=True)
    first = wandb.init(mode="offline", dir=str(tmp_path / "first"), id="exp", settings=settings)
    detach_service()
    second = wandb.init(mode="offline", dir=str(tmp_path / "second"), id="exp", settings=settings, reinit="create_new")
    tear_down_service_of(first)  # another process writes new runs
    for run in (first, second):
        run.log({"loss": 0.5})
        run.finish()
    files = [list((tmp_path / name).glob("wandb/offline-run-*/run-exp.wandb")) for name in ("first", "second")]
    assert [len(found) for found in files] == [1, 1]


def test_wandbs_images_expose_caption_overlays_and_file(tmp_path: Path) -> None:
    """Uses guarded private names of wandb. Without them, captions are lost and images are encoded twice."""
    image = wandb.Image(np.zeros((2, 2)), caption="x", boxes={"p": {"box_data": [], "class_labels": {0: "a"}}})
    copies = cells.Copies()
    assert cells.copied_picture(image, {}, copies).beside == {"caption": "x"}
    assert copies.replaced == {"boxes or masks"}
    path = tmp_path / "large.png"
    PIL.Image.new("L", (99, 99)).save(path, compress_level=0)
    assert cells.png_of(wandb.Image(str(path)), {}, wandb.Image) == path.read_bytes()


def test_torchs_gloo_groups_accept_an_address() -> None:
    """Uses guarded private names. Without them, ranks on several hosts need resolvable names, or GLOO_SOCKET_IFNAME."""
    store, begun = dist.HashStore(), time.monotonic()
    with pytest.raises(BrokenError, match="Wait timeout"):  # of gloo itself, for a second member
        GlooGroup(store, 0, 2, 30.0, lambda: False, "127.0.0.2", 0.5)
    assert time.monotonic() - begun < FORMING_MORE
    assert socket.inet_aton("127.0.0.2") in store.get("0/0")  # where it listens


@pytest.mark.newest
def test_torchs_flight_recorder_counts_the_collectives_of_named_groups() -> None:
    for _ in range(11):  # groups of the same name that are over, with numbers of one and two digits
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
    collectives = Collectives()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(1))
        assert collectives.have_moved()
        wait_until(lambda: not collectives.have_moved(), 20, "the completion to be counted")
        dist.barrier()
        assert collectives.have_moved()
        (calls,) = collectives.groups().values()
        assert (calls.made, calls.last) == (2, "barrier")
        assert collectives.watchdog == 1800
    finally:
        dist.destroy_process_group()


@pytest.mark.newest  # which has all of them
def test_the_fields_of_wandbs_records_have_the_numbers_that_are_read() -> None:
    def check(message: Any, schema: Any) -> None:
        for number, (name, decode) in schema.items():
            field = message.fields_by_number[number]
            assert field.name == name
            if isinstance(decode, Mapping):
                check(field.message_type, decode)

    record: Any = wandb_internal_pb2.DESCRIPTOR.message_types_by_name["Record"]
    check(record, records.KINDS)
    items = [
        *record.fields_by_name["history"].message_type.fields,
        *record.fields_by_name["summary"].message_type.fields,
    ]
    for item in (one.message_type for one in items if one.name in ("item", "update", "remove")):
        assert [item.fields_by_name[name].number for name in ("key", "nested_key", "value_json")] == [1, 2, 16]
