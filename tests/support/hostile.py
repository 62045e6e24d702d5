"""Run directories of an attacker who wants to harm users that show, upload or resume them.

Each `Tree` makes one run with the name of the tree, in a separate directory. It attacks the `Victim`'s home.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from canary import STRANGER, Victim
from offline_runs import sidecar_record
from record_files import Record, end, header, pb, row, rows, run, serialised, varint, write_run
from strangers import listening

Shown = Literal["shown", "refused", "passed over"]
Uploaded = Literal["uploaded", "refused", "tried", "passed over"]
Build = Callable[[Path, Victim], object]

DEEP = 200_000
HUGE = 10 * 2**30


@dataclass(frozen=True)
class Tree:
    name: str  # also the id of its run
    build: Build  # given the directory that wandb would have been given, and the victim
    shown: Shown  # "passed over" if the tree contains no file with the name of a run file
    uploaded: Uploaded  # "tried" if W&B's uploader fails at it
    problem_pattern: str  # of the reported lines if the run is not treated as an ordinary run


TREES: dict[str, Tree] = {}


def tree(
    name: str, problem_pattern: str = "", *, shown: Shown = "shown", uploaded: Uploaded = "refused"
) -> Callable[[Build], Build]:
    """Register a function that makes a tree."""

    def register(build: Build) -> Build:
        assert name not in TREES
        TREES[name] = Tree(name, build, shown, uploaded, problem_pattern)
        return build

    return register


def plant(trees: Iterable[Tree], top: Path, someone: Victim) -> None:
    """Make trees side by side, each in a directory with its name, which is given to the stranger if possible."""
    for one in trees:
        place = top / one.name
        place.mkdir(parents=True)
        one.build(place, someone)
        if os.getuid() == 0:
            give_away(place)


def give_away(top: Path, owner: int = STRANGER) -> None:
    """Make the stranger, or another user, the owner of a directory and its contents."""
    waiting = [top]
    while waiting:
        path = waiting.pop()
        with suppress(OSError):  # the absolute paths within "deep" are too long
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode):
                waiting += path.iterdir()
            elif status.st_nlink > 1:  # the other name belongs to the victim
                continue
            os.chown(path, owner, owner, follow_symlinks=False)


def sidecar(run_id: str, **other: Any) -> dict[str, Any]:
    """Return the sidecar of the writer of a shared run with one rank."""
    role = {"label": "rank-0", "primary": True}
    rank = {"global_rank": 0, "local_rank": 0, "world_size": 1}
    return sidecar_record(run_id=run_id, base_id=run_id, **{**role, **rank, **other})


def with_sidecar(place: Path, content: str | dict[str, Any]) -> None:
    """Make a run with other content in place of its sidecar."""
    text = json.dumps(content) if isinstance(content, dict) else content
    (write_run(place, place.name) / "dist-wandb.json").write_text(text)


def sparse(path: Path) -> None:
    with path.open("ab") as opened:
        opened.truncate(HUGE)


def files_record(*paths: str) -> Record:
    """Return a record that requests the upload of files of the run."""
    record = pb.Record()
    for path in paths:
        item = record.files.files.add()
        item.path, item.policy = path, pb.FilesItem.PolicyType.END
    return record


def artifact(**manifest: Any) -> Record:
    record = pb.Record()
    made = record.artifact
    made.run_id, made.project, made.type, made.name = "exp", "tests", "dataset", "stolen"
    made.digest, made.finalize, made.user_created = "0" * 32, True, True
    made.client_id, made.sequence_client_id = "c" * 128, "d" * 128
    made.manifest.version, made.manifest.storage_policy = 1, "wandb-storage-policy-v1"
    layout = made.manifest.storage_policy_config.add()
    layout.key, layout.value_json = "storageLayout", '"V2"'
    for name, value in manifest.items():
        setattr(made.manifest, name, value)
    return record


# --- code, and settings -----------------------------------------------------------------------------------------------


@tree("code", uploaded="uploaded")
def _code(place: Path, someone: Victim) -> None:
    directory = write_run(place, place.name)
    modules = "click yaml requests pydantic platformdirs wandb dist_wandb torch google/__init__"
    of_python = "json re typing subprocess encodings/__init__ sitecustomize site"
    for name in f"{modules} {of_python}".split():
        path = directory / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(someone.code(f"{place.name}-{name.replace('/', '-')}"))


@tree("settings", uploaded="uploaded")
def _settings(place: Path, someone: Victim) -> None:
    directory = write_run(place, place.name)
    for folder in (directory, directory / "wandb", place / "wandb", directory / ".wandb"):
        folder.mkdir(exist_ok=True)
        (folder / "settings").write_text(
            f"[default]\nbase_url = {someone.listener.url}\nentity = stranger\nerror_reporting = true\n"
        )
    (directory / ".netrc").write_text("default login user password x\n")


# --- what is no ordinary file -----------------------------------------------------------------------------------------


def _in_place_of_the_run(make: Callable[[Path, Victim], object]) -> Build:
    def build(place: Path, someone: Victim) -> None:
        path = write_run(place, place.name) / f"run-{place.name}.wandb"
        path.unlink()
        make(path, someone)

    return build


def _in_place_of_the_sidecar(make: Callable[[Path, Victim], object]) -> Build:
    return lambda place, someone: make(write_run(place, place.name) / "dist-wandb.json", someone)


OBSTACLES: dict[str, tuple[str, Callable[[Path, Victim], object]]] = {
    "is-a-pipe": ("named pipe", lambda path, _: os.mkfifo(path)),
    "is-a-socket": ("socket", lambda path, _: listening(path)),
    "is-a-directory": ("directory", lambda path, _: path.mkdir()),
    "links-to-zeros": ("symbolic link", lambda path, _: path.symlink_to("/dev/zero")),
    "links-to-a-secret": ("symbolic link", lambda path, someone: path.symlink_to(someone.home / ".ssh" / "id_rsa")),
}
"""By name, what may be in the place of a file: reported words, and a function of the path."""

for _name, (_words, _make) in OBSTACLES.items():
    tree(f"run-{_name}", _words, shown="refused")(_in_place_of_the_run(_make))
    tree(f"sidecar-{_name}", _words)(_in_place_of_the_sidecar(_make))
tree("run-is-sparse", "does not start like", shown="refused")(_in_place_of_the_run(lambda path, _: sparse(path)))
tree("run-is-empty", "is empty", shown="refused")(_in_place_of_the_run(lambda path, _: path.touch()))
tree("run-is-other", "does not start like", shown="refused")(
    _in_place_of_the_run(lambda path, _: path.write_bytes(b":W&B\xe1\xbe\x07x"))
)
tree("sidecar-is-sparse", "more than")(_in_place_of_the_sidecar(lambda path, _: sparse(path)))


@tree("uploads-of-links", "not uploaded it from this account")
def _uploads_of_links(place: Path, someone: Victim) -> None:
    """Beside an unfinished run is what an upload may create or read: W&B's mark, and its state."""
    directory = write_run(place, place.name, ended=False)
    (directory / f"run-{place.name}.wandb.synced").symlink_to(someone.home / ".ssh" / "made-by-the-mark")
    (directory / f"run-{place.name}.wandb.syncstate").symlink_to("/dev/zero")


