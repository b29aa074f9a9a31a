"""The ledger's bookkeeping, in one process: what is counted, under which name, in which step."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from narrowcast.attribution import counted_by_caller
from narrowcast.fsdp2 import ParamGroup, is_default
from narrowcast.telemetry.changes import SHARD_TYPES, Changes, count_changes, shard_type
from narrowcast.telemetry.counted import count_volume
from narrowcast.telemetry.ledger import Ledger, all_reduce_bytes, ledger_of
from narrowcast.telemetry.over_ranks import reduce_over_ranks
from narrowcast.telemetry.step_volume import (
    COLLECTIVES,
    GatherVolume,
    GradientVolume,
    StepVolume,
    TokenVolume,
)
from narrowcast.wire import floats
from narrowcast.wire.floats import LAYOUTS


def group(name: str) -> ParamGroup:
    return ParamGroup(name, (f"{name}.weight",), _group=None)


@pytest.fixture
def _rank_1_of_4() -> Iterator[None]:
    """A process group whose collectives send nothing and return at once."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tok_embeddings.weight", "embedding"),
        ("embed_tokens.weight", "embedding"),
        ("lm_head.weight", "embedding"),
        ("output.weight", "embedding"),
        ("norm.weight", "norm"),
        ("layers.0.attention_norm.weight", "norm"),
        ("layers.0.attention.q_norm.weight", "norm"),
        ("layers.0.attention.wq.weight", "attention"),
        ("layers.0.attention.wkv_b.weight", "attention"),
        ("layers.0.self_attn.o_proj.weight", "attention"),
        ("layers.0.moe.router.gate.weight", "router"),
        ("model.layers.0.mlp.gate.weight", "router"),
        ("layers.0.moe.experts.w1", "expert_ffn"),
        ("layers.0.moe.shared_experts.w2.weight", "expert_ffn"),
        ("model.layers.0.mlp.experts.3.gate_proj.weight", "expert_ffn"),
        ("layers.0.feed_forward.w1.weight", "other"),
        ("model.layers.0.mlp.gate_proj.weight", "other"),
    ],
)
def test_a_shard_is_of_the_kind_that_its_name_refers_to(name, kind):
    assert shard_type(name) == kind
    assert kind in SHARD_TYPES


