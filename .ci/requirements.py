"""What CI installs, by version and hash: `requirements.txt` for .venv, `requirements-oldest.txt` for .venv-oldest.

    suits                               whether the lists hold for this Python; exit code 1, and why, if not
    install (newest | oldest) PYTHON    install one of them into an environment
    lock PYTHON                         write them anew, from pyproject.toml and the constraints

A hash is that of one file, so the lists hold for one platform and one Python: those of CI. Torch is pinned by its
version alone: CPU builds have hashes of their own, which depend on the index that serves them.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
SUITS = ("CPython", "3.11", "Linux", "x86_64")
BY_VERSION_ALONE = ("torch",)
NEWEST, OLDEST = HERE / "requirements.txt", HERE / "requirements-oldest.txt"
GROUPS = ("examples", "test", "lint", "docs")
BUILD = ("hatchling>=1.26,<2", "editables>=0.5,<1")  # what an editable installation is made with


def pip(python: str, *words: str) -> None:
    """Run pip for an environment, that of this Python installing into `python`'s; end this process if it fails."""
    command = [sys.executable, "-m", "pip", "--python", python, *words]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code:
        sys.exit(f"failed with exit code {code}: {' '.join(command)}")


def here() -> tuple[str, ...]:
    """This Python and platform, as `SUITS` names them."""
    version = ".".join(platform.python_version_tuple()[:2])
    return platform.python_implementation(), version, platform.system(), platform.machine()


def suits() -> int:
    """Say whether the lists hold here."""
    if here() == SUITS:
        return 0
    sys.stderr.write(
        f"HASHED: .ci/requirements.txt is for {' '.join(SUITS)}, and this is {' '.join(here())}. What is installed is "
        "chosen by the constraints files, WITHOUT hashes.\n"
    )
    return 1


def install(target: str, python: str) -> int:
    """Install one of the lists, and this package without what it needs, which is in the list."""
    listed = {"newest": NEWEST, "oldest": OLDEST}[target]
    if target == "newest":  # the second environment has torch from the first
        constraints = str(ROOT / "constraints.txt")
        pip(python, "install", "--quiet", "--no-deps", "--constraint", constraints, *BY_VERSION_ALONE)
        sys.stdout.write(
            f"{' '.join(BY_VERSION_ALONE)}: installed by version, without a hash (see {Path(__file__).name})\n"
        )
    pip(
        python,
        "install",
        "--quiet",
        "--no-warn-conflicts",
        "--require-hashes",
        "--no-deps",
        "--requirement",
        str(listed),
    )
    pip(python, "install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", ".")
    if target == "newest":  # the oldest versions come before newer ones on the path, and pip sees both
        pip(python, "check")
    return 0


def resolved(python: str, *words: str) -> list[dict[str, Any]]:
    """What pip would install."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        pip(python, "install", "--quiet", "--dry-run", "--ignore-installed", "--report", str(report), *words)
        chosen: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    return chosen


def pins(chosen: Sequence[dict[str, Any]]) -> dict[str, str]:
    """A requirement with its hash for each package but those that CI installs otherwise."""
    found = {}
    for item in chosen:
        name, version = item["metadata"]["name"].lower().replace("_", "-"), item["metadata"]["version"]
        if name != "dist-wandb" and name not in BY_VERSION_ALONE:
            found[name] = f"{name}=={version} --hash=sha256:{item['download_info']['archive_info']['hashes']['sha256']}"
    return found


def write(path: Path, what: str, lines: Sequence[str]) -> None:
    """Write one of the lists."""
    head = f"# {what}, for {' '.join(SUITS)}. Made by `make lock`; not edited by hand."
    path.write_text("\n".join([head, *sorted(lines)]) + "\n")


def lock(python: str) -> int:
    """Write both lists: the second has what .venv lacks, or has in another version."""
    if suits():
        return 1
    groups = [word for group in GROUPS for word in ("--group", group)]
    newest = pins(resolved(python, "--constraint", "constraints.txt", ".[all]", *groups, *BUILD))
    write(NEWEST, "What CI installs into .venv", list(newest.values()))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as both:
        both.write(oldest_constraints())
        both.flush()
        oldest = pins(resolved(python, "--constraint", both.name, ".[all]", "--group", "test", "setuptools"))
    write(
        OLDEST, "What CI installs into .venv-oldest", [pin for name, pin in oldest.items() if newest.get(name) != pin]
    )
    return 0


def oldest_constraints() -> str:
    """The oldest versions, and for all else the constraints of .venv."""
    newest, oldest = (
        {line.partition("==")[0]: line for line in (ROOT / name).read_text().splitlines() if "==" in line}
        for name in ("constraints.txt", "constraints-oldest.txt")
    )
    return "\n".join({**newest, **oldest}.values()) + "\n"


def main(words: Sequence[str]) -> int:
    """Run one command."""
    match words:
        case ["suits"]:
            return suits()
        case ["install", ("newest" | "oldest") as target, python]:
            return install(target, python)
        case ["lock", python]:
            return lock(python)
    sys.stderr.write(__doc__ or "")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
