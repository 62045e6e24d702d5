"""`wandb_init`: decorated functions of every kind, nesting, and the precedence of arguments."""

from __future__ import annotations

import asyncio
import pickle
import warnings
from collections.abc import AsyncGenerator, Generator
from typing import Any

import numpy as np
import pytest
from fakes import FakeWandb

import dist_wandb
from dist_wandb import DistWandbLogger, DistWandbTracker, get_run, wandb_init
from dist_wandb.errors import ConfigurationError

MonkeyPatch = pytest.MonkeyPatch


@wandb_init(id="module")
def at_module_level(text: str, times: int = 2) -> str:
    """Say it again."""
    return text * times


# --- what is decorated ------------------------------------------------------------------------------------------------


def test_functions_and_methods_of_all_kinds_keep_their_name_docstring_and_pickle(fake_wandb: FakeWandb) -> None:
    assert at_module_level.__name__ == "at_module_level"
    assert at_module_level.__doc__ == "Say it again."
    assert at_module_level("a", times=3) == "aaa"
    assert pickle.loads(pickle.dumps(at_module_level)) is at_module_level  # noqa: S301  # our own

    class Trial:
        lr = 0.1

        @wandb_init
        def of_instance(self) -> float:
            return self.lr * bool(get_run())

        @classmethod
        @wandb_init()
        def of_class(cls) -> float:
            return cls.lr * bool(get_run())

        @staticmethod
        @wandb_init
        def of_none() -> bool:
            return bool(get_run())

    assert (Trial().of_instance(), Trial.of_class(), Trial.of_none()) == (0.1, 0.1, True)
    assert len(fake_wandb.runs) == 4


@pytest.mark.usefixtures("fake_wandb")
@pytest.mark.parametrize("wrong", [type("Class", (), {}), staticmethod(len), classmethod(type), 3, "digits"])
def test_other_objects_than_functions_are_refused(wrong: Any) -> None:
    for decorate in (wandb_init, wandb_init(project="digits")):
        with pytest.raises(ConfigurationError, match="decorates functions and methods, but was given"):
            decorate(wrong)


def test_concurrent_coroutines_have_a_run_each(fake_wandb: FakeWandb) -> None:
    both_run = asyncio.Barrier(2) if hasattr(asyncio, "Barrier") else None

    @wandb_init
    async def train(lr: float) -> float:
        if both_run is not None:
            await both_run.wait()
        await asyncio.sleep(0.01)
        get_run().log({"lr": lr})
        await asyncio.sleep(0.01)
        get_run().log({"lr": lr + 1})
        return lr

    async def main() -> tuple[float, float]:
        return await asyncio.gather(train(1.0), train(2.0))

    assert list(asyncio.run(main())) == [1.0, 2.0]
    assert [[row["lr"] for row in run.rows] for run in fake_wandb.runs] == [[1.0, 2.0], [2.0, 3.0]]
    assert [run.exit_codes for run in fake_wandb.runs] == [[None], [None]]


def test_generator_is_one_run_from_its_first_item_to_its_end(fake_wandb: FakeWandb) -> None:
    @wandb_init
    def losses() -> Generator[float, float, str]:
        scale = 1.0
        for step in range(3):
            get_run().log({"loss": scale * step})
            try:
                scale = (yield scale * step) or scale
            except ValueError as error:
                scale = float(str(error))
        return "end"

    generator = losses()
    assert fake_wandb.runs == []
    assert next(generator) == 0.0
    assert generator.send(10.0) == 10.0
    assert generator.throw(ValueError("5")) == 10.0
    with pytest.raises(StopIteration) as end:
        next(generator)
    assert end.value.value == "end"
    (run,) = fake_wandb.runs
    assert [row["loss"] for row in run.rows] == [0.0, 10.0, 10.0]
    assert run.exit_codes == [None]


def test_asynchronous_generator_is_one_run(fake_wandb: FakeWandb) -> None:
    @wandb_init
    async def losses() -> AsyncGenerator[float, float]:
        scale = 1.0
        for step in range(3):
            await asyncio.sleep(0)
            get_run().log({"loss": scale * step})
            try:
                scale = (yield scale * step) or scale
            except ValueError as error:
                scale = float(str(error))

    async def main() -> list[float]:
        generator = losses()
        items = [await anext(generator), await generator.asend(10.0), await generator.athrow(ValueError("5"))]
        items += [item async for item in generator]
        return items

    assert asyncio.run(main()) == [0.0, 10.0, 10.0]
    assert [[row["loss"] for row in run.rows] for run in fake_wandb.runs] == [[0.0, 10.0, 10.0]]
    assert [run.exit_codes for run in fake_wandb.runs] == [[None]]


def test_closing_a_generator_early_is_a_success_and_an_exception_a_failure(fake_wandb: FakeWandb) -> None:
    closed = []

    @wandb_init
    def numbers() -> Generator[int, None, None]:
        try:
            yield 1
            yield 2
            raise RuntimeError("beyond")
        finally:
            closed.append(True)

    for _ in numbers():
        break
    assert fake_wandb.runs[0].exit_codes == [None]
    with pytest.raises(RuntimeError, match="beyond"):
        list(numbers())
    assert fake_wandb.runs[1].exit_codes == [1]
    assert closed == [True, True]


