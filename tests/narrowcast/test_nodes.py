"""Several ranks on each of several nodes: payloads cross between nodes, nodes complete the rest."""

import os
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast import narrow_all_gather
from narrowcast.autotune import calibration
from narrowcast.errors import Job
from narrowcast.fsdp2 import ParamGroup, param_groups
from narrowcast.reducescatter import codec
from narrowcast.reducescatter.comm import NarrowReduceScatter
from narrowcast.reducescatter.reduce_op import reduction
from narrowcast.reducescatter.two_levels import sum_within
from narrowcast.telemetry.counted import uncounted
from narrowcast.telemetry.over_ranks import reduce_over_ranks
from narrowcast.topology import Layout, find_topology, layout_of
from narrowcast.wire.coders import Zstd
from tests.narrowcast.autotune.test_controller import SLOW, _train_auto
from tests.narrowcast.reducescatter.test_reduce_scatter import (
    DTYPES,
    OPS,
    contributions,
    plain_reduce_scatter,
)
from tests.narrowcast.test_all_gather import COMPRESSIONS
from tests.narrowcast.training import Setup, build, narrowed, same_bits, state_of, train
from tests.wide import wide_but


@pytest.mark.parametrize(
    ("ranks_of_group", "ranks_per_node", "layout"),
    [
        ([0, 1, 2, 3], 4, "within a node"),
        ([4, 5], 4, "within a node"),
        ([0, 1, 2, 3], 1, "a rank a node"),
        ([1, 5, 9], 4, "a rank a node"),
        ([3], 4, "a rank a node"),
        ([0, 1, 2, 3], 2, "two levels"),
        ([0, 2, 4, 6], 4, "two levels"),
        ([4, 5, 0, 1], 2, "two levels"),
        ([0, 1, 2, 3], 3, "uneven"),
        ([0, 2, 1, 3], 2, "uneven"),
        ([0, 1, 2, 4, 5, 6], 4, "two levels"),
    ],
)
def test_a_process_group_lies_over_the_nodes(
    ranks_of_group: list[int], ranks_per_node: int, layout: Layout
) -> None:
    assert layout_of(ranks_of_group, ranks_per_node) == layout


MODES: dict[str, tuple[int, int, dict[str, Any]]] = {  # ranks, ranks a node, how to shard
    "2 nodes of 2": (4, 2, {}),
    "2 nodes of 3": (6, 3, {}),
    "3 nodes of 2": (6, 2, {}),
    "fp32, asynchronous": (4, 2, {"gathered": None, "async_unshard": True}),
    "reshard to 2": (4, 2, {"reshard": 2}),
    "reshard to 4 of 8": (8, 2, {"reshard": 4}),
    "replicas": (8, 2, {"replicas": 2}),
    "offload": (4, 2, {"offload": True}),
    "prefetch, checkpointing": (4, 2, {"prefetch": True, "checkpointing": True}),
}


def _differs(setup: Setup, compressions: dict[str, dict[str, Any]]) -> list[str]:
    """The compressions with which training is not that of baseline FSDP2."""
    model, optimizer = build(setup)
    train(setup, model, optimizer)
    plain = state_of(model, optimizer)
    found = []
    for name, narrow in compressions.items():
        one = Setup(**{**vars(setup), "narrow": narrow})
        model, optimizer = build(one)
        with narrowed(one, model, optimizer):
            train(one, model, optimizer)
        if not same_bits(plain, state_of(model, optimizer)):
            found.append(name)
    return found


@pytest.mark.parametrize("mode", wide_but(MODES, "2 nodes of 2", "prefetch, checkpointing"))
def test_gathers_in_two_levels_train_as_plain(ranks, mode: str) -> None:
    world_size, ranks_per_node, sharding = MODES[mode]
    compressions = {
        name: {**COMPRESSIONS[name], "ranks_per_node": ranks_per_node, "verify_interval": 2}
        for name in (COMPRESSIONS if mode == "2 nodes of 2" else ("delta", "blocks-hash"))
    }
    assert ranks(world_size).run(_differs, Setup(**sharding), compressions) == [[]] * world_size


