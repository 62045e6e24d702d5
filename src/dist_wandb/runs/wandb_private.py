"""wandb's own process (its "service"), which writes all runs of this process, and the other uses of its private names.

Private names are used where no public ones exist; versions without them are supported. A run is passed to a child
process, which attaches to the parent's service.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dist_wandb.notices import warn
from dist_wandb.runs.client_settings import inherits_service, one_line
from dist_wandb.runs.interception import intercept, intercept_all, original
from dist_wandb.runs.null_run import AnyRun, Run
from dist_wandb.runs.requested import settings_in
from dist_wandb.settings.config_values import decoded, encoded, given_values
from dist_wandb.settings.options import Current

_LOST_SERVICE = frozenset({"MailboxClosedError", "HandleAbandonedError", "SockClientClosedError"})  # private errors
FINISH = "_finish"  # the method of a run that all ways of finishing it call
LOG = "_log"  # the method of a run that `log` calls, and the hooks of `watch`
SUMMARY_WRITTEN = "_update_callback"  # what a run's summary calls with a record of each write
SUMMARY_READ = "_get_current_summary_callback"  # what it calls for each read; returns the values by name
_WATCHED = ("gradients/", "parameters/")  # how the names of histograms begin
_STEP_ASKED = "deliver_history_step"  # the method of a run's interface that `run.step` calls
_DEFINED = "_metric_callback"  # the method of a run that sends a definition
_LOG_ARTIFACT, _API = "_log_artifact", "_public_api"  # methods of a run; the first one calls the second one
_TELEMETRY = "_telemetry_callback"  # the method of a run that reports, in an import by the user, what is imported
_SETUP, _MEDIA = "wandb.sdk.wandb_setup", "wandb.sdk.data_types._private"
_LOST_SOCKET = frozenset({errno.EBADF, errno.ENOTCONN, errno.EPIPE, errno.ESHUTDOWN})
_LONGEST_OPENING = 30.0  # seconds for which the end of the process is held up
_stopping = threading.RLock()  # two threads may find the same process lost
_logs_table = Current("logs_table", default=False)  # in this thread


# --- wandb's own process ----------------------------------------------------------------------------------------------


def tear_down_service() -> None:
    """Stop wandb's own process, which keeps the id of a failed run in use; this ends all open runs of this process."""
    import wandb

    with suppress(Exception):  # the process may be dead
        original(wandb, "teardown")()
    os.environ.pop("WANDB_SERVICE", None)  # it names that process


def drop_inherited_service() -> None:
    """Remove another process's `WANDB_SERVICE`; call it before wandb, or its settings, are first used."""
    # Ranks whose common parent process used wandb would share the parent's service, which refuses a run id that a
    # sibling has open: "run ID X is in use".
    if inherits_service():
        del os.environ["WANDB_SERVICE"]


def is_loss_of_service(error: Exception) -> bool:
    if isinstance(error, OSError):  # older versions: BrokenPipeError; newer ones: ConnectionResetError
        return isinstance(error, ConnectionError) or error.errno in _LOST_SOCKET
    return type(error).__name__ in _LOST_SERVICE


def has_lost_service(run: AnyRun, error: Exception) -> bool:
    """Return whether a call of `run` failed because wandb's own process is lost, rather than because of a value.

    In doubt the run is probed by a call that adds nothing to the row in progress: if the process is lost, it fails.
    """
    if not isinstance(error, OSError) or not is_loss_of_service(error):
        return is_loss_of_service(error)
    try:
        original(run, "log")({}, commit=False)  # the session's own handler accepts rows of a lost run
    except Exception as second:  # noqa: BLE001  # of any kind
        return is_loss_of_service(second)
    return False


@contextmanager
def media_directory() -> Iterator[None]:
    # Ended forks remove it, as do programs that clean up temporary files. wandb notices after it has stored a table.
    directory = Path(getattr(getattr(sys.modules.get(_MEDIA), "MEDIA_TMP", None), "name", "."))
    if is_missing := not directory.exists():
        with suppress(OSError):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        yield
    finally:
        if is_missing and not threading.main_thread().is_alive():  # at its end the process has removed it
            with suppress(OSError):
                directory.rmdir()


def service_in_use() -> object:
    singleton = getattr(sys.modules.get(_SETUP), "_singleton", None)
    return getattr(singleton, "_connection", singleton)  # another one after each start of wandb's process


@contextmanager
def before_the_end() -> Iterator[None]:
    """Open a run on any thread: Python calls what is registered for the end of the process only after the block.

    wandb registers a handler when its process starts, which would end the new run if it came before the session's.
    """
    is_open = threading.Event()
    with suppress(RuntimeError):  # some versions of Python start no threads during shutdown
        threading.Thread(target=is_open.wait, args=(_LONGEST_OPENING,), daemon=False).start()  # Python waits for it
    try:
        yield
    finally:
        is_open.set()