@tree("online-log-is-a-pipe", "debug-internal.log")
def _online_log(place: Path, _: Victim) -> None:
    directory = write_run(place, place.name, online=True)
    (directory / "logs").mkdir()
    os.mkfifo(directory / "logs" / "debug-internal.log")


# --- what is uploaded, overwritten and deleted ------------------------------------------------------------------------


@tree("file-links-to-a-key", "link")
def _file_link(place: Path, someone: Victim) -> None:
    directory = write_run(place, place.name, extra=[files_record("notes.txt")])
    (directory / "files" / "notes.txt").symlink_to(someone.home / ".ssh" / "id_rsa")


@tree("rest-links-to-a-key", "link")
def _rest_link(place: Path, someone: Victim) -> None:
    directory = write_run(place, place.name, extra=[files_record("notes.txt", "media/x.png")], ended=False)
    (directory / "files" / "notes.txt").symlink_to(someone.home / ".ssh" / "id_rsa")
    (directory / "files" / "media").symlink_to(someone.home / ".ssh")


@tree("files-link-home", "link")
def _files_link(place: Path, someone: Victim) -> None:
    directory = write_run(place, place.name, extra=[files_record("id_rsa")])
    (directory / "files").rmdir()
    (directory / "files").symlink_to(someone.home / ".ssh")


