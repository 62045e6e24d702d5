"""The server that receives runs, its source, and whether the API key may go there. Pure.

W&B's client also reads the server's address from files, one of them in the current directory. The author of that
directory could therefore choose who gets the API key. Hence one rule for all commands that send it: a server named by
the user gets the key (by `WANDB_BASE_URL`, the user's own settings file, W&B's default, or a key for that host in the
user's netrc), a server named only by the directory does not, and no server gets it in clear text over a network, unless
the user names that very server on the command line (`TRUST_OPTION`).
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

TRUST_OPTION = "--trust-server"
"""Option of all commands that allows the API key to go to a server; its value is the server's address."""

Origin = Literal["argument", "environment", "user settings", "default", "workspace settings", "elsewhere"]
"""Source of a server's address: the script, the user's environment, the user's own settings file, W&B's default, the
settings file of the current directory, or an unknown source."""

_CHARACTERS = re.compile(r"[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+")  # RFC 3986
_PORTS = {"http": 80, "https": 443}
_UNTRUSTED = ("workspace settings", "elsewhere")


@dataclass(frozen=True)
class Destination:
    """The server that receives runs."""

    url: str = field(repr=False)  # with its password, if any: for connections only, never for output
    shown: str  # without user name and password
    origin: Origin
    source: str  # of the address, for messages: a variable, a file
    refusal: str = ""  # why the API key may not go there, and what the user can do; empty if it may

    @property
    def takes_key(self) -> bool:
        """Whether the API key may go there."""
        return not self.refusal


def refusal_of(url: str, origin: Origin, source: str, *, has_own_key: bool = False, trusted: str | None = None) -> str:
    """Return why the API key may not go to a server, and what to do, as text; empty if it may.

    `has_own_key`: the key is the one for this very host in the user's netrc, so that no key of another server is sent.
    `trusted` is the address that the user has allowed by `TRUST_OPTION`.
    """
    shown = without_password(url)
    if trusted is not None and is_same_server(trusted, url):
        return ""
    is_open = urlsplit(url).scheme != "https" and not is_loopback(url)  # data can be read on the way
    if origin in _UNTRUSTED and (is_open or not (has_own_key and urlsplit(url).scheme == "https")):
        why = (
            f"The server {shown} is named by {source} alone, not by you, so the API key is not sent there"
            f"{', and it would go over plain http' if is_open else ''}."
        )
        otherwise = "Otherwise, remove base_url from that file, or set WANDB_BASE_URL to your server."
    elif is_open:
        why = (
            f"The API key is not sent to {shown} (from {source}): over plain http, anyone on the network path could "
            "read it."
        )
        otherwise = "Otherwise, use an https address."
    else:
        return ""
    answer = f" {TRUST_OPTION} names another server, {without_password(trusted)}." if trusted is not None else ""
    return f"{why}{answer} If you trust it, pass {TRUST_OPTION} {shlex.quote(shown)}. {otherwise}"


def without_password(url: str) -> str:
    """Return an address without user name and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def is_address(url: str) -> bool:
    """Return whether this is the address of a server that all URL parsers read in the same way."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # a port that is not a number, a malformed IPv6 address
        return False
    # Parsers disagree about a backslash, white space and several "@", and thus about the host: the connection could go
    # to another host than the one that was checked.
    is_unambiguous = _CHARACTERS.fullmatch(url) is not None and parts.netloc.count("@") <= 1
    return is_unambiguous and parts.scheme in _PORTS and bool(parts.hostname)


def is_same_server(one: str, other: str) -> bool:
    """Return whether two addresses, ignoring user names and passwords, refer to the same server."""
    if one.rstrip("/") == other.rstrip("/"):
        return True
    return is_address(one) and is_address(other) and _location(one) == _location(other)


def is_loopback(url: str) -> bool:
    """Return whether an address is on this host."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _location(url: str) -> tuple[str, str, int, str]:
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    return parts.scheme, host, parts.port or _PORTS[parts.scheme], parts.path.rstrip("/")
