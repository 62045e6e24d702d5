"""Sessions of one rank over a stand-in for wandb: arguments, the announcement, rows, and the run behind it."""

from __future__ import annotations

import contextlib
import inspect
import re
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from docstrings import documented_options
from fakes import TWO, FakeWandb, Job, on_ranks
from new_process import begin_new_process

import dist_wandb
from dist_wandb import DistWandbLogger, DistWandbTracker
from dist_wandb.errors import ConfigurationError, TopologyError
from dist_wandb.job.topology import Topology
from dist_wandb.session.api import get_run
from dist_wandb.session.notices import announcement
from dist_wandb.session.opener import open_session
from dist_wandb.session.registry import holds
from dist_wandb.session.session import Session
from dist_wandb.settings.options import CONFIG_SYNCS, OPTION_NAMES, SYSTEM_METRICS, Limits, Options
from dist_wandb.settings.plan import RANK_SCOPES, RUN_MODES, plan_run

ALL_MODES = [(mode, scope) for mode in ("auto", "shared", "new") for scope in ("global", "worker")]


def test_torch_compile_does_not_warn_of_code_that_logs(fake_wandb: FakeWandb, recwarn: pytest.WarningsRecorder) -> None:
    session = dist_wandb.init()

    def step(x: torch.Tensor) -> torch.Tensor:
        session.log({"loss": 1.0})
        return 2 * x

    compiled = torch.compile(step, backend="eager")  # in Lightning 2.2, it is no decorator
    assert compiled(torch.ones(1)).item() == 2.0
    assert session.flush()
    assert fake_wandb.runs[0].logged[-1][0]["loss"] == 1.0
    assert [str(each.message) for each in recwarn if "Dynamo" in str(each.message)] == []


@pytest.mark.usefixtures("fake_wandb")
def test_the_step_of_a_row_counts_rather_than_a_value_of_the_axis_in_it() -> None:
    session = dist_wandb.init()
    session.log({"loss": 1.0, "global_step": 5}, step=7)
    assert session.step == 7


@pytest.mark.parametrize("rows", [[{"d": {"x": 1}}, {"d.x": 2}, {"d.x": 3}], [{"d.x": 1, "d": {"x": 3}}]])
def test_a_name_that_is_logged_nested_too_is_one_metric_and_reported_once(
    fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture, rows: list[dict[str, Any]]
) -> None:
    session = dist_wandb.init()
    for row in rows:
        session.log(row)
    assert session.flush()
    assert fake_wandb.runs[0].logged[-1][0]["d"] == {"x": 3}
    assert caplog.text.count("rank 0 logged 'd.x' both as this name and nested") == 1


@pytest.mark.parametrize(("mode", "scope"), ALL_MODES)
def test_wandb_gets_exactly_the_users_arguments_in_a_world_of_one(fake_wandb: FakeWandb, mode: Any, scope: Any) -> None:
    config = {"lr": 0.1}
    session = dist_wandb.init("digits", run_mode=mode, rank_scope=scope, name="base", config=config, tags=("a",))
    assert fake_wandb.arguments == [{"project": "digits", "name": "base", "config": config, "tags": ("a",)}]
    assert holds(fake_wandb.runs[0])
    assert session.id == fake_wandb.runs[0].id
    session.finish()
    assert not holds(fake_wandb.runs[0])


def test_a_session_exposes_plan_topology_id_and_urls(fake_wandb: FakeWandb) -> None:
    session = dist_wandb.init("digits", id="exp", group="night")
    assert session.plan.opens_run
    assert session.topology.world_size == 1
    assert (session.id, session.url) == ("exp", "https://wandb.example/team/digits/runs/exp")
    assert session.group_url == "https://wandb.example/team/digits/groups/night"
    assert session.config is fake_wandb.runs[0].config
    assert repr(session) == "<dist_wandb.Session run_mode='auto' rank 0 of 1 run='exp'>"


