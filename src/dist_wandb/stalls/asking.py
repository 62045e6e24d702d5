"""The question where all ranks are, and its answers, through the job's store. Nothing blocks in the store.

Keys: ``ask/N``, claimed by the rank that asks the question number N; ``rank/RANK``, what a rank
has said last: that it has a session, that it has finished it, or an answer and the number of its question, which only
the rank that asks reads; ``answers/N``, how many have answered; ``stack/DIGEST``, stacks that several ranks may share;
``told/N``, the message to which a question has led, and ``alerted/N``, claimed by the rank that sends it as an alert;
``on/HOST``, a list of the ranks on a host, with their processes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dist_wandb.stalls.verdict import Answer, Calls, StalledRank
from dist_wandb.store.job_store import JobStore, SharedList
from dist_wandb.store.timed_caller import STORE_PATIENCE, TimedCaller
from dist_wandb.topology.launch import node_identity

ANSWERS = 8.5  # seconds in which ranks answer: a pause between two looks at the store, evidence, and the store
_MOST = 28 * 1024  # characters of the stacks that one rank publishes; with its answer, 32 KiB


class Questions:
    """One rank's part in questions and answers. All methods may raise as `JobStore` does if it does not answer."""

    def __init__(self, store: JobStore, here: StalledRank) -> None:
        self._topology, self._here = store.topology, here
        self._store = store.beside("watch", TimedCaller(STORE_PATIENCE))  # on a connection of its own
        self._on_host = SharedList(self._store, f"on/{node_identity()}")
        self.neighbours: dict[int, int] = {}  # processes of the ranks on this host, by rank
        self._on_host.append_once(f"{here.rank} {here.pid}")  # a process may open many sessions
        self._say(Answer(here))
        self.number: int = 0  # of the last question
        while self.is_asked():  # before this session
            pass

    def leave(self) -> None:
        """Tell the others that this rank has no session any more."""
        self._say(Answer(self._here._replace(kind="finished")))

    def is_asked(self) -> bool:
        """Return whether another rank has asked."""
        if len(self.neighbours) < (self._topology.local_world_size or self._topology.world_size):
            for one in self._on_host.read_new():
                rank, pid = map(int, one.split())
                self.neighbours[rank] = pid
        is_asked = self._store.has([f"ask/{self.number + 1}"])
        self.number += is_asked
        return is_asked

    def claim(self) -> bool:
        """Ask, unless another rank has just done so; return whether this one asks."""
        self.number += 1
        return bool(self._store.claim(f"ask/{self.number}", self._here.rank) == self._here.rank)

    def answer(self, answer: Answer, text: str) -> None:
        """Say where this rank stands; `text` has all its stacks."""
        digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
        if not self._store.has([f"stack/{digest}"]):
            self._store.publish(f"stack/{digest}", text[:_MOST])
        self._say(answer._replace(question=self.number, stacks=digest))
        self._store.count(f"answers/{self.number}")

    def _say(self, answer: Answer) -> None:
        self._store.publish(f"rank/{self._here.rank}", answer)

    def gather(self, since: float, wait: Callable[[float], object]) -> tuple[list[Answer], dict[str, list[int]]]:
        """Return what is known of all ranks, and their stacks with the ranks of which they are.

        This rank has asked at a time of the monotonic clock. `wait` returns whether the watcher ends.
        """
        size, counter = self._topology.world_size, f"answers/{self.number}"
        while (self._store.try_get(counter) or 0) < size and time.monotonic() < since + ANSWERS and not wait(0.5):
            pass
        found = self._store.get_present([f"rank/{rank}" for rank in range(size)])
        said = [one for one in map(_decoded, found.values()) if one is not None]
        answers = [one for one in said if one.question == self.number]
        seen = {rank: kind for one in reversed(answers) for rank, kind, _ in one.seen}  # by the lowest rank of the host
        stacks: dict[str, list[int]] = {}
        for one in answers:
            stacks.setdefault(f"stack/{one.stacks}", []).append(one.place.rank)
        texts = self._store.get_present(list(stacks))
        for last in [one.place for one in said if one.question != self.number]:
            kind = last.kind if last.kind == "finished" else seen.get(last.rank, "silent")
            answers.append(Answer(StalledRank(last.rank, kind, host=last.host, pid=last.pid)))
        return answers, {str(text): stacks[key] for key, text in texts.items()}

    def tell(self, message: str) -> None:
        """Publish to which message the last question has led; empty if no other rank is to send the alert."""
        self._store.publish(f"told/{self.number}", message)

    def told(self) -> str | None:
        """Return the message to which the last question has led, if any."""
        return self._store.try_get(f"told/{self.number}")

    def may_alert(self) -> bool:
        """Return whether this rank is the first of those that can send the alert."""
        return bool(self._store.claim(f"alerted/{self.number}", self._here.rank) == self._here.rank)


def _decoded(found: Any) -> Answer | None:
    """Return what a rank has published; `None` if no rank can have written it."""
    with suppress(TypeError, ValueError, AttributeError):
        answer = Answer(*found)
        calls = {name: Calls(*one) for name, one in answer.calls.items()}
        return answer._replace(place=StalledRank(*answer.place), calls=calls)
    return None
