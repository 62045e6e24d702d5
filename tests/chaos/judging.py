"""Compare the evidence of a job with what its ranks logged according to their ledgers, and report broken promises.

Values that are lost with a dead rank are not a violation if a row reports it (`dist_wandb/degraded`), or a living rank.
The judge counts these excuses, so that a package that loses values in every job and reports it does not look good.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from calls import Cells, Column, Contribution, calls_of, cells_of, deviation, differing_axes, uneven_names
from chaos_facts import Facts, Writer
from drawing import ABSENT, HARD, NOTE, seeds_of
from driving import Evidence, Row, RunFile
from row_rules import DEGRADED, REGULAR, RowRules, Violation, brief

SAME_EVENT = 2
"""How often a rank may emit the same warning, except for numbers and names, for each event of a session."""
MORE_DESCRIPTORS, MORE_THREADS = (
    8,
    2,
)  # that later sessions of a process may hold in addition to those of the second one

_ATTACHED = ("table", "metric")  # names of values that have no label
_RANKS = r"ranks? ([\d, -]*\d)(?: \(nodes? [\d-]+\))?"  # as in messages
# Messages without any fault: how to upload, and those caused by ranks with their own order of steps.
_QUIET = re.compile(r"wandb sync|rank \d+'s own|A corrected row follows")


@dataclass
class Verdict:
    violations: list[Violation] = field(default_factory=list)
    excused: Counter[str] = field(default_factory=Counter)
    cells: int = 0


@dataclass(frozen=True)
class _Found:
    """A number on disk: its contributors, how many ranks are missing according to the row, and the file."""

    ranks: frozenset[int]
    missing: int
    file: int


def judge(evidence: Evidence) -> Verdict:
    facts, verdict = Facts.of(evidence.spec, evidence.entries), Verdict()
    checks: Iterable[Iterator[Violation]] = (
        _of_ends(evidence, facts),
        _of_leftovers(evidence, facts),
        _of_messages(evidence, facts),
        _of_growth(evidence),
        _of_runs(evidence, facts),
        _of_rows(evidence, facts, verdict),
        _of_arrival(evidence, facts),
    )
    if None in evidence.codes:
        verdict.violations.append(Violation("hang", f"not over in time; ranks without an end: {sorted(facts.broken)}"))
        return verdict
    verdict.violations.extend(itertools.chain.from_iterable(checks))
    return verdict


# --- processes and files ----------------------------------------------------------------------------------------------


def _of_ends(evidence: Evidence, facts: Facts) -> Iterator[Violation]:
    spec = evidence.spec
    if spec.launcher in ("processes", "accelerate"):
        for rank, code in enumerate(evidence.codes):
            if code not in (expected := facts.process_codes(rank)):
                yield Violation("exit code", f"of the process of rank {rank}: {code}, not {sorted(expected)}")
    elif any(evidence.codes) is not bool(facts.fatal):
        yield Violation("exit code", f"of the launcher: {evidence.codes}, while {sorted(facts.fatal)} failed")
    if not facts.fatal and facts.broken:
        yield Violation("rank ended early", f"{sorted(facts.broken)}, though nothing happened to them")


def _of_leftovers(evidence: Evidence, facts: Facts) -> Iterator[Violation]:
    for name in evidence.alive:
        yield Violation("process left", name)
    forgiven = facts.broken or evidence.spec.has("tmp_gone", "core_kill")
    theirs = ("torchelastic_", "torchinductor_", *(["tmp"] if evidence.spec.launcher == "lightning" else []))
    ours = [name for name in evidence.left if not name.startswith(theirs)]  # torch and Lightning leave these
    if ours and not forgiven:
        yield Violation("file left", f"{len(ours)} in TMPDIR: {ours[:5]}")


def _of_growth(evidence: Evidence) -> Iterator[Violation]:
    by_rank: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for entry in evidence.entries:
        if entry["event"] == "held":
            by_rank[entry["rank"]].append(entry)
    for rank, held in by_rank.items():
        for what, more in (("descriptors", MORE_DESCRIPTORS), ("threads", MORE_THREADS)):
            counts = [entry[what] for entry in held]
            if len(counts) > 3 and counts[-1] > counts[1] + more:
                yield Violation("growth", f"{what} of rank {rank} after each session: {counts}")


# --- messages ---------------------------------------------------------------------------------------------------------


def _of_messages(evidence: Evidence, facts: Facts) -> Iterator[Violation]:
    spec = evidence.spec
    events = 1 + len(spec.faults) + (spec.server not in ("offline", "healthy"))
    sessions = calls_of(evidence.entries).values()
    differing = {axis for calls in sessions for axis in differing_axes(calls)}
    uneven = {name for calls in sessions for name in uneven_names(calls)}
    warning_counts: Counter[tuple[int, str]] = Counter()
    for entry in evidence.entries:
        if entry["event"] == "warning":
            warning_counts[entry["rank"], kind_of(entry["text"])] += 1
            if entry["trace"]:
                yield Violation("traceback", f"rank {entry['rank']}: {entry['text'][:300]}")
            elif not facts.has_reasons and not _is_expected(entry["text"], differing, uneven):
                yield Violation("warning without a reason", f"rank {entry['rank']}: {entry['text'][:300]}")
    yield from _of_untrue_messages(evidence, facts)
    for (rank, kind), number in warning_counts.items():
        if number > SAME_EVENT * events * spec.session_count:
            yield Violation("flood", f"rank {rank} said {number} times: {kind[:300]}")
    for trace in _tracebacks(evidence.output):
        # After SIGTERM, its thread ends the session first.
        is_late = "after the session was finished" in trace and facts.fatal
        if "dist_wandb" in trace and "ChaosError" not in trace and "SystemExit" not in trace and not is_late:
            yield Violation("traceback", trace[-600:])
    # An agent of torchrun whose peer has ended prints one of its own at its exit barrier.
    stacks = evidence.output.count("recvValue failed") - evidence.output.count("Error waiting on exit barrier")
    if stacks > 0 and "dist_wandb:" not in evidence.output:
        yield Violation("torch's stack", "with no line that explains it")


def _is_expected(text: str, differing: Iterable[str], uneven: Iterable[str]) -> bool:
    """Return whether a message may appear without a fault.

    Also that of an axis whose values differ between ranks, and that of names that they logged unequally often.
    """
    causes = {"differ": differing, "was logged without a step": {repr(name) for name in uneven}}
    return _QUIET.search(text) is not None or any(
        word in text and any(name in text for name in names) for word, names in causes.items()
    )


def _of_untrue_messages(evidence: Evidence, facts: Facts) -> Iterator[Violation]:
    for entry in evidence.entries:
        if entry["event"] == "warning" and facts.has_reasons and not _is_true(entry, facts):
            yield Violation("untrue message", f"rank {entry['rank']}: {entry['text'][:300]}")


def _is_true(entry: Mapping[str, Any], facts: Facts) -> bool:
    """Return whether something has happened to the ranks that a message calls failed, lost or out of reach."""
    spec, text = facts.spec, entry["text"]
    if spec.has("tmp_gone") or spec.server in ("dies", "dead"):  # that concerns all ranks
        return True
    hurt = {fault.rank for fault in spec.faults} | facts.broken
    able_to_fail = facts.broken - {rank for rank, kind in facts.fatal.items() if kind in HARD}
    failed, lost = (
        {rank for ranks in re.findall(pattern, text) for rank in seeds_of(ranks)}
        for pattern in (rf"(?i){_RANKS} failed (?:after|before)", rf"(?i)lost {_RANKS} after")
    )
    is_cut_off = "the rank that writes it cannot be reached" in text
    writers = {min(writer.unit) for writer in facts.writers() if entry["rank"] in writer.unit}
    gone = hurt | facts.left_alone  # also a rank that has waited for the others until its time was over
    return failed <= able_to_fail and lost <= hurt and not (is_cut_off and gone.isdisjoint({entry["rank"], *writers}))


def kind_of(text: str) -> str:
    """Return a message without its numbers and names."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"|/\S+", "~", text)
    text = re.sub(r"(~|\d[\d.,]*)((, | and |-)(~|\d[\d.,]*))*", "~", text)
    return re.sub(r"\b\w*_~|~_\w*", "~", text)


