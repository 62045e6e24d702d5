"""A user whose files and keys must stay unchanged and secret while commands read hostile files."""

from __future__ import annotations

import errno
import hashlib
import socket
import stat
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from processes import clean_environment

STRANGER = 65_534
"""Owner of the hostile files if the tests run as root."""

API_KEY = "0123456789" * 4

_FILES = {
    ".bashrc": "alias ll='ls -l'\n",
    ".profile": "umask 077\n",
    ".gitconfig": "[user]\n\tname = Victim\n",
    ".netrc": f"machine api.wandb.ai\n  login user\n  password {API_KEY}\n",
    ".ssh/authorized_keys": "ssh-ed25519 AAAA victim@home\n",
    ".ssh/id_rsa": "PRIVATE-KEY-OF-THE-VICTIM\n",
    ".aws/credentials": "[default]\naws_secret_access_key = SECRET-OF-THE-VICTIM\n",
    ".config/wandb/settings": "[default]\n",
    "work/thesis.tex": "\\documentclass{thesis}\nfour years of work\n",
}
_SECRETS = ("PRIVATE-KEY-OF-THE-VICTIM", "SECRET-OF-THE-VICTIM", "four years of work", "victim@home")


class Listener:
    """Accepts connections on loopback and keeps the first bytes of each."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The address, as that of a server or a proxy."""
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                with connection, suppress(OSError):
                    connection.settimeout(0.5)
                    self.received.append(b"")
                    self.received[-1] = connection.recv(4096)


@dataclass
class Victim:
    """A home directory with files that must stay unchanged and secret, a current directory with hostile modules, and a
    listener that must not receive anything.
    """

    directory: Path  # directory that contains all of this
    listener: Listener  # receives requests to servers that must not be contacted: it is the proxy for all other servers
    before: dict[str, tuple[object, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.home = self.directory / "home"
        self.traces = self.directory / "traces"  # hostile code creates a file there if it is executed
        self.workplace = self.directory / "workplace"  # the current directory of all commands
        self.temporary = self.directory / "temporary"  # for temporary files
        # Directories that an upload may change: the user's own state of uploads, and the cache of W&B's uploader.
        self.own = self.home / ".local" / "state" / "dist-wandb", self.home / ".cache" / "wandb"

    def code(self, what: str) -> str:
        """Return Python source that creates a file in `traces` when it is executed."""
        return f"import os\nos.close(os.open({str(self.traces)!r} + '/{what}', os.O_WRONLY | os.O_CREAT))\n"

    def environment(self, **extra: str) -> dict[str, str]:
        """Return the environment of a command: this home, and the listener as W&B's server and as all proxies."""
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), self.listener.url)
        mine = {
            "HOME": str(self.home),
            "NETRC": str(self.home / ".netrc"),
            "TMPDIR": str(self.temporary),
            "WANDB_BASE_URL": self.listener.url,
            "WANDB_API_KEY": API_KEY,
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            **{f"XDG_{name}_HOME": str(self.home / place) for name, place in _XDG.items()},
        }
        variables = clean_environment(**proxies, **mine)
        for name in ("WANDB_MODE", "WANDB_ERROR_REPORTING", "WANDB_CONSOLE"):  # as in the environment of a user
            del variables[name]
        return {**variables, **extra}

    def check(self) -> None:
        """Fail if a file has changed, hostile code was executed, or a server was contacted."""
        after = snapshot(self.home, but=self.own)
        changed = sorted(name for name in {*self.before, *after} if self.before.get(name) != after.get(name))
        assert not changed, f"changed in the victim's home: {[(n, self.before.get(n), after.get(n)) for n in changed]}"
        ran = sorted(path.name for path in self.traces.iterdir())
        assert not ran, f"hostile code was executed: {ran}"
        assert not self.listener.received, f"a server was contacted: {self.listener.received}"
        left = sorted(path.name for path in self.temporary.iterdir())
        assert not left, f"remaining temporary files: {left}"

    def check_secrets(self, *texts: bytes | str) -> None:
        """Fail if one of these texts contains a secret of the victim."""
        for text in texts:
            plain = text.decode(errors="replace") if isinstance(text, bytes) else text
            disclosed = [secret for secret in _SECRETS if secret in plain]
            assert not disclosed, f"disclosed: {disclosed}"


_XDG = {"CONFIG": ".config", "CACHE": ".cache", "DATA": ".local/share", "STATE": ".local/state"}


@contextmanager
def victim(directory: Path) -> Iterator[Victim]:
    """Create the files of a victim, and check at the end that they are unchanged."""
    listener = Listener()
    someone = Victim(directory, listener)
    try:
        places = someone.traces, someone.workplace / "wandb", someone.temporary
        for place in (*places, *map(someone.home.joinpath, _XDG.values())):
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
        for place in someone.own:
            place.mkdir(mode=0o700)
        for name, text in _FILES.items():
            path = someone.home / name
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.write_text(text)
            path.chmod(0o600)
        for name in ("click", "json", "sitecustomize", "wandb", "yaml"):
            (someone.workplace / f"{name}.py").write_text(someone.code(f"workplace-{name}"))
        someone.before = snapshot(someone.home, but=someone.own)
        yield someone
        someone.check()
    finally:
        listener.close()


def snapshot(top: Path, *, but: Collection[Path] = ()) -> dict[str, tuple[object, ...]]:
    """Return mode, owner, time of the last change, and content by the name of each file, except those below `but`."""
    found: dict[str, tuple[object, ...]] = {}
    waiting = [top]
    while waiting:
        path = waiting.pop()
        try:
            status = path.lstat()
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            continue
        what: object = None
        if stat.S_ISLNK(status.st_mode):
            what = path.readlink()
        elif stat.S_ISREG(status.st_mode):
            small = status.st_size < 2**26  # sparse files are compared by size and time
            what = hashlib.sha256(path.read_bytes()).hexdigest() if small else status.st_size
        elif stat.S_ISDIR(status.st_mode) and path not in but:
            waiting += path.iterdir()
        changed = None if path in but else status.st_mtime_ns
        found[str(path.relative_to(top))] = (oct(status.st_mode), status.st_uid, changed, what)
    return found
