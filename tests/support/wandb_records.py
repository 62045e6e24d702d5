"""The records that a stand-in for the W&B server keeps of its clients' runs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PLAIN = ""  # the client of a plain run: its writers cannot be distinguished
ENTITY, PROJECT = "tester", "uncategorized"

# What an upsert sets, by the names of the variables that hold it.
_SET = {"groupName": "group", "jobType": "job_type", "displayName": "display_name", "config": "stored_config"}
_SET |= {name: name for name in ("notes", "tags", "sweep")}
HISTORY, EVENTS, CONSOLE, SUMMARY = "wandb-history.jsonl", "wandb-events.jsonl", "output.log", "wandb-summary.json"


@dataclass(frozen=True)
class Upsert:
    """One `UpsertBucket`: the values that it set, by their names as attributes of `RecordedRun`."""

    client: str
    values: Mapping[str, Any]


class _Streamed:
    """Files that are streamed line by line."""

    def lines(self, name: str) -> list[str]:
        """Return the lines of one file, of each writer in the order of their offsets."""
        raise NotImplementedError

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines(HISTORY)]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines(EVENTS)]

    @property
    def console(self) -> list[str]:
        return self.lines(CONSOLE)


@dataclass
class WriterRecord(_Streamed):
    """The stream of one writer of a run: of a client of a shared run, or of all writers of a plain run.

    Lines are stored by the offset that the writer sent, so a line sent twice counts once, and a second writer of a
    plain run overwrites the lines of the first.
    """

    client: str
    placed: dict[str, dict[int, str]] = field(default_factory=dict)  # lines by file and offset
    summary: dict[str, Any] = field(default_factory=dict)
    completions: int = 0
    exit_codes: list[int] = field(default_factory=list)

    def lines(self, name: str) -> list[str]:
        return [line for _, line in sorted(self.placed.get(name, {}).items())]

    def take(self, message: Mapping[str, Any]) -> None:
        """Record one request of the file stream."""
        for name, chunk in (message.get("files") or {}).items():
            content = chunk["content"]
            if name == SUMMARY:
                self.summary = json.loads(content[-1])
            else:
                placed = enumerate(content, start=chunk.get("offset") or 0)
                self.placed.setdefault(name, {}).update(placed)
        if message.get("complete"):
            self.completions += 1
            self.exit_codes.append(message["exitcode"])


@dataclass
class RecordedRun(_Streamed):
    """The records of one run; values are the last ones received."""

    entity: str
    project: str
    run_id: str
    group: str | None = None
    job_type: str | None = None
    display_name: str | None = None
    notes: str | None = None
    tags: tuple[str, ...] = ()
    sweep: str | None = None
    # every key with its `value`, and W&B's own values under `_wandb`
    stored_config: dict[str, Any] = field(default_factory=dict)
    upserts: list[Upsert] = field(default_factory=list)  # in the order of arrival
    writers: dict[str, WriterRecord] = field(default_factory=dict)  # by client id; `PLAIN` is that of a plain run
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.entity}/{self.project}/{self.run_id}"

    @property
    def summary(self) -> dict[str, Any]:
        return {name: value for writer in self.writers.values() for name, value in writer.summary.items()}

    @property
    def completions(self) -> int:
        return sum(writer.completions for writer in self.writers.values())

    @property
    def exit_codes(self) -> list[int]:
        return [code for writer in self.writers.values() for code in writer.exit_codes]

    @property
    def config(self) -> dict[str, Any]:
        return {name: item["value"] for name, item in self.stored_config.items() if name != "_wandb"}

    @property
    def metric_definitions(self) -> list[dict[str, Any]]:
        definitions: list[dict[str, Any]] = self.own_config.get("m", [])
        return definitions

    @property
    def own_config(self) -> dict[str, Any]:
        value: dict[str, Any] = self.stored_config.get("_wandb", {}).get("value", {})
        return value

    def rewind(self, step: float) -> None:
        """Forget the rows after a step of W&B."""
        for writer in self.writers.values():
            lines = writer.placed.get(HISTORY, {})
            writer.placed[HISTORY] = {at: line for at, line in lines.items() if json.loads(line)["_step"] <= step}

    def line_count(self, name: str) -> int:
        """Return the number of lines of one streamed file; in a plain run, including gaps before the last line."""
        placed = {client: writer.placed.get(name, {}) for client, writer in self.writers.items()}
        return sum(max(lines, default=-1) + 1 if client == PLAIN else len(lines) for client, lines in placed.items())

    def lines(self, name: str) -> list[str]:
        return [line for writer in self.writers.values() for line in writer.lines(name)]


@dataclass
class RecordedArtifact:
    artifact_id: str
    run: str  # the key of the run that logged it
    client: str
    name: str  # of its collection, without a version
    kind: str
    aliases: tuple[str, ...]
    digest: str = ""
    metadata: str | None = None
    used_by: list[str] = field(default_factory=list)  # keys of runs
    files: dict[str, bytes] = field(default_factory=dict)
    manifest: dict[str, Any] | None = None
    committed: bool = False

    @property
    def project(self) -> str:
        return self.run.rpartition("/")[0]


@dataclass
class Trial:
    """One trial: a run that does not exist until an agent has opened it."""

    run_id: str  # id that the server generated for its run
    values: dict[str, Any]  # values of the sweep's parameters
    agent: str = ""  # the agent that runs it; empty before any does
    is_stopped: bool = False  # whether its agent should stop it
    has_ended: bool = False  # whether its agent has reported that it no longer runs


@dataclass
class RecordedSweep:
    """A sweep over a grid."""

    name: str  # id of the sweep, as users write it
    config: dict[str, Any]  # the config passed to ``wandb.sweep``
    trials: list[Trial] = field(default_factory=list)  # all points of the grid, the last parameter varying fastest

    def __post_init__(self) -> None:
        parameters = self.config["parameters"]
        axes = [item["values"] if "values" in item else [item["value"]] for item in parameters.values()]
        for number, point in enumerate(itertools.product(*axes)):
            self.trials.append(Trial(f"{self.name}t{number}", dict(zip(parameters, point, strict=True))))

    def commands(self, agent: str, running: Mapping[str, bool]) -> list[dict[str, Any]]:
        """Stop trials that should be stopped; if none runs, start the next one; if none is left, end the agent."""
        mine = [trial for trial in self.trials if trial.agent == agent and not trial.has_ended]
        for trial in mine:
            trial.has_ended = trial.run_id not in running
        remaining = [trial for trial in mine if not trial.has_ended]
        if remaining:
            return [{"type": "stop", "run_id": trial.run_id} for trial in remaining if trial.is_stopped]
        following = next((trial for trial in self.trials if not trial.agent), None)
        if following is None:
            return [{"type": "exit"}]
        following.agent = agent
        values = {name: {"value": value} for name, value in following.values.items()}
        return [{"type": "run", "run_id": following.run_id, "args": values, "program": self.config.get("program")}]


@dataclass
class Records:
    runs: dict[str, RecordedRun] = field(default_factory=dict)
    artifacts: dict[str, RecordedArtifact] = field(default_factory=dict)
    sweeps: dict[str, RecordedSweep] = field(default_factory=dict)

    def versions(self, project: str, name: str) -> list[RecordedArtifact]:
        return [one for one in self.artifacts.values() if (one.project, one.name) == (project, name)]

    def is_stopped(self, run_id: str) -> bool:
        """Return whether a run is a trial that should be stopped; its own client is informed as well."""
        trials = (trial for sweep in self.sweeps.values() for trial in sweep.trials)
        return any(trial.is_stopped for trial in trials if trial.run_id == run_id)

    def upsert(self, variables: Mapping[str, Any], client: str) -> tuple[RecordedRun, bool]:
        """Record an upsert; return the run, and whether it is new."""
        run = RecordedRun(variables.get("entity") or ENTITY, variables.get("project") or PROJECT, variables["name"])
        is_new = run.key not in self.runs
        run = self.runs.setdefault(run.key, run)
        values = {name: value for sent, name in _SET.items() if (value := variables.get(sent)) is not None}
        if "stored_config" in values:
            values["stored_config"] = json.loads(values["stored_config"])
        values |= {"tags": tuple(values["tags"])} if "tags" in values else {}
        values |= {"sweep": None} if values.get("sweep") == "" else {}
        run.upserts.append(Upsert(client, values))
        vars(run).update(values)  # most upserts leave most values unchanged
        return run, is_new

    def stream(self, key: str, client: str, message: Mapping[str, Any]) -> None:
        """Record one request of a run's file stream; the run must have been upserted."""
        writer = self.runs[key].writers.setdefault(client, WriterRecord(client))
        writer.take(message)

    def put(self, kind: str, owner: str, name: str, content: bytes) -> None:
        """Record a file of a run or of an artifact, or an artifact's manifest; the owner must be known."""
        if kind == "run":
            self.runs[owner].files[name] = content
        elif kind == "artifact":
            self.artifacts[owner].files[name] = content
        elif kind == "manifest":
            self.artifacts[owner].manifest = json.loads(content)
        else:
            raise KeyError(kind)

    def get(self, kind: str, owner: str, name: str) -> bytes:
        artifact = self.artifacts[owner]
        return json.dumps(artifact.manifest).encode() if kind == "manifest" else artifact.files[name]


def column(run: RecordedRun, name: str, x: str = "global_step") -> dict[int, Any]:
    """Return the last written value of a name in a run by position on an x axis."""
    return {row[x]: row[name] for row in run.rows if name in row}
