"""Tokens that are sent once to each rank give the results of all experts in one place."""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from narrowcast.moe.brim import merge, scatter
from narrowcast.moe.dispatch import Dispatched, dispatch
from narrowcast.moe.hop import one_level, two_levels
from tests.narrowcast.moe.moe_layer import (
    WEIGHTS,
    MoELayer,
    Results,
    deduplicated,
    error,
    fresh,
    levels_of_four,
    random_layer,
)
from tests.narrowcast.training import same_bits
from tests.ranks import Raised

LAYERS = {
    "token counts that nothing divides": random_layer([13, 1, 7, 29], 16, 4),
    "a rank without tokens": random_layer([5, 0, 9, 3], 8, 3),
    "tokens on one rank alone": random_layer([0, 0, 9, 0], 8, 3),
    "fewer tokens than ranks": random_layer([1, 0, 1, 0], 8, 2),
    "no tokens": random_layer([0, 0, 0, 0], 8, 2),
    "all tokens to one rank": random_layer([6, 5, 4, 3], 16, 3, allowed=range(4, 8)),
    "all tokens to one node": random_layer([6, 5, 4, 3], 16, 3, allowed=range(8, 16)),
    "an expert without tokens": random_layer([6, 5, 4, 3], 8, 3, allowed=(0, 1, 2, 4, 5, 6, 7)),
    "one expert a token": random_layer([6, 5, 4, 3], 8, 1),
    "all experts": random_layer([6, 5, 4, 3], 8, 8),
    "one expert a rank": random_layer([6, 5, 4, 3], 4, 2),
    "255 experts a rank": random_layer([30, 20, 10, 5], 4 * 255, 8),
    "256 experts a rank": random_layer([30, 20, 10, 5], 4 * 256, 8),
}


@dataclass(frozen=True)
class Closeness:
    """Of each result its error; and whether the gradients of experts without tokens are zero."""

    errors: dict[str, float]
    unused_are_zero: bool

    @staticmethod
    def of(found: Results, exact: Results, layer: MoELayer, rank: int) -> "Closeness":
        used = set(layer.ids_TK.flatten().tolist())
        here = torch.arange(layer.num_experts).chunk(len(layer.tokens_R))[rank].tolist()
        unused = [index for index, expert in enumerate(here) if expert not in used]
        return Closeness(
            {name: error(found[name], layer.part(name, exact[name], rank)) for name in exact},
            all(found[name] is not None and found[name][unused].eq(0).all() for name in WEIGHTS),
        )


def _closeness_at_four(layers: dict[str, MoELayer]) -> dict[str, Closeness]:
    rank, all_levels = dist.get_rank(), levels_of_four()
    return {
        f"{name}, {levels_name}": Closeness.of(
            deduplicated(layer, levels, rank), exact, layer, rank
        )
        for name, layer in layers.items()
        for exact in [layer.exact()]
        for levels_name, levels in all_levels.items()
    }


def _assert_close(closeness: dict[str, Closeness]) -> None:
    for name, found in closeness.items():
        assert max(found.errors.values()) < 1e-6, (name, found.errors)
        assert found.unused_are_zero, name


def test_outputs_and_gradients_are_those_of_all_experts_in_one_place(ranks) -> None:
    """Experts that no token selects have gradients too: zeros."""
    for closeness in ranks(4).run(_closeness_at_four, LAYERS):
        assert len(closeness) == 2 * len(LAYERS)
        _assert_close(closeness)


def _closeness_of_pairs(layers: list[MoELayer]) -> dict[str, Closeness]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    number, rank = divmod(dist.get_rank(), 2)
    layer, group = layers[number], pairs[number]
    all_levels = {
        "one level": one_level(group),
        "one node": two_levels(group, 1),
        "a node each": two_levels(group, 2),
    }
    return {
        name: Closeness.of(deduplicated(layer, levels, rank), layer.exact(), layer, rank)
        for name, levels in all_levels.items()
    }


def test_two_expert_parallel_groups_are_independent(ranks) -> None:
    layers = [random_layer([7, 4], 8, 3, seed=1), random_layer([2, 11], 8, 3, seed=2)]
    for closeness in ranks(4).run(_closeness_of_pairs, layers):
        assert len(closeness) == 3
        _assert_close(closeness)


def test_ranks_that_do_not_divide_over_nodes_are_refused_on_every_rank(ranks) -> None:
    for outcome in ranks(4).outcomes(_in_three_nodes):
        assert isinstance(outcome, Raised)
        assert outcome.type == "ValueError"
        assert outcome.message == "4 expert-parallel ranks do not divide over 3 nodes"


