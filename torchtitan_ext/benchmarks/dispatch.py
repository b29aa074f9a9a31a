"""What the way of tokens to their experts costs: rows, bytes and seconds, torchtitan's and ours.

    torchrun --nproc-per-node 4 -m torchtitan_ext.benchmarks.dispatch \\
        --job.config_file train_configs/dispatch.toml

Every rank runs it, under torchrun or any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT, such as `scripts/slow_links`. It trains the job and records a routing trace, or takes
checkpoint and trace that are in `dump_folder` already. Then every variant goes on from there, with
the same data: torchtitan's path, and the deduplicated one under placements planned from that trace.
Optimizers step with a learning rate of zero then, so that placements are judged on the routers that
they were planned for, and on new text. Variants take their steps in turn, so that none is favoured
by what else the machine does.

In half of the steps the seconds of each all-to-all are taken, forward and backward, from the moment
when all ranks have come to it until it is done; in the other half, those of the whole step. Of each
step the slowest rank counts. All variants send by the same operator of torch.
"""

import argparse
import contextlib
import gc
import os
import statistics
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.util import aligned

WARM_UP_ROUNDS = 1
TRACED_STEPS = 10
TRACE = "routing_trace.safetensors"
# In each of four passes a row crosses: dispatch and combine, forward and backward.
PASSES = 4
_MIB = 1 << 20
_QUIET = ["--metrics.log_freq", "1000000"]
_CHECKPOINT = ["--checkpoint.enable", "--checkpoint.no-last_save_model_only"]


def variants(trace: Path, nodes: int) -> dict[str, list[str]]:
    """Flags of each, by name; torchtitan's own path first."""
    deduplicated = ["--narrowcast.dispatch.deduplicate"]

    def placed(method: str) -> list[str]:
        placement = {"trace": trace, "method": method, "nodes": nodes}
        return deduplicated + [
            text for k, v in placement.items() for text in (f"--narrowcast.placement.{k}", str(v))
        ]

    flags = {
        "torchtitan": [],
        "deduplicated, contiguous": deduplicated,
        "deduplicated, Occult's": placed("occult"),
        "deduplicated, ours": placed("rows"),
    }
    if nodes > 1:
        two_levels = ["--narrowcast.dispatch.nodes", str(nodes)]
        flags["ours, in two levels"] = placed("rows") + two_levels
    return flags


@dataclass
class Exchanges:
    """The all-to-alls of one step, on one rank.

    Attributes:
        seconds: in them.
        rows: that this rank sent to other ranks, of tokens and their gradients.
        node_rows, node_bytes: of what it sent, rows and all bytes to other nodes.
    """

    seconds: float = 0.0
    rows: int = 0
    node_rows: int = 0
    node_bytes: int = 0


@contextlib.contextmanager
def timed(exchanges: Exchanges, nodes: int) -> Iterator[None]:
    """Adds up every all-to-all within, each timed from when all ranks have come to it until done.

    Replaces the operator that both paths, and its own backward, call by name. Results are the same.
    """
    import torch
    import torch.distributed as dist

    from narrowcast.fsdp2 import functional_operators as namespace
    from narrowcast.fsdp2 import process_group_of

    all_to_all_single = namespace.all_to_all_single
    ranks_per_node = dist.get_world_size() // nodes
    me = dist.get_rank()

    def timed_all_to_all(
        rows: torch.Tensor, received: list[int], sent: list[int], group_name: str
    ) -> torch.Tensor:
        dist.barrier()
        start = time.perf_counter()
        out = all_to_all_single(rows, received, sent, group_name)
        with torch.no_grad():
            namespace.wait_tensor(out)
        exchanges.seconds += time.perf_counter() - start
        there = dist.get_process_group_ranks(process_group_of(group_name))
        to_ranks = sum(n for r, n in zip(there, sent, strict=True) if r != me)
        to_nodes = sum(
            n
            for r, n in zip(there, sent, strict=True)
            if r // ranks_per_node != me // ranks_per_node
        )
        if rows.dtype != torch.int64:  # those are counts
            exchanges.rows += to_ranks
            exchanges.node_rows += to_nodes
        exchanges.node_bytes += to_nodes * rows[:1].numel() * rows.element_size()
        return out

    namespace.all_to_all_single = timed_all_to_all
    try:
        yield
    finally:
        namespace.all_to_all_single = all_to_all_single


