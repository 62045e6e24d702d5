"""Weights & Biases logging for distributed PyTorch training.

``DistWandbLogger`` for Lightning, ``DistWandbTracker`` for Accelerate, ``init`` for plain PyTorch. Importing this
package imports neither torch nor a framework, and wandb only in a notebook: names are loaded at their first use.

``import dist_wandb as wandb`` gives scripts all names of wandb: those that concern the current run (`log`, `config`,
`watch`, `finish`, ...) act on the current session, and all others are wandb's own.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

# hatchling and the release workflow read this line, without importing the package.
__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from collections.abc import Callable

    from wandb import Api as Api
    from wandb import Artifact as Artifact
    from wandb import ArtifactTTL as ArtifactTTL
    from wandb import Audio as Audio
    from wandb import Error as Error
    from wandb import EvalTable as EvalTable
    from wandb import Graph as Graph
    from wandb import Histogram as Histogram
    from wandb import Html as Html
    from wandb import Image as Image
    from wandb import Molecule as Molecule
    from wandb import Object3D as Object3D
    from wandb import Plotly as Plotly
    from wandb import Run as Run
    from wandb import Settings as Settings
    from wandb import Table as Table
    from wandb import Video as Video
    from wandb import box3d as box3d
    from wandb import controller as controller
    from wandb import define_metric as define_metric
    from wandb import link_model as link_model
    from wandb import log_artifact as log_artifact
    from wandb import log_model as log_model
    from wandb import login as login
    from wandb import plot as plot
    from wandb import plot_table as plot_table
    from wandb import restore as restore
    from wandb import save as save
    from wandb import setup as setup
    from wandb import sweep as sweep
    from wandb import teardown as teardown
    from wandb import termerror as termerror
    from wandb import termlog as termlog
    from wandb import termwarn as termwarn
    from wandb import unwatch as unwatch
    from wandb import use_artifact as use_artifact
    from wandb import use_model as use_model
    from wandb import util as util
    from wandb import watch as watch
    from wandb.errors import CommError as CommError
    from wandb.errors import UsageError as UsageError
    from wandb.sdk.wandb_alerts import AlertLevel as AlertLevel

    from dist_wandb.accelerate import DistWandbTracker as DistWandbTracker
    from dist_wandb.as_wandb import agent as agent
    from dist_wandb.as_wandb import finish as finish
    from dist_wandb.as_wandb import join as join
    from dist_wandb.as_wandb import log as log
    from dist_wandb.errors import (
        ConfigurationError,
        DistWandbError,
        MissingExtraError,
        ReadError,
        RendezvousError,
        TopologyError,
        UnavailableError,
        UnsupportedVersionError,
        UploadError,
    )
    from dist_wandb.job.topology import Topology
    from dist_wandb.lightning import DistWandbLogger as DistWandbLogger
    from dist_wandb.payloads.gathers import gathered
    from dist_wandb.runs.null_run import NullRun
    from dist_wandb.session.api import get_run, init
    from dist_wandb.session.decorator import wandb_init
    from dist_wandb.session.session import Session
    from dist_wandb.settings.options import Limits
    from dist_wandb.settings.plan import RunPlan, plan_run
    from dist_wandb.transformers import DistWandbCallback as DistWandbCallback
    from dist_wandb.wandb_files.runs import LocalRun, read_runs

    alert: Callable[..., Any]
    mark_preempting: Callable[..., Any]
    pin_config_keys: Callable[..., Any]
    run: Session | None
    config: Any
    summary: Any

# Without the framework integrations: `import *` must work if no framework is installed.
__all__ = [
    "ConfigurationError",
    "DistWandbError",
    "Limits",
    "LocalRun",
    "MissingExtraError",
    "NullRun",
    "ReadError",
    "RendezvousError",
    "RunPlan",
    "Session",
    "Topology",
    "TopologyError",
    "UnavailableError",
    "UnsupportedVersionError",
    "UploadError",
    "__version__",
    "gathered",
    "get_run",
    "init",
    "plan_run",
    "read_runs",
    "wandb_init",
]

_ROOMS = {
    "DistWandbCallback": "transformers",
    "DistWandbLogger": "lightning",
    "DistWandbTracker": "accelerate",
    "Limits": "settings.options",
    "LocalRun": "wandb_files.runs",
    "NullRun": "runs.null_run",
    "RunPlan": "settings.plan",
    "Session": "session.session",
    "Topology": "job.topology",
    "agent": "as_wandb",
    "gathered": "payloads.gathers",
    "get_run": "session.api",
    "init": "session.api",
    "plan_run": "settings.plan",
    "read_runs": "wandb_files.runs",
    "teardown": "as_wandb",
    "wandb_init": "session.decorator",
    **{name: "errors" for name in __all__ if name.endswith("Error")},
}


# wandb's names that concern the current run. The last one is newer than the oldest supported version of wandb.
_ACTING = (
    *("alert", "define_metric", "finish", "join", "link_model", "log", "log_artifact", "log_model", "mark_preempting"),
    *("restore", "save", "unwatch", "use_artifact", "use_model", "watch", "pin_config_keys"),
)
_ROOMS.update(dict.fromkeys(_ACTING, "as_wandb"))
_OF_CURRENT = ("config", "run", "summary")  # a different object in each session, so never kept in this module
# wandb's own names in every supported version, to be listed before wandb is imported. Its other names work, too.
_OF_WANDB = (
    *("AlertLevel", "Api", "Artifact", "ArtifactTTL", "Audio", "CommError", "Error", "Graph", "Histogram", "Html"),
    *("Image", "Molecule", "Object3D", "Plotly", "Settings", "Table", "UsageError", "Video", "box3d"),
    *("controller", "login", "plot", "plot_table", "setup", "sweep", "termerror", "termlog", "termwarn"),
    *("util",),
)


def __getattr__(name: str) -> Any:
    if sys.is_finalizing():  # nothing can be imported any more, and no session is open
        return None if name in _OF_CURRENT else lambda *_, **__: None
    if name in _ROOMS:
        value = getattr(importlib.import_module(f"dist_wandb.{_ROOMS[name]}"), name)
        if name != "DistWandbLogger":  # its base classes depend on what the script imports until then
            globals()[name] = value
        return value
    if name in _OF_CURRENT:
        return importlib.import_module("dist_wandb.as_wandb").of_current(name)
    if name == "errors":  # contains wandb's own errors, too
        return importlib.import_module("dist_wandb.errors")
    if name not in _OF_WANDB and (name.startswith("_") or _is_module(name)):
        raise AttributeError(f"module 'dist_wandb' has no attribute {name!r}")
    return importlib.import_module("dist_wandb.runs.run_metadata").of_wandb(name)


def _is_module(name: str) -> bool:
    """Return whether it is a module of this package that is not imported yet: Python imports it after this error."""
    return importlib.import_module("importlib.util").find_spec(f"dist_wandb.{name}") is not None


def __dir__() -> list[str]:
    return sorted({*__all__, *_ROOMS, *_OF_CURRENT, *_OF_WANDB})


if getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)() is not None:
    importlib.import_module("wandb")  # adds its magics to a notebook: a cell may begin with %%wandb, before any use
