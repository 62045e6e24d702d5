"""Sessions from `init` to `finish`, over a stand-in for wandb. Ranks of a larger world are threads."""

from __future__ import annotations

import inspect
import logging
import math
import multiprocessing
import pickle
import re
import threading
import time
import warnings
from collections import UserList, deque
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import wandb
from docstrings import documented_options
from units import eventually

import dist_wandb
from dist_wandb import DistWandbLogger, DistWandbTracker
from dist_wandb.errors import ConfigurationError, RendezvousError, TopologyError
from dist_wandb.exchange import interface
from dist_wandb.exchange.membership import presence
from dist_wandb.exchange.rows import DEGRADED
from dist_wandb.notices import Notices
from dist_wandb.runs.null_run import NullRun
from dist_wandb.session import api, registry
from dist_wandb.session.api import get_run
from dist_wandb.session.job_description import next_job
from dist_wandb.session.opener import open_session
from dist_wandb.session.registry import holds
from dist_wandb.session.session import Session
from dist_wandb.settings.limits import Limits
from dist_wandb.settings.options import CONFIG_SYNCS, OPTION_NAMES, SYSTEM_METRICS, Options
from dist_wandb.settings.plan import RANK_SCOPES, RUN_MODES
from dist_wandb.store import job_identity
from dist_wandb.store.job_store import JobStore
from dist_wandb.topology.model import Topology

if TYPE_CHECKING:
    from tests.conftest import FakeWandb, Job, OnRanks

ALL_MODES = [(mode, scope) for mode in ("auto", "shared", "new") for scope in ("global", "worker")]


# --- a world of one ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "scope"), ALL_MODES)
def test_in_a_world_of_one_wandb_gets_exactly_the_users_arguments(fake_wandb: FakeWandb, mode: Any, scope: Any) -> None:
    config = {"lr": 0.1}
    session = dist_wandb.init("digits", run_mode=mode, rank_scope=scope, name="base", config=config, tags=("a",))
    assert fake_wandb.arguments == [{"project": "digits", "name": "base", "config": config, "tags": ("a",)}]
    assert holds(fake_wandb.runs[0])
    assert session.id == fake_wandb.runs[0].id


def test_without_arguments_wandb_gets_none(fake_wandb: FakeWandb) -> None:
    dist_wandb.init()
    assert fake_wandb.arguments == [{}]


def test_a_world_of_one_defines_the_x_axis(fake_wandb: FakeWandb) -> None:
    dist_wandb.init()
    assert fake_wandb.runs[0].defined == [
        ("global_step", {}),
        ("*", {"step_metric": "global_step", "step_sync": False}),
    ]


def test_the_session_tells_what_was_decided(fake_wandb: FakeWandb) -> None:
    session = dist_wandb.init("digits", id="exp", group="night")
    assert session.plan.opens_run
    assert session.topology.world_size == 1
    assert (session.id, session.url) == ("exp", "https://wandb.example/team/digits/runs/exp")
    assert session.group_url == "https://wandb.example/team/digits/groups/night"
    assert session.config is fake_wandb.runs[0].config
    assert repr(session) == "<dist_wandb.Session run_mode='auto' rank 0 of 1 run='exp'>"


def test_an_id_that_wandb_made_is_the_sessions(fake_wandb: FakeWandb) -> None:
    assert dist_wandb.init().id == fake_wandb.runs[0].id == "made-by-wandb-0"


@pytest.mark.usefixtures("fake_wandb")
def test_the_start_is_announced_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    dist_wandb.init("digits", id="exp")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "dist_wandb: run_mode=auto, rank_scope=global, 1 rank on 1 node: one run: exp "
        "(https://wandb.example/team/digits/runs/exp)\n"
    )


@pytest.mark.usefixtures("fake_wandb")
def test_an_id_that_wandb_made_is_announced_too(capsys: pytest.CaptureFixture[str]) -> None:
    dist_wandb.init("digits")
    assert "one run: made-by-wandb-0 (https://" in capsys.readouterr().err


@pytest.mark.usefixtures("fake_wandb")
def test_wandb_silent_silences_the_announcement_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    dist_wandb.init("digits")
    assert capsys.readouterr() == ("", "")


# --- the current session ----------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001  # goes first
    """As if nobody had opened a session in this process."""
    monkeypatch.setattr(registry.history, "has_begun", False)
    monkeypatch.setattr(api, "_notices", Notices())


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.mark.usefixtures("fresh")
def test_who_logs_where_no_session_was_opened_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        get_run().log({"loss": 1.0}, step=1)
    (said,) = warnings_of(caplog)
    assert "no session was opened in this process, so nothing is logged. Call dist_wandb.init()" in said


@pytest.mark.usefixtures("fresh")
def test_after_a_session_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    dist_wandb.init().finish()
    get_run().log({"loss": 1.0})
    assert warnings_of(caplog) == []


@pytest.mark.usefixtures("fresh")
def test_ranks_that_may_be_meant_to_open_none_are_not_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    get_run().log({"loss": 1.0})
    assert warnings_of(caplog) == []
    monkeypatch.delenv("RANK")  # nobody knows
    get_run().log({"loss": 1.0})
    assert len(warnings_of(caplog)) == 1


@pytest.mark.usefixtures("fake_wandb")
def test_get_run_gives_the_session_opened_last_and_not_finished() -> None:
    assert isinstance(get_run(), NullRun)
    outer = dist_wandb.init()
    inner = dist_wandb.init()
    assert get_run() is inner
    inner.finish()
    assert get_run() is outer
    outer.finish()
    assert not get_run()


@pytest.mark.usefixtures("fake_wandb")
def test_sessions_may_end_in_any_order() -> None:
    outer, inner = dist_wandb.init(), dist_wandb.init()
    outer.finish()
    assert get_run() is inner


def test_a_second_session_of_a_process_gets_a_run_of_its_own(fake_wandb: FakeWandb) -> None:
    first = dist_wandb.init()
    second = dist_wandb.init()
    assert [arguments.get("reinit") for arguments in fake_wandb.arguments] == [None, "create_new"]
    assert first.run is not second.run


def test_after_the_first_is_finished_nothing_is_asked_of_wandb(fake_wandb: FakeWandb) -> None:
    dist_wandb.init().finish()
    dist_wandb.init()
    assert fake_wandb.arguments == [{}, {}]


def test_a_session_holds_its_run_until_it_is_finished(fake_wandb: FakeWandb) -> None:
    session = dist_wandb.init()
    assert holds(fake_wandb.runs[0])
    session.finish()
    assert not holds(fake_wandb.runs[0])


def test_a_run_that_is_adopted_is_written_but_neither_opened_nor_finished(fake_wandb: FakeWandb) -> None:
    theirs: Any = fake_wandb.init(id="theirs")
    session = open_session(Options(), {}, integration="test", adopt=lambda _: theirs)
    session.log({"loss": 0.5})
    session.finish()
    assert len(fake_wandb.runs) == 1
    (run,) = fake_wandb.runs
    assert (run.rows, run.defined, run.exit_codes) == ([{"loss": 0.5, "global_step": 0}], [], [])


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exit_code", [None, 0, 3])
def test_finish_hands_the_exit_code_on(fake_wandb: FakeWandb, exit_code: int | None) -> None:
    dist_wandb.init().finish(exit_code)
    assert fake_wandb.runs[0].exit_codes == [exit_code]


