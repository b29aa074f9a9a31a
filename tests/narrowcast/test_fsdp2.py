"""Where there is nothing to narrow, it is said what is so, and what to do."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from narrowcast import narrow_all_gather, narrow_reduce_scatter
from tests.ranks import Raised


def _mesh(*shape: int) -> dist.DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[: len(shape)])


def _plain() -> nn.Module:
    return nn.Linear(8, 8)


def _over_one_rank() -> nn.Module:
    """As with ``data_parallel_shard_degree = 1``."""
    return fully_shard(nn.Linear(8, 8), mesh=_mesh(2, 1))


def _alone() -> nn.Module:
    ranks = torch.arange(2).view(2, 1)
    mesh = dist.DeviceMesh("cpu", ranks, mesh_dim_names=("other", "shard"))
    return fully_shard(nn.Linear(8, 8), mesh=mesh["shard"])


def _replicated() -> nn.Module:
    return replicate(nn.Linear(8, 8), mesh=_mesh(2))


def _without_parameters() -> nn.Module:
    return fully_shard(nn.ReLU(), mesh=_mesh(2))


def _by_other_means() -> nn.Module:
    model = nn.Linear(8, 8, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.data, _mesh(2), [Shard(0)]))
    return model


def _by_simple_fsdp() -> nn.Module:
    from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

    return data_parallel(nn.Sequential(nn.Linear(8, 8)), _mesh(2), mode="fully_shard")


WHY = {
    _plain: r"not sharded by FSDP2: call torch\.distributed\.fsdp\.fully_shard on it first$",
    _over_one_rank: r"a mesh of 1 rank .*data_parallel_shard_degree is 1 here",
    _alone: r"a mesh of 1 rank .*data_parallel_shard_degree is 1 here",
    _replicated: r"replicated .* Call .*fully_shard in the place of replicate",
    _without_parameters: r"modules without parameters .* apply it to those that have some",
    _by_other_means: r"fully_shard on it first \(its parameters are DTensors, sharded by other",
    _by_simple_fsdp: r"SimpleFSDP \(graph_trainer\).* torchtitan's own trainer, or switch",
}


def _narrowed(build: Callable[[], nn.Module], narrow: Callable) -> None:
    narrow([build(), build()])


@pytest.mark.parametrize("narrow", [narrow_all_gather, narrow_reduce_scatter])
@pytest.mark.parametrize("build", WHY)
def test_a_model_without_sharded_parameters_is_told_what_is_so(ranks, build, narrow) -> None:
    for outcome in ranks(2).outcomes(_narrowed, build, narrow):
        assert isinstance(outcome, Raised)
        assert outcome.type == "ValueError"
        assert re.search(WHY[build], outcome.message), outcome.message
