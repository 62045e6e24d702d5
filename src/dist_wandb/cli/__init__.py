"""The command line: ``dist-wandb plan`` and ``doctor`` before a job; ``show``, ``report`` and ``sync`` after it."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dist_wandb import __version__
from dist_wandb.cli import doctor, plan, report, show, uploads
from dist_wandb.errors import ConfigurationError, DistWandbError

_CONTINUES = "An upload continues after the rows that the server has confirmed when it is started again."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``dist-wandb`` command and return its exit code; `argv` is without the command's name.

    0: success; 1: something could not be read or was not uploaded; 2: invalid arguments; 130: interrupted; 143 and 129:
    SIGTERM and SIGHUP during an upload.
    """
    if sys.stdout is None:  # closed by the parent process
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # until the process ends
    parser = _parser()
    with suppress(ModuleNotFoundError):  # completes a command line for the shell, and ends the process
        importlib.import_module("argcomplete").autocomplete(parser)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:  # not of the output
            raise
        # Discard the rest, so that Python does not fail to flush it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # its reader has ended, as `head` does
            print(f"dist-wandb: the output could not be written: {error.strerror}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:  # by Ctrl-C, or by the signal that it names, see `uploads`
        how = f"ended by {error.args[0].name}" if error.args else "interrupted"
        print(f"dist-wandb: {how}. {_CONTINUES}", file=sys.stderr)
        return 128 + (error.args[0] if error.args else signal.SIGINT)  # as shells report it
    except DistWandbError as error:
        print(f"dist-wandb: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dist-wandb",
        description="Weights & Biases runs of distributed training: which runs a job opens, and what it has written.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (plan, doctor, show, report, uploads):
        command.add_to(subparsers)
    return parser
