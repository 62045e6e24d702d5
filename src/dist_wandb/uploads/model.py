"""Files to upload, the runs that they belong to, and the user's terms."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dist_wandb.runs.client_settings import artifact_staging, default_entity, own_entities
from dist_wandb.uploads.log import Sent
from dist_wandb.uploads.records import Rules
from dist_wandb.wandb_files.finding import is_in_run_directory
from dist_wandb.wandb_files.reading import StoredRun
from dist_wandb.wandb_files.sidecar import Sidecar


@dataclass(frozen=True)
class Terms:
    """The user's terms of an upload."""

    # The directories are the user's own: W&B's mark is accepted, links are followed, and records may name any file and
    # owner.
    trust: bool = False
    again: bool = False  # upload everything again, ignoring earlier uploads
    entity: str | None = None  # owner of the uploaded runs; `None` for the one that the files name
    server: str | None = field(default=None, repr=False)  # its address; `None` for the one in W&B's settings


CAUTIOUS = Terms()


@dataclass(frozen=True)
class UploadFile:
    """One ``.wandb`` file to upload."""

    run: StoredRun
    sent: Sent  # the lines confirmed by the server
    is_marked: bool  # W&B marked it as uploaded, dist_wandb did not upload it, and the directory is trusted
    finishes: bool  # its end is the end of the run; in a shared run, only that of the primary's last file
    resumes: bool  # it continues an earlier file of the same plain run at its end, rather than at a branch point
    problem: str | None = None  # why it is unknown what the server has; `None` if it is known
    by_log: bool = False  # `sent` comes from W&B's log beside the file, written when the run was online
    doubts: tuple[str, ...] = ()  # reasons to refuse the upload because earlier uploads are unknown, as sentences
    terms: Terms = CAUTIOUS

    @property
    def path(self) -> Path:
        """The ``.wandb`` file."""
        return self.run.path

    @property
    def is_uploaded(self) -> bool:
        """Whether nothing is left to upload."""
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
    """One W&B run, and the files that it is uploaded from."""

    run_id: str
    project: str | None  # `None` for the user's default
    files: tuple[UploadFile, ...]  # in upload order
    refusals: tuple[str, ...]  # reasons to refuse the upload unless it is forced, as sentences
    notes: tuple[str, ...]  # remarks, as sentences
    dangers: tuple[str, ...] = ()  # reasons to refuse the upload unless the directories are trusted, as sentences
    entity: str | None = None  # owner; `None` for the user's default

    @property
    def is_shared(self) -> bool:
        """Whether several ranks wrote into the run."""
        return self.files[0].shared_as is not None

    @property
    def is_uploaded(self) -> bool:
        """Whether nothing is left to upload."""
        return all(file.is_uploaded for file in self.files)

    @property
    def is_uploaded_by_log(self) -> bool:
        """Whether nothing is left to upload, and W&B's log is the only evidence for some file."""
        return self.is_uploaded and any(file.by_log for file in self.files)

    @property
    def describing(self) -> StoredRun:
        """The file that determines the run's name, config and tags: the last one."""
        return self.files[-1].run


def is_complete(sent: Sent, run: StoredRun) -> bool:
    """Return whether the server has confirmed the whole file without an error."""
    all_confirmed = sent.ended and not sent.problems and not sent.unsure and sent.lines.history >= run.rows
    return sent.attempts > 0 and all_confirmed


def mark_of(path: Path) -> Path:
    """Return the file by which ``wandb sync`` marks a run as uploaded, and ``wandb clean`` as removable."""
    return path.with_name(f"{path.name}.synced")


def files_of(path: Path) -> Path:
    """Return the folder of a run's files. Those beside a file outside of a run directory are not the run's."""
    return path.parent / "files" if is_in_run_directory(path) else path.parent / f"{path.name}.files"


def is_online(run: StoredRun) -> bool:
    """Return whether a run was written online."""
    return not run.path.parent.resolve().name.startswith("offline-")


def rules_of(file: UploadFile) -> Rules:
    """Return the files and owners that the records of a file may name."""
    terms = file.terms
    return Rules(
        file.path.parent,
        artifact_staging(),
        owners=own_entities(),
        default=default_entity(),
        owner=terms.entity,
        trust=terms.trust,
    )
