"""Recording a model's routers: every token once, with its position, and joined over ranks."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from narrowcast.placement.recording import (
    RecordedTokens,
    RoutingRecorder,
    evenly_spaced,
    joined,
    trace_of,
)

LAYERS = ("layers.0.moe", "layers.1.moe")
EXPERTS, TOP_K, DIM = 8, 2, 4


class TwoRouters(nn.Module):
    """Calls its recorder as a model's dispatchers do, and then overwrites what it gave."""

    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(DIM, EXPERTS, bias=False) for _ in LAYERS)
        self.recomputed = recomputed
        self.recorder: RoutingRecorder | None = None
        self.calls = 0
        self.selected: list[tuple[Tensor, Tensor]] = []

    def forward(self, x_TD: Tensor) -> Tensor:
        for layer in range(len(LAYERS)):
            if self.recomputed:
                x_TD = checkpoint(self.layer, layer, x_TD, use_reentrant=False)
            else:
                x_TD = self.layer(layer, x_TD)
        return x_TD

    def layer(self, layer: int, x_TD: Tensor) -> Tensor:
        score_TK, ids_TK = self.routers[layer](x_TD).topk(TOP_K)
        self.calls += 1
        self.selected.append((ids_TK.clone(), score_TK.detach().clone()))
        given = ids_TK.clone(), score_TK.detach().clone()
        self.recorder.record(layer, *given)
        for buffer in given:
            buffer.fill_(0)
        # Needs its input in the backward: recomputation goes on to here.
        return x_TD + score_TK.square().sum(dim=-1, keepdim=True)


def recorded_model(
    recomputed: bool = False, num_experts: int = EXPERTS, **options
) -> tuple[TwoRouters, RoutingRecorder]:
    torch.manual_seed(0)
    model = TwoRouters(recomputed)
    model.recorder = RoutingRecorder(model, LAYERS, num_experts, rank=3, **options)
    return model, model.recorder


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, torch.uint8), (300, torch.int16)])
def test_what_each_router_selected_is_recorded_though_its_buffer_is_overwritten(
    num_experts, dtype
) -> None:
    model, recorder = recorded_model(num_experts=num_experts)
    with recorder.recording(step=5):
        model(tokens(6))
    recorded = recorder.take()
    assert (recorded.layers, recorded.rank) == (LAYERS, 3)
    assert recorded.step_T.tolist() == [5] * 6
    assert recorded.position_T.tolist() == list(range(6))
    assert recorded.ids_LTK.dtype == dtype
    assert torch.equal(recorded.ids_LTK.long(), torch.stack([ids for ids, _ in model.selected]))
    assert recorded.scores_LTK is None


def test_ids_that_come_in_the_dtype_of_the_record_are_copied_too() -> None:
    model, recorder = recorded_model(scores=True)
    ids_TK, scores_TK = torch.tensor([[1, 2]], dtype=torch.uint8), torch.tensor([[0.5, 0.25]])
    model.forward = lambda: [recorder.record(layer, ids_TK, scores_TK) for layer in range(2)]
    with recorder.recording(step=1):
        model()
        ids_TK.fill_(7), scores_TK.fill_(7)
    recorded = recorder.take()
    assert recorded.ids_LTK.tolist() == [[[1, 2]]] * 2
    assert recorded.scores_LTK.tolist() == [[[0.5, 0.25]]] * 2


@pytest.mark.parametrize("recomputed", [False, True])
def test_recomputation_in_the_backward_counts_no_token_again(recomputed) -> None:
    model, recorder = recorded_model(recomputed)
    with recorder.recording(step=1):
        model(tokens(6)).sum().backward()
        assert model.calls == (4 if recomputed else 2)
        model(tokens(6, seed=1)).sum().backward()
    recorded = recorder.take()
    assert recorded.position_T.tolist() == list(range(12))
    assert recorded.ids_LTK.shape == (2, 12, TOP_K)
    unlimited, unlimited_recorder = recorded_model()
    with unlimited_recorder.recording(step=1):
        unlimited(tokens(6)), unlimited(tokens(6, seed=1))
    assert torch.equal(recorded.ids_LTK, unlimited_recorder.take().ids_LTK)


def test_of_a_layer_that_runs_twice_in_a_forward_the_first_time_counts() -> None:
    model, recorder = recorded_model()
    first, second = torch.tensor([[1, 2]]), torch.tensor([[3, 4]])
    model.forward = lambda: [
        recorder.record(layer, ids, ids.float()) for ids in (first, second) for layer in range(2)
    ]
    with recorder.recording(step=1):
        model()
    assert recorder.take().ids_LTK.tolist() == [[[1, 2]]] * 2


def test_microbatches_of_a_step_follow_one_another_and_a_step_starts_at_zero() -> None:
    model, recorder = recorded_model(scores=True)
    for step, sizes in ((2, (3, 4)), (7, (2,))):
        with recorder.recording(step):
            for size in sizes:
                model(tokens(size, seed=size))
    recorded = recorder.take()
    assert recorded.step_T.tolist() == [2] * 7 + [7] * 2
    assert recorded.position_T.tolist() == [*range(7), 0, 1]
    by_layer = [model.selected[0::2], model.selected[1::2]]
    for layer, selected in enumerate(by_layer):
        ids_TK, scores_TK = (torch.cat(parts) for parts in zip(*selected, strict=True))
        assert torch.equal(recorded.ids_LTK[layer].long(), ids_TK)
        assert torch.equal(recorded.scores_LTK[layer], scores_TK)


