"""A torchtitan config function for tests: a qwen3 MoE of two layers, trained from TOML on ranks."""

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from narrowcast.fsdp2 import is_default, param_groups
from tests.ranks import Ranks

TOML = """
hf_assets_path = "{corpus}"
dump_folder = "{dump}"

[base]
module = "tests.torchtitan_ext.tiny"
config = "{config}"

[dataloader]
dataset = "narrowcast_corpus"
dataset_path = "{corpus}"

[training]
steps = 4
seq_len = 32
local_batch_size = 1
disable_cuda_graphs = true

[lr_scheduler]
warmup_steps = 2
total_steps = 8
decay_ratio = 0.0

[optimizer.param_groups.optimizer_kwargs]
lr = 1e-3

[parallelism]
spmd_backend = "partial_dtensor"

[metrics]
log_freq = 1
enable_tensorboard = true
disable_color_printing = true

[debug]
seed = 7
enable_structured_logging = false

[override]
imports = ["torchtitan_ext.cpu.scaled_dot_product_attention"]
"""


def tiny(top_k: int = 2, flavor: str = "tiny") -> Any:
    """One expert more than ranks divide; odd widths."""
    from torchtitan_ext.models import qwen3_moe

    return _on_corpus(
        qwen3_moe(
            flavor=flavor,
            n_layers=2,
            dim=48,
            n_heads=4,
            n_kv_heads=2,
            head_dim=16,
            moe_hidden_dim=32,
            num_experts=8,
            top_k=top_k,
        )
    )


def top4() -> Any:
    """Sums of four outputs, whose order shows."""
    return tiny(top_k=4, flavor="top4")


def other_experts() -> Any:
    """With experts of another class than torchtitan's own."""
    from torchtitan.config import derive
    from torchtitan.models.common.moe import GroupedExperts

    class OtherExperts(GroupedExperts):
        @dataclass(kw_only=True, slots=True)
        class Config(GroupedExperts.Config):
            pass

    config = top4()
    for layer in config.model_spec.model.layers:
        routed = layer.moe.routed_experts
        routed.inner_experts = derive(routed.inner_experts, OtherExperts.Config)
    return config


def other_dispatcher() -> Any:
    """With a dispatcher of another class than torchtitan's own, in its last layer."""
    from torchtitan.config import derive
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    class OtherDispatcher(AllToAllTokenDispatcher):
        @dataclass(kw_only=True, slots=True)
        class Config(AllToAllTokenDispatcher.Config):
            pass

    config = top4()
    routed = config.model_spec.model.layers[-1].moe.routed_experts
    routed.token_dispatcher = derive(routed.token_dispatcher, OtherDispatcher.Config)
    return config


def dense() -> Any:
    """Without MoE layers."""
    from torchtitan.models.qwen3 import model_registry

    return _on_corpus(model_registry("debugmodel", attn_backend="flex"))


def deepseek() -> Any:
    """Node-limited routing with shared experts and a bias, after a dense layer."""
    from torchtitan.components.optimizer import register_moe_load_balancing_hook
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.deepseek_v3 import (
        _EMBEDDING_INIT,
        _NORM_INIT,
        DeepSeekV3Model,
        _build_dsv3_layers,
        _output_linear_init,
        parallelize_deepseekv3,
    )
    from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
    from torchtitan.protocols.model_spec import ModelSpec

    from torchtitan_ext import corpus

    dim = 48
    model = DeepSeekV3Model.Config(
        vocab_size=corpus.VOCAB_SIZE,
        dim=dim,
        tok_embeddings=Embedding.Config(
            num_embeddings=corpus.VOCAB_SIZE, embedding_dim=dim, param_init=_EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=_NORM_INIT),
        lm_head=Linear.Config(
            in_features=dim,
            out_features=corpus.VOCAB_SIZE,
            param_init=_output_linear_init(dim),
        ),
        layers=_build_dsv3_layers(
            n_layers=3,
            n_dense_layers=1,
            dim=dim,
            n_heads=4,
            q_lora_rank=0,
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            mscale=0.7,
            dense_hidden_dim=64,
            moe_hidden_dim=32,
            num_experts=8,
            num_shared_experts=1,
            router_top_k=3,
            router_score_func="sigmoid",
            router_num_expert_groups=4,
            router_num_limited_groups=2,
            router_route_norm=True,
            attn_backend="flex",
            moe_comm_backend="standard",
            non_blocking_capacity_factor=None,
            rope=ComplexRoPE.Config(dim=8, max_seq_len=4096, theta=10000.0),
        ),
    )
    return _on_corpus(
        ModelSpec(
            name="deepseek_v3",
            flavor="tiny",
            model=model,
            parallelize_fn=parallelize_deepseekv3,
            pipelining_fn=None,
            post_optimizer_build_fn=register_moe_load_balancing_hook,
            state_dict_adapter=DeepSeekV3StateDictAdapter,
        )
    )


