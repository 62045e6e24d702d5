"""Call a function of a file as a script: FILE FUNCTION ARGUMENTS. Tests so keep what ranks do beside what it leaves."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def main(file: str, name: str, *arguments: str) -> None:
    path = Path(file)
    sys.path.insert(0, str(path.parent))  # where spawned processes find the module by its name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    getattr(module, name)(*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
