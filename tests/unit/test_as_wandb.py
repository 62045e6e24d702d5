"""``import dist_wandb as wandb``: the names that scripts find there, and those that concern the current run."""

from __future__ import annotations

import ast
import inspect
import multiprocessing
import os
import pickle
import pkgutil
import subprocess
import sys
from contextlib import nullcontext
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import wandb
from fakes import TWO, FakeWandb, Job
from processes import run_python
from wandb.sdk.lib import module as module_of_wandb
from wandb.sdk.wandb_config import Config
from wandb.sdk.wandb_run import Run

import dist_wandb
from dist_wandb import as_wandb
from dist_wandb.errors import ConfigurationError
from dist_wandb.session import registry
from dist_wandb.session.opener import open_session
from dist_wandb.session.session import Session
from dist_wandb.settings.options import Options

if TYPE_CHECKING:
    from typing_extensions import assert_type

    assert_type(dist_wandb.run, Session | None)
    assert_type(dist_wandb.Table, type[wandb.Table])
    assert_type(dist_wandb.errors.CommError, type[wandb.errors.CommError])

HEAVY = ("torch", "wandb", "lightning", "accelerate")
NEWER = {"EvalTable", "Run"}  # than the oldest supported wandb: available, but not listed
NOT_OF_A_RUN = {"plot_table"}  # makes a chart
OURS = {"init", "__version__"}
CHECKED = {"agent", "teardown"}  # wandb's own after a check, or the end of all sessions
OF_CURRENT = {"config", "run", "summary"}
LISTED = set(dir(dist_wandb)) - {*dist_wandb.__all__, "DistWandbCallback", "DistWandbLogger", "DistWandbTracker"}
ACTING = {name for name in LISTED - CHECKED - OF_CURRENT if vars(as_wandb).get(name) is getattr(dist_wandb, name)}
OF_WANDB = LISTED - CHECKED - OF_CURRENT - ACTING
OF_BOTH = {"errors", "cli"}  # modules


# --- the names --------------------------------------------------------------------------------------------------------


def test_wandbs_functions_for_the_current_run_act_on_the_session() -> None:
    replaced_by_a_run = set(inspect.signature(module_of_wandb.set_global).parameters)
    named_as_a_method = {name for name in dir(wandb) if name[0] != "_" and inspect.isfunction(getattr(Run, name, None))}
    found = replaced_by_a_run | named_as_a_method
    assert {"log", "save", "watch"} <= replaced_by_a_run & named_as_a_method
    missing = found - ACTING - OF_CURRENT - NOT_OF_A_RUN
    assert not missing, (
        f"wandb {wandb.__version__} has {sorted(missing)} in its module, which seem to act on the current run: with "
        "`import dist_wandb as wandb` they would miss the session. Add them to dist_wandb._ACTING and as_wandb.py."
    )


def test_every_public_name_of_wandb_is_listed_and_resolves() -> None:
    assert {name for name in ACTING | OF_CURRENT if not hasattr(wandb, name)} <= {"pin_config_keys"}  # is newer
    names = set(wandb.__all__)
    assert names - set(dir(dist_wandb)) <= NEWER, "list it in dist_wandb._OF_WANDB, or in NEWER here"
    for name in (names | OF_WANDB) - OURS - CHECKED - ACTING - OF_CURRENT:
        assert getattr(dist_wandb, name) is getattr(wandb, name), name


@pytest.mark.usefixtures("new_process")
def test_a_name_of_wandb_that_is_replaced_is_the_replacement() -> None:
    module: Any = wandb
    module.Table = "replaced"
    assert getattr(dist_wandb, "Table") == "replaced"  # noqa: B009  # whatever its type


def test_no_other_name_hides_one_of_wandbs() -> None:
    modules = {module.name for module in pkgutil.iter_modules(dist_wandb.__path__)}
    of_wandb = {*dir(wandb), *(module.name for module in pkgutil.iter_modules(wandb.__path__))}
    assert (modules - {"__main__"}) & (of_wandb | OF_CURRENT | ACTING) == OF_BOTH  # no script reads `__main__`
    public = {name for name in of_wandb if not name.startswith("_")} | {"__version__"}
    assert public & set(dist_wandb.__all__) == OURS


