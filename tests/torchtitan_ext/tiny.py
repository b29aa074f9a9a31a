"""A torchtitan config function for tests: a qwen3 MoE of two layers, trained from TOML on ranks."""

import contextlib
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from narrowcast.torch_internals import is_default, param_groups

TOML = """
hf_assets_path = "{corpus}"
dump_folder = "{dump}"

[base]
module = "tests.torchtitan_ext.tiny"
config = "tiny"

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


def tiny() -> Any:
    """One expert more than ranks divide; odd widths."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
    from torchtitan.trainer import Trainer

    from torchtitan_ext import corpus
    from torchtitan_ext.models import qwen3_moe

    return Trainer.Config(
        model_spec=qwen3_moe(
            flavor="tiny",
            n_layers=2,
            dim=48,
            n_heads=4,
            n_kv_heads=2,
            head_dim=16,
            moe_hidden_dim=32,
            num_experts=8,
            top_k=2,
        ),
        dataloader=HuggingFaceTextDataLoader.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=corpus.VOCAB_SIZE),
        optimizer=default_adamw(lr=1e-3),
        activation_checkpoint=None,
    )


def write_toml(folder: Path, corpus: Path, dump: Path) -> Path:
    file = folder / f"{dump.name}.toml"
    file.write_text(TOML.format(corpus=corpus, dump=dump))
    return file


@dataclass(frozen=True)
class Trained:
    """What a rank saw of a run: losses and logged metrics by step, its parameters and states."""

    losses: list[float]
    metrics: list[dict[str, float]]
    state: dict[str, Tensor]
    narrowed: bool
    narrowed_gradients: bool


def train(toml: str, *flags: str) -> Trained:
    """Trains in this rank's process, as ``torchtitan_ext.train`` would, and reports."""
    with _quick(), _trainer(toml, *flags) as trainer:
        losses: list[float] = []
        metrics: list[dict[str, float]] = []
        log = trainer.metrics_processor.logger.log

        def record_metrics(values: dict[str, float], step: int) -> None:
            losses.append(values["loss_metrics/global_avg_loss"])
            metrics.append(values)
            log(values, step)

        trainer.metrics_processor.logger.log = record_metrics
        trainer.train()
        return Trained(
            losses,
            metrics,
            _state(trainer),
            trainer.narrowed is not None,
            trainer.narrowed_gradients is not None,
        )


def is_untouched(toml: str, *flags: str) -> tuple[bool, bool]:
    """Whether a trainer has the very collectives of plain torch, while it is open and closed."""
    all_reduce = dist.all_reduce

    def untouched(trainer: Any) -> bool:
        groups = param_groups(trainer.model_parts[0])
        return (
            dist.all_reduce is all_reduce
            and all(is_default(group.all_gather) for group in groups)
            and all(is_default(group.reduce_scatter) for group in groups)
            and not trainer.optimizers._optimizer_step_post_hooks
        )

    with _quick(), _trainer(toml, *flags) as trainer:
        while_open = untouched(trainer)
    return while_open, untouched(trainer)


@contextlib.contextmanager
def _trainer(toml: str, *flags: str) -> Iterator[Any]:
    from torchtitan_ext import compat, cpu

    compat.apply()
    cpu.apply()
    from torchtitan.config import ConfigManager

    arguments = ["--module", "torchtitan_ext", "--config", "from_toml"]
    arguments += ["--job.config_file", toml, *flags]
    with patch.object(sys, "argv", ["train", *arguments]):
        trainer = ConfigManager().parse_args().build()
    try:
        yield trainer
    finally:
        trainer.close()


def _state(trainer: Any) -> dict[str, Tensor]:
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
