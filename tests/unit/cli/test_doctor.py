"""`dist-wandb doctor`: the rank of this process, the run it would open, and wandb's setup."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import wandb
from launchers import variables
from wandb_server import WandbServer

from dist_wandb.cli import main
from dist_wandb.cli.doctor import PACKAGES, ask, examine
from dist_wandb.errors import ConfigurationError
from dist_wandb.runs import client_settings, requested
from dist_wandb.settings.plan import RunMode

KEY = "0123456789" * 4
MISPLACED = "Hunter2-passw0rd"
TORCHRUN = variables(
    "TORCHELASTIC_RUN_ID=none RANK=1 LOCAL_RANK=1 GROUP_RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 GROUP_WORLD_SIZE=2"
)
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
STALE_SLURM = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "8"}


@pytest.fixture
def set_variables(bare_environment: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:  # noqa: ARG001  # must run first
    """Return a function that sets variables in an environment without launcher, key and server."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.chdir(tmp_path)

    def set_all(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        wandb.teardown()  # wandb reads its settings once per process

    yield set_all
    wandb.teardown()


examined: Any = examine  # whose optional parts the tests expect


# --- rank and run -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("set_variables")
def test_process_without_a_launcher_is_a_job_of_its_own() -> None:
    found = examined()
    assert found.topology.world_size == 1
    assert (found.plan.run_id, found.plan.opens_run) == (None, True)
    assert (found.launchers, found.errors, found.warnings, found.server) == ((), (), (), None)
    assert found.versions.keys() == {"python", *PACKAGES}
    assert found.versions["wandb"] == wandb.__version__


def test_rank_and_run_are_printed_as_text_and_as_json(set_variables: Any, capsys: pytest.CaptureFixture[str]) -> None:
    set_variables(**TORCHRUN, **STALE_SLURM, **AGENT)
    assert main(["doctor", "--run-mode", "shared"]) == 0
    out = capsys.readouterr().out
    assert "rank 1 of 4, local rank 1, node 0 of 2" in out
    assert "global_rank=1 from RANK (torchrun)" in out
    assert "the run ID, as worker-0-rank-1 (run_mode=shared, rank_scope=global; ID is made when runs are opened)" in out
    assert "SLURM: contradicts" in out
    assert "! SLURM has left variables" in out
    assert f"wandb {wandb.__version__}" in out
    assert main(["doctor", "--run-mode", "new", "--rank-scope", "worker", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["topology"]["global_rank"], printed["topology"]["node_rank"]) == (1, 0)
    assert (printed["sources"]["global_rank"], printed["sources"]["node_rank"]) == (
        "RANK (torchrun)",
        "GROUP_RANK (torchrun)",
    )
    assert (printed["plan"]["run_id"], printed["plan"]["group"]) == ("ID-worker-0-rank-1", "ID-worker-0")
    assert [(one["name"], one["status"]) for one in printed["launchers"]] == [
        ("torchrun", "used"),
        ("SLURM", "contradicts"),
    ]
    assert (printed["setup"]["mode"], printed["setup"]["has_key"], printed["errors"]) == ("offline", False, [])


def test_environment_sets_mode_id_group_and_trial(set_variables: Any) -> None:
    set_variables(**{**TORCHRUN, **AGENT}, DIST_WANDB_RUN_MODE="shared", WANDB_RUN_ID="exp", WANDB_RUN_GROUP="night")
    found = examined()
    assert found.errors == found.warnings == ()
    plan = found.plan
    assert (plan.run_mode, plan.run_id, plan.group, plan.label) == ("shared", "exp", "night", "worker-0-rank-1")
    set_variables(RANK="0", LOCAL_RANK="0", WANDB_SWEEP_ID="s1")
    found = examined("new")
    assert (found.plan.run_id, found.plan.is_trial) == ("exp", True)
    assert sum("accepts one run as a trial" in warning for warning in found.warnings) == 1
    assert not any("a trial" in warning for warning in examined("auto").warnings)


def test_layout_known_only_to_all_ranks_together_is_not_an_error(set_variables: Any) -> None:
    set_variables(OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="4")
    found = examined("shared")
    assert found.plan is None
    assert found.errors == ()
    assert "Open MPI does not provide the node rank of this process" in found.warnings[0]
    assert "open the run after init_process_group" in found.warnings[0]
    set_variables(TORCHELASTIC_RUN_ID="none", RANK="1", WORLD_SIZE="4", **AGENT)
    assert "the ranks exchange it when the run is opened" in examined("shared").warnings[0]


@pytest.mark.parametrize(
    ("environ", "error"),
    [
        ({"RANK": "1"}, "RANK (RANK and WORLD_SIZE)=1, but not the world_size"),
        ({"RANK": "7", "WORLD_SIZE": "4"}, "global_rank=7 (RANK"),
        ({"RANK": "one", "WORLD_SIZE": "4"}, "RANK='one'"),
        ({"WANDB_MODE": ""}, "WANDB_MODE is set but empty"),
        ({"WANDB_MODE": "ofline"}, "'ofline' is unknown"),
        ({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT='x'"),
        ({"WANDB_BASE_URL": "http://joe:pw@host:abc"}, "settings: base_url: Input should be a valid URL, invalid port"),
        ({"WANDB_BASE_URL": "https://w\u00e4ndb.example"}, "an ambiguous address"),
        ({"DIST_WANDB_RUN_MODE": "share"}, "DIST_WANDB_RUN_MODE is not valid: run_mode='share' is unknown"),
    ],
)
def test_errors_that_init_would_raise_are_reported(
    set_variables: Any, environ: dict[str, str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    set_variables(**environ)
    (message,) = examined().errors
    assert error in message
    assert main(["doctor", "--timeout", "0"]) == 1
    assert "joe:pw" not in message + capsys.readouterr().out


# --- variables of launchers -------------------------------------------------------------------------------------------

MPICH = variables("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")
NO_STORE = "^MPICH has no store for the ranks: before init_process_group, their numbers cannot be reduced"
WARNINGS: dict[str, tuple[dict[str, str], RunMode, str]] = {
    "stale": (
        {**TORCHRUN, **AGENT, **STALE_SLURM},
        "auto",
        "^SLURM has left variables that are ignored: it set rank 0 of 8, .*them: SLURM_PROCID=0, SLURM_NTASKS=8",
    ),
    "of an image": (
        variables("RANK=0 WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4"),
        "auto",
        "^RANK and WORLD_SIZE makes this process a job of its own .RANK=0, WORLD_SIZE=1., .* unset the former",
    ),
    "different": (
        variables("RANK=0 WORLD_SIZE=4 SLURM_PROCID=3 SLURM_STEP_ID=0 SLURM_NTASKS=4"),
        "auto",
        "SLURM give this process different ranks: .* Unset those that are stale: RANK=0, WORLD_SIZE=4 .* or SLURM_P",
    ),
    "of a batch shell": (
        variables("SLURM_JOB_ID=3 SLURM_PROCID=0 SLURM_NTASKS=4"),
        "auto",
        "srun has not started this process",
    ),
    "a service": (
        {"WANDB_SERVICE": f"3-{os.getppid()}-unix-/nowhere"},
        "auto",
        "^WANDB_SERVICE is inherited, so W&B would use another process's wandb service",
    ),
    "a directory": (
        {"WANDB_DIR": "/dev/null/below"},
        "auto",
        "^The run directory '/dev/null/below/wandb' is not writable",
    ),
    "no id": (MPICH, "new", f"{NO_STORE}, and without id= or WANDB_RUN_ID they cannot agree on a run id"),
    "an id": ({**MPICH, "WANDB_RUN_ID": "exp"}, "new", rf"{NO_STORE}\.$"),
    "the launcher's id": ({**MPICH, "PMIX_NAMESPACE": "job"}, "new", rf"{NO_STORE}\.$"),
    "one run": (MPICH, "auto", rf"{NO_STORE}\.$"),
}


@pytest.mark.parametrize(("environ", "run_mode", "warning"), WARNINGS.values(), ids=WARNINGS)
def test_variables_that_are_left_or_have_no_effect_and_ranks_that_cannot_meet_are_reported(
    set_variables: Any, environ: dict[str, str], run_mode: RunMode, warning: str
) -> None:
    set_variables(**environ)
    first, *others = examined(run_mode).warnings
    assert re.search(warning, first)
    assert bool(others) == ("different" in first)
    assert environ.items() <= os.environ.items()  # the diagnosis changes nothing


def test_srun_that_started_torchrun_and_variables_of_a_batch_shell_are_not_considered_stale(set_variables: Any) -> None:
    set_variables(SLURM_JOB_ID="3", SLURM_PROCID="0", SLURM_NTASKS="4", **TORCHRUN, **AGENT)
    assert examine().warnings == ()
    set_variables(**TORCHRUN, **AGENT, SLURM_PROCID="0", SLURM_STEP_ID="0", SLURM_NTASKS="2")
    found = examined("new")
    assert found.warnings == ()
    assert found.launchers[1].reason == (
        "it set rank 0 of 2, but rank 1 of 4 is used; it may have started the launcher that is used"
    )


# --- wandb ------------------------------------------------------------------------------------------------------------


def test_server_that_accepts_the_key_is_reported_without_the_password_of_its_address(
    set_variables: Any, wandb_server: WandbServer, capsys: pytest.CaptureFixture[str]
) -> None:
    address = wandb_server.url.replace("//", "//joe:secret@")
    set_variables(WANDB_MODE="online", WANDB_BASE_URL=address, WANDB_API_KEY=KEY, WANDB_PROJECT="digits")
    found = examined()
    assert main(["doctor", "--json"]) == main(["doctor"]) == 0
    assert "secret" not in capsys.readouterr().out + repr(found)
    assert (found.server.answers, found.server.user, found.server.problem) == (True, "tester", "")
    assert [found.setup[name] for name in ("mode", "key_from", "project")] == ["online", "WANDB_API_KEY", "digits"]
    assert found.warnings == ()
    request, status = wandb_server.answered[-1]
    assert (request.operation, status) == ("Viewer", 200)


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"status": 401}, "authentication failed: run `wandb login` or set WANDB_API_KEY"),
        ({"status": 500}, "it answers with 500"),
        ({"drop": True}, "Remote end closed connection"),
        ({"delay": 60.0}, "timed out"),
    ],
)
def test_server_that_refuses_is_reported(
    set_variables: Any, wandb_server: WandbServer, fault: dict[str, Any], problem: str
) -> None:
    set_variables(WANDB_MODE="online", WANDB_BASE_URL=wandb_server.url, WANDB_API_KEY=KEY)
    wandb_server.fail("graphql", **fault)
    found = examined(timeout=0.5 if "delay" in fault else 30.0)
    assert problem in found.server.problem
    assert found.server.answers is ("status" in fault)
    assert problem in found.warnings[0]
    assert "Runs would be written to disk" in found.warnings[0]
    if fault == {"status": 401}:  # it requires a login
        assert ask(wandb_server.url, None, 5.0).problem == ""


def test_key_in_netrc_is_found_and_never_shown(
    set_variables: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_variables(WANDB_MODE="online", WANDB_BASE_URL="http://127.0.0.1:9")
    assert client_settings.destination().key is None
    assert "There is no API key for http://127.0.0.1:9" in examined(timeout=0.0).warnings[0]
    place = tmp_path / ".netrc"
    place.write_text(f"machine 127.0.0.1\n  login user\n  password {KEY}\n")
    place.chmod(stat.S_IRUSR | stat.S_IWUSR)
    wandb.teardown()
    found = examined(timeout=0.0)
    assert client_settings.destination().key == KEY
    assert found.setup["key_from"] is not None
    assert main(["doctor", "--timeout", "0"]) == 0
    assert main(["doctor", "--timeout", "0", "--json"]) == 0
    assert KEY not in capsys.readouterr().out + repr(found)


def test_invalid_proxy_is_reported_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "http://joe:secret@127.0.0.1:x9" if name == "http_proxy" else "")
    server = ask("http://example.invalid", KEY, 30.0)
    assert not server.answers
    assert server.problem.startswith("InvalidURL. Are WANDB_BASE_URL, and HTTPS_PROXY")
    assert "x9" not in server.problem


@contextmanager
def serving(status: int, headers: dict[str, str], body: bytes) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Run a server that is not W&B's; yield its address and the headers of the requests."""
    got: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # http.server's name
            got.append(dict(self.headers))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST  # noqa: N815  # http.server's name

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", got
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("body", [b"<html>log in</html>", b"[]", b'{"data": "x"}', b"\xff"])
def test_server_other_than_wandb_is_reported(body: bytes) -> None:
    with serving(200, {}, body) as (address, _):
        server = ask(address, KEY, 30.0)
    assert server.answers
    assert server.problem == "it does not answer like a W&B server. Is WANDB_BASE_URL right?"


def test_key_is_not_sent_to_the_target_of_a_redirect() -> None:
    with serving(200, {}, b"{}") as (elsewhere, got), serving(302, {"Location": elsewhere}, b"") as (address, first):
        ask(address, KEY, 30.0)
    assert "Authorization" in first[0]
    assert len(got) == 1
    assert "Authorization" not in got[0]


# --- where the key is sent --------------------------------------------------------------------------------------------


def settings(path: Path, **values: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[default]\n" + "".join(f"{name} = {value}\n" for name, value in values.items()))


@pytest.mark.parametrize("workspace", ["wandb", ".wandb"])
def test_server_named_only_by_the_directory_gets_neither_key_nor_request(
    set_variables: Any, tmp_path: Path, workspace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(200, {}, b'{"data": {"viewer": {"username": "evil"}}}') as (address, got):
        settings(tmp_path / workspace / "settings", base_url=address)
        set_variables(WANDB_MODE="online", WANDB_API_KEY=KEY)
        assert main(["doctor"]) == 1
        out = capsys.readouterr().out
        assert got == []
        assert f"{address} (from {tmp_path}/{workspace}/settings), API key from WANDB_API_KEY" in out
        assert (
            f"✗ The server was not asked. The server {address} is named by {tmp_path}/{workspace}/settings alone" in out
        )
        assert main(["doctor", "--json"]) == 1
        printed = json.loads(capsys.readouterr().out)
        assert (printed["setup"]["base_url"], printed["setup"]["takes_key"], printed["server"]) == (
            address,
            False,
            None,
        )
        assert printed["setup"]["base_url_from"] == f"{tmp_path}/{workspace}/settings"
        assert main(["doctor", "--trust-server", address.replace("http", "https")]) == 1
        assert got == []
        assert main(["doctor", "--trust-server", f"{address}/"]) == 0
        assert "logged in as evil" in capsys.readouterr().out
    assert len(got) == 1
    assert "Authorization" in got[0]


def test_server_named_by_the_user_gets_the_key_despite_other_settings_and_not_through_a_proxy(
    set_variables: Any, tmp_path: Path
) -> None:
    with serving(200, {}, b"{}") as (proxy, seen), serving(200, {}, b"{}") as (address, got):
        set_variables(WANDB_MODE="online", WANDB_API_KEY=KEY, http_proxy=proxy, no_proxy="", NO_PROXY="")
        settings(tmp_path / "wandb" / "settings", base_url=address, entity="team")  # names the same server
        settings(tmp_path / "dotfiles" / "wandb", base_url=f"{address}/")
        own = tmp_path / ".config" / "wandb" / "settings"
        own.parent.mkdir(parents=True)
        own.symlink_to(tmp_path / "dotfiles" / "wandb")
        set_variables(WANDB_CONFIG_DIR="")
        found = examined()
        assert (found.setup["base_url_from"], found.errors) == (str(own), ())
        settings(tmp_path / "wandb" / "settings", base_url="http://127.0.0.1:9")
        set_variables(WANDB_BASE_URL=address)
        found = examined()
        assert (found.setup["base_url_from"], found.errors) == ("WANDB_BASE_URL", ())
    assert (len(seen), len(got)) == (0, 2)


def test_directory_cannot_select_wandbs_own_server_for_users_of_another(set_variables: Any, tmp_path: Path) -> None:
    own, default = "https://wandb.example", str(wandb.Settings.model_fields["base_url"].default)
    settings(tmp_path / "settings", base_url=own)
    settings(tmp_path / "wandb" / "settings", base_url=default)
    set_variables(WANDB_API_KEY=KEY)
    found = client_settings.destination()
    assert (found.source, bool(found.refusal)) == (f"{tmp_path}/wandb/settings", True)
    (tmp_path / "settings").unlink()
    set_variables()
    assert (client_settings.destination().source, client_settings.destination().refusal) == ("W&B's default", "")


@pytest.mark.slow
def test_key_for_one_host_is_sent_there_but_a_key_for_any_host_is_not(set_variables: Any, tmp_path: Path) -> None:
    settings(tmp_path / "wandb" / "settings", base_url="https://team.example:8443")
    place = tmp_path / ".netrc"
    for machine, takes_key in (
        ("machine team.example", True),
        ("machine team.example:8443", True),
        ("machine evil.example", False),
        ("default", False),
    ):
        place.write_text(f"{machine}\n  login user\n  password {KEY}\n")
        place.chmod(stat.S_IRUSR | stat.S_IWUSR)
        set_variables()
        found = client_settings.destination()
        assert (found.source, not found.refusal) == (f"{tmp_path}/wandb/settings", takes_key)
    place.write_text(f"machine team.example\n  login user\n  password {KEY}\n")
    (tmp_path / "first").write_text(f"default\n  login user\n  password {KEY}\n")
    set_variables(NETRC=str(tmp_path / "first"))  # wandb then uses this key, for any host
    assert client_settings.destination().refusal
    set_variables(NETRC="", WANDB_API_KEY=KEY)  # wandb then uses this key, for any host
    assert client_settings.destination().refusal


def test_key_is_not_sent_over_plain_http_to_other_hosts(set_variables: Any, capsys: pytest.CaptureFixture[str]) -> None:
    set_variables(WANDB_MODE="online", WANDB_API_KEY=KEY, WANDB_BASE_URL="http://joe:pw@wandb.invalid")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "The API key is not sent to http://wandb.invalid (from WANDB_BASE_URL): over plain http" in out
    assert "--trust-server http://wandb.invalid" in out
    assert "pw" not in out
    assert main(["doctor", "--timeout", "0"]) == 0  # 0 disables the request


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        *(
            ("--trust-server", url, "address of a server")
            for url in ("wandb.example", "https://", "ftp://a", "https://a\\@b")
        ),
        *(("--timeout", seconds, "number of seconds") for seconds in ("-1", "soon", "inf", "nan")),
    ],
)
def test_bad_arguments_are_refused(option: str, value: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", option, value])
    assert f"{value!r} is not " in (message := capsys.readouterr().err)
    assert reason in message


@pytest.mark.parametrize("kind", ["pipe", "huge"])
def test_settings_file_that_is_not_regular_or_too_large_is_an_error(
    set_variables: Any, tmp_path: Path, kind: str
) -> None:
    place = tmp_path / "wandb" / "settings"
    place.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(place)
    else:
        place.write_text("[default]\n" + "#" * 70_000)
    set_variables()
    (error,) = examined().errors
    assert error.startswith(
        f"{place}, which W&B reads its settings from, is not a regular file of at most 65536 bytes."
    )
    for find in (client_settings.destination, client_settings.client_settings, client_settings.check_workspace):
        with pytest.raises(ConfigurationError, match="is not a regular file"):
            find()


@pytest.mark.usefixtures("new_process")  # that has not warned yet
def test_training_warns_once_if_only_the_directory_decides_who_gets_the_key(
    set_variables: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "wandb" / "settings"
    evil = {"base_url": "https://joe:pw@evil.example", "insecure_disable_ssl": "true", "project": "digits"}

    def warned(mode: str = "online", **values: str) -> str:
        caplog.clear()
        set_variables(WANDB_MODE="online", WANDB_API_KEY=KEY, **values)
        for _ in range(2):
            requested.warn_of_workspace({"mode": mode})
        return "\n".join(record.getMessage() for record in caplog.records if record.name == "dist_wandb")

    settings(place, entity="team", project="digits")  # as `wandb init` writes it
    assert warned() == ""
    settings(place, **evil)
    assert warned(mode="offline") == ""
    message = warned()
    assert message.startswith(
        f"dist_wandb: base_url (https://evil.example) and insecure_disable_ssl of {place} decides"
    )
    assert "pw" not in message
    assert message.count("dist_wandb:") == 1


@pytest.mark.usefixtures("new_process")
def test_training_does_not_warn_if_the_user_decides(
    set_variables: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings(tmp_path / "wandb" / "settings", base_url="https://evil.example", insecure_disable_ssl="true")
    settings(tmp_path / "settings", insecure_disable_ssl="true")  # the user's own settings
    set_variables(WANDB_MODE="online", WANDB_API_KEY=KEY, WANDB_BASE_URL="https://evil.example")
    requested.warn_of_workspace({})
    (tmp_path / "settings").unlink()
    set_variables(WANDB_BASE_URL="https://own.example", WANDB_INSECURE_DISABLE_SSL="false")
    requested.warn_of_workspace({})
    assert not [record for record in caplog.records if record.name == "dist_wandb"]


WITH_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID")
WITH_MODES = ("WANDB_MODE", "DIST_WANDB_RUN_MODE", "DIST_WANDB_RANK_SCOPE")
SERVICE = pytest.param("WANDB_SERVICE", marks=pytest.mark.newest)  # wandb 0.19 repeats it in its own error
WITH_NAMES = ("WANDB_ENTITY", "WANDB_PROJECT", "WANDB_RUN_ID", "WANDB_RUN_GROUP")


@pytest.mark.parametrize("variable", [*WITH_NUMBERS, *WITH_MODES, SERVICE, *WITH_NAMES])
def test_a_password_in_the_wrong_variable_is_not_printed(
    set_variables: Any, capsys: pytest.CaptureFixture[str], variable: str
) -> None:
    """In a variable for a name, only an address with a password, or a key of W&B, is recognised."""
    values = [f"https://me:{MISPLACED}@host", KEY] + ([] if variable in WITH_NAMES else [MISPLACED])
    for value in values:
        set_variables(**{variable: value})
        for options in ([], ["--json"]):
            main(["doctor", "--timeout", "0", *options])
            captured = capsys.readouterr()
            printed = captured.out + captured.err
            assert MISPLACED not in printed
            assert variable in WITH_NUMBERS or KEY not in printed
            assert variable in printed or variable not in WITH_NUMBERS
