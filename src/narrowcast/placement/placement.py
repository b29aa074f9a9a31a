"""Which expert lives on which rank: a permutation of the experts of each layer, and its file.

Expert parallelism gives each of R ranks E / R consecutive slots. Without a placement expert i is in
slot i (contiguous). A placement only renumbers experts: routers and parameters do not change.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowcast.placement.reading import (
    field,
    first_twice,
    is_integer,
    is_name,
    kind_of,
    parse_json,
    shown,
)
from narrowcast.util import write_text

FORMAT = "narrowcast.placement"
VERSION = 1
_MOST = 1 << 15  # experts


@dataclass(frozen=True)
class Placement:
    """The experts of L layers on ``num_ranks`` ranks of ``num_nodes`` nodes.

    Attributes:
        model: name and flavor, such as "qwen3 demo".
        layers: names of the MoE modules, in the order of the model.
        num_ranks: expert-parallel degree. The ranks of a node are consecutive.
        num_nodes: number of nodes of the ranks.
        method: the method that found it.
        experts_LE: (L, E) int64, the expert in each slot; slot s is on rank s // (E / num_ranks).
    """

    model: str
    layers: tuple[str, ...]
    num_ranks: int
    num_nodes: int
    method: str
    experts_LE: Tensor

    @property
    def num_experts(self) -> int:
        """E, experts of each layer."""
        return self.experts_LE.shape[1]

    @property
    def slots_LE(self) -> Tensor:
        """(L, E) int64, the slot of each expert."""
        return self.experts_LE.argsort(dim=1)

    @property
    def ranks_LE(self) -> Tensor:
        """(L, E) int64, the rank of each expert."""
        return self.slots_LE // (self.num_experts // self.num_ranks)

    def check(
        self, *, model: str, layers: tuple[str, ...], num_experts: int, num_ranks: int
    ) -> None:
        """Raise a ``ValueError`` that names both values if this was made for something else.

        The order of the layers may differ: they are matched by name.
        """
        check_made_for("placement", self, model=model, layers=layers, num_experts=num_experts)
        if self.num_ranks != num_ranks:
            raise ValueError(
                f"the placement was made for expert-parallel degree {self.num_ranks}, and here it "
                f"is {num_ranks}: plan one for {num_ranks} ranks"
            )

    def save(self, path: str | Path) -> None:
        """Write the placement as JSON, whole or not at all.

        Raises:
            ValueError: the file could not be read again.
            OSError: the file cannot be written. The message names it.
        """
        write_text(Path(path), self.as_json())

    def as_json(self) -> str:
        """Return the content of the file.

        Raises:
            ValueError: it could not be read again.
        """
        if (twice := first_twice(self.layers)) is not None:
            raise ValueError(f"the placement has layer {twice} twice: names must differ")
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
        _of_json(described)
        return _one_layer_a_line(described)

    def in_order(self, layers: Sequence[str]) -> "Placement":
        """Return the same placement with its layers in another order."""
        index = [self.layers.index(layer) for layer in layers]
        return replace(self, layers=tuple(layers), experts_LE=self.experts_LE[index])


def contiguous(
    model: str, layers: tuple[str, ...], num_experts: int, num_ranks: int, num_nodes: int = 1
) -> Placement:
    """Return the placement with every expert in the slot of its own index."""
    experts_LE = torch.arange(num_experts).repeat(len(layers), 1)
    return Placement(model, layers, num_ranks, num_nodes, "contiguous", experts_LE)


def check_made_for(
    what: str, made: Any, *, model: str, layers: tuple[str, ...], num_experts: int
) -> None:
    """Raise a ``ValueError`` that names both values if a trace or placement is of another model.

    The order of the layers may differ.

    Args:
        what: "trace" or "placement", for the message.
        made: has ``model``, ``layers`` and ``num_experts``.
        model, layers, num_experts: of the model at hand.
    """
    compared = {
        "model": (made.model, model),
        "number of MoE layers": (len(made.layers), len(layers)),
        "MoE layers": (", ".join(made.layers), ", ".join(layers)),
        "number of experts": (made.num_experts, num_experts),
    }
    if sorted(made.layers) == sorted(layers):
        del compared["MoE layers"]
    for name, (there, here) in compared.items():
        if there != here:
            raise ValueError(
                f"the {what} is of another {name}: {there} there, {here} here. Record a trace of "
                "this model, and plan from it"
            )


def from_parts(part_E: Tensor) -> Tensor:
    """Return (E,) the expert in each slot, ascending within a rank, given each expert's rank."""
    return torch.argsort(part_E, stable=True)


def load_placement(path: str | Path) -> Placement:
    """Read a placement.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is not a placement, is of another version, or is damaged.
    """
    try:
        kind = kind_of(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: there is no such placement") from None
    try:
        if kind != "text" and "JSON" not in kind:
            raise ValueError(
                f"it is {kind}, expected the JSON that `narrowcast placement plan` writes"
            )
        return _of_json(parse_json(Path(path).read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(
            f"{path} is not a {FORMAT} of version {VERSION}: {error}. Plan it again"
        ) from error


def _of_json(described: Any) -> Placement:
    """Return the placement that JSON describes.

    Raises:
        ValueError: a field is invalid. The message names it.
    """
    if not isinstance(described, dict):
        raise ValueError(f"it is {shown(described)}, expected an object")
    field(described, "format", lambda v: v == FORMAT, f'"{FORMAT}"')
    field(described, "version", lambda v: is_integer(v, VERSION, VERSION), str(VERSION))
    num_experts = field(
        described, "num_experts", lambda n: is_integer(n, 1, _MOST), f"an integer from 1 to {_MOST}"
    )
    num_ranks = field(
        described,
        "num_ranks",
        lambda n: is_integer(n, 1, num_experts) and num_experts % n == 0,
        f"an integer that divides num_experts, {num_experts}",
    )
    num_nodes = field(
        described,
        "num_nodes",
        lambda n: is_integer(n, 1, num_ranks) and num_ranks % n == 0,
        f"an integer that divides num_ranks, {num_ranks}",
    )
    layers = field(
        described,
        "experts_by_slot",
        lambda v: isinstance(v, dict) and v and all(map(is_name, v)),
        "an object, with a list of experts for each layer",
    )
    for name, experts in layers.items():
        _check_experts(name, experts, num_experts)
    return Placement(
        model=field(described, "model", is_name, "the model's name"),
        layers=tuple(layers),
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        method=field(described, "method", is_name, "the name of a method"),
        experts_LE=torch.tensor(list(layers.values()), dtype=torch.int64),
    )


def _check_experts(layer: str, experts: Any, num_experts: int) -> None:
    due = f"each of the {num_experts} experts once"
    if not isinstance(experts, list):
        raise ValueError(f"{layer} is {shown(experts)}, expected a list: {due}")
    for slot, expert in enumerate(experts):
        if not is_integer(expert, 0, num_experts - 1):
            raise ValueError(
                f"{layer} has {shown(expert)} in slot {slot}, expected an integer from 0 to "
                f"{num_experts - 1}"
            )
    if (twice := first_twice(experts)) is not None:
        raise ValueError(f"{layer} has expert {twice} twice, expected {due}")
    if len(experts) != num_experts:
        raise ValueError(f"{layer} has {len(experts)} experts, expected {due}")


def _one_layer_a_line(described: dict) -> str:
    layers = described.pop("experts_by_slot")
    head = json.dumps(described, indent=1)[:-2]
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(ids)}" for name, ids in layers.items())
    return f'{head},\n "experts_by_slot": {{\n{lines}\n }}\n}}\n'