def _in_three_nodes() -> None:
    two_levels(dist.group.WORLD, 3)


# Bitwise identical.


def scaled(dispatched: Dispatched, _: Results) -> Tensor:
    """Experts that multiply by a number of their own: 1, 2 or 3, by their local index."""
    brim, offsets_e = dispatched.rows.brim, dispatched.rows.offsets_e
    index_N = torch.arange(len(brim.source_W))
    expert_N = torch.searchsorted(offsets_e.long(), index_N, right=True)
    x_ND = scatter(dispatched.x_SD, brim)
    y_ND = x_ND * dispatched.rows.prob_N[:, None] * (1 + expert_N % 3)[:, None]
    return merge(y_ND.to(x_ND.dtype), brim)


def _on_a_grid(dtype: torch.dtype) -> dict[str, bool]:
    """Whether results are those of the exact sum, whose numbers all fit into bf16."""
    rank, all_levels = dist.get_rank(), levels_of_four()
    layer = random_layer([11, 6, 0, 8], 16, 5, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for tensor in (layer.leaves["x"], layer.grad_y_TD):
        tensor.copy_(torch.randint(-2, 3, tensor.shape, generator=generator))
    prob_TK = layer.leaves["prob"]
    prob_TK.copy_(0.5 ** torch.randint(0, 2, prob_TK.shape, generator=generator))
    share = layer.share(rank)
    weighted_TK = share.leaves["prob"] * (1 + share.ids_TK % 4 % 3)
    x_TD, grad_y_TD = share.leaves["x"].float(), share.grad_y_TD.float()
    expected = {
        "y": (x_TD * weighted_TK.sum(1, keepdim=True)).to(dtype),
        "x": (grad_y_TD * weighted_TK.sum(1, keepdim=True)).to(dtype),
        "prob": (x_TD * grad_y_TD).sum(1, keepdim=True) * (1 + share.ids_TK % 4 % 3),
    }
    return {
        f"{levels_name}, {name}": torch.equal(found[name], tensor)
        for levels_name, levels in all_levels.items()
        for found in [deduplicated(layer, levels, rank, scaled)]
        for name, tensor in expected.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_numbers_on_a_grid_every_sum_is_exact(ranks, dtype: torch.dtype) -> None:
    for equal in ranks(4).run(_on_a_grid, dtype):
        assert len(equal) == 6
        assert all(equal.values()), equal


def any_bits(num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    """NaN with payloads, signalling ones too, infinities, minus zero, subnormals; and all else."""
    generator = torch.Generator().manual_seed(num_rows)
    size = (num_rows, dim * dtype.itemsize)
    x_TD = torch.randint(256, size, dtype=torch.uint8, generator=generator).view(dtype)
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    infinity = torch.tensor(torch.inf, dtype=dtype).view(bits).item()
    sign = torch.iinfo(bits).min
    special = [infinity, infinity + sign, infinity + 1, infinity + 5 + sign, sign, 1, sign + 1, 0]
    x_TD.view(bits)[:, : len(special)] = torch.tensor(special, dtype=bits)
    return x_TD


def _rows_that_arrive(dtype: torch.dtype) -> dict[str, bool]:
    """Whether each level layout brings every rank's tokens, once each, as they are."""
    rank, num_experts, all_levels = dist.get_rank(), 12, levels_of_four()
    layer = random_layer([11, 6, 0, 9], num_experts, 2)
    x_RTD = [any_bits(tokens, 13, dtype) for tokens in layer.tokens_R]
    ids_RTK = layer.ids_TK.split(layer.tokens_R)
    # On two nodes, tokens come by rank in the node, of each node.
    orders = {"one level": (0, 1, 2, 3), "two levels": (0, 2, 1, 3)}
    found = {}
    for name, order in orders.items():
        prob_TK = layer.leaves["prob"].split(layer.tokens_R)[rank]
        arrived = dispatch(x_RTD[rank], prob_TK, ids_RTK[rank], num_experts, all_levels[name]).x_SD
        expected = [x_RTD[r][(ids_RTK[r] // 3 == rank).any(dim=1)] for r in order]
        found[name] = same_bits([arrived.contiguous()], [torch.cat(expected)])
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_arrive_bitwise_identical(ranks, dtype: torch.dtype) -> None:
    for same in ranks(4).run(_rows_that_arrive, dtype):
        assert same == {"one level": True, "two levels": True}


def _repeated(dtype: torch.dtype) -> dict[str, tuple[bool, bool]]:
    """Whether a second run gives the same bits, and whether one with experts in another order."""
    rank = dist.get_rank()
    layer = random_layer([13, 1, 7, 29], 16, 6, dtype=dtype)
    order_TK = torch.rand(layer.ids_TK.shape, generator=torch.Generator().manual_seed(1)).argsort(1)
    leaves = layer.leaves | {"prob": layer.leaves["prob"].gather(1, order_TK)}
    reordered = MoELayer(leaves, layer.ids_TK.gather(1, order_TK), layer.grad_y_TD, layer.tokens_R)
    order_TK = layer.part("prob", order_TK, rank)
    same = {}
    for name, levels in levels_of_four().items():
        once, again, other = (
            deduplicated(each, levels, rank) for each in (layer, layer, reordered)
        )
        other["prob"] = torch.empty_like(other["prob"]).scatter_(1, order_TK, other["prob"])
        same[name] = tuple(
            same_bits([*once.values()], [*results.values()]) for results in (again, other)
        )
    return same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_second_run_is_bitwise_identical_whatever_the_order_of_a_tokens_experts(
    ranks, dtype: torch.dtype
) -> None:
    for same in ranks(4).run(_repeated, dtype):
        assert len(same) == 2
        assert set(same.values()) == {(True, True)}, same


# Against torchtitan.


def _torchtitans(layer: MoELayer, rank: int) -> Results:
    """What torchtitan's own dispatcher and experts give in the same place."""
    # Not on top: it takes seconds, which the ranks have spent already.
    from torchtitan.distributed.utils import get_spmd_backend, set_spmd_backend
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    share = layer.share(rank)
    leaves = fresh(share.leaves)
    _, hidden_dim, dim = leaves["w1"].shape
    top_k = share.ids_TK.shape[1]
    config = GroupedExperts.Config(dim=dim, hidden_dim=hidden_dim, num_experts=len(leaves["w1"]))
    experts = config.build()
    for (name, _), weight in zip([*experts.named_parameters()], WEIGHTS, strict=True):
        setattr(experts, name, torch.nn.Parameter(leaves[weight]))
    dispatcher = AllToAllTokenDispatcher.Config(num_experts=layer.num_experts, top_k=top_k).build()
    dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("ep",)))
    backend = get_spmd_backend()
    set_spmd_backend("partial_dtensor")
    try:
        counts_E = share.ids_TK.flatten().bincount(minlength=layer.num_experts)
        x_RD, counts_e, metadata = dispatcher.dispatch(
            leaves["x"], leaves["prob"], share.ids_TK, counts_E
        )
        y_TD = dispatcher.combine(experts(x_RD, counts_e), metadata, leaves["x"])
        y_TD.backward(share.grad_y_TD)
    finally:
        set_spmd_backend(backend)
    gradients = {name: leaves[name].grad for name in ("x", "prob")}
    weights = [parameter.grad for parameter in experts.parameters()]
    return {"y": y_TD.detach()} | gradients | dict(zip(WEIGHTS, weights, strict=True))


def _squared_errors(seeds: int) -> dict[str, Counter[str]]:
    """The sums of squared errors of torchtitan and of each level layout, for each result of this
    rank."""
    rank = dist.get_rank()
    all_levels = levels_of_four()
    errors: dict[str, Counter[str]] = {"torchtitan": Counter()} | {
        name: Counter() for name in all_levels
    }
    for seed in range(seeds):
        layer = random_layer(
            [90, 61, 75, 80], 16, 4, seed=seed, dtype=torch.bfloat16, dim=64, hidden_dim=48
        )
        exact = layer.exact()
        found = {"torchtitan": _torchtitans(layer, rank)} | {
            name: deduplicated(layer, levels, rank) for name, levels in all_levels.items()
        }
        for path, by_name in found.items():
            for name, result in by_name.items():
                difference = result.double() - layer.part(name, exact[name], rank)
                errors[path][name] += difference.square().sum().item()
    return errors


def test_results_are_at_least_as_close_to_fp64_as_torchtitans(ranks) -> None:
    """In bf16: outputs and the gradients of tokens, probabilities and weights."""
    by_rank = ranks(4).run(_squared_errors, 3)
    pooled = {path: sum((errors[path] for errors in by_rank), Counter()) for path in by_rank[0]}
    expected = pooled.pop("torchtitan")
    assert len(pooled) == 2
    for name, found in pooled.items():
        assert set(found) == set(expected) == {"y", "x", "prob", *WEIGHTS}
        for result, squared in found.items():
            assert squared <= expected[result], (name, result)
