"""Continuing the runs of an earlier start of the same job: its restart record, the arguments, and the next row.

Only the coordinator reads and writes records. The other ranks learn the base id from it, as at any start.

No single location survives all kinds of restart, so a record is kept in up to three:

- In the store of torchrun's agent, under a key without the attempt. It survives restarts of the processes in every
  rendezvous that shares it with them (tested: standalone, static, c10d, one node and two). A store that rank 0 hosts is
  lost with rank 0.
- In ``job-HASH.json``, by the name under which the launcher identifies the job again: for torchrun the directory that
  each agent creates for its workers' errors, which is random and the same for all attempts; for SLURM job and step. The
  hash also covers the command, because a job's script may run several. So jobs that share a directory do not continue
  each other's runs.
- In ``latest-HASH.json``, for ``resume="auto"``. Any start of the same session, project and owner in the directory
  replaces it: a start that does not ask for it starts anew, and only the latest can be continued.

Which one is used: after a restart by torchrun, the store, else the job's file; after a requeue by SLURM, the job's file
if it was written before this requeue; with ``resume="auto"``, the latest. An agent does not count a restart because of
another node (one that failed, or joined), but its processes then meet at another address. A record with another mode,
scope or project is ignored with a warning, because its run ids differ. An `id` given by the user takes precedence; if
it is the record's, the run is resumed, because W&B might otherwise overwrite a run that is opened again. A successful
end deletes the record. In the agent's store it is replaced by "ended", so that a script's first session is not
continued when its second one failed.

A record is validated when it is read. Files are used only if they belong to the user and are not links (`small_files`):
another user's record could redirect a job's rows into a run of that user's choice.

Without a store, ids are made from the job's name, which SLURM keeps over requeues, and every rank resumes with "allow".
Files are not read, because ranks might see different ones (except in `auto` with global scope, where only rank 0 has a
run).

The next row is the position on the x axis at which a resumed, rewound or forked run continues. When a process is
killed, its wandb-core sends nothing more, not even a completion. On resume, wandb-core requests `RunResumeStatus` and
continues after the server's line count; shared writers register as new clients. The response contains the run's
summary, whose `global_step` determines where rows without a step continue. For a shared run, the primary determines
this position and publishes it, because the summaries that other writers get may already contain rows of this start.
Offline, the newest earlier file with the same id is read (about 0.5 s).

For a rewound or forked run there is no summary. There, rows without a step continue at W&B's first step, which the run
knows; offline, older versions of wandb do not.
"""

from __future__ import annotations

import glob
import hashlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from dist_wandb.errors import ConfigurationError, ReadError, RendezvousError
from dist_wandb.job.job_store import JobStore
from dist_wandb.job.launch import Launch
from dist_wandb.job.topology import Topology
from dist_wandb.notices import Notices, warn
from dist_wandb.runs import requested, run_metadata
from dist_wandb.runs.null_run import AnyRun
from dist_wandb.settings.options import Options
from dist_wandb.settings.plan import RANK_SCOPES, RUN_MODES
from dist_wandb.wandb_files.small_files import own_directory, parse_json, read_small, write_small

_FORMAT = 1
DIRECTORY = "dist-wandb-resume"
_KEY = "restart"  # in the job's store
_MOST_FILES = 32  # files of one run that are searched for the last row; each takes about half a second
_notices = Notices()


@dataclass(frozen=True)
class RestartRecord:
    """A record that one start of a job writes for a later one."""

    base_id: str  # from which all run ids of the job are made; in a world of one, the run's id
    session: str  # name of the session, because a job may have several
    project: str | None  # name of the W&B project, if the user gave one
    entity: str | None  # owner of the project, if the user gave one
    run_mode: str
    rank_scope: str
    world_size: int
    job: str | None  # the launcher's name for the job, by which it can be found again, if there is one
    requeues: int  # how often SLURM had requeued the job
    rendezvous: str  # the launcher's name for this start
    format: int = _FORMAT

    @classmethod
    def read_own(cls, path: Path) -> RestartRecord:
        """Read a record of this process's user; raise `ReadError` if it is another's, `ValueError` if it is none."""
        return cls.of(parse_json(read_small(path, owner=own_directory(path.parent))))

    @classmethod
    def of(cls, record: Any) -> RestartRecord:
        """Create a record from decoded JSON. Raises `ValueError` if it is not a restart record."""
        if not isinstance(record, dict) or record.get("format") != _FORMAT:
            raise ValueError(f"it is not a restart record of format {_FORMAT}")
        given: dict[str, Any] = {field.name: record.get(field.name) for field in fields(cls)}
        if not all(isinstance(given[name], kind) for name, kind in get_type_hints(cls).items()):
            raise ValueError("a part is missing or has the wrong type")
        if given["run_mode"] not in RUN_MODES or given["rank_scope"] not in RANK_SCOPES:
            raise ValueError("its mode or scope is unknown")
        requested.check_id(given["base_id"], "base_id")
        return cls(**given)

    def write(self, path: Path) -> None:
        """Write the record for this process's user only; raise `ReadError` if the directory is a link or another's."""
        with suppress(FileExistsError):
            path.parent.parent.mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(mode=0o700)
        own_directory(path.parent)
        write_small(path, (json.dumps(asdict(self), indent=2) + "\n").encode())


