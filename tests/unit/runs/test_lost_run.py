"""Rows on their way to W&B while wandb's own process dies. No wandb process is started."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import FakeRun, FakeWandb
from limits import Limit
from wandb.sdk import wandb_setup

import dist_wandb
from dist_wandb.errors import UnavailableError
from dist_wandb.job.topology import Topology
from dist_wandb.runs import writer
from dist_wandb.runs.writer import RunWriter
from dist_wandb.settings.plan import plan_run


def dead(*_: Any, **__: Any) -> None:
    raise ConnectionResetError(104, "Connection reset by peer")


class Stand:
    """A writer over two fake runs; the first one dies."""

    def __init__(self, fake: FakeWandb) -> None:
        self.lost: FakeRun = fake.init(id="exp")
        self.lost.config.update({"lr": 0.1})
        self.config: Mapping[str, Any] = {}
        self.fake = fake
        self.reopen: Callable[..., Any] = self.open_second
        run: Any = self.lost
        plan = plan_run(Topology.single(), "auto", "global", "exp")
        self.writer = RunWriter(run, plan, None, 0, lambda *given: self.reopen(*given))  # noqa: PLW0108  # set later

    def log(self, row: dict[str, Any], commit: bool | None = None) -> None:
        self.writer.write(row, None, commit=commit)

    @property
    def run(self) -> Any:
        return self.writer.run

    @property
    def second(self) -> FakeRun:
        return self.fake.runs[1]

    def kill(self) -> None:
        self.lost.log = self.lost.finish = dead  # type: ignore[method-assign]

    def open_second(self, run_id: str, config: Mapping[str, Any]) -> Any:
        self.config = config
        return self.fake.init(id=run_id, mode="offline")


@pytest.fixture
def stand(fake_wandb: FakeWandb) -> Stand:
    return Stand(fake_wandb)


def test_after_wandbs_process_dies_the_last_rows_are_written_again_and_others_follow(
    stand: Stand, caplog: pytest.LogCaptureFixture
) -> None:
    lost: Any = stand.lost
    for step in range(3):
        stand.log({"loss": step / 2, "global_step": step, "text": "a"})
    stand.kill()
    stand.log({"loss": 1.5, "global_step": 3})
    assert [row["global_step"] for row in stand.second.rows] == [0, 1, 2, 3]
    assert stand.config == {"lr": 0.1}
    assert "Lost wandb's own process on rank 0" in caplog.text
    stand.writer.replace(lost, ConnectionResetError(104, "Connection reset by peer"))  # detected later by a caller
    assert (stand.run, len(stand.fake.runs), stand.fake.torn_down) == (stand.second, 2, 1)


def test_a_row_of_several_parts_is_written_again_as_a_whole(stand: Stand) -> None:
    for step in range(3):
        stand.log({"image": "a file", "step": step}, commit=False)
        stand.log({"loss": step / 2})
    stand.log({"image": "a file", "step": 3}, commit=False)
    stand.kill()
    stand.log({"loss": 1.5})
    rows = [{"image": "a file", "step": step, "loss": step / 2} for step in (0, 1, 2, 3)]
    assert stand.second.rows == rows


def test_rows_that_are_old_are_on_disk(stand: Stand, limit: Limit) -> None:
    limit(writer, _UNSAFE=-1.0)
    stand.log({"loss": 1.0})
    stand.kill()
    stand.log({"loss": 2.0})
    assert stand.second.rows == [{"loss": 2.0}]


def test_if_the_process_is_lost_at_the_end_the_last_rows_are_written_again(stand: Stand) -> None:
    stand.log({"loss": 1.0})
    stand.kill()
    assert stand.writer.finish(0) is None
    assert stand.second.rows == [{"loss": 1.0}]
    assert stand.second.exit_codes == [0]


def test_an_error_of_wandb_at_the_end_is_not_an_error_of_the_training(stand: Stand) -> None:
    class HandleAbandonedError(Exception):
        pass

    def abandoned(**_: Any) -> None:
        raise HandleAbandonedError

    stand.log({"loss": 1.0})
    stand.lost.finish = abandoned  # type: ignore[method-assign, assignment]
    stand.fake.init, init = lambda **_: stand.lost, stand.fake.init  # type: ignore[method-assign]  # the next one fails, too
    assert stand.writer.finish(0) == "the run exp could not be ended: HandleAbandonedError()"
    stand.fake.init = init  # type: ignore[method-assign]


def test_if_the_replacement_cannot_be_opened_training_continues(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    def full(*_: object) -> Any:
        raise UnavailableError("disk full")

    stand.reopen = full
    stand.kill()
    stand.log({"loss": 1.0})
    stand.log({"loss": 2.0})
    assert not stand.writer.has_run
    assert "rank 0 cannot write it there: disk full. Further rows are dropped." in caplog.text


def test_two_runs_of_a_process_replace_wandbs_process_once(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    other, process = Stand(stand.fake), object()
    vars(stand.lost)["_wl"] = vars(other.lost)["_wl"] = process
    monkeypatch.setitem(vars(wandb_setup), "_singleton", process)
    stand.kill()
    other.kill()
    stand.log({"loss": 1.0})
    monkeypatch.setitem(vars(wandb_setup), "_singleton", object())  # the process of the run that replaces the first one
    other.log({"loss": 1.0})
    assert stand.fake.torn_down == 1
    assert stand.run.rows == other.run.rows == [{"loss": 1.0}]


def test_a_process_that_is_lost_at_a_definition_is_replaced(fake_wandb: FakeWandb) -> None:
    """A name that matches a pattern of the user is defined before it is logged first."""
    session = dist_wandb.init("digits")
    session.define_metric("val/*", step_metric="epoch")
    fake_wandb.runs[0].log = fake_wandb.runs[0].define_metric = dead  # type: ignore[method-assign]
    session.log({"val/loss": 1.0, "epoch": 2}, step=1)
    assert session.flush()
    assert fake_wandb.runs[1].rows == [{"val/loss": 1.0, "epoch": 2, "global_step": 1}]
    session.finish()


def test_a_session_exposes_the_replacement_of_its_run(fake_wandb: FakeWandb) -> None:
    session = dist_wandb.init("digits", config={"lr": 0.1})
    session.config.update({"epochs": 3})
    fake_wandb.runs[0].log = dead  # type: ignore[method-assign]
    session.log({"loss": 1.0}, step=1)
    assert session.flush()
    run: Any = session.run
    assert run is fake_wandb.runs[1]
    assert fake_wandb.runs[1].offline
    assert fake_wandb.runs[1].rows == [{"loss": 1.0, "global_step": 1}]
    assert fake_wandb.arguments[1]["reinit"] == "create_new"
    assert fake_wandb.arguments[1]["id"] == fake_wandb.runs[0].id == "made-by-wandb-0"
    assert session.config["epochs"] == 3
    session.finish()
    assert fake_wandb.runs[1].exit_codes == [None]


def test_a_change_of_the_config_detects_the_loss_too(fake_wandb: FakeWandb) -> None:
    session = dist_wandb.init("digits", config={"lr": 0.1})
    lost: Any = fake_wandb.runs[0]
    lost.log = dead
    lost.config.failures.append(ConnectionResetError(104, "Connection reset by peer"))
    session.config.update({"epochs": 3})
    run: Any = session.run
    assert run is fake_wandb.runs[1]
    assert dict(run.config) == {"lr": 0.1, "epochs": 3}


# --- errors that are not a loss of wandb's process --------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        FileNotFoundError(2, "No such file or directory", "/nowhere/table.json"),
        ConnectionResetError(104, "from a user's value; wandb's process is intact"),
        TimeoutError("a remote file"),
        TypeError("not JSON"),
    ],
)
def test_an_error_about_one_row_does_not_replace_the_run(stand: Stand, error: Exception) -> None:
    log = stand.lost.log

    def refuses(row: dict[str, Any], **kwargs: Any) -> None:
        if "table" in row:
            raise error
        log(row, **kwargs)

    stand.lost.log = refuses  # type: ignore[method-assign]
    stand.log({"loss": 1.0})
    with pytest.raises(type(error)):
        stand.log({"loss": 2.0, "table": "a"})
    stand.log({"loss": 3.0})
    assert stand.run is stand.lost
    assert [row["loss"] for row in stand.lost.rows if row] == [1.0, 3.0]
    assert stand.fake.torn_down == 0
    assert stand.writer.finish(0) is None


def test_a_removed_directory_for_media_is_recreated_before_wandb_stores_a_table(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, stored = tmp_path / "tmpabcwandb-media", list[str]()
    module = SimpleNamespace(MEDIA_TMP=SimpleNamespace(name=str(directory)))
    monkeypatch.setitem(sys.modules, "wandb.sdk.data_types._private", module)
    log = stand.lost.log

    def writes_a_file(row: dict[str, Any], **kwargs: Any) -> None:
        stored.append("artifact")
        (directory / "a.table.json").write_text("{}")
        log(row, **kwargs)

    stand.lost.log = writes_a_file  # type: ignore[method-assign]
    stand.log({"table": 1})
    assert (stored, stand.lost.rows) == (["artifact"], [{"table": 1}])


def test_a_directory_for_media_that_is_recreated_at_the_end_of_the_process_is_removed(tmp_path: Path) -> None:
    script = """
