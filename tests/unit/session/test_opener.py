"""Opening sessions of several ranks, with and without a store, over a stand-in for wandb. Ranks are threads."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
import time
import warnings
from collections import UserDict, UserList, deque
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
import wandb
from fakes import THREE, TWO, FakeWandb, Job, Meeting, on_ranks, open_rank
from limits import Limit
from units import eventually, live_exchanges

import dist_wandb
from dist_wandb.errors import ConfigurationError, RendezvousError
from dist_wandb.exchange.membership import generations
from dist_wandb.exchange.membership.generations import keys_of, publish_opened
from dist_wandb.job import job_identity
from dist_wandb.job.job_store import JobStore
from dist_wandb.job.topology import Topology
from dist_wandb.session import api
from dist_wandb.session.api import get_run
from dist_wandb.session.job_description import next_job
from dist_wandb.session.job_link import MOVED
from dist_wandb.session.opener import open_session
from dist_wandb.session.session import Session
from dist_wandb.settings.options import Limits, Options
from dist_wandb.settings.plan import unit_of


@pytest.mark.parametrize("mapping", [UserDict, MappingProxyType])  # neither a dict nor JSON-serializable
@pytest.mark.parametrize("sequence", [UserList, tuple, deque])
def test_options_of_any_mappings_and_sequences_are_published(job: Job, mapping: Any, sequence: Any) -> None:
    assert next_job(["test"], TWO[1], 1.0) is None
    reduce = {"tokens": "sum", "*": "mean"}
    given = {"reduce": mapping(reduce), "spread": sequence(["loss"]), "per_rank": sequence(["loss", "acc*"])}
    sessions = job(TWO, **given)
    assert [session.options.reduce for session in sessions] == [reduce] * 2
    published = next_job(["test"], TWO[1], 1.0)
    assert published is not None
    assert Options(**published.job["options"]) == sessions[0].options
    assert pickle.loads(pickle.dumps(sessions[0].options)) == sessions[0].options  # noqa: S301


def test_an_integration_without_a_store_does_not_wait_for_rank_0(limit: Limit) -> None:
    limit(api, _MOMENT=60.0)
    begin = time.monotonic()
    assert api.join_init(Options(), TWO[1], "test") is None
    assert time.monotonic() - begin < 30


def test_arguments_of_rank_0_apply_to_ranks_without_their_own(job: Job, fake_wandb: FakeWandb) -> None:
    mine = {"project": "digits", "group": "night", "name": "base"}
    job(TWO, lambda rank: {"notes": f"of {rank}", **(mine if rank == 0 else {})}, run_mode="new")
    given = [[arguments[name] for name in ("project", "group", "name", "notes")] for arguments in fake_wandb.arguments]
    assert sorted(given) == [["digits", "night", f"base-rank-{rank}", f"of {rank}"] for rank in range(2)]


def test_different_ids_per_rank_warn_and_give_one_job(job: Job) -> None:
    with pytest.warns(UserWarning, match="Rank 1 was given the run id 'made-up-1', rank 0 'made-up-0'"):
        first, second = job(TWO, lambda rank: {"id": f"made-up-{rank}"}, run_mode="new")
    assert (first.id, second.id) == ("made-up-0-rank-0", "made-up-0-rank-1")


@pytest.mark.parametrize("mode", ["auto", "shared", "new"])
def test_ranks_without_a_known_layout_learn_it(job: Job, mode: str) -> None:
    unknown = [Topology(rank, None, None, 3, None, None) for rank in range(3)]
    sessions = job(unknown, run_mode=mode, rank_scope="worker")
    assert [session.topology for session in sessions] == [topology.with_layout(["host"] * 3) for topology in unknown]


def test_ranks_with_a_known_node_publish_it_for_the_others(job: Job) -> None:
    """With torchrun --virtual-local-rank, ranks of intermediate nodes have no local rank."""
    mixed = [Topology(0, 0, 0, 3, 1, 2), Topology(1, None, 1, 3, 2, 2), Topology(2, 1, 1, 3, 2, 2)]
    sessions = job(mixed, run_mode="shared", limits={"join_timeout": 20.0})
    assert sessions[1].plan.label is not None


UNKNOWN = [Topology(rank, None, None, 2, None, None) for rank in range(2)]


@pytest.mark.usefixtures("store")
def test_the_layout_is_learnt_even_if_no_plan_needs_it(limit: Limit) -> None:
    limit(job_identity, _OPTIONAL_TIMEOUT=20.0)
    sessions = on_ranks(2, lambda rank: open_rank(UNKNOWN[rank]))
    assert [session.topology.knows_layout for session in sessions] == [True, True]


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_a_single_early_rank_does_not_wait_for_an_unneeded_layout() -> None:
    """For example, rank 0 uses the run in `prepare_data` while the others wait at a barrier."""
    start = time.monotonic()
    session = open_rank(UNKNOWN[0], limits={"join_timeout": 60.0})
    assert session.run
    assert not session.topology.knows_layout
    assert time.monotonic() - start < 20


@pytest.mark.usefixtures("store")
def test_different_run_modes_are_an_error() -> None:
    open_rank(0, run_mode="new")
    with pytest.raises(ConfigurationError, match=r"Rank 1 opens its run with .*'shared'.* but rank 0 with .*'new'"):
        open_rank(1, run_mode="shared")


@pytest.mark.usefixtures("store")
def test_every_writer_of_a_shared_run_uses_the_arguments_of_rank_0(fake_wandb: FakeWandb) -> None:
    theirs = {"name": "first", "tags": ["a"], "config": {"lr": 0.1}, "mode": "offline"}
    open_rank(0, run_mode="shared", wandb_init=theirs)
    open_rank(1, run_mode="shared", wandb_init={"name": "at 10:02", "mode": "offline"})
    for name, value in theirs.items():
        assert fake_wandb.arguments[1][name] == value


@pytest.mark.usefixtures("store")
def test_an_online_secondary_opens_after_its_primary(fake_wandb: FakeWandb) -> None:
    options: dict[str, Any] = {"run_mode": "shared", "wandb_init": {"id": "exp", "mode": "online"}}
    with pytest.raises(RendezvousError, match=r"Rank 1 waited 0\.05 s for rank 0"):
        open_rank(1, **options, limits={"join_timeout": 0.05})
    assert fake_wandb.arguments == []
    open_rank(0, **options)
    assert open_rank(1, **options).run


def test_a_shared_run_waits_only_for_writers_that_have_opened_a_session(
    store: dist.Store, job: Job, fake_wandb: FakeWandb, limit: Limit
) -> None:
    limit(generations, APART=0.5)
    shared: Any = {"run_mode": "shared", "reduce": None, "limits": {"join_timeout": 600.0}}
    unit = unit_of(THREE[1], "global")
    generations.publish_opened(JobStore(store, "test/1", THREE[1], 20.0).below(generations.keys_of(unit)), unit)
    job(THREE[:1], **shared)[0].log({"loss": 1.0}, step=0, commit=True)
    time.sleep(generations.APART + 0.5)
    assert fake_wandb.runs[0].rows == [], "rank 1 is about to attach"
    job(THREE[1:2], **shared)
    eventually(lambda: fake_wandb.runs[0].rows)  # rank 2 never comes


@pytest.mark.parametrize(
    ("wandb_init", "run_id"), [({"resume_from": "abc?_step=3"}, "abc"), ({"id": "mine"}, "mine"), ({}, "proposed")]
)
def test_the_users_id_has_precedence_over_a_proposed_one(
    fake_wandb: FakeWandb, wandb_init: dict[str, Any], run_id: str
) -> None:
    open_session(Options(), wandb_init, integration="test", topology=TWO[0], proposed_id="proposed")
    assert fake_wandb.arguments[0]["id"] == run_id


@pytest.mark.usefixtures("store")
def test_sessions_of_an_integration_are_numbered_and_isolated() -> None:
    first, second = (open_rank(0, number=None, run_mode="new") for _ in range(2))
    first_on_1, second_on_1 = (open_rank(1, number=number, run_mode="new") for number in (1, 2))
    assert first.plan.base_id == first_on_1.plan.base_id
    assert second.plan.base_id == second_on_1.plan.base_id
    assert first.plan.base_id != second.plan.base_id


@pytest.mark.parametrize(("topology", "reinit"), [(TWO[0], "create_new"), (Topology.single(), None)])
def test_a_rank_of_a_job_opens_its_own_run_despite_an_existing_one(
    fake_wandb: FakeWandb, topology: Topology, reinit: str | None
) -> None:
    wandb.run = object()  # type: ignore[assignment]
    open_rank(topology)
    assert fake_wandb.arguments[0].get("reinit") == reinit


def test_a_rank_without_a_run_opens_a_session_even_if_the_primary_failed(store: dist.Store) -> None:
    published = JobStore(store, "test/1", TWO[0], 1.0)
    published.publish("run/", {"error": "no such project"})
    session = open_rank(1, wandb_init={"id": "exp"}, limits={"join_timeout": 0.1})
    assert session.url is None
    assert pickle.loads(pickle.dumps(session)).url is None  # noqa: S301  # our own
    session.finish(1)


@pytest.mark.usefixtures("store")
def test_processes_of_a_rank_that_becomes_the_primary_are_received_until_its_end(fake_wandb: FakeWandb) -> None:
    session = open_rank(1, wandb_init={"id": "exp"}, limits={"join_timeout": 0.1})
    copy = pickle.loads(pickle.dumps(session))  # noqa: S301  # our own
    eventually(lambda: bool(session.run))
    copy.log({"loss": 0.5})
    assert copy.flush()
    session.finish()
    (run,) = fake_wandb.runs
    assert [row["loss"] for row in run.rows] == [0.5]
    eventually(lambda: "dist_wandb-relay" not in {thread.name for thread in threading.enumerate()})


@pytest.mark.usefixtures("store")
def test_a_session_that_fails_to_open_is_cleaned_up(fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "announce", mock.Mock(side_effect=BrokenPipeError("nobody reads standard error")))
    with pytest.raises(BrokenPipeError):
        open_rank(0)
    assert not get_run()
    (run,) = fake_wandb.runs
    assert run.exit_codes == [1]
    assert not live_exchanges()


@pytest.mark.usefixtures("store")
def test_a_rank_that_still_opens_its_part_of_a_shared_run_is_not_taken_for_dead(fake_wandb: FakeWandb) -> None:
    """W&B has become unreachable after the primary's `init`, and the primary ends before the other one gives up."""
    shared: dict[str, Any] = {
        "run_mode": "shared",
        "wandb_init": {"mode": "offline"},
        "limits": {"finish_timeout": 0.5},
    }
    primary = open_rank(0, **shared)
    primary.log({"loss": 0.5}, step=0)

    def open_slowly(**arguments: Any) -> Any:
        primary.finish()
        return init(**arguments)

    init, fake_wandb.init = fake_wandb.init, open_slowly  # type: ignore[method-assign]
    open_rank(1, **shared).finish()
    assert [run.exit_codes for run in fake_wandb.runs] == [[None], [None]]


