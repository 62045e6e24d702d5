"""The environment in which ``wandb sync`` uploads one file."""

from __future__ import annotations

from pathlib import Path

from dist_wandb.wandb_files.environment import own_environment

_RUN_VARIABLES = frozenset(
    f"WANDB_{name}"
    for name in (
        *("RUN_ID", "NAME", "NOTES", "TAGS", "RUN_GROUP", "JOB_TYPE", "SWEEP_ID", "RESUME", "SERVICE"),
        *("MODE", "SILENT", "QUIET", "X_LABEL", "X_PRIMARY", "X_UPDATE_FINISH_STATE"),
    )
)
# W&B waits 2 s after the first failure, and twice as long after each further failure: so it gives up after about two
# minutes without a server, instead of two hours. The user may set other limits.
_RETRY_LIMITS = {f"WANDB_X_{client}_RETRY_MAX": "6" for client in ("GRAPHQL", "FILE_STREAM", "FILE_TRANSFER")}


def upload_environment(
    directory: Path,  # for W&B's log, for this user alone
    *,
    shared: bool,  # whether a writer of a shared run wrote the file
    label: str | None,  # of the writer; `None` in a plain run
    primary: bool,  # whether the writer is the primary of the shared run, or the run is a plain one
    finishes: bool,  # whether the end of the file is the end of the run
    resume: str | None,  # W&B's ``resume``, for a plain run that continues; `None` for a new run
    server: str | None = None,  # `None` for the user's own setting, or W&B's default
) -> dict[str, str]:
    """Return the environment in which ``wandb sync`` uploads one file, derived from that of this process.

    Settings of a single run (id, name, tags, group, …) are left out, because they belong to another run. Python imports
    nothing from its working directory. Settings files of the current directory are ignored: one that sets a proxy and
    disables the check of certificates could intercept the API key on its way to the right server.
    """
    own = {name: value for name, value in own_environment().items() if name not in _RUN_VARIABLES}
    role = {
        "WANDB_X_PRIMARY": str(primary).lower(),
        "WANDB_X_UPDATE_FINISH_STATE": str(finishes).lower(),
        "WANDB_MODE": "shared" if shared else "online",
        "WANDB_DIR": str(directory),
        "WANDB_X_LABEL": label,
        "WANDB_RESUME": resume,
        "WANDB_BASE_URL": server,
    }
    (directory / "wandb").mkdir(parents=True, exist_ok=True)
    return {**_RETRY_LIMITS, **own, **{name: value for name, value in role.items() if value is not None}}