@pytest.mark.usefixtures("fake_wandb")
def test_the_start_is_announced_in_one_line_unless_wandb_is_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    with contextlib.redirect_stderr(SimpleNamespace(write=written.append, flush=lambda: None)):
        dist_wandb.init("digits", id="exp").finish()
    place = "https://wandb.example/team/digits/runs/exp"
    line = f"dist_wandb: run_mode=auto, rank_scope=global, 1 rank on 1 node: one run: exp ({place})\n"
    assert list(filter(None, written)) == [line]  # in one piece: other ranks write at the same time
    assert capsys.readouterr() == ("", "")
    session: Any = dist_wandb.init("digits")
    session.announce()
    assert capsys.readouterr().err.count("made-by-wandb") == 2 * 2  # id and address
    session.run.settings = SimpleNamespace(silent=True)
    session.announce()
    session.finish()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("WANDB_SILENT", "true")
    dist_wandb.init("digits")
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("fake_wandb")
def test_logging_without_a_session_warns_once_unless_another_rank_may_have_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    get_run().log({"loss": 1.0})
    assert caplog.messages == []
    monkeypatch.delenv("RANK")  # the rank is unknown
    for _ in range(3):
        get_run().log({"loss": 1.0}, step=1)
    (message,) = caplog.messages
    assert "no session was opened in this process, so nothing is logged. Call dist_wandb.init()" in message
    begin_new_process(monkeypatch)
    caplog.clear()
    monkeypatch.delenv("WORLD_SIZE")
    dist_wandb.init().finish()
    get_run().log({"loss": 1.0})
    assert caplog.messages == [], "there was a session"


@pytest.mark.parametrize("axis", ["trainer/global_step", None])
def test_another_x_axis_is_written_only_with_a_given_step(fake_wandb: FakeWandb, axis: str | None) -> None:
    session = open_session(Options(), {}, integration="test", step_metric=axis)
    session.log({"loss": 0.5})
    session.log({"loss": 0.4}, step=3)
    assert session.flush()
    assert fake_wandb.runs[0].defined[:1] == ([(axis, {})] if axis else [])
    assert fake_wandb.runs[0].rows == [{"loss": 0.5}, {"loss": 0.4, **({axis: 3} if axis else {})}]


def test_dir_of_a_session_lists_public_names_and_those_of_its_run(fake_wandb: FakeWandb, job: Job) -> None:
    sessions = job(TWO)
    for session in sessions:
        names = set(dir(session))
        assert {"log", "flush", "finish", "timed", "url", "plan", "topology", "config", "summary"} <= names
        assert not {"after_fork", "relay", "shutdown", "unchanged_config", "release", "connect_late"} & names
        assert not [name for name in names if name.startswith("_")]
    assert {name for name in dir(fake_wandb.runs[0]) if not name.startswith("_")} <= set(dir(sessions[0]))
    assert "watch" in dir(sessions[1])
    on_ranks(2, lambda rank: sessions[rank].finish())


def test_a_notebook_links_to_the_run_on_all_ranks(job: Job) -> None:
    sessions = job(TWO)
    page = f"https://wandb.example/team/digits/runs/{sessions[0].id}"
    for session in sessions:
        assert f'View run at: <a href="{page}" target="_blank">{page}</a>' in session._repr_html_()
        assert "&lt;dist_wandb.Session run_mode=" in session._repr_html_()
    on_ranks(2, lambda rank: sessions[rank].finish())
    assert "<a" not in dist_wandb.init(mode="offline")._repr_html_()


def test_logging_a_gathered_table_twice_is_an_error(fake_wandb: FakeWandb) -> None:
    table = dist_wandb.gathered([[1]], ["a"])
    with dist_wandb.init() as session:
        session.log({"table": table})
        with pytest.raises(ConfigurationError, match="was logged a second time on rank 0"):
            session.log({"table": table})
    assert len(fake_wandb.runs[0].rows) == 1