def _tracebacks(output: str) -> list[str]:
    return re.findall(r"^(?:.*)Traceback \(most recent call last\):\n(?:[ \[].*\n|\n)*.*$", output, re.MULTILINE)


# --- runs -------------------------------------------------------------------------------------------------------------


def _of_runs(evidence: Evidence, facts: Facts) -> Iterator[Violation]:
    for problem in evidence.unknown:
        yield Violation("unknown to the server", problem[:300])
    calls = calls_of(evidence.entries)
    for writer in facts.writers():
        files = files_of(evidence, writer.run_id, writer.directory)
        logged = {call.rank for call in calls[writer.session]} & writer.unit
        # No rank takes the place of an absent rank 0 for what the ranks that have logged say is lost.
        is_lost = bool(evidence.spec.faults_of(0, *ABSENT) and logged) and logged <= facts.reported_lost
        hard = bool(evidence.spec.faults_of(writer.rank, *HARD)) or writer.rank in facts.ended_by_launcher
        hard = hard or writer.rank in facts.disk_full
        if not files:
            if not hard and not is_lost:
                yield Violation("no run", f"{writer.run_id} of rank {writer.rank} is not on disk")
            continue
        code = files[-1].exit_code
        expected = facts.run_codes(writer)
        if writer.primary and not hard and code not in expected:
            yield Violation("exit code", f"of the run {writer.run_id}: {code}, not {sorted(expected, key=str)}")


