"""The environment in which one file is uploaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dist_wandb.runs.client_settings import upload_environment

ROLE = {"WANDB_MODE": "shared", "WANDB_X_LABEL": "rank-1", "WANDB_RESUME": None}

pytestmark = pytest.mark.usefixtures("bare_environment")


def test_an_upload_gets_the_writers_role_and_no_settings_of_another_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("RUN_ID", "NAME", "TAGS", "RUN_GROUP", "RESUME", "SERVICE", "MODE", "SILENT", "X_LABEL"):
        monkeypatch.setenv(f"WANDB_{name}", "another's")
    monkeypatch.setenv("WANDB_ENTITY", "team")
    monkeypatch.setenv("WANDB_X_GRAPHQL_RETRY_MAX", "2")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([".", "", "/opt/lib"]))
    before = dict(os.environ)
    environment = upload_environment(tmp_path, ROLE)
    assert {name: value for name, value in environment.items() if name.startswith("WANDB_")} == {
        "WANDB_MODE": "shared",
        "WANDB_DIR": str(tmp_path),
        "WANDB_X_LABEL": "rank-1",
        "WANDB_ENTITY": "team",
        "WANDB_X_GRAPHQL_RETRY_MAX": "2",
        "WANDB_X_FILE_STREAM_RETRY_MAX": "6",
        "WANDB_X_FILE_TRANSFER_RETRY_MAX": "6",
    }
    assert environment["PATH"] == before["PATH"]
    assert (environment["PYTHONSAFEPATH"], environment["PYTHONPATH"]) == ("1", "/opt/lib")
    assert dict(os.environ) == before


def test_settings_of_the_current_directory_do_not_affect_an_upload(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A proxy without a check of certificates could intercept the key on its way to the right server."""
    project = tmp_path / "project"
    (project / "wandb").mkdir(parents=True)
    (project / "wandb" / "settings").write_text("[default]\ninsecure_disable_ssl = true\nhttps_proxy = http://evil\n")
    monkeypatch.chdir(project)
    (tmp_path / "attempt").mkdir()
    for where in (".", str(project)):
        monkeypatch.setenv("WANDB_DIR", where)
        assert upload_environment(tmp_path / "attempt", ROLE)["WANDB_DIR"] == str(tmp_path / "attempt")
        assert list((tmp_path / "attempt").rglob("*")) == [tmp_path / "attempt" / "wandb"]