class Earlier(NamedTuple):
    """The earlier start of the job that this one continues."""

    record: RestartRecord
    reason: str  # why it is continued, for messages

    def announcement(self, ranks: int) -> str:
        change = f" It had {self.record.world_size} ranks, and has {ranks} now." * (self.record.world_size != ranks)
        return f"dist_wandb: continues the run {self.record.base_id} of an earlier start ({self.reason}).{change}"


class RestartStore:
    """Finds the record of an earlier start of this job, and writes one for a later start. Coordinator only."""

    def __init__(
        self, session_name: str, options: Options, topology: Topology, init_arguments: Mapping[str, Any]
    ) -> None:
        self._launch = Launch.detect()
        self._mine = RestartRecord(
            base_id="",
            session=session_name,
            project=requested.text(init_arguments, "project"),
            entity=requested.text(init_arguments, "entity"),
            run_mode=options.run_mode,
            rank_scope=options.rank_scope,
            world_size=topology.world_size,
            job=self._launch.torchrun_start or self._launch.slurm_step,
            requeues=self._launch.requeues,
            rendezvous=self._launch.rendezvous,
        )
        self._arguments = init_arguments
        self._directory = requested.wandb_directory(init_arguments) / DIRECTORY
        self._topology = topology
        self._timeout = options.limits.join_timeout
        self._continued: Path | None = None  # the record of the ended job that this one continues
        jobs = {"torchrun": self._launch.torchrun_start, "slurm": self._launch.slurm_step}
        self._paths: dict[str, Path] = {kind: self._of_job(job) for kind, job in jobs.items() if job is not None}
        self._paths["latest"] = self._file("latest")

    @cached_property
    def _store(self) -> JobStore | None:
        """The store of torchrun's agent, which outlives the processes; that of their process group does not."""
        if self._launch.agent_store is None:
            return None
        with suppress(RendezvousError):
            return JobStore.find(self._mine.session, self._topology, self._timeout, lasting=True)
        return None

    def find(self) -> Earlier | None:
        resume = requested.resume(self._arguments)
        if resume == "never" or requested.first_step(self._arguments):
            return None
        requested_id = requested.run_id(self._arguments)
        for earlier in self._candidates(asked_for=resume == "auto"):
            if earlier is None:
                return None
            record = earlier.record
            if requested_id not in (None, record.base_id):
                continue
            differ = [
                f"{name} was {getattr(record, name)!r}, and is {getattr(self._mine, name)!r}"
                for name in ("session", "project", "entity", "run_mode", "rank_scope")
                if getattr(record, name) != getattr(self._mine, name)
            ]
            if not differ:
                self._continued = self._of_job(record.job) if record.job else None
                return earlier
            warn(
                f"the run {record.base_id} of an earlier start ({earlier.reason}) is not continued: "
                f"{'; '.join(differ)}. New runs are opened. Start with the same arguments, or pass id= and "
                "resume='allow'."
            )
        return None

    def _candidates(self, *, asked_for: bool) -> Iterator[Earlier | None]:
        """Yield the earlier starts, the most reliable record first; `None` if the run is known to have ended."""
        launch = self._launch
        reason = f"restart {launch.attempt} of torchrun" if launch.attempt else "restart by torchrun"
        if launch.attempt:
            with suppress(RendezvousError, ValueError, TypeError, KeyError):
                message = None if self._store is None else self._store.try_get(_KEY)
                if message is not None:
                    yield Earlier(RestartRecord.of(message["record"]), reason) if message["record"] else None
        found = self._in_file("torchrun", reason)
        # Otherwise, a worker of torchrun has started the command twice.
        yield from (earlier for earlier in found if earlier.record.rendezvous != launch.rendezvous)
        if launch.requeues:
            found = self._in_file("slurm", f"restart {launch.requeues} of the SLURM job")
            # Otherwise, the job's script started the command twice.
            yield from (earlier for earlier in found if earlier.record.requeues < launch.requeues)
        if asked_for:
            yield from self._in_file("latest", f"resume='auto', by {self._paths['latest']}")

    def _in_file(self, kind: str, reason: str) -> Iterator[Earlier]:
        """Yield what a record has; nothing if there is none or, with a warning, if it is invalid or another user's."""
        path = self._paths.get(kind)
        try:
            if path is not None:
                yield Earlier(RestartRecord.read_own(path), reason)
        except FileNotFoundError:
            return
        except (OSError, ValueError, ReadError) as error:
            _notices.warn(
                path,
                f"{path} is not a valid restart record of this job ({error}). It is ignored, and new runs are opened. "
                "To continue a known run, pass id= and resume='allow'.",
            )

    def leave(self, base_id: str) -> None:
        """Write a record of the runs that were opened. Warn once if the directory is not writable."""
        self._mine = replace(self._mine, base_id=base_id)
        self._publish(self._mine)
        try:
            for path in self._paths.values():
                self._mine.write(path)
            self._remove({self._continued} - {None, *self._paths.values()})
        except (OSError, ReadError) as error:
            warn(
                f"could not write a restart record of the run {base_id} to {self._directory} "
                f"({getattr(error, 'strerror', None) or error}), so a later start will not find it. Pass dir= with a "
                "writable directory, or id= and resume='allow' at every start."
            )

    def delete(self) -> None:
        """Delete the record, so that no later start continues these runs, which ended successfully."""
        self._publish(None)
        self._remove(self._paths.values())
        with suppress(OSError):
            self._directory.rmdir()  # if it is empty

    def _remove(self, paths: Iterable[Path | None]) -> None:
        for path in filter(None, paths):
            with suppress(OSError, ValueError, ReadError):
                if RestartRecord.read_own(path).base_id == self._mine.base_id:  # otherwise it is another job's
                    path.unlink()

    def _publish(self, record: RestartRecord | None) -> None:
        if self._store is not None:
            with suppress(RendezvousError):
                # Without a record once the runs have ended successfully.
                self._store.publish(_KEY, {"record": None if record is None else asdict(record)})

    def _of_job(self, job: str) -> Path:
        """The record of this job and this command only: a job's script may run several commands."""
        return self._file("job", job, *sys.argv)

    def _file(self, kind: str, *parts: str) -> Path:
        about = json.dumps([self._mine.project, self._mine.entity, self._mine.session, *parts])
        return self._directory / f"{kind}-{hashlib.sha256(about.encode()).hexdigest()[:12]}.json"


