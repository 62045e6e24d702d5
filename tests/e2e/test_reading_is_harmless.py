"""Reading an untrusted run directory executes nothing in it. For servers see test_hostile_trees.py."""

from __future__ import annotations

import getpass
import os
import sys
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


@pytest.mark.parametrize(
    ("code", "search_path"),
    [(READ, ""), (READ, f".{os.pathsep}"), (RESUME, f".{os.pathsep}")],
    ids=["reads", "reads-in-home", "resumes"],
)
def test_no_module_of_a_run_directory_is_imported_and_no_pipe_awaited(
    tmp_path: Path, code: str, search_path: str
) -> None:
    """If wandb's commands find no directory for their log, they append to a file in `shared` with a known name."""
    home, shared, script = (tmp_path / name for name in ("home", "shared", "bin/script.py"))
    for directory in (home, shared, script.parent):
        directory.mkdir()
    script.write_text(code)  # in a directory of its own, the first one that Python searches for modules
    os.mkfifo(shared / f"debug-cli.{getpass.getuser()}.log")
    file = make_run(home)
    canary = tmp_path / "canary"
    plant(file.parent, canary)
    here = home if search_path else file.parent  # the user's "." is the current directory
    paths = search_path + os.pathsep.join(path for path in sys.path if path)
    environment = clean_environment(PYTHONPATH=paths, TMPDIR=str(shared), WANDB_ERROR_REPORTING="true")
    run_job([sys.executable, script, home, file], cwd=here, environment=environment, timeout=100).check()
    assert not canary.exists(), f"run: {canary.read_text().split()}"
    assert [entry.name for entry in shared.iterdir()] == [f"debug-cli.{getpass.getuser()}.log"]
