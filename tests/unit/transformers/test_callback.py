"""The callback for the Hugging Face Trainer, called as the Trainer calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from accelerate_state import set_state
from fakes import FakeWandb
from torch import Tensor, nn
from trainers import model, trainer_with
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.integration_utils import WandbCallback

import dist_wandb
from dist_wandb import ConfigurationError, DistWandbCallback, Limits
from dist_wandb.settings.reduction import ALREADY_REDUCED, check_reduce, reduction_of
from dist_wandb.transformers import without_second_sum

pytestmark = [pytest.mark.usefixtures("fresh_state"), pytest.mark.slow]


def used(callback: DistWandbCallback | WandbCallback, whole: FakeWandb, out: Path, **arguments: Any) -> dict[str, Any]:
    """Return the results of a training, an evaluation and a prediction with a callback."""
    before = len(whole.runs)
    trainer = trainer_with(callback, out=out, **arguments)
    trainer.train()
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    if isinstance(callback, DistWandbCallback):
        assert callback.session is not None
        callback.session.finish()
    else:
        whole.runs[before].finish()
    (run,) = whole.runs[before:]
    names: dict[str, list[int]] = {}
    for row in run.rows:
        for name in row.keys() - {"train/global_step"}:
            names.setdefault(name, []).append(row.get("train/global_step", 2))
    done, kept = list(run.done), dict(run.config)
    kept.pop("logging_dir", None)  # in transformers 4, contains the time
    run.done.clear()
    opened = {name: whole.arguments[before].get(name) for name in ("project", "name", "group")}
    return {"opened": opened, "names": names, "summary": set(run.summary), "config": kept, "done": done}


@pytest.mark.parametrize("log_model", ["false", "end", "checkpoint"])
def test_everything_that_the_stock_callback_does_is_done(
    whole_run: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_model: str
) -> None:
    monkeypatch.setenv("WANDB_LOG_MODEL", log_model)
    monkeypatch.setenv("WANDB_WATCH", "gradients")
    monkeypatch.setenv("WANDB_PROJECT", "bert")
    others: dict[str, Any] = {} if log_model == "false" else {"eval_strategy": "no"}  # transformers 4 cannot do both
    others |= {"save_strategy": "steps", "save_steps": 1} if log_model == "checkpoint" else {}
    own = used(DistWandbCallback(id="one"), whole_run, tmp_path, **others)
    stock = used(WandbCallback(), whole_run, tmp_path, **others)
    assert own["opened"] == stock["opened"] == {"project": "bert", "name": "tiny", "group": None}
    assert own["config"] == stock["config"]
    assert own["config"]["model/num_parameters"] > 0
    assert own["names"] == stock["names"]
    assert own["names"]["train/loss"] == [1, 2]
    assert {"eval/loss", "test/loss"} <= own["names"].keys()
    assert own["summary"] >= stock["summary"] >= {"train_loss", "train_runtime"}
    kinds = [[name.replace("made-by-wandb-1", "one") for name, _ in one["done"]] for one in (own, stock)]
    assert kinds[0] == kinds[1]
    assert [what for name, what in own["done"] if name == "watch"] == [{"log": "gradients", "log_freq": 100}]
    uploads = {"false": 0, "end": 2, "checkpoint": 4}  # the architecture, checkpoints, the model
    assert sum(name.startswith("model-") for name, _ in own["done"]) == uploads[log_model]


def test_the_callback_is_added_and_removed_by_its_class_or_created_by_name(
    whole_run: FakeWandb, tmp_path: Path
) -> None:
    """Based on `test_add_remove_callback` in transformers' `tests/trainer/test_trainer_callback.py`."""
    trainer = trainer_with(out=tmp_path)
    trainer.add_callback(DistWandbCallback)
    removed = trainer.pop_callback(DistWandbCallback)
    assert isinstance(removed, DistWandbCallback)
    trainer.add_callback(removed)
    trainer.remove_callback(DistWandbCallback)
    trainer.train()
    named = trainer_with(out=tmp_path, report_to="dist_wandb")
    (callback,) = (one for one in named.callback_handler.callbacks if isinstance(one, DistWandbCallback))
    assert callback.session is None
    assert not whole_run.runs


def test_a_session_of_the_script_is_used(whole_run: FakeWandb, tmp_path: Path) -> None:
    session = dist_wandb.init(project="own", id="mine")
    callback = DistWandbCallback()
    assert repr(callback) == "<dist_wandb.DistWandbCallback without an open session>"
    trainer_with(callback, out=tmp_path, max_steps=1).train()
    assert callback.session is session
    assert repr(callback).startswith("<dist_wandb.DistWandbCallback <dist_wandb.Session ")
    assert [run.id for run in whole_run.runs] == ["mine"]
    session.finish()
    losses = {row["train/global_step"]: row["global_step"] for row in whole_run.runs[0].rows if "train/loss" in row}
    assert losses == {1: 1}, "the stock callback's x axis is logged too"


