"""The facts in a job's description and ledgers: the writers, and the ranks that did not end normally."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drawing import ABSENT, FATAL, HARD, Spec
from ledger import Entry

from dist_wandb.job.topology import Topology
from dist_wandb.settings.plan import plan_run

_SUPERVISING = ("torchrun", "spawn", "lightning")  # launchers that end all ranks when one fails
_TERMINATED = 143


# Warnings of a rank whose values are not combined with those of the others: it was late, returned too late, or ended.
_ALONE = (
    "nothing that it logs is combined",
    "logged meanwhile is not combined",
    "are written with its own numbers",
    "continues alone",
)
_DISK_FULL = "could be written to disk"
_NUMBERS_ONLY = "could write only the numbers"


@dataclass(frozen=True)
class Writer:
    rank: int  # global rank
    session: int
    run_id: str
    directory: int | None  # rank whose directory contains the files; `None` if it is not the directory of one rank
    primary: bool  # whether the rank writes plain names
    label: str | None  # label under which it writes its own values; `None` if it does not write them
    unit: frozenset[int]  # ranks whose values are reduced together


@dataclass(frozen=True)
class Facts:
    """The events of a job, according to its ranks."""

    spec: Spec
    opened: dict[int, list[int]]  # sessions that each rank opened
    fatal: dict[int, str]  # the fault that ended a rank early, by rank
    broken: frozenset[int]  # ranks that did not reach the end of their script
    reported_lost: frozenset[int]  # ranks whose logged values may be lost, according to a warning
    given_up: frozenset[int]  # ranks without which others continued, according to their warnings
    # ranks whose values are no longer reduced with those of the others, according to their own warning
    left_alone: frozenset[int]
    # ranks that could not write all of their run to disk, according to their own warning
    disk_full: frozenset[int] = frozenset()
    # ranks that lost the tables of the rows of the last seconds with wandb's process, according to their own warning
    numbers_only: frozenset[int] = frozenset()

    @classmethod
    def of(cls, spec: Spec, entries: Sequence[Entry]) -> Facts:
        ended = {entry["rank"] for entry in entries if entry["event"] == "end"}
        faults = {entry["rank"]: entry["kind"] for entry in entries if entry["event"] == "fault"}
        opened: dict[int, list[int]] = {rank: [] for rank in range(spec.world_size)}
        for entry in entries:
            if entry["event"] == "opened":
                opened[entry["rank"]].append(entry["session"])
        said = [(entry["rank"], entry["text"]) for entry in entries if entry["event"] == "warning"]
        texts = [text for _, text in said]
        lost = [re.findall(r"rank (\d+) (?:logged .* may be lost|stalled.* meanwhile is lost)", text) for text in texts]
        gone = [
            re.findall(
                r"(?i)ranks? ([\d, ]+) (?:after (?:step|row|the start)|(?:opened a session, but )?did not|"
                r"(?:ended|failed) after)",
                text,
            )
            for text in texts
        ]
        return cls(
            spec,
            opened,
            {rank: kind for rank, kind in faults.items() if kind in FATAL},
            frozenset(range(spec.world_size)) - ended,
            frozenset(int(rank) for found in lost for rank in found),
            frozenset(int(rank) for found in gone for ranks in found for rank in ranks.split(", ") if rank),
            frozenset(rank for rank, text in said if any(part in text for part in _ALONE)),
            frozenset(rank for rank, text in said if _DISK_FULL in text),
            frozenset(rank for rank, text in said if _NUMBERS_ONLY in text),
        )

    @property
    def hard(self) -> frozenset[int]:
        return frozenset(rank for rank, kind in self.fatal.items() if kind in HARD) | self.ended_by_launcher

    @property
    def ended_by_launcher(self) -> frozenset[int]:
        """Ranks that a launcher may have ended because another rank failed."""
        if self.spec.launcher not in _SUPERVISING or not self.fatal:
            return frozenset()
        return self.broken - set(self.fatal)

    @property
    def has_faults(self) -> bool:
        return bool(self.spec.faults)

    @property
    def has_reasons(self) -> bool:
        is_unusual = self.spec.server not in ("offline", "healthy") or self.spec.guarded or self.spec.nofile
        return bool(self.spec.faults or is_unusual)

    def process_codes(self, rank: int) -> set[int]:
        """Return the possible exit codes of a rank's process, unless a launcher ends it."""
        kind = self.fatal.get(rank)
        if kind is None:
            return {0}
        (fault,) = self.spec.faults_of(rank, kind)
        return {{"kill": -9, "term": -15, "raise": 1}.get(kind, int(fault.value))}

    def run_codes(self, writer: Writer) -> set[int | None]:
        reduction = self.spec.reduction("loss")
        concerned = {writer.rank} if self.spec.run_mode == "new" and self.spec.world_size > 1 else writer.unit
        failed = {rank: kind for rank, kind in self.fatal.items() if rank in concerned}
        codes: set[int | None] = set()
        for rank, kind in failed.items():
            (fault,) = self.spec.faults_of(rank, kind)
            codes.add({"term": _TERMINATED, "exit": int(fault.value)}.get(kind, 1))
            if rank in self.given_up or writer.rank in self.left_alone:
                codes.add(0)  # it was late, and may have failed after the run's end, or without having met the writer
        if (concerned & self.given_up).difference(self.fatal, {writer.rank}):
            codes |= {0, 1}  # a stalled rank counts as failed if it is still away when the run ends
        if concerned & self.ended_by_launcher:
            codes |= {_TERMINATED, 1, None}
        if self.spec.launcher in _SUPERVISING and failed.keys() - {writer.rank}:
            codes.add(_TERMINATED)  # the launcher's SIGTERM comes while this rank finishes
        return codes | {0} if reduction is None or not codes else codes

    def is_alone(self, writer: Writer, reduction: str | None) -> bool:
        return reduction is None or len(writer.unit) == 1

    def writers(self) -> Iterator[Writer]:
        for rank, sessions in self.opened.items():
            plan_of = self._topology(rank)
            for session in sessions:
                plan = plan_run(plan_of, self.spec.run_mode, self.spec.rank_scope, base_id=f"s{session}")
                if plan.opens_run and plan.run_id is not None:
                    directory = rank if plan.own_directory else None
                    unit = self._unit(rank)
                    yield Writer(rank, session, plan.run_id, directory, plan.primary, plan.label, unit)

    def _unit(self, rank: int) -> frozenset[int]:
        present = frozenset(range(self._primary, self.spec.world_size))
        if self.spec.rank_scope == "global":
            return present
        node = self.spec.place(rank)[0]
        return frozenset(other for other in present if self.spec.place(other)[0] == node)

    @property
    def _primary(self) -> int:
        """The rank that writes: the next one, if rank 0 never opens a session."""
        return 1 if self.spec.faults_of(0, *ABSENT) else 0

    def _topology(self, rank: int) -> Topology:
        (node, local), sizes = self.spec.place(rank), self.spec.nodes
        found = Topology(rank, local, node, self.spec.world_size, sizes[node], len(sizes))
        return found.led_by(self._primary or None)
