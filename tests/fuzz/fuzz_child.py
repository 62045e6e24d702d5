"""The process in which `fuzzing.Child` reads the inputs of one target."""

from __future__ import annotations

import sys

from fuzz_targets import named
from fuzzing import serve

if __name__ == "__main__":
    serve(named(sys.argv[1]))
