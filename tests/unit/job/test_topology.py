"""The topology of a process from launchers' variables. Environments are plain dicts; the process's own is not read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch.distributed as dist
from launchers import variables

from dist_wandb.errors import TopologyError
from dist_wandb.job.launch import Launch, detected_launchers, job_name, node_identity
from dist_wandb.job.topology import Topology

Environ = dict[str, str]
Fields = tuple[int | None, ...]

ORIGINS = ("global_rank", "local_rank", "node_rank", "world_size", "local_world_size", "num_nodes")


def fields(topology: Topology | None) -> Fields:
    assert topology is not None
    return tuple(getattr(topology, name) for name in ORIGINS)


def torchrun(layout: list[int], node: int, local_rank: int, **others: str) -> Environ:
    """Return torchrun's variables for one process; `layout` has the number of processes on each node."""
    return {
        "TORCHELASTIC_RUN_ID": "none",
        "RANK": str(sum(layout[:node]) + local_rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(node),
        "ROLE_RANK": str(sum(layout[:node]) + local_rank),
        "WORLD_SIZE": str(sum(layout)),
        "LOCAL_WORLD_SIZE": str(layout[node]),
        "GROUP_WORLD_SIZE": str(len(layout)),
        **others,
    }


def virtual(layout: list[int], node: int, local_rank: int) -> Environ:
    """Like `torchrun --virtual-local-rank`: every process sees one device and has LOCAL_RANK=0."""
    return torchrun(layout, node, local_rank, LOCAL_RANK="0", CUDA_VISIBLE_DEVICES=str(local_rank))


def slurm(rank: int, local_rank: int, node: int, tasks: str, **others: str) -> Environ:
    """Return srun's variables for one of eight tasks."""
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(node),
        "SLURM_NTASKS": "8",
        "SLURM_TASKS_PER_NODE": tasks,
        **others,
    }


# OMPI_COMM_WORLD_NODE_RANK is a rank on the node, despite its name.
OPEN_MPI = variables(
    "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=4 "
    "OMPI_COMM_WORLD_NODE_RANK=1"
)
SBATCH_SHELL = variables(
    "SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=4 SLURM_TASKS_PER_NODE=4"
)
SUBPROCESS = variables("LOCAL_RANK=1 NODE_RANK=0 WORLD_SIZE=4")  # of Lightning

# Those of which test_launchers.py has no recorded variables, and special cases: rank 5 of two nodes with four
# processes each, where the launcher allows it. Horovod's cross rank is no node rank.
LAUNCHERS: dict[str, tuple[Environ, Fields]] = {
    "Lightning subprocess": (SUBPROCESS, (1, 1, 0, 4, None, None)),
    "SLURM with the tasks of the step": (
        slurm(5, 1, 1, "1", SLURM_STEP_TASKS_PER_NODE="4(x2)"),
        (5, 1, 1, 8, 4, 2),
    ),
    **{
        name: (variables(" ".join(map("=".join, zip(keys.split(), "5814", strict=True)))), (5, 1, None, 8, 4, None))
        for name, keys in {
            "MPICH": "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS",
            "Horovod": "HOROVOD_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE",
            "jsrun": "JSM_NAMESPACE_RANK JSM_NAMESPACE_SIZE JSM_NAMESPACE_LOCAL_RANK JSM_NAMESPACE_LOCAL_SIZE",
            "MVAPICH2": "MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE MV2_COMM_WORLD_LOCAL_RANK MV2_COMM_WORLD_LOCAL_SIZE",
        }.items()
    },
    "Open MPI": (OPEN_MPI, (5, 1, None, 8, 4, None)),
    "Horovod with a cross rank": (
        variables("HOROVOD_RANK=5 HOROVOD_SIZE=8 HOROVOD_CROSS_RANK=0 HOROVOD_CROSS_SIZE=1"),
        (5, None, None, 8, None, None),
    ),
    "DeepSpeed without CROSS_SIZE": (
        variables("RANK=5 LOCAL_RANK=1 CROSS_RANK=1 WORLD_SIZE=8 LOCAL_SIZE=4"),
        (5, 1, 1, 8, 4, None),
    ),
    "plain RANK and WORLD_SIZE": (variables("RANK=5 WORLD_SIZE=8"), (5, None, None, 8, None, None)),
}
DAEMONS = slurm(1, 0, 1, "1(x2)", SLURM_NTASKS="2")
COMBINED: dict[str, tuple[Environ, Fields]] = {
    "torchrun inside SLURM": (DAEMONS | torchrun([4, 4], 1, 1), (5, 1, 1, 8, 4, 2)),
    "Open MPI before the SLURM variables of its daemons": (DAEMONS | OPEN_MPI, (5, 1, None, 8, 4, None)),
    "Open MPI started by srun": (slurm(5, 1, 1, "4(x2)") | OPEN_MPI, (5, 1, 1, 8, 4, 2)),
    **{  # recovered on the first and the last node
        f"virtual local rank {local} on node {node}": (virtual([3, 4, 2], node, local), (rank, local, node, 9, here, 3))
        for node, local, rank, here in [(0, 0, 0, 3), (0, 2, 2, 3), (2, 0, 7, 2), (2, 1, 8, 2)]
    },
    **{  # unknown on others
        f"virtual local rank {local} on node 1": (virtual([3, 4, 2], 1, local), (3 + local, None, 1, 9, 4, 3))
        for local in range(4)
    },
    "local rank 0 with all devices": (
        torchrun([4, 4, 4], 1, 0, CUDA_VISIBLE_DEVICES="0,1,2,3"),
        (4, 0, 1, 12, 4, 3),
    ),
    "the only process of a node, with one device": (
        torchrun([2, 1, 2], 1, 0, CUDA_VISIBLE_DEVICES="0"),
        (2, 0, 1, 5, 1, 3),
    ),
    "uneven sizes, which do not tell the number of nodes": (
        variables("RANK=4 LOCAL_RANK=0 NODE_RANK=1 WORLD_SIZE=5 LOCAL_WORLD_SIZE=1"),
        (4, 0, 1, 5, 1, None),
    ),
}