@dataclass(frozen=True)
class Step:
    """A pair of steps of one variant on one rank: a whole one, and one whose all-to-alls are timed.

    Attributes:
        seconds: of the whole step.
        exchanges: of the timed one.
        dispatch_bytes, combine_bytes, sent_bytes: by the ledger, in the whole step; the last in all
            collectives.
        interface_bytes: that left by the network interface in the whole step; None where it is not
            known.
        tokens: this rank's, summed over layers; 0 where the ledger does not know.
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


@dataclass(frozen=True)
class Measured:
    """A variant: what each rank saw of each pair of steps, and C_T by the trace."""

    steps: list[list[Step]]
    traced_rows: float


class Variant:
    """A trainer that goes on from the checkpoint, step by step."""

    def __init__(self, flags: list[str], trained_steps: int, trace: Path, nodes: int) -> None:
        self.trainer = _config([*flags, *_CHECKPOINT, "--checkpoint.load_only", *_QUIET]).build()
        self.nodes = nodes
        self.trainer.checkpointer.load(step=trained_steps)
        self._hold_still()
        self.traced_rows = _traced_rows(self.trainer, trace)
        self.ledger = self.trainer.metrics_processor.ledger
        self.ledger.stop()
        self._data = self.trainer.batch_generator(self.trainer.dataloader)

    def _hold_still(self) -> None:
        """Optimizers step, but change nothing: routers stay those that the placements are for."""
        from torchtitan_ext.private import moe_layers

        for scheduler in self.trainer.lr_schedulers.schedulers:
            scheduler.base_lrs = [0.0 for _ in scheduler.base_lrs]
            for group in scheduler.optimizer.param_groups:
                group["lr"] = group["lr"] * 0
        for part in self.trainer.model_parts:
            for moe in moe_layers(part).values():
                if moe.load_balance_coeff is not None:
                    moe.load_balance_coeff = 0.0

    def pair(self) -> Step:
        """Every rank calls it, alike."""
        import torch.distributed as dist

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
    """Sent so far by the network interface that gloo is told to use; None if it is told of none."""
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    return int(Path(f"/sys/class/net/{name}/statistics/tx_bytes").read_text()) if name else None


def measure(
    flags: list[str], nodes: int, batch: int, rounds: int
) -> tuple[dict[str, Measured], int]:
    """Trains the job of these flags of ``torchtitan_ext.train``, if it was not, and every variant.

    Args:
        nodes: that the ranks are spread over, consecutive ones on each.
        batch: sequences a rank in the measured steps.
        rounds: pairs of steps of each variant, after warm-up.

    Returns:
        Variants by name, the same on every rank; and K, experts a token.
    """
    from torchtitan_ext.tracing import describe, gathered

    trained_steps, trace = _train(flags)
    last_step = trained_steps + 2 * (WARM_UP_ROUNDS + rounds)
    flags = [*flags, "--training.local_batch_size", str(batch), "--training.steps", str(last_step)]
    built = {
        name: Variant([*flags, *more], trained_steps, trace, nodes)
        for name, more in variants(trace, nodes).items()
    }
    steps: dict[str, list[Step]] = {name: [] for name in built}
    for _ in range(WARM_UP_ROUNDS + rounds):
        for name, variant in built.items():
            steps[name].append(variant.pair())
    everyones = gathered({name: of[WARM_UP_ROUNDS:] for name, of in steps.items()})
    top_k = describe(built["torchtitan"].trainer, "")["top_k"]
    for variant in built.values():
        variant.trainer.close()
    gc.enable()  # torchtitan disables it
    measured = {
        name: Measured([ranks[name] for ranks in everyones], variant.traced_rows)
        for name, variant in built.items()
    }
    return measured, top_k


def _train(flags: list[str]) -> tuple[int, Path]:
    """Trains with a trace of the last steps, if checkpoint and trace are not there. The steps, and
    the trace."""
    config = _config(flags)
    steps, folder = config.training.steps, Path(config.dump_folder)
    trace = folder / TRACE
    if trace.exists() and (folder / config.checkpoint.folder / f"step-{steps}").exists():
        return steps, trace
    first = max(1, steps - TRACED_STEPS + 1)
    traced = {"first_step": first, "num_steps": steps - first + 1, "file": TRACE}
    traced_flags = [
        text for k, v in traced.items() for text in (f"--narrowcast.routing_trace.{k}", str(v))
    ]
    traced_flags.append("--narrowcast.routing_trace.enable")
    trainer = _config([*flags, *_CHECKPOINT, *traced_flags]).build()
    trainer.train()
    trainer.close()
    return steps, trace


def _traced_rows(trainer: Any, trace: Path) -> float:
    """C_T by the trace, the mean over layers; K where each expert gets a row of its own."""
    from narrowcast.placement.metrics import measure as measure_placement
    from narrowcast.placement.placement import contiguous
    from narrowcast.placement.trace import load_trace
    from torchtitan_ext.tracing import describe

    model = describe(trainer, "")
    if not trainer.config.narrowcast.dispatch.deduplicate:
        return model["top_k"]
    placement = trainer.placed and trainer.placed.placement
    placement = placement or contiguous(
        *(model[k] for k in ("model", "layers", "num_experts", "num_ranks")), 1
    )
    return statistics.mean(
        m.rows_per_token for m in measure_placement(load_trace(trace), placement)
    )


def rows_table(measured: dict[str, Measured], top_k: int, nodes: int) -> str:
    """Rows a token and bytes a step of each variant."""
    tokens = max(_all(m, "tokens") for m in measured.values())  # the same in all that count them
    rows = [["", "trace C_T", "C_T", "removed", "to ranks", "to nodes"]]
    rows[0] += ["dispatch", "combine", "node"]
    for name, m in measured.items():
        rank_rows = _all(m, "rank_rows") / tokens or top_k
        crossed = [
            sum(getattr(step.exchanges, what) for steps in m.steps for step in steps)
            for what in ("rows", "node_rows")
        ]
        rows.append(
            [
                name,
                f"{m.traced_rows:.3f}",
                f"{rank_rows:.3f}",
                f"{1 - rank_rows / top_k:.1%}",
                *(f"{count / PASSES / tokens:.3f}" for count in crossed),
                *(
                    f"{statistics.median(_worst(m, what)) / _MIB:.2f}"
                    for what in ("dispatch_bytes", "combine_bytes")
                ),
                f"{statistics.median(_busiest_node(m, nodes)) / _MIB:.2f}",
            ]
        )
    return aligned(rows if nodes > 1 else [[*r[:5], *r[6:8]] for r in rows], words=1)


def time_table(measured: dict[str, Measured]) -> str:
    """Seconds a step of each variant, and their ratios to the first."""
    rows = [["", "all-to-alls", "(min to max)", "ratio", "step", "(min to max)", "ratio"]]
    base: list[float] = []
    for name, m in measured.items():
        seconds = [_slowest_exchanges(m), _worst(m, "seconds")]
        medians = [statistics.median(s) for s in seconds]
        base = base or medians
        rows.append([name])
        for s, median, first in zip(seconds, medians, base, strict=True):
            spread = f"({min(s):.2f} to {max(s):.2f})"
            rows[-1] += [f"{median:.3f}", spread, f"{median / first:.2f}"]
    return aligned(rows, words=1)


def interface_table(measured: dict[str, Measured]) -> str:
    """The ledger's bytes a step in all collectives beside the interface's, a rank, and how much
    less they are than the first variant's, which is due to dispatch and combine alone."""
    rows = [["", "ledger", "interface", "ratio", "less", "less", "ratio"]]
    base: list[float] = []
    for name, m in measured.items():
        steps = [step for of_rank in m.steps for step in of_rank]
        sent = [statistics.mean(step.sent_bytes for step in steps)]
        sent.append(statistics.mean(step.interface_bytes for step in steps))
        base = base or sent
        less = [first - mine for first, mine in zip(base, sent, strict=True)]
        rows.append([name])
        for ledger, interface in (sent, less):
            ratio = f"{interface / ledger:.3f}" if ledger else "-"
            rows[-1] += [f"{ledger / _MIB:.2f}", f"{interface / _MIB:.2f}", ratio]
    return aligned(rows, words=1)


