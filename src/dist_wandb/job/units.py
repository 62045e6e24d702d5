"""The argument `unit`: the ranks whose numbers belong together, if these are not all ranks.

Under tensor and pipeline parallelism, ranks hold parts or copies of one replica of the model. Their losses are copies,
or missing. A mean covers one rank of each replica: the ranks along the data-parallel dimensions of a `DeviceMesh`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from dist_wandb.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

UnitArgument: TypeAlias = Union["ProcessGroup", "DeviceMesh", Sequence[int], str, None]
"""The type of `unit=`. The name of a dimension is valid only if the framework has a mesh."""
Mesh: TypeAlias = "DeviceMesh"

_HOW = 'Give a ProcessGroup, a dimension of a DeviceMesh such as mesh["dp"], or a list of global ranks.'


def ranks_of(unit: Any) -> tuple[int, ...] | str | None:
    # The ranks are sorted; a name and `None` are returned unchanged. For ``init_device_mesh("cpu", (4, 2),
    # mesh_dim_names=("dp", "tp"))["dp"]``, they are ``(0, 2, 4, 6)`` on these ranks, and ``(1, 3, 5, 7)`` on the
    # others.
    if unit is None or isinstance(unit, str):
        return unit
    dist, found = sys.modules.get("torch.distributed"), None
    if dist is not None and dist.is_available():  # else there are no groups and meshes
        if unit is dist.GroupMember.NON_GROUP_MEMBER:  # what `new_group` returns on ranks outside the group
            found = []
        elif isinstance(unit, dist.ProcessGroup):
            found = dist.get_process_group_ranks(unit)
        elif "torch.distributed.device_mesh" in sys.modules and isinstance(unit, dist.device_mesh.DeviceMesh):
            found = [int(rank) for rank in unit.mesh.flatten().tolist()]
    if found is None:
        if not isinstance(unit, Iterable) or isinstance(unit, (bytes, Mapping)):
            raise ConfigurationError(f"unit={unit!r} does not name ranks. {_HOW}")
        found = list(unit)
    for rank in found:
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise ConfigurationError(f"unit={unit!r} names {rank!r}, which is not a rank. {_HOW}")
    return tuple(sorted(set(found)))


def ranks_in_mesh(mesh: DeviceMesh, dimensions: Iterable[str], rank: int) -> tuple[int, ...]:
    """Return the ranks of a mesh that differ from a global rank only along some dimensions; none outside the mesh."""
    return _along(mesh.mesh.numpy(), mesh.mesh_dim_names or (), set(dimensions), rank)


def dimension_of(mesh: DeviceMesh, name: str) -> tuple[int, ...]:
    """Return the ranks along a dimension, perhaps flattened, through this rank; raise ConfigurationError without it."""
    try:
        return tuple(sorted(mesh[name].mesh.flatten().tolist()))
    except (KeyError, RuntimeError, ValueError):
        names = ", ".join(map(repr, mesh.mesh_dim_names or ()))
        raise ConfigurationError(f"unit={name!r} is not a dimension of the mesh. Its dimensions are {names}.") from None


def ranks_along(sizes: Mapping[str, int], dimensions: Iterable[str], rank: int) -> tuple[int, ...]:
    # The last dimension of `sizes` varies fastest, as in torch's `init_device_mesh`: for ``{"dp": 4, "tp": 2}, ["dp"]``
    # and rank 3, they are ``(1, 3, 5, 7)``.
    along = set(dimensions)
    if unknown := along - set(sizes):
        raise ConfigurationError(
            f"The mesh has no dimension {min(unknown)!r}. Its dimensions are {', '.join(map(repr, sizes))}."
        )
    import numpy as np

    ranks = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
    return _along(ranks, sizes, along, rank)


def _along(ranks: Any, names: Iterable[str], along: set[str], rank: int) -> tuple[int, ...]:
    place = (ranks == rank).nonzero()
    if not place[0].size:
        return ()
    part = tuple(slice(None) if name in along else at[0] for name, at in zip(names, place, strict=True))
    return tuple(sorted(ranks[part].ravel().tolist()))
