"""What is uploaded: files and the runs that they belong to, on the terms of the user."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dist_wandb.runs.client_settings import default_entity, own_entities
from dist_wandb.runs.directories import artifact_staging
from dist_wandb.uploads.log import Sent
from dist_wandb.uploads.records import Rules
from dist_wandb.wandb_files.finding import is_in_run_directory
from dist_wandb.wandb_files.reading import StoredRun
from dist_wandb.wandb_files.sidecar import Sidecar


@dataclass(frozen=True)
class Terms:
    """What the user has said of an upload.

    Args:
        trust: Whether the directories are the user's own: what they say of uploads is believed, links are followed, and
            their records may name any file and owner.
        again: Whether to upload everything, as if nothing had been uploaded yet.
        entity: Who is to own what is uploaded, whatever the files say; `None` to go by them.
        server: Address of W&B's server; `None` for the one that W&B's settings name.
    """

    trust: bool = False
    again: bool = False
    entity: str | None = None
    server: str | None = field(default=None, repr=False)


CAUTIOUS = Terms()


CAUTIOUS = Terms()


@dataclass(frozen=True)
class UploadFile:
    """One ``.wandb`` file on its way to the server.

    Args:
        run: What the file holds.
        sent: What the server has confirmed of it.
        is_marked: Whether W&B marked it as uploaded, dist_wandb did not upload it, and the directory is trusted.
        finishes: Whether its end is the end of the run. In a shared run only the primary's last file is.
        resumes: Whether it goes on behind an earlier file of the same plain run.
        problem: Why it is not known what the server has of it; `None` where it is.
        by_log: Whether `sent` is what W&B's log beside the file says, from when the run was written online.
        doubts: Why it is not known what was uploaded, as sentences.
        terms: What the user has said of it.
    """

    run: StoredRun
    sent: Sent
    is_marked: bool
    finishes: bool
    resumes: bool
    problem: str | None = None
    by_log: bool = False
    doubts: tuple[str, ...] = ()
    terms: Terms = CAUTIOUS

    @property
    def path(self) -> Path:
        """The ``.wandb`` file."""
        return self.run.path

    @property
    def is_uploaded(self) -> bool:
        """Whether nothing is left to be done."""
        if self.problem is not None:
            return False
        return self.is_marked or is_complete(self.sent, self.run)

    @property
    def rows_left(self) -> int:
        """Number of history rows that the server has not confirmed."""
        return 0 if self.is_uploaded else max(0, self.run.rows - self.sent.lines.history)

    @property
    def shared_as(self) -> Sidecar | None:
        """Label and role of the file's writer in a shared run; `None` in a plain one."""
        return self.run.shared_as


@dataclass(frozen=True)
class UploadRun:
    """One W&B run, and the files it is uploaded from.

    Args:
        run_id: Id of the run.
        project: Its project; `None` for the user's default.
        files: In the order in which they are uploaded.
        refusals: Why it is not uploaded unless forced, as sentences; empty where nothing stands against it.
        dangers: Why it is not uploaded unless its directories are trusted, as sentences.
        entity: Who is to own it; `None` for the user's default.
        notes: What is worth knowing, as sentences.
    """

    run_id: str
    project: str | None
    files: tuple[UploadFile, ...]
    refusals: tuple[str, ...]
    notes: tuple[str, ...]
    dangers: tuple[str, ...] = ()
    entity: str | None = None

    @property
    def is_shared(self) -> bool:
        """Whether several ranks wrote into the run."""
        return self.files[0].shared_as is not None

    @property
    def is_uploaded(self) -> bool:
        """Whether nothing is left to be done."""
        return all(file.is_uploaded for file in self.files)

    @property
    def is_uploaded_by_log(self) -> bool:
        """Whether nothing is left to be done, and of some file only W&B's log beside it says so."""
        return self.is_uploaded and any(file.by_log for file in self.files)

    @property
    def describing(self) -> StoredRun:
        """The file whose name, config and tags become the run's: the one uploaded last."""
        return self.files[-1].run


def is_complete(sent: Sent, run: StoredRun) -> bool:
    """Whether the server has confirmed all of a file, and nothing went wrong."""
    all_confirmed = sent.ended and not sent.problems and not sent.unsure and sent.lines.history >= run.rows
    return sent.attempts > 0 and all_confirmed


def mark_of(path: Path) -> Path:
    """The file by which ``wandb sync`` marks a run as uploaded, and ``wandb clean`` takes it for removable."""
    return path.with_name(f"{path.name}.synced")


def files_of(path: Path) -> Path:
    """Where W&B keeps the files of a run; of a file that lies somewhere else, nothing beside it is the run's."""
    return path.parent / "files" if is_in_run_directory(path) else path.parent / f"{path.name}.files"


def is_online(run: StoredRun) -> bool:
    """Whether a run was written online."""
    return not run.path.parent.resolve().name.startswith("offline-")


def rules_of(file: UploadFile) -> Rules:
    """What the records of a file may name."""
    terms = file.terms
    return Rules(
        file.path.parent,
        artifact_staging(),
        owners=own_entities(),
        default=default_entity(),
        owner=terms.entity,
        trust=terms.trust,
    )
