"""Continuing the runs of an earlier start of the same job: what a start leaves, and when a later one takes it up.

Only the rank that tells the job looks back and leaves a note; the others learn the base id from it as at any start.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_wandb.errors import ConfigurationError, ReadError, RendezvousError, UnsupportedVersionError
from dist_wandb.runs import argument_checks, console, directories, requested, run_metadata
from dist_wandb.settings.plan import RANK_SCOPES, RUN_MODES
from dist_wandb.store.job_store import JobStore
from dist_wandb.topology.launch import Launch
from dist_wandb.topology.model import Topology
from dist_wandb.wandb_files.offline import largest_step
from dist_wandb.wandb_files.small_files import own_directory, parse_json, read_small, write_small

if TYPE_CHECKING:
    from dist_wandb.runs.null_run import AnyRun
    from dist_wandb.settings.options import Options

_log = logging.getLogger("dist_wandb")

NOTES_DIRECTORY = "dist-wandb-resume"
_FORMAT = 1
_NOTE = "note"  # the key in the job's store
_MOST_FILES = 32  # of one run that are looked at for the last row; each takes about half a second
_started: Counter[str] = Counter()
_told_of: set[Path] = set()


@dataclass(frozen=True)
class RestartRecord:
    """What one start of a job leaves for a later one.

    Args:
        base_id: The id that all run ids of the job are made from; in a world of one the run's id.
        session: Name of the session, since a job may have several.
        project: Name of the W&B project, as far as the user named one.
        entity: Owner of the project, as far as the user named one.
        run_mode: `"auto"`, `"shared"` or `"new"`.
        rank_scope: `"global"` or `"worker"`.
        world_size: Number of ranks.
        job: The launcher's name for the job; `None` where it has none that would be found again.
        requeues: How often SLURM had started the job again.
    """

    base_id: str
    session: str
    project: str | None
    entity: str | None
    run_mode: str
    rank_scope: str
    world_size: int
    job: str | None
    requeues: int

    @classmethod
    def read(cls, path: Path) -> RestartRecord | None:
        """Read a note; `None` where there is none, or, with a warning, something else or somebody else's."""
        try:
            return cls.believed(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, ReadError) as error:
            if path in _told_of:
                return None
            _told_of.add(path)
            _log.warning(
                "dist_wandb: %s is not the note that an earlier start of this job would have left there (%s). It is "
                "left aside, and new runs are made. Pass id= and resume='allow' to continue a run you know.",
                path,
                error,
            )
            return None

    @classmethod
    def believed(cls, path: Path) -> RestartRecord:
        """Read a note of this process's user.

        Raises:
            FileNotFoundError: There is none.
            ReadError: What is there is no file, or it or its directory is somebody else's.
            ValueError: It is no note.
            OSError: It cannot be read.
        """
        return cls.of(parse_json(read_small(path, owner=own_directory(path.parent))))

    @classmethod
    def of(cls, record: Any) -> RestartRecord:
        """Make a note of what JSON gave.

        Raises:
            ValueError: It is no note.
        """
        if not isinstance(record, dict) or record.get("format") != _FORMAT:
            raise ValueError(f"it is not a note of format {_FORMAT}")
        given: dict[str, Any] = {field.name: record.get(field.name) for field in fields(cls)}
        texts = ("base_id", "session", "run_mode", "rank_scope")
        numbers = ("world_size", "requeues")
        if not all(type(given[name]) is (str if name in texts else int) for name in texts + numbers):
            raise ValueError("it lacks a part")
        if not all(isinstance(given[name], str | None) for name in ("project", "entity", "job")):
            raise ValueError("a part of it is no text")
        if given["run_mode"] not in RUN_MODES or given["rank_scope"] not in RANK_SCOPES:
            raise ValueError("its mode or scope is unknown")
        try:
            argument_checks.check_id(given["base_id"], "base_id")
        except ConfigurationError as error:
            raise ValueError(str(error)) from None
        return cls(**given)

    def write(self, path: Path) -> None:
        """Leave the note where only this process's user reads and writes.

        Raises:
            ReadError: The directory is a link, or somebody else's.
            OSError: It cannot be written.
        """
        with suppress(FileExistsError):
            path.parent.parent.mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(mode=0o700)
        own_directory(path.parent)
        write_small(path, (json.dumps(self.record, indent=2) + "\n").encode())

    @property
    def record(self) -> dict[str, Any]:
        """The note as JSON holds it."""
        return {"format": _FORMAT, **asdict(self)}


