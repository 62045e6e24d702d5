"""The question where all ranks are, and its answers, through the job's store. Nothing blocks in the store.

Keys: ``asked``, the number N of the last question; ``ask/N``, claimed by the rank that asks; ``answers/N``, a list of
what the ranks say, which only that rank reads; ``stack/DIGEST``, a stack that several ranks may share; ``look/N``,
which rank is to look at which processes of its host, and ``seen/N/RANK``, what it has seen; ``told``, the last question
of which the verdict was told; ``alert/N``, the alert of a rank that has told it and has no run, and ``alerted/N``,
claimed by a rank that has one; ``at/RANK``, the host and process of a rank, and whether it has a session.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dist_wandb.stalls import evidence
from dist_wandb.stalls.verdict import Absent, Answer, Missing
from dist_wandb.store.job_store import JobStore
from dist_wandb.store.shared_list import SharedList
from dist_wandb.store.timed_caller import STORE_PATIENCE, TimedCaller
from dist_wandb.topology.launch import node_identity

ANSWERS = 8.5  # seconds in which ranks answer: a pause between two looks at the store, evidence, and the store
_LOOK = 3.0  # seconds in which another rank looks at processes of its host
_MOST_ABSENT = 32  # ranks without an answer that are looked for


class Found(NamedTuple):
    """What the ranks have said."""

    answers: list[Answer]
    absent: list[Absent]
    stacks: dict[str, list[int]]  # texts, with the ranks of which they are


class Questions:
    """One rank's part in questions and answers. All methods may raise as `JobStore` does if it does not answer."""

    def __init__(self, rank: int, world_size: int, wait: Callable[[float], object]) -> None:
        self.number: int = 0  # of the last question
        self._rank = rank
        self._world_size = world_size
        self._wait = wait  # for some seconds; returns whether the watcher ends
        self._host, self._pid = node_identity(), os.getpid()
        self._store: JobStore | None = None
        self._own: str | None = None  # key of this rank's last answer
        self._alerted = 0  # number of the last question whose alert was found
        self._first: Any = None  # where rank 0 is, whose process may have the store

    def connect(self, find: Callable[[], JobStore | None]) -> bool:
        """Return whether there is a store, on a connection of its own."""
        if self._store is None:
            found = find()
            if found is None:
                return False
            store = found.beside("watch", TimedCaller(STORE_PATIENCE))
            self.number = int(store.try_get("asked") or 0)
            store.publish(f"at/{self._rank}", [self._host, self._pid, True])
            self._store = store
        return True

    def leave(self) -> None:
        """Tell the others that this rank has no session any more."""
        if self._store is not None:
            self._store.publish(f"at/{self._rank}", [self._host, self._pid, False])
            self._store = None  # releases the connection

    def is_asked(self) -> bool:
        """Return whether another rank has asked."""
        if self._first is None and self._rank:
            self._first = self._there.try_get("at/0")
        is_asked = self._there.has([f"ask/{self.number + 1}"])
        self.number += is_asked
        return is_asked

    def seen_alone(self) -> list[Absent]:
        """Return why the store may not answer: what has happened to rank 0, if it is on this host."""
        host, pid, _ = self._first or ("", 0, False)
        kind = evidence.looked_at([pid])[pid] if host == self._host else "silent"
        return [Absent(0, host, pid, kind)] if kind in ("stopped", "gone") else []

    def claim(self) -> bool:
        """Ask, unless another rank has just done so; return whether this one asks."""
        self.number += 1
        first = bool(self._there.claim(f"ask/{self.number}", self._rank) == self._rank)
        if first:
            self._there.publish("asked", self.number)
        return first

    def was_told(self, number: int) -> bool:
        """Return whether a verdict was told that includes the answers to this question."""
        return int(self._there.try_get("told") or 0) >= number

    def tell(self, alert: str) -> None:
        """Publish that the verdict is told, and an alert, if any, that a rank with a run is to send."""
        if alert:
            self._there.publish(f"alert/{self.number}", alert)
        self._there.publish("told", self.number)

    def alert(self) -> str:
        """Return the alert about the last question, if this rank, which has a run, is to send it now."""
        text = None if self._alerted == self.number else self._there.try_get(f"alert/{self.number}")
        if text is None:
            return ""
        self._alerted = self.number
        return str(text) if self._there.claim(f"alerted/{self.number}", self._rank) == self._rank else ""

    def answer(self, answer: Answer, text: str) -> None:
        """Say where this rank stands; `text` has all its stacks."""
        stack = evidence.encoded_stack(answer.frames)
        stored = [stack, text[: max(0, evidence.MOST - len(json.dumps(stack)))]]
        digest = hashlib.sha256(json.dumps(stored).encode()).hexdigest()[:16]
        if not self._there.has([f"stack/{digest}"]):
            self._there.publish(f"stack/{digest}", stored)
        if self._own is not None:
            self._there.delete([self._own])
        index = SharedList(self._there, f"answers/{self.number}").append([digest, *evidence.encoded(answer)])
        self._own = f"answers/{self.number}/{index}"

    def look_for_others(self) -> None:
        """Look at processes of this host if the rank that asks wants it from this one."""
        deadline = time.monotonic() + ANSWERS
        while time.monotonic() < deadline and not self._wait(1.0):
            wanted = self._there.try_get(f"look/{self.number}")
            if wanted is not None:
                if str(self._rank) in wanted:
                    seen = evidence.looked_at(map(int, wanted[str(self._rank)]))
                    self._there.publish(f"seen/{self.number}/{self._rank}", seen)
                return

    def gather(self, since: float) -> Found:
        """Return what all ranks say to the question that this rank has asked at a time of the monotonic clock."""
        listed = SharedList(self._there, f"answers/{self.number}")
        while listed.count() < self._world_size and time.monotonic() < since + ANSWERS:
            if self._wait(min(1.0, max(0.0, since + ANSWERS - time.monotonic()))):
                break
        listed.read_new()
        values = [one for one in listed.values if isinstance(one, list) and one]
        digests = list(dict.fromkeys(str(one[0]) for one in values))
        stored = self._there.get_present([f"stack/{digest}" for digest in digests])
        answers: dict[int, Answer] = {}
        stacks: dict[str, list[int]] = {}
        for digest, *said in values:
            stack, text = stored.get(f"stack/{digest}", ((), ""))
            answer = evidence.decoded(said, stack)
            if answer is not None:
                answers[answer.rank] = answer
                stacks.setdefault(str(text), []).append(answer.rank)
        absent = self._absent(answers)
        return Found([answers[rank] for rank in sorted(answers)], absent, stacks)

    def _absent(self, answers: Mapping[int, Answer]) -> list[Absent]:
        """Return the ranks that have or had a session, and do not answer."""
        missing = [rank for rank in range(self._world_size) if rank not in answers][:_MOST_ABSENT]
        at = self._there.get_present([f"at/{rank}" for rank in missing])
        places = {rank: at[f"at/{rank}"] for rank in missing if f"at/{rank}" in at}
        hosts: dict[str, list[int]] = {}
        for host, pid, is_here in places.values():
            if is_here:
                hosts.setdefault(str(host), []).append(int(pid))
        seen = self._seen(hosts, answers)
        return [
            Absent(rank, str(host), int(pid), seen.get((host, pid), "silent") if is_here else "finished")
            for rank, (host, pid, is_here) in places.items()
        ]

    def _seen(self, hosts: dict[str, list[int]], answers: Mapping[int, Answer]) -> dict[tuple[str, int], Missing]:
        here = hosts.pop(self._host, [])
        lookers: dict[str, int] = {}
        for rank in sorted(answers, reverse=True):
            if answers[rank].host in hosts:
                lookers[answers[rank].host] = rank
        self._there.publish(f"look/{self.number}", {str(rank): hosts[host] for host, rank in lookers.items()})
        seen = {(self._host, pid): kind for pid, kind in (evidence.looked_at(here) if here else {}).items()}
        keys = {f"seen/{self.number}/{rank}": host for host, rank in lookers.items()}
        deadline = time.monotonic() + _LOOK
        while keys and time.monotonic() < deadline and not self._there.has(list(keys)) and not self._wait(0.5):
            pass
        for key, kinds in self._there.get_present(list(keys)).items() if keys else ():
            seen.update({(keys[key], int(pid)): kind for pid, kind in kinds.items()})
        return seen

    @property
    def _there(self) -> JobStore:
        if self._store is None:
            raise RuntimeError("there is no store yet")
        return self._store
