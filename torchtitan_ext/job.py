"""What follows of a job's configuration before anything is built: its layout, and its model's
names and classes."""

import copy
import functools
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config.override import apply_overrides
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils

from torchtitan_ext.private import moe_layers


@dataclass(frozen=True)
class Job:
    """A trainer's configuration, with overrides that our sections list.

    Attributes:
        config: of the trainer. It is only read.
        dims: how many ranks there are of each kind; None where that is not known.
    """

    config: Any
    dims: ParallelDims | None

    @classmethod
    def of(cls, config: Any, world_size: int | None) -> "Job":
        """A job on so many ranks; None where that is not known.

        Raises:
            ValueError: the degrees of parallelism do not fit them.
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
        config = copy.deepcopy(self.config)  # is set to the job's values, and overridden
        was_disabled = logging.root.manager.disable
        logging.disable(logging.WARNING)  # the trainer will say it all
        try:
            model = config.model_spec.model
            model.update_from_config(config=config)
            apply_overrides(config.override, config)
            dtype = TORCH_DTYPE_MAP[config.training.dtype]
            with torch.device("meta"), utils.set_default_dtype(dtype):
                return config.model_spec.model.build()
        except (ValueError, ImportError):
            raise
        except Exception as error:  # of torchtitan, whose own rules are asserts too
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
        """Of all ranks; None where it follows of how many there are, and that is not known."""
        training = self.config.training
        if training.global_batch_size >= 0:
            return training.global_batch_size
        if self.dims is None:
            return None
        return training.local_batch_size * self.dims.dp_replicate * self.dims.dp_shard

    @property
    def microbatches(self) -> int:
        """Of a step and rank. Where `dims` is known."""
        training, dims = self.config.training, self.dims
        ranks = dims.dp_replicate * dims.dp_shard
        accumulated = self.sequences_a_step // (training.local_batch_size * ranks)
        if dims.pp == 1:
            return accumulated
        of_pipeline = self.config.parallelism.pipeline_parallel_microbatch_size
        return accumulated * (training.local_batch_size // of_pipeline)


def world_size_of(config: Any) -> int | None:
    """How many ranks the launcher has started; None without one, and for torchtitan's fake ones."""
    given = os.environ.get("WORLD_SIZE", "")
    return int(given) if given.isdecimal() and config.comm.mode == "default" else None
