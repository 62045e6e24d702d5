"""Which launcher started this process, and what the launchers that agree with it add."""

from __future__ import annotations

from contextlib import suppress

from dist_wandb.errors import TopologyError
from dist_wandb.topology.launchers import LAUNCHERS, Environ, Launcher, Readings


def started_by(environ: Environ) -> tuple[Launcher, Readings] | None:
    """The first launcher that gives the ranks, and its readings; `None` where no launcher is present.

    An incomplete launcher counts for nothing but an error, unless a later one gives the same in full: a batch script
    that exports WORLD_SIZE for its srun leaves such an incomplete set.

    Raises:
        TopologyError: The variables cannot be read, or are incomplete.
    """
    incomplete: Readings | None = None
    for launcher in LAUNCHERS:
        if not launcher.is_present(environ):
            continue
        if incomplete is None:
            readings = launcher.read(environ)
            if readings.values == {"world_size": 1}:  # so much is true of any process that nobody started
                continue
            if not readings.missing or readings.complete_on_first_node():
                return launcher, readings
            incomplete = readings
            continue
        with suppress(TopologyError):
            readings = launcher.read(environ)
            if not readings.missing and readings.agrees_with(incomplete):
                return launcher, readings
    if incomplete is not None:
        raise _error_of(incomplete)
    return None


def complete(readings: Readings, environ: Environ) -> Readings:
    """Complete readings from every launcher that gives the same ranks. A variable belongs to the first that has it."""
    taken: set[str] = set()
    for launcher in LAUNCHERS:
        if not launcher.is_present(environ) or not taken.isdisjoint(launcher.variables.values()):
            continue
        taken.update(launcher.variables.values())
        with suppress(TopologyError):  # another launcher's leftovers: nothing depends on them
            other = launcher.read(environ)
            if readings.agrees_with(other):
                readings.complete_from(other)
    return readings


def _error_of(readings: Readings) -> TopologyError:
    known = ", ".join(f"{source}={readings.values[name]}" for name, source in readings.sources.items())
    return TopologyError(
        f"The environment gives {known}, but not the {' and '.join(readings.missing)} of this process. These variables "
        "are incomplete, or stale. Initialise torch.distributed first, start the script with torchrun, or unset them."
    )
