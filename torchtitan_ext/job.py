"""What follows from a job's configuration before anything is built: its layout, and the names and
classes in its model."""

import copy
import functools
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager
from torchtitan.config.override import apply_overrides
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils

from torchtitan_ext.private import moe_layers


@dataclass(frozen=True)
class Job:
    """A trainer's configuration, and the degrees of its parallelism.

    Attributes:
        config: of the trainer, with the overrides that our sections list. It is only read.
        dims: the degrees of parallelism; None where the number of ranks is not known.
    """

    config: Any
    dims: ParallelDims | None

    @classmethod
    def of(cls, config: Any, world_size: int | None) -> "Job":
        """A job on ``world_size`` ranks; None where that is not known.

        Raises:
            ValueError: the degrees of parallelism do not fit the number of ranks.
        """
        if world_size is None:
            return cls(config, None)
        try:
            dims = ParallelDims.from_config(config.parallelism, world_size)
        except AssertionError as error:
            raise ValueError(f"parallelism: {error}") from error
        sharded = dims.dp_shard * dims.cp * dims.tp
        if sharded % dims.ep:
            raise ValueError(
                f"parallelism.expert_parallel_degree = {dims.ep} does not divide the {sharded} "
                "ranks that parameters are sharded over (data_parallel_shard_degree x "
                "context_parallel_degree x tensor_parallel_degree)"
            )
        return cls(config, dims)

    @functools.cached_property
    def model(self) -> nn.Module:
        """The whole model on the meta device, as torchtitan's trainer builds it.

        Raises:
            ValueError: it cannot be built.
        """
        config = copy.deepcopy(self.config)  # building changes it
        was_disabled = logging.root.manager.disable
        logging.disable(logging.WARNING)  # the trainer will log the same
        try:
            model = config.model_spec.model
            model.update_from_config(config=config)
            apply_overrides(config.override, config)
            dtype = TORCH_DTYPE_MAP[config.training.dtype]
            with torch.device("meta"), utils.set_default_dtype(dtype):
                return config.model_spec.model.build()
        except (ValueError, ImportError):
            raise
        except Exception as error:  # some of torchtitan's own rules are asserts
            raise ValueError(
                f"the model cannot be built: {type(error).__name__}: {error}"
            ) from error
        finally:
            logging.disable(was_disabled)

    @functools.cached_property
    def moe_layers(self) -> dict[str, Any]:
        """The MoE modules of the model by name, in its order."""
        return moe_layers(self.model)

    @property
    def is_compiled(self) -> bool:
        compiled = self.config.compile
        return compiled.enable and "model" in compiled.components

    @property
    def sequences_a_step(self) -> int | None:
        """Sequences that all ranks train on in a step; None where the number of ranks decides it
        and is not known."""
        training = self.config.training
        if training.global_batch_size >= 0:
            return training.global_batch_size
        if self.dims is None:
            return None
        return training.local_batch_size * self.dims.dp_replicate * self.dims.dp_shard

    @property
    def microbatches(self) -> int:
        """Microbatches of a rank in a step. Only where ``dims`` is known."""
        training, dims = self.config.training, self.dims
        ranks = dims.dp_replicate * dims.dp_shard
        accumulated = self.sequences_a_step // (training.local_batch_size * ranks)
        if dims.pp == 1:
            return accumulated
        of_pipeline = self.config.parallelism.pipeline_parallel_microbatch_size
        return accumulated * (training.local_batch_size // of_pipeline)


def world_size_of(config: Any) -> int | None:
    """How many ranks the launcher has started; None without a launcher, and with torchtitan's fake
    process groups."""
    given = os.environ.get("WORLD_SIZE", "")
    return int(given) if given.isdecimal() and config.comm.mode == "default" else None


def parse_job(flags: Sequence[str]) -> Any:
    """The trainer config of a job, from flags as ``torchtitan_ext.train`` takes them.

    ``sys.argv`` has them then, because ``from_toml`` and torchtitan's own entry read it.

    Raises:
        ValueError: the TOML file is wrong.
        SystemExit: a flag is wrong.
    """
    sys.argv[1:] = ["--module", "torchtitan_ext", "--config", "from_toml", *flags]
    return ConfigManager().parse_args()
