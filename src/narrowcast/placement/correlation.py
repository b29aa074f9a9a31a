"""Which experts are selected together: in one layer, and from one layer to the next.

Sources: Occult (section 2.1, equations 3 and 4) for the co-selection graph of a layer; Expert
Coupling (sections II.B and VI.A, appendix D) for the tables from layer to layer, and for the
correlation of the tables of different tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MIN_TOKENS = 1024
"""The fewest tokens that Expert Coupling fits tables on (section VI.A)."""


@dataclass(frozen=True)
class CrossLayerTable:
    """How often each expert of the next layer follows given experts of the layers before it.

    Attributes:
        keys_NQ: (N, Q) int64, the given experts, one of each of the Q layers before: distinct rows
            in ascending order.
        counts_NE: (N, E) int64, tokens that selected the experts of the row and then expert e.
        support_N: (N,) int64, tokens that selected the experts of the row.
    """

    keys_NQ: Tensor
    counts_NE: Tensor
    support_N: Tensor

    @property
    def probabilities_NE(self) -> Tensor:
        """(N, E) float64, the probability that a token with the experts of the row selects expert e
        next.

        A row sums to K, because a token selects K experts. It is nan where the support is 0.
        """
        return self.counts_NE.double() / self.support_N[:, None]


def coselection(ids_TK: Tensor, num_experts: int, weight_T: Tensor | None = None) -> Tensor:
    """Return how many tokens selected both expert i and expert j (Occult, equation 3).

    Args:
        ids_TK: (T, K) experts of each token, all different within a row, of any integer dtype.
        num_experts: E.
        weight_T: (T,) number of tokens that each row stands for; by default one.

    Returns:
        (E, E) int64, symmetric, with a zero diagonal.
    """
    ids_TK = ids_TK.long()
    first_P, second_P = torch.triu_indices(ids_TK.shape[1], ids_TK.shape[1], offset=1)
    pair_TP = ids_TK[:, first_P] * num_experts + ids_TK[:, second_P]
    weight = None
    if weight_T is not None:
        # bincount adds in float64, which is exact for whole numbers up to 2**53.
        weight = weight_T.double()[:, None].expand_as(pair_TP).reshape(-1)
    counts = torch.bincount(pair_TP.reshape(-1), weight, minlength=num_experts**2)
    counts_EE = counts.long().view(num_experts, num_experts)
    return counts_EE + counts_EE.T


def normalized(counts_EE: Tensor) -> Tensor:
    """Return (E, E) float64 the co-selection counts over the largest of them (Occult, equation 4).

    It is 0 without any co-selection.
    """
    return counts_EE.double() / counts_EE.max().clamp(min=1)


def first_order(previous_TK: Tensor, next_TK: Tensor, num_experts: int) -> CrossLayerTable:
    """Return the table from each expert of a layer to those of the next (Expert Coupling, II.B).

    Args:
        previous_TK, next_TK: (T, K) experts of the same tokens in two successive layers.
        num_experts: E.

    Returns:
        E rows, one for each expert, with support 0 for an expert that no token selected.

    Raises:
        ValueError: fewer than ``MIN_TOKENS`` tokens.
    """
    return _table(torch.arange(num_experts)[:, None], previous_TK.long(), next_TK, num_experts)


def second_order(
    before_TK: Tensor, previous_TK: Tensor, next_TK: Tensor, num_experts: int
) -> CrossLayerTable:
    """Return the table from pairs of experts, of two successive layers, to those of the next layer.

    Args:
        before_TK, previous_TK, next_TK: (T, K) experts of the same tokens in three successive
            layers.
        num_experts: E.

    Returns:
        One row for each pair that a token selected: at most T * K * K of the E * E pairs.

    Raises:
        ValueError: fewer than ``MIN_TOKENS`` tokens.
    """
    pair_TKK = before_TK.long()[:, :, None] * num_experts + previous_TK.long()[:, None, :]
    seen = torch.zeros(num_experts**2, dtype=torch.bool)
    seen[pair_TKK] = True
    pair_N, row_TKK = seen.nonzero()[:, 0], (seen.cumsum(dim=0) - 1)[pair_TKK]
    keys_NQ = torch.stack([pair_N // num_experts, pair_N % num_experts], dim=1)
    return _table(keys_NQ, row_TKK.flatten(1), next_TK, num_experts)


def most_frequent_next(table: CrossLayerTable) -> Tensor:
    """Return (N,) float64 the share of each row's tokens that select its most frequent next expert.

    Expert Coupling, section II.B: "112 of 128 layer-8 experts send at least 30 % of their tokens to
    one specific layer-9 expert, and the median share is 48 %". It is nan where the support is 0.
    """
    return table.probabilities_NE.amax(dim=1)


def held_out_correlation(
    fitted: Tensor | CrossLayerTable, held_out: Tensor | CrossLayerTable
) -> float:
    """Return Pearson's correlation of the entries of two tables, fitted on different tokens.

    Expert Coupling, section VI.A, reports 0.93 (top-2) and 0.98 (top-6) for co-selection on 4,096
    tokens.

    Args:
        fitted, held_out: two results of ``coselection``, in which each pair of experts counts once;
            or two cross-layer tables of the same order, in which all counts do. A row that only one
            of them has is 0 in the other.

    Returns:
        A number from -1 to 1; nan if all entries of a table are equal.
    """
    if isinstance(fitted, CrossLayerTable):
        x, y = _aligned(fitted, held_out)
    else:
        first_P, second_P = torch.triu_indices(*fitted.shape, offset=1)
        x, y = (table[first_P, second_P].double() for table in (fitted, held_out))
    x, y = x - x.mean(), y - y.mean()
    return (x.dot(y) / (x.norm() * y.norm())).item()


def _aligned(one: CrossLayerTable, other: CrossLayerTable) -> list[Tensor]:
    """Return the counts of two tables, flattened, in float64, with the rows of both."""
    keys_NQ, row_N = torch.cat([one.keys_NQ, other.keys_NQ]).unique(dim=0, return_inverse=True)
    rows = row_N.split([len(one.keys_NQ), len(other.keys_NQ)])
    aligned = []
    for table, row_M in zip((one, other), rows, strict=True):
        counts_NE = torch.zeros(len(keys_NQ), table.counts_NE.shape[1], dtype=torch.float64)
        counts_NE[row_M] = table.counts_NE.double()
        aligned.append(counts_NE.flatten())
    return aligned


def _table(keys_NQ: Tensor, row_TC: Tensor, next_TK: Tensor, num_experts: int) -> CrossLayerTable:
    """Count the C rows of each token against the K experts that it selects next."""
    if len(next_TK) < MIN_TOKENS:
        raise ValueError(
            f"{len(next_TK)} tokens are too few to estimate which expert follows which: "
            f"record at least {MIN_TOKENS}"
        )
    rows = len(keys_NQ)
    counts = torch.zeros(rows * num_experts, dtype=torch.int64)
    for next_T in next_TK.long().unbind(dim=1):
        entry_TC = row_TC * num_experts + next_T[:, None]
        # In place: there may be many more entries than tokens.
        counts.scatter_add_(
            0, entry_TC.flatten(), torch.ones((), dtype=torch.int64).expand(entry_TC.numel())
        )
    support_N = torch.bincount(row_TC.flatten(), minlength=rows)
    return CrossLayerTable(keys_NQ, counts.view(rows, num_experts), support_N)
