"""Co-selection counts, for routers without a trace: their files, and metrics of a placement."""

import math
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from narrowcast.placement.balance import part_loads
from narrowcast.placement.metrics import PlacementMetrics, rows_bounds
from narrowcast.placement.placement import Placement


@dataclass(frozen=True)
class CoselectionCounts:
    """How many tokens of each of L layers selected both of two experts.

    Attributes:
        model: name and flavor, as in a trace; otherwise the name of the file.
        layers: names of the MoE modules; otherwise "layers.0" and so on.
        counts_LEE: (L, E, E) int64, symmetric, with a zero diagonal.
        top_k: experts of a token, or None if unknown.
    """

    model: str
    layers: tuple[str, ...]
    counts_LEE: Tensor
    top_k: int | None = None

    @property
    def num_experts(self) -> int:
        """E."""
        return self.counts_LEE.shape[1]

    @property
    def load_LE(self) -> Tensor:
        """(L, E) int64, assignments to each expert, times K - 1."""
        return self.counts_LEE.sum(dim=2)

    def check_determines_rows(self) -> None:
        """Raise a ``ValueError`` unless pairs determine the rows of tokens: at top-2 a token is one
        pair."""
        if self.top_k != 2:
            router = "is not known" if self.top_k is None else f"is {self.top_k}"
            raise ValueError(
                'co-selection counts determine the ranks of a token, which method "rows" counts, '
                f"for a top-2 router only, and top_k {router} here: give --top-k 2 if it is one, "
                "use --method pairwise, or record a trace"
            )


def is_coselection(path: str | Path) -> bool:
    """Return whether a file is an .npz archive, and therefore not a trace."""
    return zipfile.is_zipfile(path)


def load_coselection(path: str | Path, top_k: int | None = None) -> CoselectionCounts:
    """Read an .npz file with the array ``coselection`` (L, E, E) and, optionally, ``model`` (a
    string) and ``layers`` (L strings), which a placement needs in order to be used in training.

    Args:
        path: the file.
        top_k: experts of a token.

    Raises:
        ValueError: it has no such counts. The message names what is wrong.
    """
    if top_k is not None and top_k < 2:
        raise ValueError(f"top_k = {top_k}: co-selection needs at least 2 experts for each token")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path} is not an .npz file of co-selection counts: {error}") from error
    if "coselection" not in arrays:
        raise ValueError(
            f"{path} has no array `coselection`: it has {', '.join(arrays) or 'none'}. Give one of "
            "shape (layers, experts, experts), or a routing trace"
        )
    counts_LEE = arrays["coselection"]
    if wrong := _wrong(counts_LEE):
        raise ValueError(
            f"{path}: coselection {wrong}. Entry (l, i, j) counts the tokens of layer l that "
            "selected both expert i and expert j, and is 0 for i = j"
        )
    layers = arrays.get("layers", np.array([f"layers.{i}" for i in range(len(counts_LEE))]))
    names = tuple(map(str, layers.reshape(-1)))
    if len(set(names)) != len(counts_LEE):
        raise ValueError(f"{path}: layers are not {len(counts_LEE)} different names: {names}")
    model = str(arrays.get("model", Path(path).stem))
    return CoselectionCounts(model, names, torch.from_numpy(counts_LEE.astype(np.int64)), top_k)


def _wrong(counts_LEE: np.ndarray) -> str:
    """Return why an array does not have co-selection counts; an empty string if it does."""
    shape = counts_LEE.shape
    if len(shape) != 3 or shape[1] != shape[2] or 0 in shape:
        return f"has shape {shape}, not (layers, experts, experts)"
    if not np.issubdtype(counts_LEE.dtype, np.integer):
        return f"has dtype {counts_LEE.dtype}, which is not an integer dtype"
    if counts_LEE.min() < 0:
        return f"has the negative count {counts_LEE.min()}"
    if (counts_LEE != counts_LEE.transpose(0, 2, 1)).any():
        return "is not symmetric"
    if np.diagonal(counts_LEE, axis1=1, axis2=2).any():
        return "has a diagonal that is not 0"
    if not counts_LEE.any(axis=(1, 2)).all():
        return "has a layer without counts"
    return ""


def measure_counts(counts: CoselectionCounts, placement: Placement) -> list[PlacementMetrics]:
    """Return the metrics of a placement that counts determine, for each layer.

    These are the share of pairs that are on one rank, and the load of the busiest rank. At top-2
    they are all metrics, for tokens that are equally likely on any rank. The others are nan.

    Raises:
        ValueError: the placement is for another model.
    """
    placement.check(
        model=counts.model,
        layers=counts.layers,
        num_experts=counts.num_experts,
        num_ranks=placement.num_ranks,
    )
    ranks = placement.num_ranks
    measured = []
    for layer, counts_EE, load_E, rank_E in zip(
        counts.layers, counts.counts_LEE, counts.load_LE, placement.ranks_LE, strict=True
    ):
        load_R = part_loads(load_E, rank_E, ranks)
        measured.append(
            PlacementMetrics(
                layer=layer,
                rows_bounds=rows_bounds(counts.top_k or 1, counts.num_experts, ranks),
                intra_share=_share_within(counts_EE, rank_E),
                local_share=1 / ranks,
                busiest_load=(load_R.max() / load_R.mean()).item(),
                **_rows(counts, counts_EE, load_R, rank_E, placement),
            )
        )
    return measured


def _rows(
    counts: CoselectionCounts,
    counts_EE: Tensor,
    load_R: Tensor,
    rank_E: Tensor,
    placement: Placement,
) -> dict[str, float]:
    """Return the metrics that follow only at top-2, where a token is sent to one rank or to two."""
    names = "rows_per_token", "rows_removed", "nodes_per_token"
    names += "rows_to_ranks", "rows_to_nodes", "busiest_rows"
    if counts.top_k != 2:
        return dict.fromkeys(names, math.nan)
    ranks, nodes = placement.num_ranks, placement.num_nodes
    node_E = rank_E // (ranks // nodes)
    rows, nodes_met = (2 - _share_within(counts_EE, part_E) for part_E in (rank_E, node_E))
    within_EE = counts_EE.double() * (rank_E[:, None] == rank_E)
    rows_R = load_R - part_loads(within_EE.sum(dim=1), rank_E, ranks) / 2
    busiest_rows = (rows_R.max() / rows_R.mean()).item()
    leaving = rows * (1 - 1 / ranks), rows * (1 - 1 / nodes)
    return dict(zip(names, (rows, 1 - rows / 2, nodes_met, *leaving, busiest_rows), strict=True))


def _share_within(counts_EE: Tensor, part_E: Tensor) -> float:
    """Return the share of co-selected pairs that are on one part."""
    return (counts_EE[part_E[:, None] == part_E].sum() / counts_EE.sum()).item()
