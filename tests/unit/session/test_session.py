"""Sessions of one rank over a stand-in for wandb: arguments, the current session, rows, and the run behind it."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from docstrings import documented_options

import dist_wandb
from dist_wandb import DistWandbLogger, DistWandbTracker
from dist_wandb.errors import ConfigurationError, TopologyError
from dist_wandb.job.model import Topology
from dist_wandb.notices import Notices
from dist_wandb.runs.null_run import NullRun
from dist_wandb.session import api, registry
from dist_wandb.session.api import get_run
from dist_wandb.session.opener import open_session
from dist_wandb.session.registry import holds
from dist_wandb.session.session import Session
from dist_wandb.settings.options import CONFIG_SYNCS, OPTION_NAMES, SYSTEM_METRICS, Limits, Options
from dist_wandb.settings.plan import RANK_SCOPES, RUN_MODES

if TYPE_CHECKING:
    from tests.conftest import FakeWandb, Job, OnRanks

ALL_MODES = [(mode, scope) for mode in ("auto", "shared", "new") for scope in ("global", "worker")]
TWO = [Topology(rank, rank, 0, 2, 2, 1) for rank in range(2)]


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


def test_an_exception_in_a_with_block_is_in_the_log_of_its_run(
    fake_wandb: FakeWandb, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="too large"), dist_wandb.init():
        raise ValueError("too large")
    assert capsys.readouterr().err.count("ValueError: too large") == 1
    assert fake_wandb.runs[0].exit_codes == [1]


# --- a world of one ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "scope"), ALL_MODES)
def test_wandb_gets_exactly_the_users_arguments_in_a_world_of_one(fake_wandb: FakeWandb, mode: Any, scope: Any) -> None:
    config = {"lr": 0.1}
    session = dist_wandb.init("digits", run_mode=mode, rank_scope=scope, name="base", config=config, tags=("a",))
    assert fake_wandb.arguments == [{"project": "digits", "name": "base", "config": config, "tags": ("a",)}]
    assert holds(fake_wandb.runs[0])
    assert session.id == fake_wandb.runs[0].id


def test_a_world_of_one_defines_the_x_axis(fake_wandb: FakeWandb) -> None:
    dist_wandb.init()
    assert fake_wandb.runs[0].defined == [
        ("global_step", {}),
        ("*", {"step_metric": "global_step", "step_sync": False}),
    ]


def test_a_session_exposes_plan_topology_id_and_urls(fake_wandb: FakeWandb) -> None:
    session = dist_wandb.init("digits", id="exp", group="night")
    assert session.plan.opens_run
    assert session.topology.world_size == 1
    assert (session.id, session.url) == ("exp", "https://wandb.example/team/digits/runs/exp")
    assert session.group_url == "https://wandb.example/team/digits/groups/night"
    assert session.config is fake_wandb.runs[0].config
    assert repr(session) == "<dist_wandb.Session run_mode='auto' rank 0 of 1 run='exp'>"


def test_a_session_is_shown_with_the_id_generated_by_wandb_and_names_for_users_only(fake_wandb: FakeWandb) -> None:
    session = dist_wandb.init("digits")
    assert repr(session) == f"<dist_wandb.Session run_mode='auto' rank 0 of 1 run={fake_wandb.runs[0].id!r}>"
    assert {"log", "timed", "finish"} <= set(dir(session))
    assert not {"meet", "release", "is_returned", "expect_config"} & set(dir(session))


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
def test_an_id_generated_by_wandb_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    dist_wandb.init("digits")
    assert "one run: made-by-wandb-0 (https://" in capsys.readouterr().err


@pytest.mark.usefixtures("fake_wandb")
def test_wandb_silent_suppresses_the_announcement(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    dist_wandb.init("digits")
    assert capsys.readouterr() == ("", "")


# --- the current session ----------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001  # goes first
    """Pretend that no session was opened in this process."""
    monkeypatch.setattr(registry.history, "has_begun", False)
    monkeypatch.setattr(api, "_notices", Notices())


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.mark.usefixtures("fresh")
def test_logging_without_a_session_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        get_run().log({"loss": 1.0}, step=1)
    (message,) = warnings_of(caplog)
    assert "no session was opened in this process, so nothing is logged. Call dist_wandb.init()" in message


@pytest.mark.usefixtures("fresh")
def test_logging_after_a_session_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    dist_wandb.init().finish()
    get_run().log({"loss": 1.0})
    assert warnings_of(caplog) == []


@pytest.mark.usefixtures("fresh")
def test_logging_without_a_session_does_not_warn_on_other_ranks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    get_run().log({"loss": 1.0})
    assert warnings_of(caplog) == []
    monkeypatch.delenv("RANK")  # the rank is unknown
    get_run().log({"loss": 1.0})
    assert len(warnings_of(caplog)) == 1


@pytest.mark.usefixtures("fake_wandb")
def test_get_run_returns_the_last_opened_unfinished_session() -> None:
    assert isinstance(get_run(), NullRun)
    outer = dist_wandb.init()
    inner = dist_wandb.init(reinit="create_new")
    assert get_run() is inner
    inner.finish()
    assert get_run() is outer
    outer.finish()
    assert not get_run()


@pytest.mark.usefixtures("fake_wandb")
def test_sessions_may_end_in_any_order() -> None:
    outer, inner = dist_wandb.init(), dist_wandb.init(reinit="create_new")
    outer.finish()
    assert get_run() is inner


def test_a_second_session_of_a_process_has_its_own_run(fake_wandb: FakeWandb) -> None:
    first = dist_wandb.init()
    second = open_session(Options(), {}, integration="test")
    assert [arguments.get("reinit") for arguments in fake_wandb.arguments] == [None, "create_new"]
    assert first.run is not second.run


def test_reinit_is_not_passed_after_the_first_session_is_finished(fake_wandb: FakeWandb) -> None:
    dist_wandb.init().finish()
    dist_wandb.init()
    assert fake_wandb.arguments == [{}, {}]


def test_a_session_keeps_its_run_until_it_is_finished(fake_wandb: FakeWandb) -> None:
    session = dist_wandb.init()
    assert holds(fake_wandb.runs[0])
    session.finish()
    assert not holds(fake_wandb.runs[0])


def test_an_adopted_run_is_written_but_neither_opened_nor_finished(fake_wandb: FakeWandb) -> None:
    theirs: Any = fake_wandb.init(id="theirs")
    session = open_session(Options(), {}, integration="test", adopt=lambda _: theirs)
    session.log({"loss": 0.5})
    session.finish()
    assert len(fake_wandb.runs) == 1
    (run,) = fake_wandb.runs
    assert (run.rows, run.defined, run.exit_codes) == ([{"loss": 0.5, "global_step": 0}], [], [])


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


def test_a_given_step_is_used(fake_wandb: FakeWandb) -> None:
    session = dist_wandb.init()
    session.log({"loss": 0.5}, step=7)
    assert session.flush()
    assert fake_wandb.runs[0].logged == [({"loss": 0.5, "global_step": 7}, {})]


def test_a_global_step_among_the_metrics_is_used(fake_wandb: FakeWandb) -> None:
    dist_wandb.init().log({"loss": 0.5, "global_step": 40})
    assert fake_wandb.runs[0].rows == [{"loss": 0.5, "global_step": 40}]


def test_calls_of_one_row_count_once(fake_wandb: FakeWandb) -> None:
    session = dist_wandb.init()
    session.log({"loss": 0.5}, commit=False)
    session.log({"accuracy": 0.9})
    session.log({"loss": 0.4}, commit=True)
    assert fake_wandb.runs[0].logged == [
        ({"loss": 0.5, "accuracy": 0.9, "global_step": 0}, {}),
        ({"loss": 0.4, "global_step": 1}, {}),
    ]


def test_log_does_not_change_its_argument(fake_wandb: FakeWandb) -> None:
    metrics = {"loss": 0.5}
    session = dist_wandb.init()
    session.log(MappingProxyType(metrics), step=7)
    session.log({"accuracy": 0.9}, step=7)
    assert session.flush()
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
def test_invalid_metrics_are_refused_and_nothing_is_written(fake_wandb: FakeWandb, metrics: Any, message: str) -> None:
    session = dist_wandb.init()
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        session.log(metrics)
    session.log({"loss": 0.4})
    assert fake_wandb.runs[0].rows == [{"loss": 0.4, "global_step": 0}]


def test_a_session_without_an_x_axis_neither_defines_nor_counts_steps(fake_wandb: FakeWandb) -> None:
    session = open_session(Options(), {}, integration="test", step_metric=None)
    session.log({"loss": 0.5})
    session.log({"loss": 0.4}, step=3)
    assert session.flush()
    assert fake_wandb.runs[0].defined == []
    assert fake_wandb.runs[0].rows == [{"loss": 0.5}, {"loss": 0.4}]


def test_another_x_axis_is_written_only_with_a_given_step(fake_wandb: FakeWandb) -> None:
    session = open_session(Options(), {}, integration="test", step_metric="trainer/global_step")
    session.log({"loss": 0.5})
    session.log({"loss": 0.4}, step=3)
    assert session.flush()
    assert fake_wandb.runs[0].defined[0] == ("trainer/global_step", {})
    assert fake_wandb.runs[0].rows == [{"loss": 0.5}, {"loss": 0.4, "trainer/global_step": 3}]


# --- the run behind the session ---------------------------------------------------------------------------------------


def test_dir_of_a_session_lists_public_names_and_those_of_its_run(fake_wandb: FakeWandb) -> None:
    names = set(dir(dist_wandb.init()))
    assert {"log", "flush", "finish", "id", "url", "plan", "topology", "config", "run"} <= names
    assert {name for name in dir(fake_wandb.runs[0]) if not name.startswith("_")} <= names
    assert not {"after_fork", "prepare_fork", "close_without_run", "report_run", "release", "owns_run", "meet"} & names
    assert not [name for name in names if name.startswith("_")]


def test_dir_is_the_same_on_a_rank_without_a_run(job: Job, on_ranks: OnRanks) -> None:
    sessions = job(TWO)
    assert {"log", "flush", "plan", "summary", "watch", "alert", "url"} <= set(dir(sessions[1]))
    assert not {"after_fork", "close_without_run", "unchanged_config"} & set(dir(sessions[1]))
    on_ranks(2, lambda rank: sessions[rank].finish())


def test_a_notebook_links_to_the_run_on_all_ranks(job: Job, on_ranks: OnRanks) -> None:
    sessions = job(TWO)
    page = f"https://wandb.example/team/digits/runs/{sessions[0].id}"
    for session in sessions:
        assert f'View run at: <a href="{page}" target="_blank">{page}</a>' in session._repr_html_()
        assert "&lt;dist_wandb.Session run_mode=" in session._repr_html_()
    on_ranks(2, lambda rank: sessions[rank].finish())


@pytest.mark.usefixtures("fake_wandb")
def test_a_notebook_shows_no_link_for_an_offline_run() -> None:
    assert "<a" not in dist_wandb.init(mode="offline")._repr_html_()


def test_equal_summary_writes_read_the_same_on_all_ranks(job: Job, on_ranks: OnRanks) -> None:
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


def test_other_attributes_are_looked_up_on_the_run(fake_wandb: FakeWandb) -> None:
    session = dist_wandb.init(name="base")
    session.define_metric("epoch")
    assert session.name == "base"
    assert fake_wandb.runs[0].defined[-1] == ("epoch", {})


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


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"run_mode": "share"}, "run_mode='share' is unknown. Allowed: 'auto', 'shared', 'new'. Did you mean 'shared'"),
        ({"rank_scope": "node"}, "rank_scope='node' is unknown. Allowed: 'global', 'worker'."),
        ({"reduce": "avg"}, "reduce='avg' is not a reduction."),
        ({"reduce": {"loss": "avg"}}, "reduce['loss']='avg' is not a reduction."),
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


def test_strict_is_a_truth_value(fake_wandb: FakeWandb) -> None:
    with pytest.raises(ConfigurationError, match=re.escape("strict='yes' is neither True nor False. Pass one of them")):
        dist_wandb.init(strict="yes")  # type: ignore[arg-type]
    assert not fake_wandb.runs


@pytest.mark.parametrize("limits", [Limits(peer_timeout=7), {"peer_timeout": 7}])
def test_limits_may_be_an_object_or_a_mapping(fake_wandb: FakeWandb, limits: Limits | dict[str, float]) -> None:  # noqa: ARG001
    with dist_wandb.init(limits=limits) as session:
        assert session.options.limits == Limits(60.0, 7, None, 10_000, 1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"projct": "x"}, "dist_wandb.init got the argument 'projct', which wandb.init does not know."),
        ({"runmode": "new"}, "Did you mean 'run_mode'?"),
        ({"id": "a/b"}, "id='a/b' given to dist_wandb.init has '/', which W&B refuses"),
        ({"mode": "shared"}, "Pass run_mode='shared'"),
    ],
)
def test_arguments_that_wandb_would_refuse_are_refused_early(
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