def _overwriting(name: str, victims: str) -> Build:
    def build(place: Path, someone: Victim) -> None:
        summary = pb.Record()
        update = summary.summary.update.add()
        update.key, update.value_json = "stolen", '"STRANGER"'
        output = pb.Record()
        output.output_raw.output_type, output.output_raw.line = pb.OutputRawRecord.STDOUT, "ssh-rsa STRANGER\n"
        config = {"$(touch pwned)": 1}
        directory = write_run(place, place.name, config=config, extra=[summary, output])
        (directory / "files" / name).symlink_to(someone.home / victims)

    return build


tree("config-links-to-bashrc", "link")(_overwriting("config.yaml", ".bashrc"))
tree("summary-links-to-thesis", "link")(_overwriting("wandb-summary.json", "work/thesis.tex"))
tree("output-links-to-keys", "link")(_overwriting("output.log", ".ssh/authorized_keys"))


@tree("files-are-pipes", uploaded="uploaded")
def _pipes(place: Path, _: Victim) -> None:
    directory = write_run(place, place.name, extra=[files_record("pipe", "socket")])
    os.mkfifo(directory / "files" / "pipe")
    listening(directory / "files" / "socket")


@tree("stalls-are-odd", "link")
def _stalls(place: Path, someone: Victim) -> None:
    files = write_run(place, place.name) / "files"
    paths = [files / f"stall-20260101-00000{number}-rank-0.txt" for number in range(3)]
    os.mkfifo(paths[0])
    paths[1].symlink_to(someone.home / ".ssh" / "id_rsa")
    paths[2].write_bytes(b"\x1b]0;t\x07\n\x1b[2J\n")
    sparse(paths[2])


@tree("config-is-a-hard-link", uploaded="uploaded")
def _hard_link(place: Path, someone: Victim) -> None:
    directory = write_run(place, place.name, config={"lr": 1})
    with suppress(OSError):  # fs.protected_hardlinks allows this only to the owner of the file
        (directory / "files" / "config.yaml").hardlink_to(someone.home / ".bashrc")


@tree("artifact-of-a-secret", "artifact")
def _artifact(place: Path, someone: Victim) -> None:
    record = artifact()
    path = someone.home / ".aws" / "credentials"
    entry = record.artifact.manifest.contents.add()
    entry.path, entry.local_path, entry.size, entry.skip_cache = "x", str(path), path.stat().st_size, True
    entry.digest = base64.b64encode(hashlib.md5(path.read_bytes(), usedforsecurity=False).digest()).decode()
    write_run(place, place.name, extra=[record])


@tree("artifact-deletes-thesis", "artifact")
def _manifest(place: Path, someone: Victim) -> None:
    record = artifact(manifest_file_path=str(someone.home / "work" / "thesis.tex"))
    write_run(place, place.name, extra=[record])


@tree("files-outside", r"\.\./|outside")
def _traversal(place: Path, someone: Victim) -> None:
    up = "../" * 40 + str(someone.home / ".ssh" / "id_rsa").lstrip("/")
    write_run(place, place.name, extra=[files_record(up, str(someone.home / ".aws" / "credentials"))])


@tree("tensorboard-outside", "tensorboard")
def _tensorboard(place: Path, someone: Victim) -> None:
    record = pb.Record()
    record.tbrecord.log_dir, record.tbrecord.root_dir, record.tbrecord.save = str(someone.home), "/", True
    write_run(place, place.name, extra=[record])


@tree("uses-artifact", uploaded="uploaded")
def _use_artifact(place: Path, _: Victim) -> None:
    record = pb.Record()
    record.use_artifact.id, record.use_artifact.type, record.use_artifact.name = "x", "job", "y"
    write_run(place, place.name, extra=[record])


@tree("requests-packages", "request|kind")
def _request_packages(place: Path, someone: Victim) -> None:
    record = pb.Record()
    package = record.request.python_packages.package.add()
    package.name, package.version = "\necho STRANGER #", "1"
    directory = write_run(place, place.name, extra=[record])
    (directory / "files" / "requirements.txt").symlink_to(someone.home / ".bashrc")


