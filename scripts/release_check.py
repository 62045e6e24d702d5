"""Check a release: build, inspect, install and test it without the source tree.

    python scripts/release_check.py [--fast] [--hashed]

Each step prints its result and duration; the first failure ends the program with exit code 1. The built files, and the
SBOM of an environment with the wheel, remain in `dist`. Tools, with the build backend, come from the dependency group
"release". With ``--hashed``, as in CI, what the wheel is tested with is installed by version and hash.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
TOOLS = Path(sys.executable).parent
MOST_SECONDS = 1800  # timeout of each command
LEFT_TO_ACCELERATE = "DistWandbTracker"
"""Accelerate has no types, so those of the class that is derived from one of its own are not known."""


class CheckError(Exception):
    """A check of the release has failed."""


def run(
    *command: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None, codes: Sequence[int] = (0,)
) -> str:
    """Run a command.

    Args:
        *command: The words of the command.
        cwd: Working directory.
        env: Environment; variables that would lead Python to the source tree are removed.
        codes: Exit codes of success.

    Returns:
        The standard output.

    Raises:
        CheckError: The command failed or timed out.
    """
    environment = {name: value for name, value in (env or os.environ).items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    try:
        done = subprocess.run(  # noqa: S603  # commands of this file
            words, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=MOST_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise CheckError(f"{' '.join(words)}: timed out after {MOST_SECONDS} s") from None
    if done.returncode not in codes:
        raise CheckError(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout[-8000:]}{done.stderr[-4000:]}")
    return done.stdout


@contextmanager
def step(name: str) -> Iterator[list[str]]:
    """Print the name of a step, its result, and its duration."""
    found: list[str] = []
    began = time.monotonic()
    print(f"{name} ...", flush=True)  # noqa: T201  # a command line prints
    yield found
    print(f"  {'; '.join(found)} ({time.monotonic() - began:.0f} s)", flush=True)  # noqa: T201


def build(into: Path) -> dict[str, str]:
    """Build the sdist, and the wheel from it, with the date of the last commit. Return hashes by file name."""
    commit = run("git", "log", "-1", "--format=%ct").strip()
    run(
        TOOLS / "python",
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        into,
        env={**os.environ, "SOURCE_DATE_EPOCH": commit},
    )
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(into.iterdir())}


def look_into(wheel: Path, sdist: Path) -> list[str]:
    """Check that the files contain everything required, and nothing forbidden."""
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = archive.namelist()
    with tarfile.open(sdist) as archive:
        in_sdist = [name.partition("/")[2] for name in archive.getnames()]
    licence = next((name for name in in_wheel if name.endswith(".dist-info/licenses/LICENSE")), None)
    wanted = {
        "the wheel has no licence": licence is None,
        "the wheel has no py.typed": "dist_wandb/py.typed" not in in_wheel,
        "the wheel has other top-level names": {name.split("/")[0].split("-")[0] for name in in_wheel}
        != {"dist_wandb"},
        "the sdist has no licence": "LICENSE" not in in_sdist,
        "the sdist has no tests": "tests/conftest.py" not in in_sdist,
    }
    wrong = [message for message, is_so in wanted.items() if is_so]
    if wrong:
        raise CheckError("; ".join(wrong))
    return [f"{len(in_wheel)} files in the wheel, {len(in_sdist)} in the sdist, licence in both"]


def install(wheel: Path, environment: Path, *, is_hashed: bool) -> Path:
    """Install the wheel and the dependencies of the tests into a new environment. Return its Python."""
    run(sys.executable, "-m", "venv", environment)
    python = environment / "bin" / "python"
    if is_hashed:
        run(sys.executable, ".ci/requirements.py", "install", "newest", python, wheel)
        return python
    run(python, "-m", "pip", "install", "--quiet", "--upgrade", "pip>=25.1,<27")
    run(python, "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt", f"{wheel}[all]")
    return python


def write_sbom(python: Path, path: Path) -> list[str]:
    """Write the contents of an environment with the wheel, in CycloneDX format."""
    run(TOOLS / "cyclonedx-py", "environment", "--output-reproducible", "--of", "JSON", "-o", path, python)
    components = {part["name"]: part for part in json.loads(path.read_text())["components"]}
    if "dist-wandb" not in components or "torch" not in components:
        raise CheckError(f"{path.name} lists neither dist-wandb nor torch")
    return [f"{path.name}: {len(components)} components"]


def unknown_types(python: Path) -> list[str]:
    """Return public names of the wheel without a known type, according to pyright."""
    env = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    command = (TOOLS / "pyright", "--verifytypes", "dist_wandb", "--ignoreexternal", "--outputjson")
    printed = run(*command, cwd=python.parent, env=env, codes=(0, 1))
    complete = json.loads(printed)["typeCompleteness"]
    symbols = [one for one in complete["symbols"] if one["isExported"]]
    wrong = [one["name"] for one in symbols if not is_known(one)]
    if not symbols or wrong or complete["missingFunctionDocStringCount"]:
        raise CheckError(f"of {len(symbols)} names these have no known type, or no docstring: {', '.join(wrong)}")
    left = sum(not one["isTypeKnown"] for one in symbols)
    return [f"{len(symbols) - left} of {len(symbols)} names have a type; the others are of {LEFT_TO_ACCELERATE}"]


def is_known(symbol: Mapping[str, object]) -> bool:
    """Return whether the type of a name is known, apart from types that Accelerate leaves unknown."""
    messages = [one["message"] for one in symbol["diagnostics"]]  # type: ignore[attr-defined]  # of pyright's JSON
    if symbol["isTypeAmbiguous"]:
        return False
    of_accelerate = all(LEFT_TO_ACCELERATE in message for message in messages) or LEFT_TO_ACCELERATE in str(
        symbol["name"]
    )
    return bool(symbol["isTypeKnown"]) or of_accelerate


def test(python: Path, sdist: Path, into: Path, *, is_hashed: bool) -> list[str]:
    """Run the unit and contract tests of the sdist, without its `src`, against the installed package."""
    with tarfile.open(sdist) as archive:
        archive.extractall(into, filter="data")
    (tree,) = into.iterdir()
    shutil.rmtree(tree / "src")
    if not is_hashed:  # else they are in the list
        run(python, "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt", "--group", "test", cwd=tree)
    where = run(python, "-c", "import dist_wandb; print(dist_wandb.__file__)", cwd=tree).strip()
    if not Path(where).is_relative_to(python.parents[1]):
        raise CheckError(f"dist_wandb was imported from {where}, not from the new environment")
    command = (
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "--dist",
        "loadfile",
        "-m",
        "not source",
        "tests/unit",
        "tests/contract",
    )
    printed = run(python, *command, cwd=tree)
    return [printed.strip().splitlines()[-1].strip("= ")]


def check(scratch: Path, *, is_fast: bool, is_hashed: bool) -> None:
    """Run all checks; `is_fast` leaves out the tests."""
    shutil.rmtree(DIST, ignore_errors=True)
    with step("Build, twice") as found:
        first, second = build(DIST), build(scratch / "again")
        if first != second:
            raise CheckError(f"two builds of one commit differ: {first}, {second}")
        found.extend(f"{name} sha256:{digest[:16]}" for name, digest in first.items())
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    with step("Contents") as found:
        found.extend(look_into(wheel, sdist))
        run(TOOLS / "twine", "check", "--strict", wheel, sdist)
        found.append("twine has nothing to say")
    with step("Install into a new environment, list what it consists of") as found:
        python = install(wheel, scratch / "installed", is_hashed=is_hashed)
        found.extend(write_sbom(python, DIST / f"{wheel.name.split('-py3')[0]}.cdx.json"))
    with step("Types of public names") as found:
        found.extend(unknown_types(python))
    if not is_fast:
        with step("Unit and contract tests, without the source tree") as found:
            found.extend(test(python, sdist, scratch / "sdist", is_hashed=is_hashed))


def main() -> None:
    """Run all checks, and print the first failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="leave the tests out")
    parser.add_argument("--hashed", action="store_true", help="install by version and hash (.ci/requirements.txt)")
    given = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="dist_wandb-release-") as scratch:
            check(Path(scratch), is_fast=given.fast, is_hashed=given.hashed)
    except CheckError as error:
        sys.exit(f"release-check: {error}")


if __name__ == "__main__":
    main()