def test_in_a_session_of_the_script_a_log_of_the_trainer_ends_a_row_that_is_left_open(
    whole_run: FakeWandb, tmp_path: Path
) -> None:
    """As with the stock callback, which gives W&B no step: what `watch` has measured stands in the Trainer's row."""

    class Opens(TrainerCallback):  # type: ignore[misc]  # its base class is not typed
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            session.log({"open": 1.0}, commit=False)

    with dist_wandb.init(id="mine") as session:
        trainer_with(DistWandbCallback(), Opens(), out=tmp_path, max_steps=2, eval_strategy="no").train()
    rows = [row for row in whole_run.runs[0].rows if "open" in row]
    assert [(row["train/global_step"], row["global_step"], "train/loss" in row) for row in rows] == [
        (1, 1, True),
        (2, 2, True),
    ]


def test_a_second_training_continues_the_open_run_and_names_arguments_without_effect(
    whole_run: FakeWandb, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("first", "first", "second"):
        callback = DistWandbCallback("digits", id="x", tags=["a"])
        trainer_with(callback, out=tmp_path, max_steps=1, run_name=name).train()
        whole_run.runs[0].name = "first"
    asked: dict[str, Any] = {"project": "digits", "id": "x", "name": "first", "tags": ["a"]}
    assert [{name: given[name] for name in asked} for given in whole_run.arguments] == [asked]
    assert caplog.text.count("so these arguments have no effect") == 1
    assert "so these arguments have no effect: name='second'. For another run, call wandb.finish()" in caplog.text
    assert callback.session is not None
    callback.session.finish()
    trainer_with(callback, out=tmp_path, max_steps=1).train()
    assert [any("train/loss" in row for row in run.rows) for run in whole_run.runs] == [True, True]


def test_a_callback_of_two_trainers_writes_the_config_of_each(whole_run: FakeWandb, tmp_path: Path) -> None:
    callback = DistWandbCallback()
    for rate in (0.1, 0.2):
        trainer_with(callback, out=tmp_path, max_steps=1, eval_strategy="no", learning_rate=rate).train()
    assert [run.config["learning_rate"] for run in whole_run.runs] == [0.2]


def test_each_trial_of_a_search_is_a_run(whole_run: FakeWandb, tmp_path: Path) -> None:
    dist_wandb.init(name="script")  # ends when the search begins, as with wandb
    callback = DistWandbCallback()
    trainer = trainer_with(callback, out=tmp_path)
    for trial in range(2):
        trainer.state.is_hyper_param_search, trainer.state.trial_name = True, f"trial-{trial}"
        callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
        callback.on_log(trainer.args, trainer.state, trainer.control, logs={"loss": float(trial)})
    assert callback.session is not None
    callback.session.finish()
    assert [arguments["name"] for arguments in whole_run.arguments] == ["script", "trial-0", "trial-1"]
    assert whole_run.arguments[1]["group"] == str(tmp_path)
    assert [row["train/loss"] for run in whole_run.runs for row in run.rows if "train/loss" in row] == [0.0, 1.0]
    assert [run.exit_codes for run in whole_run.runs] == [[None]] * 3


def test_a_search_by_wandb_is_not_mistaken_for_a_second_callback(
    whole_run: FakeWandb, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_with(DistWandbCallback(), out=tmp_path, max_steps=1)
    trainer.args.report_to = ["wandb"]  # as Trainer.hyperparameter_search(backend="wandb") does
    trainer.train()
    assert len(whole_run.runs) == 1
    assert "also reports to wandb" not in caplog.text


@pytest.mark.parametrize("says_so", [True, False])
def test_the_run_that_a_subclass_opens_in_setup_is_used(says_so: bool, whole_run: FakeWandb, tmp_path: Path) -> None:
    class OwnSetup(DistWandbCallback):
        def setup(self, args: Any, state: Any, model: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
            self._initialized = says_so  # as the stock callback's setup does
            self._wandb.init(project="own", name=args.run_name, reinit=True)

    trainer_with(OwnSetup(), out=tmp_path, max_steps=2, run_name="a", report_to="none").train()
    assert [(arguments["project"], arguments["name"]) for arguments in whole_run.arguments] == [("own", "a")]
    assert [row["train/global_step"] for row in whole_run.runs[0].rows if "train/loss" in row] == [1, 2]


def test_code_that_asks_whether_the_trainer_reports_to_wandb_finds_that_it_does(
    whole_run: FakeWandb, tmp_path: Path
) -> None:
    trainer = trainer_with(DistWandbCallback(), out=tmp_path, max_steps=1, eval_strategy="no")
    assert trainer.args.report_to and "wandb" in trainer.args.report_to  # noqa: PT018  # as in GRPOTrainer
    assert "tensorboard" not in trainer.args.report_to
    another = Trainer(model=model(), args=trainer.args, train_dataset=trainer.train_dataset)
    assert not any(type(one) is WandbCallback for one in another.callback_handler.callbacks)
    trainer.train()
    torch.save(trainer.args, tmp_path / "training_args.bin")  # as the Trainer does
    assert type(torch.load(tmp_path / "training_args.bin", weights_only=False).report_to) is list
    assert len(whole_run.runs) == 1
    del whole_run.runs[:]
    late = trainer_with(out=tmp_path, max_steps=1)
    late.add_callback(DistWandbCallback())
    late.train()
    assert "wandb" in late.args.report_to


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_callback_of_the_script_finds_the_run_open_and_adds_nothing_to_rows(
    is_ours: bool, whole_run: FakeWandb, tmp_path: Path
) -> None:
    class OfScript(TrainerCallback):  # type: ignore[misc]  # its base class is not typed
        runs = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            self.runs = len(whole_run.runs)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
            logs["of script"] = 1.0

    of_script, given = OfScript(), "none" if is_ours else "wandb"
    trainer = trainer_with(of_script, *[DistWandbCallback()] * is_ours, out=tmp_path, max_steps=1, report_to=given)
    trainer.train()
    assert of_script.runs == 1
    assert not any("train/of script" in row for row in whole_run.runs[0].rows)


def test_a_callback_that_is_added_later_gets_what_one_of_the_trainers_own_takes_out(
    whole_run: FakeWandb, tmp_path: Path
) -> None:
    trainer = trainer_with(out=tmp_path, max_steps=1)  # with a callback that prints the rows without `total_flos`
    trainer.add_callback(DistWandbCallback())
    trainer.train()
    assert "total_flos" in whole_run.runs[0].summary


@pytest.mark.parametrize("is_removed", [False, True])
def test_the_stock_callback_beside_ours_is_reported_and_uses_its_run(
    is_removed: bool, whole_run: FakeWandb, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_with(DistWandbCallback(), out=tmp_path, max_steps=1, report_to="wandb")
    if is_removed:
        trainer.remove_callback(WandbCallback)
    trainer.train()
    assert len(whole_run.runs) == 1
    for part in ("also reports to wandb", "writes the same names a second time", 'report_to="none"'):
        assert (part in caplog.text) is not is_removed


def test_the_second_rank_has_its_own_run_and_uploads_no_model(
    whole_run: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_LOG_MODEL", "end")
    trainer = trainer_with(out=tmp_path)
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-1")  # names the job, so no store is needed
    set_state(monkeypatch, num_processes=2, process_index=1, distributed_type=DistributedType.MULTI_CPU)
    callback = DistWandbCallback(run_mode="new")
    trainer.state.is_world_process_zero = False
    callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
    callback.on_log(trainer.args, trainer.state, trainer.control, logs={"loss": 0.5, "train_loss": 0.4})
    before = list(whole_run.runs[0].done)
    callback.on_train_end(trainer.args, trainer.state, trainer.control, model=trainer.model)
    assert callback.run is not None
    assert str(callback.run.id).endswith("-rank-1")
    assert whole_run.runs[0].done == before
    assert dict(whole_run.runs[0].config)["hidden_size"] == 8
    assert whole_run.runs[0].summary == {"train_loss": 0.4}
    callback.session.finish()  # type: ignore[union-attr]
    assert whole_run.runs[0].rows == [{"train/loss": 0.5, "train/global_step": 0}]


@pytest.mark.usefixtures("whole_run")
def test_a_model_that_rank_0_cannot_upload_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_LOG_MODEL", "end")
    trainer = trainer_with(out=tmp_path)
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-1")  # names the job, so no store is needed
    set_state(monkeypatch, num_processes=2, process_index=0, distributed_type=DistributedType.MULTI_CPU)
    callback = DistWandbCallback(primary_rank=-1, limits=Limits(join_timeout=0.1, finish_timeout=0.1))
    callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
    for _ in range(2):
        callback.on_train_end(trainer.args, trainer.state, trainer.control, model=trainer.model)
    assert caplog.text.count("has no run, so it is not uploaded") == 1


@pytest.mark.parametrize("arguments", [{"run_mode": "each"}, {"projekt": "a"}, {"timings": "data"}], ids=str)
def test_arguments_that_cannot_be_honoured_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="|".join(arguments)):
        DistWandbCallback(**arguments)


# --- numbers that are reduced already ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reduce", "trainers", "others"),
    [
        ("sum", "mean", "sum"),
        ("nansum", "mean", "nansum"),
        ({"*": "sum"}, "mean", "sum"),
        ({"train/own": "max", "*": "nansum"}, "mean", "nansum"),
        ({"train/loss": "sum", "*": "sum"}, None, "sum"),  # that of the loss is requested by name
    ],
)
def test_numbers_reduced_by_the_trainer_are_not_summed_again(reduce: Any, trainers: str | None, others: str) -> None:
    kinds = check_reduce(without_second_sum(reduce))
    assert kinds is not None
    for name in ("train/grad_norm", "eval/accuracy", "test/loss", "train/epoch", ALREADY_REDUCED[1]):
        assert reduction_of(name, kinds)[1] == "mean"
    assert reduction_of("train/loss", kinds)[1] == (trainers or "sum")
    assert reduction_of("train/other", kinds)[1] == others


@pytest.mark.parametrize(
    "reduce", ["auto", None, "mean", "max", {"train/*": "sum"}, {"train/loss": "min", "*": "mean"}]
)
def test_other_reductions_are_unchanged(reduce: Any) -> None:
    assert without_second_sum(reduce) == reduce


def test_the_stock_callback_has_the_private_names_in_use() -> None:
    """`DistWandbCallback` sets `_wandb` and reads the others; if one is missing, the stock methods have changed."""
    assert vars(WandbCallback()).keys() >= {"_initialized", "_log_model", "_wandb"}


# --- timings ----------------------------------------------------------------------------------------------------------


LOADED = ["data", None]
STEP = ["forward", "backward", "optimizer", None]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if bool((x < 0).any()):
            raise ArithmeticError
        return {"loss": self.layer(x).mean()}


def train(out: Path, *, callback: DistWandbCallback | None = None, fails: bool = False, **arguments: Any) -> Trainer:
    data = [{"x": torch.ones(2)}, {"x": torch.full((2,), -1.0 if fails else 1.0)}]
    given = {"max_steps": 2, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    batch = {"per_device_train_batch_size": 1, "use_cpu": True, "dataloader_pin_memory": False}
    trainer = Trainer(
        model=Model(),
        args=TrainingArguments(str(out), **{**given, **batch, **arguments}),
        train_dataset=data,
        eval_dataset=data,
        callbacks=[callback or DistWandbCallback(timings=True)],
    )
    trainer.train()
    return trainer


def is_measured(trainer: Trainer, parts: list[str | None]) -> bool:
    """Return whether a Trainer's model and optimizer are still measured."""
    before = len(parts)
    trainer.model(torch.ones(1, 2))
    trainer.optimizer.step()
    return len(parts) > before


def test_a_step_passes_through_its_parts_in_order(
    parts: list[str | None], whole_run: FakeWandb, tmp_path: Path
) -> None:
    train(tmp_path)
    # Accelerate reads one batch ahead
    assert parts == [None, *LOADED, *LOADED, *STEP, *LOADED, *STEP, None]
    rows = [row for row in whole_run.runs[0].rows if "time/forward" in row]
    assert len(rows) == 2
    assert all(row[f"time/{part}"] > 0 for row in rows for part in ("data", "forward", "backward", "optimizer"))


@pytest.mark.usefixtures("whole_run")
def test_an_evaluation_between_two_steps_is_not_measured(parts: list[str | None], tmp_path: Path) -> None:
    train(tmp_path, eval_strategy="steps", eval_steps=1)
    assert [part for part in parts if part is not None].count("forward") == 2
    assert parts.count("data") == 3


@pytest.mark.usefixtures("whole_run")
def test_all_hooks_are_removed_at_the_end_and_after_a_failure(parts: list[str | None], tmp_path: Path) -> None:
    callback = DistWandbCallback(timings=True)
    assert not is_measured(train(tmp_path, callback=callback), parts)
    with pytest.raises(ArithmeticError):
        train(tmp_path, callback=callback, fails=True)
    del parts[:]
    trainer = train(tmp_path, callback=callback)
    assert [part for part in parts if part not in ("data", None)] == ["forward", "backward", "optimizer"] * 2
    assert not is_measured(trainer, parts)


@pytest.mark.usefixtures("whole_run")
def test_a_compiled_model_is_not_measured(parts: list[str | None], tmp_path: Path) -> None:
    train(tmp_path, torch_compile=True, torch_compile_backend="eager")
    assert [part for part in parts if part is not None] == ["data", "data", "optimizer", "data", "optimizer"]