@dataclass(frozen=True)
class Earlier:
    """The start of the job that this one continues.

    Args:
        note: What it left.
        found: Why it is continued, for messages.
    """

    note: RestartRecord
    found: str


class RestartStore:
    """Finds what an earlier start of this job left, and leaves a note for a later one.

    The note lies in up to three files, since no single place serves all restarts: one for ``resume="auto"``, which any
    start in this directory replaces, and one for each name by which a launcher finds the job again, which jobs that
    run side by side do not share. Where torchrun's agent keeps a store over restarts, it lies there as well.

    Args:
        session_name: Name of the session, equal at every start of the job.
        options: The session's options.
        topology: Who this rank is; it should be the one that tells the job.
        init_arguments: Keyword arguments of `wandb.init`, as the user gave them.
    """

    def __init__(
        self, session_name: str, options: Options, topology: Topology, init_arguments: Mapping[str, Any]
    ) -> None:
        self._launch = Launch.detect()
        self._mine = RestartRecord(
            base_id="",
            session=session_name,
            project=requested.wanted_project(init_arguments),
            entity=requested.wanted_entity(init_arguments),
            run_mode=options.run_mode,
            rank_scope=options.rank_scope,
            world_size=topology.world_size,
            job=self._launch.torchrun_start or self._launch.slurm_step,
            requeues=self._launch.requeues,
        )
        self._arguments = init_arguments
        self._directory = directories.wandb_directory(init_arguments) / NOTES_DIRECTORY
        self._topology = topology
        self._timeout = options.join_timeout
        self._continued_job: str | None = None

    @cached_property
    def _store(self) -> JobStore | None:
        """The store of torchrun's agent, which outlasts the processes; that of their process group does not."""
        if self._launch.agent_store is None:
            return None
        with suppress(RendezvousError):
            return JobStore.find(self._mine.session, self._topology, self._timeout, lasting=True)
        return None

    def find(self) -> Earlier | None:
        """What this start continues; `None` where it begins anew."""
        resume = requested.wanted_resume(self._arguments)
        if resume == "never" or requested.rewinds(self._arguments):
            return None
        wanted = requested.wanted_id(self._arguments)
        for note, found in self._candidates(asked_for=resume == "auto"):
            if note is None:
                return None
            if wanted in (None, note.base_id) and self._suits(note, found):
                self._continued_job = note.job
                return Earlier(note, found)
        return None

    def _candidates(self, *, asked_for: bool) -> Iterator[tuple[RestartRecord | None, str]]:
        """The notes to be looked at, the surest first; `None` if it is known that the run has ended."""
        launch = self._launch
        if launch.attempt:
            found = f"restart {launch.attempt} of torchrun"
            yield from self._told(found)
            yield from self._written(launch.torchrun_start, found)
        if launch.requeues:
            found = f"restart {launch.requeues} of the SLURM job"
            for left, reason in self._written(launch.slurm_step, found):
                if left.requeues < launch.requeues:  # else the job's script started the command twice
                    yield left, reason
        if asked_for and (note := RestartRecord.read(self._latest)) is not None:
            yield note, f"resume='auto', by {self._latest}"

    def _told(self, found: str) -> Iterator[tuple[RestartRecord | None, str]]:
        with suppress(RendezvousError, ValueError, TypeError, KeyError):
            told = None if self._store is None else self._store.try_get(_NOTE)
            if told is not None:
                yield (RestartRecord.of(told["note"]) if told["note"] else None), found

    def _written(self, job: str | None, found: str) -> Iterator[tuple[RestartRecord, str]]:
        if job is not None and (note := RestartRecord.read(self._of_job(job))) is not None:
            yield note, found

    def _suits(self, note: RestartRecord, found: str) -> bool:
        """Whether a note is of this very session, whose runs it continues one by one."""
        differ = [
            f"{name} was {getattr(note, name)!r}, and is {getattr(self._mine, name)!r}"
            for name in ("session", "project", "entity", "run_mode", "rank_scope")
            if getattr(note, name) != getattr(self._mine, name)
        ]
        if differ:
            _log.warning(
                "dist_wandb: the run %s of an earlier start (%s) is not continued: %s. New runs are made. Start with "
                "the same arguments, or pass id= and resume='allow'.",
                note.base_id,
                found,
                "; ".join(differ),
            )
        return not differ

    def leave(self, base_id: str) -> None:
        """Leave a note of the runs that were opened. A directory that cannot be written to is warned of once."""
        note = replace(self._mine, base_id=base_id)
        self._mine = note
        self._tell(note)
        try:
            for path in self._paths:
                note.write(path)
            self._remove_notes(self._continued_paths)
        except (OSError, ReadError) as error:
            _log.warning(
                "dist_wandb: no note of the run %s could be left in %s (%s), so a later start will not find it. Pass "
                "dir= with a directory that can be written to, or id= and resume='allow' at every start.",
                base_id,
                self._directory,
                getattr(error, "strerror", None) or error,
            )

    def take_back(self) -> None:
        """The runs have ended well: no later start is to continue them."""
        self._tell(None)
        self._remove_notes(self._paths)
        with suppress(OSError):
            self._directory.rmdir()  # if it is empty

    def _remove_notes(self, paths: Iterable[Path]) -> None:
        """Remove notes of these very runs."""
        for path in paths:
            with suppress(OSError, ValueError, ReadError):
                if RestartRecord.believed(path).base_id == self._mine.base_id:  # else another job's
                    path.unlink()

    def _tell(self, note: RestartRecord | None) -> None:
        if self._store is not None:
            with suppress(RendezvousError):
                self._store.publish(_NOTE, {"note": note and note.record})

    @property
    def _paths(self) -> list[Path]:
        jobs = (self._launch.torchrun_start, self._launch.slurm_step)
        return [self._latest, *(self._of_job(job) for job in jobs if job is not None)]

    @property
    def _continued_paths(self) -> list[Path]:
        """The note of the job that this one continues, which is over."""
        job = self._continued_job
        return [self._of_job(job)] if job and self._of_job(job) not in self._paths else []

    @property
    def _latest(self) -> Path:
        """The note that any start of this session in this directory replaces."""
        return self._file("latest")

    def _of_job(self, job: str) -> Path:
        """The note of this job alone, and of this command of it: a job's script may run several."""
        return self._file("job", job, *sys.argv)

    def _file(self, kind: str, *parts: str) -> Path:
        about = json.dumps([self._mine.project, self._mine.entity, self._mine.session, *parts])
        return self._directory / f"{kind}-{hashlib.sha256(about.encode()).hexdigest()[:12]}.json"