def files_of(evidence: Evidence, run_id: str, directory: int | None) -> list[RunFile]:
    return [file for file in evidence.files if file.run_id == run_id and file.writer == directory]


def _of_arrival(evidence: Evidence, facts: Facts) -> Iterator[Violation]:
    """Check that all rows on disk are at the server, if the server recovered, and all ranks ended normally."""
    spec = evidence.spec
    if spec.server not in ("healthy", "errors", "drops") or facts.broken or spec.has("core_kill"):
        return
    stored: dict[str, Counter[str]] = defaultdict(Counter)
    for file in evidence.files:
        stored[file.run_id].update(map(_canonical, file.rows))
    for run_id, rows in stored.items():
        arrived = Counter(map(_canonical, evidence.arrived.get(run_id, [])))
        if lacking := rows - arrived:
            yield Violation("not at the server", f"{run_id}: {lacking.total()} rows, as {next(iter(lacking))}")
        if more := arrived - rows:
            yield Violation("twice at the server", f"{run_id}: {more.total()} rows, as {next(iter(more))}")


def _canonical(row: Row) -> str:
    numbers = {
        name: value for name, value in row.items() if isinstance(value, int | float) and not name.startswith("_")
    }
    return str(sorted((name, float(value)) for name, value in numbers.items() if "." not in name))


# --- rows -------------------------------------------------------------------------------------------------------------


def _of_rows(evidence: Evidence, facts: Facts, verdict: Verdict) -> Iterator[Violation]:
    """Check each number, then each row: see `row_rules`."""
    calls = calls_of(evidence.entries)
    for writer in facts.writers():
        files = files_of(evidence, writer.run_id, writer.directory)
        columns = list(_columns(evidence, facts, writer, cells_of(calls[writer.session])))
        for column in columns:
            yield from _Check(evidence, facts, verdict, files, writer.rank, column).violations()
        unit = {writer.rank} if not writer.primary or evidence.spec.reduction("loss") is None else writer.unit
        theirs = [call for call in calls[writer.session] if call.rank in unit]
        yield from RowRules(evidence.spec, facts, verdict.excused, files, writer, columns, theirs).violations()


def _columns(evidence: Evidence, facts: Facts, writer: Writer, contributions: Mapping[str, Cells]) -> Iterator[Column]:
    spec = evidence.spec
    for name, cells in contributions.items():
        if name.startswith("table") and spec.run_mode == "new" and writer.rank != min(writer.unit):
            continue  # gathered values are only in the run of the first rank
        own = {cell: {writer.rank: ranks[writer.rank]} for cell, ranks in cells.items() if writer.rank in ranks}
        reduction = spec.reduction(name)
        is_own = reduction == "own" or facts.is_alone(writer, reduction)
        if writer.primary:
            ours = own if is_own else _of_unit(cells, writer.unit, reduction)
            yield Column(name, name, reduction or "mean", ours, facts.has_faults)
        has_label = writer.label and spec.per_rank and reduction is not None and not name.startswith(_ATTACHED)
        if has_label and not (name == NOTE and writer.primary):
            yield Column(name, f"{writer.label}/{name}", "own", own, facts.has_faults)


def _of_unit(cells: Cells, unit: frozenset[int], reduction: str | None) -> Cells:
    """Return the contributions that are reduced together; only those of the first rank for `"first"`."""
    members = {min(unit)} if reduction == "first" else unit
    chosen = {cell: {rank: given for rank, given in ranks.items() if rank in members} for cell, ranks in cells.items()}
    return {cell: ranks for cell, ranks in chosen.items() if ranks}


