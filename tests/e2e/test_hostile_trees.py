"""Hostile directories next to a sound run: nothing is changed, disclosed or executed, and the sound run is unaffected.

`hostile.TREES` contains the expected result for each tree.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hostile
import pytest
from canary import STRANGER, Victim, snapshot, victim
from hostile import TREES, Tree
from processes import clean_environment, run_job
from record_files import LONG_AGO, write_run
from stored import read_history, read_run
from wandb_server import WandbServer

MEASURED = Path(__file__).parent / "scripts" / "measured.py"
SOURCES = str(Path(__file__).parents[2] / "src")
LONGEST = 800  # seconds of wall time, for many commands on a busy machine
pytestmark = pytest.mark.timeout(LONGEST + 60)
PROCESSOR_SECONDS = 10  # for one tree; wall time, which other tests share, may be longer
MEGABYTES = 300  # of any one process, beyond those before the command
HANGS = 120  # seconds of wall time, for one command
RETRIES = {f"WANDB_X_{client}_RETRY_MAX": "1" for client in ("GRAPHQL", "FILE_STREAM", "FILE_TRANSFER")}
ACCEPTED = [one for one in TREES.values() if one.uploaded in ("uploaded", "passed over") and not one.problem_pattern]
OTHERS = [one for one in TREES.values() if one not in ACCEPTED]
GROUPS = {"accepted": ACCEPTED, "others": OTHERS}
CODE = ["code", "settings"]
# Trees that aim at time and memory are also read one by one.
BOMBS = (
    *("sparse", "zeros", "logs-odd", "world-of", "sidecar-of", "record-", "row-of", "config-of", "deep", "many"),
    "id-of-10000",
)


@dataclass(frozen=True)
class Command:
    name: str
    code: int | None
    cpu: float
    megabytes: float
    out: str
    err: str

    def check(self, trees: int = 1) -> None:
        """Fail if the command hung, crashed, took too many resources, or printed characters that are not text."""
        assert self.code is not None, (
            f"{self.name} was killed: it took {self.megabytes:.0f} MB, or too long\n{self.out}\n{self.err}"
        )
        assert "Traceback" not in self.err, f"{self.name}:\n{self.err}"
        for text in (self.out, self.err):
            odd = {char for char in text if not (char.isprintable() or char == "\n")}
            assert not odd, f"{self.name} prints {odd}:\n{text!r}"
        assert self.megabytes < MEGABYTES, f"{self.name} took {self.megabytes:.0f} MB"
        assert self.cpu < PROCESSOR_SECONDS + 2 * trees, f"{self.name} took {self.cpu:.1f} s of processor time"

    def problems_of(self, run_id: str) -> list[str]:
        """Return the reported problems of a run: the marked lines below its heading, and those that name it."""
        problems, heading = [], ""
        for line in (self.out + self.err).splitlines():
            if line.startswith("● "):
                heading = line.split()[1]
            elif not line.startswith(" "):
                heading = ""
            is_marked = line.lstrip().startswith(("✗", "!"))
            if is_marked and (heading == run_id or run_id in re.split(r"[\s/:]", line)):
                problems.append(line.strip())
        return problems


Run = Callable[..., list[Command]]


@pytest.fixture
def someone(tmp_path: Path) -> Iterator[Victim]:
    with victim(tmp_path / "victim") as made:
        yield made


@pytest.fixture
def trees_at(tmp_path: Path) -> Iterator[Path]:
    """The directory of the trees. It is removed at the end by rm, because Python cannot remove deep trees."""
    yield tmp_path / "trees"
    subprocess.run(["rm", "-rf", tmp_path / "trees"], check=True)  # noqa: S607  # of the system


@pytest.fixture
def run(someone: Victim, tmp_path: Path) -> Run:
    """Run commands of dist-wandb one after the other, and measure them.

    The last ones, `preloaded`, and the uploads that they start do not each import wandb, which takes ten times as long
    as reading a small run.
    """

    def commands(
        *argvs: Sequence[object],
        preloaded: Sequence[Sequence[object]] = (),
        server: WandbServer | None = None,
        obeys_modes: bool = False,
    ) -> list[Command]:
        orders: list[dict[str, Any]] = [
            {
                "argv": [str(word) for word in argv],
                "cwd": str(someone.workplace),
                "output": str(tmp_path / f"output-{number}"),
                "limit": HANGS * (5 if server else 1),
                "obeys_modes": obeys_modes,
                "preloads": ["wandb"] if number >= len(argvs) else [],
                "forks_wandb": number >= len(argvs),
            }
            for number, argv in enumerate([*argvs, *preloaded])
        ]
        list_of_them = tmp_path / "orders.json"
        list_of_them.write_text(json.dumps(orders))
        environment = someone.environment(PYTHONPATH=SOURCES)
        if server is not None:
            environment = server.environment(tmp_path, **{**environment, "WANDB_BASE_URL": server.url}, **RETRIES)
        command = [sys.executable, str(MEASURED), str(list_of_them)]
        finished = run_job(command, cwd=tmp_path, environment=environment, timeout=LONGEST).check()
        results = json.loads(finished.output)
        return [_command(" ".join(order["argv"][:2]), one) for order, one in zip(orders, results, strict=True)]

    return commands


def _command(name: str, result: dict[str, Any]) -> Command:
    out, err = (
        Path(result[stream]).read_bytes().decode(errors="backslashreplace") if stream in result else ""
        for stream in ("out", "err")
    )
    return Command(name, result["code"], result["cpu"], result["megabytes"], out, err)


@pytest.mark.cold  # the resources of the commands are measured, and they import modules
@pytest.mark.parametrize("trees", GROUPS.values(), ids=GROUPS)
def test_among_hostile_trees_a_sound_run_is_shown_and_uploaded(
    trees: Sequence[Tree], someone: Victim, run: Run, trees_at: Path, tmp_path: Path
) -> None:
    top = trees_at
    hostile.plant(trees, top, someone)
    hostile.healthy(top)
    before = snapshot(top)
    page = tmp_path / "report.html"
    bombs = [tree for tree in trees if any(word in tree.name for word in BOMBS)]
    shown, as_json, reported, in_table, rows = run(
        ["show", "--details", top],
        ["show", "--json", top],
        ["report", top, "-o", page],
        ["show", "--compare", top],
        ["show", "--rows", "loss", "--csv", "--where", "name=a sound run", top],
    )
    assert snapshot(top) == before
    if os.getuid() == 0:
        hostile.give_away(top, os.getuid())  # as if the user had copied or unpacked them
    before = snapshot(top)
    planned, *alone = run(
        ["sync", "--dry-run", top], preloaded=[["sync", "--dry-run", top / tree.name] for tree in bombs]
    )
    for command in (shown, as_json, planned, reported, in_table, rows):
        command.check(len(trees))
        someone.check_secrets(command.out, command.err)
    for command in alone:
        command.check()
    someone.check_secrets(page.read_text(), "")
    assert reported.code == shown.code, reported.err
    assert snapshot(top) == before
    assert not list(someone.own[0].iterdir())
    someone.check()
    wrong = [*wrongly_shown(trees, shown, json.loads(as_json.out)), *wrongly_planned(trees, planned)]
    assert in_table.out.count("a sound run") == 1
    assert [line.split(",")[0] for line in rows.out.splitlines()] == ["run", *["healthy"] * 3]
    with WandbServer() as server:
        code = [top / tree.name for tree in trees if tree.name in CODE]  # the uploads of these import all modules
        *cold, rest = run(*([["sync", *code]] if code else []), preloaded=[["sync", top]], server=server)
    for command in (*cold, rest):
        command.check(6 * len(trees))
    assert [command.code for command in cold] == [0] * len(cold)
    done = replace(rest, out="".join(command.out for command in (*cold, rest)))
    wrong += wrongly_uploaded(trees, done, server)
    assert not wrong, "\n".join(wrong)
    for request, _ in server.answered:
        someone.check_secrets(request.content, str(request.message))
    assert server.unknown == []


def wrongly_shown(trees: Sequence[Tree], shown: Command, as_json: Any) -> Iterator[str]:
    found = {
        tree_of({"path": path}, trees) for item in as_json["runs"] for part in item["writers"] for path in part["files"]
    }
    refused = {tree_of(item, trees) for item in as_json["unreadable"]}
    for tree in trees:
        what = "shown" if tree.name in found else "refused" if tree.name in refused else "passed over"
        if what != tree.shown:
            yield f"{tree.name} is {what}, not {tree.shown}: {shown.problems_of(tree.name)}"
        if what == "refused" and len(shown.problems_of(tree.name)) != 1:
            yield f"{tree.name} is refused by {shown.problems_of(tree.name)}"
    if "● healthy  a sound run\n  finished · 3 rows" not in shown.out:
        yield f"the sound run is not shown as usual:\n{shown.out}"
    if shown.code != int(bool(as_json["unreadable"])):
        yield f"show has the exit code {shown.code}"


def tree_of(item: dict[str, Any], trees: Sequence[Tree]) -> str:
    """Return the name of the tree that contains a run."""
    # If a tree is too deep, only the reason names it: the path is that of all trees.
    words = {*Path(item["path"]).parts, *item.get("reason", "").split("/")}
    (name,) = {*(tree.name for tree in trees), "healthy"} & words
    return name


def wrongly_planned(trees: Sequence[Tree], planned: Command) -> Iterator[str]:
    for tree in trees:
        problems = planned.problems_of(tree.name)
        if bool(problems) != bool(tree.problem_pattern) or not re.search(tree.problem_pattern, " ".join(problems)):
            yield f"{tree.name} should be {tree.uploaded} ({tree.problem_pattern}): {problems}"
    if planned.code != int(any(tree.problem_pattern for tree in trees)):
        yield f"sync --dry-run has the exit code {planned.code}"


def wrongly_uploaded(trees: Sequence[Tree], done: Command, server: WandbServer) -> Iterator[str]:
    expected = {"healthy", *(tree.name for tree in trees if tree.uploaded == "uploaded")}
    arrived = {recorded.run_id for recorded in server.runs.values()}
    tried = {tree.name for tree in trees if tree.uploaded == "tried"}
    yield from (f"{name} does not fail" for name in sorted(tried) if not done.problems_of(name))
    if arrived - tried != expected:
        yield f"uploaded too much: {sorted(arrived - expected)}, too little: {sorted(expected - arrived)}\n{done.out}"
    yield from (f"{name} is not reported as uploaded" for name in sorted(expected) if f"✓ {name}" not in done.out)
    if "healthy" in arrived and [row["loss"] for row in server.run("healthy").rows] != [1.0, 1 / 2, 1 / 3]:
        yield "the sound run is not uploaded as usual"
    if server.artifacts:
        yield f"artifacts: {server.artifacts}"
    if done.code != int(any(tree.problem_pattern or tree.name in tried for tree in trees)):
        yield f"sync has the exit code {done.code}"


@pytest.mark.cold
def test_directories_that_cannot_be_entered_or_belong_to_others_are_reported(run: Run, trees_at: Path) -> None:
    """As root, the capability to ignore modes is dropped: other users may not be able to run the tests' Python."""
    hidden, of_another = (hostile.healthy(trees_at, name) for name in ("hidden", "another"))
    hostile.healthy(trees_at)
    if os.getuid() == 0:
        hostile.give_away(trees_at / "hidden")
        hostile.give_away(trees_at / "another")
    hidden.parent.chmod(0)
    shown, planned = run(["show", "--details", trees_at], ["sync", "--dry-run", trees_at], obeys_modes=True)
    hidden.parent.chmod(0o700)
    for command in (shown, planned):
        command.check()
        assert (command.code, command.out.count("● healthy"), len(command.problems_of("hidden"))) == (1, 1, 1), (
            command.out
        )
    expected = [of_another, of_another / "run-another.wandb"] if os.getuid() == 0 else []
    assert shown.problems_of("another") == []
    assert planned.out.count("belongs to user") == len(expected)
    assert all(f"! {path} belongs to user {STRANGER}, not to you" in planned.out for path in expected)


