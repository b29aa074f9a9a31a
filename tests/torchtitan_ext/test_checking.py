"""What cannot work is said before anything is built: in one line, with exit code 2."""

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torchtitan.train
from safetensors.torch import save_file
from torchtitan.config import ConfigManager

import torchtitan_ext.train
from narrowcast.fsdp2 import param_groups
from narrowcast.placement.trace import RoutingTrace
from tests.ranks import Raised
from tests.torchtitan_ext.test_placement import EP2, LAYERS, TRACE, _placement, _toml
from tests.torchtitan_ext.tiny import _parse_docstrings_once, build
from torchtitan_ext import checking
from torchtitan_ext.checking import check_alone
from torchtitan_ext.dispatch.hooks import deduplicating
from torchtitan_ext.job import Job
from torchtitan_ext.placement import planner
from torchtitan_ext.routed_model import RoutedModel

ENOUGH = ("--training.local_batch_size", "16")
WATCH = (*EP2, "--narrowcast.placement.after_steps")
FILE = (*EP2, "--narrowcast.placement.file")
PLAN_FROM = (*EP2, "--narrowcast.placement.trace")
DEDUPLICATED = "--narrowcast.dispatch.deduplicate"
GATHERS = "--narrowcast.all_gather.enable"
RECORD = "--narrowcast.routing_trace.enable"


@pytest.fixture(scope="module")
def files(folder: Path) -> Path:
    """With files that are wrong for a job of two ranks, and some that are right."""
    files = folder / "files"
    files.mkdir()
    (files / "a_file").touch()
    (files / "text.json").write_text("no placement")
    for name, changed in {
        "right": {},
        "other_model": {"model": "qwen3 other"},
        "more_layers": {"layers": (*LAYERS["top4"], "layers.2.moe")},
        "more_experts": {"num_experts": 16},
        "other_degree": {"num_ranks": 4},
    }.items():
        _placement(folder, **changed).rename(files / f"{name}.json")
    damaged = json.loads((files / "right.json").read_text())
    damaged["experts_by_slot"]["layers.0.moe"][0] = 7
    (files / "damaged.json").write_text(json.dumps(damaged))
    for name, num_tokens in (("trace", 1024), ("short", 8)):
        _trace(num_tokens).save(files / f"{name}.safetensors")
    save_file({"x": torch.zeros(1)}, files / "tensors.safetensors")
    return files


def _trace(num_tokens: int) -> RoutingTrace:
    ids_LTK = torch.arange(4).expand(2, num_tokens, 4)
    step_T = torch.ones(num_tokens, dtype=torch.int32)
    zeros_T = torch.zeros_like(step_T)
    return RoutingTrace(
        "qwen3 top4", LAYERS["top4"], 8, 2, ids_LTK, step_T, zeros_T, zeros_T.clone()
    )


