"""A compressed reduce-scatter is bitwise identical to the uncompressed one.

At two ranks, where a sum has only one order, it is bitwise identical to baseline FSDP2.
"""

import itertools
import weakref
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.fsdp2 import ParamGroup
from narrowcast.reducescatter import codec, row_codec
from narrowcast.reducescatter.comm import NarrowReduceScatter
from narrowcast.reducescatter.reduce_op import reduction
from narrowcast.wire import exchange as exchange_module
from narrowcast.wire.coders import Zstd
from narrowcast.wire.exchange import exchange, pairwise_schedule
from narrowcast.wire.packet import Encoded
from tests.narrowcast.test_all_gather import MODES, VALUE
from tests.narrowcast.training import (
    DIM,
    Setup,
    build,
    build_two_layers,
    local,
    narrowed,
    same_bits,
    state_of,
    train,
)
from tests.wide import wide_but

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPS = {
    "sum": dist.ReduceOp.SUM,
    "average": dist.ReduceOp.AVG,
    "third": dist.ReduceOp.PREMUL_SUM(1 / 3),
}
CODED, RAW = {"compression": "entropy"}, {"compression": "none"}
GRADIENT_MODES = {
    "mixed bf16": {},
    **MODES,
    "accumulated unsynced": {"microbatches": 3, "synced": False},
    "reduced in bf16": {"reduced": torch.bfloat16},
    "scaled fp16": {"gathered": torch.float16, "reduced": torch.float16, "loss_scale": 2.0**10},
    "forced sum": {"force_sum": True},
    "divide factor": {"force_sum": True, "divide_factor": 3.0},
}
# Those of the two-rank test suffice where a mode concerns gathers or the optimizer.
OF_GATHERS = ("kept after forward", "resharded to pairs", "prefetched", "async", "recomputed")
OF_GATHERS += ("compiled", "adam", "adafactor", "forced sum")
ALWAYS = ("mixed bf16", "mixed fp32", "accumulated unsynced", "reduced in bf16", "divide factor")


