"""Reading a stranger's run directory runs nothing that lies there, and asks no server."""

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

from dist_wandb.cli.commands import main
from dist_wandb.wandb_files.reading import read_history

COMMAND = "import sys; from dist_wandb.cli import main; sys.exit(main())"
READ = "import sys; from dist_wandb.wandb_files.reading import read_history; assert len(read_history(sys.argv[1])) == 3"
RESUME = """
import os, dist_wandb
session = dist_wandb.init(id="exp", resume="allow", project="digits", mode="offline")
session.log({"loss": 1.0})
assert session.run.summary["global_step"] == 3, dict(session.run.summary)
session.finish()
"""
# What wandb, click and Python itself import early or late, and what the start of any Python looks for.
pytestmark = pytest.mark.cold  # what imports find is the matter

MODULES = ("click", "wandb", "json", "yaml", "requests", "typing_extensions", "sitecustomize", "usercustomize", "-x")
PACKAGES = ("encodings", "pydantic", "google")


def plant(directory: Path, canary: Path) -> None:
    """Put modules into a directory that leave their name in `canary` when they are imported."""
    for name in MODULES:
        (directory / f"{name}.py").write_text(f"open({str(canary)!r}, 'a').write({name!r} + '\\n')\n")
    for name in PACKAGES:
        (directory / name).mkdir()
        (directory / name / "__init__.py").write_text(f"open({str(canary)!r}, 'a').write({name!r} + '\\n')\n")


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Write a script into a directory of its own, which is the first that Python imports modules from."""

    def write(code: str) -> Path:
        path = tmp_path / "bin" / "script.py"
        path.parent.mkdir()
        path.write_text(code)
        return path

    return write


@pytest.mark.parametrize("search_path", ["", f".{os.pathsep}"])
@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (COMMAND, ["show", "{directory}"]),
        (COMMAND, ["show", "--json", "{directory}"]),
        (COMMAND, ["sync", "--dry-run", "{directory}"]),
        (READ, ["{file}"]),
        (RESUME, []),
    ],
    ids=["show", "show --json", "sync --dry-run", "read_history", "resume"],
)
def test_no_module_of_a_run_directory_is_imported(
    tmp_path: Path, script: Callable[[str], Path], code: str, arguments: list[str], search_path: str
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    file = make_run(home)
    canary = tmp_path / "canary"
    plant(file.parent, canary)
    places = {"directory": str(home), "file": str(file)}
    here = home if search_path or code == RESUME else file.parent  # the user's own "." is where the user stands
    environment = clean_environment(PYTHONPATH=search_path + os.pathsep.join(path for path in sys.path if path))
    finished = run_job(
        [sys.executable, script(code), *(argument.format(**places) for argument in arguments)],
        cwd=here,
        environment=environment,
    )
    finished.check()
    assert not canary.exists(), f"run: {canary.read_text().split()}"


class Listener:
    """Keeps what everybody who connects to it says first."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._heard: list[bytes] = []
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
                    self._heard.append(connection.recv(200))
                except OSError as error:
                    self._heard.append(repr(error).encode())

    def heard(self) -> list[bytes]:
        """What was said by all who connected before this call: connections are served in order."""
        with socket.create_connection(self._socket.getsockname(), timeout=60) as last:
            last.sendall(b"last")
            assert last.recv(1) == b""
        assert self._heard.pop() == b"last"
        return self._heard

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


@pytest.mark.parametrize("read", ["show", "show --json", "sync --dry-run", "read_history"])
@pytest.mark.parametrize("named_by", ["run directory", "current directory", "environment", "proxy"])
@pytest.mark.usefixtures("bare_environment")
def test_reading_asks_no_server(
    tmp_path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch, named_by: str, read: str
) -> None:
    file = make_run(tmp_path)
    here = tmp_path / "here"
    for directory in (here, file.parent):
        (directory / "wandb").mkdir(parents=True)
    monkeypatch.chdir(here)
    settings = f"[default]\nbase_url = {listener.address}\n"
    if named_by == "run directory":
        (file.parent / "wandb" / "settings").write_text(settings)
    elif named_by == "current directory":
        (here / "wandb" / "settings").write_text(settings)
    elif named_by == "environment":
        monkeypatch.setenv("WANDB_BASE_URL", listener.address)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, listener.address) if named_by == "proxy" else monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    if read == "read_history":
        assert len(read_history(file)) == 3
    else:
        refused = named_by == "current directory" and read == "sync --dry-run"  # nobody else names that server
        assert main([*read.split(), str(tmp_path)]) == int(refused)
    assert listener.heard() == []


def test_an_offline_resume_asks_no_server(tmp_path: Path, listener: Listener, script: Callable[[str], Path]) -> None:
    """wandb's own process also tells W&B of itself offline: it is started with that switched off, unlike the reader."""
    start = """
import os, wandb
wandb.init(mode="offline", id="first").finish()
del os.environ["WANDB_ERROR_REPORTING"], os.environ["WANDB_MODE"]
"""
    make_run(tmp_path)
    environment = clean_environment(WANDB_BASE_URL=listener.address)
    run_job([sys.executable, script(start + RESUME)], cwd=tmp_path, environment=environment).check()
    assert listener.heard() == []


def test_a_pipe_in_the_shared_temporary_directory_keeps_no_reader_waiting(
    tmp_path: Path, script: Callable[[str], Path]
) -> None:
    """Where wandb's commands find no directory for their log they append to a file there, by a name that all know."""
    file = make_run(tmp_path)
    shared = tmp_path / "shared"
    shared.mkdir()
    os.mkfifo(shared / f"debug-cli.{getpass.getuser()}.log")
    environment = {**clean_environment(TMPDIR=str(shared)), "WANDB_ERROR_REPORTING": "true"}
    run_job([sys.executable, script(READ), file], cwd=tmp_path, environment=environment, timeout=60).check()
    assert [entry.name for entry in shared.iterdir()] == [f"debug-cli.{getpass.getuser()}.log"]