def test_rows_logged_while_a_generator_is_closed_go_into_its_own_run(fake_wandb: FakeWandb) -> None:
    @wandb_init(id="generator")
    def numbers() -> Generator[int, None, None]:
        try:
            yield 1
        finally:
            get_run().log({"last": 1})

    @wandb_init(id="asynchronous")
    async def losses() -> AsyncGenerator[int, None]:
        try:
            yield 2
        finally:
            get_run().log({"last": 2})

    async def close_inside_of_another() -> None:
        generator, asynchronous = numbers(), losses()
        assert (next(generator), await anext(asynchronous)) == (1, 2)
        with dist_wandb.init(id="another", reinit="create_new"):
            generator.close()
            await asynchronous.aclose()

    asyncio.run(close_inside_of_another())
    assert [[row["last"] for row in run.rows] for run in fake_wandb.runs] == [[1], [2], []]


# --- nesting ----------------------------------------------------------------------------------------------------------


def test_nested_function_joins_the_outer_run_which_may_handle_its_failure(fake_wandb: FakeWandb) -> None:
    seen: list[object] = []

    @wandb_init
    def inner() -> None:
        assert get_run() is seen[0]
        get_run().log({"inner": 1})
        raise ValueError("handled")

    @wandb_init(id="exp")
    def outer() -> None:
        seen.append(get_run())
        with pytest.raises(ValueError, match="handled"):
            inner()
        get_run().log({"outer": 2})

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outer()
    (run,) = fake_wandb.runs
    assert run.rows == [{"inner": 1, "global_step": 0}, {"outer": 2, "global_step": 1}]
    assert run.exit_codes == [None]


@pytest.mark.parametrize(
    ("inner", "outer", "ignored"),
    [
        ({"run_mode": "new", "project": "digits", "name": "inner"}, {"project": "digits"}, "run_mode, name"),
        ({"config": {"w": np.ones(3)}}, {"config": {"w": np.zeros(3)}}, "config"),
    ],
)
def test_ignored_arguments_of_a_nested_function_are_reported(
    fake_wandb: FakeWandb, inner: dict[str, Any], outer: dict[str, Any], ignored: str
) -> None:
    nested = wandb_init(**outer)(wandb_init(**inner)(lambda: 1))
    with pytest.warns(UserWarning, match=f"so {ignored} of its own"):
        assert nested() == 1
    assert len(fake_wandb.runs) == 1


def test_session_finished_inside_is_not_replaced_by_another(fake_wandb: FakeWandb) -> None:
    @wandb_init
    def train() -> None:
        get_run().finish()
        get_run().log({"loss": 1.0})
        assert not get_run()

    with dist_wandb.init() as other:
        train()
        assert get_run() is other
    assert [run.rows for run in fake_wandb.runs] == [[], []]


def test_init_inside_opens_another_run_and_inherits_project_and_tags(fake_wandb: FakeWandb) -> None:
    @wandb_init(run_mode="new", project="digits", id="exp", name="outer", config={"lr": 1}, tags=["t"])
    def train() -> None:
        outer = get_run()
        assert dist_wandb.init(project="ignored") is outer  # as wandb does while a run is open
        with dist_wandb.init(project="other", tags=["u"], reinit="create_new") as further:
            assert get_run() is further
            assert further.options.run_mode == "new"
        with dist_wandb.init(run_mode="auto", reinit="create_new") as further:
            assert further.options.run_mode == "auto"
        assert get_run() is outer

    train()
    described = [
        {name: given.get(name) for name in ("project", "id", "name", "tags")} for given in fake_wandb.arguments
    ]
    assert described == [
        {"project": "digits", "id": "exp", "name": "outer", "tags": ["t"]},
        {"project": "other", "id": None, "name": None, "tags": ["u"]},
        {"project": "digits", "id": None, "name": None, "tags": ["t"]},
    ]
    assert [run.config for run in fake_wandb.runs] == [{"lr": 1}, {}, {}]


# --- precedence -------------------------------------------------------------------------------------------------------


def options_of_all_integrations(**arguments: Any) -> list[tuple[str, str]]:
    with dist_wandb.init(**arguments, reinit="create_new") as session:
        found = [session.options]
    found += [DistWandbLogger(**arguments)._options, DistWandbTracker(**arguments).late_join.options]
    return [(options.run_mode, options.rank_scope) for options in found]


@pytest.mark.usefixtures("fake_wandb")
def test_precedence_is_argument_decorator_environment_default(monkeypatch: MonkeyPatch) -> None:
    assert options_of_all_integrations() == [("auto", "global")] * 3
    monkeypatch.setenv("DIST_WANDB_RUN_MODE", "shared")
    monkeypatch.setenv("DIST_WANDB_RANK_SCOPE", "worker")
    assert options_of_all_integrations() == [("shared", "worker")] * 3
    assert options_of_all_integrations(run_mode="auto") == [("auto", "worker")] * 3
    decorated = wandb_init(run_mode="new")(options_of_all_integrations)
    assert decorated() == [("new", "worker")] * 3
    assert decorated(run_mode="auto", rank_scope="global") == [("auto", "global")] * 3
    monkeypatch.setenv("DIST_WANDB_RUN_MODE", "")
    assert options_of_all_integrations() == [("auto", "worker")] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"run_mode": "share"}, "run_mode='share' is unknown"),
        ({"limits": {"finish_timeout": -1}}, "finish_timeout must be a positive number of seconds, got -1."),
        ({"projekt": "digits"}, "projekt.*project"),
    ],
)
def test_invalid_arguments_are_refused_where_the_function_is_defined(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        wandb_init(**arguments)
