"""Plans a placement within a training job: each rank plans some of the layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torchtitan.tools.logging import logger

from narrowcast.config import PlacementConfig
from narrowcast.placement.balance import part_loads
from narrowcast.placement.effort import SECONDS, Effort
from narrowcast.placement.metrics import UNEVEN
from narrowcast.placement.placement import Placement
from narrowcast.placement.planning import (
    HELD_OUT,
    LayerRouting,
    check,
    placement_of,
    plan_layer,
    routings_of,
)
from narrowcast.placement.trace import RoutingTrace
from torchtitan_ext.across_ranks import from_every_rank
from torchtitan_ext.placement.source import SECTION
from torchtitan_ext.routed_model import RoutedModel
from torchtitan_ext.traces.watch import Recording


@dataclass(frozen=True)
class Planner:
    """Plans placements as ``[narrowcast.placement]`` says, for the experts of a model."""

    config: PlacementConfig
    model: RoutedModel

    def recording(self) -> Recording:
        """What ``after_steps`` records: the tokens that a plan is fitted on, and later ones by
        which it is judged."""
        tokens = round(self._effort().tokens / (1 - HELD_OUT))
        return Recording(
            section=f"{SECTION}.after_steps",
            num_steps=self.config.after_steps,
            max_bytes=self.model.token_bytes() * tokens,
        )

    def routings(self, trace: RoutingTrace) -> list[LayerRouting]:
        """What a plan is made from, layer by layer.

        Raises:
            ValueError: the trace is too short.
        """
        check(trace, self.model.num_ranks, self.config.nodes)
        return list(routings_of(trace, self._effort().tokens))

    def plan(self, routings: Sequence[LayerRouting], current: Placement) -> Placement:
        """The placement that routings lead to, the same on every rank. Every rank must call it
        alike.

        Each rank plans some layers in this process, because a process with threads and a device
        must not be forked.

        Args:
            routings: of all layers.
            current: the placement that experts have now. It names the model and its layers.

        Raises:
            ValueError: a rank cannot plan one of its layers.
        """
        config, num_ranks = self.config, self.model.num_ranks
        restarts = self._effort(len(routings[0].fitted_TK)).restarts
        planned_by_rank = from_every_rank(
            lambda: {
                layer: plan_layer(
                    routings[layer],
                    num_ranks=num_ranks,
                    num_nodes=config.nodes,
                    method=config.method,
                    max_load=config.max_load or None,
                    cross_node_weight=config.cross_node_weight or None,
                    restarts=restarts,
                ).experts_E
                for layer in range(dist.get_rank(), len(routings), dist.get_world_size())
            }
        )
        experts = {layer: one for of_rank in planned_by_rank for layer, one in of_rank.items()}
        planned = placement_of(
            current,
            [experts[layer] for layer in range(len(routings))],
            num_ranks,
            config.nodes,
            config.method,
        )
        report(routings, current, planned, config)
        return planned

    def _effort(self, num_fitted: int | None = None) -> Effort:
        return Effort.of(SECONDS, self.model.num_experts, num_fitted, self.config.nodes)


def report(
    routings: Sequence[LayerRouting],
    current: Placement,
    planned: Placement,
    config: PlacementConfig,
) -> None:
    """Log what a plan changes for the tokens that it was not fitted on, and warn of uneven load."""
    busiest, planned_busiest = (_busiest(routings, one) for one in (current, planned))
    logger.info(
        f"placement planned from {len(routings[0].fitted_TK)} tokens, and judged on "
        f"{len(routings[0].judged_TK)} later ones: {_rows_per_token(routings, current):.3f} -> "
        f"{_rows_per_token(routings, planned):.3f} ranks a token; load of the busiest rank over "
        f"the mean {max(busiest):.2f} -> {max(planned_busiest):.2f}"
    )
    if config.method != "rows" and max(planned_busiest) > UNEVEN * max(busiest):
        logger.warning(
            f"placement: the busiest rank is to get {max(planned_busiest):.2f} times the mean "
            f'load, and had {max(busiest):.2f}. {SECTION}.method = "rows" bounds it'
        )
    for layer, load in zip(planned.layers, planned_busiest, strict=True):
        if 0 < config.max_load < load - 1e-6:
            logger.warning(
                f"{SECTION}.max_load = {config.max_load} cannot be reached in {layer}: {load:.3f} "
                "is the least that was found"
            )


def _rows_per_token(routings: Sequence[LayerRouting], placement: Placement) -> float:
    """Ranks that a held-out token is sent to, the mean over layers."""
    rows = sum(
        routing.rows(rank_E) for routing, rank_E in zip(routings, placement.ranks_LE, strict=True)
    )
    return rows / len(routings[0].judged_TK) / len(routings)


def _busiest(routings: Sequence[LayerRouting], placement: Placement) -> list[float]:
    """Assignments of the busiest rank over the mean of all ranks, of each layer."""
    loads = (
        part_loads(routing.load_E, rank_E, placement.num_ranks)
        for routing, rank_E in zip(routings, placement.ranks_LE, strict=True)
    )
    return [float(load_R.max() / load_R.mean()) for load_R in loads]