def _cache_bytes(compression: str, ranks_per_node: int) -> int:
    setup = Setup(narrow={"compression": compression, "ranks_per_node": ranks_per_node})
    model, optimizer = build(setup)
    with narrowed(setup, model, optimizer) as (handle,):
        train(setup, model, optimizer)
        return handle.cache_bytes


@pytest.mark.parametrize("compression", wide_but(["delta", "exponent"], "exponent"))
def test_a_rank_caches_its_share_of_the_model_alone(ranks, compression: str) -> None:
    """Of two nodes of two ranks each caches what two of four ranks hold."""
    flat = ranks(4).run(_cache_bytes, compression, 1)
    assert ranks(4).run(_cache_bytes, compression, 2) == [size // 2 for size in flat]


def _gathers_within_a_node(narrow: dict[str, Any]) -> tuple[bool, int]:
    setup = Setup(narrow={**narrow, "ranks_per_node": 4}, gradients={"ranks_per_node": 4})
    model, optimizer = build(setup)
    before = [group.all_gather for group in param_groups(model)]
    with narrowed(setup, model, optimizer):
        after = [uncounted(group.all_gather) for group in param_groups(model)]
    return before == after, len(after)


@pytest.mark.parametrize("compression", ["delta", "auto"])
def test_within_one_node_the_collectives_are_those_of_fsdp2(ranks, compression: str) -> None:
    assert ranks(4).run(_gathers_within_a_node, {"compression": compression}) == [(True, 3)] * 4


def _two_level_reduction(
    contribution: Tensor, op: Any, compression: codec.Compression, ranks_per_node: int
) -> Tensor:
    """This rank's share of the reduction over all ranks."""
    topology = find_topology(ranks_per_node, [dist.group.WORLD])
    reduce = NarrowReduceScatter(
        ParamGroup("layer", (), _group=None), compression, Zstd(), topology=topology
    )
    output = contribution.new_full((contribution.numel() // dist.get_world_size(),), torch.nan)
    reduce(output, contribution.clone(), dist.group.WORLD, op)
    return output


def _plain_two_level_reduction(contribution: Tensor, op: Any, ranks_per_node: int) -> Tensor:
    """The same sums uncompressed: the backend's within nodes, then in the order of nodes."""
    topology = find_topology(ranks_per_node, [dist.group.WORLD])
    levels = topology.levels_of(dist.group.WORLD)
    sums_RN = sum_within(contribution.view(dist.get_world_size(), -1), levels)
    if ranks_per_node == 2:  # a sum of two has but one order
        gathered = contribution.new_empty(dist.get_world_size(), contribution.numel())
        dist.all_gather_single(gathered.view(-1).view(torch.uint8), contribution.view(torch.uint8))
        node = dist.get_rank() // 2
        pair = gathered[2 * node] + gathered[2 * node + 1]
        own_RN = pair.view(-1, 2, sums_RN.shape[1])[:, dist.get_rank() % 2]
        assert same_bits([sums_RN], [own_RN.contiguous()])
    arrived = torch.empty_like(sums_RN)
    dist.all_to_all_single(
        arrived.view(torch.uint8).view(-1), sums_RN.view(torch.uint8).view(-1), group=levels.across
    )
    total = arrived[0]
    for sums_N in arrived[1:]:
        total = total + sums_N
    factor, divisor = reduction(op, dist.group.WORLD)
    return total / divisor if divisor != 1 else total * factor


def _wrong_reductions(n: int, ranks_per_node: int) -> list[str]:
    wrong = []
    for dtype in DTYPES:
        for kind, values in contributions(n, dtype).items():
            for name, op in OPS.items():
                expected = _plain_two_level_reduction(values, op, ranks_per_node)
                for compression in ("none", "entropy"):
                    found = _two_level_reduction(values, op, compression, ranks_per_node)
                    if not same_bits([found], [expected]):
                        wrong.append(f"{kind}, {dtype}, {name}: {compression}")
    return wrong


@pytest.mark.parametrize("nodes", wide_but([(4, 2), (6, 2), (6, 3)], (4, 2)))
@pytest.mark.parametrize("n", wide_but([1, 37, 1000], 37))
def test_node_sums_arrive_bitwise_identical(ranks, nodes: tuple[int, int], n: int) -> None:
    world_size, ranks_per_node = nodes
    assert ranks(world_size).run(_wrong_reductions, n, ranks_per_node) == [[]] * world_size


def _errors_against_fp64() -> tuple[float, float, bool, bool]:
    """Mean error of ours and of the backend's sum; whether every element is within the a-priori
    bound of its order; whether it repeats."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    n, world_size = 4096, dist.get_world_size()
    values = torch.randn(world_size * n, generator=generator).bfloat16().float()
    ours = _two_level_reduction(values, dist.ReduceOp.SUM, "entropy", world_size // 2)
    again = _two_level_reduction(values, dist.ReduceOp.SUM, "entropy", world_size // 2)
    plain = plain_reduce_scatter(values, dist.ReduceOp.SUM)
    own = slice(dist.get_rank() * n, (dist.get_rank() + 1) * n)
    rows = values.new_empty(world_size * values.numel())
    dist.all_gather_single(rows, values)
    exact_N = rows.view(world_size, -1)[:, own].double()
    bound_N = world_size * torch.finfo(torch.float32).eps * exact_N.abs().sum(0)
    error, plain_error = ((x.double() - exact_N.sum(0)).abs() for x in (ours, plain))
    return (
        error.mean().item(),
        plain_error.mean().item(),
        bool((error <= bound_N).all()),
        same_bits([ours], [again]),
    )


@pytest.mark.parametrize("world_size", wide_but([4, 8], 4))
def test_sums_of_node_sums_are_as_exact_as_the_backends(ranks, world_size: int) -> None:
    for error, plain_error, bounded, repeats in ranks(world_size).run(_errors_against_fp64):
        assert error <= plain_error * 1.001
        assert bounded
        assert repeats


GRADIENT_MODES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "2 nodes of 2": (4, 2, {}),
    "3 nodes of 2": (6, 2, {}),
    "accumulated": (4, 2, {"microbatches": 3, "synced": False}),
    "reduced in bf16": (4, 2, {"reduced": torch.bfloat16}),
    "replicas": (8, 2, {"replicas": 2}),
    "divide factor": (4, 2, {"force_sum": True, "divide_factor": 3.0}),
}


def _coded_differs_from_uncoded(setup: Setup, ranks_per_node: int) -> bool:
    states = []
    for compression in ("none", "entropy"):
        settings = {"compression": compression, "ranks_per_node": ranks_per_node}
        one = Setup(**{**vars(setup), "gradients": settings})
        model, optimizer = build(one)
        with narrowed(one, model, optimizer):
            train(one, model, optimizer)
        states.append(state_of(model, optimizer))
    return not same_bits(*states)


@pytest.mark.parametrize("mode", wide_but(GRADIENT_MODES, "accumulated", "divide factor"))
def test_coded_node_sums_train_as_uncoded_ones(ranks, mode: str) -> None:
    world_size, ranks_per_node, sharding = GRADIENT_MODES[mode]
    differs = ranks(world_size).run(_coded_differs_from_uncoded, Setup(**sharding), ranks_per_node)
    assert differs == [False] * world_size


def _bits_into_a_node(setup: Setup, ranks_per_node: int) -> tuple[float, float, float]:
    """Of a step: sent, baseline by a ring, and bits a parameter in the first gather."""
    setup = replace(
        setup,
        narrow={"compression": "none", "ranks_per_node": ranks_per_node},
        gradients={"compression": "none", "ranks_per_node": ranks_per_node},
    )
    model, optimizer = build(setup)
    with narrowed(setup, model, optimizer) as (handle, _):
        train(setup, model, optimizer)
        volume = reduce_over_ranks(handle.ledger.last, torch.device("cpu"))
    return *volume.bits_into_node, volume.first.bits_per_parameter


@pytest.mark.parametrize("nodes", wide_but([(4, 1, 1), (4, 2, 1), (6, 2, 1), (8, 2, 2)], (4, 2, 1)))
def test_the_ledger_counts_what_enters_a_node(ranks, nodes: tuple[int, int, int]) -> None:
    """Uncompressed, in bits a parameter: each of two gathers brings 16 (1 - 1/R) into a node in two
    levels, and gradients 32 (1 - 1/R); a ring 16 (W - 1)/W and 32 (W - 1)/W."""
    world_size, ranks_per_node, replicas = nodes
    sharded = world_size // replicas
    num_nodes, setup = sharded // ranks_per_node, Setup(replicas=replicas)
    bits, headers = 2 * 16 + 32, 1.0
    for sent, plain, a_gather in ranks(world_size).run(_bits_into_a_node, setup, ranks_per_node):
        assert plain == pytest.approx(bits * (sharded - 1) / sharded)
        least = bits * (1 - 1 / num_nodes)
        assert least <= sent <= least + headers
        assert a_gather == pytest.approx(16, abs=headers)


def test_auto_chooses_in_two_levels_and_reckons_with_what_a_rank_caches_there(ranks) -> None:
    flat = ranks(4).run(_train_auto, SLOW, Setup(steps=6), {"ranks_per_node": 1})
    two_levels = ranks(4).run(_train_auto, SLOW, Setup(steps=6), {"ranks_per_node": 2})
    for one, of_flat in zip(two_levels, flat, strict=True):
        assert one["equal"]
        assert one["steps"][-1] == of_flat["steps"][-1]
        assert "delta" in one["steps"][-1].values()
        assert one["cached"][-1] == one["choice"].cache_bytes == of_flat["choice"].cache_bytes // 2


def _calibrated_in_two_levels() -> tuple[int, bool]:
    model, _ = build(Setup())
    groups = param_groups(model)
    topology = find_topology(2, [group.process_group for group in groups])
    measured = calibration.calibrate(groups, {}, Job(), topology=topology, seconds=0.2)
    one = next(iter(measured.links.values()))
    assert "in two levels" in calibration.table(measured)
    return one.payloads, one.payload_gather.seconds(1 << 20) > 0


def test_the_links_between_nodes_are_measured_by_themselves(ranks) -> None:
    assert ranks(4).run(_calibrated_in_two_levels) == [(2, True)] * 4


def _topology_of_the_launcher(stated: list[str]) -> tuple[int, int, str]:
    """Ranks on a node, nodes, and how a process group of all ranks is used."""
    with patch.dict(os.environ, {"LOCAL_WORLD_SIZE": stated[dist.get_rank()]}):
        topology = find_topology("auto", [dist.group.WORLD])
    used = "flat" if topology.levels_of(dist.group.WORLD) is None else "two levels"
    if topology.is_local(dist.group.WORLD):
        used = "left to FSDP2"
    return topology.ranks_per_node, topology.num_nodes, used


@pytest.mark.parametrize(
    ("stated", "found"),
    [
        ("1111", (1, 4, "flat")),
        ("2222", (2, 2, "two levels")),
        ("4444", (4, 1, "left to FSDP2")),
        ("3331", (1, 4, "flat")),  # nodes that differ
        ("3333", (3, 2, "flat")),  # uneven
    ],
)
def test_auto_takes_what_the_launcher_says_where_all_nodes_agree(
    ranks, stated: str, found: tuple[int, int, str]
) -> None:
    assert ranks(4).run(_topology_of_the_launcher, list(stated)) == [found] * 4


def _communicators() -> bool:
    """Whether a second call makes no process group anew."""
    first, second = (find_topology(2, [dist.group.WORLD]) for _ in range(2))
    return first.levels_of(dist.group.WORLD) == second.levels_of(dist.group.WORLD)


def test_communicators_are_made_once(ranks) -> None:
    assert ranks(4).run(_communicators) == [True] * 4


def _refused(value: Any) -> str:
    model, optimizer = build(Setup())
    try:
        narrow_all_gather(model, optimizer, compression="delta", ranks_per_node=value)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("value", [0, "all", 2.0, True])
def test_a_wrong_number_of_ranks_on_a_node_is_named_with_what_is_allowed(ranks, value: Any) -> None:
    said = f'ranks_per_node = {value!r}: must be "auto" or an integer of at least 1'
    assert ranks(2).run(_refused, value) == [said] * 2