tree("kind-of-the-future", "kind|field|unknown")(
    lambda place, _: write_run(place, place.name, extra=[varint(99 << 3 | 2) + varint(3) + b"\x0a\x01x"])
)
tree("entity-of-a-stranger", "stranger")(lambda place, _: write_run(place, place.name, entity="stranger"))


# --- bombs ------------------------------------------------------------------------------------------------------------

tree("world-of-ten-billion", "world_size")(lambda place, _: with_sidecar(place, sidecar(place.name, world_size=10**10)))
tree("world-of-a-million", "ranks 1, 2")(lambda place, _: with_sidecar(place, sidecar(place.name, world_size=10**6)))
tree("sidecar-of-brackets", "dist-wandb.json")(lambda place, _: with_sidecar(place, "[" * 60_000))


@tree("online-log-of-line-breaks", "has more than 1000000 lines")
def _online_log_of_line_breaks(place: Path, _: Victim) -> None:
    _log(write_run(place, place.name, online=True), "\n" * (20 * 2**20))


@tree("logs-odd", uploaded="uploaded")
def _odd_logs(place: Path, _: Victim) -> None:
    directory = write_run(place, place.name, online=True)
    lines: tuple[Any, ...] = ("3", None, "HUGE", -5, 10**30, [], {}, True, 1.5)
    posts: list[dict[str, Any]] = [{"history_lines": value} for value in lines]
    posts += [{"status": value, "url": "x/file_stream"} for value in lines]
    posts += [{"console_offset": value, "console_lines": value} for value in lines]
    entries = ({"level": "INFO", "msg": "filestream: post request", **post} for post in posts)
    odd = [json.dumps(entry).replace('"HUGE"', "1e400") for entry in entries]
    odd += ['{"level":1,"msg":2,"time":[]}', "null", "[]", "5", '"text"', "9" * 5000]
    contents = ("[" * DEEP, '{"a":' * DEEP, "{" + "x" * 50_000_000, "\n".join(odd))
    _log(directory, "\n".join(contents))


@tree("log-that-vouches", uploaded="uploaded")
def _vouching(place: Path, _: Victim) -> None:
    entries: tuple[dict[str, Any], ...] = (
        {"msg": "filestream: sending request", "history_lines": 3, "complete": True},
        {"msg": "filestream: request sent", "status": "200 OK"},
        {"msg": "sender: closed"},
    )
    lines = [json.dumps({"time": "2026-01-01T00:00:00Z", "level": "INFO", **entry}) for entry in entries]
    _log(write_run(place, place.name), "\n".join(lines) + "\n")


def _log(directory: Path, content: str) -> None:
    log = directory / "logs" / "debug-internal.log"
    log.parent.mkdir()
    log.write_text(content)


def _records(*, last: Iterable[Record | bytes]) -> Build:
    return lambda place, _: write_run(place, place.name, records=[header(), run(place.name), row(0), *last, end()])


tree("record-of-one-byte", uploaded="uploaded")(_records(last=[b"\x08"]))
tree("record-cut-off", uploaded="uploaded")(_records(last=[serialised([row(1)])[0][:-5]]))
tree("record-with-group", "not in W&B's format|group")(_records(last=[b"\xcb\x01\xcc\x01"]))
tree("record-of-one-number", uploaded="uploaded")(_records(last=[b"\xff" * 320_000 + b"\x01"]))
tree("record-of-32-mib", uploaded="uploaded")(_records(last=[b"\x92\x3f\xff\xff\xff\x7f" + bytes(32 * 2**20)]))
tree("row-of-types", uploaded="uploaded")(
    _records(last=[row(1, {f"k{i}._type": "x" for i in range(8000)} | {f"m{i}": 1.0 for i in range(8000)})])
)
tree("row-of-brackets", uploaded="tried")(_records(last=[row(1, {"x": b"[" * DEEP + b"]" * DEEP})]))
tree("row-of-names", uploaded="uploaded")(_records(last=[row(1, {"x" * 1_000_000: 1.0, "a." * 50_000 + "b": 2.0})]))
tree("row-of-nonsense", uploaded="tried")(
    _records(last=[row(1, {"x": b"no JSON", "y": b"", "z": b"1e999999", "w": b"9" * 5000})])
)
tree("config-of-10-mb", "run record is lost")(
    lambda place, _: write_run(place, place.name, config={"text": "x" * 10_000_000, "deep": _nested(50)})
)
tree("times-odd", uploaded="uploaded")(
    lambda place, _: write_run(place, place.name, records=[header(), _run_at(place.name, 2**62), *rows(), end(-1)])
)


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def _run_at(run_id: str, seconds: int) -> Record:
    record = run(run_id)
    record.run.start_time.seconds = seconds
    record.run.start_time.nanos = -1
    return record