def detach_service() -> None:
    """Make the next run start a new wandb process, as this one keeps the id of a failed run; open runs keep theirs."""
    setup = sys.modules.get(_SETUP)
    if hasattr(setup, "_singleton"):
        setup._singleton = None  # type: ignore[union-attr]  # noqa: SLF001  # no public way
        os.environ.pop("WANDB_SERVICE", None)


def tear_down_service_of(lost: AnyRun) -> None:
    """Stop the process of a lost run, unless new runs use another one: several runs may lose the same process."""
    with _stopping:
        mine = getattr(lost, "_wl", None)
        if mine is None or mine is getattr(sys.modules.get(_SETUP), "_singleton", None):  # `None`: a mock of a run
            tear_down_service()


def disarm_exit_hooks() -> None:
    # They would remove the parent's directory for media and, before wandb 0.20, stop the parent's wandb process.
    media = getattr(sys.modules.get(_MEDIA), "MEDIA_TMP", None)
    with suppress(AttributeError):
        atexit.unregister(media.cleanup)  # type: ignore[union-attr]
        media._finalizer.detach()  # type: ignore[union-attr]  # noqa: SLF001  # no public way
    with suppress(AttributeError):
        unregister = service_in_use()._cleanup  # type: ignore[attr-defined]  # noqa: SLF001
        if unregister is not None:
            unregister()


def leave_run() -> None:
    """In a forked process without a run: let wandb's names and the hooks of `watch` not write to the parent's run."""
    module = sys.modules.get("wandb.sdk.lib.module")
    run = getattr(sys.modules.get("wandb"), "run", None)
    if module is not None and is_wandbs(run):
        with suppress(AttributeError):
            run._torch.unhook_all()  # type: ignore[union-attr]  # noqa: SLF001  # no public way
            module.unset_globals()


@contextmanager
def with_warnings_alone(init_arguments: Mapping[str, Any], *, on: bool) -> Iterator[None]:
    names = ("quiet", "silent", "show_info")
    given = settings_in(init_arguments)
    is_set = (given.get(name) is not None or f"WANDB_{name.upper()}" in os.environ for name in names)
    if not on or any(is_set):
        yield
        return
    import wandb

    settings = wandb.setup().settings
    wandb.termsetup(settings.model_copy(update={"show_info": False}), None)
    try:
        yield
    finally:
        wandb.termsetup(settings, None)  # as wandb.setup does


def is_silent(run: AnyRun | None = None) -> bool:
    in_settings = bool(run) and getattr(getattr(run, "settings", None), "silent", None) is True  # a mock has others
    return in_settings or os.environ.get("WANDB_SILENT", "").lower() in ("true", "1", "yes")


# --- a run ------------------------------------------------------------------------------------------------------------


def pickled_run(run: AnyRun | None) -> bytes | None:
    try:
        return pickle.dumps((run, encoded(given_values(getattr(run, "config", None))))) if run else None
    except (pickle.PicklingError, AttributeError, TypeError):  # a mock of a run
        return None


def unpickled_run(data: bytes) -> Run | None:
    """In the child: return the parent's run, attached to the parent's service; `None`, with a warning, if it fails."""
    run: Run
    run, config = pickle.loads(data)  # noqa: S301  # written by `pickled_run` in the parent of this very process
    try:
        _ = getattr(run, "config", None)  # wandb attaches at the first use
    except Exception as error:  # noqa: BLE001  # of wandb's own types: WANDB_SERVICE is unset, or its process has ended
        warn(f"this process reopens the run of its parent, because wandb could not attach to it: {one_line(error)}")
        return None
    if config:
        fill_config(run, decoded(config))
    return run


def is_locked(config: Any, name: str) -> bool:
    """Return whether a run's config ignores what a script writes under a name: a sweep's value."""
    check = getattr(type(config), "_check_locked", None)  # a mock of a run has none
    return check is not None and bool(check(config, name, ignore_locked=True))


def is_finished(run: AnyRun) -> bool:
    return bool(run) and getattr(run, "_is_finished", False) is True  # of a mock it may be anything


def summary_before(run: AnyRun) -> dict[str, Any]:
    """Return the numbers and texts, also nested ones, in the summary of a run that was resumed; nothing of others."""

    def plain(values: Mapping[str, Any]) -> dict[str, Any]:
        nested = {name: plain(part) for name, part in values.items() if isinstance(part, dict) and "_type" not in part}
        parts = {name: part for name, part in values.items() if isinstance(part, (int, float, str)) and name[:1] != "_"}
        return {**parts, **nested}

    read = getattr(getattr(run, "summary", None), "__dict__", {}).get(SUMMARY_READ)
    return plain(read()) if read is not None and getattr(run, "resumed", False) else {}


def is_watched(values: Any, commit: object) -> bool:
    """Return whether a call of `LOG` comes from the hooks of `watch`: histograms of gradients or parameters."""
    return (
        commit is False
        and bool(values)
        and all(
            str(name).startswith(_WATCHED) and type(value).__name__ == "Histogram" for name, value in values.items()
        )
    )