# --- the table of launchers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", [*LAUNCHERS, *COMBINED])
def test_the_variables_of_every_launcher_are_read(launcher: str) -> None:
    environ, expected = (LAUNCHERS | COMBINED)[launcher]
    assert fields(Topology.from_environ(environ)) == expected


SLURM_STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "9" * 5000}, r"WORLD_SIZE='9{100}' in the environment is not a whole number"),
        ({**SLURM_STEP, "SLURM_TASKS_PER_NODE": "999999(x999999)"}, r"SLURM_TASKS_PER_NODE='999999\(x999999\)' is not"),
        (
            {**SLURM_STEP, "SLURM_TASKS_PER_NODE": "1(x99999)," * 400 + "1"},
            r"SLURM_TASKS_PER_NODE='1\(x99999\).* is not",
        ),
    ],
    ids=["a long number", "too many nodes", "too many nodes together"],
)
def test_huge_numbers_are_refused(environ: Environ, message: str) -> None:
    with pytest.raises(TopologyError, match=message) as refused:
        Topology.from_environ(environ)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("step", ["9" * 5000, "\u00b2"])
def test_a_step_id_may_be_any_text(step: str) -> None:
    """`str.isdigit` accepts characters that `int` does not."""
    assert Topology.from_environ({**SLURM_STEP, "SLURM_STEP_ID": step}) == Topology.from_environ(SLURM_STEP)


@pytest.mark.parametrize("tasks", ["", "4(x2", "4(x2),", "four", "4(2)", "-4", "4(x99999999999)"])
def test_malformed_tasks_per_node_are_refused(tasks: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(f"SLURM_TASKS_PER_NODE={tasks!r} is not of SLURM's form")):
        Topology.from_environ(slurm(5, 1, 1, tasks))


# --- traps ------------------------------------------------------------------------------------------------------------


def test_a_process_without_a_launcher_is_a_single_process() -> None:
    assert Topology.from_environ({}) is Topology.from_environ({"WORLD_SIZE": "1"}) is None
    assert fields(Topology.detect({})) == (0, 0, 0, 1, 1, 1)
    assert Topology.detect({}).origin("global_rank") == "no launcher was found"


@pytest.mark.parametrize("others", [OPEN_MPI, slurm(5, 1, 1, "4(x2)")], ids=["Open MPI", "SLURM"])
@pytest.mark.parametrize("exported", ["1", "8"])
def test_an_exported_world_size_does_not_hide_the_launcher(others: Environ, exported: str) -> None:
    assert fields(Topology.detect({"WORLD_SIZE": exported, **others})) == fields(Topology.detect(others))
    status = "agrees" if exported == "8" else "contradicts"
    assert [launcher.status for launcher in detected_launchers({"WORLD_SIZE": exported, **others})] == [status, "used"]