def test_a_rank_that_has_no_run_and_is_lost_fails_the_run_of_several_nodes(
    job: Job, store: dist.Store, fake_wandb: FakeWandb
) -> None:
    """The ranks that attach for the hardware metrics of their nodes are writers of the run; this one is none."""
    ranks = [Topology(rank, rank % 2, rank // 2, 4, 2, 2) for rank in range(4)]
    limits = {"finish_timeout": 0.5}
    (primary,) = job(ranks[:1], lambda _: {"id": "exp"}, system_metrics="all-nodes", limits=limits)
    lost = unit_of(ranks[1], "global")
    publish_opened(JobStore(store, "test/1", ranks[1], 1.0).below(keys_of(lost)), lost)
    primary.log({"loss": 0.5}, step=0)
    primary.finish()
    assert fake_wandb.runs[0].exit_codes == [1]


def test_a_writer_of_a_continued_run_does_not_wait_for_its_primary_for_ever(
    store: dist.Store, caplog: pytest.LogCaptureFixture
) -> None:
    """The primary is still opening the run, whose last row it would tell."""
    limits = {"join_timeout": 0.05, "finish_timeout": 0.5}
    arguments = {"id": "exp", "resume": "allow", "mode": "offline"}
    primary = open_rank(0, run_mode="shared", wandb_init=arguments, limits=limits)
    JobStore(store, "test/1", TWO[0], 1.0).delete(["run/"])  # as if it were not open yet
    session = open_rank(1, run_mode="shared", wandb_init=arguments, limits=limits)
    assert "rows without a step start at 0 under this rank's label: " in caplog.text
    for one in (session, primary):
        one.finish(1)


def test_another_rank_of_a_node_writes_its_run_if_the_first_one_does_not(job: Job, fake_wandb: FakeWandb) -> None:
    ranks = [Topology(rank, rank % 2, rank // 2, 4, 2, 2) for rank in range(4)]
    options: dict[str, Any] = {"rank_scope": "worker", "system_metrics": "all-nodes", "limits": {"join_timeout": 1.0}}
    here = job([ranks[rank] for rank in (0, 1, 3)], lambda _: {"id": "exp", "name": "n"}, **options)
    eventually(lambda: here[2].run)
    (late,) = job([ranks[2]], lambda _: {"id": "exp", "name": "n"}, **options)
    sessions = [*here, late]
    for session in sessions:
        session.log({"loss": float(session.topology.global_rank)}, step=1)
    assert [session.id for session in sessions] == ["exp-worker-0"] * 2 + ["exp-worker-1"] * 2
    on_ranks(4, lambda index: sessions[index].finish())
    assert [(one["id"], one["name"]) for one in fake_wandb.arguments] == [
        (f"exp-worker-{node}", f"n-worker-{node}") for node in range(2)
    ]
    assert [[row["loss"] for row in run.rows] for run in fake_wandb.runs] == [[0.5], [2.5]]


@pytest.mark.parametrize("message", [[], "job", {}, {"options": {}}, {"options": [], "arguments": {}}])
def test_a_malformed_job_description_is_refused(store: dist.Store, message: Any) -> None:
    described = JobStore(store, "test/1", TWO[0], 1.0)
    job_identity.publish_base_id(described, "base")
    described.publish("job", message)
    for read in (lambda: next_job(["test"], TWO[1], 1.0), lambda: open_rank(1, run_mode="shared")):
        with pytest.raises(RendezvousError, match=r"^Rank 1 found .* as description of the job, which no rank has wri"):
            read()


def test_the_job_name_gives_every_rank_the_id_without_a_store(
    fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-1")
    sessions = [open_rank(rank) for rank in range(2)]
    assert [bool(session.run) for session in sessions] == [True, False]
    assert sessions[0].id == sessions[1].id == fake_wandb.runs[0].id


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("mode", ["auto", "shared"])
def test_a_session_opened_before_the_store_exists_publishes_its_job_and_run_later(
    fake_wandb: FakeWandb, meeting: Meeting, mode: Any
) -> None:
    arguments = {"project": "digits", "id": "exp"}
    with mock.patch.object(meeting, "store_of", return_value=None):
        first = open_rank(0, run_mode=mode, wandb_init=arguments)
    first.connect_late(arguments, "test", 1)
    described = next_job(["test"], TWO[1], 1.0)
    assert described is not None
    assert described.job["arguments"]["project"] == "digits"
    second = open_rank(1, run_mode=mode, wandb_init=arguments)
    assert second.id == first.id
    assert bool(second.run) is (mode == "shared")
    assert len(fake_wandb.runs) == (2 if mode == "shared" else 1)


def test_the_url_is_none_if_the_store_is_gone(job: Job, meeting: Meeting) -> None:
    outage = meeting.outage()
    _, second = job(TWO)
    outage.begin()
    assert second.url is None


@pytest.mark.usefixtures("fake_wandb")
def test_a_child_process_warns_if_its_rank_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", multiprocessing.current_process)
    with pytest.warns(UserWarning, match="was started by another process, but its rank is not known"):
        dist_wandb.init().finish()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dist_wandb.init().topology.global_rank == 1
    monkeypatch.setenv("WORLD_SIZE", "1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert dist_wandb.init(reinit="create_new").topology.world_size == 1
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("fake_wandb")
@pytest.mark.parametrize("mode", ["shared", "new"])
def test_a_proposed_id_of_one_rank_is_not_used_without_a_store(mode: Any) -> None:
    with pytest.raises(RendezvousError, match=r"has no way to agree on a run id.*Call init_process_group first"):
        open_session(Options(mode), {}, integration="test", topology=TWO[1], proposed_id="made-up-by-rank-1")


def test_wandbs_settings_for_several_writers_are_refused_on_several_ranks(fake_wandb: FakeWandb) -> None:
    settings = wandb.Settings(mode="shared", x_label="mine", x_primary=True)
    for rank in range(2):
        with pytest.raises(ConfigurationError, match="2 ranks open the run with run_mode='auto'"):
            open_rank(rank, wandb_init={"settings": settings})
    assert fake_wandb.runs == []
    open_rank(Topology.single(), wandb_init={"settings": settings})
    assert fake_wandb.settings[0].x_label == "mine"  # type: ignore[union-attr]


def test_wandbs_shared_mode_of_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    monkeypatch.setenv("WANDB_MODE", "shared")
    with pytest.raises(ConfigurationError, match=r"mode='shared' \(WANDB_MODE\) is W&B's switch for one writer, but 2"):
        open_rank(0)
    assert [session.run.offline for session in job(TWO, lambda _: {"mode": "offline"}) if session.run] == [True]


@pytest.mark.parametrize("in_settings", [True, False])
def test_a_label_that_is_replaced_is_reported_once(
    job: Job, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch, in_settings: bool
) -> None:
    if not in_settings:
        monkeypatch.setenv("WANDB_X_LABEL", "mine")
    job(TWO, lambda _: {"settings": {"x_label": "mine"} if in_settings else None}, run_mode="shared")
    (message,) = [str(one.message) for one in recwarn if "x_label" in str(one.message)]
    origin = "settings" if in_settings else "WANDB_X_LABEL"
    assert message.startswith(f"x_label='mine' ({origin}) is not used: with run_mode='shared' each rank has a label of")


@pytest.mark.parametrize("reduce", ["auto", None])
@pytest.mark.parametrize("has_run", [False, True])
def test_a_session_continues_with_another_primary_although_the_store_ends_meanwhile(
    store: dist.Store, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, has_run: bool, reduce: Any
) -> None:
    """Its host, rank 0, opens no session and has ended, before the run of rank 1 is open or after."""

    class Ending(JobStore):
        """The store, which ends."""

        def publish(self, key: str, value: Any) -> None:
            if fake_wandb.runs:
                raise RendezvousError("Rank 1 cannot reach the store.")
            super().publish(key, value)

    def find(namespace: str, topology: Topology, timeout: float) -> JobStore:
        if MOVED in namespace and not has_run:
            raise RendezvousError("Rank 1 cannot reach the store.")
        return Ending(store, namespace, topology, timeout)

    monkeypatch.setattr(JobStore, "find", find)
    with open_rank(1, wandb_init={"id": "exp"}, reduce=reduce, limits={"join_timeout": 1.0}) as session:
        session.log({"loss": 0.5}, step=0)
        eventually(lambda: session.run)
        session.log({"loss": 1.5}, step=1)
    (run,) = fake_wandb.runs
    assert ([row["loss"] for row in run.rows], run.exit_codes) == ([0.5, 1.5], [None])


@pytest.mark.usefixtures("store")
def test_the_stand_in_of_a_session_that_continues_with_a_run_acts_on_that_run(fake_wandb: FakeWandb) -> None:
    """A script may have kept it. What it wrote into its summary, or asked it for, did not concern the run."""
    with open_rank(1, wandb_init={"id": "exp"}, limits={"join_timeout": 1.0}) as session:
        before = session.run
        session.log({"loss": 0.5}, step=0)
        eventually(lambda: session.run)
        before.summary["best"] = 1
        before.notes = "of rank 1"
        assert (before.offline, before.dir) == (session.run.offline, session.run.dir)
    (run,) = fake_wandb.runs
    assert (run.summary["best"], vars(run)["notes"]) == (1, "of rank 1")


def trials(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Session]:
    """Return a function that opens a rank's session with a trial of its own."""
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep")

    def open_trial(rank: int, **options: Any) -> Session:
        monkeypatch.setenv("WANDB_RUN_ID", f"trial-{rank}")
        return open_rank(rank, **options)

    return open_trial


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("first", [0, 1])
def test_both_ranks_with_different_trials_are_told_whichever_came_first(
    fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, first: int
) -> None:
    open_trial = trials(monkeypatch)

    def was_refused(rank: int) -> bool:
        words = f"Rank {rank} was given the trial 'trial-{rank}' of the sweep, but rank {1 - rank} the trial 'trial-"
        with pytest.raises(ConfigurationError, match=words):
            open_trial(rank)
        return True

    if first == 1:  # it has no run, and so is not held up
        open_trial(1).log({"loss": 0.5}, step=0)
        assert was_refused(0)
        eventually(lambda: "what rank 1 logs is lost, because init failed on rank 0" in caplog.text)
        return

    def open_slowly(**arguments: Any) -> Any:
        assert was_refused(1)
        monkeypatch.setenv("WANDB_RUN_ID", "trial-0")
        return init(**arguments)

    init, fake_wandb.init = fake_wandb.init, open_slowly  # type: ignore[method-assign]
    assert was_refused(0)
    assert fake_wandb.runs[0].exit_codes == [1]


@pytest.mark.usefixtures("store")
def test_a_process_may_go_on_to_another_trial(
    fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep")
    for name in ("a", "b"):
        monkeypatch.setenv("WANDB_RUN_ID", name)
        session = open_rank(0, number=1 + (name == "b"))
        monkeypatch.setenv("WANDB_RUN_ID", "not/an id")
        session.finish(1)
    assert "was given the trial" not in caplog.text
    assert len(fake_wandb.runs) == 2


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("reduce", ["auto", None])
def test_the_first_rank_is_told_of_one_that_comes_later_with_another_trial(
    fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reduce: Any
) -> None:
    open_trial = trials(monkeypatch)
    with open_trial(0, reduce=reduce, limits={"finish_timeout": 0.5}):
        with pytest.raises(ConfigurationError, match="Rank 1 was given the trial 'trial-1' of the sweep, but rank 0"):
            open_trial(1, reduce=reduce)
        monkeypatch.setenv("WANDB_RUN_ID", "trial-0")
    assert fake_wandb.runs[0].exit_codes == [None]
    words = "Rank 0 was given the trial 'trial-0' of the sweep, but rank 1 the trial 'trial-1'"
    assert caplog.text.count(words) == 1
    assert "run: wandb agent SWEEP" in caplog.text


@pytest.mark.usefixtures("store")
def test_a_rank_that_comes_after_the_only_one_has_ended_still_opens_its_own_run(fake_wandb: FakeWandb) -> None:
    options = Options(run_mode="new", reduce="mean", limits=Limits(join_timeout=1.0))
    for rank, number in ((0, None), (1, 1)):  # the first session is counted, and so deletes its keys
        with open_session(options, {"id": "exp"}, integration="late", topology=TWO[rank], number=number) as session:
            session.log({"loss": 0.5}, step=0)
    assert [run.id for run in fake_wandb.runs] == ["exp-rank-0", "exp-rank-1"]


@pytest.fixture
def early(bare_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001  # goes first
    """Make this process one that Lightning has started, before its process group exists."""
    for variable, value in {"NODE_RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")


@pytest.mark.usefixtures("early")
def test_a_session_that_no_rank_meets_waits_for_none_and_says_that_nothing_is_written(
    fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    began = time.monotonic()
    session = dist_wandb.init(config={"width": 3}, limits=Limits(join_timeout=20.0))
    assert (session.topology.global_rank, bool(session.run), session.config["width"]) == (1, False, 3)
    assert not [*caplog.messages, *(one for one in recwarn if one.category is UserWarning)]
    session.log({"loss": 1.0})
    session.log({"loss": 2.0})
    session.finish()
    assert (fake_wandb.runs, time.monotonic() - began < 15) == ([], True)
    (message,) = caplog.messages
    assert "rank 1 logs in a session that was opened before Lightning had connected the ranks" in message
    assert "Log with DistWandbLogger" in message


@pytest.mark.usefixtures("early", "fake_wandb")
def test_a_session_that_no_rank_meets_tells_what_was_asked_for(tmp_path: Path) -> None:
    """For directories of each run, such as ``f"checkpoints/{wandb.run.name}"``, which all ranks use."""
    asked: Any = {"project": "digits", "name": "first", "group": "folds", "tags": ["a"], "job_type": "train"}
    session = dist_wandb.init(dir=tmp_path, mode="offline", id="abc", **asked)
    run: Any = session.run
    assert {name: getattr(run, name) for name in asked} == {**asked, "tags": ("a",)}
    assert (run.id, run.path, run.offline, str(tmp_path) in run.dir) == ("abc", "digits/abc", True, True)
    session.finish()


@pytest.mark.usefixtures("early", "fake_wandb")
@pytest.mark.parametrize("options", [{"run_mode": "new"}, {"run_mode": "shared"}, {"primary_rank": 1}])
def test_a_session_that_no_rank_meets_is_refused_if_it_needs_them(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="called on rank 1 before Lightning had connected the ranks"):
        dist_wandb.init(**options)