@pytest.fixture
def said(folder: Path, monkeypatch, capsys) -> Any:
    """What `torchtitan_ext.train` says of wrong flags, as the first of two ranks."""
    _parse_docstrings_once()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torchtitan.train, "main", lambda: pytest.fail("it was trained"))

    def of(*flags: str, config: str = "top4") -> str:
        toml = _toml(folder, f"wrong-{config}", config)
        monkeypatch.setattr(sys, "argv", ["train", "--job.config_file", toml, *flags])
        with pytest.raises(SystemExit) as ended:
            torchtitan_ext.train.main()
        assert ended.value.code == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        name, _, message = printed.err.partition(": ")
        assert name == "torchtitan_ext.train"
        assert message.count("\n") == 1
        assert message.endswith("\n")
        return message

    return of


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((*EP2[:1], "3"), "expert_parallel_degree = 3 does not divide the 2 ranks"),
        (("--parallelism.tensor_parallel_degree", "4"), "parallelism: "),
        ((GATHERS, "--narrowcast.all_gather.parameters", "no.*,nor.*"), "['no.*', 'nor.*'] match"),
        (
            (GATHERS, "--parallelism.data_parallel_replicate_degree", "2"),
            "narrowcast.all_gather.enable = true cannot work with "
            "parallelism.data_parallel_shard_degree = 1 on 2 ranks",
        ),
        (
            (
                "--narrowcast.reduce_scatter.enable",
                "--parallelism.data_parallel_replicate_degree=2",
            ),
            "narrowcast.reduce_scatter.enable = true cannot work with",
        ),
        ((DEDUPLICATED,), "parallelism.expert_parallel_degree = 1"),
        ((*EP2, DEDUPLICATED, "--narrowcast.dispatch.nodes", "3"), "narrowcast.dispatch.nodes = 3"),
        ((*EP2, DEDUPLICATED, "--narrowcast.dispatch.kernels", "triton"), "needs a CUDA device"),
        ((*EP2, DEDUPLICATED, "--compile.enable"), "compile.enable = true"),
        (
            (*WATCH, "4", *ENOUGH, DEDUPLICATED, "--narrowcast.dispatch.nodes", "2"),
            "narrowcast.placement.nodes = 1, but narrowcast.dispatch.nodes = 2",
        ),
        (("--narrowcast.placement.file", "right.json"), "parallelism.expert_parallel_degree = 1"),
        ((*FILE, "right.json", "--narrowcast.placement.nodes", "3"), "placement.nodes = 3"),
        ((*FILE, "nowhere.json"), "nowhere.json: there is no such placement"),
        ((*FILE, "text.json"), "text.json is not a narrowcast.placement"),
        ((*FILE, "other_model.json"), "qwen3 other there, qwen3 top4 here"),
        ((*FILE, "more_layers.json"), "3 there, 2 here"),
        ((*FILE, "more_experts.json"), "16 there, 8 here"),
        ((*FILE, "other_degree.json"), "degree 4, and here it is 2"),
        ((*FILE, "damaged.json"), "has expert 7 twice"),
        ((*PLAN_FROM, "nowhere.safetensors"), "there is no such routing trace"),
        ((*PLAN_FROM, "short.safetensors"), "the trace holds 8 tokens"),
        ((*PLAN_FROM, "tensors.safetensors"), "is not a routing trace"),
        ((*WATCH, "5", *ENOUGH), "training.steps = 4"),
        ((*WATCH, "4"), "with 64 tokens a step that is less than the 1024 tokens"),
        ((*WATCH, "4", *ENOUGH, "--compile.enable"), "compile.enable = true"),
        ((*WATCH, "4", *ENOUGH, "--dump_folder", "a_file"), "narrowcast.placement.after_steps: "),
        (
            (RECORD, "--narrowcast.routing_trace.first_step", "3", *TRACE[3:]),
            "narrowcast.routing_trace records up to step 5, but training ends with "
            "training.steps = 4",
        ),
        ((RECORD, "--compile.enable"), "compile.enable = true"),
        (
            (
                *(RECORD, "--narrowcast.routing_trace.num_steps=40000"),
                *("--training.steps=40000", "--narrowcast.routing_trace.max_mib=1"),
            ),
            "1 MiB do not hold one token",
        ),
        ((RECORD, "--dump_folder", "a_file"), 'narrowcast.routing_trace.file = "routing_trace'),
        ((RECORD, "--override.imports", "no.such.thing"), "no.such"),
    ],
    ids=lambda value: " ".join(value)[-60:] if isinstance(value, tuple) else None,
)
def test_what_cannot_work_is_said_in_one_line_before_anything_is_built(
    said, files: Path, flags: tuple[str, ...], message: str
) -> None:
    names = {path.name for path in files.iterdir()} | {"nowhere.json", "nowhere.safetensors"}
    assert message in said(*(str(files / flag) if flag in names else flag for flag in flags))


def test_models_that_cannot_be_placed_or_dispatched_to_are_named(said) -> None:
    named = said(*EP2, DEDUPLICATED, config="other_experts")
    assert "the experts of layers.0.moe are OtherExperts" in named
    dense = said(RECORD, config="dense")
    assert "narrowcast.routing_trace cannot work here: the model has no MoE layers" in dense
    dispatcher = said(*WATCH, "4", *ENOUGH, config="other_dispatcher")
    assert "the dispatcher of layers.1.moe is a OtherDispatcher" in dispatcher
    fused = "torchtitan.overrides.fused_swiglu.fused_grouped_experts"
    assert f"'{fused}' and " in said(*EP2, DEDUPLICATED, "--override.imports", fused)