def continued(
    init_arguments: Mapping[str, Any], earlier: Earlier | None, topology: Topology, *, has_store: bool
) -> Mapping[str, Any]:
    """Return the arguments of `wandb.init` that continue the runs of an `earlier` start, if this rank knows one."""
    resume = requested.resume(init_arguments)
    if earlier is not None:
        given = {} if requested.continues(init_arguments) else {"resume": "allow"}
        return {**init_arguments, **given, "id": earlier.record.base_id}
    is_named_by_job = topology.world_size > 1 and not has_store and requested.run_id(init_arguments) is None
    if is_named_by_job and Launch.detect().requeues and resume is None:
        return {**init_arguments, "resume": "allow"}  # SLURM keeps the job's name, from which the id is made
    return init_arguments


def can_look_back(options: Options, topology: Topology, *, has_store: bool) -> bool:
    """Return whether the coordinator can choose the base id, rather than derive it from what all ranks know."""
    is_alone = topology.world_size == 1 or (options.run_mode == "auto" and options.rank_scope == "global")
    return has_store or is_alone


def check_resume(init_arguments: Mapping[str, Any], options: Options, topology: Topology, *, has_store: bool) -> None:
    """Raise `ConfigurationError` for ``resume="auto"`` if only one rank would know the run."""
    if can_look_back(options, topology, has_store=has_store) or requested.run_id(init_arguments) is not None:
        return
    if requested.resume(init_arguments) == "auto":
        raise ConfigurationError(
            f"resume='auto' takes the run id from a restart record that one process finds, but {topology.world_size} "
            "ranks need it, and have no way to agree on it yet. Call init_process_group first, or pass id= (the same "
            "at every start) with resume='allow', or set WANDB_RUN_ID."
        )


def next_row(run: AnyRun, init_arguments: Mapping[str, Any], axis: str) -> int:
    """Return the position on the x axis of the first row without a step: 0, or after the rows of a continued run."""
    if not run or run.disabled:
        return 0
    if not run.offline:
        value: object = run.summary.get(axis) if run.resumed else None  # type: ignore[no-untyped-call]
        last = int(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
    elif requested.continues(init_arguments):
        last = _last_on_disk(run, axis)
    else:
        last = None
    if last is not None:
        return last + 1
    return max(requested.first_step(init_arguments), run_metadata.starting_step(run))


def _last_on_disk(run: AnyRun, axis: str) -> int | None:
    """Return the largest value of the x axis in the newest earlier file of this rank's run that has any."""
    from dist_wandb.wandb_files.reading import largest_step  # most runs need no reader

    own = Path(str(run.dir)).parent
    changed: dict[Path, float] = {}
    others: dict[int, Path] = {}
    with suppress(OSError):
        owner = own.stat().st_uid
        for path in own.parent.glob(f"*run-*/run-{glob.escape(str(run.id))}.wandb"):
            with suppress(OSError):
                found = path.lstat()
                if path.parent.resolve() == own.resolve():
                    continue
                if found.st_uid == owner:
                    changed[path] = found.st_mtime
                else:
                    others[found.st_uid] = path
    for user, path in others.items():
        warn(
            f"{path} belongs to user {user}, so rows without a step do not continue after its last row. Give every row "
            "a step, or copy its directory."
        )
    for path in sorted(changed, key=lambda path: changed[path], reverse=True)[:_MOST_FILES]:
        with suppress(ReadError):  # it contains no run
            if (largest := largest_step(path, axis)) is not None:
                return largest
    return None