def test_finishing_twice_finishes_once(fake_wandb: FakeWandb) -> None:
    session = dist_wandb.init()
    session.finish()
    session.finish(1)
    assert fake_wandb.runs[0].exit_codes == [None]


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (RuntimeError("x"), 1),
        (SystemExit(3), 3),
        (SystemExit(0), 0),
        (SystemExit("x"), 1),
        (SystemExit(None), 0),
        (KeyboardInterrupt(), 255),
    ],
    ids=repr,
)
def test_what_ends_the_with_statement_is_the_runs_exit_code(
    fake_wandb: FakeWandb, error: BaseException, exit_code: int
) -> None:
    with pytest.raises(type(error)), dist_wandb.init():
        raise error
    assert fake_wandb.runs[0].exit_codes == [exit_code]


def test_a_with_statement_that_ends_well_finishes_the_run_well(fake_wandb: FakeWandb) -> None:
    with dist_wandb.init() as session:
        assert get_run() is session
    assert fake_wandb.runs[0].exit_codes == [None]
    assert not get_run()


def test_a_released_session_leaves_its_run_open(fake_wandb: FakeWandb) -> None:
    session = dist_wandb.init()
    session.release()
    session.finish()
    assert fake_wandb.runs[0].exit_codes == []
    assert not get_run()


# --- logging ----------------------------------------------------------------------------------------------------------


def test_rows_without_a_step_are_counted(fake_wandb: FakeWandb) -> None:
    session = dist_wandb.init()
    for loss in (0.5, 0.4, 0.3):
        session.log({"loss": loss})
    assert fake_wandb.runs[0].rows == [
        {"loss": 0.5, "global_step": 0},
        {"loss": 0.4, "global_step": 1},
        {"loss": 0.3, "global_step": 2},
    ]


def test_a_step_that_is_given_is_taken(fake_wandb: FakeWandb) -> None:
    dist_wandb.init().log({"loss": 0.5}, step=7)
    assert fake_wandb.runs[0].logged == [({"loss": 0.5, "global_step": 7}, {})]


def test_an_own_global_step_among_the_metrics_is_respected(fake_wandb: FakeWandb) -> None:
    dist_wandb.init().log({"loss": 0.5, "global_step": 40})
    assert fake_wandb.runs[0].rows == [{"loss": 0.5, "global_step": 40}]


def test_calls_that_make_up_one_row_count_as_one(fake_wandb: FakeWandb) -> None:
    session = dist_wandb.init()
    session.log({"loss": 0.5}, commit=False)
    session.log({"accuracy": 0.9})
    session.log({"loss": 0.4}, commit=True)
    assert fake_wandb.runs[0].logged == [
        ({"loss": 0.5, "global_step": 0}, {"commit": False}),
        ({"accuracy": 0.9, "global_step": 0}, {}),
        ({"loss": 0.4, "global_step": 1}, {"commit": True}),
    ]


def test_what_is_logged_is_not_changed(fake_wandb: FakeWandb) -> None:
    metrics = {"loss": 0.5}
    dist_wandb.init().log(metrics, step=7)
    assert metrics == {"loss": 0.5}
    assert len(fake_wandb.runs[0].rows) == 1


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ([("loss", 0.5)], "log was given list on rank 0, but it takes a mapping"),
        (0.5, "log was given float on rank 0"),
        (None, "log was given NoneType on rank 0"),
        (
            {"loss": 0.5, 7: 1},
            "log was given the name 7 (int) on rank 0, but names are text, without NUL characters and lone",
        ),
        ({None: 1}, "log was given the name None (NoneType) on rank 0"),
        ({"a\ud800b": 1}, "but names are text, without NUL characters and lone"),
        ({"a\0b": 1}, "but names are text, without NUL characters and lone"),
    ],
)
def test_metrics_that_are_none_are_refused_and_nothing_is_written(
    fake_wandb: FakeWandb, metrics: Any, message: str
) -> None:
    session = dist_wandb.init()
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        session.log(metrics)
    session.log({"loss": 0.4})
    assert fake_wandb.runs[0].rows == [{"loss": 0.4, "global_step": 0}]


@pytest.mark.usefixtures("fake_wandb")
@pytest.mark.parametrize("timeout", [None, 0.1])
def test_flush_says_that_all_is_handed_over(timeout: float | None) -> None:
    session = dist_wandb.init()
    session.log({"loss": 0.5})
    assert session.flush(timeout) is True


def test_a_session_without_an_x_axis_defines_none_and_counts_none(fake_wandb: FakeWandb) -> None:
    session = open_session(Options(), {}, integration="test", step_metric=None)
    session.log({"loss": 0.5})
    session.log({"loss": 0.4}, step=3)
    assert fake_wandb.runs[0].defined == []
    assert fake_wandb.runs[0].rows == [{"loss": 0.5}, {"loss": 0.4}]


def test_another_x_axis_is_written_where_it_is_given_and_not_counted(fake_wandb: FakeWandb) -> None:
    session = open_session(Options(), {}, integration="test", step_metric="trainer/global_step")
    session.log({"loss": 0.5})
    session.log({"loss": 0.4}, step=3)
    assert fake_wandb.runs[0].defined[0] == ("trainer/global_step", {})
    assert fake_wandb.runs[0].rows == [{"loss": 0.5}, {"loss": 0.4, "trainer/global_step": 3}]


# --- the run behind the session ---------------------------------------------------------------------------------------


def test_a_session_lists_what_is_for_its_users_and_what_its_run_has(fake_wandb: FakeWandb) -> None:
    names = set(dir(dist_wandb.init()))
    assert {"log", "flush", "finish", "id", "url", "plan", "topology", "config", "run"} <= names
    assert {name for name in dir(fake_wandb.runs[0]) if not name.startswith("_")} <= names
    assert not {"after_fork", "prepare_fork", "retire", "tell_of_run", "release", "owns_run", "meet"} & names
    assert not [name for name in names if name.startswith("_")]


def test_a_rank_without_a_run_lists_the_same(job: Job, on_ranks: OnRanks) -> None:
    sessions = job(TWO)
    assert {"log", "flush", "plan", "summary", "watch", "alert", "url"} <= set(dir(sessions[1]))
    assert not {"after_fork", "retire", "show_config"} & set(dir(sessions[1]))
    on_ranks(2, lambda rank: sessions[rank].finish())


def test_a_notebook_shows_the_page_of_the_run_on_all_ranks(job: Job, on_ranks: OnRanks) -> None:
    sessions = job(TWO)
    page = f"https://wandb.example/team/digits/runs/{sessions[0].id}"
    for session in sessions:
        assert f'View run at: <a href="{page}" target="_blank">{page}</a>' in session._repr_html_()
        assert "&lt;dist_wandb.Session run_mode=" in session._repr_html_()
    on_ranks(2, lambda rank: sessions[rank].finish())


@pytest.mark.usefixtures("fake_wandb")
def test_a_notebook_shows_a_run_without_a_page() -> None:
    assert "<a" not in dist_wandb.init(mode="offline")._repr_html_()


def test_ranks_that_write_the_same_into_the_summary_go_the_same_way(job: Job, on_ranks: OnRanks) -> None:
    sessions = job(TWO)

    def ways(rank: int) -> list[bool]:
        run, taken = sessions[rank], []
        for accuracy in (0.5, 0.4, 0.7):
            is_best = accuracy > run.summary.get("best", 0)
            taken.append(is_best)
            if is_best:
                run.summary["best"] = accuracy
        run.finish()
        return taken

    assert on_ranks(2, ways) == [[True, False, True]] * 2