@pytest.mark.parametrize(
    "flags",
    [
        (*FILE, "right.json", GATHERS, "--narrowcast.all_gather.parameters", "*.moe.*,nothing"),
        (*PLAN_FROM, "trace.safetensors", DEDUPLICATED),
        (*WATCH, "4", *ENOUGH, RECORD, DEDUPLICATED, "--narrowcast.reduce_scatter.enable"),
    ],
    ids=["file", "trace", "after_steps"],
)
def test_what_can_work_is_found_to_and_stays_as_it_was(
    folder: Path, files: Path, monkeypatch, flags: tuple[str, ...]
) -> None:
    there = {path.name for path in files.iterdir()}
    flags = tuple(str(files / flag) if flag in there else flag for flag in flags)
    arguments = ["--module", "torchtitan_ext", "--config", "from_toml", "--job.config_file"]
    monkeypatch.setattr(sys, "argv", ["train", *arguments, _toml(folder, "right"), *flags])
    config = ConfigManager().parse_args()
    before = copy.deepcopy(config.to_dict())
    check_alone(config, is_first_rank=True, world_size=2)
    check_alone(config, is_first_rank=False, world_size=2)
    check_alone(config, is_first_rank=True)  # not started by a launcher
    assert config.to_dict() == before


def test_only_the_first_rank_looks_for_files(said, folder: Path, monkeypatch) -> None:
    """Which may be on its machine alone."""
    missing = "--narrowcast.placement.file", str(folder / "missing.json")
    assert "missing.json" in said(*EP2, *missing)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(pytest.fail.Exception, match="it was trained"):
        said(*EP2, *missing)


def _names(toml: str, *flags: str) -> dict[str, Any]:
    """What is known of the model before it is built, and then."""
    known: dict[str, Any] = {}

    def compare(trainer: Any) -> None:
        job = Job(deduplicating(trainer.config), trainer.parallel_dims)
        known["before"] = (
            RoutedModel.of_job(job, "x"),
            {name for name, _ in job.model.named_parameters()},
        )
        params = [param for group in param_groups(*trainer.model_parts) for param in group.params]
        known["then"] = RoutedModel.of_trainer(trainer, "x"), {param.name for param in params}

    build(toml, *flags, then=compare)
    return known


@pytest.mark.parametrize("config", ["top4", "deepseek"])
def test_names_are_known_before_the_model_is_built(ranks, folder: Path, config: str) -> None:
    toml = _toml(folder, f"names-{config}", config)
    with Path(toml).open("a") as file:
        file.write('[activation_checkpoint]\ntype = "full"\n')
    for known in ranks(2).run(_names, toml, *EP2, "--parallelism.tensor_parallel_degree", "1"):
        (before, names), (then, gathered) = known["before"], known["then"]
        assert before == then
        # At expert-parallel degree 2 of 2 ranks, experts are not sharded any more.
        assert gathered == {name for name in names if "inner_experts" not in name}
        assert len(names) > len(gathered)


def _build_where_one_fails(toml: str, rank: int, error: Exception, *flags: str) -> None:
    def check(job: Job) -> None:
        if dist.get_rank() == rank:
            raise error

    with patch.dict(checking._CHECKS, placement=check):
        build(toml, *flags, then=lambda _: pytest.fail("it was built"))


@pytest.mark.parametrize(
    ("rank", "error", "message"),
    [
        (0, OSError("a library is missing"), "a library is missing"),
        (1, OSError("a library is missing"), "on rank 1: a library is missing"),
        (1, KeyError("a bug"), "on rank 1: KeyError: 'a bug'"),
    ],
)
def test_what_one_rank_alone_finds_is_raised_on_every_one(
    ranks, folder: Path, rank: int, error: Exception, message: str
) -> None:
    toml = _toml(folder, "one-finds")
    outcomes = ranks(2).outcomes(
        _build_where_one_fails, toml, rank, error, *WATCH, "4", *ENOUGH, timeout_s=60
    )
    for outcome in outcomes:
        assert isinstance(outcome, Raised)
        assert (outcome.type, outcome.message) == ("ValueError", message)


def _plan_where_one_fails(toml: str, *flags: str) -> None:
    def plan_layer(*_: Any, **__: Any) -> Any:
        if dist.get_rank() == 1:
            raise MemoryError("too much")
        return SimpleNamespace(experts_E=torch.arange(8))

    with patch.object(planner, "plan_layer", plan_layer):
        build(toml, *flags)


def test_a_rank_that_cannot_plan_ends_every_one(ranks, folder: Path, files: Path) -> None:
    flags = (*PLAN_FROM, str(files / "trace.safetensors"))
    toml = _toml(folder, "one-plans")
    for outcome in ranks(2).outcomes(_plan_where_one_fails, toml, *flags, timeout_s=60):
        assert isinstance(outcome, Raised)
        assert outcome.message == "on rank 1: MemoryError: too much"
