"""Tokens are sent once to each rank in torchtitan's own trainer."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from narrowcast.moe.routing_error import RoutingError
from narrowcast.placement.trace import RoutingTrace, load_trace
from narrowcast.telemetry.ledger import Ledger
from narrowcast.telemetry.over_ranks import reduce_over_ranks
from tests.narrowcast.training import same_bits
from tests.ranks import Raised, Ranks
from tests.torchtitan_ext.test_placement import (
    EP2,
    EP4,
    EP4_TP2,
    FULL,
    NARROWED,
    SAVE,
    TRACE,
    UNCLIPPED,
    _assert_equal,
    _placed,
    _run,
    _run_without_us,
    _toml,
)
from tests.torchtitan_ext.tiny import Trained, build, once, train
from torchtitan_ext.dispatch.hooks import count_dispatch, set_up_dispatch
from torchtitan_ext.private import moe_layers

DEDUPLICATED = ("--narrowcast.dispatch.deduplicate",)
TWO_NODES = (*DEDUPLICATED, "--narrowcast.dispatch.nodes", "2")
TP2 = ("--parallelism.tensor_parallel_degree", "2")
ACCUMULATED = ("--training.global_batch_size", "4")


def _assert_close(one: list[Trained], other: list[Trained]) -> None:
    """As near as sums in another order leave a few steps of AdamW."""
    for a, b in zip(one, other, strict=True):
        assert a.losses == pytest.approx(b.losses[: len(a.losses)], rel=1e-4)
        assert a.metrics[0]["grad_norm"] == pytest.approx(b.metrics[0]["grad_norm"], rel=1e-3)
        assert a.state.keys() == b.state.keys()
        assert [t.shape for t in a.state.values()] == [t.shape for t in b.state.values()]


@pytest.mark.parametrize(
    ("config", "world_size", "flags", "ours"),
    [
        # Experts sharded by FSDP too, everything else narrowed.
        ("top4", 4, EP2, (*DEDUPLICATED, *NARROWED)),
        # Shared experts, groups, TP < EP; two levels, under a placement.
        ("deepseek", 4, EP4_TP2, TWO_NODES),
        # TP = EP.
        pytest.param("deepseek", 2, (*EP2, *TP2), DEDUPLICATED, marks=pytest.mark.wide),
    ],
    ids=["ep 2, fsdp", "two levels, ep 4, tp 2", "tp 2 = ep 2"],
)
def test_training_is_that_of_torchtitan_but_for_the_order_of_sums(
    ranks,
    folder: Path,
    config: str,
    world_size: int,
    flags: tuple[str, ...],
    ours: tuple[str, ...],
) -> None:
    """And a second run is bitwise identical."""
    where = f"{config}{world_size}{len(flags)}"
    plain = once(ranks(world_size), folder, *UNCLIPPED, *flags, config=config)
    flags = (*flags, "--training.steps", "2")
    if world_size == 4:
        ours = (*ours, *_placed(folder, int(flags[1]), config=config))
    one, again = (
        _run(ranks(world_size), folder, f"{where}-{name}", *flags, *ours, config=config)
        for name in ("one", "again")
    )
    _assert_close(one, plain)
    assert len(one[0].losses) == 2
    is_on = [any("rows_removed" in name for name in run[0].metrics[0]) for run in (one, plain)]
    assert is_on == [True, False]
    _assert_equal(one, again)


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputed_tokens_take_the_same_path(ranks, folder: Path, kind: str) -> None:
    """With shared experts, which are computed once in each forward, while rows are being sent."""
    flags = (*UNCLIPPED, *EP2, *ACCUMULATED, *DEDUPLICATED, "--training.steps", "2")
    toml = _toml(folder, f"recomputed-{kind}", "deepseek")
    with Path(toml).open("a") as file:
        file.write(f'[activation_checkpoint]\ntype = "{kind}"\n')
    runs = once(ranks(2), folder, *flags, config="deepseek"), ranks(2).run(train, toml, *flags)
    for saved, recomputed in zip(*runs, strict=True):
        assert saved.losses == recomputed.losses
        assert same_bits(list(saved.state.values()), list(recomputed.state.values()))
    saved, recomputed = (
        [run[0].metrics[0][f"narrowcast/bytes/{name}"] for name in ("dispatch", "combine")]
        for run in runs
    )
    if kind == "selective":  # torchtitan saves what was sent
        assert recomputed == saved
    else:
        assert all(new > old for new, old in zip(recomputed, saved, strict=True))


def _wrong_expert(expert_id: int) -> str:
    """What a placed dispatcher raises where one rank's router names an expert so."""
    from torch.distributed.device_mesh import init_device_mesh

    from torchtitan_ext.dispatch.overrides import DeduplicatingTokenDispatcher

    dispatcher = DeduplicatingTokenDispatcher.Config(num_experts=4, top_k=2).build()
    dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    dispatcher.hooks.slots_E = torch.tensor([2, 0, 3, 1])
    ids_TK = torch.tensor([[0, 1], [2, 3], [1, 0]])
    if dist.get_rank() == 1:
        ids_TK[1, 1] = expert_id
    with pytest.raises(RoutingError) as raised:
        dispatcher.dispatch(torch.ones(3, 8), torch.ones(3, 2), ids_TK, torch.ones(4))
    return str(raised.value)