@pytest.mark.parametrize("dtype", LAYOUTS, ids=str)
@pytest.mark.parametrize("caches_values", [True, False])
@pytest.mark.parametrize("block_size", [1, 7, 512, 5000])
def test_changes_are_counted_as_one_value_at_a_time_would(dtype, caches_values, block_size):
    layout = LAYOUTS[dtype]
    for size in (1, 8, 513, 1400):
        old = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
        old = old.view(layout.bits)
        new = old.clone()
        new[::5] ^= 1  # a mantissa
        new[3::70] ^= 1 << layout.mantissa_bits  # an exponent
        cached = old if caches_values else floats.exponents(old, layout)
        counted = count_changes(new, cached, layout, block_size)
        values = {i for i in range(size) if i % 5 == 0 or i % 70 == 3}
        exponents = {i for i in range(size) if i % 70 == 3}
        assert counted == Changes(
            values=size,
            compared_values=size if caches_values else 0,
            changed_values=len(values) if caches_values else 0,
            changed_exponents=len(exponents),
            blocks=-(-size // block_size),
            changed_blocks=len({i // block_size for i in exponents}),
        )


def test_nothing_changed_counts_as_nothing_and_zero_from_minus_zero_as_a_value():
    layout = LAYOUTS[torch.bfloat16]
    zeros = torch.zeros(10, dtype=torch.int16)
    assert count_changes(zeros, zeros, layout, 4) == Changes(10, 10, 0, 0, 3, 0)
    assert count_changes(zeros, zeros ^ -(1 << 15), layout, 4) == Changes(10, 10, 10, 0, 3, 0)


def test_changes_add_up_field_by_field():
    assert Changes(1, 2, 3, 4, 5, 6) + Changes(10, 20, 30, 40, 50, 60) == Changes(
        11, 22, 33, 44, 55, 66
    )


def test_a_step_that_sent_nothing_has_finite_scalars():
    scalars = StepVolume().scalars()
    assert scalars.pop("narrowcast/ratio/all") == 1.0
    assert scalars.pop("narrowcast/cache_bytes") == 0
    assert set(scalars) == {
        f"narrowcast/{kind}/{name}" for kind in ("bytes", "plain_bytes") for name in COLLECTIVES
    }
    assert set(scalars.values()) == {0}


def test_scalars_are_the_shares_and_ratios_of_the_step():
    step = StepVolume(
        first=GatherVolume(1000, 3400),
        later=GatherVolume(500, 25),
        gradients=GradientVolume(1000, 10_500, examined=200, zeros=50),
    )
    step.sent.update(all_gather=30, reduce_scatter=20, other=10)
    step.plain.update(all_gather=120, reduce_scatter=80, other=40)
    step.changes["router"] = Changes(100, 50, 25, 5, 10, 4)
    step.changes["norm"] = Changes(values=8, changed_exponents=2, blocks=1, changed_blocks=1)
    scalars = step.scalars()
    expected = {
        "bytes/all_gather": 30,
        "bytes/reduce_scatter": 20,
        "plain_bytes/all_gather": 120,
        "plain_bytes/other": 40,
        "ratio/all": 0.25,
        "ratio/all_gather": 0.25,
        "ratio/reduce_scatter": 0.25,
        "bits_per_parameter/first_gather": 3.4,
        "bits_per_parameter/later_gathers": 0.05,
        "bits_per_parameter/gradients": 10.5,
        "zero_gradients": 0.25,
        "changed_values/router": 0.5,
        "changed_exponents/router": 0.05,
        "changed_blocks/router": 0.4,
        "changed_exponents/norm": 0.25,
        "changed_blocks/norm": 1.0,
    }
    assert {name: scalars[f"narrowcast/{name}"] for name in expected} == expected
    assert "narrowcast/changed_values/norm" not in scalars  # only its exponents were cached
    assert all(name.startswith("narrowcast/") for name in scalars)


@pytest.mark.parametrize(
    ("nbytes", "world_size", "sent"), [(100, 1, 0), (100, 2, 100), (120, 4, 180), (0, 4, 0)]
)
def test_a_ring_all_reduce_sends_all_but_its_own_share_twice(nbytes, world_size, sent):
    assert all_reduce_bytes(nbytes, world_size) == sent


def test_plain_bytes_are_those_sent_unless_said_otherwise():
    ledger = Ledger()
    ledger.add("dispatch", 5)
    ledger.add("all_gather", 7, plain_bytes=70)
    ledger.add("all_gather", 1, plain_bytes=0)
    assert ledger.current.sent == {"dispatch": 5, "all_gather": 8}
    assert ledger.current.plain == {"dispatch": 5, "all_gather": 70}
    assert ledger.current.ratio == 13 / 75


def test_a_step_ends_with_what_it_sent_and_the_next_begins_at_nothing():
    ledger = Ledger()
    assert (ledger.last, ledger.steps) == (None, 0)
    ledger.add("combine", 3)
    ledger.end_step()
    assert ledger.last.sent == {"combine": 3}
    assert (ledger.current, ledger.steps) == (StepVolume(), 1)
    ledger.end_step()
    assert (ledger.last, ledger.steps) == (StepVolume(), 2)


def test_only_the_first_gather_of_each_group_in_a_step_counts_as_first():
    ledger = Ledger()
    one, two = group("one"), group("two")
    for _ in range(2):
        for name, each in (("one", one), ("two", two)):
            assert ledger.is_first_gather(each)
            ledger.record_gather(each, 100, 50, {name: Changes(values=100)})
            assert not ledger.is_first_gather(each)
        for _ in range(2):
            ledger.record_gather(one, 100, 5, {})
        assert ledger.current.first == GatherVolume(200, 800)
        assert ledger.current.later == GatherVolume(200, 80)
        assert ledger.current.first.bits_per_parameter == 4.0
        assert ledger.current.changes == {"one": Changes(values=100), "two": Changes(values=100)}
        ledger.end_step()


def test_groups_of_two_models_whose_parameters_have_the_same_names_are_told_apart():
    ledger = Ledger()
    for _ in range(2):
        stage = group("0")
        assert ledger.is_first_gather(stage)
        ledger.record_gather(stage, 10, 10, {})
    assert ledger.current.first.parameters == 20


def test_changes_of_a_kind_add_up_over_groups():
    ledger = Ledger()
    for name in ("one", "two"):
        ledger.record_gather(group(name), 1, 1, {"norm": Changes(values=4, changed_values=1)})
    assert ledger.current.changes == {"norm": Changes(values=8, changed_values=2)}


def test_reductions_of_a_step_add_up_and_zeros_are_a_share_of_what_was_examined():
    ledger = Ledger()
    ledger.record_reduction(100, 400)  # not sampled
    assert "narrowcast/zero_gradients" not in ledger.current.scalars()
    ledger.record_reduction(50, 70, examined=50, zeros=10)
    ledger.record_reduction(30, 30, examined=30, zeros=6)
    assert ledger.current.gradients == GradientVolume(180, 4000, examined=80, zeros=16)
    assert ledger.current.scalars()["narrowcast/zero_gradients"] == 0.2
    ledger.end_step()
    assert ledger.current.gradients == GradientVolume()


def test_tokens_of_each_layer_are_counted_in_it_and_in_the_step():
    ledger = Ledger()
    ledger.count_layers(["one", "two"])
    for _ in range(2):
        assert ledger.current.tokens == {"one": TokenVolume(), "two": TokenVolume()}
        ledger.add_rows("one", "dispatch", 3, 48, plain_bytes=160)
        ledger.add_rows("one", "combine", 2, 32, plain_bytes=80)
        ledger.add_rows("two", "dispatch", 0, 24, plain_bytes=0)
        ledger.current.tokens["two"].tokens += 7
        ledger.end_step()
        assert ledger.last.tokens == {
            "one": TokenVolume(rows=5, bytes=80),
            "two": TokenVolume(tokens=7, bytes=24),
        }
        assert ledger.last.sent == {"dispatch": 72, "combine": 32}
        assert ledger.last.plain == {"dispatch": 160, "combine": 80}


def test_scalars_of_a_layer_are_shares_of_its_tokens_and_of_their_assignments():
    counts = {"tokens": 10, "assignments": 40, "local": 8, "rank_rows": 25}
    one_level = TokenVolume(**counts, rows=19, bytes=1900)
    two_levels = TokenVolume(**counts, node_rows=15, rows=19, bytes=1900)
    expected = {
        "narrowcast/rows_per_token/3": 2.5,
        "narrowcast/rows_removed/3": 0.375,
        "narrowcast/local_share/3": 0.2,
        "narrowcast/worst_rank_rows/3": 19,
        "narrowcast/worst_rank_bytes/3": 1900,
    }
    assert one_level.scalars("3") == expected
    assert two_levels.scalars("3") == expected | {"narrowcast/nodes_per_token/3": 1.5}
    assert TokenVolume().scalars("3") == {}
    step = StepVolume(tokens={"3": one_level, "4": TokenVolume()}).scalars()
    assert {name: value for name, value in step.items() if name.endswith(("/3", "/4"))} == expected


def _layers_over_ranks() -> StepVolume:
    one, other = TokenVolume(1, 4, 2, 3, 2, 30, 700), TokenVolume(10, 40, 20, 30, 20, 50, 600)
    if dist.get_rank():
        one, other = TokenVolume(2, 8, 1, 5, 4, 20, 900), TokenVolume()
    volume = StepVolume(tokens={"layers.1": one, "layers.0": other}, cache_bytes=7)
    volume.changes["router"] = Changes(1, 2, 3, 4, 5, 6)
    volume.sent["combine"] = 11 + dist.get_rank()
    volume.gradients.zeros = 3
    return reduce_over_ranks(volume, torch.device("cpu"))


def test_over_ranks_tokens_add_up_and_rows_and_bytes_are_the_worst_ranks(ranks):
    """Layer by layer, beside all else that is counted."""
    for volume in ranks(2).run(_layers_over_ranks):
        assert volume.tokens == {
            "layers.1": TokenVolume(3, 12, 3, 8, 6, rows=30, bytes=900),
            "layers.0": TokenVolume(10, 40, 20, 30, 20, rows=50, bytes=600),
        }
        assert volume.changes == {"router": Changes(2, 4, 6, 8, 10, 12)}
        assert (volume.sent["combine"], volume.cache_bytes) == (12, 7)
        assert volume.gradients.zeros == 6


def _default_group() -> ParamGroup:
    collectives = {
        "_all_gather_comm": DefaultAllGather(),
        "_reduce_scatter_comm": DefaultReduceScatter(),
    }
    return ParamGroup("layer", (), SimpleNamespace(**collectives, fsdp_params=[], mesh_info=None))


@pytest.mark.usefixtures("_rank_1_of_4")
@pytest.mark.parametrize("first_to_go", [0, 1])
def test_a_model_is_counted_once_as_long_as_anybody_counts_it(first_to_go):
    plain = dist.all_reduce
    groups = [_default_group(), _default_group()]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    held = [count_volume(groups), count_volume(groups, optimizer)]
    ledger = held[0].ledger
    assert ledger is held[1].ledger is ledger_of(groups[0]) is ledger_of(groups[1])

    def step() -> None:
        shard, gathered = torch.zeros(6), torch.zeros(24)
        groups[0].all_gather(gathered, shard, dist.group.WORLD)
        groups[1].reduce_scatter(shard, gathered, dist.group.WORLD, dist.ReduceOp.SUM)
        dist.all_reduce(shard)
        optimizer.step()

    step()
    assert ledger.last.sent == {"all_gather": 72, "reduce_scatter": 72, "other": 36}
    assert ledger.last.gradients == GradientVolume(18, 8 * 72)
    held[first_to_go].remove()
    held[first_to_go].remove()
    step()
    assert ledger.steps == 2
    assert ledger.last.sent == {"all_gather": 72, "reduce_scatter": 72, "other": 36}
    held[1 - first_to_go].remove()
    step()
    assert ledger.steps == 2
    assert not ledger.current.sent
    assert ledger_of(groups[0]) is ledger_of(groups[1]) is None
    assert all(is_default(g.all_gather) and is_default(g.reduce_scatter) for g in groups)
    assert dist.all_reduce is plain


def test_no_parameters_have_no_bits():
    assert GatherVolume().bits_per_parameter == 0.0


@pytest.mark.usefixtures("_rank_1_of_4")
def test_collectives_are_counted_from_start_to_stop_as_in_a_ring():
    ledger = Ledger()
    mine, all_of_it = torch.zeros(6), torch.zeros(24)  # 24 and 96 bytes

    def counted_as(collective) -> int:
        before = ledger.current.sent["other"]
        collective()
        return ledger.current.sent["other"] - before

    assert counted_as(lambda: dist.all_reduce(all_of_it)) == 0
    ledger.start()
    ledger.start()
    assert counted_as(lambda: dist.all_reduce(all_of_it)) == 2 * 72
    assert counted_as(lambda: dist.all_gather_single(all_of_it, mine)) == 72
    assert counted_as(lambda: dist.reduce_scatter_single(mine, all_of_it)) == 72
    assert counted_as(lambda: dist.all_to_all_single(all_of_it.clone(), all_of_it)) == 72
    assert counted_as(lambda: dist.all_reduce(all_of_it, group=dist.new_group([1, 3]))) == 96
    assert ledger.current.sent == ledger.current.plain
    ledger.stop()
    ledger.stop()
    assert counted_as(lambda: dist.all_reduce(all_of_it)) == 0


@pytest.mark.usefixtures("_rank_1_of_4")
def test_a_collective_in_which_this_rank_takes_no_part_is_not_counted():
    others = dist.new_group([0, 2])
    ledger = Ledger()
    ledger.start()
    try:
        with pytest.warns(UserWarning, match="does not belong"):
            dist.all_reduce(torch.ones(3), group=others)
    finally:
        ledger.stop()
    assert not ledger.current.sent


@pytest.mark.usefixtures("_rank_1_of_4")
def test_collectives_counted_by_their_caller_are_not_other_in_this_thread_alone():
    ledger = Ledger()
    ledger.start()
    try:
        with counted_by_caller():
            with counted_by_caller():
                dist.all_reduce(torch.zeros(4))
            dist.all_reduce(torch.zeros(4))
            assert not ledger.current.sent
            thread = threading.Thread(target=lambda: dist.all_reduce(torch.zeros(4)))
            thread.start()
            thread.join()
            assert ledger.current.sent == {"other": 24}
        with pytest.raises(ZeroDivisionError), counted_by_caller():
            raise ZeroDivisionError
        dist.all_reduce(torch.zeros(4))
        assert ledger.current.sent == {"other": 48}
    finally:
        ledger.stop()


@pytest.mark.usefixtures("_rank_1_of_4")
@pytest.mark.parametrize("first_to_stop", [0, 1])
def test_ledgers_that_overlap_count_each_for_itself_and_leave_torch_as_it_was(first_to_stop):
    plain = dist.all_reduce, dist.distributed_c10d.all_reduce
    ledgers = [Ledger(), Ledger()]
    for ledger in ledgers:
        ledger.start()
    stops_first, stops_last = ledgers[first_to_stop], ledgers[1 - first_to_stop]
    try:
        dist.all_reduce(torch.zeros(4))
        stops_first.stop()
        dist.all_reduce(torch.zeros(4))
        stops_last.stop()
        dist.all_reduce(torch.zeros(4))
        left = dist.all_reduce, dist.distributed_c10d.all_reduce
    finally:
        dist.all_reduce, dist.distributed_c10d.all_reduce = plain
    assert stops_first.current.sent == {"other": 24}
    assert stops_last.current.sent == {"other": 48}
    assert left == plain


@pytest.mark.parametrize(
    ("interval", "sampled"), [(1, [1, 2, 3, 4, 5, 6]), (3, [1, 3, 6]), (10, [1]), (0, [])]
)
def test_the_first_step_and_every_nth_are_sampled(interval, sampled):
    ledger = Ledger()
    ledger.sample_interval = interval
    found = []
    for step in range(1, 7):
        if ledger.is_sampled:
            found.append(step)
        ledger.end_step()
    assert found == sampled


def test_steps_are_numbered_from_where_training_was_resumed():
    ledger = Ledger()
    ledger.step = 39
    assert not ledger.is_sampled
    ledger.end_step()
    assert (ledger.step, ledger.steps, ledger.is_sampled) == (40, 1, True)
