"""Opening a run again while one is open: in a loop, in a notebook cell, or on purpose."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import dist_wandb
from dist_wandb.session import api, opener, registry
from dist_wandb.session.call_site import CallSite, is_notebook
from dist_wandb.settings.options import Options
from dist_wandb.topology.model import Topology

if TYPE_CHECKING:
    from tests.conftest import FakeWandb, Job, OnRanks

MESSAGE = "was not finished, and is finished now"


def ended(fake: FakeWandb) -> list[list[int | None]]:
    return [list(run.exit_codes) for run in fake.runs]


def open_one(**arguments: Any) -> dist_wandb.Session:
    return dist_wandb.init(**arguments)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "is_notebook", lambda: True)


def test_a_loop_finishes_each_run_before_opening_the_next(
    fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    for fold in range(3):
        run = dist_wandb.init(name=f"fold-{fold}")
        run.log({"loss": fold})
    assert [run.rows for run in fake_wandb.runs] == [[{"loss": fold, "global_step": 0}] for fold in range(3)]
    assert ended(fake_wandb) == [[None], [None], []]
    assert registry._sessions == [run]
    assert caplog.text.count(MESSAGE) == 2
    assert f"{__file__}:" in caplog.text
    assert "pass reinit='create_new'" in caplog.text


def test_a_run_finished_in_time_is_not_reported(fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        dist_wandb.init().finish()
    assert ended(fake_wandb) == [[None], [None]]
    assert MESSAGE not in caplog.text


def test_a_function_called_at_two_call_sites_opens_two_runs(fake_wandb: FakeWandb) -> None:
    train, val = open_one(), open_one()
    assert ended(fake_wandb) == [[], []]
    val.finish()
    train.finish()


def test_a_recursive_call_opens_two_runs(fake_wandb: FakeWandb) -> None:
    def nest(depth: int) -> None:
        run = dist_wandb.init()
        if depth:
            nest(depth - 1)
        run.finish()

    nest(1)
    assert ended(fake_wandb) == [[None], [None]]


@pytest.mark.parametrize("reinit", ["create_new", "return_previous", "finish_previous", True])
def test_an_explicit_reinit_leaves_earlier_runs_to_wandb(fake_wandb: FakeWandb, reinit: Any) -> None:
    """wandb would finish them; this stand-in does nothing."""
    for _ in range(2):
        dist_wandb.init(reinit=reinit)
    assert ended(fake_wandb) == [[], []]


def test_reinit_in_settings_and_the_environment_has_the_same_effect(
    fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        dist_wandb.init(settings={"reinit": "create_new"})
    monkeypatch.setenv("WANDB_REINIT", "create_new")
    for _ in range(2):
        dist_wandb.init()
    assert ended(fake_wandb) == [[]] * 4


@pytest.mark.usefixtures("notebook")
def test_rerunning_a_changed_cell_finishes_the_run(fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture) -> None:
    dist_wandb.init()
    dist_wandb.init()
    assert ended(fake_wandb) == [[None], []]
    assert MESSAGE not in caplog.text


@pytest.mark.usefixtures("notebook")
def test_nested_runs_stay_open_in_a_notebook(fake_wandb: FakeWandb) -> None:
    @dist_wandb.wandb_init
    def decorated() -> list[list[int | None]]:
        with dist_wandb.init(), dist_wandb.init():
            return ended(fake_wandb)

    plain = dist_wandb.init()
    assert decorated() == [[]] * 4
    assert ended(fake_wandb) == [[], [None], [None], [None]]
    plain.finish()


def test_threads_may_have_open_runs_side_by_side(fake_wandb: FakeWandb) -> None:
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        runs = [pool.submit(open_one).result() for pool in (first, second)]
    assert ended(fake_wandb) == [[], []]
    for run in runs:
        run.finish()


def test_tasks_may_have_open_runs_side_by_side(fake_wandb: FakeWandb) -> None:
    async def work() -> int:
        run = dist_wandb.init()
        await asyncio.sleep(0)
        is_open = registry._sessions.count(run)
        run.finish()
        return is_open

    async def both() -> list[int]:
        return list(await asyncio.gather(work(), work()))

    assert asyncio.run(both()) == [1, 1]
    assert ended(fake_wandb) == [[None], [None]]


def test_sessions_of_other_integrations_are_not_finished(fake_wandb: FakeWandb) -> None:
    for _ in range(2):
        opener.open_session(Options(), {}, integration="test", topology=Topology.single())
    assert ended(fake_wandb) == [[], []]


def test_ranks_finish_the_earlier_session_together(fake_wandb: FakeWandb, job: Job, on_ranks: OnRanks) -> None:
    sessions = job([Topology(rank, rank, 0, 2, 2, 1) for rank in range(2)])

    def again(rank: int) -> bool:
        here = CallSite.current()
        sessions[rank].opened_at = here
        sessions[rank].log({"loss": rank})
        mine = sessions[rank].may_end_before(here, in_notebook=False)
        sessions[rank].finish()
        return mine

    assert on_ranks(2, again) == [True, True]
    assert fake_wandb.runs[0].rows == [{"loss": 0.5, "global_step": 0}]


@pytest.mark.parametrize(("shell", "expected"), [(object(), True), (None, False)])
def test_notebooks_are_detected_by_the_ipython_shell(
    monkeypatch: pytest.MonkeyPatch, shell: object, *, expected: bool
) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not is_notebook()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert is_notebook() is expected


def test_a_call_site_is_the_line_outside_of_the_package() -> None:
    def called() -> Iterator[CallSite]:
        for _ in range(2):
            yield CallSite.current()

    first, second = (site for site in called())
    assert first == second != CallSite.current()
    assert first.line.startswith(f"{__file__}:")