def session_name(door: str, number: int | None) -> str:
    """A name of the door's next session that it has at every start, whatever the world size.

    Args:
        door: Name of the door.
        number: Which of the door's sessions it is, where the door can tell; counted otherwise.
    """
    if number is None:
        _started[door] += 1
        number = _started[door]
    return f"{door}/{number}"


def continued(
    init_arguments: Mapping[str, Any], earlier: Earlier | None, topology: Topology, *, has_store: bool
) -> Mapping[str, Any]:
    """The arguments of `wandb.init` that continue what an earlier start began; as they are where there was none.

    Args:
        init_arguments: As the user gave them.
        earlier: What this start continues, on the rank that looked for it.
        topology: Who this rank is.
        has_store: Whether the ranks can tell each other the base id.
    """
    resume = requested.wanted_resume(init_arguments)
    if earlier is not None:
        given = {} if requested.continues(init_arguments) else {"resume": "allow"}
        return {**init_arguments, **given, "id": earlier.note.base_id}
    is_named_by_job = topology.world_size > 1 and not has_store and requested.wanted_id(init_arguments) is None
    if is_named_by_job and Launch.detect().requeues and resume is None:
        return {**init_arguments, "resume": "allow"}  # SLURM starts a job again under the name that the id is made from
    return init_arguments


