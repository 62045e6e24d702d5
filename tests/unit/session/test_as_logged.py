"""Media and other objects become what W&B stores of them when they are logged, on the thread that logs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import plotly.graph_objects as go
import pytest
import wandb
from stored import ended_runs, read_history
from wandb.sdk.data_types.plotly import Plotly

import dist_wandb
from dist_wandb.exchange.direct import DirectExchange
from dist_wandb.session.session import Session


@pytest.fixture
def session(bare_environment: None, tmp_path: Path) -> Iterator[Session]:  # noqa: ARG001  # goes first
    session = dist_wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(silent=True))
    yield session
    session.finish()


@pytest.fixture
def late(session: Session) -> Iterator[list[Any]]:  # noqa: ARG001  # it ends after the rows were written
    """The rows on their way, as in an exchange with other ranks; another thread writes them at the end of the test."""
    put, waiting, writer = DirectExchange.put, list[Any](), list[DirectExchange]()

    def wait(exchange: DirectExchange, row: Any) -> None:
        writer.append(exchange)
        waiting.append(row)

    with mock.patch.object(DirectExchange, "put", wait):
        yield waiting
    thread = threading.Thread(target=lambda: [put(*one) for one in zip(writer, waiting, strict=True)])
    thread.start()
    thread.join()


@pytest.fixture
def pyplot(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for ``matplotlib.pyplot``, with the title of its current figure. It draws on one thread."""
    module: Any = ModuleType("matplotlib.pyplot")
    module.current = ""

    def make(value: Any) -> Plotly:
        assert value is module
        assert threading.current_thread() is threading.main_thread(), "pyplot is used on another thread"
        if not module.current:
            raise ValueError("min() arg is an empty sequence")  # seen with wandb 0.31.0 after `plt.close()`
        return Plotly(go.Figure(layout={"title": module.current}))

    monkeypatch.setattr(Plotly, "make_plot_media", make)
    return module


def rows_of(session: Session) -> list[dict[str, Any]]:
    session.finish()
    (run,) = ended_runs(Path(session.run.dir).parent, 1)
    return list(read_history(run.path))


def test_pyplot_is_drawn_when_it_is_logged_and_on_no_other_thread(
    session: Session, pyplot: Any, late: list[Any]
) -> None:
    for step in (1, 2):
        pyplot.current = f"step {step}"
        session.log({"chart": pyplot, "nested": {"inner": pyplot}}, step=step)
        pyplot.current = ""
    assert len(late) == 2
    files = Path(session.run.dir)
    titles = [json.loads(path.read_text())["layout"]["title"]["text"] for path in files.glob("media/plotly/*.json")]
    assert sorted(titles) == ["step 1", "step 1", "step 2", "step 2"]


@pytest.mark.newest  # reads the rows
def test_a_plot_that_cannot_be_drawn_is_left_out_with_its_cause(
    session: Session, pyplot: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        session.log({"chart": pyplot, "loss": 0.5}, step=step)
    rows = rows_of(session)
    assert [(row["loss"], "chart" in row) for row in rows] == [(0.5, False)] * 2
    message = "W&B cannot write 'chart' on rank 0, of type module: ValueError('min() arg is an empty sequence'). It is"
    assert caplog.text.count(message) == 1


@pytest.mark.newest  # reads the rows
def test_the_row_of_an_object_has_its_names_once(session: Session) -> None:
    """A pattern of the user does not define the parts of what W&B stores."""
    session.define_metric("im*", step_metric="epoch")
    table = wandb.Table(columns=["x"], data=[[1]])
    session.log({"image": wandb.Html("<p>"), "epoch": 1, "plot": wandb.plot.line(table, "x", "x")})
    (row,) = rows_of(session)
    assert {name.partition(".")[0] for name in row if name[0] != "_"} == {"image", "epoch", "plot_table", "global_step"}
    assert row["plot_table.nrows"] == 1


@pytest.mark.usefixtures("bare_environment")
@mock.patch.object(wandb.Table, "MAX_ARTIFACT_ROWS", 2)
def test_a_table_that_is_too_long_is_an_error_of_log_if_the_settings_ask_for_it(tmp_path: Path) -> None:
    settings = wandb.Settings(silent=True, table_raise_on_max_row_limit_exceeded=True)
    with dist_wandb.init(mode="offline", dir=str(tmp_path), settings=settings) as session:
        for log in (session.log, session.run.log):
            with pytest.raises(ValueError, match="Table row limit exceeded"):
                log({"table": wandb.Table(columns=["x"], data=[[1]] * 3)})
        session.log({"table": wandb.Table(columns=["x"], data=[[1]] * 2)})


@pytest.mark.newest  # reads the rows
def test_a_row_of_media_has_the_last_value_of_the_users_axis(session: Session) -> None:
    """As with wandb alone: our pattern for all names does not take precedence over the user's."""
    session.define_metric("val/*", step_metric="epoch")
    session.define_metric("raw/*", step_metric="epoch", step_sync=False)
    for kind in "abcdefgh":
        session.log({f"val/{kind}0": wandb.Histogram([1, 2])})  # before the first value
        session.log({"loss": 1.0, "epoch": 3})
        session.log({f"val/{kind}": wandb.Histogram([1, 2])})
        session.log({f"raw/{kind}": wandb.Histogram([1, 2]), "loss": 2.0})
        session.log({f"val/{kind}1": wandb.Histogram([1, 2])}, commit=False)
        session.log({"epoch": 4})
    found = rows_of(session)
    assert [row.get("epoch") for row in found] == [0, 3, 3, None, 4, *[4, 3, 3, None, 4] * 7]
