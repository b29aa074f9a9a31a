"""The first level of a reduction: each node sums within itself what is to cross between nodes.

    contributions at a rank in place 1 of its node (R = 2 nodes of S = 3 ranks)

    to node 0     [ 0 1 2 ]
    to node 1     [ 0 1 2 ]
                      |
                  reduce-scatters within the node, one for each node: the backend's own SUM
                      v
    to node 0     [ . 1 . ]   sums of S contributions to the gradients of (., 1), which cross
    to node 1     [ . 1 . ]   between nodes to their owners, and are added there in node order

They are sums, never means: a value that is scaled fills all bits of its mantissa, and the sum of a
few bf16 numbers does not.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.errors import SettingsError
from narrowcast.fsdp2 import coalesced
from narrowcast.reducescatter.row_codec import OTHER_GRADIENTS
from narrowcast.topology import TwoLevels
from narrowcast.wire.exchange import largest_sizes

MAX_REDUCTIONS = 8  # nodes up to which each has a reduction of its own, without a copy


def check_same_within(digest: int, levels: TwoLevels, device: torch.device) -> None:
    """Checks that the ranks of this rank's node are about to sum the same gradients, by a 64-bit
    digest of what they are: the backend would wait for ever, or add what does not belong together.

    Raises:
        SettingsError: they are not; on each of these ranks.
    """
    signed = digest >> 1  # fits int64
    if sum(largest_sizes([signed, -signed], levels.within, device)):
        raise SettingsError(OTHER_GRADIENTS)


def sum_within(rows_WN: Tensor, levels: TwoLevels) -> Tensor:
    """The sums over this rank's node of the contributions to the gradients of its place, (R, N).

    Args:
        rows_WN: this rank's contributions to all gradients of the process group, in node-major
            order.
    """
    num_nodes, num_places = levels.across.size(), levels.within.size()
    rows_RSN = rows_WN.view(num_nodes, num_places, -1)
    sums_RN = rows_RSN.new_empty(num_nodes, rows_RSN.shape[2])
    if num_nodes <= MAX_REDUCTIONS:
        with coalesced(levels.within, rows_WN.device):
            for sums_N, rows_SN in zip(sums_RN, rows_RSN, strict=True):
                dist.reduce_scatter_single(sums_N, rows_SN.view(-1), group=levels.within)
    else:
        rows_SRN = rows_RSN.transpose(0, 1).contiguous()
        dist.reduce_scatter_single(sums_RN.view(-1), rows_SRN.view(-1), group=levels.within)
    return sums_RN
