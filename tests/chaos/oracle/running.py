"""Run scripts with stock wandb and with this package, in several variants, and compare what they leave."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from oracle.comparing import Terms, compare
from oracle.recorded import Recorded, recorded_runs
from oracle.scripts import Script, for_stock, to_json
from processes import clean_environment, python, rank_commands, run_job

_PLAYER = Path(__file__).parent / "player.py"
_SOURCES = Path(__file__).parents[3] / "src"
_AT_ONCE = 60  # scripts of one job
_EACH, _START = 12.0, 90.0  # seconds for a script, and for the start of a job, on a busy machine

Runs = dict[str, Recorded]  # by name of the script


@dataclass(frozen=True)
class Variant:
    """A way to run a script with this package."""

    ranks: int
    guard: str = "none"  # what only rank 0 does: nothing (`none`), `log`, or `init` as well

    def __str__(self) -> str:
        return f"{self.ranks} ranks" if self.guard == "none" else f"{self.ranks} ranks, {self.guard} guarded"


VARIANTS = (Variant(1), Variant(2), Variant(3), Variant(2, "log"), Variant(2, "init"))


def played(names: Sequence[str], commands: Callable[[Path], Iterable[Sequence[str | Path]]], limit: float) -> Runs:
    """Run commands, which are told a directory, on the path of this checkout's package; return their runs by name."""
    path = os.pathsep.join([str(_SOURCES), clean_environment()["PYTHONPATH"]])
    with tempfile.TemporaryDirectory(prefix="oracle-", ignore_cleanup_errors=True) as directory:
        environment = clean_environment(WANDB_SILENT="true", PYTHONPATH=path)
        here = Path(directory)
        run_job(*commands(here), cwd=here, environment=environment, timeout=limit).check()
        return recorded_runs(here, list(names))


class Stock:
    """What stock wandb leaves of scripts: one job. Some are played a second time, to compare several ranks with."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        keys = [(script, peers) for script in scripts for peers in (0, 1)]
        self._forms = {(script.name, peers): for_stock(script, has_peers=bool(peers)) for script, peers in keys}
        forms = {self._name(*key): replace(form, name=self._name(*key)) for key, (form, _) in self._forms.items()}
        self._runs = play(list(forms.values()), "stock", Variant(1))

    def differences(self, script: Script, variant: Variant, ours: Recorded) -> list[str]:
        """Return how a run of this package differs from stock's, after the script."""
        key = script.name, int(variant.ranks > 1)
        stock = self._runs[self._name(*key)]
        terms = Terms(
            self._forms[key][1],
            is_failing=script.is_failing,
            has_peers=variant.ranks > 1,
            joined=script.late_axes if variant.ranks > 1 else frozenset(),
        )
        found = compare(stock, ours, terms)
        return [str(script), *found] if found else []

    def _name(self, name: str, peers: int) -> str:
        """Return the name of a script's run: the same for both forms if they are equal."""
        return f"{name}-peers" if peers and self._forms[name, 1][0] != self._forms[name, 0][0] else name


def play(scripts: Sequence[Script], which: str, variant: Variant) -> Runs:
    """Run scripts with stock wandb or with ours; return their runs by name."""
    runs: Runs = {}
    for first in range(0, len(scripts), _AT_ONCE):
        some = scripts[first : first + _AT_ONCE]

        def commands(directory: Path, some: Sequence[Script] = some) -> Iterable[Sequence[str | Path]]:
            file = directory / "scripts.json"
            file.write_text(to_json(some), encoding="utf-8")
            return started(_PLAYER, which, variant.guard, directory, file, ranks=variant.ranks)

        runs |= played([script.name for script in some], commands, _START + _EACH * len(some))
    return runs


def started(script: Path, *arguments: object, ranks: int) -> Iterable[Sequence[str | Path]]:
    """Return the commands that start a script as one process or as several ranks."""
    return python(script, *arguments) if ranks == 1 else rank_commands(script, *arguments, world_size=ranks)
