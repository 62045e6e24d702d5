"""What is uploaded of a run's directory: regular files, from a private copy, and records that refer to nothing else."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from offline_runs import fill_disk
from record_files import content_of, framed, make_run, new_record, of_json, row

from dist_wandb.cli.uploads.contents import Terms, copy_file, copy_files, entries_below, revised, violations
from dist_wandb.errors import ReadError, UploadError
from dist_wandb.wandb_files.record_file import field_of, records_of
from dist_wandb.wandb_files.small_files import KINDS, Directory

LARGE = bytes(1 << 20)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    files = tmp_path / "files"
    (files / "media" / "images").mkdir(parents=True)
    (files / "media" / "images" / "small.png").write_bytes(b"small")
    (files / "media" / "large.mp4").write_bytes(LARGE)
    (files / "config.yaml").write_bytes(LARGE)
    return files


def copied(files: Path, *, follow: bool = False, leave_out: frozenset[str] = frozenset()) -> dict[str, Path]:
    target = files.parent / "copy"
    copy_files(files, target, Directory.at(files.parent), follow=follow, leave_out=leave_out)
    return {str(path.relative_to(target)): path for path in target.rglob("*") if not path.is_dir()}


def test_large_files_are_linked_except_those_that_w_and_b_writes_and_pipes_left_out(files: Path) -> None:
    os.mkfifo(files / "pipe")
    kinds = {path.name: KINDS[kind] for path, kind in entries_below(files, Directory.at(files.parent))}
    assert kinds["pipe"] == "a named pipe"
    found = copied(files, leave_out=frozenset({"media/images/small.png"}))
    assert found.keys() == {"config.yaml", "media/large.mp4"}
    assert found["media/large.mp4"].samefile(files / "media" / "large.mp4")
    assert not found["config.yaml"].samefile(files / "config.yaml")
    assert found["config.yaml"].read_bytes() == LARGE


@pytest.mark.parametrize("can_link", [False, True])
def test_the_file_that_was_checked_is_linked_or_copied_although_its_path_is_replaced(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_link: bool
) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    large, really = files / "media" / "large.mp4", os.link

    def racing(*arguments: Any, **options: Any) -> None:
        large.rename(tmp_path / "moved")
        large.symlink_to(tmp_path / "secret")
        if not can_link:
            raise OSError(18, "Invalid cross-device link")
        really(*arguments, **options)

    monkeypatch.setattr(os, "link", racing)
    found = copied(files)["media/large.mp4"]
    assert (found.read_bytes(), found.samefile(tmp_path / "moved")) == (LARGE, can_link)


def test_without_disk_space_or_with_deep_folders_nothing_is_copied(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.joinpath(*["d"] * 33).mkdir(parents=True)
    with pytest.raises(ReadError, match="more than 32 folders are nested"):
        copied(files)
    shutil.rmtree(files / "d")
    shutil.rmtree(files.parent / "copy")
    fill_disk(monkeypatch, free=1 << 20)
    with pytest.raises(UploadError, match=r"not enough space for a copy\. Set XDG_STATE_HOME"):
        copied(files)


@pytest.mark.parametrize("name", ["link", "media/link"])
def test_links_are_followed_only_on_request(files: Path, tmp_path: Path, name: str) -> None:
    """They may also have replaced a file, or its folder, since they were listed."""
    (tmp_path / "saved").write_bytes(b"by wandb.save")
    (files / name).symlink_to(tmp_path / "saved")
    with pytest.raises(UploadError, match="is a symbolic link"):
        copied(files)
    shutil.rmtree(tmp_path / "copy")
    (files / "shown").symlink_to(files / "media")
    for path in (files / "shown" / "large.mp4", files / name):
        with pytest.raises((OSError, ReadError), match=r"shown|is a symbolic link"):
            copy_file(path, tmp_path / "two", Directory.at(files))
    assert not (tmp_path / "two").exists()
    (files / "shown").unlink()
    found = copied(files, follow=True)
    assert (found[name].read_bytes(), found[name].is_symlink()) == (b"by wandb.save", False)


# --- files and addresses that records may make W&B's uploader use; those of real runs pass unchanged ------------------


@pytest.fixture
def run(tmp_path: Path) -> Directory:
    (tmp_path / "offline-run-1-exp" / "files").mkdir(parents=True)
    (tmp_path / "secret").write_text("of the user's")
    return Directory.at(tmp_path / "offline-run-1-exp")


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    (tmp_path / "home" / "artifacts" / "staging").mkdir(parents=True)
    return tmp_path / "home" / "artifacts" / "staging"


@pytest.fixture
def terms(staging: Path) -> Terms:
    return Terms(staging=staging, owners=frozenset({"me"}))


def written(run: Directory, *records: Any) -> Path:
    path = run.path / "run-exp.wandb"
    path.write_bytes(content_of(records))
    return path


def as_uploaded(terms: Terms, path: Path) -> list[Any]:
    """Return the records as they are uploaded, with files copied into ``copy``."""

    def take(file: Path, within: Directory) -> Path:
        copy = path.parents[1] / "copy" / file.name
        copy.parent.mkdir(exist_ok=True)
        copy_file(file, copy, within)
        return copy

    found = [new_record() for _ in records_of(path)]
    for record, (message, parts) in zip(found, records_of(path), strict=True):
        record.ParseFromString(revised(message, parts, Directory.at(path.parent), terms, take))
    return found


def artifact(local_path: Path | str, content: bytes = b"", **values: str) -> Any:
    record = new_record()
    record.artifact.name, record.artifact.type = "model", "model"
    for name, value in values.items():
        setattr(record.artifact, name, value)
    entry = record.artifact.manifest.contents.add()
    entry.path, entry.local_path, entry.size = "x", str(local_path), len(content)
    entry.digest = base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()
    return record


def files_record(name: str) -> Any:
    record = new_record()
    record.files.files.add().path = name
    return record


def manifest_file(path: str) -> Any:
    record = artifact("")
    record.artifact.manifest.manifest_file_path = path
    return record


def of(entity: str, run_id: str = "exp", project: str = "digits") -> Any:
    return of_json({"type": "run", "run": {"run_id": run_id, "entity": entity, "project": project}})


HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a file outside": (lambda top: artifact(top / "secret"), "secret', a file that is neither in the run's directory"),
    "a file beside, by dots": (lambda top: artifact(top / "offline-run-1-exp" / ".." / "secret"), "neither in the run"),
    "a relative file": (lambda _: artifact("secret"), "names 'secret', a file that is neither"),
    "a list of files": (lambda top: manifest_file(str(top / "secret")), "which W&B's uploader reads, with all"),
    "a request": (lambda _: of_json({"type": "request", "request": {}}), "it contains a request"),
    "tensorboard": (
        lambda _: of_json({"type": "tbrecord", "tbrecord": {"log_dir": "/home/user/.ssh"}}),
        "it names a directory of tensorboard,",
    ),
    "a file of the run's, by dots": (lambda _: files_record("media/../../../secret"), "not below"),
    "a file of the run's, absolute": (lambda top: files_record(str(top / "secret")), "not below"),
    "an owner": (lambda _: of("attacker"), "its owner is 'attacker', which is not known to be yours"),
    "an id that leads elsewhere": (lambda _: of("", "../../attacker/digits/x"), "the id of its run is '../../attacker"),
    "an id that cannot be printed": (lambda _: of("", "x\x1b[31m"), "the id of its run is 'x\\x1b[31m'"),
    "a long id": (lambda _: of("", "x" * 10_000), "the id of its run is 'xxx"),
    "a project that leads elsewhere": (lambda _: of("", project=".."), "the project of its run is '..'"),
    "an artifact's owner": (lambda _: artifact("", entity="attacker"), "its owner is 'attacker'"),
}


@pytest.mark.parametrize(("make", "reason"), HOSTILE.values(), ids=HOSTILE.keys())
def test_records_that_refer_outside_the_run_are_refused(
    tmp_path: Path, run: Directory, terms: Terms, make: Callable[[Path], Any], reason: str
) -> None:
    path = written(run, make(tmp_path))
    (found,) = violations(path, run, terms)
    assert (reason in found, str(path) in found) == (True, True)
    with pytest.raises(UploadError) as refused:
        as_uploaded(terms, path)
    assert reason in str(refused.value)


def test_records_that_are_not_in_the_format_are_refused(run: Directory, terms: Terms) -> None:
    text = of("").SerializeToString().replace(b"digits", b"d\xffgits")
    files_longer_than_their_list = b"\x32\x02\x0a\x7f"
    for content, reason in {
        text: "it has text that is not UTF-8: b'd\\xffgits'",
        files_longer_than_their_list: "it has a record that is not in W&B's format",
    }.items():
        path = run.path / "run-exp.wandb"
        path.write_bytes(framed([content]))
        (found,) = violations(path, run, terms)
        assert reason in found


def test_a_record_of_several_kinds_or_paths_is_checked_in_all_and_of_an_unknown_kind_refused(
    tmp_path: Path, run: Directory, terms: Terms, staging: Path
) -> None:
    """W&B's reader uses the later kind, and of several paths the last; it ignores a number of the same field."""

    def revise(message: bytes, *kinds: int, trust: bool = False) -> None:
        revised(message, [(kind, 0, 0, 0) for kind in kinds], run, replace(terms, trust=trust), lambda *_: None)

    both = row(0).SerializeToString() + artifact(tmp_path / "secret").SerializeToString()
    entry = field_of(6, str(staging / "x").encode()) + field_of(6, str(tmp_path / "secret").encode()) + b"\x30\x01"
    for message, kinds in ((both, (2, 8)), (field_of(8, field_of(12, field_of(4, entry))), (8,))):
        with pytest.raises(UploadError, match="secret', a file that is neither in the run's directory"):
            revise(message, *kinds)
    unknown = of("").SerializeToString() + field_of(99, b"\x0a\x01x")
    with pytest.raises(UploadError, match=r"has a record of an unknown kind \("):
        revise(unknown, 17, 99)
    revise(unknown, 17, 99, trust=True)


