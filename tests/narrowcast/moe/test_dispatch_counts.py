"""Every row that is sent is counted, and other work runs while rows are being sent."""

from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.moe import dispatch as module
from narrowcast.moe.dispatch import combine, dispatch
from narrowcast.moe.row_layout import RowLayout
from tests.narrowcast.moe.moe_layer import (
    MoELayer,
    deduplicated,
    fresh,
    levels_of_four,
    random_layer,
)


@pytest.mark.parametrize(
    ("layout", "nbytes"),
    [
        (RowLayout(13, torch.bfloat16, 3, 4), 48),  # 26, 2 of padding, 12, 3
        (RowLayout(16, torch.bfloat16, 9, 255), 80),  # 32, 36, 9
        (RowLayout(16, torch.bfloat16, 9, 256), 96),  # 32, 36, 18
        (RowLayout(16, torch.float32, 4, 0), 80),  # 64, 16
    ],
    ids=str,
)
def test_a_row_is_a_token_its_probabilities_and_experts_in_sixteens(layout, nbytes: int) -> None:
    assert layout.nbytes == nbytes


@dataclass(frozen=True)
class SentRows:
    """Rows that a rank sends to other ranks: to the experts of its tokens, and back to tokens."""

    to_experts: int
    to_tokens: int


def expected_rows(layer: MoELayer, rank: int) -> dict[str, SentRows]:
    """By nothing but the tokens' experts: rows between ranks; between nodes, and within one of what
    was passed on; and the copies that plain expert parallelism sends."""
    ids_RTK = [ids_TK.tolist() for ids_TK in layer.ids_TK.split(layer.tokens_R)]
    node, number = divmod(rank, 2)
    others, across, peer = {0, 1, 2, 3} - {rank}, 2 * (1 - node) + number, rank ^ 1

    def ranks_of(ids: list[int]) -> set[int]:
        return {i // 4 for i in ids}

    def nodes_of(ids: list[int]) -> set[int]:
        return {i // 8 for i in ids}

    def passed_on(by: int) -> list[list[int]]:
        return [*ids_RTK[by % 2], *ids_RTK[2 + by % 2]]

    return {
        "ranks": SentRows(
            to_experts=sum(len(ranks_of(ids) & others) for ids in ids_RTK[rank]),
            to_tokens=sum(rank in ranks_of(ids) for other in others for ids in ids_RTK[other]),
        ),
        "nodes": SentRows(
            to_experts=sum(1 - node in nodes_of(ids) for ids in ids_RTK[rank]),
            to_tokens=sum(node in nodes_of(ids) for ids in ids_RTK[across]),
        ),
        "within": SentRows(
            to_experts=sum(peer in ranks_of(ids) for ids in passed_on(rank)),
            to_tokens=sum(rank in ranks_of(ids) for ids in passed_on(peer)),
        ),
        "copies": SentRows(
            to_experts=sum(i // 4 != rank for ids in ids_RTK[rank] for i in ids),
            to_tokens=sum(
                i // 4 == rank for other in others for ids in ids_RTK[other] for i in ids
            ),
        ),
    }


Counted = tuple[str, int, int, int]


def _counted(layer: MoELayer) -> tuple[int, dict[str, list[Counted]]]:
    counted: dict[str, list[Counted]] = {}
    for name, levels in levels_of_four().items():
        calls = counted[name] = []
        deduplicated(layer, levels, dist.get_rank(), count=lambda *of, to=calls: to.append(of))
    return dist.get_rank(), counted


def test_every_row_and_byte_is_counted_and_what_plain_expert_parallelism_would_send(ranks) -> None:
    """Forward and backward; of two levels, those that a rank passes on too."""
    layer = random_layer([11, 6, 0, 8], 16, 5, dtype=torch.bfloat16, dim=24)
    token = 48
    row = 80  # with 5 probabilities and experts, or 4, in 16s
    gradient_row = {5: 80, 4: 64}  # without experts
    plain_counts = 3 * 4 * 8  # to three ranks, of each expert
    for rank, counted in ranks(4).run(_counted, layer):
        rows = expected_rows(layer, rank)
        ranks_, nodes, within, copies = rows.values()
        there, back = copies.to_experts * token, copies.to_tokens * token
        assert counted["one level"] == [
            ("dispatch", 0, 3 * 3 * 8, plain_counts),
            ("dispatch", ranks_.to_experts, ranks_.to_experts * row, there),
            ("combine", ranks_.to_tokens, ranks_.to_tokens * token, back),
            ("combine", ranks_.to_experts, ranks_.to_experts * token, there),
            ("dispatch", ranks_.to_tokens, ranks_.to_tokens * gradient_row[4], back),
        ]
        assert counted["two levels"] == [
            ("dispatch", 0, 4 * 8, 0),
            ("dispatch", nodes.to_experts, nodes.to_experts * row, 0),
            ("dispatch", 0, 3 * 8, plain_counts),
            ("dispatch", within.to_experts, within.to_experts * row, there),
            ("combine", within.to_tokens, within.to_tokens * token, back),
            ("combine", nodes.to_tokens, nodes.to_tokens * token, 0),
            ("combine", nodes.to_experts, nodes.to_experts * token, 0),
            ("combine", within.to_experts, within.to_experts * token, there),
            ("dispatch", within.to_tokens, within.to_tokens * gradient_row[4], back),
            ("dispatch", nodes.to_tokens, nodes.to_tokens * gradient_row[5], 0),
        ]
        assert rank == 2 or 0 < ranks_.to_experts < copies.to_experts


def _watched() -> dict[str, tuple[list[str], bool]]:
    """What happens in which order, and whether what ran meanwhile has its gradient."""
    layer = random_layer([5, 6, 7, 8], 8, 3).share(dist.get_rank())
    watched = {}
    for name, levels in levels_of_four().items():
        leaves, events = fresh(layer.leaves), []
        shared: list[Tensor] = []

        def meanwhile(x=leaves["x"], events=events, shared=shared) -> None:
            events.append("meanwhile")
            hidden_TD = x * 3
            hidden_TD.register_hook(lambda _: events.append("meanwhile"))
            shared.append(hidden_TD * 2)

        def noted(event: str, function: Callable, events=events) -> Callable:
            def call(*args, **kwargs):
                events.append(event)
                return function(*args, **kwargs)

            return call

        starting = noted("start", module.start_all_to_all)
        waiting = noted("wait", module.finish_all_to_all)
        with (
            patch.object(module, "start_all_to_all", starting),
            patch.object(module, "finish_all_to_all", waiting),
        ):
            x_TD, prob_TK = leaves["x"], leaves["prob"]
            dispatched = dispatch(x_TD, prob_TK, layer.ids_TK, 8, levels, meanwhile=meanwhile)
            y_TD = combine(dispatched.x_SD, dispatched)
            events.append("end")
            (y_TD + shared[0]).backward(layer.grad_y_TD)
        num_ranks = torch.stack([layer.ids_TK // 2 == r for r in range(4)]).any(2).sum(0)
        expected_TD = layer.grad_y_TD * (num_ranks[:, None] + 6)
        watched[name] = events, torch.allclose(x_TD.grad, expected_TD)
    return watched


def test_what_runs_meanwhile_runs_between_start_and_wait_in_backward_too(ranks) -> None:
    hop, with_meanwhile = ["start", "wait"], ["start", "meanwhile", "wait"]
    for watched in ranks(4).run(_watched):
        # Counts are exchanged, then tokens are sent; then the partial sums come back.
        assert watched["one level"] == (
            [*hop, *with_meanwhile, *hop, "end", *hop, *with_meanwhile],
            True,
        )
        assert watched["two levels"] == (
            [*hop, *with_meanwhile, *hop * 4, "end", *hop * 3, *with_meanwhile],
            True,
        )
