"""Warnings: those that are logged once each, and the line that one names."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from dist_wandb.notices import Line, Notices, users_line, warn


def called_from(*modules: str) -> Line | None:
    """Call `users_line` through code of these modules, the outermost first."""
    call: Callable[[], Any] = users_line
    for module in reversed(modules):
        names: dict[str, Any] = {"__name__": module, "call": call}
        exec(compile("def step():\n    return call()", f"{module}.py", "exec"), names)  # noqa: S102
        call = names["step"]
    found: Line | None = call()
    return found


@pytest.mark.parametrize(
    ("modules", "file"),
    [
        (["train"], "train.py"),
        (["train", "dist_wandb.session.session"], "train.py"),
        (["train", "lightning.pytorch.trainer", "dist_wandb.lightning.logger"], "train.py"),
        (["train", "accelerate.accelerator", "functools", "dist_wandb.accelerate.tracker"], "train.py"),
        (["train", "lightning.pytorch.trainer", "callbacks_of_mine", "dist_wandb"], "callbacks_of_mine.py"),
        (["train", "lightning_of_mine", "wandb.sdk"], "lightning_of_mine.py"),
    ],
)
def test_the_line_is_the_innermost_of_the_user(modules: list[str], file: str) -> None:
    line = called_from(*modules)
    assert line is not None
    assert (line.file, line.number) == (file, 2)


def test_on_a_thread_without_the_users_code_it_is_a_frameworks_line_or_none(caplog: pytest.LogCaptureFixture) -> None:
    found: dict[str, Line | None] = {}
    for module in ("lightning.launcher", "dist_wandb.exchange.collective"):
        names: dict[str, Any] = {"__name__": module, "call": users_line, "found": found}
        exec(compile(f"def step():\n    found[{module!r}] = call()", f"{module}.py", "exec"), names)  # noqa: S102
        thread = threading.Thread(target=names["step"])
        thread.start()
        thread.join()
    line, of_ours = found.values()
    assert line is not None
    assert line.file == "lightning.launcher.py"
    warn("of our thread", of_ours)
    assert caplog.messages == ["dist_wandb: of our thread"]


def test_a_warning_names_the_line_and_respects_the_users_filters(caplog: pytest.LogCaptureFixture) -> None:
    line = Line("train.py", 7, "train", {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            warn("x", line)
    (found,) = [one for one in caught if one.category is UserWarning]
    assert (found.filename, found.lineno, str(found.message)) == ("train.py", 7, "x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="y"):
            warn("y", line)
        with caplog.at_level(logging.WARNING):
            warn("z", line, may_raise=False)
    assert caplog.messages == ["dist_wandb: z"]


def test_only_the_first_warning_of_each_kind_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    notices = Notices()
    for kind, message in (("a", "one"), ("b", "two"), ("a", "three")):
        notices.warn(kind, message)
    assert caplog.messages == ["dist_wandb: one", "dist_wandb: two"]
    assert [notices.is_first(kind) for kind in ("a", "c", "c")] == [False, True, False]
    assert Notices().is_first("a")
