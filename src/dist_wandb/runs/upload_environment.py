"""The environment in which ``wandb sync`` uploads one file."""

from __future__ import annotations

from pathlib import Path

from dist_wandb.wandb_files.environment import own_environment

_OF_ONE_RUN = frozenset(
    f"WANDB_{name}"
    for name in (
        *("RUN_ID", "NAME", "NOTES", "TAGS", "RUN_GROUP", "JOB_TYPE", "SWEEP_ID", "RESUME", "SERVICE"),
        *("MODE", "SILENT", "QUIET", "X_LABEL", "X_PRIMARY", "X_UPDATE_FINISH_STATE"),
    )
)
_UPLOAD_PATIENCE = {  # W&B waits 2 s after the first failure, and twice as long after each further one
    f"WANDB_X_{client}_RETRY_MAX": "6" for client in ("GRAPHQL", "FILE_STREAM", "FILE_TRANSFER")
}


def upload_environment(
    directory: Path,
    *,
    shared: bool,
    label: str | None,
    primary: bool,
    finishes: bool,
    resume: str | None,
    server: str | None = None,
) -> dict[str, str]:
    """The environment in which ``wandb sync`` uploads one file, made from that of this process.

    Settings of one run (its id, name, tags, group, …) are left out, because they are meant for another one. Python
    imports nothing from the directory in which it is started. Settings files of the current directory do not count: one
    that sets a proxy, and no check of certificates, would get the API key on its way to the right server.
    Unless the user sets other limits, W&B gives up after about two minutes without a server, instead of two hours.

    Args:
        directory: Where W&B is to keep its log, for this user alone.
        shared: Whether the file is that of a writer of a shared run.
        label: The writer's label; `None` in a plain run.
        primary: Whether the writer is the shared run's primary, or the run is a plain one.
        finishes: Whether the end of the file is the end of the run.
        resume: W&B's ``resume``, for a plain run that goes on; `None` for a run of its own.
        server: The server's address; `None` for the one of the user's own settings, or W&B's.

    Returns:
        A copy of the environment.
    """
    environment = {name: value for name, value in own_environment().items() if name not in _OF_ONE_RUN}
    roles = {"X_PRIMARY": primary, "X_UPDATE_FINISH_STATE": finishes}
    environment.update({f"WANDB_{name}": str(value).lower() for name, value in roles.items()})
    environment["WANDB_MODE"] = "shared" if shared else "online"
    environment["WANDB_DIR"] = str(directory)
    if label is not None:
        environment["WANDB_X_LABEL"] = label
    if resume is not None:
        environment["WANDB_RESUME"] = resume
    if server is not None:
        environment["WANDB_BASE_URL"] = server
    for name, value in _UPLOAD_PATIENCE.items():
        environment.setdefault(name, value)
    (directory / "wandb").mkdir(parents=True, exist_ok=True)
    return environment