def set_starting_step(run: Any, step: int) -> None:
    """Let `run.starting_step` return the user's step, not W&B's number of rows."""
    if is_wandbs(run) and hasattr(run, "_starting_step"):
        run._starting_step = step  # noqa: SLF001  # no public way


# Takes the place of W&B's API while a run logs the artifact of a table: answers without asking the server.
_no_server = SimpleNamespace(
    settings=dict.fromkeys(("entity", "project")),  # as for a run without them
    _expected_artifact_type=lambda **_: None,  # no other type has its name: only W&B itself gives such names
    _set_artifact_save_handle=lambda *_: None,  # nobody waits for the upload of such an artifact
)


def adapt(run: Any, step: Callable[[], int]) -> list[Callable[[], None]]:
    """Change what a run asks of wandb's process and server; return functions that undo it.

    `run.step` is the user's `step`, not W&B's number of rows. wandb makes an artifact of each table, and asks the
    server about it first, in `log`: without a server, the training and all later rows would wait until the request is
    given up. An import by the user is reported to wandb's process, and must not fail because that is gone. `watch`
    measures this rank's part of a `DTensor`: what it asks of the whole one waits for ranks that do not watch.
    """
    if not is_wandbs(run):
        return []

    def log(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # `log_model` passes an artifact by name, and never a table's.
        if not args or type(args[0]).__name__ != "InternalArtifact" or "table" not in args[0].type:
            return original(*args, **kwargs)
        with _logs_table.by(True):
            return original(*args, **kwargs)

    def api(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _no_server if _logs_table() else original(*args, **kwargs)

    def report(original: Callable[[Any], None], record: Any) -> None:
        with suppress(Exception):
            original(record)

    def measure(original: Callable[[Any, str], None], tensor: Any, name: str) -> None:
        original(tensor.to_local() if hasattr(tensor, "to_local") else tensor, name)

    answer = SimpleNamespace(wait_or=lambda **_: SimpleNamespace(step=step()))
    interface = getattr(run, "_interface", None)  # older versions count steps themselves; there, it remains W&B's
    watched = getattr(run, "_torch", None) if "torch" in sys.modules else None  # it would import torch
    of_run = (run, _LOG_ARTIFACT, log), (run, _API, api), (run, _TELEMETRY, report)
    return intercept_all([*of_run, (interface, _STEP_ASKED, lambda _: answer), (watched, "log_tensor_stats", measure)])


def is_wandbs(run: Any) -> bool:
    """Return whether a run is one of wandb's, not a stand-in or a mock of a test."""
    return type(run).__module__.startswith("wandb.")


def checked_definition(run: AnyRun, define: Callable[[], Any]) -> tuple[bool, Any]:
    """Return whether a definition of a metric is possible without sending it, and what `define` then returns."""
    if not (is_wandbs(run) and hasattr(run, _DEFINED)):
        return False, None
    thread = threading.get_ident()

    def drop(publish: Callable[[Any], None], record: Any) -> None:
        if threading.get_ident() != thread:
            publish(record)

    with ExitStack() as until_checked:
        until_checked.callback(intercept(run, _DEFINED, drop))
        return True, define()


def can_store(run: AnyRun) -> bool:
    names = getattr(sys.modules.get("wandb.sdk.data_types.utils"), "__dict__", {})
    is_known = is_wandbs(run) and hasattr(run, "_serialize_custom_charts")
    return is_known and "val_to_json" in names and not getattr(run, "disabled", False)


def stored(run: Any, name: str, key: str, value: Any, step: int) -> tuple[str, Any]:
    # Returns JSON values, and the name under which they are stored: a chart is replaced by its table, which has another
    # name. Files of media are written now, under names with `key` and `step`. `can_store` must be true for the run.
    from wandb import util
    from wandb.sdk.data_types.utils import val_to_json

    ((found, value),) = run._serialize_custom_charts({name: value}).items()  # noqa: SLF001  # no public way
    key = key if found == name else found
    with media_directory():
        made = val_to_json(run, key, value, namespace=step, ignore_copy_err=True)
    return found, json.loads(util.json_dumps_safer_history(made))


def values_in(path: str) -> dict[str, Any]:
    """Return the values in a config file of wandb, such as an agent writes; none if it cannot be read."""
    with suppress(Exception):  # `wandb.init`, which reads it on the rank with the run, reports what is wrong
        from wandb.sdk.lib.config_util import dict_from_config_file

        return dict(dict_from_config_file(path) or {})
    return {}


def fill_config(run: Run, values: Mapping[str, Any]) -> None:
    # wandb leaves the config of an attached run empty. W&B already has the values: nothing is sent.
    update = getattr(run.config, "_update", None)
    if update is not None:
        update(dict(values), allow_val_change=True, ignore_locked=True)