def test_incomplete_variables_are_an_error_even_if_a_later_launcher_is_complete() -> None:
    environ = {"WORLD_SIZE": "2", **OPEN_MPI}
    with pytest.raises(TopologyError, match=re.escape("WORLD_SIZE (Lightning)=2, but not the global_rank")):
        Topology.detect(environ)
    assert [launcher.status for launcher in detected_launchers(environ)] == ["incomplete", "not asked"]


@pytest.mark.parametrize("variable", ["NODE_RANK", "PET_NODE_RANK", "PMIX_RANK", "PALS_RANKID", "FLUX_TASK_RANK"])
def test_a_rank_above_0_without_a_world_size_is_detected(variable: str) -> None:
    (launcher,) = detected_launchers({variable: "2"})
    assert (launcher.status, launcher.variables) == ("rank alone", {variable: "2"})
    assert detected_launchers({variable: "0"}) == detected_launchers({variable: ""}) == []
    assert {launcher.status for launcher in detected_launchers({variable: "2", **torchrun([4, 4], 1, 1)})} <= {
        "used",
        "contradicts",
    }


@pytest.mark.parametrize(
    ("environ", "there", "missing"),
    [
        ({"RANK": "3"}, "RANK (RANK and WORLD_SIZE)=3", "world_size"),
        ({"TORCHELASTIC_RUN_ID": "none", "RANK": "3"}, "RANK (torchrun)=3", "world_size"),
        ({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "3"}, "WORLD_SIZE (torchrun)=3", "global_rank"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK (Lightning)=1", "global_rank and world_size"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE (Lightning)=4", "global_rank"),
        ({"LOCAL_RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "4"}, "NODE_RANK (Lightning)=1", "global_rank"),
        ({"LOCAL_RANK": "1", "CROSS_RANK": "1"}, "CROSS_RANK (DeepSpeed)=1", "global_rank and world_size"),
        ({"OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK (Open MPI)=2", "world_size"),
        ({"PMI_RANK": "2"}, "PMI_RANK (MPICH)=2", "world_size"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "2"}, "SLURM_PROCID (SLURM)=2", "world_size"),
    ],
)
def test_incomplete_variables_are_refused_with_the_given_and_missing_ones(
    environ: Environ, there: str, missing: str
) -> None:
    with pytest.raises(TopologyError, match=f"{re.escape(there)}.*, but not the {missing} of this process"):
        Topology.from_environ(environ)


def test_the_environment_of_the_process_is_the_default(
    bare_environment: None,  # noqa: ARG001  # goes first
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Topology.from_environ() is None
    own = torchrun([4, 4], 1, 1, TORCHELASTIC_RESTART_COUNT="2")
    for variable, value in own.items():
        monkeypatch.setenv(variable, value)
    assert Topology.from_environ() == Topology.detect() == Topology.from_environ(own)
    assert Topology.from_framework(5, 8, "Trainer") == Topology.from_environ(own)
    assert Launch.detect() == Launch.detect(own)
    assert node_identity() == node_identity(own)


# --- frameworks and torch.distributed ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "size", "environ", "expected", "origins"),
    [
        (
            *(0, 1, {"RANK": "3", "WORLD_SIZE": "4", "NODE_RANK": "1"}, (0, 0, 0, 1, 1, 1)),
            {"global_rank": "Trainer"},
        ),
        (
            *(5, 8, torchrun([4, 4], 1, 1), (5, 1, 1, 8, 4, 2)),
            {"world_size": "Trainer", "node_rank": "GROUP_RANK (torchrun)"},
        ),
        (1, 2, {"RANK": "one", "WORLD_SIZE": "2"}, (1, None, None, 2, None, None), {}),
        (0, 4, SBATCH_SHELL, (0, None, None, 4, None, None), {}),
    ],
    ids=["stale", "matching", "unreadable", "of an sbatch shell"],
)
def test_a_framework_takes_only_missing_fields_from_variables_that_match(
    rank: int, size: int, environ: Environ, expected: Fields, origins: dict[str, str]
) -> None:
    topology = Topology.from_framework(rank, size, "Trainer", environ=environ)
    assert fields(topology) == expected
    assert {name: topology.origin(name) for name in origins} == origins


@pytest.mark.parametrize("rank", [0, 1])
def test_the_frameworks_rank_is_used_under_debug_launcher(rank: int) -> None:
    """Accelerate's debug_launcher sets the same variables in every process."""
    everywhere = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    topology = Topology.from_framework(rank, 2, "PartialState", environ=everywhere)
    assert (topology.global_rank, topology.world_size) == (rank, 2)
    assert rank == 0 or topology.local_rank is None
    assert not topology.knows_layout
    assert fields(topology.with_layout(["host", "host"])) == (rank, rank, 0, 2, 2, 1)


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_a_process_group_has_precedence_over_stale_variables() -> None:
    topology = Topology.detect({"RANK": "3", "WORLD_SIZE": "4"})
    assert fields(topology) == (0, 0, 0, 1, 1, 1)
    assert topology.origin("global_rank") == "torch.distributed"


# --- impossible values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "messages"),
    [
        ({"RANK": "8"}, ["global_rank=8 (RANK (torchrun))", "less than world_size=8 (WORLD_SIZE (torchrun))"]),
        ({"RANK": "-1"}, ["global_rank=-1 (RANK (torchrun))", "at least 0"]),
        ({"WORLD_SIZE": "0"}, ["world_size=0 (WORLD_SIZE (torchrun))", "at least 1"]),
        ({"LOCAL_RANK": "4"}, ["local_rank=4 (LOCAL_RANK (torchrun))", "local_world_size=4 (LOCAL_WORLD_SIZE"]),
        ({"LOCAL_RANK": "-2"}, ["local_rank=-2 (LOCAL_RANK (torchrun))", "at least 0"]),
        ({"GROUP_RANK": "2"}, ["node_rank=2 (GROUP_RANK (torchrun))", "num_nodes=2 (GROUP_WORLD_SIZE (torchrun))"]),
        (
            {"LOCAL_WORLD_SIZE": "9"},
            ["local_world_size=9 (LOCAL_WORLD_SIZE (torchrun)) must not be greater than world_size=8 (WORLD_SIZE"],
        ),
        ({"LOCAL_WORLD_SIZE": "0", "LOCAL_RANK": "0"}, ["local_world_size=0 (LOCAL_WORLD_SIZE (torchrun))"]),
        ({"GROUP_WORLD_SIZE": "9"}, ["num_nodes=9 (GROUP_WORLD_SIZE (torchrun))", "world_size=8 (WORLD_SIZE"]),
        ({"GROUP_WORLD_SIZE": "0", "GROUP_RANK": "0"}, ["num_nodes=0 (GROUP_WORLD_SIZE (torchrun))"]),
        ({"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}, ["num_nodes=1", "local_world_size=4", "contradict each other"]),
        ({"GROUP_WORLD_SIZE": "6"}, ["num_nodes=6", "local_world_size=4", "world_size=8", "contradict each other"]),
        ({"RANK": "five"}, ["RANK='five'", "not a whole number"]),
        ({"WORLD_SIZE": "8.0"}, ["WORLD_SIZE='8.0'", "not a whole number"]),
        ({"LOCAL_RANK": ""}, ["LOCAL_RANK=''", "not a whole number"]),
    ],
)
def test_impossible_values_are_refused_with_variable_and_value(changed: Environ, messages: list[str]) -> None:
    with pytest.raises(TopologyError) as refused:
        Topology.from_environ(torchrun([4, 4], 1, 1) | changed)
    assert [text for text in messages if text not in str(refused.value)] == []
    assert "unset variables that another launcher left behind" in str(refused.value)


# --- the layout -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"world_size": 1, "global_rank": 0}, (0, 0, 0, 1, 1, 1)),
        ({"global_rank": 2, "world_size": 4, "num_nodes": 1}, (2, 2, 0, 4, 4, 1)),
        ({"global_rank": 2, "world_size": 4, "local_world_size": 4}, (2, 2, 0, 4, 4, 1)),
        ({"global_rank": 2, "world_size": 4, "num_nodes": 4}, (2, 0, 2, 4, 1, 4)),
        ({"global_rank": 2, "world_size": 4, "local_world_size": 2}, (2, None, None, 4, 2, None)),
        ({"global_rank": 4, "world_size": 5, "num_nodes": 2}, (4, None, None, 5, None, 2)),
    ],
    ids=["one process", "one node", "all on this node", "one process per node", "nodes unknown", "uneven nodes"],
)
def test_only_certain_conclusions_are_filled_in(known: Mapping[str, int], expected: Fields) -> None:
    values: dict[str, Any] = dict.fromkeys(ORIGINS) | dict(known)
    assert fields(Topology(**values)) == expected


@pytest.mark.parametrize(
    ("nodes", "rank", "expected"),
    [
        (["a", "a", "a", "b", "b"], 4, (4, 1, 1, 5, 2, 2)),
        (["a", "b", "a", "b", "a"], 4, (4, 2, 0, 5, 3, 2)),
        (["a", "b", "a", "b", "a"], 3, (3, 1, 1, 5, 2, 2)),
        (["z", "a", "z"], 0, (0, 0, 0, 3, 2, 2)),
        (["z", "a", "z"], 1, (1, 0, 1, 3, 1, 2)),
        (["a", "a"], 1, (1, 1, 0, 2, 2, 1)),
    ],
    ids=["uneven", "interleaved, first node", "interleaved, second node", "by rank", "not by name", "one node"],
)
def test_ranks_learn_the_layout_from_each_other(nodes: list[str], rank: int, expected: Fields) -> None:
    topology = Topology(rank, None, None, len(nodes), None, None).with_layout(nodes)
    assert fields(topology) == expected
    assert topology.knows_layout
    assert topology.origin("node_rank") == "what the ranks exchanged"


def test_a_layout_with_a_wrong_number_of_ranks_is_refused() -> None:
    with pytest.raises(TopologyError, match=r"2 ranks published their node, but the world size is 3 \(given\)"):
        Topology(0, None, None, 3, None, None).with_layout(["a", "b"])


@pytest.mark.parametrize("variable", ["NODE_RANK", "GROUP_RANK"])
def test_the_launchers_node_rank_distinguishes_two_nodes_on_one_host(variable: str) -> None:
    assert node_identity({variable: "0"}) != node_identity({variable: "1"})
    assert node_identity({variable: "1", "LOCAL_RANK": "0"}) == node_identity({variable: "1", "LOCAL_RANK": "1"})


# --- the job as a whole -----------------------------------------------------------------------------------------------


ADDRESS = {"MASTER_ADDR": "host", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "name", "value"),
    [
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", **ADDRESS}, "agent_store", ("host", 29500)),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False", **ADDRESS}, "agent_store", None),  # a store of the ranks
        (ADDRESS, "agent_store", None),
        ({"TORCHELASTIC_RESTART_COUNT": "2"}, "attempt", 2),
        ({"NODE_RANK": "3"}, "node_rank", 3),  # known before the ranks
        ({"GROUP_RANK": "3"}, "node_rank", 3),
    ],
)
def test_what_the_variables_tell_of_a_launch(environ: Environ, name: str, value: object) -> None:
    assert getattr(Launch.detect(environ), name) == value


STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"}
RANDOM = {"OMPI_MCA_orte_precondition_transports": "0099b3ea-afb28778"}


@pytest.mark.parametrize(
    ("environ", "job_id"),
    [
        (STEP, "slurm-7-0"),
        (STEP | {"SLURM_RESTART_COUNT": "1"}, "slurm-7-0"),
        ({"PMIX_NAMESPACE": "prterun-1"}, "pmix-prterun-1"),
        (STEP | {"PMIX_NAMESPACE": "slurm.pmix.7.0"}, "slurm-7-0"),
        ({"PMIX_NAMESPACE": "2926837761", **RANDOM}, "pmix-2926837761-0099b3ea-afb28778"),
        ({"PMIX_NAMESPACE": "1"}, None),
        ({"SLURM_JOB_ID": "7"}, None),
        (STEP | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
        (STEP | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "PMIX_NAMESPACE": "slurm.pmix.7.0"}, None),
        (STEP | {"SLURM_NTASKS": "x"}, None),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),
        ({"TORCHELASTIC_RUN_ID": "mine"}, None),
    ],
)
def test_a_job_name_uses_only_variables_that_differ_between_jobs(environ: Environ, job_id: str | None) -> None:
    assert job_name(Topology(1, None, None, 4, None, None), environ) == job_id


@pytest.mark.parametrize(
    ("environ", "child"),
    [
        ({"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2"}, True),
        ({"LOCAL_RANK": "0", "NODE_RANK": "0", "WORLD_SIZE": "2"}, False),
        ({"LOCAL_RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "4"}, False),
        ({"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", "RANK": "1"}, False),
        (torchrun([2], 0, 1), False),
    ],
    ids=["a further rank", "the main process", "another node", "somebody else's", "torchrun's"],
)
def test_lightnings_child_processes_are_recognised(environ: Environ, child: bool) -> None:
    assert Launch.detect(environ).is_lightning_child is child
