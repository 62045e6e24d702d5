"""The errors of dist_wandb: each is a `DistWandbError`, and some are also a built-in error.

A message has three parts: what is wrong (the value, the rank), where it came from, and what to do. All other names in
this module are wandb's own.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wandb.errors import AuthenticationError as AuthenticationError
    from wandb.errors import CommError as CommError
    from wandb.errors import Error as Error
    from wandb.errors import UnsupportedError as UnsupportedError
    from wandb.errors import UsageError as UsageError
else:

    def __getattr__(name: str) -> Any:
        """Return one of wandb's own errors: after ``import dist_wandb as wandb``, `wandb.errors` is this module."""
        if not name.startswith("_"):
            import wandb.errors

            if hasattr(wandb.errors, name):
                return getattr(wandb.errors, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_LONGEST_SHOWN = 20_000
_MOST_LISTED = 20


class DistWandbError(Exception):
    """Base of all errors that dist_wandb raises deliberately.

    Its text is safe to print: escape sequences, which names and contents of files may have, are spelled out.
    """

    def __str__(self) -> str:
        return visible(super().__str__())


class ConfigurationError(DistWandbError, ValueError):
    """An invalid argument, or an invalid combination of arguments."""


class TopologyError(DistWandbError):
    """The rank of this process, or the layout of the ranks, is unknown, inconsistent or impossible."""


class RendezvousError(DistWandbError):
    """The ranks did not agree in time on information that all of them need."""


class MissingExtraError(DistWandbError, ImportError):
    """The framework of an integration is not installed."""


class UnsupportedVersionError(DistWandbError):
    """The installed version of a framework is not supported."""


class UnavailableError(DistWandbError):
    """W&B could not open a run: its server does not answer or refuses, or its own process could not be started."""


class ReadError(DistWandbError):
    """The files of a run on disk cannot be read."""


class UploadError(DistWandbError):
    """A file of a run cannot be uploaded now."""


def as_usage_error(error: ConfigurationError) -> ConfigurationError:
    """Return an error that is also wandb's `UsageError`: scripts that are written for wandb catch that."""
    from wandb.errors import UsageError

    own = {"__module__": __name__, "__reduce__": lambda self: (as_usage_error, (ConfigurationError(*self.args),))}
    error.__class__ = type("ConfigurationError", (ConfigurationError, UsageError), own)
    return error


def in_words(error: Exception, path: PathLike[str]) -> str:
    """Return the text of an error that a file has caused, prefixed with the path unless the text contains it."""
    if isinstance(error, DistWandbError):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text if visible(fspath(path)) in text else f"{fspath(path)}: {text}"


def visible(text: str) -> str:
    """Return a text that is safe to print: unprintable characters are spelled out, and those beyond 20,000 counted."""
    if len(text) > _LONGEST_SHOWN:
        return f"{visible(text[:_LONGEST_SHOWN])}... ({len(text) - _LONGEST_SHOWN} more characters)"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def suggest(value: object, allowed: Iterable[str], known: str = "Allowed") -> str:
    """Return the allowed values as text (at most 20 of them), with the nearest match of `value`, if any.

    For example `"Allowed: 'auto', 'shared', 'new'. Did you mean 'shared'?"`.
    """
    names = list(allowed)
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    listing = f"{known}: {', '.join(repr(name) for name in names[:_MOST_LISTED]) or 'none'}{more}."
    nearest = difflib.get_close_matches(str(value).lower(), names, n=1)
    return f"{listing} Did you mean {nearest[0]!r}?" if nearest else listing