def _all(measured: Measured, what: str) -> int:
    return sum(getattr(step, what) for steps in measured.steps for step in steps)


def _worst(measured: Measured, what: str) -> list[Any]:
    """Of each step, on the rank that has most."""
    return [max(getattr(s, what) for s in ranks) for ranks in zip(*measured.steps, strict=True)]


def _slowest_exchanges(measured: Measured) -> list[float]:
    return [max(s.exchanges.seconds for s in ranks) for ranks in zip(*measured.steps, strict=True)]


def _busiest_node(measured: Measured, nodes: int) -> list[int]:
    """Of each step, what all ranks of one node send to other nodes, on the node that sends most."""
    per_node = len(measured.steps) // nodes
    return [
        max(
            sum(s.exchanges.node_bytes for s in ranks[node * per_node : (node + 1) * per_node])
            for node in range(nodes)
        )
        for ranks in zip(*measured.steps, strict=True)
    ]


def _config(flags: list[str]) -> Any:
    from torchtitan.config import ConfigManager

    sys.argv[1:] = ["--module", "torchtitan_ext", "--config", "from_toml", *flags]
    return ConfigManager().parse_args()


def main() -> None:
    """Measures every variant on the flags in `sys.argv`; the first rank prints the tables."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=6)
    mine, flags = parser.parse_known_args()

    from torchtitan_ext import compat, cpu

    compat.apply()
    cpu.apply()
    import torch.distributed as dist

    measured, top_k = measure(flags, mine.nodes, mine.batch, mine.rounds)
    if dist.get_rank() == 0:
        legend = (
            f"{dist.get_world_size()} ranks on {mine.nodes} node(s), top-{top_k}; medians of "
            f"{mine.rounds} steps after warm-up. C_T: ranks that hold a token's experts, by the "
            "trace that placements were planned from, and as measured. removed: of one row an "
            "expert. to ranks: rows a token that leave its rank. dispatch, combine: MiB a step of "
            "the worst rank, by the ledger."
        )
        if mine.nodes > 1:
            legend += (
                " to nodes: rows a token that leave its node. node: MiB a step that the busiest "
                "node sends to others."
            )
        print(
            f"\n{textwrap.fill(legend, 100)}\n\n{rows_table(measured, top_k, mine.nodes)}\n\n"
            f"Seconds a step, of the slowest rank\n\n{time_table(measured)}"
        )
        if interface_bytes() is not None:
            print(
                "\nMiB a step and rank in all collectives, and how much less than torchtitan's\n\n"
                f"{interface_table(measured)}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