def _on_corpus(model_spec: Any) -> Any:
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
    from torchtitan.trainer import Trainer

    from torchtitan_ext import corpus

    return Trainer.Config(
        model_spec=model_spec,
        dataloader=HuggingFaceTextDataLoader.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=corpus.VOCAB_SIZE),
        optimizer=default_adamw(lr=1e-3),
        activation_checkpoint=None,
    )


def write_toml(folder: Path, corpus: Path, dump: Path, config: str = "tiny") -> Path:
    file = folder / f"{dump.name}.toml"
    file.write_text(TOML.format(corpus=corpus, dump=dump, config=config))
    return file


@dataclass(frozen=True)
class Trained:
    """What a rank saw of a run: losses and logged metrics by step, its parameters and states."""

    losses: list[float]
    metrics: list[dict[str, float]]
    state: dict[str, Tensor]
    narrowed: bool
    narrowed_gradients: bool
    experts_LE: Tensor | None


def train(toml: str, *flags: str, before: Callable[[Any], None] | None = None) -> Trained:
    """Trains in this rank's process, as ``torchtitan_ext.train`` would, and reports."""
    with _quick(), _trainer(toml, *flags) as trainer:
        if before is not None:
            before(trainer)
        return _report(trainer)


_runs: dict[tuple, list[Trained]] = {}


def once(ranks: Ranks, folder: Path, *flags: str, config: str = "tiny") -> list[Trained]:
    """A run that several tests compare with, in whatever module: it is made once."""
    key = (ranks.world_size, config, flags)
    if key not in _runs:
        toml = write_toml(folder, folder / "corpus", folder / f"once_{len(_runs)}", config)
        _runs[key] = ranks.run(train, str(toml), *flags)
    return _runs[key]


def train_plain(toml: str, *flags: str) -> Trained:
    """The same by torchtitan's own trainer, in which nothing of ours is."""
    from torchtitan.trainer import Trainer

    with _quick(), _trainer(toml, *flags, cls=Trainer) as trainer:
        assert type(trainer) is Trainer
        return _report(trainer)


def norms(toml: str, max_norm: float, *flags: str) -> tuple[float, float]:
    """Trains until gradients are clipped: the logged norm of the last ones, and their norm in fp64.

    For layouts in which every element of a gradient is on one rank.
    """
    with _quick(), _trainer(toml, "--training.max_norm", str(max_norm), *flags) as trainer:
        logged = _report(trainer).metrics[-1]["grad_norm"]
        parameters = trainer.model_parts[0].parameters()
        square = sum(_local(p.grad).double().square().sum() for p in parameters)
        dist.all_reduce(square)
        # What torch.nn.utils.clip_grad_norm_ multiplied by.
        return logged, square.sqrt().item() / (max_norm / (logged + 1e-6))


def build(toml: str, *flags: str, then: Callable[[Any], None] | None = None) -> None:
    """Makes a trainer, and closes it."""
    with _trainer(toml, *flags) as trainer:
        if then is not None:
            then(trainer)


def _report(trainer: Any) -> Trained:
    losses: list[float] = []
    metrics: list[dict[str, float]] = []
    log = trainer.metrics_processor.logger.log

    def record_metrics(values: dict[str, float], step: int) -> None:
        losses.append(values["loss_metrics/global_avg_loss"])
        metrics.append(values)
        log(values, step)

    trainer.metrics_processor.logger.log = record_metrics
    trainer.train()
    placed = getattr(trainer, "placed", None)
    return Trained(
        losses,
        metrics,
        _state(trainer),
        getattr(trainer, "narrowed", None) is not None,
        getattr(trainer, "narrowed_gradients", None) is not None,
        placed.placement.experts_LE if placed else None,
    )