def test_nothing_is_recorded_outside() -> None:
    model, recorder = recorded_model()
    model(tokens(3))
    with recorder.recording(step=1):
        pass
    model(tokens(3))
    assert recorder.take() is None


def test_a_forward_that_fails_leaves_no_half_microbatch() -> None:
    model, recorder = recorded_model()
    whole = model.layer

    def second_layer_fails(layer: int, x_TD: Tensor) -> Tensor:
        if layer == 1:
            raise MemoryError
        return whole(layer, x_TD)

    model.layer = second_layer_fails
    with pytest.raises(MemoryError), recorder.recording(step=1):
        model(tokens(3))
    model.layer = whole
    with recorder.recording(step=2):
        model(tokens(4))
    recorded = recorder.take()
    assert recorded.step_T.tolist() == [2] * 4
    assert recorded.position_T.tolist() == [0, 1, 2, 3]


def test_a_limit_keeps_evenly_spaced_tokens_at_their_own_positions() -> None:
    model, recorder = recorded_model(scores=True, max_tokens=4)
    with recorder.recording(step=1):
        model(tokens(10)), model(tokens(3, seed=1)), model(tokens(8, seed=2))
    recorded = recorder.take()
    expected = [0, 2, 5, 7]  # of 10
    positions = [*expected, 10, 11, 12, 13, 15, 17, 19]
    assert recorded.position_T.tolist() == positions
    for layer in range(2):
        ids_TK, scores_TK = (torch.cat(p) for p in zip(*model.selected[layer::2], strict=True))
        assert torch.equal(recorded.ids_LTK[layer].long(), ids_TK[positions])
        assert torch.equal(recorded.scores_LTK[layer], scores_TK[positions])


@pytest.mark.parametrize(
    ("num_tokens", "at_most", "expected"),
    [
        (5, None, [0, 1, 2, 3, 4]),
        (5, 5, [0, 1, 2, 3, 4]),
        (5, 9, [0, 1, 2, 3, 4]),
        (9, 3, [0, 3, 6]),
        (10, 4, [0, 2, 5, 7]),
        (10, 1, [0]),
        (0, 3, []),
        (0, None, []),
    ],
)
def test_evenly_spaced_tokens(num_tokens, at_most, expected) -> None:
    assert evenly_spaced(num_tokens, at_most).tolist() == expected


def test_taking_empties_the_recorder() -> None:
    model, recorder = recorded_model()
    with recorder.recording(step=1):
        model(tokens(3))
        assert recorder.take().position_T.tolist() == [0, 1, 2]
        model(tokens(2))
        assert recorder.take().position_T.tolist() == [3, 4]
    assert recorder.take() is None


def test_a_removed_recorder_leaves_no_hook() -> None:
    model, recorder = recorded_model()
    recorder.remove()
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    with recorder.recording(step=1):
        model(tokens(3))
    assert recorder.take() is None


def part(rank: int, layers: tuple[str, ...], steps: list[int], scores: bool) -> RecordedTokens:
    """Two tokens of each step, whose ids and scores say whose they are."""
    step_T = torch.tensor(steps).repeat_interleave(2)
    position_T = torch.tensor([0, 3] * len(steps))
    names = torch.tensor([int(name[-1]) for name in layers])
    ids_LT = 100 * names[:, None] + 20 * step_T + 6 * rank + position_T
    ids_LTK = ids_LT[..., None] + torch.arange(2)
    return RecordedTokens(
        layers, rank, step_T, position_T, ids_LTK, ids_LTK / 1000 if scores else None
    )


@pytest.mark.parametrize("scores", [False, True])
def test_ranks_join_in_the_order_of_step_rank_and_position_and_stages_by_layer(scores) -> None:
    stages = [("moe.0",), ("moe.2", "moe.1")]
    recorded = [
        part(rank, layers, [1, 2], scores) for layers in reversed(stages) for rank in (2, 0, 1)
    ]
    names = ("moe.0", "moe.1", "moe.2")
    trace = trace_of(recorded, names, model="m", num_experts=400, num_ranks=3)
    assert (trace.model, trace.layers, trace.num_experts, trace.num_ranks) == ("m", names, 400, 3)
    assert trace.step_T.tolist() == [1] * 6 + [2] * 6
    assert trace.rank_T.tolist() == [0, 0, 1, 1, 2, 2] * 2
    assert trace.position_T.tolist() == [0, 3] * 6
    own_T = 20 * trace.step_T + 6 * trace.rank_T + trace.position_T
    expected_LTK = (torch.tensor([0, 100, 200])[:, None] + own_T)[..., None] + torch.arange(2)
    assert torch.equal(trace.ids_LTK, expected_LTK)
    if scores:
        assert torch.equal(trace.scores_LTK, expected_LTK / 1000)
    else:
        assert trace.scores_LTK is None


def test_parts_of_one_rank_join_one_after_the_other() -> None:
    first, second = part(1, ("moe.0",), [1], True), part(1, ("moe.0",), [2], True)
    both = joined([first, second])
    assert both.step_T.tolist() == [1, 1, 2, 2]
    assert torch.equal(both.ids_LTK, torch.cat([first.ids_LTK, second.ids_LTK], dim=1))
    assert torch.equal(both.scores_LTK, torch.cat([first.scores_LTK, second.scores_LTK], dim=1))
    without = [replace(one, scores_LTK=None) for one in (first, second)]
    assert joined(without).scores_LTK is None
