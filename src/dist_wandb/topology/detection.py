"""Detection of the launcher that started this process, and completion of its values from other launchers."""

from __future__ import annotations

from contextlib import suppress

from dist_wandb.errors import TopologyError
from dist_wandb.topology.launchers import LAUNCHERS, Environ, Launcher, Readings


def started_by(environ: Environ) -> tuple[Launcher, Readings] | None:
    """Return the first launcher that gives the ranks, and its readings; `None` if no launcher is present.

    An incomplete launcher leads to an error, unless a later one agrees with it and is complete. For example, a batch
    script that exports WORLD_SIZE for its srun leaves such an incomplete set.

    Raises:
        TopologyError: The variables cannot be read, or are incomplete.
    """
    incomplete: Readings | None = None
    for launcher in LAUNCHERS:
        if not launcher.is_present(environ):
            continue
        if incomplete is None:
            readings = launcher.read(environ)
            if readings.values == {"world_size": 1}:  # also true of a process without a launcher
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
    """Complete readings from every launcher that agrees with them. Each variable counts for one launcher only."""
    taken: set[str] = set()
    for launcher in LAUNCHERS:
        if not launcher.is_present(environ) or not taken.isdisjoint(launcher.variables.values()):
            continue
        taken.update(launcher.variables.values())
        with suppress(TopologyError):  # stale variables of another launcher, which are not needed
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