@dataclass(frozen=True)
class _Check:
    """The check of one name in one writer's run."""

    evidence: Evidence
    facts: Facts
    verdict: Verdict
    files: list[RunFile]
    writer: int
    column: Column

    def violations(self) -> Iterator[Violation]:
        column = self.column
        found: dict[int, _Found] = {}
        for number_of_file, file in enumerate(self.files):
            for row in file.rows:
                if column.column not in row:
                    continue
                if (meaning := column.meaning(row[column.column])) is None:
                    yield self._violation(
                        "wrong value", f"{row[column.column]}, which no ranks' numbers give, in {brief(row)}"
                    )
                    continue
                now = _Found(meaning.ranks, int(row.get(DEGRADED, 0)), number_of_file)
                before = found.get(meaning.cell)
                if before is not None and before.file != now.file and before.ranks == now.ranks:
                    if self.evidence.spec.has("core_kill"):  # rows of its last seconds may be in both files
                        self.verdict.excused["written again"] += 1
                    else:
                        yield self._violation("twice", f"place {meaning.cell}, in two files")
                yield from self._of_spread(row, meaning.cell, meaning.ranks)
                found[meaning.cell] = now  # a later row corrects it
        for cell, ranks_of_cell in column.cells.items():
            self.verdict.cells += 1
            yield from self._of_cell(cell, ranks_of_cell, found.get(cell))

    def _violation(self, kind: str, text: str) -> Violation:
        return Violation(kind, f"{self.column.column} of rank {self.writer}'s run: {text}")

    def _of_cell(self, cell: int, ranks: dict[int, Contribution], found: _Found | None) -> Iterator[Violation]:
        certain = {rank for rank, given in ranks.items() if given.is_certain}
        if found is None:
            yield from self._of_lost(cell, certain)
            return
        lacking = certain - found.ranks
        if not self.column.identifies_ranks:
            lacking = set() if found.missing else lacking
        if lacking and found.missing:
            self.verdict.excused["flagged"] += 1
        elif lacking and (self.writer in self.facts.left_alone or lacking <= self.facts.left_alone):
            self.verdict.excused["said to be alone"] += 1
        elif lacking and lacking <= self.facts.reported_lost:
            self.verdict.excused["said to be lost"] += 1
        elif lacking and lacking <= self.facts.broken and (self._is_irregular or self._is_early(lacking)):
            self.verdict.excused["died with it"] += 1
        elif lacking and self.writer in self.facts.disk_full:
            self.verdict.excused["disk full"] += 1
        elif lacking:
            yield self._violation("silently wrong", f"place {cell} lacks rank {sorted(lacking)}")

    def _of_lost(self, cell: int, certain: set[int]) -> Iterator[Violation]:
        survivors = certain - self.facts.broken
        if self.writer in self.facts.hard:
            self.verdict.excused["writer killed"] += 1
        elif self.writer in self.facts.broken and self.writer not in certain:
            self.verdict.excused["writer failed"] += 1
        elif not survivors and self.writer not in certain:
            self.verdict.excused["died with it"] += bool(certain)
        elif survivors <= self.facts.reported_lost and self.writer not in certain:
            self.verdict.excused["said to be lost"] += 1
        elif self.writer not in certain and (self.writer in self.facts.left_alone or certain <= self.facts.left_alone):
            self.verdict.excused["said to be alone"] += 1
        elif self.evidence.spec.run_mode == "new" and certain <= self.facts.given_up | self.facts.left_alone:
            self.verdict.excused["given up"] += 1
        elif self.writer in self.facts.disk_full:
            self.verdict.excused["disk full"] += 1
        elif self.column.name.startswith("table") and self.writer in self.facts.numbers_only:
            self.verdict.excused["lost with wandb's process"] += 1
        elif self.column.name.startswith("table") and self.evidence.spec.has("tmp_gone"):
            self.verdict.excused["no directory for tables"] += 1
        else:
            yield self._violation("lost", f"place {cell}, of rank {sorted(certain)}")

    def _of_spread(self, row: Row, cell: int, ranks: frozenset[int]) -> Iterator[Violation]:
        name = self.column.column
        has_spread = self.column.reduction not in ("own", "first", "min", "max") and f"{name}/argmax_rank" in row
        given = self.column.cells[cell]
        if not has_spread or ranks != frozenset(given):
            return
        at = max(ranks, key=lambda rank: given[rank].value)
        expected = {
            "min": min(given[rank].value for rank in ranks),
            "max": given[at].value,
            "std": deviation([given[rank] for rank in ranks]),
            "argmax_rank": at,
        }
        written = {kind: float(row.get(f"{name}/{kind}", math.nan)) for kind in expected}
        if not all(math.isclose(written[kind], number, abs_tol=1e-6) for kind, number in expected.items()):
            yield self._violation("wrong spread", f"place {cell}: {written}, not {expected}")

    @property
    def _is_irregular(self) -> bool:
        """Whether it is unknown which ranks should contribute."""
        return self.column.name.partition("_")[0] not in REGULAR

    def _is_early(self, lacking: set[int]) -> bool:
        """Return whether the name was so new that its missing ranks are not yet expected."""
        cells = self.column.cells
        return all(rank in cells[min(cells)] for rank in lacking) and len(cells) <= 2