@pytest.mark.parametrize(
    ("expert_id", "named"), [(2, "slot 3 twice"), (-1, "slot -1, but"), (4, "slot 4, but")]
)
def test_an_expert_that_does_not_exist_is_one_error_on_every_rank(
    ranks, expert_id: int, named: str
) -> None:
    """Under a placement, whose table of slots has no entry for such experts."""
    one, other = ranks(2).run(_wrong_expert, expert_id)
    assert one == other
    assert one.startswith(f"rank 1: token 1 is routed to {named}")


def test_shared_experts_are_computed_while_rows_are_being_sent(ranks, folder: Path) -> None:
    """Once in a forward, between start and wait; in backward their gradients too."""
    flags = (*EP2, *DEDUPLICATED, "--training.steps", "1")
    for events in ranks(2).run(_events, _toml(folder, "events", "deepseek"), *flags):
        shared = [i for i, event in enumerate(events) if event.startswith("shared")]
        assert [events[i] for i in shared] == ["shared"] * 2 + ["shared gradient"] * 2
        for i in shared:
            # Started, and not waited for.
            assert events[:i].count("start") == events[:i].count("finish") + 1


def _events(toml: str, *flags: str) -> list[str]:
    """What happens in a step: exchanges start and finish, shared experts compute."""
    from narrowcast.moe import dispatch

    events: list[str] = []

    def noted(name: str, call: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            return call(*args, **kwargs)

        return run

    def note_gradient(module: Any, args: Any, out: torch.Tensor) -> None:
        events.append("shared")
        out.register_hook(lambda _: events.append("shared gradient"))

    def watch(trainer: Any) -> None:
        for moe in moe_layers(trainer.model_parts[0]).values():
            moe.shared_experts.w1.register_forward_hook(note_gradient)

    start, finish = dispatch.start_all_to_all, dispatch.finish_all_to_all
    with (
        patch.object(dispatch, "start_all_to_all", noted("start", start)),
        patch.object(dispatch, "finish_all_to_all", noted("finish", finish)),
    ):
        train(toml, *flags, before=watch)
    return events


def test_the_ledger_counts_what_the_trace_says(ranks, folder: Path) -> None:
    """Rows and bytes of every rank, forward and backward; C_T by layer; the same routing."""
    flags = (*EP4, *TRACE[:1], "--training.steps", "2")
    traces, runs = {}, {}
    for name, ours in (("plain", ()), ("once", DEDUPLICATED), ("nodes", TWO_NODES)):
        runs[name] = _run(ranks(4), folder, f"counted-{name}", *flags, *ours)
        traces[name] = load_trace(folder / f"counted-{name}" / "routing_trace.safetensors")
    # Before the first sums of another order, everything that is routed is routed alike.
    assert torch.equal(traces["once"].ids_LTK[0], traces["plain"].ids_LTK[0])
    for name in ("once", "nodes"):
        trace, metrics = traces[name], runs[name][0].metrics[0]
        for layer, ids_TK in zip(trace.layers, trace.ids_LTK, strict=True):
            is_sent_TR = _sent(ids_TK)
            rows = is_sent_TR.sum().item() / trace.num_tokens
            assert metrics[f"narrowcast/rows_per_token/{layer}"] == pytest.approx(rows)
            removed = metrics[f"narrowcast/rows_removed/{layer}"]
            assert removed == pytest.approx(1 - rows / 4)
            local = (ids_TK // 2 == trace.rank_T[:, None]).float().mean().item()
            assert metrics[f"narrowcast/local_share/{layer}"] == pytest.approx(local)
    trace, metrics = traces["once"], runs["once"][0].metrics[0]
    there_R, back_R = _rows_by_rank(trace)
    token_bytes, message_bytes, gradient_bytes = 48 * 2, 112, 112  # 48 bf16, 2 fp32, 2 ids: to 16
    counts = 2 * 3 * 24
    dispatch_R = there_R * message_bytes + back_R * gradient_bytes + counts
    assert metrics["narrowcast/bytes/dispatch"] == dispatch_R.max()
    assert metrics["narrowcast/bytes/combine"] == ((there_R + back_R) * token_bytes).max()
    plain = runs["plain"][0].metrics[0]
    assert metrics["narrowcast/plain_bytes/combine"] == plain["narrowcast/bytes/combine"]
    nodes = runs["nodes"][0].metrics[0]
    on_nodes = _sent(traces["nodes"].ids_LTK[0]).view(-1, 2, 2).any(dim=2).sum().item()
    per_token = on_nodes / traces["nodes"].num_tokens
    assert nodes["narrowcast/nodes_per_token/layers.0.moe"] == pytest.approx(per_token)


def _sent(ids_TK: torch.Tensor) -> torch.Tensor:
    """(T, R) whether a token goes to a rank, of 8 experts on 4 ranks."""
    is_sent_TR = torch.zeros(len(ids_TK), 4, dtype=torch.bool)
    return is_sent_TR.scatter_(1, ids_TK.long() // 2, True)


def _rows_by_rank(trace: RoutingTrace) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that each rank sends to others in dispatch, and gets, of all layers."""
    there_R, back_R = torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.long)
    for ids_TK in trace.ids_LTK:
        home_T = trace.rank_T.long()
        is_sent_TR = _sent(ids_TK)
        is_sent_TR[torch.arange(len(home_T)), home_T] = False
        there_R.index_add_(0, home_T, is_sent_TR.sum(dim=1))
        back_R += is_sent_TR.sum(dim=0)
    return there_R, back_R


def test_a_checkpoint_resumes_in_torchtitan_itself(ranks, folder: Path) -> None:
    half = (*EP2, *SAVE, FULL, "--training.steps", "2")
    saved = _run(ranks(2), folder, "crossed-once", *half, *DEDUPLICATED, *_placed(folder, 2))
    again = (*EP2, *SAVE, FULL)
    ours = _run(ranks(2), folder, "crossed-whole", *again, *DEDUPLICATED, *_placed(folder, 2))
    rest = _run_without_us(ranks(2), folder, "crossed-once", *again)
    assert saved[0].losses == ours[0].losses[:2]
    assert len(rest[0].losses) == 2
    assert rest[0].losses == pytest.approx(ours[0].losses[2:], rel=1e-4)


def test_what_cannot_work_is_refused_on_every_rank_alike(ranks, folder: Path) -> None:
    assert "expert_parallel_degree = 1" in _refusal(ranks(2), folder)
    nodes = (*EP2, "--narrowcast.dispatch.nodes")
    refused = "nodes = 3 cannot work with parallelism.expert_parallel_degree = 2"
    assert refused in _refusal(ranks(2), folder, *nodes, "3")
    planned = ("--narrowcast.placement.after_steps", "1", "--narrowcast.placement.nodes", "4")
    refusal = _refusal(ranks(2), folder, *EP4, "--narrowcast.dispatch.nodes", "2", *planned)
    assert "narrowcast.placement.nodes = 4, but narrowcast.dispatch.nodes = 2" in refusal
    assert "compile.enable = true" in _refusal(ranks(2), folder, *EP2, "--compile.enable")
    assert "needs a CUDA device" in _refusal(
        ranks(2), folder, *EP2, "--narrowcast.dispatch.kernels", "triton"
    )
    other = _refusal(ranks(2), folder, *EP2, config="other_experts")
    assert "the experts of layers.0.moe are OtherExperts" in other
    fused = "torchtitan.overrides.fused_swiglu.fused_grouped_experts"
    ours = "torchtitan_ext.dispatch.overrides.experts"
    # Listed by hand as well, it is not listed twice.
    both = ("--override.imports", f"{fused},{ours}")
    assert f"'{fused}' and '{ours}' both claim" in _refusal(ranks(2), folder, *EP2, *both)


def test_a_pipeline_stage_without_moe_layers_takes_part_in_what_all_ranks_do(
    ranks, folder: Path
) -> None:
    """torchtitan's pipelines do not run on this torch: a stage is stood in for."""
    scalars = ranks(2).run(_set_up_stages, _toml(folder, "stages"), *EP2, *DEDUPLICATED)
    assert scalars[0] == scalars[1]
    assert scalars[0]["narrowcast/rows_per_token/layers.1.moe"] == 1.5


def _set_up_stages(toml: str, *flags: str) -> dict[str, float]:
    """The second rank has no MoE layers; the first one's dispatch 2 tokens as 3 rows."""

    def both(trainer: Any) -> None:
        rank = dist.get_rank()
        parts = trainer.model_parts if rank == 0 else [torch.nn.Linear(1, 1)]
        dims = trainer.parallel_dims
        stage = SimpleNamespace(model_parts=parts, parallel_dims=dims, config=trainer.config)
        set_up_dispatch(stage)
        ledger = Ledger()
        count_dispatch(stage, ledger)
        if rank == 0:
            tokens = ledger.current.tokens["layers.1.moe"]
            tokens.tokens, tokens.assignments, tokens.rank_rows = 2, 8, 3
        scalars.update(reduce_over_ranks(ledger.current, torch.device("cpu")).scalars())

    scalars: dict[str, float] = {}
    build(toml, *flags, then=both)
    return scalars


def _refusal(ranks: Ranks, folder: Path, *flags: str, config: str = "top4") -> str:
    outcomes = ranks.outcomes(build, _toml(folder, "refused", config), *flags, *DEDUPLICATED)
    assert all(isinstance(outcome, Raised) for outcome in outcomes), flags
    assert len({outcome.message for outcome in outcomes}) == 1
    return outcomes[0].message
