"""Experts move between ranks, and torchtitan trains as if they had not: bitwise."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from narrowcast.placement.placement import Placement, load_placement
from narrowcast.placement.trace import RoutingTrace, load_trace
from tests.narrowcast.training import same_bits
from tests.ranks import Raised, Ranks
from tests.torchtitan_ext.tiny import Trained, build, norms, once, train, train_plain, write_toml
from tests.wide import wide_but
from torchtitan_ext.traces import run as traces

EP2 = ("--parallelism.expert_parallel_degree", "2")
EP4 = ("--parallelism.expert_parallel_degree", "4")
# The norm of all gradients is a sum over ranks of what each has. Clipped by it, training would
# differ by the rounding of that one number.
ACCUMULATED = ("--training.global_batch_size", "4")
UNCLIPPED = ("--training.max_norm", "1e9")
EP4_TP2 = (*EP4, *ACCUMULATED, "--parallelism.tensor_parallel_degree", "2")
ENOUGH = ("--training.local_batch_size", "16")  # for a plan of one step
NARROWED = (
    *("--narrowcast.all_gather.enable", "--narrowcast.all_gather.compression", "delta"),
    *("--narrowcast.reduce_scatter.enable", "--narrowcast.reduce_scatter.compression", "entropy"),
)
LAYERS = {
    "top4": ("layers.0.moe", "layers.1.moe"),
    "deepseek": ("layers.1.moe", "layers.2.moe"),
}
MODELS = {"top4": "qwen3 top4", "deepseek": "deepseek_v3 tiny"}


def _run(ranks: Ranks, folder: Path, name: str, *flags: str, config: str = "top4") -> list[Trained]:
    return ranks.run(train, _toml(folder, name, config), *UNCLIPPED, *flags)


def _toml(folder: Path, name: str, config: str = "top4") -> str:
    return str(write_toml(folder, folder / "corpus", folder / name, config))


def _placed(folder: Path, num_ranks: int, seed: int = 0, config: str = "top4") -> tuple[str, ...]:
    """Flags of a random placement, in which every expert may be on any rank."""
    return "--narrowcast.placement.file", str(_placement(folder, num_ranks, seed, config))


def _placement(
    folder: Path, num_ranks: int = 2, seed: int = 0, config: str = "top4", **changed: object
) -> Path:
    file = folder / f"{config}-{num_ranks}-{seed}-{'-'.join(changed)}.json"
    generator = torch.Generator().manual_seed(seed)
    layers = changed.pop("layers", LAYERS[config])
    num_experts = changed.pop("num_experts", 8)
    fields = {"model": MODELS[config], "num_ranks": num_ranks, "num_nodes": 1, "method": "random"}
    experts_LE = torch.stack([torch.randperm(num_experts, generator=generator) for _ in layers])
    placement = Placement(layers=layers, experts_LE=experts_LE, **{**fields, **changed})
    placement.in_order(layers[::-1]).save(file)  # which goes by names
    return file


def _assert_equal(one: list[Trained], other: list[Trained]) -> None:
    for ours, theirs in zip(one, other, strict=True):
        assert ours.losses == theirs.losses
        assert ours.state.keys() == theirs.state.keys()
        assert same_bits(list(ours.state.values()), list(theirs.state.values()))


@pytest.mark.parametrize(
    ("config", "world_size", "flags", "ours"),
    [
        ("top4", 4, EP2, NARROWED),  # experts sharded by FSDP too, and everything else narrowed
        pytest.param(
            "top4",
            2,
            (*EP2, "--training.mixed_precision_param", "float32"),
            (),
            marks=pytest.mark.wide,
        ),
        ("deepseek", 4, EP4_TP2, ()),
    ],
)
def test_training_is_that_without_a_placement(
    ranks, folder: Path, config: str, world_size: int, flags: tuple[str, ...], ours: tuple[str, ...]
) -> None:
    where = f"{config}{world_size}{len(flags)}"
    # At four ranks coded gradients are summed in another order than gloo's: narrowed both.
    plain = once(ranks(world_size), folder, *UNCLIPPED, *flags, *ours, config=config)
    there = _placed(folder, int(flags[1]), config=config)
    placed = _run(
        ranks(world_size), folder, f"{where}-placed", *flags, *ours, *there, config=config
    )
    _assert_equal(plain, placed)
    assert len(set(plain[0].losses)) == 4
    contiguous_LE = torch.arange(8).expand(2, -1)
    for one in placed:
        assert not torch.equal(one.experts_LE, contiguous_LE)
        assert torch.equal(one.experts_LE, placed[0].experts_LE)
    # Other experts are on the tokens' own ranks: other rows cross.
    sent = [[m["narrowcast/bytes/dispatch"] for m in run[0].metrics] for run in (plain, placed)]
    assert sent[0] != sent[1]


def test_experts_move_while_training_goes_on(ranks, folder: Path) -> None:
    """Planned after step 1 and step 3 from what the run itself routed, gathers narrowed."""
    enough = (*ENOUGH, *EP2)
    plain = _run(ranks(2), folder, "watched-plain", *enough)
    flags = ("--narrowcast.placement.after_steps", "1", "--narrowcast.placement.every_steps", "2")
    moved = _run(ranks(2), folder, "watched", *enough, *NARROWED, *flags)
    _assert_equal(plain, moved)
    plans = sorted((folder / "watched" / "placement").iterdir())
    assert [plan.name for plan in plans] == ["step-00000001.json", "step-00000003.json"]
    assert torch.equal(load_placement(plans[1]).experts_LE, moved[0].experts_LE)
    assert not torch.equal(moved[0].experts_LE, torch.arange(8).expand(2, -1))
    # What the moves sent is counted, as something that plain torch does not send.
    moving = [
        step["narrowcast/bytes/other"] - step["narrowcast/plain_bytes/other"]
        for step in moved[0].metrics
    ]
    assert moving[1] > 100_000
    # The second plan may leave many where they are; it was made of what ranks exchanged.
    assert moving[3] > max(moving[0], moving[2])


def test_the_norm_of_all_gradients_is_as_exact_as_without_a_placement(ranks, folder: Path) -> None:
    """It sums what each rank has, and so differs by rounding."""
    one_step = ("--training.steps", "1", *EP2)
    plain, placed = (
        ranks(2).run(norms, _toml(folder, f"norm-{len(flags)}"), 0.5, *one_step, *flags)[0]
        for flags in ((), _placed(folder, 2))
    )
    assert plain[0] > 0.5
    for logged, exact in (plain, placed):
        assert logged == pytest.approx(exact, rel=1e-5)


SAVE = ("--checkpoint.enable", "--checkpoint.interval", "2")
FULL = "--checkpoint.no-last-save-model-only"
ELSEWHERE = ("--checkpoint.exclude_from_loading", "dataloader")


@pytest.fixture
def saved(ranks, folder: Path) -> dict[str, Path]:
    """Checkpoints after two steps at EP 2, without and with a placement; made once."""
    half = (*EP2, *SAVE, FULL, "--training.steps", "2")
    checkpoints = {name: folder / f"saved-{name}" / "checkpoint" for name in ("plain", "placed")}
    staged = ("--checkpoint.async_mode", "async")
    for name, flags in (("plain", ()), ("placed", (*_placed(folder, 2), *staged))):
        if not checkpoints[name].exists():
            _run(ranks(2), folder, f"saved-{name}", *half, *flags)
    return checkpoints


def test_checkpoints_are_in_the_models_own_order(saved: dict[str, Path], tmp_path: Path) -> None:
    """Every tensor of model and optimizer, read without any of our code."""
    whole = {}
    for name, folder in saved.items():
        dcp_to_torch_save(folder / "step-2", tmp_path / name)
        read = torch.load(tmp_path / name, weights_only=False)
        whole[name] = {key: v for key, v in _flat("", read) if torch.is_tensor(v)}
    assert whole["plain"].keys() == whole["placed"].keys()
    experts = [key for key in whole["plain"] if "w1_EFD" in key and "step" not in key]
    assert len(experts) == 2 * 3  # in two layers: weights, two moments
    assert same_bits(*(list(tensors.values()) for tensors in whole.values()))


def _flat(prefix: str, nested: object) -> Iterator[tuple[str, object]]:
    if isinstance(nested, dict):
        for key, value in nested.items():
            yield from _flat(f"{prefix}.{key}", value)
    else:
        yield prefix, nested


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(2, EP2, id="EP 2", marks=pytest.mark.wide),
        pytest.param(4, EP4, id="EP 4"),
        pytest.param(2, (), id="EP 1, without the plugin"),
    ],
)
def test_a_placed_run_resumes_anywhere(
    ranks, folder: Path, saved: dict[str, Path], world_size: int, flags: tuple[str, ...]
) -> None:
    """Under another placement, at another degree, without us: as a run that was never placed."""
    run = _run if flags else _run_without_us
    resumed = {}
    for name, checkpoints in saved.items():
        where = f"resumed-{name}-{world_size}-{len(flags)}"
        shutil.copytree(checkpoints, folder / where / "checkpoint", dirs_exist_ok=True)
        again = _placed(folder, int(flags[1]), seed=1) if name == "placed" and flags else ()
        hf = ("--checkpoint.last_save_in_hf", *ELSEWHERE)
        resumed[name] = run(ranks(world_size), folder, where, *SAVE, *hf, *flags, *again)
        written = folder / where / "checkpoint" / "step-4"
        resumed[f"{name} hf"] = load_file(next(written.rglob("*.safetensors")))
    assert len(resumed["plain"][0].losses) == 2
    _assert_equal(resumed["plain"], resumed["placed"])
    ours, theirs = resumed["placed hf"], resumed["plain hf"]
    assert ours.keys() == theirs.keys()
    assert sum("experts.7." in key for key in ours) == 2 * 3
    assert same_bits([ours[key] for key in theirs], list(theirs.values()))


def _run_without_us(ranks: Ranks, folder: Path, name: str, *flags: str) -> list[Trained]:
    return ranks.run(train_plain, _toml(folder, name), *UNCLIPPED, *flags)


def test_hugging_face_weights_load_under_a_placement(ranks, folder: Path, saved) -> None:
    one_step = ("--training.steps", "1", *EP2)
    export = (*SAVE, "--checkpoint.last_save_in_hf")
    _run(ranks(2), folder, "exported", *one_step, *export, *_placed(folder, 2))
    weights = str(folder / "exported" / "checkpoint" / "step-1")
    load = ("--checkpoint.enable", "--checkpoint.initial_load_in_hf")
    load += ("--checkpoint.initial_load_path", weights)
    plain = _run(ranks(2), folder, "from-hf", *one_step, *load)
    placed = _run(ranks(2), folder, "from-hf-placed", *one_step, *load, *_placed(folder, 2, 1))
    _assert_equal(plain, placed)
    fresh = _run(ranks(2), folder, "not-from-hf", *one_step)
    assert fresh[0].losses != plain[0].losses


def test_a_run_that_planned_resumes_with_its_plan(ranks, folder: Path) -> None:
    flags = (*ENOUGH, *EP2, "--narrowcast.placement.after_steps", "1")
    whole = _run(ranks(2), folder, "plan-whole", *SAVE, FULL, *flags)
    first = _run(ranks(2), folder, "plan-resumed", *SAVE, FULL, *flags, "--training.steps", "2")
    rest = _run(ranks(2), folder, "plan-resumed", *SAVE, FULL, *flags)
    assert first[0].losses + rest[0].losses == whole[0].losses
    assert torch.equal(rest[0].experts_LE, whole[0].experts_LE)
    assert len(list((folder / "plan-resumed" / "placement").iterdir())) == 1


def test_what_cannot_work_is_refused_on_every_rank_alike(ranks, folder: Path) -> None:
    def refusal(*flags: str) -> str:
        outcomes = ranks(2).outcomes(build, _toml(folder, "refused"), *flags)
        assert all(isinstance(outcome, Raised) for outcome in outcomes), flags
        assert len({outcome.message for outcome in outcomes}) == 1
        return outcomes[0].message

    def of(file: Path) -> tuple[str, ...]:
        return (*EP2, "--narrowcast.placement.file", str(file))

    assert "expert_parallel_degree = 1" in refusal(*_placed(folder, 2))
    other_model = refusal(*of(_placement(folder, model="qwen3 other")))
    assert "qwen3 other there" in other_model
    assert "qwen3 top4 here" in other_model
    layers = (*LAYERS["top4"], "layers.2.moe")
    assert "3 there, 2 here" in refusal(*of(_placement(folder, layers=layers)))
    assert "16 there, 8 here" in refusal(*of(_placement(folder, num_experts=16)))
    degree = refusal(*of(_placement(folder, num_ranks=4)))
    assert "degree 4" in degree
    assert "is 2" in degree
    missing = folder / "missing.json"
    assert f'file = "{missing}"' in refusal(*of(missing))
    damaged = folder / "damaged.json"
    described = json.loads(_placement(folder).read_text())
    described["experts_by_slot"]["layers.0.moe"][0] = 7
    damaged.write_text(json.dumps(described))
    assert "layers.0.moe has expert 7 twice" in refusal(*of(damaged))
    assert "there is no such routing trace" in refusal(
        *EP2, "--narrowcast.placement.trace", str(missing)
    )
    assert "nodes = 3" in refusal(*of(_placement(folder)), "--narrowcast.placement.nodes", "3")
    watch = (*EP2, "--narrowcast.placement.after_steps")
    assert "training.steps = 4" in refusal(*watch, "5")
    assert "compile.enable = true" in refusal(*watch, "4", *ENOUGH, "--compile.enable")
    assert "with 64 tokens a step that is less than the 1024" in refusal(*watch, "4")
    trace = "--narrowcast.routing_trace.enable", "--narrowcast.routing_trace.num_steps"
    assert "records up to step 5, but training ends with training.steps = 4" in refusal(*trace, "5")
    assert "do not hold one token" in refusal(
        *trace, "40000", "--training.steps", "40000", "--narrowcast.routing_trace.max_mib", "1"
    )


TRACE = ("--narrowcast.routing_trace.enable", "--narrowcast.routing_trace.first_step", "2")
TRACE += ("--narrowcast.routing_trace.interval", "2", "--narrowcast.routing_trace.num_steps", "2")


def test_a_trace_holds_every_token_of_the_chosen_steps_once(ranks, folder: Path) -> None:
    """Recomputed in backward, accumulated, under a placement: the same trace, and training."""
    twice = (*UNCLIPPED, *EP2, "--training.global_batch_size", "4")
    by_name = {}
    for name, flags in (("untraced", ()), ("traced", (*_placed(folder, 2), *TRACE))):
        toml = _toml(folder, name)
        with Path(toml).open("a") as file:
            file.write('[activation_checkpoint]\ntype = "full"\n')
        by_name[name] = ranks(2).run(train, toml, *twice, *flags)
    _assert_equal(by_name["untraced"], by_name["traced"])
    trace = load_trace(folder / "traced" / "routing_trace.safetensors")
    assert (trace.model, trace.layers, trace.num_ranks) == ("qwen3 top4", LAYERS["top4"], 2)
    tokens = torch.stack([trace.step_T, trace.rank_T, trace.position_T], dim=1).tolist()
    # 2 accumulated microbatches of 32 tokens on each of 2 ranks, in order.
    assert tokens == [[s, r, p] for s in (2, 4) for r in range(2) for p in range(64)]
    scores = (*TRACE, "--narrowcast.routing_trace.scores")
    _run(ranks(2), folder, "traced-again", *twice, *scores)
    other = load_trace(folder / "traced-again" / "routing_trace.safetensors")
    assert torch.equal(other.ids_LTK, trace.ids_LTK)
    assert other.scores_LTK.shape == trace.ids_LTK.shape
    assert trace.scores_LTK is None


@pytest.mark.parametrize("degree", wide_but(["1", "2"], "2"))
def test_tensor_parallel_ranks_record_a_token_once(ranks, folder: Path, degree: str) -> None:
    """They share the tokens out with expert parallelism, and all have the same ones without."""
    flags = ("--parallelism.tensor_parallel_degree", "2", *EP2[:1], degree)
    _run(ranks(2), folder, f"traced-tp-{degree}", *flags, *TRACE, config="deepseek")
    trace = load_trace(folder / f"traced-tp-{degree}" / "routing_trace.safetensors")
    assert trace.num_tokens == 2 * 32
    assert trace.rank_T.max() == int(degree) - 1
    assert (trace.num_groups, trace.num_limited_groups) == (4, 2)
    # No token selects experts of more than two groups.
    groups_LTK = (trace.ids_LTK // 2).sort(dim=-1).values
    assert (groups_LTK.diff(dim=-1) != 0).sum(dim=-1).max() < 2


def test_a_run_plans_from_a_trace(ranks, folder: Path) -> None:
    flags = (*ENOUGH, *EP2)
    plain = _run(ranks(2), folder, "to-plan-from", *flags, *TRACE)
    trace = folder / "to-plan-from" / "routing_trace.safetensors"
    planned = _run(ranks(2), folder, "planned", *flags, "--narrowcast.placement.trace", str(trace))
    _assert_equal(plain, planned)
    assert not torch.equal(planned[0].experts_LE, torch.arange(8).expand(2, -1))


def test_a_trace_that_cannot_be_written_does_not_end_training(tmp_path, monkeypatch) -> None:
    """As of a router that names an expert twice, which torchtitan's own dispatch follows."""
    errors: list[str] = []
    monkeypatch.setattr(traces.logger, "error", errors.append)
    ids_LTK, one_T = torch.tensor([[[3, 3]]]), torch.ones(1, dtype=torch.int64)
    trace = RoutingTrace("m", ("layers.0.moe",), 8, 2, ids_LTK, one_T, one_T, one_T)
    run = object.__new__(traces.TraceRun)
    run._last, run._file = 1, tmp_path / "trace"
    run._watch = SimpleNamespace(trace=lambda **_: trace)
    run.after(1)
    (error,) = errors
    assert "training goes on without it" in error
    assert f"{tmp_path / 'trace'} is not written: expert_ids of token 0" in error
    assert not list(tmp_path.iterdir())