def test_in_trusted_files_only_requests_are_refused(tmp_path: Path, run: Directory, terms: Terms) -> None:
    trusting = replace(terms, trust=True)
    found = {name: list(violations(written(run, make(tmp_path)), run, trusting)) for name, (make, _) in HOSTILE.items()}
    left_over = {"a request", "a file of the run's, by dots", "a file of the run's, absolute"}
    left_over |= {name for name in HOSTILE if "id" in name.split() or "a project" in name}
    assert {name for name, reasons in found.items() if reasons} == left_over


def test_an_unnamed_owner_is_the_default_which_must_be_known(run: Directory, terms: Terms) -> None:
    path = written(run, of(""))
    assert list(violations(path, run, terms)) == []
    (reason,) = violations(path, run, replace(terms, default="attacker"))  # a settings file of the current directory
    assert "its owner is 'attacker'" in reason
    assert list(violations(path, run, replace(terms, default="me"))) == []


def test_an_owner_named_by_the_user_replaces_all_others_and_nothing_else_is_changed(
    run: Directory, terms: Terms
) -> None:
    path = written(run, of("team"), of(""), artifact("", entity="team"), artifact(""))
    found = as_uploaded(replace(terms, entity="me"), path)
    assert [record.run.entity for record in found[:2]] == ["me", "me"]
    assert [record.artifact.entity for record in found[2:]] == ["me", ""]
    harmless = make_run(run.path.parent)
    here = Directory.at(harmless.parent)
    assert list(violations(harmless, here, terms)) == []
    assert all(revised(*one, here, terms, lambda *_: None) == one[0] for one in records_of(harmless))