import atexit, pathlib, sys, types
from dist_wandb.runs.writer import RunWriter

directory = types.SimpleNamespace(name=sys.argv[1])
sys.modules["wandb.sdk.data_types._private"] = types.SimpleNamespace(MEDIA_TMP=directory)

def log(row, **_):
    print(row)
    file = pathlib.Path(directory.name, "a.table.json")
    file.write_text("{}")
    file.unlink()  # wandb moves it into the run's directory

plan = types.SimpleNamespace(label=None, primary=True, run_mode="auto")
writer = RunWriter(types.SimpleNamespace(log=log), plan, None)
atexit.register(lambda: [writer.write({"table": number}, None) for number in (1, 2)])
"""
    directory = tmp_path / "tmpabcwandb-media"
    job = (sys.executable, "-c", script, str(directory))
    printed = subprocess.run(job, check=True, capture_output=True, text=True, timeout=60).stdout
    assert printed == "{'table': 1}\n{'table': 2}\n"
    assert not directory.exists()


def test_the_process_does_not_end_before_the_run_that_replaces_a_lost_one_is_open() -> None:
    """What wandb has registered for the end would end its new process: all rows would be lost."""
    script = """
import atexit, threading, time, types
from dist_wandb.runs.writer import RunWriter

def dead(*_, **__):
    raise ConnectionResetError(104, "Connection reset by peer")

