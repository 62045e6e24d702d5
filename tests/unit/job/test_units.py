"""Process groups and meshes of torch, and their ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dist_wandb.errors import ConfigurationError
from dist_wandb.job.units import dimension_of, ranks_in_mesh, ranks_of
from dist_wandb.settings.options import Options


@pytest.fixture
def rank_3_of_8() -> Iterator[None]:
    """Make this process rank 3 of 8, with torch's fake backend, which sends nothing."""
    import torch.testing._internal.distributed.fake_pg as fake

    dist.init_process_group("fake", store=fake.FakeStore(), rank=3, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> DeviceMesh:
    request.getfixturevalue("rank_3_of_8")
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))


@pytest.mark.usefixtures("rank_3_of_8")
def test_a_process_group_defines_the_ranks_of_a_unit() -> None:
    assert ranks_of(dist.new_group([3, 1, 7])) == (1, 3, 7)
    assert ranks_of(dist.group.WORLD) == tuple(range(8))
    assert ranks_of(dist.new_group([0, 1])) == ()  # this rank is not a member


def test_a_mesh_dimension_defines_the_ranks_along_it(mesh: DeviceMesh) -> None:
    assert ranks_of(mesh["dp"]) == (1, 3)
    assert ranks_of(mesh["pp", "dp"]) == (1, 3, 5, 7)
    assert ranks_of(mesh) == tuple(range(8))
    assert dimension_of(mesh, "tp") == (2, 3)
    assert ranks_in_mesh(mesh, ["pp", "dp", "missing"], 3) == (1, 3, 5, 7)
    assert ranks_in_mesh(mesh, [], 3) == (3,)


@pytest.mark.usefixtures("rank_3_of_8")
def test_a_rank_outside_of_the_mesh_is_in_no_unit() -> None:
    assert ranks_in_mesh(DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)), ["dp"], 3) == ()


def test_an_unknown_mesh_dimension_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(ConfigurationError, match=r"unit='data' is not a dimension of the mesh\. .* 'pp', 'dp', 'tp'"):
        dimension_of(mesh, "data")


def test_the_default_unit_covers_all_dimensions_except_those_of_copies(mesh: DeviceMesh) -> None:
    assert Options().in_mesh(mesh, 3).unit == (1, 3, 5, 7)
    assert Options().in_mesh(mesh["pp", "dp"], 3).unit is None
    assert Options().in_mesh(None, 3).unit is None
    assert Options(unit="dp").in_mesh(mesh, 3).unit == (1, 3)
    assert Options(unit=[0, 3]).in_mesh(mesh, 3).unit == (0, 3)
    assert Options(rank_scope="worker").in_mesh(mesh, 3).unit is None
