"""What routing traces and placements must know of a model: its MoE layers and their experts."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from narrowcast.placement.trace import id_dtype
from torchtitan_ext.across_ranks import gathered
from torchtitan_ext.job import Job
from torchtitan_ext.private import moe_layers


@dataclass(frozen=True)
class RoutedModel:
    """The MoE layers of a model, which are all alike. It is the same on every rank.

    Attributes:
        model: the name and the flavor of the model.
        layers: names of the MoE layers, in the order of the model.
        num_experts: of each layer.
        top_k: experts that a token selects.
        num_ranks: of an expert-parallel group.
        num_groups, num_limited_groups: groups of experts, and how many of them a token selects
            from; None where routing is not limited to groups.
    """

    model: str
    layers: tuple[str, ...]
    num_experts: int
    top_k: int
    num_ranks: int
    num_groups: int | None
    num_limited_groups: int | None

    @classmethod
    def of_trainer(cls, trainer: Any, section: str) -> "RoutedModel":
        """The model of a trainer, whose layers may be spread over pipeline stages. Every rank must
        call it alike.

        Args:
            trainer: has built its model.
            section: of the configuration that asks for it, for messages.

        Raises:
            ValueError: the model has no MoE layers, or they differ.
        """
        local = [layer for part in trainer.model_parts for layer in _described(moe_layers(part))]
        layers = {layer for of_rank in gathered(local) for layer in of_rank}
        return cls._of(layers, trainer.config, section)

    @classmethod
    def of_job(cls, job: Job, section: str) -> "RoutedModel":
        """The same for a job whose model is not built yet."""
        return cls._of(_described(job.moe_layers), job.config, section)

    @classmethod
    def _of(cls, layers: Iterable[tuple], config: Any, section: str) -> "RoutedModel":
        layers = sorted(layers, key=_in_model_order)
        if not layers:
            raise ValueError(f"{section} cannot work here: the model has no MoE layers")
        if len({layer[1:] for layer in layers}) > 1:
            raise ValueError(
                f"{section} cannot work here: MoE layers differ in (name, experts, top_k, groups): "
                f"{layers}"
            )
        _, num_experts, top_k, num_groups, num_limited_groups = layers[0]
        return cls(
            model=f"{config.model_spec.name} {config.model_spec.flavor}",
            layers=tuple(name for name, *_ in layers),
            num_experts=num_experts,
            top_k=top_k,
            num_ranks=config.parallelism.expert_parallel_degree,
            num_groups=num_groups,
            num_limited_groups=num_limited_groups,
        )

    @property
    def trace_fields(self) -> dict[str, Any]:
        """The fields of a ``RoutingTrace`` that are of the model and not of tokens."""
        return {name: value for name, value in asdict(self).items() if name != "top_k"}

    def token_bytes(self, scores: bool = False) -> int:
        """Bytes that a token takes in a trace, with or without the scores of its experts."""
        id_bytes = id_dtype(self.num_experts).itemsize
        return len(self.layers) * self.top_k * (id_bytes + 4 * scores) + 12


def _described(moes: dict[str, nn.Module]) -> list[tuple]:
    routers = {name: moe.router for name, moe in moes.items()}
    return [
        (name, r.num_experts, r.top_k, r.num_expert_groups, r.num_limited_groups)
        for name, r in routers.items()
    ]


def _in_model_order(layer: tuple) -> list[tuple[int, str]]:
    """A sort key by which layer 10 comes after layer 9."""
    return [(int(n or 0), text) for text, n in re.findall(r"(\D+)|(\d+)", layer[0])]
