"""Which expert lives on which rank: a permutation of every layer's experts, and its file.

Expert parallelism gives each of R ranks E / R consecutive *slots*. Without a placement expert i
lives in slot i (contiguous). A placement only renumbers: routers and parameters stay as they are.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowcast.experts.files import whole

FORMAT = "narrowcast.placement"
VERSION = 1


@dataclass(frozen=True)
class Placement:
    """The experts of L layers on `num_ranks` ranks of `num_nodes` nodes.

    Attributes:
        model: name and flavor, as "qwen3 demo".
        layers: names of the MoE modules, in the order of the model.
        num_ranks: expert-parallel degree. Ranks of a node are consecutive.
        num_nodes: that they are spread over.
        method: how it was found.
        experts_LE: (L, E) the expert in each slot; slot s is on rank s // (E / num_ranks).
    """

    model: str
    layers: tuple[str, ...]
    num_ranks: int
    num_nodes: int
    method: str
    experts_LE: Tensor

    @property
    def num_experts(self) -> int:
        return self.experts_LE.shape[1]

    @property
    def slots_LE(self) -> Tensor:
        """(L, E) the slot of each expert."""
        return self.experts_LE.argsort(dim=1)

    @property
    def ranks_LE(self) -> Tensor:
        """(L, E) the rank of each expert."""
        return self.slots_LE // (self.num_experts // self.num_ranks)

    def check(
        self, *, model: str, layers: tuple[str, ...], num_experts: int, num_ranks: int
    ) -> None:
        """Raise a ValueError, with both values, if this was made for something else."""
        check_made_for("placement", self, model=model, layers=layers, num_experts=num_experts)
        if self.num_ranks != num_ranks:
            raise ValueError(
                f"the placement was made for expert-parallel degree {self.num_ranks}, and here it "
                f"is {num_ranks}: plan one for {num_ranks} ranks"
            )

    def save(self, path: str | Path) -> None:
        """Write it as JSON, whole or not at all."""
        described = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "num_experts": self.num_experts,
            "num_ranks": self.num_ranks,
            "num_nodes": self.num_nodes,
            "method": self.method,
            "experts_by_slot": dict(zip(self.layers, self.experts_LE.tolist(), strict=True)),
        }
        with whole(Path(path)) as unfinished:
            unfinished.write_text(_one_layer_a_line(described))


def contiguous(
    model: str, layers: tuple[str, ...], num_experts: int, num_ranks: int, num_nodes: int = 1
) -> Placement:
    """Every expert in the slot of its own number."""
    experts_LE = torch.arange(num_experts).repeat(len(layers), 1)
    return Placement(model, layers, num_ranks, num_nodes, "contiguous", experts_LE)


def check_made_for(
    what: str, made: Any, *, model: str, layers: tuple[str, ...], num_experts: int
) -> None:
    """Raise a ValueError, with both values, if a trace or placement is of another model.

    Args:
        what: its name in the message.
        made: has `model`, `layers` and `num_experts`.
    """
    compared = {
        "model": (made.model, model),
        "number of MoE layers": (len(made.layers), len(layers)),
        "MoE layers": (", ".join(made.layers), ", ".join(layers)),
        "number of experts": (made.num_experts, num_experts),
    }
    for name, (there, here) in compared.items():
        if there != here:
            raise ValueError(
                f"the {what} is of another {name}: {there} there, {here} here. Record a trace of "
                "this very model, and plan from it"
            )


def from_parts(part_E: Tensor) -> Tensor:
    """(E,) the expert in each slot, given the rank of each expert: in ascending order on a rank."""
    return torch.argsort(part_E, stable=True)


def load_placement(path: str | Path) -> Placement:
    """Read a placement.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no placement, of another version, or damaged.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: there is no such placement")
    try:
        described = json.loads(Path(path).read_text())
        if described["format"] != FORMAT or described["version"] != VERSION:
            raise ValueError(f"it is {described['format']} version {described['version']}")
        layers = described["experts_by_slot"]
        placement = Placement(
            model=described["model"],
            layers=tuple(layers),
            num_ranks=described["num_ranks"],
            num_nodes=described["num_nodes"],
            method=described["method"],
            experts_LE=torch.tensor(list(layers.values()), dtype=torch.int64),
        )
        _check_permutations(placement, described["num_experts"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no {FORMAT} of version {VERSION}: {error}. Plan it again"
        ) from error
    return placement


def _check_permutations(placement: Placement, num_experts: int) -> None:
    if placement.experts_LE.ndim != 2 or placement.num_experts != num_experts:
        raise ValueError(f"its layers do not list {num_experts} experts each")
    counts = (num_experts, placement.num_ranks, placement.num_nodes)
    if not all(type(count) is int and count > 0 for count in counts):
        raise ValueError(f"{counts} experts, ranks and nodes are not all positive integers")
    if num_experts % placement.num_ranks or placement.num_ranks % placement.num_nodes:
        raise ValueError("{} experts, {} ranks and {} nodes do not divide".format(*counts))
    for name, experts_E in zip(placement.layers, placement.experts_LE, strict=True):
        if not torch.equal(experts_E.sort().values, torch.arange(num_experts)):
            raise ValueError(f"{name} does not hold every expert once")


def _one_layer_a_line(described: dict) -> str:
    layers = described.pop("experts_by_slot")
    head = json.dumps(described, indent=1)[:-2]
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(ids)}" for name, ids in layers.items())
    return f'{head},\n "experts_by_slot": {{\n{lines}\n }}\n}}\n'
