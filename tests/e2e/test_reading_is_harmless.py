"""Reading an untrusted run directory executes nothing in it. For servers see test_hostile_trees.py."""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import clean_environment, run_job
from record_files import make_run

READ = """
import pathlib, sys
from dist_wandb.cli import main
from dist_wandb.wandb_files.reading import rows_in
directory, file = sys.argv[1:]
assert len(list(rows_in(pathlib.Path(file)))) == 3
assert main(["show", directory]) == main(["sync", "--dry-run", directory]) == 0
"""
RESUME = """
import os, dist_wandb
session = dist_wandb.init(id="exp", resume="allow", project="digits", mode="offline")
session.log({"loss": 1.0})
assert session.run.summary["global_step"] == 3, dict(session.run.summary)
session.finish()
"""
# Modules that wandb, click and Python import early or late, and that the start of Python searches for.
pytestmark = pytest.mark.cold  # the subject is where imports are found

MODULES = ("click", "wandb", "json", "yaml", "requests", "typing_extensions", "sitecustomize", "usercustomize", "-x")
PACKAGES = ("encodings", "pydantic", "google")


def plant(directory: Path, canary: Path) -> None:
    """Write modules into a directory. Each appends its name to `canary` when it is imported."""
    for name in MODULES:
        (directory / f"{name}.py").write_text(f"open({str(canary)!r}, 'a').write({name!r} + '\\n')\n")
    for name in PACKAGES:
        (directory / name).mkdir()
        (directory / name / "__init__.py").write_text(f"open({str(canary)!r}, 'a').write({name!r} + '\\n')\n")


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Write a script into a separate directory, which is the first one that Python searches for modules."""

    def write(code: str) -> Path:
        path = tmp_path / "bin" / "script.py"
        path.parent.mkdir()
        path.write_text(code)
        return path

    return write


@pytest.mark.parametrize(
    ("code", "search_path"),
    [(READ, ""), (READ, f".{os.pathsep}"), (RESUME, f".{os.pathsep}")],
    ids=["reads", "reads-in-home", "resumes"],
)
def test_no_module_of_a_run_directory_is_imported(
    tmp_path: Path, script: Callable[[str], Path], code: str, search_path: str
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    file = make_run(home)
    canary = tmp_path / "canary"
    plant(file.parent, canary)
    here = home if search_path else file.parent  # the user's "." is the current directory
    environment = clean_environment(PYTHONPATH=search_path + os.pathsep.join(path for path in sys.path if path))
    command: list[str | Path] = [sys.executable, script(code), home, file]
    run_job(command, cwd=here, environment=environment).check()
    assert not canary.exists(), f"run: {canary.read_text().split()}"


def test_a_pipe_in_the_shared_temporary_directory_does_not_block(tmp_path: Path, script: Callable[[str], Path]) -> None:
    """If wandb's commands find no directory for their log, they append to a file there with a known name."""
    file = make_run(tmp_path)
    shared = tmp_path / "shared"
    shared.mkdir()
    os.mkfifo(shared / f"debug-cli.{getpass.getuser()}.log")
    environment = {**clean_environment(TMPDIR=str(shared)), "WANDB_ERROR_REPORTING": "true"}
    run_job([sys.executable, script(READ), tmp_path, file], cwd=tmp_path, environment=environment, timeout=60).check()
    assert [entry.name for entry in shared.iterdir()] == [f"debug-cli.{getpass.getuser()}.log"]
