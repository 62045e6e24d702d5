"""Agreement on the participants through a store in memory: late ranks, elections, deaths of elected ranks."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import itemgetter
from typing import Any

import pytest
import torch.distributed as dist
from counting import CountedStore, Counts
from hypothesis import given
from hypothesis import strategies as st
from limits import Limit

from dist_wandb.exchange import membership
from dist_wandb.exchange.interface import Hooks
from dist_wandb.exchange.membership import Membership
from dist_wandb.exchange.membership.forming import Moved, Stopped
from dist_wandb.exchange.membership.generations import Arrival, Checkpoint, Generation, publish_opened
from dist_wandb.exchange.transport import BrokenError, GroupLayout
from dist_wandb.job.job_store import JobStore
from dist_wandb.job.topology import Topology
from dist_wandb.settings.options import DEFAULT_LIMITS, Limits
from dist_wandb.settings.plan import Unit

LONG = 60.0  # seconds; a rank that waits this long fails the test
SHORT = 0.3
MOVING = Hooks(move=lambda _: None)

pytestmark = pytest.mark.usefixtures("bare_environment")


class Job:
    """The ranks of one unit, over a store in memory."""

    def __init__(self, size: int, apart: int = 1) -> None:
        self.size, self.apart = size, apart  # the latter: ranks of the job from one of the unit to the next
        self.counts = Counts()
        self.stopped: set[int] = set()
        self.before: Callable[[str, Any], None] = lambda *_: None  # as of `CountedStore`
        self._store = dist.HashStore()
        self._ranks: dict[int, Membership] = {}
        self._gathering: tuple[str, set[int], threading.Barrier] = "", set(), threading.Barrier(1)

    def rank(self, index: int) -> Membership:
        if index not in self._ranks:
            unit, keys = self.unit(index), self.keys(index)
            self._ranks[index] = Membership(unit, DEFAULT_LIMITS, keys, lambda: index in self.stopped)
        return self._ranks[index]

    def unit(self, index: int) -> Unit:
        return Unit("", index, self.size, index * self.apart, range(self.size))

    def keys(self, index: int) -> JobStore:
        store = CountedStore(self._store, index, self.counts, functools.partial(self._before, index))
        return JobStore(store, "test", Topology(index, index, 0, self.size, self.size, 1), LONG)

    def _before(self, index: int, key: str, value: Any) -> None:
        where, indices, all_there = self._gathering
        if key == where and index in indices:
            indices.discard(index)
            all_there.wait()
        self.before(key, value)

    def gather(self, key: str, *indices: int) -> None:
        """Let ranks wait, before they first use a key, until all of them do: each has published what precedes it."""
        self._gathering = f"test/{key}", set(indices), threading.Barrier(len(indices), timeout=LONG)

    def publish_opened(self, index: int) -> None:
        publish_opened(self.keys(index), self.unit(index))

    def together(self, act: Callable[[Membership], Any], *indices: int) -> list[Any]:
        with ThreadPoolExecutor(len(indices)) as pool:
            return list(pool.map(act, map(self.rank, indices)))

    def arrive(self, *indices: int) -> Generation:
        """Let some ranks arrive at once; return the generation of those that are here after the timeout."""
        self.gather("generation/0", *indices)
        return set_of(self.together(lambda rank: rank.arrive(SHORT), *indices))

    def regroup(self, before: Generation, *indices: int) -> Generation:
        """Let some ranks find a generation broken at once; return the next one, claimed after the timeout."""
        self.gather("generation/1", *indices)
        return set_of(self.together(lambda rank: rank.regroup(before, knows(6), SHORT), *indices))

    def readers(self, family: str) -> set[int]:
        """Return the ranks that have read a list: its entries, of which each rank writes one, are of one family."""
        return {rank for rank in range(self.size) if self.counts.keys[rank, family] > 1}

    def begin(self) -> Generation:
        """The first generation, of all ranks."""
        return set_of(self.together(lambda rank: rank.arrive(LONG), *range(self.size)))


def set_of(generations: list[Generation]) -> Generation:
    """The generation that all ranks have agreed on."""
    assert all(each == generations[0] for each in generations)
    return generations[0]


def on_one_node(number: int, members: tuple[int, ...], *others: Any, **named: Any) -> Generation:
    """A generation of which the members, and those that are gone, have arrived."""
    made = Generation(number, members, *others, **named)
    return replace(made, places=places_of({*members, *made.gone}))


def places_of(ranks: Iterable[int]) -> dict[int, Arrival]:
    return {rank: Arrival(rank, rank, 0) for rank in ranks}


def knows(number: int, *offers: str) -> Checkpoint:
    """The checkpoint of a member that has taken part in so many rounds; the members made these offers in the last."""
    of_members = {offer.encode(): frozenset([member]) for member, offer in enumerate(offers)}
    return Checkpoint(number, of_members, [0.5, -0.0], [math.inf]) if offers else Checkpoint(number)


@pytest.fixture
def brief_terms(limit: Limit) -> None:
    limit(membership, _TERM=SHORT)


def test_the_last_rank_to_arrive_claims_the_first_generation() -> None:
    job = Job(16)
    assert job.begin() == on_one_node(0, tuple(range(16)))
    assert len(job.readers("here/#") - {0}) <= 1, "besides the primary, only the last rank reads who has arrived"


def test_one_rank_reads_the_list_of_arrivals_after_the_timeout(limit: Limit) -> None:
    limit(membership, _TERM=LONG)
    job = Job(20)
    present = [rank for rank in range(20) if rank != 7]
    assert job.arrive(*present) == on_one_node(0, tuple(present))
    assert len(job.readers("here/#") - {0}) <= 1, "besides the primary, only one rank that was elected"


@pytest.mark.usefixtures("brief_terms")
def test_another_rank_claims_the_first_generation_if_the_elected_one_died() -> None:
    job = Job(4)
    job.publish_opened(3)  # the others wait for it
    assert job.rank(2).generations.is_elected(0, 0)  # and then it dies
    job.rank(2).presence.arrive()
    assert job.arrive(0, 1).members == (0, 1, 2)
    assert not job.rank(2).generations.is_elected(0, 1)


def test_a_rank_that_dies_while_arriving_is_not_a_member() -> None:
    job = Job(3)
    job.keys(2).count("here/count")  # and then it dies
    assert job.arrive(0, 1).members == (0, 1)


def test_the_lowest_rank_becomes_the_primary_if_rank_0_opens_no_session() -> None:
    job = Job(4)

    def arrive(rank: Membership) -> int:
        with pytest.raises(Moved) as moved:
            rank.arrive(SHORT, MOVING)
        return moved.value.primary

    job.gather("generation/0", 1, 2, 3)
    assert job.together(arrive, 1, 2, 3) == [1, 1, 1]
    assert arrive(job.rank(0)) == 1, "it comes too late"


def test_a_rank_without_an_exchange_follows_the_new_primary_also_if_rank_0_has_come_meanwhile() -> None:
    job = Job(3)
    job.rank(1).claim(Generation(0, (), source=1))
    job.publish_opened(0)
    with pytest.raises(Moved) as moved:
        job.rank(2).arrive(SHORT, MOVING, watches=True)
    assert moved.value.primary == 1


def test_a_primary_that_has_opened_a_session_is_not_replaced() -> None:
    job = Job(4)
    job.publish_opened(0)
    job.gather("generation/0", 1, 2, 3)
    began = set_of(job.together(lambda rank: rank.arrive(SHORT, MOVING), 1, 2, 3))
    assert (began.members, began.lost) == ((1, 2, 3), (0,))


def test_a_rank_that_arrives_twice_counts_once() -> None:
    job = Job(3)
    job.rank(0).presence.arrive()
    job.stopped.add(1)
    with pytest.raises(Stopped):
        job.rank(1).arrive(LONG)
    job.stopped.clear()
    assert job.arrive(0, 1).members == (0, 1)


def test_a_delayed_arrival_claims_the_first_generation_without_an_election() -> None:
    """The rank has its position, but its value arrives after the others have come and left, without contributions."""
    job = Job(3)

    def come_and_leave(key: str, value: Any) -> None:
        if key == "test/here/1" and value is not None:
            job.stopped.update({1, 2})
            for other in (1, 2):
                with pytest.raises(Stopped):
                    job.rank(other).arrive(LONG)

    job.before = come_and_leave
    assert job.rank(0).arrive(LONG).members == (0, 1, 2)
    assert not [family for _, family in job.counts.keys if "elected" in family], "for lack of a last one"


def test_early_departures_are_not_members_and_are_recorded() -> None:
    job = Job(3)
    job.rank(1).presence.arrive()
    job.rank(1).leave(None, knows(0), "failed")
    began = set_of(job.together(lambda rank: rank.arrive(LONG), 0, 2))
    assert began == on_one_node(0, (0, 2), gone={1: "failed"})


def test_a_generation_has_the_places_of_all_ranks_so_far() -> None:
    """Their ranks in the job are not those that the unit assumes, as under SLURM's cyclic distribution."""
    job, places = Job(3, apart=2), {index: Arrival(index, 2 * index, 0) for index in range(3)}
    job.rank(2).leave(job.arrive(0, 2), knows(0), "failed")
    began = job.rank(1).generations.get(0)
    assert began is not None
    job.rank(1).generations.join_requests(began).append(job.rank(1).presence.own)
    joined = job.rank(0).admit(began, knows(4), {})
    assert joined.places == places
    assert set_of(job.together(lambda rank: rank.regroup(joined, knows(6), LONG), 0, 1)).places == places
    assert [job.rank(0).presence.global_rank(index) for index in range(3)] == [0, 2, 4]


