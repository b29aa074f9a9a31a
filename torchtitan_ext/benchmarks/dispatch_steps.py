"""Steps of the dispatch benchmark: the seconds, rows and bytes of their all-to-alls."""

import contextlib
import gc
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from narrowcast.fsdp2 import functional_operators, process_group_of
from torchtitan_ext.job import parse_job
from torchtitan_ext.private import moe_layers

CHECKPOINT = ("--checkpoint.enable", "--checkpoint.no-last_save_model_only")
_QUIET = ("--metrics.log_freq", "1000000")


@dataclass
class Exchanges:
    """The all-to-alls of one step on one rank.

    Attributes:
        seconds: in them.
        rows: sent by this rank to other ranks, of tokens and their gradients.
        node_rows, node_bytes: sent by this rank to other nodes, rows and all bytes.
    """

    seconds: float = 0.0
    rows: int = 0
    node_rows: int = 0
    node_bytes: int = 0


@contextlib.contextmanager
def timed(exchanges: Exchanges, nodes: int) -> Iterator[None]:
    """Add up every all-to-all within it, each from when all ranks have come to it until it is done.

    It replaces the operator that both dispatchers, and its own backward, call by name. Results are
    the same.
    """
    all_to_all_single = functional_operators.all_to_all_single
    ranks_per_node = dist.get_world_size() // nodes
    rank = dist.get_rank()

    def timed_all_to_all(
        rows: torch.Tensor, received: list[int], sent: list[int], group_name: str
    ) -> torch.Tensor:
        dist.barrier()
        start = time.perf_counter()
        out = all_to_all_single(rows, received, sent, group_name)
        with torch.no_grad():
            functional_operators.wait_tensor(out)
        exchanges.seconds += time.perf_counter() - start
        by_rank = list(
            zip(dist.get_process_group_ranks(process_group_of(group_name)), sent, strict=True)
        )
        to_ranks = sum(n for r, n in by_rank if r != rank)
        to_nodes = sum(n for r, n in by_rank if r // ranks_per_node != rank // ranks_per_node)
        if rows.dtype != torch.int64:  # those are counts
            exchanges.rows += to_ranks
            exchanges.node_rows += to_nodes
        exchanges.node_bytes += to_nodes * rows[:1].numel() * rows.element_size()
        return out

    functional_operators.all_to_all_single = timed_all_to_all
    try:
        yield
    finally:
        functional_operators.all_to_all_single = all_to_all_single


@dataclass(frozen=True)
class Step:
    """Two steps of one variant on one rank: a whole one, and one whose all-to-alls are timed.

    Attributes:
        seconds: of the whole step.
        exchanges: of the timed one.
        dispatch_bytes, combine_bytes, sent_bytes: by the ledger, in the whole step; the last in all
            collectives.
        interface_bytes: sent by the network interface in the whole step; None where that is not
            known.
        tokens: of this rank, summed over layers; 0 where the ledger does not count them.
        rank_rows: pairs of a token and a rank that holds any of its experts.
    """

    seconds: float
    exchanges: Exchanges
    dispatch_bytes: int
    combine_bytes: int
    sent_bytes: int
    interface_bytes: int | None
    tokens: int
    rank_rows: int


class Variant:
    """A trainer that goes on from a checkpoint, step by step. Every rank must make one alike.

    Args:
        flags: of ``torchtitan_ext.train``.
        trained_steps: of the checkpoint.
        nodes: that the ranks are spread over.
    """

    def __init__(self, flags: Sequence[str], trained_steps: int, nodes: int) -> None:
        self.trainer = parse_job([*flags, *CHECKPOINT, "--checkpoint.load_only", *_QUIET]).build()
        self.nodes = nodes
        self.trainer.checkpointer.load(step=trained_steps)
        self._freeze()
        self.ledger = self.trainer.metrics_processor.ledger
        self.ledger.stop()
        self._data = self.trainer.batch_generator(self.trainer.dataloader)

    def _freeze(self) -> None:
        """Let optimizers step but change nothing: routers stay those that placements are for."""
        for scheduler in self.trainer.lr_schedulers.schedulers:
            scheduler.base_lrs = [0.0 for _ in scheduler.base_lrs]
            for group in scheduler.optimizer.param_groups:
                group["lr"] = group["lr"] * 0
        for part in self.trainer.model_parts:
            for moe in moe_layers(part).values():
                if moe.load_balance_coeff is not None:
                    moe.load_balance_coeff = 0.0

    def pair(self) -> Step:
        """Train two steps. Every rank must call it alike."""
        gc.collect()  # as torchtitan's own loop does now and then
        dist.barrier()
        before = interface_bytes()
        seconds = self._step()
        volume = self.ledger.last
        dist.barrier()
        after = interface_bytes()
        exchanges = Exchanges()
        with timed(exchanges, self.nodes):
            self._step()
        return Step(
            seconds=seconds,
            exchanges=exchanges,
            dispatch_bytes=volume.sent["dispatch"],
            combine_bytes=volume.sent["combine"],
            sent_bytes=volume.sent.total(),
            interface_bytes=None if before is None else after - before,
            tokens=sum(layer.tokens for layer in volume.tokens.values()),
            rank_rows=sum(layer.rank_rows for layer in volume.tokens.values()),
        )

    def _step(self) -> float:
        self.ledger.start()
        start = time.perf_counter()
        self.trainer.step += 1
        self.trainer.train_step(self._data)
        seconds = time.perf_counter() - start
        self.ledger.stop()
        return seconds


def interface_bytes() -> int | None:
    """Bytes sent so far by the network interface that gloo is told to use; None without one."""
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    return int(Path(f"/sys/class/net/{name}/statistics/tx_bytes").read_text()) if name else None
