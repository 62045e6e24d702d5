"""The server that receives runs, its source, whether the API key may go there, and the environment of an upload."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dist_wandb.runs import client_settings
from dist_wandb.runs.client_settings import (
    Destination,
    is_address,
    is_loopback,
    is_same_server,
    refusal_of,
    upload_environment,
)


@pytest.mark.parametrize("is_named", [True, False])
def test_the_user_may_trust_one_server_without_trusting_others(is_named: bool) -> None:
    assert refusal_of("http://a.example:8080/", "x", is_named=is_named, trusted="http://A.example:8080") == ""
    refusal = refusal_of("http://a.example:8080", "x", is_named=is_named, trusted="http://joe:pw@a.example")
    assert "--trust-server names another server, http://a.example." in refusal
    assert "pw" not in refusal


def test_the_suggested_option_is_safe_to_paste_and_has_no_password() -> None:
    refusal = refusal_of("https://joe:pw@evil.example/$(id)", "x", is_named=False)
    assert "--trust-server 'https://evil.example/$(id)'" in refusal
    assert "pw" not in refusal


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("https://api.wandb.ai", "https://api.wandb.ai/", True),
        ("https://API.wandb.ai:443", "https://joe:pw@api.wandb.ai", True),
        ("https://api.wandb.ai.", "https://api.wandb.ai", True),
        ("https://api.wandb.ai", "http://api.wandb.ai", False),
        ("https://api.wandb.ai", "https://api.wandb.ai:8443", False),
        ("https://api.wandb.ai", "https://api.wandb.ai/elsewhere", False),
        ("https://api.wandb.ai", "https://api.wandb.ai.evil.example", False),
        # urllib reads the host after the last @, browsers and requests read the host before the backslash
        ("https://api.wandb.ai", "https://evil.example\\@api.wandb.ai", False),
        ("https://api.wandb.ai", "https://evil.example@x@api.wandb.ai", False),
        ("https://api.wandb.ai", "https://api.wandb.ai\t", False),
    ],
)
def test_servers_are_the_same_only_if_all_parsers_agree(one: str, other: str, *, same: bool) -> None:
    assert is_same_server(one, other) is same
    assert is_same_server(other, one) is same


@pytest.mark.parametrize(
    "text", ["", "wandb.example", "ftp://a", "https://", "https://a:x", "https://[a", "https://a b", "https://a\n"]
)
def test_texts_that_are_not_addresses(text: str) -> None:
    assert not is_address(text)


def test_addresses_of_this_host() -> None:
    here = ("127.0.0.1", "127.9.9.9:1", "[::1]", "LOCALHOST.", "a@localhost")
    elsewhere = ("10.0.0.1", "localhost.evil.example", "127.1.evil.example", "[::2]", "127.0.0.1@evil.example")
    assert [host for host in (*here, *elsewhere) if is_loopback(f"http://{host}")] == [*here]


def test_passwords_are_in_no_output() -> None:
    url = "https://joe:secret@wandb.example:8443/x"
    shown = client_settings.without_password(url)
    assert shown == "https://wandb.example:8443/x"
    assert "secret" not in repr(Destination(url, shown, "WANDB_BASE_URL"))


# --- the environment in which one file is uploaded --------------------------------------------------------------------

ROLE = {"WANDB_MODE": "shared", "WANDB_X_LABEL": "rank-1", "WANDB_RESUME": None}


@pytest.mark.usefixtures("bare_environment")
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


@pytest.mark.usefixtures("bare_environment")
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
