"""Arguments and ids that W&B would not accept are refused before anything is started."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import wandb

import dist_wandb
from dist_wandb.errors import ConfigurationError
from dist_wandb.runs.requested import WandbArguments, check_id, check_init_arguments

FORBIDDEN = ":;,#?/'\\%"

pytestmark = pytest.mark.usefixtures("bare_environment")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("projct", "Did you mean 'project'?"),
        ("tag", "Did you mean 'tags'?"),
        ("runmode", "Did you mean 'run_mode'?"),
        ("rankscope", "Did you mean 'rank_scope'?"),
        ("zzzzzz", "See the documentation of wandb.init."),
    ],
)
def test_an_unknown_argument_is_refused_and_the_nearest_suggested(name: str, hint: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_init_arguments({"project": "digits", name: 1}, "the integration")
    assert str(refused.value) == f"the integration got the argument {name!r}, which wandb.init does not know. {hint}"


@pytest.mark.parametrize("name", ["run_mode", "rank_scope", "reduce", "spread", "limits"])
def test_our_own_arguments_in_the_wrong_place_are_refused_with_the_right_one(name: str) -> None:
    message = f"init_trackers got the argument '{name}', which belongs to dist_wandb, not to wandb.init. Give it to"
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        check_init_arguments({name: "new"}, "init_trackers")


def test_every_argument_of_the_installed_wandb_is_accepted() -> None:
    check_init_arguments(dict.fromkeys(inspect.signature(wandb.init).parameters), "the integration")


def of_wandb() -> set[str]:
    return set(inspect.signature(wandb.init).parameters) - {"project"}


def test_every_argument_that_editors_know_is_known_to_the_installed_wandb() -> None:
    gone = WandbArguments.__optional_keys__ - of_wandb()
    assert not gone, f"wandb {wandb.__version__} has dropped {sorted(gone)}; WandbArguments has them"


@pytest.mark.newest
def test_editors_know_every_argument_of_the_newest_wandb() -> None:
    added = of_wandb() - WandbArguments.__optional_keys__
    assert not added, f"wandb {wandb.__version__} also has {sorted(added)}; WandbArguments lacks them"


if TYPE_CHECKING:  # for mypy, which reports an ignore without an error: the first calls are errors, the last are not
    dist_wandb.init(projct="digits")  # type: ignore[call-arg]
    dist_wandb.init(tags=7)  # type: ignore[arg-type]
    dist_wandb.init(mode="shared")  # type: ignore[arg-type]
    dist_wandb.wandb_init(spread="loss", projct="digits")  # type: ignore[call-overload]
    dist_wandb.DistWandbLogger(projct="digits")  # type: ignore[call-arg]
    dist_wandb.DistWandbTracker(tag=["x"])  # type: ignore[call-arg]
    dist_wandb.DistWandbCallback(tag=["x"])  # type: ignore[call-arg]
    dist_wandb.init("digits", tags=["x"], config={"lr": 0.1}, settings={"init_timeout": 9}, resume="auto", notes=None)
    dist_wandb.wandb_init(project="digits", run_mode="shared", job_type="train", limits={"join_timeout": 5})
    dist_wandb.DistWandbLogger("x", project="digits", group="night", entity="us", job_type="train")


@pytest.mark.parametrize("character", FORBIDDEN)
def test_a_forbidden_character_is_named_and_an_id_without_it_proposed(character: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_id(f"a{character}b", "id=…")
    expected = f"id=… has {character!r}, which W&B refuses in run ids. Use for example 'a-b'."
    assert str(refused.value) == expected


@pytest.mark.parametrize(
    ("run_id", "message"),
    [
        ("a:b/c", "has ':' and '/', which W&B refuses"),
        *((run_id, "is empty, or has white space around it") for run_id in ("", " ", " a", "a ", "a\n", "\ta")),
        *(
            (given_id, f" is {type(given_id).__name__}, but a run id is text")
            for given_id in (7, True, b"a", Path("a"))
        ),
        *((run_id, "names a directory") for run_id in (".", "..")),
        *((f"a{odd}b", "which cannot be printed") for odd in ("\x1b", "\0", "\x9b", "\u202e", "\ud800", "\n")),
        *(("x" * size, f"has {size} characters ({size} bytes), but a run id may have 128") for size in (129, 5000)),
        ("é" * 97, "has 97 characters (194 bytes), but a run id may have 128 (192 bytes) at most"),
    ],
)
def test_what_is_wrong_with_an_id_is_named(run_id: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)) as refused:
        check_id(run_id, f"id={run_id!r}")
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400


@pytest.mark.usefixtures("new_process")
def test_a_wandb_that_accepts_any_argument_is_trusted() -> None:
    module: Any = wandb
    module.init = lambda **_: None
    check_init_arguments({"projct": 1}, "the integration")