@pytest.mark.usefixtures("fake_wandb")
@pytest.mark.parametrize("name", ["lgo", "finnish", "_private", "__array__"])
def test_a_misspelt_method_of_a_real_run_raises(name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        getattr(dist_wandb.init(), name)


def test_an_uninitialised_session_raises_instead_of_recursing() -> None:
    with pytest.raises(AttributeError, match="'Session' object has no attribute 'summary'"):
        _ = Session.__new__(Session).summary


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"run_mode": "share"}, "run_mode='share' is unknown. Allowed: 'auto', 'shared', 'new'. Did you mean 'shared'"),
        ({"rank_scope": "node"}, "rank_scope='node' is unknown. Allowed: 'global', 'worker'."),
        ({"reduce": {"loss": "avg"}}, "reduce['loss']='avg' is not a reduction."),
        ({"spread": 7}, "spread=7 is neither a bool nor name patterns."),
        ({"strict": "yes"}, "strict='yes' is neither True nor False. Pass one of them"),
        ({"limits": {"heartbeat": "x"}}, "heartbeat must be a positive number of seconds, got 'x'."),
        ({"limits": {"hartbeat": 1.0}}, "limits has an unknown name 'hartbeat'. Allowed: 'join_timeout'"),
        ({"limits": 60}, "limits must be dist_wandb.Limits(...) or a mapping of its arguments, got 60."),
        ({"primary_rank": 1.0}, "primary_rank=1.0 is not a rank"),
        ({"primary_rank": True}, "primary_rank=True is not a rank"),
        ({"stall_timeout": "never"}, "'never' is neither a positive number of seconds nor 'auto' nor None"),
        ({"stall_timeout": 0}, "stall_timeout=0 is neither a positive number"),
        ({"stall_timeout": True}, "stall_timeout=True is neither a positive number"),
        ({"on_stall": 7}, "on_stall=7 cannot be called. Pass a function of one argument"),
        ({"primary_rank": 1, "rank_scope": "worker"}, 'cannot be combined with rank_scope="worker"'),
        ({"primary_rank": 1, "system_metrics": "all-nodes"}, 'cannot be combined with system_metrics="all-nodes"'),
        ({"unit": 3}, "unit=3 does not name ranks"),
        ({"unit": [0, 1.5]}, "names 1.5, which is not a rank"),
        ({"unit": [-1]}, "names -1, which is not a rank"),
    ],
)
def test_invalid_options_are_refused(fake_wandb: FakeWandb, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        Options(**arguments)
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        dist_wandb.init(**arguments)
    assert fake_wandb.arguments == []


def test_every_integration_has_the_same_default_options() -> None:
    options = Options()
    assert options == Options("auto", "global", "auto", False, "auto", Limits(), "warn", "primary", False)
    assert Limits() == Limits(60.0, 60.0, None, 10_000, 1.0)
    for integration in (dist_wandb.init, DistWandbLogger, DistWandbTracker):
        parameters = inspect.signature(integration).parameters
        defaults = {field.name: parameters[field.name].default for field in fields(options)}
        asked_elsewhere = {"run_mode": None, "rank_scope": None}
        assert defaults == {**vars(options), **asked_elsewhere}, integration


def test_options_are_documented_alike_by_logger_and_tracker_and_in_full_by_init() -> None:
    """Signatures are repeated by hand, because editors and LightningCLI's help read them from the source."""
    full = documented_options(dist_wandb.init)
    logger, tracker = documented_options(DistWandbLogger), documented_options(DistWandbTracker)
    assert tuple(full) == tuple(logger) == OPTION_NAMES
    assert logger == tracker
    modes: dict[str, tuple[str, ...]] = {"run_mode": RUN_MODES, "rank_scope": RANK_SCOPES}
    for name, values in {**modes, "config_sync": CONFIG_SYNCS, "system_metrics": SYSTEM_METRICS}.items():
        for value in values:
            assert f'`"{value}"`' in full[name]
            assert f'`"{value}"`' in logger[name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"projct": "x"}, "dist_wandb.init got the argument 'projct', which wandb.init does not know."),
        ({"runmode": "new"}, "Did you mean 'run_mode'?"),
        ({"id": "a/b"}, "id='a/b' given to dist_wandb.init has '/', which W&B refuses"),
        ({"settings": {"run_id": "a%b"}}, "id='a%b' has '%', which W&B refuses"),
        ({"mode": "shared"}, "Pass run_mode='shared'"),
        ({}, "WANDB_RUN_ID='a/b' has '/'"),
    ],
)
def test_arguments_that_wandb_would_refuse_are_refused_early(
    fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "" if arguments else "a/b")
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        dist_wandb.init(**arguments)
    assert fake_wandb.arguments == []
    assert not get_run()