def test_one_rank_claims_the_next_generation_after_a_break() -> None:
    job = Job(32)
    before = job.begin()
    following = set_of(job.together(lambda rank: rank.regroup(before, knows(9, "a"), LONG), *range(32)))
    assert following == on_one_node(1, before.members, (), 9, following.source)
    assert len(job.readers("summaries/#/#")) == 1, "all but one poll a single key"


def test_a_departed_rank_is_not_waited_for_but_its_checkpoint_counts() -> None:
    job = Job(3)
    before = job.begin()
    job.rank(2).leave(before, knows(7, "a"), "finished")
    following = set_of(job.together(lambda rank: rank.regroup(before, knows(6), LONG), 0, 1))
    assert following == on_one_node(1, (0, 1), (), 7, 2, gone={2: "finished"})
    assert job.rank(0).generations.checkpoint_before(following) == knows(7, "a")


@pytest.mark.usefixtures("brief_terms")
def test_a_rank_that_dies_before_it_meets_the_others_is_not_waited_for_again() -> None:
    job = Job(4)
    before = job.begin()
    group = GroupLayout(0, before.members, 0)

    def meet_in_vain(rank: Membership) -> Generation:
        assert not rank.forming.meet(before, group, SHORT)
        return rank.regroup(before, knows(6), LONG)

    job.gather(f"met/0/{group.name}/all", 0, 1, 3)
    start = time.monotonic()
    assert set_of(job.together(meet_in_vain, 0, 1, 3)).lost == (2,)
    assert time.monotonic() - start < LONG / 2


