"""Reading an untrusted run directory executes nothing in it, and contacts no server."""

from __future__ import annotations

import getpass
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import clean_environment, run_job
from record_files import make_run

from dist_wandb.cli import main
from dist_wandb.wandb_files.reading import read_history

READ = """
import sys
from dist_wandb.cli import main
from dist_wandb.wandb_files.reading import read_history
directory, file = sys.argv[1:]
assert len(read_history(file)) == 3
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


class Listener:
    """Records the first bytes of each connection."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._received: list[bytes] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5)
                try:
                    self._received.append(connection.recv(200))
                except OSError as error:
                    self._received.append(repr(error).encode())

    def received(self) -> list[bytes]:
        """Return the first bytes of all connections before this call: connections are served in order."""
        with socket.create_connection(self._socket.getsockname(), timeout=60) as last:
            last.sendall(b"last")
            assert last.recv(1) == b""
        assert self._received.pop() == b"last"
        return self._received

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


@pytest.mark.parametrize("named_by", ["run directory", "current directory", "environment", "proxy"])
@pytest.mark.usefixtures("bare_environment")
def test_reading_contacts_no_server(
    tmp_path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch, named_by: str
) -> None:
    file = make_run(tmp_path)
    here = tmp_path / "here"
    for directory in (here, file.parent):
        (directory / "wandb").mkdir(parents=True)
    monkeypatch.chdir(here)
    settings = f"[default]\nbase_url = {listener.address}\n"
    if named_by.endswith("directory"):
        place = file.parent if named_by == "run directory" else here
        (place / "wandb" / "settings").write_text(settings)
    elif named_by == "environment":
        monkeypatch.setenv("WANDB_BASE_URL", listener.address)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, listener.address) if named_by == "proxy" else monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    assert len(read_history(file)) == 3
    assert main(["show", str(tmp_path)]) == 0
    refused = named_by == "current directory"  # no other setting names this server
    assert main(["sync", "--dry-run", str(tmp_path)]) == int(refused)
    assert listener.received() == []


def test_an_offline_resume_contacts_no_server(
    tmp_path: Path, listener: Listener, script: Callable[[str], Path]
) -> None:
    """wandb's own process sends telemetry even offline: unlike the reader, it is started with telemetry disabled."""
    start = """
import os, wandb
wandb.init(mode="offline", id="first").finish()
del os.environ["WANDB_ERROR_REPORTING"], os.environ["WANDB_MODE"]
"""
    make_run(tmp_path)
    environment = clean_environment(WANDB_BASE_URL=listener.address)
    run_job([sys.executable, script(start + RESUME)], cwd=tmp_path, environment=environment).check()
    assert listener.received() == []


def test_a_pipe_in_the_shared_temporary_directory_does_not_block(tmp_path: Path, script: Callable[[str], Path]) -> None:
    """If wandb's commands find no directory for their log, they append to a file there with a known name."""
    file = make_run(tmp_path)
    shared = tmp_path / "shared"
    shared.mkdir()
    os.mkfifo(shared / f"debug-cli.{getpass.getuser()}.log")
    environment = {**clean_environment(TMPDIR=str(shared)), "WANDB_ERROR_REPORTING": "true"}
    run_job([sys.executable, script(READ), tmp_path, file], cwd=tmp_path, environment=environment, timeout=60).check()
    assert [entry.name for entry in shared.iterdir()] == [f"debug-cli.{getpass.getuser()}.log"]