def is_untouched(toml: str, *flags: str) -> tuple[bool, bool]:
    """Whether a trainer has the very collectives of plain torch, while it is open and closed."""
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    all_reduce = dist.all_reduce

    def untouched(trainer: Any) -> bool:
        routed = [m for m in trainer.model_parts[0].modules() if isinstance(m, RoutedExperts)]
        groups = param_groups(trainer.model_parts[0])
        return (
            dist.all_reduce is all_reduce
            and all(is_default(group.all_gather) for group in groups)
            and all(is_default(group.reduce_scatter) for group in groups)
            and not trainer.optimizers._optimizer_step_post_hooks
            and all(type(m.token_dispatcher) is AllToAllTokenDispatcher for m in routed)
            and all(type(m.inner_experts) is GroupedExperts for m in routed)
        )

    with _quick(), _trainer(toml, *flags) as trainer:
        while_open = untouched(trainer)
    return while_open, untouched(trainer)


@functools.cache
def _parse_docstrings_once() -> None:
    """The command line's help comes of the source of each config class: a third of a short run."""
    from tyro._docstrings import _ClassTokenization

    make = _ClassTokenization.make

    @functools.cache
    def made(cls: type) -> Any:
        try:
            return make(cls)
        except OSError as error:  # of classes that have no source
            return error

    def make_once(cls: type) -> Any:
        if isinstance(made(cls), OSError):
            raise made(cls)
        return made(cls)

    _ClassTokenization.make = staticmethod(make_once)


_last_job: list[object] = []
# Of flags, whose values DTensor never sees: neither shapes nor layouts come of them.
_OF_NO_LAYOUT = ("--narrowcast.", "--checkpoint.", "--training.steps", "--training.max_norm")


def _forget_other_jobs(base: str, flags: tuple[str, ...]) -> None:
    """What DTensor keeps for the same meshes does not tell all jobs apart (k of top-k, for one).
    To work it out anew takes most of a short run, and so it is kept from run to run of a job."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    job = [base]
    for flag in flags:
        if flag.startswith("--"):
            is_of_layout = not flag.startswith(_OF_NO_LAYOUT)
        if is_of_layout:
            job.append(flag)
    if _last_job != job:
        _clear_sharding_prop_cache()
        _last_job[:] = job


@contextlib.contextmanager
def _trainer(toml: str, *flags: str, cls: type | None = None) -> Iterator[Any]:
    from torchtitan_ext import compat, cpu

    compat.apply()
    cpu.apply()
    from torchtitan.config import ConfigManager

    _parse_docstrings_once()
    _forget_other_jobs(Path(toml).read_text().split("[dataloader]")[0].split("[base]")[1], flags)
    arguments = ["--module", "torchtitan_ext", "--config", "from_toml"]
    arguments += ["--job.config_file", toml, *flags]
    with patch.object(sys, "argv", ["train", *arguments]):
        config = ConfigManager().parse_args()
    if cls is not None:
        config = _of(cls, config)
    trainer = config.build()
    try:
        yield trainer
    finally:
        trainer.close()


def _of(cls: type, config: Any) -> Any:
    """The configuration without our sections."""
    from torchtitan.components.metrics import MetricsProcessor

    def without(config_cls: type, config: Any) -> Any:
        given = {f.name: getattr(config, f.name) for f in fields(config_cls) if f.init}
        return config_cls(**given)

    plain = without(cls.Config, config)
    plain.metrics = without(MetricsProcessor.Config, config.metrics)
    return plain


def _state(trainer: Any) -> dict[str, Tensor]:
    """Parameters, buffers and optimizer states of this rank, experts in the model's own order."""
    placed = getattr(trainer, "placed", None)
    with placed.experts.in_model_order() if placed else contextlib.nullcontext():
        tensors = dict(trainer.model_parts[0].named_parameters())
        tensors |= dict(trainer.model_parts[0].named_buffers())
        tensors |= {k: v for k, v in trainer.optimizers.state_dict().items() if torch.is_tensor(v)}
        return {name: _local(tensor).clone() for name, tensor in tensors.items()}


def _local(tensor: Tensor | nn.Parameter) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


@contextlib.contextmanager
def _quick() -> Iterator[None]:
    """Without torchtitan's two seconds of waiting for other ranks, nor its hold of the gc."""
    try:
        with patch("torchtitan.trainer.time.sleep"):
            yield
    finally:
        gc.enable()