def reduce_scatter(
    contribution: Tensor,
    op: Any,
    compression: codec.Compression = "entropy",
    async_op: bool = False,
) -> Tensor:
    """This rank's share of the reduction over all ranks, by narrowcast."""
    reduce = NarrowReduceScatter(ParamGroup("layer", (), _group=None), compression, Zstd())
    output = contribution.new_full((contribution.numel() // dist.get_world_size(),), torch.nan)
    work = reduce(output, contribution.clone(), dist.group.WORLD, op, async_op)
    assert (work is not None) == async_op
    if work is not None:
        work.wait()
    return output


def plain_reduce_scatter(contribution: Tensor, op: Any) -> Tensor:
    output = contribution.new_empty(contribution.numel() // dist.get_world_size())
    dist.reduce_scatter_single(output, contribution.clone(), op=op)
    return output


def reference(contribution: Tensor, op_name: str) -> Tensor:
    """The same share by gathering all contributions, and a sum in the order of the ranks."""
    world_size = dist.get_world_size()
    gathered = [torch.empty_like(contribution.view(torch.uint8)) for _ in range(world_size)]
    dist.all_gather(gathered, contribution.view(torch.uint8))
    shares = [rank.view(contribution.dtype).chunk(world_size)[dist.get_rank()] for rank in gathered]
    if op_name == "third":
        shares = [share * (1 / 3) for share in shares]
    total = shares[0]
    for share in shares[1:]:
        total = total + share
    return total / world_size if op_name == "average" else total


def contributions(n: int, dtype: torch.dtype, rank: int | None = None) -> dict[str, Tensor]:
    """What one rank gives to shares of ``n`` values, of every kind that the codec distinguishes."""
    rank = dist.get_rank() if rank is None else rank
    size = n * dist.get_world_size()
    generator = torch.Generator().manual_seed(1000 * n + rank)
    wide = torch.randn(size, generator=generator)
    wide *= torch.exp2(8 * torch.rand(size, generator=generator))
    sparse = wide.clone()
    sparse[torch.rand(size, generator=generator) < 0.9] = 0
    some_zeros = wide.clone()
    some_zeros.view(-1, n)[rank % 2 :: 2] = 0  # nothing for some of the owners
    kinds = {
        "wide": wide,
        "bf16-valued": wide.bfloat16(),
        "sparse": sparse,
        "zeros for some": some_zeros.bfloat16(),
        "zeros": torch.zeros(size),
    }
    return {name: values.to(dtype) for name, values in kinds.items()}


def _wrong_sums(n: int, max_chunk_values: int) -> list[str]:
    """Cases whose result is not the reference's, compression by compression; at two ranks
    plain's."""
    wrong = []
    with patch.object(row_codec, "MAX_CHUNK_VALUES", max_chunk_values):
        for dtype in DTYPES:
            kinds = contributions(n, dtype).items()
            for (kind, values), op_name in zip(kinds, itertools.cycle(OPS), strict=False):
                expected = {"reference": reference(values, op_name)}
                if dist.get_world_size() == 2 and op_name != "third":  # gloo has no PREMUL_SUM
                    expected["plain"] = plain_reduce_scatter(values, OPS[op_name])
                results = {
                    "none": reduce_scatter(values, OPS[op_name], "none"),
                    "entropy": reduce_scatter(values, OPS[op_name]),
                    "coded again": reduce_scatter(values, OPS[op_name], async_op=True),
                }
                for (a, x), (b, y) in itertools.product(results.items(), expected.items()):
                    if not same_bits([x], [y]):
                        wrong.append(f"{kind}, {dtype}, {op_name}: {a} is not {b}")
    return wrong


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("n", "max_chunk_values"), [(1, 1 << 17), (1001, 300)])
def test_the_sum_is_that_of_all_contributions_in_the_order_of_ranks(
    ranks, world_size: int, n: int, max_chunk_values: int
) -> None:
    assert ranks(world_size).run(_wrong_sums, n, max_chunk_values) == [[]] * world_size


def _wrong_sums_of_long_shares() -> list[str]:
    n = row_codec.MAX_CHUNK_VALUES + 1
    values = contributions(n, torch.float32)["wide"]
    expected = plain_reduce_scatter(values, dist.ReduceOp.AVG)
    return [] if same_bits([reduce_scatter(values, dist.ReduceOp.AVG)], [expected]) else ["long"]


def test_a_share_of_more_than_one_chunk_is_summed_as_plain(ranks) -> None:
    assert ranks(2).run(_wrong_sums_of_long_shares) == [[]] * 2


def _specials_as_plain(dtype: torch.dtype) -> tuple[bool, int, int]:
    """Whether NaN, infinities and all else are where plain has them; how many it has of each."""
    inf, nan, largest = torch.inf, torch.nan, torch.finfo(dtype).max
    by_rank = torch.tensor(
        [  # a value of rank 0, of rank 1, of any other
            [inf, 1, 1],
            [1, -inf, 1],
            [inf, -inf, 1],
            [nan, 1, 1],
            [1, nan, inf],
            [largest, largest, 0],
            [-largest, -largest, 0],
            [-0.0, -0.0, -0.0],
            [-0.0, 0.0, -0.0],
            [2, 3, 4],
        ]
    )
    values = by_rank[:, min(dist.get_rank(), 2)].repeat(20 * dist.get_world_size()).to(dtype)
    plain = plain_reduce_scatter(values, dist.ReduceOp.SUM)
    coded = reduce_scatter(values, dist.ReduceOp.SUM)
    numbers = ~plain.isnan()
    right = torch.equal(numbers, ~coded.isnan()) and same_bits([plain[numbers]], [coded[numbers]])
    return right, int((~numbers).sum()), int(plain.isinf().sum())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [2, 4])
def test_infinities_and_nan_reach_the_sum_as_in_plain(ranks, world_size: int, dtype) -> None:
    for right, num_nan, num_infinite in ranks(world_size).run(_specials_as_plain, dtype):
        assert right
        assert num_nan == 3 * 20
        assert num_infinite == 4 * 20


def _worst_errors(n: int, bf16_valued: bool) -> tuple[Tensor, Tensor]:
    """Of each value of this rank's share, the largest error of narrowcast's and of plain's sum.

    Each draw is dealt to the ranks in every order. Plain sums in a chain too, but of ranks in an
    order of its own, which differs by value: over all orders, both meet the same sums.
    """
    world_size = dist.get_world_size()
    worst, plain_worst = torch.zeros(2, n, dtype=torch.float64)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        draw = torch.randn(world_size, world_size * n, generator=generator)
        draw *= torch.exp2(20 * torch.rand(draw.shape, generator=generator))
        if bf16_valued:
            draw = draw.bfloat16().float()
        for order in itertools.permutations(range(world_size)):
            dealt = draw[list(order)]
            exact = dealt.double().sum(dim=0).chunk(world_size)[dist.get_rank()]
            mine = dealt[dist.get_rank()]
            for reduce, most in ((reduce_scatter, worst), (plain_reduce_scatter, plain_worst)):
                error = (reduce(mine, dist.ReduceOp.SUM).double() - exact).abs()
                torch.maximum(most, error, out=most)
    return worst, plain_worst


@pytest.mark.parametrize("bf16_valued", [True, False])
@pytest.mark.parametrize("world_size", [3, 4])
def test_the_error_of_a_sum_is_in_the_worst_case_at_most_that_of_plain(
    ranks, world_size: int, bf16_valued: bool
) -> None:
    for worst, plain_worst in ranks(world_size).run(_worst_errors, 400, bf16_valued):
        assert (plain_worst > 0).any()
        assert (worst <= plain_worst).all()


def _largest() -> None:
    reduce_scatter(torch.ones(8), dist.ReduceOp.MAX)


def test_an_operation_that_fsdp_does_not_ask_for_is_refused_on_every_rank(ranks) -> None:
    for outcome in ranks(2).outcomes(_largest):
        assert outcome.type == "ValueError"
        assert "SUM, AVG, PREMUL_SUM" in outcome.message


@pytest.mark.parametrize(("backend", "expected"), [("gloo", (1, 4)), ("nccl", (1 / 4, 1))])
def test_an_average_is_taken_where_the_backend_takes_it(backend: str, expected: tuple) -> None:
    """NCCL divides each contribution before it sums, gloo the sum."""
    group = SimpleNamespace(size=lambda: 4)
    with patch.object(dist, "get_backend", return_value=backend):
        assert reduction(dist.ReduceOp.AVG, group) == expected
        assert reduction(dist.ReduceOp.SUM, group) == (1, 1)
        assert reduction(dist.ReduceOp.PREMUL_SUM(1 / 3), group) == (1 / 3, 1)


def _swapped() -> list[tuple[int, bytes]]:
    """What arrives of texts whose lengths differ by pair of ranks."""
    rank = dist.get_rank()

    def payload_for(receiver: int) -> Tensor:
        return torch.frombuffer(bytearray(_text(rank, receiver)), dtype=torch.uint8)

    arrived = exchange(payload_for, dist.group.WORLD)
    return [(sender, bytes(payload.numpy())) for sender, payload in arrived]


def _text(sender: int, receiver: int) -> bytes:
    return f"from {sender} to {receiver} ".encode() * (1 + 7 * sender + receiver**5)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_rank_receives_what_was_meant_for_it(ranks, world_size: int) -> None:
    for rank, arrived in enumerate(ranks(world_size).run(_swapped)):
        assert len(arrived) == world_size - 1
        others = set(range(world_size)) - {rank}
        assert dict(arrived) == {sender: _text(sender, rank) for sender in others}


@pytest.mark.parametrize("world_size", range(1, 18))
def test_all_ranks_exchange_in_pairs_so_that_none_waits_for_one_that_waits(world_size: int) -> None:
    left = [list(pairwise_schedule(rank, world_size)) for rank in range(world_size)]
    for rank, order in enumerate(left):
        assert sorted(order) == [other for other in range(world_size) if other != rank]
    rounds = 0
    while any(left):
        pairs = [(a, left[a][0]) for a in range(world_size) if left[a] and left[left[a][0]][0] == a]
        assert pairs
        for a, b in pairs:
            assert left[a].pop(0) == b
        rounds += 1
    assert rounds <= world_size - 1 + world_size % 2


def _most_payloads_alive() -> int:
    made: list[weakref.ref[Tensor]] = []
    most = 0

    def start_pairwise(outgoing: Tensor, incoming: Tensor, *args: Any) -> list[dist.Work]:
        nonlocal most
        if outgoing.dtype == torch.uint8:  # not a size
            made.extend((weakref.ref(outgoing), weakref.ref(incoming)))
            most = max(most, sum(payload() is not None for payload in made))
        return original(outgoing, incoming, *args)

    original = exchange_module._start_pairwise
    with patch.object(exchange_module, "_start_pairwise", start_pairwise):
        reduce_scatter(torch.ones(4 * 100), dist.ReduceOp.SUM)
    return most


def test_four_payloads_exist_at_a_time(ranks) -> None:
    assert ranks(4).run(_most_payloads_alive) == [4] * 4


def _trained(setup: Setup) -> tuple[list[float], list[Tensor]]:
    model, optimizer = build(setup)
    with narrowed(setup, model, optimizer):
        return train(setup, model, optimizer), state_of(model, optimizer)


def _differing(setup: Setup, *others: dict[str, Any]) -> list[str]:
    """Trains as ``setup`` says and with each change of it: what came out otherwise."""
    losses, state = _trained(setup)
    assert len(losses) == setup.steps * setup.microbatches
    differing = []
    for change in others:
        other_losses, other_state = _trained(replace(setup, **change))
        if other_losses != losses:
            differing.append(f"{change}: losses")
        if not same_bits(other_state, state):
            differing.append(f"{change}: parameters or optimizer states")
    return differing


@pytest.mark.parametrize(
    "mode", wide_but([m for m in GRADIENT_MODES if m not in OF_GATHERS], "hsdp", *ALWAYS)
)
def test_compressed_gradients_train_as_uncompressed_ones_in_every_mode(ranks, mode: str) -> None:
    setup = replace(Setup(gradients=RAW, steps=2), **GRADIENT_MODES[mode])
    assert ranks(4).run(_differing, setup, {"gradients": CODED}) == [[]] * 4


OF_REPLICAS = ("hsdp", "many at once")  # which take four ranks to shard over two


@pytest.mark.parametrize(
    "mode", wide_but([m for m in GRADIENT_MODES if m not in OF_REPLICAS], *ALWAYS)
)
def test_at_two_ranks_every_mode_trains_as_plain_fsdp(ranks, mode: str) -> None:
    """With narrow gathers beside them, and the sum is plain's though its order is ours."""
    setup = replace(Setup(steps=2), **GRADIENT_MODES[mode])
    narrow_all = {"gradients": CODED, "narrow": VALUE}
    assert ranks(2).run(_differing, setup, narrow_all) == [[]] * 2


def test_gradients_are_divided_by_a_factor_that_gloo_cannot(ranks) -> None:
    """At four ranks and a factor of four, which is an average; at three, a product before it."""
    setup = Setup(gradients=RAW, divide_factor=3.0, steps=2)
    as_sum = {"gradients": CODED, "divide_factor": 3.0}
    assert ranks(4).run(_differing, setup, as_sum) == [[]] * 4
    average = replace(setup, divide_factor=4.0)
    assert ranks(4).run(_differing, average, {"divide_factor": None}) == [[]] * 4


def test_replicas_of_two_train_as_plain_fsdp(ranks) -> None:
    """HSDP over two by two ranks: each sum is of two, by us or by the all-reduce."""
    setup = Setup(replicas=2, steps=2)
    assert ranks(4).run(_differing, setup, {"gradients": CODED}) == [[]] * 4


def _forms_sent(setup: Setup) -> Counter[str]:
    forms = Counter()

    def encode(*args: Any) -> Encoded:
        encoded = codec_encode(*args)
        forms[encoded.form.name] += 1
        return encoded

    codec_encode = codec.encode
    with patch.object(codec, "encode", encode):
        _trained(setup)
    return forms


def test_only_sums_of_microbatches_are_sent_with_their_lower_halves(ranks) -> None:
    setup = Setup(gradients=CODED, microbatches=3, steps=2)
    for forms in ranks(2).run(_forms_sent, setup):
        assert set(forms) == {"PLANES"}
    for forms in ranks(2).run(_forms_sent, replace(setup, synced=False)):
        assert set(forms) == {"HALVES"}


def _overflown(gradients: dict[str, Any] | None) -> list[Tensor]:
    """Gradients of a loss that is scaled too far for fp16."""
    half = torch.float16
    setup = Setup(gathered=half, reduced=half, gradients=gradients)
    model, optimizer = build(setup)
    with narrowed(setup, model, optimizer):
        x_TD = torch.randn(7, DIM, generator=torch.Generator().manual_seed(dist.get_rank()))
        (model(x_TD).float().square().mean() * 2.0**17).backward()
    return [local(p.grad) for p in model.parameters() if p.grad is not None]


def _overflows_as_plain() -> tuple[bool, int]:
    plain, coded = _overflown(None), _overflown(CODED)
    alike = all(
        torch.equal(a.isnan(), b.isnan()) and same_bits([a.nan_to_num()], [b.nan_to_num()])
        for a, b in zip(plain, coded, strict=True)
    )
    return alike, sum(int(grad.isinf().sum()) for grad in coded)


def test_gradients_that_overflow_do_so_as_in_plain_on_every_rank(ranks) -> None:
    for alike, num_infinite in ranks(2).run(_overflows_as_plain):
        assert alike
        assert num_infinite > 0


def _with_an_unused_layer(gradients: dict[str, Any] | None) -> list[Tensor]:
    """Three steps, in the last of which alone the second layer has gradients."""
    model, optimizer = build_two_layers()
    with narrowed(Setup(gradients=gradients), model, optimizer):
        for step in range(3):
            x_TD = torch.ones(3, DIM) * (1 + dist.get_rank() + step)
            model(x_TD, uses_second=step == 2).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return state_of(model, optimizer)


def _unused_as_plain() -> bool:
    return same_bits(_with_an_unused_layer(CODED), _with_an_unused_layer(None))


def test_a_parameter_without_gradients_in_a_step_changes_nothing(ranks) -> None:
    assert ranks(2).run(_unused_as_plain) == [True] * 2
