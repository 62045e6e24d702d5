"""The cost and side effects of imports, each in a new interpreter."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path

import pytest
import wandb
from processes import run_python

import dist_wandb

HEAVY = (
    *("torch", "wandb", "lightning", "pytorch_lightning", "accelerate", "transformers", "torchmetrics"),
    *("rich", "plotly", "numpy"),
)
LIGHTNINGS = ["lightning", "pytorch_lightning", "lightning_fabric"]
BLOCK = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""


@pytest.mark.parametrize("name", ["init", "plan_run", "read_runs", "Topology", "NullRun", "TopologyError"])
def test_names_without_a_framework_do_not_load_one(name: str) -> None:
    code = f"import sys; from dist_wandb import {name}; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run_python(code) == "[]"


def test_the_import_loads_few_modules_all_from_the_standard_library() -> None:
    """benchmarks/startup.py measures the time, which is not meaningful on a busy machine."""
    code = "import sys; before = set(sys.modules); import dist_wandb; print(*(set(sys.modules) - before))"
    loaded = run_python(code).split()
    assert {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names == {"dist_wandb"}
    assert len([name for name in loaded if name.startswith("dist_wandb")]) <= 4
    assert len(loaded) <= 50  # 31 when this was written


@pytest.mark.parametrize(
    ("code", "module"),
    [
        ("dist_wandb.session.api", "dist_wandb.wandb_files.records"),  # the reader of record files
        ("dist_wandb as wb; [wb.init(mode='disabled') for _ in 'ab']", "torch"),
    ],
)
def test_a_session_does_not_load_what_only_others_need(code: str, module: str) -> None:
    assert run_python(f"import sys, {code}; print({module!r} in sys.modules)") == "False"


def test_a_notebook_has_the_magics_of_wandb_from_the_import_on(tmp_path: Path) -> None:
    """The import of wandb adds them, so that a cell may begin with ``%%wandb`` and call `init` inside."""
    (tmp_path / "IPython.py").write_text("get_ipython = object")
    (tmp_path / "wandb.py").write_text("print('%%wandb')")
    assert run_python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import IPython, dist_wandb") == "%%wandb"


def test_the_package_lists_only_its_public_names() -> None:
    """test_as_wandb.py compares the names that concern the current run, and wandb's own, with wandb."""
    listed = {name for name in dir(dist_wandb) if not hasattr(wandb, name)} - {"pin_config_keys"}  # of newer versions
    ours = {*dist_wandb.__all__, "DistWandbCallback", "DistWandbLogger", "DistWandbTracker"}
    assert listed == ours - {"init", "__version__"}
    assert ours <= set(dir(dist_wandb))
    assert not [name for name in dir(dist_wandb) if name in sys.stdlib_module_names or hasattr(builtins, name)]
    assert None not in [getattr(dist_wandb, name) for name in dist_wandb.__all__]
    with pytest.raises(AttributeError, match="module 'dist_wandb' has no attribute 'DistWandbLoger'"):
        _ = dist_wandb.DistWandbLoger


@pytest.mark.parametrize(
    ("imported", "blocked", "message"),
    [
        (
            "dist_wandb import DistWandbCallback",
            ["transformers"],
            "needs transformers, but 'transformers' is missing. Run: pip install 'dist-wandb[transformers]'",
        ),
        (
            "dist_wandb import DistWandbTracker",
            ["accelerate"],
            "needs Accelerate, but 'accelerate' is missing. Run: pip install 'dist-wandb[accelerate]'",
        ),
        (
            "dist_wandb import DistWandbLogger",
            LIGHTNINGS,
            (
                "needs Lightning, but cannot import 'lightning' or 'pytorch_lightning'. "
                "Run: pip install 'dist-wandb[lightning]' or pip install 'dist-wandb[pytorch-lightning]'"
            ),
        ),
        (
            "dist_wandb.lightning import PytorchLightningDistWandbLogger",
            ["pytorch_lightning"],
            "needs Lightning, but cannot import 'pytorch_lightning'. Run: pip install 'dist-wandb[pytorch-lightning]'",
        ),
    ],
    ids=["callback", "tracker", "logger", "logger of a name space"],
)
def test_an_integration_without_its_framework_suggests_the_pip_command(
    imported: str, blocked: list[str], message: str
) -> None:
    code = f"""
try:
    from {imported}
except ImportError as error:
    print(type(error).__name__, error)
"""
    name = imported.rpartition(" ")[2].removeprefix("PytorchLightning")
    assert run_python(BLOCK.format(blocked=blocked) + code) == f"MissingExtraError {name} {message}"


def test_without_any_framework_a_run_can_be_logged() -> None:
    code = """
import dist_wandb
with dist_wandb.init("digits", mode="disabled") as run:
    run.log({"loss": 0.5})
    print(run.plan.opens_run)
"""
    assert run_python(BLOCK.format(blocked=[*LIGHTNINGS, "accelerate", "transformers"]) + code) == "True"
