"""Launchers and their variables: runs of every mode and scope, stale variables, and the table in the documentation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pytest
from launchers import DOCUMENT, LAUNCHERS, SLURM_COMMANDS, Launcher, table, table_in, variables
from stored import COMBINATIONS, vector_of

import dist_wandb
from dist_wandb.job.launch import detected_launchers, job_name
from dist_wandb.job.topology import Topology
from dist_wandb.settings.plan import RankScope, RunMode, plan_run

Environ = Mapping[str, str]

BY_VARIABLES = [
    (launcher, layout) for launcher in LAUNCHERS if launcher.variables is not None for layout in launcher.layouts
]
RECORDED: dict[str, list[Environ]] = json.loads((Path(__file__).parents[1] / "slurm_22_05.json").read_text())["layouts"]
DECIDED = ("opens_run", "run_id", "group", "shared", "label", "primary")


def test_the_table_in_the_docs_matches_the_tests() -> None:
    """Update it with ``python tests/support/launchers.py``."""
    assert table_in(DOCUMENT.read_text(encoding="utf-8")) == table()


@pytest.mark.parametrize(("run_mode", "rank_scope"), COMBINATIONS)
@pytest.mark.parametrize(
    ("launcher", "layout"), BY_VARIABLES, ids=[f"{launcher.name} {layout}" for launcher, layout in BY_VARIABLES]
)
def test_launcher_variables_give_the_runs_of_the_table(
    launcher: Launcher, layout: tuple[int, ...], run_mode: RunMode, rank_scope: RankScope
) -> None:
    assert launcher.variables is not None
    nodes = [f"node-{node}" for node, size in enumerate(layout) for _ in range(size)]
    ranks = vector_of(layout, run_mode, rank_scope, launcher.local_ranks)
    environments = launcher.variables(layout)
    assert len(environments) == len(ranks)
    for environ, rank in zip(environments, ranks, strict=True):
        topology = Topology.detect(environ)
        topology = topology if topology.knows_layout else topology.with_layout(nodes)  # as the ranks publish it
        plan = plan_run(topology, run_mode, rank_scope, "exp")
        assert (topology.global_rank, topology.local_rank, topology.node_rank) == (
            rank["global_rank"],
            rank["local_rank"],
            rank["node_rank"],
        )
        assert {name: getattr(plan, name) for name in DECIDED} == {name: dict(rank)[name] for name in DECIDED}


# --- SLURM, as recorded -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", SLURM_COMMANDS)
def test_every_rank_of_an_srun_knows_its_layout_and_job_name(layout: tuple[int, ...]) -> None:
    environments = RECORDED[SLURM_COMMANDS[layout]]
    assert all(Topology.detect(environ).knows_layout for environ in environments)
    (job_id,) = {job_name(Topology.detect(environ), environ) for environ in environments}
    assert job_id == f"slurm-{environments[0]['SLURM_JOB_ID']}-0"


@pytest.mark.parametrize("layout", ["sbatch -N2 -n4 --ntasks-per-node=2: its shell", "salloc -N1 -n4: its shell"])
def test_a_shell_not_started_by_srun_is_a_separate_job(layout: str) -> None:
    (environ,) = RECORDED[layout]
    assert Topology.detect(environ) == Topology.single()
    assert {launcher.status for launcher in detected_launchers(environ)} <= {"not this process"}
    assert job_name(Topology.detect(environ), environ) is None


# --- what others have left --------------------------------------------------------------------------------------------

TORCHRUN = variables(
    "TORCHELASTIC_RUN_ID=none RANK=1 LOCAL_RANK=1 GROUP_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 GROUP_WORLD_SIZE=1"
)
OPEN_MPI = variables(
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2"
)
MPICH = variables("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")
INNER = {"torchrun": TORCHRUN, "Open MPI": OPEN_MPI, "MPICH": MPICH}
LEFT = {
    "another SLURM job": ("SLURM", "contradicts", {"SLURM_PROCID": "3", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "8"}),
    "half of SLURM": ("SLURM", "contradicts", {"SLURM_PROCID": "3", "SLURM_STEP_ID": "0"}),
    "SLURM that cannot be read": ("SLURM", "unreadable", {"SLURM_PROCID": "x", "SLURM_STEP_ID": "0"}),
    "a batch shell": ("SLURM", "not this process", dict(RECORDED["sbatch -N2 -n4 --ntasks-per-node=2: its shell"][0])),
    "srun of the launcher": ("SLURM", "outer", {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"}),
}


@pytest.mark.parametrize(("inner", "left"), list(product(INNER, LEFT)))
def test_stale_variables_of_another_launcher_are_reported_and_ignored(inner: str, left: str) -> None:
    launcher, status, others = LEFT[left]
    environ = {**INNER[inner], **others}
    assert Topology.detect(environ) == Topology.detect(INNER[inner])
    found = {launcher.name: launcher for launcher in detected_launchers(environ)}
    assert found[inner].status == "used"
    assert found[launcher].status == status
    assert found[launcher].variables.items() <= others.items()
    assert found[launcher].reason


def test_only_variables_of_an_image_that_torchrun_keeps_are_reported() -> None:
    """It replaces the others."""
    environ = {"RANK": "7", "WORLD_SIZE": "64", **TORCHRUN, "NODE_RANK": "7"}
    assert Topology.detect(environ) == Topology.detect(TORCHRUN)
    used, stale = detected_launchers(environ)
    assert (used.status, stale.status, stale.variables) == ("used", "contradicts", {"NODE_RANK": "7"})
    assert stale.reason == "it set node_rank=7, not 0"


@pytest.mark.usefixtures("fake_wandb")
@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "1", **MPICH},
            "MPICH seems to have started it: it set rank 1 of 2, but rank 0 of 1 is used",
        ),
        ({"SUBMITIT_LOCAL_GLOBALRANK": "1"}, "treated as a job of its own, but submitit's SUBMITIT_LOCAL_GLOBALRANK=1"),
        ({"FLUX_TASK_RANK": "3"}, "treated as a job of its own, but Flux's FLUX_TASK_RANK=3 shows"),
        (  # ``export RANK=$SLURM_PROCID`` before srun: all tasks are rank 0
            {"RANK": "0", "WORLD_SIZE": "4", **RECORDED["srun -N1 -n4"][3]},
            "SLURM give this process different ranks: it set rank 3 of 4, but rank 0 of",
        ),
    ],
    ids=["an image", "submitit", "another launcher", "an export"],
)
def test_a_rank_that_contradicts_the_launcher_warns_at_the_start(
    environ: Environ, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match=message):
        dist_wandb.init("tests").finish()


@pytest.mark.parametrize(("layout", "status"), [((1, 1), "outer"), ((2,), "other rank")])
def test_variables_of_an_srun_that_starts_torchrun_are_not_stale(layout: tuple[int, ...], status: str) -> None:
    """torchrun numbers nodes in its own order."""
    nodes, size = len(layout), layout[0]
    elastic = {**TORCHRUN, "RANK": "1", "LOCAL_RANK": str(size - 1), "GROUP_RANK": str(nodes - 1)}
    elastic |= {"LOCAL_WORLD_SIZE": str(size), "GROUP_WORLD_SIZE": str(nodes)}
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    assert [launcher.status for launcher in detected_launchers({**elastic, **step})] == ["used", status]


@pytest.mark.usefixtures("fake_wandb")
@pytest.mark.parametrize("environ", [{"RANK": "0", "WORLD_SIZE": "1"}, *RECORDED["salloc -N1 -n4: its shell"]])
def test_a_single_process_without_contradictions_does_not_warn(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, environ: Environ
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    dist_wandb.init("tests").finish()
    assert [str(warning.message) for warning in recwarn if "job of its own" in str(warning.message)] == []