def reopen(*_):
    opening.set()
    time.sleep(0.5)
    print("open")
    return types.SimpleNamespace(log=lambda *_, **__: None)

opening = threading.Event()
atexit.register(print, "end")
plan = types.SimpleNamespace(label=None, primary=True, run_mode="auto")
lost = types.SimpleNamespace(log=dead, dir=".", id="exp", config={})
writer = RunWriter(lost, plan, None, 0, reopen)
logging = threading.Thread(target=writer.write, args=({"loss": 1}, None), daemon=True)
logging.start()
opening.wait()
"""
    printed = subprocess.run((sys.executable, "-c", script), check=True, capture_output=True, text=True, timeout=60)
    assert printed.stdout == "open\nend\n"


def test_a_run_that_times_out_at_the_end_is_not_reopened(stand: Stand) -> None:
    def late(**_: Any) -> None:
        raise TimeoutError("Timed out finishing run.")

    stand.lost.finish = late  # type: ignore[method-assign, assignment]
    assert stand.writer.finish(0) == "the run exp could not be ended: TimeoutError('Timed out finishing run.')"
    assert stand.run is stand.lost
    assert stand.writer.asked_for is None


def test_a_row_whose_files_are_gone_does_not_affect_others(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    for step in range(3):
        stand.log({"loss": step, "image": "a file" if step == 1 else "text"})

    def reopened(*given: Any) -> Any:
        run: Any = stand.open_second(*given)
        log = run.log

        def refuses(row: dict[str, Any], **kwargs: Any) -> None:
            if row.get("image") == "a file":
                raise FileNotFoundError(2, "No such file or directory")
            log(row, **kwargs)

        run.log = refuses
        return run

    stand.reopen = reopened
    stand.kill()
    stand.log({"loss": 3})
    assert [row["loss"] for row in stand.second.rows] == [0, 1, 2, 3]
    assert "rank 0 could write only the numbers of 1 of the rows" in caplog.text


def test_a_signal_handler_may_log_while_the_run_is_replaced(stand: Stand, limit: Limit) -> None:
    """Python calls it in the middle of any operation of the thread."""
    interrupted = threading.Event()

    def reopened(*given: Any) -> Any:
        limit(writer, _UNSAFE=-1.0)  # it took longer
        stand.log({"loss": 2.0})
        interrupted.set()
        return stand.open_second(*given)

    stand.reopen = reopened
    stand.log({"loss": 0.5})
    stand.kill()
    thread = threading.Thread(target=lambda: stand.log({"loss": 1.0}), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert interrupted.is_set()
    assert sorted(row["loss"] for row in stand.second.rows) == [0.5, 1.0, 2.0]