def test_files_of_artifacts_are_uploaded_from_the_copy(run: Directory, terms: Terms, staging: Path) -> None:
    (staging / "tmp1").write_bytes(b"model")
    (run.path / "files" / "x").write_bytes(b"anything")
    honest = artifact(staging / "tmp1", b"model"), artifact(run.path / "files" / "x", b"else")
    path = written(run, *honest)
    assert list(violations(path, run, terms)) == []
    found = as_uploaded(terms, path)
    copy = run.path.parent / "copy"
    paths = [record.artifact.manifest.contents[0].local_path for record in found]
    assert paths == [str(copy / "tmp1"), str(copy / "x")]
    for before, after in zip(honest, found, strict=True):
        before.artifact.manifest.contents[0].local_path = after.artifact.manifest.contents[0].local_path
        assert before == after


def test_staged_files_of_other_artifacts_are_not_uploaded(run: Directory, terms: Terms, staging: Path) -> None:
    """A stranger may know the name of such a file, but the record must contain the digest of its content."""
    (staging / "tmp1").write_bytes(b"a model of the user's that is not published")
    path = written(run, artifact(staging / "tmp1", b"a guess"))
    with pytest.raises(UploadError, match="the content of that file differs from the artifact's"):
        as_uploaded(terms, path)
    with pytest.raises(UploadError, match=r"which cannot be read \(.*If the run is your own"):
        as_uploaded(terms, written(run, artifact(staging / "gone")))
