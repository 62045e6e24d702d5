"""The process in which `fuzzing.Child` reads the inputs of one target."""

from __future__ import annotations

import sys

import fuzz_planted
from fuzzing import Target, serve


def _target(name: str) -> Target:
    planted = [target for target in fuzz_planted.TARGETS if target.name == name]
    if planted:
        return planted[0]
    from fuzz_targets import named  # it imports torch

    return named(name)


if __name__ == "__main__":
    serve(_target(sys.argv[1]))
