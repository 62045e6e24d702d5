"""CI's requirements (`.ci/requirements*.txt`) match the constraints, and each has a hash."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LISTED = re.compile(r"(?P<name>[a-z0-9.-]+)==(?P<version>\S+) --hash=sha256:[0-9a-f]{64}")
BY_VERSION_ALONE = {"torch"}  # CPU builds have different hashes


def listed(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / ".ci" / name).read_text().splitlines() if not line.startswith("#")]
    found = [LISTED.fullmatch(line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if not match]
    return {match["name"]: match["version"] for match in found if match}


def constrained(name: str) -> dict[str, str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return {name.lower(): version for name, _, version in (line.partition("==") for line in lines if line)}


def test_the_list_for_the_newest_versions_matches_the_constraints() -> None:
    found, wanted = listed("requirements.txt"), constrained("constraints.txt")
    assert {name: found.get(name) for name in wanted.keys() - BY_VERSION_ALONE} == {
        name: version for name, version in wanted.items() if name not in BY_VERSION_ALONE
    }, "run `make lock`"
    assert not BY_VERSION_ALONE & found.keys()


def test_the_list_for_the_oldest_versions_matches_the_constraints() -> None:
    found = {**listed("requirements.txt"), **listed("requirements-oldest.txt")}
    wanted = constrained("constraints-oldest.txt")
    assert {name: found.get(name) for name in wanted.keys() - BY_VERSION_ALONE} == {
        name: version for name, version in wanted.items() if name not in BY_VERSION_ALONE
    }, "run `make lock`"


@pytest.mark.parametrize("package", ["hatchling", "editables"])
def test_build_requirements_of_an_editable_installation_are_listed(package: str) -> None:
    assert package in listed("requirements.txt")


@pytest.mark.parametrize("package", ["build", "hatchling", "twine"])
def test_tools_of_a_release_are_listed(package: str) -> None:
    assert package in listed("requirements-release.txt")


@pytest.mark.source
def test_workflows_run_actions_of_known_commits_and_releases_are_built_from_the_lists() -> None:
    """A tag or a branch of an action can be moved to other code, which would run in the job that may publish."""
    texts = {path.name: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    used = [action for text in texts.values() for action in re.findall(r"uses: (\S+)", text)]
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)] == []
    assert "make HASHED=1 release-check" in texts["release.yml"]
