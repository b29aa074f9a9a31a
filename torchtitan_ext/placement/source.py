"""The files that placements come from: a placement, a routing trace, or the plans of a run."""

import re
from pathlib import Path
from typing import Any

from narrowcast.config import PlacementConfig
from narrowcast.placement.placement import Placement, check_made_for, load_placement
from narrowcast.placement.planning import check
from narrowcast.placement.trace import RoutingTrace, load_trace
from torchtitan_ext.routed_model import RoutedModel

SECTION = "narrowcast.placement"


def given_key(config: PlacementConfig) -> str:
    """The key that switches placement on, with its value, for messages."""
    if config.file:
        return f'{SECTION}.file = "{config.file}"'
    return f'{SECTION}.trace = "{config.trace}"' if config.trace else f"{SECTION}.after_steps"


def read_placement(file: str | Path, model: RoutedModel) -> Placement:
    """The placement in a file, its layers in the order of the model.

    Raises:
        ValueError, OSError: it cannot be read, or was made for another model.
    """
    placement = load_placement(file)
    placement.check(
        model=model.model,
        layers=model.layers,
        num_experts=model.num_experts,
        num_ranks=model.num_ranks,
    )
    return placement.in_order(model.layers)


def read_trace(config: PlacementConfig, model: RoutedModel) -> RoutingTrace:
    """The routing trace of ``config.trace``.

    Raises:
        ValueError, OSError: it cannot be read, is of another model, or is too short.
    """
    trace = load_trace(config.trace)
    check_made_for(
        "trace", trace, model=model.model, layers=model.layers, num_experts=model.num_experts
    )
    check(trace, model.num_ranks, config.nodes)
    return trace


def plan_file(trainer_config: Any, step: int) -> Path:
    """Where a run saves the placement that it planned after ``step``."""
    return _folder(trainer_config) / f"step-{step:08}.json"


def planned_steps(trainer_config: Any) -> list[int]:
    """The steps after which a run saved plans."""
    names = (
        re.fullmatch(r"step-(\d+)\.json", file.name) for file in _folder(trainer_config).glob("*")
    )
    return [int(name[1]) for name in names if name]


def _folder(trainer_config: Any) -> Path:
    return Path(trainer_config.dump_folder) / "placement"