def test_what_the_session_lacks_is_looked_up_on_its_run(fake_wandb: FakeWandb) -> None:
    session = dist_wandb.init(name="base")
    session.define_metric("epoch")
    assert session.name == "base"
    assert fake_wandb.runs[0].defined[-1] == ("epoch", {})


@pytest.mark.parametrize("rank", [0, 1])
def test_job_without_a_store_ends_at_once_with_what_there_is(
    fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture, rank: int
) -> None:
    session = open_session(Options(), {"id": "exp"}, integration="test", topology=Topology(rank, rank, 0, 2, 2, 1))
    session.log({"loss": 0.5}, step=1)
    begin = time.monotonic()
    session.finish()
    assert time.monotonic() - begin < 20
    assert f"Rank {rank} found no store of the job until it finished" in caplog.text
    rows = [{"loss": 0.5, DEGRADED: 1, "global_step": 1}]
    assert [run.rows for run in fake_wandb.runs] == [rows] * (rank == 0)


@pytest.mark.parametrize("by_wandb", [False, True])
def test_run_that_the_user_finishes_has_first_what_is_still_on_its_way(
    fake_wandb: FakeWandb, job: Job, on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, by_wandb: bool
) -> None:
    sessions = job(TWO)
    run = sessions[0].run
    monkeypatch.setattr(wandb, "run", run)

    def log_and_finish(rank: int) -> None:
        sessions[rank].log({"loss": float(rank)}, step=1)
        if by_wandb and rank == 0:
            wandb.finish(exit_code=0)
        else:
            sessions[rank].run.finish(0)

    on_ranks(2, log_and_finish)
    assert fake_wandb.runs[0].rows == [{"loss": 0.5, "global_step": 1}]
    assert fake_wandb.runs[0].exit_codes == [0]
    assert not dist_wandb.get_run()  # on the rank without a run as well
    assert "finish" not in vars(run)


