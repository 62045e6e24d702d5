"""All targets. As a program, it reads the inputs in a folder with one of them: TARGET FOLDER, see `fuzzing.check`."""

from __future__ import annotations

import sys
from pathlib import Path

import fuzz_of_files
import fuzz_of_peers
import fuzz_of_starts
from fuzzing import Target, read_all

TARGETS: dict[str, Target] = {
    target.name: target for room in (fuzz_of_peers, fuzz_of_files, fuzz_of_starts) for target in room.TARGETS
}

if __name__ == "__main__":
    read_all(TARGETS[sys.argv[1]], Path(sys.argv[2]))