def test_listed_names_are_declared_for_type_checkers() -> None:
    tree = ast.parse(Path(dist_wandb.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.asname or alias.name
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    declared = {
        node.target.id for node in block.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert set(dir(dist_wandb)) - imported - declared == {"__version__"}


def test_an_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'dist_wandb' has no attribute 'Tabel', and wandb .* has none"):
        _ = dist_wandb.Tabel


# --- imports ----------------------------------------------------------------------------------------------------------


def test_features_without_wandb_do_not_import_it() -> None:
    uses = "not hasattr(wandb, '_x') and not hasattr(wandb, 'exchange') and wandb.run is None and callable(wandb.log)"
    code = f"import sys, dist_wandb as wandb; assert {uses}; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run_python(code) == "[]"


@pytest.mark.slow
@pytest.mark.parametrize(
    "before",
    [
        "",
        "import dist_wandb.session.session, dist_wandb.session.config.sync, dist_wandb.errors",
        "from dist_wandb.session.config import sync; from dist_wandb import session, Session",
        "from dist_wandb import config, exchange; config = None; assert exchange.__name__ == 'dist_wandb.exchange'",
        "import wandb",
    ],
)
def test_names_do_not_depend_on_earlier_imports(before: str) -> None:
    code = f"""
{before}
import dist_wandb as wandb
print(type(wandb.config).__name__, wandb.errors.__name__, wandb.errors.CommError.__module__, wandb.run)
"""
    assert run_python(code) == "PreInitObject dist_wandb.errors wandb.errors.errors None"


def test_the_errors_module_also_has_wandbs_errors() -> None:
    errors: Any = dist_wandb.errors
    assert errors.UsageError is wandb.errors.UsageError is dist_wandb.UsageError
    assert errors.ConfigurationError is ConfigurationError
    assert errors.term is wandb.errors.term
    with pytest.raises(AttributeError, match="'UsageEror'"):
        _ = errors.UsageEror


# --- before a session -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_wandb")
def test_before_a_session_calls_config_and_summary_raise_wandbs_error() -> None:
    for name in ACTING - {"finish", "join", "restore"}:
        error = rf"^You must call wandb\.init\(\) before wandb\.{name}\(\)\. No session of"
        with pytest.raises(wandb.Error, match=error):
            getattr(dist_wandb, name)({"loss": 1.0})
    for name in ("config", "summary"):
        for use in (itemgetter("lr"), lambda found: setattr(found, "lr", 0.1)):
            with pytest.raises(wandb.Error, match=rf"You must call wandb\.init\(\) before wandb\.{name}"):
                use(getattr(dist_wandb, name))


@pytest.mark.usefixtures("fake_wandb")
def test_error_without_a_session_names_the_rank_or_that_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dist_wandb.run is None
    dist_wandb.finish()  # there is nothing to finish
    dist_wandb.join(1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(wandb.Error, match=r"is open on rank 1 of 2\. Call init on every rank, or call log under"):
        dist_wandb.log({"loss": 1.0})
    monkeypatch.delenv("RANK")
    with pytest.raises(wandb.Error, match="is open in this process"):
        dist_wandb.log({"loss": 1.0})
    monkeypatch.delenv("WORLD_SIZE")
    dist_wandb.init().finish()
    with pytest.raises(wandb.Error, match=r"before wandb\.log\(\)\. The session of dist_wandb has been finished\."):
        dist_wandb.log({"loss": 1.0})


def test_a_run_opened_by_wandb_itself_is_used(fake_wandb: FakeWandb) -> None:
    fake_wandb.sets_globals = True
    wandb.init()
    found: Any = dist_wandb.run
    (run,) = fake_wandb.runs
    assert found is run
    dist_wandb.log({"loss": 1.0}, 3)
    assert run.logged == [({"loss": 1.0}, {"step": 3, "commit": None})]
    dist_wandb.finish(2)
    assert run.exit_codes == [2]
    assert dist_wandb.run is None


# --- with a session ---------------------------------------------------------------------------------------------------


def test_functions_act_on_the_run_of_the_session(fake_wandb: FakeWandb) -> None:
    session = dist_wandb.init()
    assert dist_wandb.run is session
    for name in sorted(ACTING - {"finish", "join", "log"}):
        vars(fake_wandb.runs[0])[name] = lambda *args, name=name, **kwargs: (name, args[0], kwargs)
        found = getattr(dist_wandb, name)("first", policy="live")
        assert found == (name, "first", {"policy": "live"})


def test_wandbs_functions_do_not_call_what_a_script_has_put_in_their_place_on_the_run(fake_wandb: FakeWandb) -> None:
    session: Any = dist_wandb.init("digits", id="exp")
    ends: list[Any] = []

    def finish(exit_code: int | None = None) -> None:
        ends.append(exit_code)
        type(session).finish(session, exit_code)

    session.log = lambda data: dist_wandb.log({**data, "hooked": 1})
    session.define_metric = lambda name: dist_wandb.define_metric(f"own/{name}")
    session.finish = finish
    session.log({"loss": 0.5})
    session.define_metric("acc")
    dist_wandb.finish(3)  # as wandb's does, it ends the run by its method
    (run,) = fake_wandb.runs
    assert [{*row} for row in run.rows] == [{"loss", "hooked", "global_step"}]
    assert "own/acc" in dict(run.defined)
    assert (ends, run.exit_codes) == ([3], [3])


def test_teardown_ends_all_sessions_before_wandbs_process(fake_wandb: FakeWandb) -> None:
    """A run takes no row any more then, and rows may still wait for other ranks."""
    ended: list[Any] = []
    dist_wandb.init()
    dist_wandb.init(reinit="create_new")
    with mock.patch.object(
        wandb, "teardown", lambda code: ended.append((code, [run.exit_codes for run in fake_wandb.runs]))
    ):
        dist_wandb.teardown(3)
    assert ended == [(3, [[3], [3]])]
    assert dist_wandb.run is None


def test_restore_from_another_run_uses_wandb(fake_wandb: FakeWandb) -> None:
    module: Any = wandb
    module.restore = lambda *args, **kwargs: (args, kwargs)
    dist_wandb.init()
    restored: Any = dist_wandb.restore("model.pt", "team/digits/a", replace=True)
    assert restored == (("model.pt", "team/digits/a"), {"replace": True})
    assert len(fake_wandb.runs) == 1


def wandb_run() -> object:
    return dist_wandb.run


def test_a_run_beside_the_open_one_does_not_become_current(fake_wandb: FakeWandb) -> None:
    first = dist_wandb.init()
    second = dist_wandb.init(reinit="create_new")
    dist_wandb.log({"loss": 1.0})
    assert dist_wandb.run is first
    dist_wandb.finish()
    assert dist_wandb.get_run() is second
    assert wandb_run() is None
    with pytest.raises(dist_wandb.Error, match="opened with reinit='create_new'"):
        dist_wandb.log({"loss": 2.0})
    assert [run.rows for run in fake_wandb.runs] == [[{"loss": 1.0, "global_step": 0}], []]


@pytest.mark.parametrize("is_wandbs", [False, True])
def test_finish_also_ends_the_run_that_a_logger_uses(fake_wandb: FakeWandb, is_wandbs: bool) -> None:
    run: Any = fake_wandb.init() if is_wandbs else dist_wandb.init().run
    with mock.patch.multiple(wandb, run=run, finish=run.finish) if is_wandbs else nullcontext():
        open_session(Options(), {}, integration="test", adopt=lambda _: run)
        dist_wandb.finish(2)
        assert (wandb_run(), fake_wandb.runs[0].exit_codes) == (None, [2])


def test_finish_in_a_fork_leaves_the_run_to_its_parent(fake_wandb: FakeWandb) -> None:
    """wandb's own function breaks the connection that the parent has to wandb's process: its `finish` never returns."""
    session = dist_wandb.init()
    with mock.patch.multiple(wandb, run=session.run, finish=lambda *_: os._exit(9)):
        child = multiprocessing.get_context("fork").Process(target=dist_wandb.finish)
        child.start()
        child.join(60)
    assert child.exitcode == 0
    dist_wandb.finish()
    assert fake_wandb.runs[0].exit_codes == [None]


def test_functions_imported_before_the_session_act_on_it_and_can_be_pickled(fake_wandb: FakeWandb) -> None:
    from dist_wandb import finish, init, log

    init()
    log({"loss": 1.0})
    finish(3)
    assert fake_wandb.runs[0].rows == [{"loss": 1.0, "global_step": 0}]
    assert fake_wandb.runs[0].exit_codes == [3]
    assert dist_wandb.run is None
    assert all(pickle.loads(pickle.dumps(getattr(dist_wandb, name))) is getattr(as_wandb, name) for name in ACTING)  # noqa: S301


def test_a_rank_without_a_run_can_use_every_function(job: Job) -> None:
    first, second = job(TWO, lambda _: {"config": {"lr": 0.1}, "name": "digits"})
    registry.remove(first)  # as in the process of the other rank
    assert dist_wandb.run is second
    for name in sorted(ACTING - {"finish", "join", "log"}):
        arguments = {"text": "lost"} if name == "alert" else {"step_metric": "epoch"}
        assert not getattr(dist_wandb, name)("anything", **arguments), name
    dist_wandb.run.name = "mine"
    dist_wandb.config.update({"depth": 3}, allow_val_change=True)
    assert dist_wandb.run.name == "mine", "until the primary's change is known"
    assert (dist_wandb.config.lr, dist_wandb.config["depth"]) == (0.1, 3)
    with mock.patch.object(Session, "id", property(lambda _: pytest.fail("finish waits for the id"))):
        dist_wandb.finish()
    assert dist_wandb.run is None


# --- names that a script assigns --------------------------------------------------------------------------------------


def test_names_that_a_script_assigns_are_the_runs_again_after_init_and_finish(fake_wandb: FakeWandb) -> None:
    """As with wandb 0.31.0, whose first quick start assigns ``wandb.config``."""
    module: Any = dist_wandb
    module.config = {"lr": 0.1}
    module.summary = module.run = "mine"
    session = module.init(project="p", config=module.config)
    assert module.config is session.config
    assert module.config.lr == 0.1
    assert module.run is session
    assert module.summary is fake_wandb.runs[0].summary
    module.config, module.run = {"lr": 0.2}, session
    session.finish()
    assert module.run is None
    assert module.config != {"lr": 0.2}
    module.run = module.init(project="p", config={"lr": 0.7})
    assert module.config.lr == 0.7


def test_private_names_of_a_run_that_integrations_use_exist_on_every_rank(job: Job) -> None:
    """torchtune, transformers, tianshou, Avalanche and simpletransformers call ``wandb.run._label``."""
    first, second = job(TWO)
    for session in (first, second):
        session._label(code="torchtune")
        session._config_callback(key="a", val=1)
        session._set_library("x")
        with pytest.raises(AttributeError):
            _ = session._nothing
        assert not hasattr(session, "_repr_mimebundle_")
        assert isinstance(session, Run), "as beartype and Lightning's WandbLogger ask"
        assert isinstance(session, Session)
        assert isinstance(session.config, Config), "as code asks that takes mappings, namespaces and this"
    assert isinstance(second.run, Run)
    first._log({"loss": 0.5}, 3)
    second._log({"loss": 1.5}, 3)
    for session in (second, first):
        session.finish()
    run: Any = first.run
    assert run.rows == [{"loss": 1.0, "global_step": 3}]


AT_EXIT = """
import os
import dist_wandb as wandb

class Trainer:
    def __init__(self): self.me = self
    def __del__(self, module=wandb, write=os.write):
        if module.run is not None:
            module.finish()
        write(1, b"deleted\\n")

run = wandb.init(project="p", mode="offline")
run.log({"loss": 0.5})
trainer = Trainer()
"""


@pytest.mark.parametrize("end", ["", "wandb.finish()"])
def test_an_object_that_reads_the_run_at_interpreter_exit_is_silent(tmp_path: Path, end: str) -> None:
    environment = {**os.environ, "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    command = [sys.executable, "-c", AT_EXIT + end]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=True)
    assert done.stdout == "deleted\n"
    assert "Traceback" not in done.stderr
    assert "ignored" not in done.stderr
