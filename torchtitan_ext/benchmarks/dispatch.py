"""What it costs to send tokens to their experts: rows, bytes and seconds, torchtitan's and ours.

    torchrun --nproc-per-node 4 -m torchtitan_ext.benchmarks.dispatch \\
        --job.config_file train_configs/dispatch.toml

Every rank runs it, under torchrun or any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT, such as ``scripts/slow_links``. It trains the job and records a routing trace, or takes
the checkpoint and the trace that are in ``dump_folder`` already. Then every variant goes on from
there with the same data: torchtitan's dispatch, and the deduplicated one under placements planned
from that trace. Optimizers step with a learning rate of zero then, so that placements are judged on
the routers that they were planned for, and on new text. Variants take their steps in turn, so that
other work of the machine favours none.

In half of the steps the seconds of each all-to-all are measured, forward and backward, from the
moment when all ranks have come to it until it is done; in the other half, those of the whole step.
The slowest rank counts in each step. All variants send by the same operator of torch.
"""

import gc
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from narrowcast.placement.metrics import measure as measure_placement
from narrowcast.placement.placement import contiguous
from narrowcast.placement.trace import load_trace
from torchtitan_ext import compat
from torchtitan_ext.across_ranks import gathered
from torchtitan_ext.benchmarks.command_line import make_job_parser, write_json
from torchtitan_ext.benchmarks.dispatch_report import (
    Measured,
    interface_table,
    rows,
    rows_table,
    time_table,
)
from torchtitan_ext.benchmarks.dispatch_steps import CHECKPOINT, Step, Variant, interface_bytes
from torchtitan_ext.job import parse_job
from torchtitan_ext.routed_model import RoutedModel

WARM_UP_ROUNDS = 1
TRACED_STEPS = 10
TRACE = "routing_trace.safetensors"


def variants(trace: Path, nodes: int) -> dict[str, list[str]]:
    """The flags of each variant by its name; torchtitan's own dispatch first."""
    deduplicated = ["--narrowcast.dispatch.deduplicate"]

    def placed(method: str) -> list[str]:
        placement = {"trace": trace, "method": method, "nodes": nodes}
        return deduplicated + _flags("placement", placement)

    flags = {
        "torchtitan": [],
        "deduplicated, contiguous": deduplicated,
        "deduplicated, Occult's": placed("occult"),
        "deduplicated, ours": placed("rows"),
    }
    if nodes > 1:
        flags["ours, in two levels"] = placed("rows") + _flags("dispatch", {"nodes": nodes})
    return flags


def measure(
    flags: Sequence[str], nodes: int, batch: int, rounds: int
) -> tuple[dict[str, Measured], int]:
    """Train the job of these flags of ``torchtitan_ext.train``, if it was not, and every variant.

    Args:
        nodes: that the ranks are spread over, consecutive ones on each.
        batch: sequences of a rank in the measured steps.
        rounds: pairs of steps of each variant, after warm-up.

    Returns:
        Variants by name, the same on every rank; and the number of experts of a token.
    """
    trained_steps, trace = _train(flags)
    last_step = trained_steps + 2 * (WARM_UP_ROUNDS + rounds)
    flags = [*flags, "--training.local_batch_size", str(batch), "--training.steps", str(last_step)]
    built = {
        name: Variant([*flags, *more], trained_steps, nodes)
        for name, more in variants(trace, nodes).items()
    }
    steps: dict[str, list[Step]] = {name: [] for name in built}
    for _ in range(WARM_UP_ROUNDS + rounds):
        for name, variant in built.items():
            steps[name].append(variant.pair())
    by_rank = gathered({name: of[WARM_UP_ROUNDS:] for name, of in steps.items()})
    measured = {
        name: Measured([of_rank[name] for of_rank in by_rank], _traced_rows(variant.trainer, trace))
        for name, variant in built.items()
    }
    top_k = RoutedModel.of_trainer(built["torchtitan"].trainer, "").top_k
    for variant in built.values():
        variant.trainer.close()
    gc.enable()  # torchtitan disables it
    return measured, top_k


def _train(flags: Sequence[str]) -> tuple[int, Path]:
    """Train with a trace of the last steps, unless checkpoint and trace are there already.

    Returns:
        The number of steps, and the trace.
    """
    config = parse_job(flags)
    steps, folder = config.training.steps, Path(config.dump_folder)
    trace = folder / TRACE
    if trace.exists() and (folder / config.checkpoint.folder / f"step-{steps}").exists():
        return steps, trace
    first = max(1, steps - TRACED_STEPS + 1)
    traced = {"first_step": first, "num_steps": steps - first + 1, "file": TRACE}
    switches = ["--narrowcast.routing_trace.enable", *_flags("routing_trace", traced)]
    trainer = parse_job([*flags, *CHECKPOINT, *switches]).build()
    trainer.train()
    trainer.close()
    return steps, trace


def _flags(section: str, values: dict[str, Any]) -> list[str]:
    return [text for k, v in values.items() for text in (f"--narrowcast.{section}.{k}", str(v))]


def _traced_rows(trainer: Any, trace: Path) -> float:
    """Ranks of a token by the trace, the mean over layers; the number of its experts where each
    gets a row of its own."""
    model = RoutedModel.of_trainer(trainer, "")
    if not trainer.config.narrowcast.dispatch.deduplicate:
        return model.top_k
    placement = trainer.placed and trainer.placed.placement
    placement = placement or contiguous(
        model.model, model.layers, model.num_experts, model.num_ranks, 1
    )
    return statistics.mean(
        m.rows_per_token for m in measure_placement(load_trace(trace), placement)
    )


def _legend(top_k: int, nodes: int, rounds: int) -> str:
    legend = (
        f"{dist.get_world_size()} ranks on {nodes} node(s), top-{top_k}; medians of {rounds} steps "
        "after warm-up. C_T: ranks that hold a token's experts, by the trace that placements were "
        "planned from, and as measured. removed: of one row an expert. to ranks: rows a token that "
        "leave its rank. dispatch, combine: MiB a step of the worst rank, by the ledger."
    )
    if nodes > 1:
        legend += (
            " to nodes: rows a token that leave its node. node: MiB a step that the busiest node "
            "sends to others."
        )
    return textwrap.fill(legend, 100)


def main() -> None:
    """Measure every variant on the flags of the command line. The first rank prints the tables."""
    parser = make_job_parser("dispatch", __doc__)
    parser.add_argument("--nodes", type=int, default=1, help="that ranks are spread over (1)")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a rank (16)")
    parser.add_argument("--rounds", type=int, default=6, help="pairs of measured steps (6)")
    args, flags = parser.parse_known_args()
    compat.apply()
    measured, top_k = measure(flags, args.nodes, args.batch, args.rounds)
    if dist.get_rank() == 0:
        found = rows(measured, top_k, args.nodes)
        print(
            f"\n{_legend(top_k, args.nodes, args.rounds)}\n\n{rows_table(found, args.nodes)}\n\n"
            f"Seconds a step, of the slowest rank\n\n{time_table(found)}"
        )
        if interface_bytes() is not None:
            print(
                "\nMiB a step and rank in all collectives, and how much less than torchtitan's\n\n"
                f"{interface_table(found)}"
            )
        job = {"ranks": dist.get_world_size(), "nodes": args.nodes, "top_k": top_k}
        write_json(args.json, [{**row, **job, "steps": args.rounds} for row in found])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