def name_for_id(session: str, init_arguments: Mapping[str, Any]) -> str:
    """A name of the session from which its base id may be made, where only the launcher's name of the job is known."""
    requeues = Launch.detect().requeues
    return f"{session}/{requeues}" if requeues and requested.wanted_resume(init_arguments) == "never" else session


def can_look_back(options: Options, topology: Topology, *, has_store: bool) -> bool:
    """Whether the rank that tells the job can choose the base id, rather than make it from what all ranks know."""
    is_alone = topology.world_size == 1 or (options.run_mode == "auto" and options.rank_scope == "global")
    return has_store or is_alone


def check_resume(init_arguments: Mapping[str, Any], options: Options, topology: Topology, *, has_store: bool) -> None:
    """Refuse ``resume="auto"`` where only one rank would know the run.

    Raises:
        ConfigurationError: The ranks need one id, nobody asked for one, and they cannot tell each other.
    """
    if can_look_back(options, topology, has_store=has_store) or requested.wanted_id(init_arguments) is not None:
        return
    if requested.wanted_resume(init_arguments) == "auto":
        raise ConfigurationError(
            f"resume='auto' takes the run id from a note that one process finds, but {topology.world_size} ranks need "
            "it, and have no way to tell each other yet. Call init_process_group first, or pass id= (the same at every "
            "start) with resume='allow', or set WANDB_RUN_ID."
        )


def announce(earlier: Earlier, topology: Topology) -> None:
    """Say in one line what is continued, and why."""
    if console.is_silent():
        return
    before = earlier.note.world_size
    change = "" if before == topology.world_size else f" It had {before} ranks, and has {topology.world_size} now."
    line = f"dist_wandb: continues the run {earlier.note.base_id} of an earlier start ({earlier.found}).{change}"
    print(line, file=sys.stderr, flush=True)  # noqa: T201  # as the line at the start


def next_row(run: AnyRun, step_metric: str | None, init_arguments: Mapping[str, Any]) -> int:
    """Where on the x axis the first row without a step belongs: behind those that a resumed run has.

    Args:
        run: The run that this rank has opened.
        step_metric: Name of the x axis; `None` for none.
        init_arguments: What it was opened with.

    Returns:
        0 for a new run. Online it is told by the run's summary, offline by the earlier files of the run's id.
    """
    if not run or step_metric is None or run.disabled:
        return 0
    if not run.offline:
        last = run_metadata.last_logged(run, step_metric)
    elif requested.continues(init_arguments):
        last = _last_on_disk(run, step_metric)
    else:
        last = None
    return 0 if last is None else last + 1


def _last_on_disk(run: AnyRun, step_metric: str) -> int | None:
    """The largest value of the x axis in the newest earlier file of this rank's run that has any."""
    own = Path(str(run.dir)).parent
    for path in _newest_first(own, f"*run-*/run-{glob.escape(str(run.id))}.wandb")[:_MOST_FILES]:
        try:
            largest = largest_step(path, step_metric)
        except ReadError:  # nothing of a run is in it
            continue
        except UnsupportedVersionError as error:
            _log.warning("dist_wandb: rows without a step are counted from 0 again in the run %s: %s", run.id, error)
            return None
        if largest is not None:
            return largest
    return None


def _newest_first(own: Path, pattern: str) -> list[Path]:
    """The files of this pattern beside a run's directory that belong to the same user, the last changed first."""
    changed: dict[Path, float] = {}
    strangers: dict[int, Path] = {}
    with suppress(OSError):
        owner = own.stat().st_uid
        for path in own.parent.glob(pattern):
            with suppress(OSError):
                found = path.lstat()
                if path.parent.resolve() == own.resolve():
                    continue
                if found.st_uid == owner:
                    changed[path] = found.st_mtime
                else:
                    strangers[found.st_uid] = path
    for user, path in strangers.items():
        _log.warning(
            "dist_wandb: %s belongs to user %d, so rows without a step are not counted on from its last row. Give "
            "every row a step, or copy its directory.",
            path,
            user,
        )
    return sorted(changed, key=lambda path: changed[path], reverse=True)
