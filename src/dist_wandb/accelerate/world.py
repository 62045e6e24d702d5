"""The rank of this process according to Accelerate.

Under Megatron-LM Accelerate's main process is the last rank, if `PartialState` knows about Megatron-LM. In 1.0 to 1.15
only `AcceleratorState` knows: there the main process stays rank 0, for us and for Accelerate.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING

from accelerate import PartialState
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import DistributedType

from dist_wandb.errors import TopologyError
from dist_wandb.topology.model import Leader, Topology

if TYPE_CHECKING:
    from dist_wandb.topology.units import Mesh

MODEL_PARALLEL = frozenset({"tp"})
"""Dimensions of Accelerate's mesh along which ranks hold parts of one replica, and log the same numbers."""

_SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def current_topology() -> Topology:
    """The topology of this rank, always from `PartialState`, because `debug_launcher` sets RANK=0 in every process."""
    state = PartialState()
    if state.num_processes == 1:  # as Accelerate makes each process without a GPU and without ``cpu=True``
        with contextlib.suppress(TopologyError):  # stale variables, which Accelerate does not read either
            launched = Topology.from_environ()
            if launched is not None and launched.world_size > 1:
                warnings.warn(
                    f"The launcher started {launched.world_size} processes ({launched.origin('world_size')}), but "
                    "Accelerate runs each of them on its own: they train separately, and each opens a run. Without a "
                    "GPU, pass Accelerator(cpu=True).",
                    stacklevel=2,
                )
    # Megatron-LM has losses on the last rank only, which is therefore Accelerate's main process.
    leader: Leader = "last" if state.distributed_type == DistributedType.MEGATRON_LM else "first"
    return Topology.from_framework(state.process_index, state.num_processes, "accelerate.PartialState", leader=leader)


def current_mesh() -> Mesh | None:
    """The mesh of Accelerate's `ParallelismConfig`; `None` without a mesh and in versions that do not have them."""
    return getattr(AcceleratorState(), "device_mesh", None) if is_initialized() else None


def is_sharded() -> bool:
    """Whether parameters are gathered from other ranks in the forward pass and for the update."""
    if not is_initialized():
        return False
    mesh = current_mesh()
    names = () if mesh is None else mesh.mesh_dim_names or ()
    return AcceleratorState().distributed_type in _SHARDED or bool(set(names) - {"dp_replicate"})
