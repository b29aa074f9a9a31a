"""The second level of a gather: each node completes within itself what has crossed between nodes.

    rows of the output (R = 2 nodes of S = 3 ranks), at the rank in place 1 of its node

    from node 0   [ . 1 . ]   decoded from payloads of (., 1), of which this rank caches R shards:
    from node 1   [ . 1 . ]   1 / S of the model
                      |
                  all-gathers within the node, of decoded shards, one for each node
                      v
                  [ 0 1 2 ]
                  [ 0 1 2 ]

Ranks in the same place of their nodes have received the same payloads, and so found the same wrong
with them. Hence an outcome that is agreed on within each node is agreed on by all.
"""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from narrowcast.errors import NarrowcastError, raise_alike
from narrowcast.fsdp2 import coalesced
from narrowcast.topology import TwoLevels

MAX_GATHERS = 8  # nodes up to which each has a gather of its own, without a copy


def complete_within(
    rows_WB: Tensor, decode_into: Callable[[Tensor], None], levels: TwoLevels
) -> None:
    """Decodes the shards of this rank's place, and gathers those of all other places.

    Args:
        rows_WB: all shards of the process group, uint8, in node-major order; overwritten.
        decode_into: writes the shards of this rank's place into its argument, (R, B).

    Raises:
        NarrowcastError: what ``decode_into`` raised on any rank of the node.
    """
    num_nodes, place = levels.across.size(), levels.within.rank()
    rows_RSB = rows_WB.view(num_nodes, levels.within.size(), -1)
    error = None
    try:
        decode_into(rows_RSB[:, place])
    except NarrowcastError as wrong:
        error = wrong
    raise_alike(error, levels.within, rows_WB.device)
    if num_nodes <= MAX_GATHERS:
        with coalesced(levels.within, rows_WB.device):
            for rows_SB in rows_RSB:
                dist.all_gather_single(rows_SB.view(-1), rows_SB[place], group=levels.within)
    else:
        staged_SRB = rows_RSB.new_empty(rows_RSB.transpose(0, 1).shape)
        own_RB = rows_RSB[:, place].contiguous()
        dist.all_gather_single(staged_SRB.view(-1), own_RB.view(-1), group=levels.within)
        rows_RSB.copy_(staged_SRB.transpose(0, 1))
