"""CI's requirements (`.ci/requirements*.txt`) match the constraints, and each has a hash; its checks are complete."""

from __future__ import annotations

import ast
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from oldest import DIFFERENT
from packaging.markers import Marker
from packaging.requirements import Requirement
from run_all import checks

import dist_wandb

ROOT = Path(__file__).parents[2]
LISTED = re.compile(
    r"(?P<name>[a-z0-9.-]+)==(?P<version>\S+)(?: ; (?P<marker>[^#]+?))?(?: --hash=sha256:[0-9a-f]{64})+"
)
BY_VERSION_ALONE = {"torch"}  # CPU builds have different hashes


def listed(name: str, python: str = "3.11.9") -> dict[str, str]:
    """The versions of a list that apply to a Python version."""
    lines = [line for line in (ROOT / ".ci" / name).read_text().splitlines() if not line.startswith("#")]
    found = [LISTED.fullmatch(line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if not match]
    return {one["name"]: one["version"] for one in found if one and applies(one["marker"], python)}


def applies(marker: str | None, python: str) -> bool:
    environment = {"python_full_version": python, "python_version": python.rpartition(".")[0]}
    return not marker or Marker(marker).evaluate(environment)


def constrained(name: str, python: str = "3.11.9") -> dict[str, str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    found = (Requirement(line) for line in lines if line)
    return {
        one.name.lower(): str(one.specifier).removeprefix("==")
        for one in found
        if applies(str(one.marker or ""), python)
    }


@pytest.mark.parametrize("python", ["3.10.14", "3.11.9", "3.12.4", "3.13.1", "3.14.0"])
def test_the_lists_match_the_constraints(python: str) -> None:
    of_venv, of_trl = listed("requirements.txt", python), listed("requirements-trl.txt", python)
    of_oldest = {**listed("requirements.txt"), **listed("requirements-oldest.txt")}
    for found, wanted in (
        ({**of_venv, **of_trl}, constrained("constraints.txt", python)),
        (of_oldest, constrained("constraints-oldest.txt")),
    ):
        assert found.items() >= {(name, version) for name, version in wanted.items() if name not in BY_VERSION_ALONE}, (
            "run `make lock`"
        )
    assert not BY_VERSION_ALONE & {**of_venv, **of_trl}.keys()
    assert not of_venv.keys() & of_trl.keys()


def test_packages_of_which_test_oldest_has_another_version_are_known() -> None:
    newest, oldest = constrained("constraints.txt"), constrained("constraints-oldest.txt")
    different = {name for name in oldest if newest.get(name) not in (None, oldest[name])}
    assert {name.replace("-", "_") for name in different} == DIFFERENT


@pytest.mark.parametrize(
    ("name", "tools"),
    [("requirements.txt", {"hatchling", "editables"}), ("requirements-release.txt", {"build", "hatchling", "twine"})],
    ids=["an editable installation", "a release"],
)
def test_tools_that_build_the_package_are_listed(name: str, tools: set[str]) -> None:
    assert listed(name).keys() >= tools


@pytest.mark.source
def test_workflows_run_actions_of_known_commits_and_install_from_the_lists_of_their_python() -> None:
    """A tag or a branch of an action can be moved to other code, which would run in the job that may publish."""
    texts = {path.name: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    used = [action for text in texts.values() for action in re.findall(r"uses: (\S+)", text)]
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)] == []
    made = {name: re.findall(r"run: (make .*)", text) for name, text in texts.items()}
    assert made == {
        "ci.yml": ["make HASHED=1 test", "make VENV=.venv-newest CONSTRAINTS=/dev/null test"],
        "release.yml": ["make HASHED=1 release-check"],
    }
    _, weekly = texts["ci.yml"].split("  newest:\n")  # the only one without hashes. Its token can read, and no more
    assert "CONSTRAINTS=/dev/null" in weekly
    assert all("permissions:\n  contents: read\n" in text for text in texts.values())
    pythons = re.findall(r'"(3\.\d+)"', texts["ci.yml"])
    head = (ROOT / ".ci" / "requirements.txt").read_text().partition("\n")[0]
    assert pythons
    assert [version for version in pythons if not re.search(rf"\b{re.escape(version)}\b", head)] == []


def test_every_directory_of_tests_is_in_a_check() -> None:
    words = {word for part in checks(2)["test"] for word in part.command}
    assert {path.parent for path in (ROOT / "tests").glob("*/test_*.py")} == {
        ROOT / word for word in words if word.startswith("tests/") and not word.endswith(".py")
    }


@pytest.mark.source
def test_what_the_package_imports_is_required() -> None:
    nodes = [
        node
        for path in Path(dist_wandb.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
    ]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    required = [Requirement(one).name.replace("-", "_") for one in metadata.requires("dist-wandb") or ()]
    of_others = {"lightning_utilities", "PIL", "typing_extensions"}  # Lightning's; images that a script has; for types
    found = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    assert found - of_others == {*required, "dist_wandb"} - {"dist-wandb"}


@pytest.mark.source
def test_the_conda_recipe_is_that_of_the_package() -> None:
    recipe: Any = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())
    of_package = [one for one in map(Requirement, metadata.requires("dist-wandb") or ()) if one.name != "dist-wandb"]
    for part, has_marker in (("run", False), ("run_constraints", True)):
        asked = [one for one in of_package if bool(one.marker) == has_marker]
        wanted = {f"{'pytorch' if one.name == 'torch' else one.name} {one.specifier}" for one in asked}
        assert set(recipe["requirements"][part]) - {"python >=${{ python_min }}"} == wanted, part
    (back_end,) = set(recipe["requirements"]["host"]) - {"python ${{ python_min }}.*", "pip"}
    assert f'requires = ["{back_end.replace(" ", "")}"]' in (ROOT / "pyproject.toml").read_text()
    assert recipe["context"]["version"] == dist_wandb.__version__
    (command,) = metadata.entry_points(name="dist-wandb", group="console_scripts")
    assert recipe["build"]["python"]["entry_points"] == [f"dist-wandb = {command.value}"]
    about = metadata.metadata("dist-wandb")
    assert about["Requires-Python"] == f">={recipe['context']['python_min']}"
    fields = {"summary": "Summary", "license": "License-Expression", "license_file": "License-File"}
    assert recipe["about"] == {key: about[field] for key, field in fields.items()}
