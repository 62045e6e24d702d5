"""What CI installs by version and hash: `requirements.txt` for .venv, `requirements-trl.txt` for .venv/trl,
`requirements-oldest.txt` for .venv-oldest, and `requirements-release.txt` for .venv-release, which builds the packages
that are published.

    suits                               check that the lists are valid for this Python; if not, exit with 1
    install (newest | trl | oldest | release) PYTHON [WHEEL]
                                        install one of the lists into an environment, and for newest and oldest the
                                        wheel, or else the source tree
    lock UV                             regenerate the lists from pyproject.toml and the constraints, by this uv

A list is for one platform. The first two are for all Python versions of CI: they have the hashes of all wheels that one
of them installs, and markers where they need different versions. The others are for the version that uses them. Nothing
is built from source. Torch is pinned by version only: CPU builds have different hashes, which depend on the index.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
PLATFORM = ("CPython", "Linux", "x86_64")
ALL = ("3.10", "3.11", "3.12", "3.13", "3.14")
PYTHONS = {"newest": ALL, "trl": ALL, "oldest": ("3.11",), "release": ("3.11",)}
BY_VERSION_ALONE = ("torch",)
OF_CUDA = ("cuda-", "nvidia-", "triton")  # only torch's builds for GPUs need them
LISTS = {
    "newest": HERE / "requirements.txt",
    "trl": HERE / "requirements-trl.txt",
    "oldest": HERE / "requirements-oldest.txt",
    "release": HERE / "requirements-release.txt",
}
GROUPS = ("examples", "test", "lint", "docs")
# The first two are needed for an editable installation, the third by lightning 2.2.
ALSO = ("hatchling>=1.26,<2", "editables>=0.5,<1", "setuptools")


def pip(python: str, *words: str) -> None:
    """Run this Python's pip on the environment of `python`; exit if it fails."""
    command = [sys.executable, "-m", "pip", "--python", python, *words]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code:
        sys.exit(f"failed with exit code {code}: {' '.join(command)}")


def known(target: str) -> str:
    """Return for what a list is valid."""
    return f"{PLATFORM[0]} {', '.join(PYTHONS[target])} on {' '.join(PLATFORM[1:])}"


def suits(target: str = "newest") -> int:
    """Check that a list is valid for this Python and platform; return the exit code."""
    version = ".".join(platform.python_version_tuple()[:2])
    here = platform.python_implementation(), platform.system(), platform.machine()
    if version in PYTHONS[target] and here == PLATFORM:
        return 0
    sys.stderr.write(
        f"HASHED: {LISTS[target].relative_to(ROOT)} is for {known(target)}, but this is {here[0]} {version} on "
        f"{' '.join(here[1:])}. By the constraints files, packages can be installed WITHOUT hashes.\n"
    )
    return 1


def install(target: str, python: str, wheel: str | None = None) -> int:
    """Install one of the lists, and this package without its dependencies, which are in the list."""
    if suits(target):
        return 1
    if target == "newest":  # the second environment uses torch from the first
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
        "--only-binary=:all:",
        "--no-deps",
        "--requirement",
        str(LISTS[target]),
    )
    if target in ("trl", "release"):
        return 0
    package = (wheel,) if wheel else ("--no-build-isolation", "--editable", ".")
    pip(python, "install", "--quiet", "--no-deps", *package)
    if target == "newest":  # in the other one pip sees both the oldest and the newer versions
        pip(python, "check")
    return 0


def suitable_tags(pythons: Iterable[str]) -> set[object]:
    """Return the tags of wheels that one of these Python versions can install."""
    from packaging import tags

    platforms = list(tags.platform_tags())
    found: set[object] = set()
    for major, _, minor in (version.partition(".") for version in pythons):
        version = (int(major), int(minor))
        found.update(tags.cpython_tags(version, platforms=platforms))
        found.update(tags.compatible_tags(version, f"cp{major}{minor}", platforms))
    return found


def locked(uv: str, target: str, constraints: str, *words: str) -> set[str]:
    """Return a requirement, with its hashes, for each package that uv chooses for a list."""
    import tomllib  # type: ignore[import-not-found]  # of Python 3.11, which `lock` needs
    from packaging.utils import parse_wheel_filename

    suitable = suitable_tags(PYTHONS[target])
    with tempfile.TemporaryDirectory() as directory:
        constraint, also, lock = (Path(directory) / name for name in ("constraints.txt", "also.in", "pylock.toml"))
        constraint.write_text(constraints)
        also.write_text("\n".join(ALSO))
        command = [uv, "pip", "compile", "--quiet", "--python-version", PYTHONS[target][0], *words, str(also)]
        command += ["--constraint", str(constraint), "--output-file", str(lock)]
        if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
            sys.exit(f"failed with exit code {code}: {' '.join(command)}")
        packages = tomllib.loads(lock.read_text())["packages"]
    found = set()
    for package in packages:
        name = package["name"]
        if name == "dist-wandb" or name in BY_VERSION_ALONE or name.startswith(OF_CUDA):
            continue
        wheels = {wheel["url"].rpartition("/")[2]: wheel["hashes"]["sha256"] for wheel in package.get("wheels", ())}
        hashes = sorted(digest for file, digest in wheels.items() if parse_wheel_filename(file)[3] & suitable)
        if not hashes:
            sys.exit(f"{name} {package['version']} has no wheel for {known(target)}")
        marker = f" ; {package['marker']}" if "marker" in package else ""
        found.add(f"{name}=={package['version']}{marker}" + "".join(f" --hash=sha256:{digest}" for digest in hashes))
    return found


def write(target: str, lines: Iterable[str]) -> None:
    """Write one of the lists."""
    environment = {"newest": ".venv", "trl": ".venv/trl"}.get(target, f".venv-{target}")
    head = (
        f"# Packages that CI installs into {environment}, for {known(target)}. Generated by `make lock`; do not edit."
    )
    LISTS[target].write_text("\n".join([head, *sorted(lines)]) + "\n")


def lock(uv: str) -> int:
    """Write the lists; .venv/trl and .venv-oldest have only packages that .venv lacks or has in another version."""
    from packaging.requirements import Requirement

    if suits("oldest"):
        return 1
    constraints = (ROOT / "constraints.txt").read_text()
    groups = [word for group in GROUPS for word in ("--group", group)]
    newest = locked(uv, "newest", constraints, "pyproject.toml", "--all-extras", *groups, "--universal")
    with_trl = locked(
        uv, "trl", constraints, "pyproject.toml", "--all-extras", *groups, "--group", "trl", "--universal"
    )
    oldest = locked(uv, "oldest", oldest_constraints(), "pyproject.toml", "--all-extras", "--group", "test")
    chosen = (Requirement(line.partition(" --hash")[0]) for line in newest)
    pins = {f"{one.name}{one.specifier}" for one in chosen if one.marker is None or one.marker.evaluate()}
    write("newest", newest)
    write("trl", with_trl - newest)
    write("oldest", (line for line in oldest if line.partition(" ")[0] not in pins))
    write("release", locked(uv, "release", constraints, "--group", "release"))
    return 0


def oldest_constraints() -> str:
    """Return the oldest versions, and the constraints of .venv for all other packages."""
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
        case ["install", ("newest" | "trl" | "oldest" | "release") as target, python, *wheel] if len(wheel) <= 1:
            return install(target, python, *wheel)
        case ["lock", uv]:
            return lock(uv)
    sys.stderr.write(__doc__ or "")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
