"""Input of a job's start: variables of launchers, and checkpoints."""

from __future__ import annotations

import argparse
import functools
import io
import json
import random
import struct
import zipfile
from pathlib import Path

import torch
from fuzzing import Target

from dist_wandb.errors import ReadError, TopologyError
from dist_wandb.job.launch import Launch, detected_launchers, job_name, node_identity
from dist_wandb.job.topology import Topology
from dist_wandb.lightning.checkpoints import ids_in

_RECORDED = Path(__file__).parents[1] / "unit" / "recorded_variables.json"
_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR"),
    *("MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_ID", "SLURM_JOB_ID"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_RESTART_COUNT", "SLURM_STEP_NUM_TASKS", "PMI_RANK"),
    *("PMI_SIZE", "PMIX_NAMESPACE", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "CROSS_RANK"),
    *("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_NODE_RANK", "CUDA_VISIBLE_DEVICES", "MPI_LOCALNRANKS"),
)
_VALUES = (
    *("4(x2),3", "2(x1)", "999999(x999999)", "999999(x999999)," * 400 + "1", "1," * 20_000 + "1", "2(x-1)", "(x2)"),
    *(",", "0", "1", "2", "3", "7", "-7"),
    *("9" * 4299, "-" + "9" * 4299, "9" * 5000, "\u0663", " 1 ", "1_0", "0x1", "1e3", ""),
    *("True", "none", "/a/attempt_0/1/error.json", "/" * 9000, "a" * 9000, "slurm.1.2", "\udcff", "2**31"),
    "4294967296",
)


@functools.cache
def _environments() -> list[bytes]:
    """Return the variables of launchers for the first and the last rank."""
    launchers = json.loads(_RECORDED.read_text())["launchers"].values()
    layouts = [ranks for launcher in launchers for ranks in launcher["layouts"].values()]
    return [_joined(environ) for ranks in layouts for environ in (ranks[0], ranks[-1]) if environ]


def _joined(environ: dict[str, str]) -> bytes:
    return b"\0".join(f"{name}={value}".encode() for name, value in environ.items())


def _with_odd_values(data: bytes) -> bytes:
    """Variables of a launcher with other values, with those of other launchers, or with some of them missing."""
    chance = random.Random(data)
    pairs = dict(pair.split(b"=", 1) for pair in chance.choice(_environments()).split(b"\0"))
    for _ in range(chance.randint(1, 4)):
        name = chance.choice([*pairs, *(name.encode() for name in _VARIABLES)])
        pairs[name] = chance.choice(_VALUES).encode(errors="surrogateescape")
        if chance.random() < 1 / 4:
            del pairs[name]
    return b"\0".join(b"%b=%b" % pair for pair in pairs.items())


def _read_environment(data: bytes) -> None:
    pairs = (pair.partition("=") for pair in data.decode(errors="surrogateescape").split("\0"))
    environ = {name: value for name, _, value in pairs}
    assert all(launcher.status for launcher in detected_launchers(environ))
    node_identity(environ)
    topology = Topology.from_environ(environ) or Topology.single()
    assert 0 <= topology.global_rank < topology.world_size
    repr((topology, Launch.detect(environ), job_name(topology, environ)))


def _checkpoints() -> list[bytes]:
    layer = torch.nn.Linear(2, 2)
    content = {
        "epoch": 1,
        "state_dict": layer.state_dict(),
        "optimizer_states": [torch.optim.Adam(layer.parameters()).state_dict()],
        "hyper_parameters": argparse.Namespace(lr=0.1, tags=("a", "b")),
        "dist_wandb": {"0": "exp"},
    }
    made = []
    for protocol in (2, 4):
        file = io.BytesIO()
        torch.save(content, file, pickle_protocol=protocol)
        made.append(file.getvalue())
    return [*made, *(zipfile.ZipFile(io.BytesIO(data)).read("archive/data.pkl") for data in made)]


def _read_checkpoint(data: bytes) -> None:
    """A plain pickle stands for a zip file that contains it, with a correct checksum."""
    file = io.BytesIO(data)
    if data[:1] == b"\x80":
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", data)
        file.seek(0)
    ids = ids_in(file, len(file.getvalue()))
    assert all(isinstance(text, str) for text in (*ids, *ids.values()))


_ORDERS = (
    *(bytes([order]) for order in b"(.0125NKJMI)]}lt\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x95ebocRQdsu"),
    *(b"\x85" * 600, b"cos\nsystem\n", b"r" + struct.pack("<I", 2**31), b"j\0\0\0\x01", b"\x82\x01"),
    b"\x8e" + b"\xff" * 8,
    *(b"X\xff\xff\xff\x7f", b"\x8b\xff\xff\xff\x7f", b"}\x85]s", b"(]t}"),
)

TARGETS = (
    Target("environment", _read_environment, _environments, (TopologyError,), mend=_with_odd_values),
    Target("checkpoint", _read_checkpoint, _checkpoints, (ReadError,), _ORDERS, examples=250, is_native=True),
)