def test_members_wait_less_for_each_other_after_a_broken_generation() -> None:
    found: list[float] = []
    own: Any = Membership(Job(3).unit(0), Limits(peer_timeout=100.0), Job(3).keys(0), lambda: False).forming
    own.meet = lambda _generation, _group, within, _is_late: found.append(within)
    for generation in (Generation(0, (0, 1)), Generation(2, (0, 1), joined=(1,)), Generation(2, (0, 1))):
        with pytest.raises(BrokenError):
            own.form(generation, lambda: False)
    assert found == [100.0, 100.0, 5.0]


@pytest.mark.slow
@pytest.mark.usefixtures("brief_terms")
def test_another_rank_regroups_if_successive_elected_ranks_die() -> None:
    job = Job(5)
    before = job.begin()
    job.rank(4).generations.summaries(before).append((4, 6))
    assert job.rank(4).generations.is_elected(1, 0)
    assert job.rank(3).generations.is_elected(1, 1)
    assert set(job.regroup(before, 0, 1, 2).members) == {0, 1, 2, 4}


def test_leaving_after_the_closing_round_breaks_only_a_newer_generation() -> None:
    """Its members expect the rank, as it has published its checkpoint."""
    job = Job(3)
    before = job.begin()
    job.rank(2).leave(before, knows(7), "finished", is_closed=True)
    assert not job.rank(1).generations.is_broken(before)
    job.rank(1).leave(before, knows(6), "finished")
    assert job.rank(0).generations.is_broken(before)
    job = Job(3)
    before = job.begin()
    following = set_of(job.together(lambda rank: rank.regroup(before, knows(6), LONG), *range(3)))
    job.rank(2).leave(before, knows(6), "finished", is_closed=True)
    assert job.rank(1).generations.is_broken(following)


