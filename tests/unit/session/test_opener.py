"""Opening sessions of several ranks, with and without a store, over a stand-in for wandb. Ranks are threads."""

from __future__ import annotations

import multiprocessing
import pickle
import time
import warnings
from collections import UserList, deque
from collections.abc import Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
import wandb

import dist_wandb
from dist_wandb.errors import ConfigurationError, RendezvousError
from dist_wandb.exchange import interface
from dist_wandb.runs.null_run import NullRun
from dist_wandb.session.api import get_run
from dist_wandb.session.job_description import next_job
from dist_wandb.session.opener import open_session
from dist_wandb.session.session import Session
from dist_wandb.settings.limits import Limits
from dist_wandb.settings.options import Options
from dist_wandb.store import job_identity
from dist_wandb.store.job_store import JobStore
from dist_wandb.topology.model import Topology

if TYPE_CHECKING:
    from tests.conftest import FakeWandb, Job, OnRanks

TWO = [Topology(rank, rank, 0, 2, 2, 1) for rank in range(2)]


def test_the_job_is_told_all_options_for_ranks_that_come_late(job: Job) -> None:
    given: dict[str, Any] = {"reduce": {"tokens": "sum", "*": "mean"}, "spread": ["loss"]}
    sessions = job(TWO, limits={"peer_timeout": 7.0}, **given)
    assert sessions[0]._link.store is not None
    job_message: Any = sessions[0]._link.store.try_get("job")
    assert Options(**job_message["options"]) == sessions[0].options


class Settings(MutableMapping[str, Any]):
    """A mapping like OmegaConf's `DictConfig`: neither a dict nor JSON-serializable."""

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
    given = [{name: arguments[name] for name in ("project", "group")} for arguments in fake_wandb.arguments]
    assert given == [{"project": "digits", "group": "night"}] * 2
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
    """With torchrun --virtual-local-rank, ranks of intermediate nodes have no local rank."""
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


@pytest.mark.slow
def test_a_rank_alone_does_not_wait_for_nodes_that_its_plan_can_do_without(store: dist.Store) -> None:
    """For example, rank 0 uses the run in `prepare_data` while the others wait at a barrier."""
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
    published = JobStore(store, "test/1", TWO[0], 1.0)
    published.publish("run/", {"error": "no such project"})
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
    with pytest.raises(RendezvousError, match=r"^Rank 1 found .* as description of the job, which no rank has written"):
        next_job("test", TWO[1], 1.0)
    with pytest.raises(RendezvousError, match=r"^Rank 1 found .* as description of the job, which no rank has written"):
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
    with pytest.warns(UserWarning, match="was started by another process, but its rank is not known"):
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