# --- a training that resumes ------------------------------------------------------------------------------------------

# Each has three rows if it is readable, or else the older file next to it has.
RESUMED = (
    *("code", "settings", "run-is-a-pipe", "run-links-to-zeros", "run-is-sparse", "uploads-of-links"),
    "kind-of-the-future",
)


def test_training_resumes_from_a_sound_file_among_hostile_ones(someone: Victim, trees_at: Path, tmp_path: Path) -> None:
    hostile.plant([TREES[name] for name in RESUMED], trees_at, someone)
    for name in RESUMED:
        directory = write_run(trees_at / name, name, stamp="20250101_000000")
        os.utime(directory / f"run-{name}.wandb", (LONG_AGO - 1000,) * 2)
    environment = someone.environment(WANDB_MODE="offline")
    same = {"cwd": str(someone.workplace), "limit": HANGS, "environment": environment, "preloads": ["torch", "wandb"]}
    orders = [{**same, "id": name, "dir": str(trees_at / name), "output": str(tmp_path / name)} for name in RESUMED]
    list_of_them = tmp_path / "orders.json"
    list_of_them.write_text(json.dumps(orders))
    words = [sys.executable, str(MEASURED), str(list_of_them)]
    finished = run_job(words, cwd=tmp_path, environment=clean_environment(PYTHONPATH=SOURCES), timeout=LONGEST).check()
    for name, result in zip(RESUMED, json.loads(finished.output), strict=True):
        job = _command(name, result)
        job.check()
        assert job.code == 0, job.out
        newest = max((trees_at / name).glob("wandb/offline-run-2*/run-*.wandb"), key=lambda path: path.parent.name)
        assert read_run(newest).run_id == name
        assert [row["global_step"] for row in read_history(newest)] == [3, 4], job.out
