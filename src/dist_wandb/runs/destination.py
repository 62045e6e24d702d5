"""Pure: which server runs go to, who named it, and whether the API key may go there.

W&B's client also reads the server's address from files, one of them in the current directory. So whoever wrote that
directory could choose who gets the API key. Hence one rule for all commands that send it: a server that the user has
named gets the key, a server that only the directory names does not, and no server gets it in clear text over a network;
unless the user names that very server on the command line (`TRUST_OPTION`).
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

TRUST_OPTION = "--trust-server"
"""The option of all commands by which the user allows the API key to go to a server; its value is the address."""

Origin = Literal["argument", "environment", "user settings", "default", "workspace settings", "elsewhere"]
"""Who named a server: the script, the user's environment, the user's own settings file, W&B's default, the settings
file of the current directory, or an unknown source."""

_CHARACTERS = re.compile(r"[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+")  # RFC 3986
_PORTS = {"http": 80, "https": 443}
_UNNAMED = ("workspace settings", "elsewhere")


@dataclass(frozen=True)
class Destination:
    """The server that runs go to.

    Args:
        url: Its address, with a password if the address has one. For connections only, never for output.
        shown: Its address without name and password.
        origin: Who named it.
        source: Where it was named, for people: a variable, a file.
        refusal: Why the API key may not go there, and what the user can do, as text; empty if it may.
    """

    url: str = field(repr=False)
    shown: str
    origin: Origin
    source: str
    refusal: str = ""

    @property
    def takes_key(self) -> bool:
        """Whether the API key may go there."""
        return not self.refusal


def refusal_of(url: str, origin: Origin, source: str, *, has_own_key: bool = False, trusted: str | None = None) -> str:
    """Why the API key may not go to a server; empty if it may.

    Args:
        url: The server's address.
        origin: Who named it.
        source: Where it was named, for people.
        has_own_key: Whether the key is the one that the user's netrc has for this very host, so that no other server
            gets it.
        trusted: The address that the user has allowed, if any, by `TRUST_OPTION`.

    Returns:
        What is wrong, where it comes from, and what to do.
    """
    shown = without_password(url)
    if trusted is not None and is_same_server(trusted, url):
        return ""
    is_open = not _is_private(url)
    if origin in _UNNAMED and (is_open or not (has_own_key and urlsplit(url).scheme == "https")):
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
    """An address without name and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def is_address(url: str) -> bool:
    """Whether this is the address of a server that all URL parsers read in the same way.

    They differ about a backslash, white space and several ``@``, and so about the host: the checked host would not be
    the one that is connected to.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # a port that is not a number, a malformed IPv6 address
        return False
    is_unambiguous = _CHARACTERS.fullmatch(url) is not None and parts.netloc.count("@") <= 1
    return is_unambiguous and parts.scheme in _PORTS and bool(parts.hostname)


def is_same_server(one: str, other: str) -> bool:
    """Whether two addresses lead to the same place, apart from names and passwords in them."""
    if one.rstrip("/") == other.rstrip("/"):
        return True
    return is_address(one) and is_address(other) and _location(one) == _location(other)


def is_loopback(url: str) -> bool:
    """Whether an address is on this host."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_private(url: str) -> bool:
    """Whether nobody in between can read what is sent there."""
    return urlsplit(url).scheme == "https" or is_loopback(url)


def _location(url: str) -> tuple[str, str, int, str]:
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    return parts.scheme, host, parts.port or _PORTS[parts.scheme], parts.path.rstrip("/")