def test_leaving_breaks_a_generation_that_has_just_admitted_the_rank() -> None:
    """The rank has asked to join, and leaves before it has seen that it was admitted."""
    job = Job(3)
    before = job.arrive(0, 1)
    late = job.rank(2)
    assert late.arrive(LONG) == before
    late.generations.join_requests(before).append(late.presence.own)
    following = job.rank(0).admit(before, knows(4), {})
    assert following.members == (0, 1, 2)
    assert not job.rank(1).generations.is_broken(following)
    late.leave(None, knows(0), "failed")
    assert job.rank(1).generations.is_broken(following)
    assert not job.rank(1).generations.is_broken(before)  # it was not a member


def test_a_generation_is_broken_at_once_if_a_member_leaves_during_the_claim() -> None:
    job = Job(3)
    before = job.begin()

    def act(key: str, value: Any) -> None:
        if key == "test/summaries/0/1" and value is not None:  # not first: that rank would have to claim
            job.rank(2).generations.summaries(before).append((2, 6))
        elif key == "test/generation/1" and value is not None and not left:
            left.append(key)
            job.rank(2).leave(before, knows(6), "failed")

    left: list[str] = []
    job.before = act
    following = set_of(job.together(lambda rank: rank.regroup(before, knows(6), LONG), 0, 1))
    assert left
    assert following.members == (0, 1, 2)
    assert job.rank(1).generations.is_broken(following)


def test_checking_for_departed_ranks_reads_one_key() -> None:
    job = Job(8)
    before = job.begin()
    counted = job.counts.of(0)
    for _ in range(5):
        assert job.rank(0).presence.gone_among(before.members) == set()
        assert not job.rank(0).presence.are_gone(before.members)
    assert job.counts.of(0) - counted == 10


any_generations = st.builds(
    Generation,
    st.just(3),
    st.sets(st.integers(0, 40)).map(lambda members: tuple(sorted(members))),
    st.sets(st.integers(0, 40)).map(lambda members: tuple(sorted(members))),
    st.integers(0, 9),
    st.none() | st.integers(0, 40),
    st.sets(st.integers(0, 40)).map(lambda members: tuple(sorted(members))),
    st.dictionaries(st.integers(0, 40), st.sampled_from(["finished", "failed", "undelivered"])),
    st.lists(
        st.builds(Arrival, st.integers(0, 40), st.integers(0, 90), st.integers(-1, 9)), unique_by=itemgetter(0)
    ).map(lambda arrivals: {one.member: one for one in arrivals}),
)


@given(any_generations)
def test_a_generation_is_read_back_as_claimed(generation: Generation) -> None:
    job = Job(2)
    assert job.rank(0).generations.claim(generation) == generation
    assert job.rank(1).generations.get(3) == generation


def test_a_generation_of_thousands_has_a_short_text() -> None:
    members = tuple(rank for rank in range(16_384) if rank // 8 != 77)
    gone = dict.fromkeys(range(616, 624), "finished")
    places = {rank: Arrival(rank, rank, rank // 8) for rank in range(16_384)}
    assert len(str(Generation(3, members, (), 9, 0, (), gone, places).as_list())) < 200


def test_the_latest_of_very_many_generations_is_found() -> None:
    first = Job(2).rank(0)
    for number in range(1500):
        last = first.generations.claim(Generation(number, (0,)))
    assert first.generations.latest(Generation(0, (0,))) == last