def test_ranks_without_a_run_hear_that_the_user_has_finished_it(
    fake_wandb: FakeWandb, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = job(TWO)
    first.log({"loss": 1.0}, step=1)
    second.log({"loss": 2.0}, step=1)
    begin = time.monotonic()
    first.run.finish()  # on rank 1, wandb.finish() does nothing
    assert time.monotonic() - begin < 20  # of the 30 s of finish_timeout
    assert fake_wandb.runs[0].rows == [{"loss": 1.5, "global_step": 1}]
    assert fake_wandb.runs[0].exit_codes == [None]
    for _ in range(3):
        second.log({"loss": 3.0}, step=2)  # which the training survives
    assert caplog.text.count("was finished on the rank that has it") == 1
    second.finish()
    assert not get_run()


def test_to_finish_the_run_takes_no_longer_than_to_finish_the_session(
    fake_wandb: FakeWandb, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last rows are waited for first, and then that the others end: both within one `finish_timeout`."""
    first, _ = job(TWO)
    limits: list[float | None] = []
    close = first._exchange.close

    def flush_in_vain(timeout: float | None = None, **_named: Any) -> bool:  # noqa: ARG001  # the exchange's
        time.sleep(2.0)
        return False

    def close_within(timeout: float | None = None, *, failed: bool = False) -> bool:
        limits.append(timeout)
        return close(0.1, failed=failed)

    monkeypatch.setattr(first._exchange, "flush", flush_in_vain)
    monkeypatch.setattr(first._exchange, "close", close_within)
    first.run.finish()
    assert fake_wandb.runs[0].exit_codes == [None]
    (limit,) = limits
    assert limit is not None
    assert limit <= first.options.limits.flush_timeout - 2.0


def test_threads_that_finish_at_the_same_time_end_the_run_once_and_whole(fake_wandb: FakeWandb, job: Job) -> None:
    first, second = job(TWO)
    first.log({"loss": 1.0}, step=1)
    ends = [threading.Thread(target=end) for end in (first.run.finish, first.finish, first.run.finish)]
    for end in ends:
        end.start()
        time.sleep(0.05)
    second.log({"loss": 2.0}, step=1)
    second.finish()
    for end in ends:
        end.join(30)
        assert not end.is_alive()
    assert fake_wandb.runs[0].rows == [{"loss": 1.5, "global_step": 1}]
    assert fake_wandb.runs[0].exit_codes == [None]


def test_a_finish_that_a_run_has_of_its_own_is_put_back(fake_wandb: FakeWandb) -> None:
    run: Any = wandb.init()
    ended: list[int | None] = []

    def own(exit_code: int | None = None) -> None:  # as disabled runs of older versions have
        ended.append(exit_code)

    run.finish = own
    session = open_session(Options(), {}, integration="test", adopt=lambda _: run)
    session.finish()
    assert run.finish is own
    open_session(Options(), {}, integration="test", adopt=lambda _: run)
    run.finish(3)
    assert ended == [3]
    assert fake_wandb.runs[0].exit_codes == []


def test_the_job_is_told_all_options_for_ranks_that_come_late(job: Job) -> None:
    given: dict[str, Any] = {"reduce": {"tokens": "sum", "*": "mean"}, "spread": ["loss"]}
    sessions = job(TWO, limits={"peer_timeout": 7.0}, **given)
    assert sessions[0]._link.store is not None
    job_message: Any = sessions[0]._link.store.try_get("job")
    assert Options(**job_message["options"]) == sessions[0].options


class Settings(MutableMapping[str, Any]):
    """A mapping as OmegaConf's `DictConfig`: no dict, and nothing that JSON knows."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@pytest.mark.parametrize("mapping", [Settings, MappingProxyType])
@pytest.mark.parametrize("sequence", [UserList, tuple, deque])
def test_options_may_be_any_mappings_and_sequences(job: Job, mapping: Any, sequence: Any) -> None:
    reduce = {"tokens": "sum", "*": "mean"}
    given = {"reduce": mapping(reduce), "spread": sequence(["loss"]), "per_rank": sequence(["loss", "acc*"])}
    sessions = job(TWO, **given)
    assert [session.options.reduce for session in sessions] == [reduce] * 2
    assert sessions[0]._link.store is not None
    job_message: Any = sessions[0]._link.store.try_get("job")
    assert Options(**job_message["options"]) == sessions[0].options
    assert pickle.loads(pickle.dumps(sessions[0].options)) == sessions[0].options  # noqa: S301


@pytest.mark.parametrize("reduce", ["auto", "mean", None])
@pytest.mark.parametrize("patterns", [True, False, "loss", "auto"])
def test_options_of_plain_types_stay_as_they_are(reduce: Any, patterns: Any) -> None:
    options = Options(reduce=reduce, spread=patterns, per_rank=patterns)
    assert (options.reduce, options.spread, options.per_rank) == (reduce, patterns, patterns)


def test_a_gathered_table_is_logged_once(fake_wandb: FakeWandb) -> None:
    table = dist_wandb.gathered([[1]], ["a"])
    with dist_wandb.init() as session:
        session.log({"table": table})
        with pytest.raises(ConfigurationError, match="was logged a second time on rank 0"):
            session.log({"table": table})
    assert len(fake_wandb.runs[0].rows) == 1


def test_run_of_the_users_is_left_as_it_was(fake_wandb: FakeWandb) -> None:
    run = wandb.init()
    session = open_session(Options(), {}, integration="test", adopt=lambda _: run)
    assert session.run is run
    assert "finish" in vars(run)
    session.finish()
    assert "finish" not in vars(run)
    assert fake_wandb.runs[0].exit_codes == []


def test_run_of_the_users_is_finished_once_when_they_do(fake_wandb: FakeWandb) -> None:
    run = wandb.init()
    open_session(Options(), {}, integration="test", adopt=lambda _: run)
    run.finish()
    run.finish()
    assert fake_wandb.runs[0].exit_codes == [None]
    assert not dist_wandb.get_run()


@pytest.mark.usefixtures("fake_wandb")
@pytest.mark.parametrize("name", ["lgo", "finnish", "_private", "__deepcopy__"])
def test_a_misspelt_method_of_a_real_run_raises(name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        getattr(dist_wandb.init(), name)


def test_a_session_that_is_not_made_yet_raises_instead_of_recurring() -> None:
    with pytest.raises(AttributeError, match="'Session' object has no attribute 'summary'"):
        _ = Session.__new__(Session).summary


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"run_mode": "share"}, "run_mode='share' is unknown. Allowed: 'auto', 'shared', 'new'. Did you mean 'shared'"),
        ({"rank_scope": "node"}, "rank_scope='node' is unknown. Allowed: 'global', 'worker'."),
        ({"reduce": "avg"}, "reduce='avg' is no reduction."),
        ({"reduce": {"loss": "avg"}}, "reduce['loss']='avg' is no reduction."),
        ({"spread": 7}, "spread=7 is neither a bool nor name patterns."),
        ({"per_rank": 7}, "per_rank=7 is neither a bool nor name patterns."),
        ({"limits": {"heartbeat": "x"}}, "heartbeat must be a positive number of seconds, got 'x'."),
        (
            {"limits": {"hartbeat": 1.0}},
            "limits has an unknown name 'hartbeat'. Allowed: 'join_timeout', 'peer_timeout'",
        ),
        ({"limits": 60}, "limits must be dist_wandb.Limits(...) or a mapping of its arguments, got 60."),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(
    fake_wandb: FakeWandb, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        Options(**arguments)
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        dist_wandb.init(**arguments)
    assert fake_wandb.arguments == []


def test_what_no_option_says_is_the_default_of_every_integration() -> None:
    options = Options()
    assert options == Options("auto", "global", "auto", False, "auto", Limits(), "warn", "primary", False)
    assert Limits() == Limits(60.0, 60.0, None, 10_000, 1.0)
    for integration in (dist_wandb.init, DistWandbLogger, DistWandbTracker):
        parameters = inspect.signature(integration).parameters
        defaults = {field.name: parameters[field.name].default for field in fields(options)}
        asked_elsewhere = {"run_mode": None, "rank_scope": None}
        assert defaults == {**vars(options), **asked_elsewhere}, integration


def test_options_are_documented_alike_by_logger_and_tracker_and_in_full_by_init() -> None:
    """Written by hand three times: editors and LightningCLI's help read the text of each signature in the source."""
    full = documented_options(dist_wandb.init)
    logger, tracker = documented_options(DistWandbLogger), documented_options(DistWandbTracker)
    assert tuple(full) == tuple(logger) == OPTION_NAMES
    assert logger == tracker
    modes: dict[str, tuple[str, ...]] = {"run_mode": RUN_MODES, "rank_scope": RANK_SCOPES}
    for name, values in {**modes, "config_sync": CONFIG_SYNCS, "system_metrics": SYSTEM_METRICS}.items():
        for value in values:
            assert f'`"{value}"`' in full[name]
            assert f'`"{value}"`' in logger[name]


@pytest.mark.parametrize("limits", [Limits(peer_timeout=7), {"peer_timeout": 7}])
def test_limits_are_an_object_or_a_mapping(fake_wandb: FakeWandb, limits: Limits | dict[str, float]) -> None:  # noqa: ARG001
    with dist_wandb.init(limits=limits) as session:
        assert session.options.limits == Limits(60.0, 7, None, 10_000, 1.0)


@pytest.mark.parametrize(
    "arguments",
    [{"reduce": None}, {"reduce": {"tokens": "sum", "*": "mean"}}, {"spread": True}, {"spread": ["loss"]}],
)
def test_options_for_the_exchange_between_ranks_are_accepted(arguments: dict[str, Any]) -> None:
    assert Options(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"projct": "x"}, "dist_wandb.init got the argument 'projct', which wandb.init does not know."),
        ({"runmode": "new"}, "Did you mean 'run_mode'?"),
        ({"id": "a/b"}, "id='a/b' given to dist_wandb.init has '/', which W&B refuses"),
        ({"mode": "shared"}, "Pass run_mode='shared'"),
    ],
)
def test_arguments_that_wandb_would_refuse_are_refused_before_anything_starts(
    fake_wandb: FakeWandb, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        dist_wandb.init(**arguments)
    assert fake_wandb.arguments == []
    assert not get_run()


def test_a_forbidden_id_in_the_environment_is_refused(fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "a/b")
    with pytest.raises(ConfigurationError, match="WANDB_RUN_ID='a/b' has '/'"):
        dist_wandb.init()
    assert fake_wandb.arguments == []


def test_an_inconsistent_environment_is_refused(fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TopologyError, match=r"global_rank=2 \(RANK .* must be less than world_size=2 \(RANK|WORLD"):
        dist_wandb.init()
    assert fake_wandb.arguments == []


# --- several ranks ----------------------------------------------------------------------------------------------------

TWO = [Topology(rank, rank, 0, 2, 2, 1) for rank in range(2)]


def test_ranks_without_a_run_share_the_interface_and_write_nothing(job: Job, fake_wandb: FakeWandb) -> None:
    first, second = job(TWO, lambda _: {"id": "exp"})
    for session in (first, second):
        session.log({"loss": 0.5}, step=1)
        session.config.update({"lr": 0.1})
        session.define_metric("epoch")
        assert session
    assert isinstance(second.run, NullRun)
    assert first.flush()
    assert second.flush()
    (run,) = fake_wandb.runs
    assert run.rows == [{"loss": 0.5, "global_step": 1}]
    assert run.config == {"lr": 0.1}
    second.finish(1)
    assert run.exit_codes == []
    first.finish()
    assert run.exit_codes == [1]  # the job's


def test_ranks_without_a_run_know_its_id_and_address(job: Job) -> None:
    first, second = job(TWO)
    assert first.id == second.id
    assert first.url == second.url == f"https://wandb.example/team/digits/runs/{first.id}"


def test_new_runs_have_ids_made_from_one_base_id_and_one_group(job: Job) -> None:
    first, second = job(TWO, run_mode="new")
    base_id = first.plan.base_id
    assert [session.id for session in (first, second)] == [f"{base_id}-rank-0", f"{base_id}-rank-1"]
    assert first.plan.group == second.plan.group == base_id


def test_ranks_of_a_shared_run_write_side_by_side(job: Job, fake_wandb: FakeWandb) -> None:
    sessions = job(TWO, run_mode="shared")
    for number, session in enumerate(sessions):
        session.log({"loss": number}, step=1)
    assert all(session.flush() for session in sessions)
    assert len({run.id for run in fake_wandb.runs}) == 1
    rows = [row for run in fake_wandb.runs for row in run.rows]
    assert len(rows) == 2
    assert {"loss": 0.5, "rank-0/loss": 0, "global_step": 1} in rows
    assert {"rank-1/loss": 1, "global_step": 1} in rows


def test_what_rank_0_was_given_describes_the_job_for_ranks_that_were_not(job: Job, fake_wandb: FakeWandb) -> None:
    job(TWO, lambda rank: {"project": "digits", "group": "night", "name": "base"} if rank == 0 else {}, run_mode="new")
    told = [{name: arguments[name] for name in ("project", "group")} for arguments in fake_wandb.arguments]
    assert told == [{"project": "digits", "group": "night"}] * 2
    assert {arguments["name"] for arguments in fake_wandb.arguments} == {"base-rank-0", "base-rank-1"}


def test_a_ranks_own_arguments_win_over_those_of_rank_0(job: Job, fake_wandb: FakeWandb) -> None:
    job(TWO, lambda rank: {"notes": f"of rank {rank}"}, run_mode="new")
    assert {arguments["notes"] for arguments in fake_wandb.arguments} == {"of rank 0", "of rank 1"}


def test_an_id_made_up_by_each_rank_gives_one_job_with_a_warning(job: Job) -> None:
    with pytest.warns(UserWarning, match="Rank 1 was given the run id 'made-up-1', rank 0 'made-up-0'"):
        first, second = job(TWO, lambda rank: {"id": f"made-up-{rank}"}, run_mode="new")
    assert (first.id, second.id) == ("made-up-0-rank-0", "made-up-0-rank-1")


def test_an_id_that_all_ranks_know_is_no_reason_for_a_warning(job: Job) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job(TWO, lambda _: {"id": "exp"}, run_mode="shared")


@pytest.mark.parametrize("mode", ["auto", "shared", "new"])
def test_one_rank_announces_for_all(job: Job, capsys: pytest.CaptureFixture[str], mode: str) -> None:
    job(TWO, run_mode=mode)
    assert capsys.readouterr().err.count("dist_wandb: ") == 1


@pytest.mark.parametrize("mode", ["auto", "shared", "new"])
def test_ranks_that_do_not_know_their_nodes_learn_them(job: Job, mode: str) -> None:
    unknown = [Topology(rank, None, None, 3, None, None) for rank in range(3)]
    sessions = job(unknown, run_mode=mode, rank_scope="worker")
    assert [session.topology for session in sessions] == [topology.with_layout(["host"] * 3) for topology in unknown]


def test_ranks_that_know_their_nodes_help_those_that_do_not(job: Job) -> None:
    """torchrun --virtual-local-rank leaves the ranks of nodes in between without a local rank."""
    mixed = [Topology(0, 0, 0, 3, 1, 2), Topology(1, None, 1, 3, 2, 2), Topology(2, 1, 1, 3, 2, 2)]
    sessions = job(mixed, run_mode="shared", limits={"join_timeout": 20.0})
    assert sessions[1].plan.label is not None


def test_where_all_ranks_come_they_tell_each_other_their_nodes_without_need(
    store: dist.Store, on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store is not None
    monkeypatch.setattr(job_identity, "_GLANCE", 20.0)

    def open_one(rank: int) -> Session:
        unknown = Topology(rank, None, None, 2, None, None)
        return open_session(
            Options(limits=Limits(join_timeout=20.0)), {}, integration="test", topology=unknown, number=1
        )

    sessions = on_ranks(2, open_one)
    assert [session.topology.knows_layout for session in sessions] == [True, True]


def test_a_rank_alone_does_not_wait_for_nodes_that_its_plan_can_do_without(store: dist.Store) -> None:
    """Rank 0 uses the run in `prepare_data`, say, while the others stand at a barrier."""
    assert store is not None
    unknown = Topology(0, None, None, 2, None, None)
    start = time.monotonic()
    session = open_session(
        Options(limits=Limits(join_timeout=60.0)), {}, integration="test", topology=unknown, number=1
    )
    assert session.run
    assert not session.topology.knows_layout
    assert time.monotonic() - start < 20


def test_ranks_with_different_modes_are_told(store: dist.Store) -> None:
    assert store is not None
    open_session(Options("new"), {}, integration="test", topology=TWO[0], number=1)
    with pytest.raises(ConfigurationError, match=r"Rank 1 opens its run with .*'shared'.* but rank 0 with .*'new'"):
        open_session(
            Options("shared", limits=Limits(join_timeout=20.0)), {}, integration="test", topology=TWO[1], number=1
        )


def test_every_writer_of_a_shared_run_describes_it_as_rank_0_does(store: dist.Store, fake_wandb: FakeWandb) -> None:
    assert store is not None
    theirs = {"name": "first", "tags": ["a"], "config": {"lr": 0.1}, "mode": "offline"}
    open_session(Options("shared"), theirs, integration="test", topology=TWO[0], number=1)
    mine = {"name": "at 10:02", "mode": "offline"}
    open_session(
        Options("shared", limits=Limits(join_timeout=20.0)), mine, integration="test", topology=TWO[1], number=1
    )
    for name, value in theirs.items():
        assert fake_wandb.arguments[1][name] == value


def test_a_secondary_opens_after_its_primary_online(store: dist.Store, fake_wandb: FakeWandb) -> None:
    assert store is not None
    arguments = {"id": "exp", "mode": "online"}
    with pytest.raises(RendezvousError, match="rank 0"):
        open_session(
            Options("shared", limits=Limits(join_timeout=0.05)),
            arguments,
            integration="test",
            topology=TWO[1],
            number=1,
        )
    assert fake_wandb.arguments == []
    open_session(Options("shared"), arguments, integration="test", topology=TWO[0], number=1)
    assert open_session(
        Options("shared", limits=Limits(join_timeout=20.0)), arguments, integration="test", topology=TWO[1], number=1
    ).run


def test_a_run_that_was_there_is_not_ended(fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = fake_wandb.init(project="digits")
    monkeypatch.setattr(wandb, "run", theirs)
    fake_wandb.init = lambda **_: theirs  # type: ignore[method-assign]  # wandb hands out the run that is there
    with open_session(Options(), {}, integration="test"):
        pass
    assert theirs.exit_codes == []


def test_a_session_whose_run_the_user_finished_is_forgotten(fake_wandb: FakeWandb) -> None:
    open_session(Options(), {}, integration="test")
    fake_wandb.runs[0]._is_finished = True  # as wandb.finish() does
    assert not get_run()
    open_session(Options(), {}, integration="test")
    assert "reinit" not in fake_wandb.arguments[1]


@pytest.mark.usefixtures("fake_wandb")
@pytest.mark.parametrize("resume", ["auto", True])
def test_resuming_by_a_record_of_one_process_is_refused_for_several(resume: Any) -> None:
    refused = "takes the run id from a restart record that one process finds, but 2 ranks"
    with pytest.raises(ConfigurationError, match=refused):
        open_session(Options("new"), {"resume": resume}, integration="test", topology=TWO[0])


def test_rewinding_a_run_is_to_its_id(fake_wandb: FakeWandb) -> None:
    open_session(Options(), {"resume_from": "abc?_step=3"}, integration="test", topology=TWO[0])
    assert fake_wandb.arguments[0]["id"] == "abc"


@pytest.mark.usefixtures("store")
def test_the_sessions_of_an_integration_are_counted_and_keep_to_themselves() -> None:
    first, second = (open_session(Options("new"), {}, integration="test", topology=TWO[0]) for _ in range(2))
    first_on_1, second_on_1 = (
        open_session(
            Options("new", limits=Limits(join_timeout=20.0)), {}, integration="test", topology=TWO[1], number=number
        )
        for number in (1, 2)
    )
    assert first.plan.base_id == first_on_1.plan.base_id
    assert second.plan.base_id == second_on_1.plan.base_id
    assert first.plan.base_id != second.plan.base_id


@pytest.mark.parametrize(("topology", "reinit"), [(TWO[0], "create_new"), (Topology.single(), None)])
def test_beside_a_run_of_somebody_elses_a_rank_of_a_job_opens_its_own(
    fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, topology: Topology, reinit: str | None
) -> None:
    monkeypatch.setattr(wandb, "run", object())
    open_session(Options(), {}, integration="test", topology=topology)
    assert fake_wandb.arguments[0].get("reinit") == reinit


def test_a_rank_0_that_never_comes_is_missed_by_name(store: dist.Store) -> None:
    assert store is not None
    with pytest.raises(RendezvousError, match=r"Rank 1 waited 0\.05 s for rank 0"):
        open_session(
            Options("new", limits=Limits(join_timeout=0.05)), {}, integration="test", topology=TWO[1], number=1
        )


def test_a_rank_without_a_run_is_opened_whole_where_the_primary_could_not_open_its_own(store: dist.Store) -> None:
    told = JobStore(store, "test/1", TWO[0], 1.0)
    told.publish("run/", {"error": "no such project"})
    session = open_session(
        Options(limits=Limits(join_timeout=0.1)), {"id": "exp"}, integration="test", topology=TWO[1], number=1
    )
    assert session.url is None
    assert pickle.loads(pickle.dumps(session)).url is None  # noqa: S301  # our own
    session.finish(1)


def test_a_session_that_cannot_be_opened_whole_leaves_nothing_behind(
    store: dist.Store, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store is not None

    def announce(*_: object, **__: object) -> None:
        raise BrokenPipeError("nobody reads standard error")

    monkeypatch.setattr(Session, "announce", announce)
    with pytest.raises(BrokenPipeError):
        open_session(Options(), {}, integration="test", topology=TWO[0], number=1)
    assert not get_run()
    (run,) = fake_wandb.runs
    assert run.exit_codes == [1]
    assert all(exchange.has_ended for exchange in interface._live)


def test_the_thread_of_a_session_finds_it_complete(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It calls back into the session, whose constructor has to be through by then."""
    fill = Session.__init__

    def fill_slowly(session: Session, *arguments: Any, **named: Any) -> None:
        exchanges = len(interface._live)
        fill(session, *arguments, **named)
        assert len(interface._live) == exchanges, "no thread has begun"

    monkeypatch.setattr(Session, "__init__", fill_slowly)
    sessions = job(TWO)
    for session in sessions:
        session.log({"loss": 0.5}, step=1)
    assert all_flushed(sessions)
    assert "failed" not in caplog.text


def test_threads_may_forget_a_session_at_the_same_time(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    (session, _) = job(TWO)

    class Forgotten(list[Session]):
        """A list from which another thread takes what is to be removed, just before."""

        def remove(self, item: Session) -> None:
            self.clear()
            super().remove(item)

    monkeypatch.setattr(registry, "_sessions", Forgotten([session]))
    registry.remove(session)
    assert not registry._sessions


@pytest.mark.usefixtures("store")
def test_a_rank_without_a_run_does_without_the_id_of_one_that_is_never_opened() -> None:
    options = Options(limits=Limits(join_timeout=0.05, finish_timeout=0.5))
    session = open_session(options, {}, integration="test", topology=TWO[1], number=1)
    assert (session.id, session.url, session.group_url) == (None, None, None)
    session.log({"loss": 0.5})
    session.finish()
    assert not get_run()


def test_a_session_is_described_before_a_rank_opens_it(job: Job) -> None:
    assert next_job("test", TWO[1], 1.0) is None
    job(TWO, run_mode="shared", rank_scope="worker")
    described = next_job("test", TWO[1], 1.0)
    assert described is not None
    assert (described["options"]["run_mode"], described["options"]["rank_scope"]) == ("shared", "worker")


@pytest.mark.parametrize("message", [[], "job", {}, {"options": {}}, {"options": [], "arguments": {}}])
def test_a_description_that_no_rank_has_written_is_refused(store: dist.Store, message: Any) -> None:
    described = JobStore(store, "test/1", TWO[0], 1.0)
    job_identity.publish_base_id(described, "base")
    described.publish("job", message)
    with pytest.raises(RendezvousError, match="as job, which no rank has written"):
        next_job("test", TWO[1], 1.0)
    with pytest.raises(RendezvousError, match="as job, which no rank has written"):
        open_session(Options(run_mode="shared"), {}, integration="test", topology=TWO[1])


def test_without_a_store_auto_needs_nobody(fake_wandb: FakeWandb) -> None:
    sessions = [open_session(Options(), {}, integration="test", topology=topology) for topology in TWO]
    assert [bool(session.run) for session in sessions] == [True, False]
    assert sessions[1].id is None
    assert len(fake_wandb.runs) == 1


def test_without_a_store_a_named_job_gives_every_rank_the_id(
    fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-1")
    sessions = [open_session(Options(), {}, integration="test", topology=topology, number=1) for topology in TWO]
    assert sessions[0].id == sessions[1].id == fake_wandb.runs[0].id


@pytest.mark.parametrize(("arguments", "run_id"), [({"id": "mine"}, "mine"), ({}, "proposed")])
def test_without_a_store_auto_takes_the_users_id_or_else_the_integrations(
    fake_wandb: FakeWandb, arguments: dict[str, Any], run_id: str
) -> None:
    open_session(Options(), arguments, integration="test", topology=TWO[0], proposed_id="proposed")
    assert fake_wandb.arguments[0]["id"] == run_id


@pytest.mark.usefixtures("fake_wandb")
def test_a_session_opened_before_there_was_a_store_tells_the_others_later(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"project": "digits"}
    first = open_session(Options(), arguments, integration="test", topology=TWO[0], number=1)
    store = dist.HashStore()
    monkeypatch.setattr(
        JobStore, "find", lambda namespace, topology, timeout: JobStore(store, namespace, topology, timeout)
    )
    first.meet(arguments, "test", 1)
    described = next_job("test", TWO[1], 1.0)
    assert described is not None
    assert described["arguments"] == arguments
    second = open_session(Options(limits=Limits(join_timeout=20.0)), {}, integration="test", topology=TWO[1], number=1)
    assert second.id == first.id


def test_an_address_that_can_no_longer_be_asked_for_is_none(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    _, second = job(TWO)

    def gone(_self: JobStore, _key: str) -> None:
        raise RendezvousError("gone")

    monkeypatch.setattr(JobStore, "try_get", gone)
    assert second.url is None


@pytest.mark.usefixtures("fake_wandb")
def test_a_child_process_whose_rank_nothing_tells_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", multiprocessing.current_process)
    with pytest.warns(UserWarning, match="was started by another process, but nothing tells its rank"):
        dist_wandb.init()


@pytest.mark.usefixtures("fake_wandb")
def test_a_child_process_whose_rank_is_told_is_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", multiprocessing.current_process)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dist_wandb.init().topology.global_rank == 1


@pytest.mark.usefixtures("fake_wandb")
def test_without_a_store_modes_that_need_all_ranks_say_what_to_do() -> None:
    with pytest.raises(RendezvousError, match="Call init_process_group first"):
        open_session(Options("new"), {}, integration="test", topology=TWO[1])


@pytest.mark.usefixtures("fake_wandb")
@pytest.mark.parametrize("mode", ["shared", "new"])
def test_without_a_store_what_one_rank_proposes_is_not_taken_for_an_agreement(mode: Any) -> None:
    with pytest.raises(RendezvousError, match="has no way to agree on a run id"):
        open_session(Options(mode), {}, integration="test", topology=TWO[1], proposed_id="made-up-by-rank-1")


# --- the exchange between ranks ---------------------------------------------------------------------------------------


def all_flushed(sessions: list[Session]) -> bool:
    return sum(session.flush() for session in sessions) == len(sessions)


def test_the_numbers_of_all_ranks_become_one_row(job: Job, fake_wandb: FakeWandb) -> None:
    sessions = job(TWO, reduce={"tokens": "sum", "lr": "first"}, spread="loss")
    for rank, session in enumerate(sessions):
        loss = torch.tensor(float(rank), requires_grad=True)
        session.log(
            {"loss": loss, "tokens": np.int64(3 + rank), "lr": 0.1 * rank, "text": f"of {rank}"}, 7, [3, 1][rank]
        )
    assert all_flushed(sessions)
    (run,) = fake_wandb.runs
    spread = {"loss/min": 0.0, "loss/max": 1.0, "loss/std": pytest.approx(math.sqrt(3) / 4), "loss/argmax_rank": 1}
    assert run.rows == [{"loss": 0.25, "tokens": 7, "lr": 0.0, "text": "of 0", **spread, "global_step": 7}]


@pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7), True], ids=["numpy", "torch", "bool"])
def test_a_step_may_be_any_integer(job: Job, fake_wandb: FakeWandb, step: Any) -> None:
    sessions = job(TWO)
    for session in sessions:
        session.log({"loss": 0.5}, step=step)
    assert all_flushed(sessions)
    ((row, _),) = fake_wandb.runs[0].logged
    assert (row["global_step"], type(row["global_step"])) == (int(step), int)


def test_a_step_among_the_metrics_is_the_place_of_the_row(job: Job, fake_wandb: FakeWandb) -> None:
    first, second = sessions = job(TWO)
    first.log({"loss": 1.0, "global_step": 40})
    second.log({"loss": 2.0}, step=40)
    assert all_flushed(sessions)
    assert fake_wandb.runs[0].rows == [{"loss": 1.5, "global_step": 40}]


def test_rows_without_a_step_of_several_ranks_are_counted(job: Job, fake_wandb: FakeWandb) -> None:
    first, _ = sessions = job(TWO)
    first.log({"only here": "text"})
    for session in sessions:
        session.log({"loss": 0.5})
    assert all_flushed(sessions)
    assert fake_wandb.runs[0].rows == [
        {"only here": "text", "global_step": 0},
        {"loss": 0.5, "global_step": 1},
    ]


def test_rank_0_alone_writes_its_own_numbers_and_says_so(
    store: dist.Store, fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    assert store is not None
    options = Options(limits=Limits(join_timeout=0.1, finish_timeout=20.0))
    with open_session(options, {}, integration="test", topology=TWO[0], number=1) as session:
        session.log({"loss": 0.5, "text": "a"}, step=3)
        assert session.flush()
    (run,) = fake_wandb.runs
    assert run.rows == [{"loss": 0.5, "text": "a", "global_step": 3}]
    assert run.exit_codes == [None]
    (told,) = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert "no other rank has opened a session" in told


@pytest.mark.parametrize("by_run", [False, True])
def test_rank_0_alone_does_not_wait_for_ranks_that_nobody_asked(
    store: dist.Store, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, by_run: bool
) -> None:
    assert store is not None
    monkeypatch.setattr(presence, "_APART", 0.1)
    options = Options(limits=Limits(join_timeout=600, finish_timeout=600))
    session = open_session(options, {}, integration="test", topology=TWO[0], number=1)
    session.log({"loss": 0.5}, step=3)
    (session.run if by_run else session).finish()
    (run,) = fake_wandb.runs
    assert run.rows == [{"loss": 0.5, "global_step": 3}]


def test_a_rank_that_opens_what_is_over_is_told_why_it_logs_in_vain(
    store: dist.Store, caplog: pytest.LogCaptureFixture
) -> None:
    assert store is not None
    together = Options(limits=Limits(join_timeout=0.1, finish_timeout=600))
    apart = replace(together, reduce=None)  # without an exchange nobody waits, so to be late is nothing special
    for number, (options, told) in enumerate([(together, 1), (apart, 0)]):
        caplog.clear()
        for rank in (0, 1):
            with open_session(options, {}, integration="test", topology=TWO[rank], number=number) as session:
                session.log({"loss": 0.5})
        assert caplog.text.count("rank 1 opened its session when the other ranks had ended theirs") == told


def test_a_rank_whose_leading_rank_ended_without_any_exchange_waits_for_nobody(
    store: dist.Store, caplog: pytest.LogCaptureFixture
) -> None:
    assert store is not None
    open_session(Options(), {}, integration="test", topology=TWO[0], number=1).finish(1)
    eventually(lambda: all(exchange.has_ended for exchange in interface._live))
    options = Options(limits=Limits(join_timeout=600, peer_timeout=600, finish_timeout=600))
    with open_session(options, {}, integration="test", topology=TWO[1], number=1) as session:
        session.log({"loss": 0.5})
    assert caplog.text.count("rank 1 opened its session when the other ranks had ended theirs") == 1


def test_finish_ends_within_its_limit(store: dist.Store, fake_wandb: FakeWandb) -> None:
    assert store is not None
    options = Options(limits=Limits(join_timeout=60.0, finish_timeout=0.2))
    session = open_session(options, {}, integration="test", topology=TWO[0], number=1)
    session.log({"loss": 0.5}, step=3)
    start = time.monotonic()
    assert session.flush(0.1) is False
    session.finish()
    assert time.monotonic() - start < 20
    assert fake_wandb.runs[0].rows == [{"loss": 0.5, DEGRADED: 1, "global_step": 3}]


def test_a_run_that_failed_is_finished_without_waiting_for_others(store: dist.Store, fake_wandb: FakeWandb) -> None:
    assert store is not None
    session = open_session(Options(), {}, integration="test", topology=TWO[0], number=1)
    session.log({"loss": 0.5}, step=3)
    start = time.monotonic()
    session.finish(1)
    assert time.monotonic() - start < 20
    assert fake_wandb.runs[0].rows == [{"loss": 0.5, DEGRADED: 1, "global_step": 3}]
    assert fake_wandb.runs[0].exit_codes == [1]


def test_all_ranks_finish_together(job: Job, fake_wandb: FakeWandb, on_ranks: OnRanks) -> None:
    sessions = job(TWO)
    sessions[0].log({"loss": 1.0}, 0)
    sessions[1].log({"loss": 2.0}, 0)
    on_ranks(2, lambda rank: sessions[rank].finish())
    assert fake_wandb.runs[0].rows == [{"loss": 1.5, "global_step": 0}]
    assert [bool(run.exit_codes) for run in fake_wandb.runs] == [True]
    assert not get_run()


@pytest.mark.parametrize("reduce", ["mean", "sum", {"loss": "max"}])
def test_own_runs_bring_numbers_together_where_it_is_asked_for(job: Job, fake_wandb: FakeWandb, reduce: Any) -> None:
    sessions = job(TWO, run_mode="new", reduce=reduce)
    for rank, session in enumerate(sessions):
        assert session.brings_together
        session.log({"loss": float(rank)}, step=0)
    assert all_flushed(sessions)
    expected = {"mean": 0.5, "sum": 1.0}.get(reduce, 1.0) if isinstance(reduce, str) else 1.0
    by_id = {run.id: run.rows for run in fake_wandb.runs}
    assert by_id[f"{sessions[0].plan.base_id}-rank-0"] == [{"loss": expected, "global_step": 0}]


@pytest.mark.parametrize("options", [{"run_mode": "new"}, {"reduce": None}, {"run_mode": "shared", "reduce": None}])
def test_otherwise_every_rank_writes_its_own(job: Job, fake_wandb: FakeWandb, options: dict[str, Any]) -> None:
    sessions = job(TWO, **options)
    for rank, session in enumerate(sessions):
        assert not session.brings_together
        session.log({"loss": float(rank)}, step=0)
    assert all_flushed(sessions)
    rows = [row for run in fake_wandb.runs for row in run.rows]
    assert all(row.get("loss") in (None, 0.0, 1.0) for row in rows)
    assert len(rows) == len(fake_wandb.runs)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (([("loss", 0.5)],), "log was given list on rank 1, but it takes a mapping"),
        ((None,), "log was given NoneType on rank 1"),
        (({"loss": 0.5, 7: 1},), "log was given the name 7 (int) on rank 1, but names are text, without NUL"),
        (({"loss": 0.5}, 1.5), "step=1.5 on rank 1 is not an integer"),
        (({"loss": 0.5}, "3"), "step='3' on rank 1 is not an integer"),
        (({"loss": 0.5}, 1_763_737_200_123_456_789), "step=1763737200123456789 on rank 1 is beyond 2**53"),
        (({"a": {"b\0c": 1}},), "log was given the name 'a.b\\x00c' (str) on rank 1"),
        (({"loss": 0.5}, 0, -1), "weight=-1 on rank 1 is negative or not finite"),
        (({"loss": 0.5}, 0, math.nan), "weight=nan on rank 1 is negative or not finite"),
        (({"loss": 0.5}, 0, math.inf), "weight=inf on rank 1 is negative or not finite"),
        (({"loss": 0.5}, 0, [1, 2]), "weight was given [1, 2] on rank 1, but it takes one number"),
        (({"loss": 0.5}, 0, torch.zeros(2)), "weight was given a tensor of shape (2,) and torch.float32 on rank 1"),
        (({"loss": 0.5}, 0, {"loss": "3"}), "weight['loss'] was given '3' on rank 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_logged_is_refused_and_nothing_of_it_is_put(
    job: Job, fake_wandb: FakeWandb, told: tuple[Any, ...], message: str
) -> None:
    sessions = job(TWO)
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        sessions[1].log(*told)
    for session in sessions:
        session.log({"loss": 2.0}, step=5)
    assert all_flushed(sessions)
    assert fake_wandb.runs[0].rows == [{"loss": 2.0, "global_step": 5}]


@pytest.mark.usefixtures("fake_wandb")
@pytest.mark.parametrize("mode", ["auto", "shared", "new"])
def test_vectors_are_the_primarys_own_as_they_were_when_they_were_logged(job: Job, mode: Any) -> None:
    sessions = job(TWO, run_mode=mode, reduce="mean", per_rank=["logits"])
    for rank, session in enumerate(sessions):
        logits, counts = torch.tensor([rank, 2.0]), [np.full(2, rank)]
        session.log({"loss": float(rank), "logits": logits, "counts": counts, "z": 1j + rank}, step=0)
        logits += 7
        counts[0] += 7
    assert all_flushed(sessions)
    rows: list[dict[str, Any]] = [{}, {}]
    for rank, session in enumerate(sessions):
        for row in getattr(session.run, "rows", ()):
            rows[rank] |= row
    assert (rows[0]["loss"], rows[0]["logits"].tolist(), rows[0]["z"]) == (0.5, [0, 2], 1j)
    assert rows[0]["counts"][0].tolist() == [0, 0]
    own = {"loss", "logits", "counts", "z"}
    others = {"auto": set[str](), "shared": {"rank-1/logits"}, "new": own}[mode]
    assert rows[1].keys() - {"global_step"} == others
    if mode == "shared":
        assert rows[1]["rank-1/logits"].tolist() == [1, 2]


@pytest.mark.parametrize("options", [{}, {"reduce": None}], ids=["together", "alone"])
@pytest.mark.parametrize("weight", [-1, math.nan, [1], "3"])
def test_a_bad_weight_is_refused_whether_it_is_used_or_not(job: Job, options: dict[str, Any], weight: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"weight.* on rank 0"):
        job(TWO, **options)[0].log({"loss": 0.5}, weight=weight)


def test_a_row_that_was_refused_is_not_counted(job: Job, fake_wandb: FakeWandb) -> None:
    sessions = job(TWO)
    for session in sessions:
        with pytest.raises(ConfigurationError):
            session.log({"loss": 7.0}, weight=-1)
        session.log({"loss": 0.5})
    assert all_flushed(sessions)
    assert fake_wandb.runs[0].rows == [{"loss": 0.5, "global_step": 0}]


def test_log_after_finish_says_so(job: Job, on_ranks: OnRanks) -> None:
    sessions = job(TWO)
    on_ranks(2, lambda rank: sessions[rank].finish())
    for rank, session in enumerate(sessions):
        with pytest.raises(ConfigurationError, match=f"log was called on rank {rank} after the session was finished"):
            session.log({"loss": 0.5})
        assert session.flush()


# --- patterns ---------------------------------------------------------------------------------------------------------

MISSPELT = {"los": "sum", "loss": "mean", "*": "max"}


def test_a_pattern_that_decided_about_nothing_is_told_of_once_at_the_end(job: Job, on_ranks: OnRanks) -> None:
    sessions = job(TWO, reduce={**MISSPELT, "tokenz": "sum"})
    for session in sessions:
        session.log({"loss": 0.5}, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_ranks(2, lambda rank: sessions[rank].finish())
        sessions[0].finish()
    (warning,) = [warning for warning in caught if "patterns" in str(warning.message)]
    assert "reduce has patterns that decided about no name that was logged: 'los', 'tokenz'. " in str(warning.message)


def test_warnings_that_are_errors_do_not_keep_a_run_from_ending(
    job: Job, on_ranks: OnRanks, fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    sessions = job(TWO, reduce=MISSPELT)
    for session in sessions:
        session.log({"loss": 0.5}, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_ranks(2, lambda rank: sessions[rank].finish())
    assert fake_wandb.runs[0].exit_codes == [None]
    assert caplog.text.count("reduce has patterns that decided about no name that was logged: 'los'.") == 1


@pytest.mark.parametrize(
    ("reduce", "logs"),
    [(MISSPELT, False), ({"loss": "sum"}, True), ({"loss": "sum", "*": "mean"}, True), ("mean", True), ("sum", False)],
    ids=["nothing was logged", "all matched", "all but the star", "one for all", "one, and nothing was logged"],
)
def test_otherwise_nothing_is_told_of_patterns(job: Job, on_ranks: OnRanks, reduce: Any, logs: bool) -> None:
    sessions = job(TWO, reduce=reduce)
    for session in sessions if logs else ():
        session.log({"loss": 0.5}, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_ranks(2, lambda rank: sessions[rank].finish())
    assert not [warning for warning in caught if "patterns" in str(warning.message)]


def test_a_pattern_for_what_only_another_rank_logs_is_not_told_of(job: Job, on_ranks: OnRanks) -> None:
    sessions = job(TWO, reduce={"tokens": "sum"})
    sessions[0].log({"loss": 0.5}, 0)
    sessions[1].log({"loss": 0.5, "tokens": 3}, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_ranks(2, lambda rank: sessions[rank].finish())
    assert not [warning for warning in caught if "patterns" in str(warning.message)]