def test_an_inconsistent_environment_is_refused(fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TopologyError, match=r"global_rank=2 \(RANK .* must be less than world_size=2 \(RANK|WORLD"):
        dist_wandb.init()
    assert fake_wandb.arguments == []


# --- the announcement -------------------------------------------------------------------------------------------------


SINGLE = Topology.single()
ONE_NODE = Topology(0, 0, 0, 2, 2, 1)
FIRST_NODE = Topology(0, 0, 0, 4, 2, 2)
SECOND_NODE = Topology(2, 0, 1, 4, 2, 2)
NODES_UNKNOWN = Topology(0, None, None, 4, None, None)

EACH = "a run for each rank in the group exp; that of rank 0 is exp-rank-0 (x)"
OF_NODE = "a run for each rank of node 1 in the group exp-worker-1; that of rank 2 is exp-worker-1-rank-0 (x)"
EXPECTED: list[tuple[Topology, str, str, str]] = [
    (SINGLE, "shared", "worker", "1 rank on 1 node: one run: exp (x)"),
    (ONE_NODE, "auto", "worker", "2 ranks on 1 node: one run for all ranks: exp (x)"),
    (SECOND_NODE, "auto", "worker", "4 ranks on 2 nodes: one run for the ranks of node 1: exp-worker-1 (x)"),
    (FIRST_NODE, "shared", "global", "4 ranks on 2 nodes: one run, written by all ranks: exp (x)"),
    (SECOND_NODE, "shared", "worker", "4 ranks on 2 nodes: one run, written by the ranks of node 1: exp-worker-1 (x)"),
    (FIRST_NODE, "new", "global", f"4 ranks on 2 nodes: {EACH}"),
    (SECOND_NODE, "new", "worker", f"4 ranks on 2 nodes: {OF_NODE}"),
    (NODES_UNKNOWN, "new", "global", f"4 ranks: {EACH}"),
]
WITH_URL = [  # of the user's group
    ("auto", None, "one run in the group night for all ranks: exp (x)"),
    ("auto", "https://w", "one run in the group night (https://w) for all ranks: exp (x)"),
    ("shared", "https://w", "one run in the group night (https://w), written by all ranks: exp (x)"),
    ("new", "https://w", "a run for each rank in the group night (https://w); that of rank 0 is exp-rank-0 (x)"),
]


def test_the_announcement_has_mode_scope_ranks_place_and_group_but_no_unknown_id() -> None:
    for topology, mode, scope, expected in EXPECTED:
        line = announcement(topology, plan_run(topology, mode, scope, "exp"), "x", None)
        assert line == f"dist_wandb: run_mode={mode}, rank_scope={scope}, {expected}"
    for mode, url, expected in WITH_URL:
        line = announcement(ONE_NODE, plan_run(ONE_NODE, mode, "global", "exp", group="night"), "x", url)
        assert line.endswith(f"2 ranks on 1 node: {expected}")
    line = announcement(SINGLE, plan_run(SINGLE, "auto", "global", None), "https://w", None)
    assert line.endswith("one run: (https://w)")