# --- what is written on the terminal ----------------------------------------------------------------------------------

ESCAPES = "\x1b]0;TITLE\x07\x1b[31m\x9b2J\x00\r\n\u202e\u2028"

tree("escapes-in-label", "dist-wandb.json")(
    lambda place, _: with_sidecar(place, sidecar(place.name, label=f"rank{ESCAPES}"))
)
tree("label-of-steps", uploaded="uploaded")(
    lambda place, _: with_sidecar(place, sidecar(place.name, label="../" * 9 + "escaped"))
)


@tree("escapes-everywhere", "of its run is")
def _escapes(place: Path, _: Victim) -> None:
    described = run(place.name, config={f"k{ESCAPES}": ESCAPES}, display_name=f"name{ESCAPES}", job_type=ESCAPES)
    described.run.project = f"tests{ESCAPES}"
    described.run.run_group = f"group{ESCAPES}"
    described.run.entity = f"entity{ESCAPES}"
    described.run.tags.append(f"tag{ESCAPES}")
    write_run(place, place.name, records=[header(), described, row(0, {f"m{ESCAPES}": 1, "text": ESCAPES}), end()])


tree("escapes-in-the-id", "of its run is")(
    lambda place, _: write_run(place, place.name, records=[header(), run(f"{place.name}{ESCAPES}"), *rows(), end()])
)
tree("id-of-steps", "of its run is")(
    lambda place, _: write_run(
        place, place.name, records=[header(), run(f"../../{place.name}/../x?y#z"), *rows(), end()]
    )
)
tree("id-of-10000", "of its run is")(
    lambda place, _: write_run(place, place.name, records=[header(), run(place.name + "x" * 10_000), *rows(), end()])
)


def _in_directory(name: bytes) -> Build:
    def build(place: Path, _: Victim) -> None:
        write_run(Path(os.fsdecode(os.fsencode(place) + b"/" + name)), place.name)

    return build


tree("escapes-in-a-directory", uploaded="uploaded")(_in_directory(b"a\x1b]0;TITLE\x07\x1b[31m\x9b"))
tree("line-break-in-a-directory", uploaded="uploaded")(_in_directory(b"a\nSigned: all is well\n\r"))
tree("no-utf-8-in-a-directory", uploaded="uploaded")(_in_directory(b"a\xff\xfe\xe2\x82"))
tree("long-directory", uploaded="uploaded")(_in_directory(b"/".join([b"d" * 250] * 10)))


@tree("files-of-odd-names", shown="passed over", uploaded="passed over")
def _odd_names(place: Path, _: Victim) -> None:
    directory = write_run(place, place.name)
    (directory / f"run-{place.name}.wandb").rename(directory / f"run-{place.name}\x1b[31m.wandb\n")


# --- directories ------------------------------------------------------------------------------------------------------


@tree("loops", "link")
def _loops(place: Path, _: Victim) -> None:
    directory = write_run(place, place.name)
    (directory / "again").symlink_to("..")
    (directory / "files" / "self").symlink_to("self")
    (place / "wandb" / "latest-run").symlink_to("/")


@tree("deep", "levels", uploaded="uploaded")
def _deep(place: Path, _: Victim) -> None:
    write_run(place, place.name)
    before = os.open(".", os.O_RDONLY)
    os.chdir(place)
    for _level in range(3000):
        os.mkdir("d")  # noqa: PTH102  # pathlib would give it in full
        os.chdir("d")
    os.fchdir(before)
    os.close(before)


@tree("many", uploaded="uploaded")
def _many(place: Path, _: Victim) -> None:
    directory = write_run(place, place.name)
    for number in range(5000):
        (directory / f"{number}.wandb").touch()
        (directory / f"run-{number}").mkdir()


def healthy(top: Path, run_id: str = "healthy") -> Path:
    """Make a sound run, with the same writer as the other trees."""
    return write_run(top / run_id, run_id, config={"lr": 0.1}, display_name="a sound run")
