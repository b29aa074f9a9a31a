"""Compares the methods of placing experts on traces, with each other and with a partitioner.

``python -m torchtitan_ext.benchmarks.placement TRACE [TRACE ...] --ranks 4 8`` plans with every
method from the earlier four fifths of each trace, without a bound on load, and counts the rows that
the later fifth sends. Mt-KaHyPar (PyPI: mtkahypar), where it is installed, partitions the
hypergraph of the same tokens with its connectivity as the objective, with exactly E / R experts a
rank.

``--speed`` times the search alone on synthetic tokens: 128 and 256 experts, top-8, 32 ranks.
"""

import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from narrowcast.placement import partition
from narrowcast.placement.effort import SECONDS, Effort
from narrowcast.placement.metrics import rows_per_token
from narrowcast.placement.placement import Placement
from narrowcast.placement.planning import HELD_OUT, make_plan, plan
from narrowcast.placement.trace import RoutingTrace, load_trace
from narrowcast.util import aligned
from torchtitan_ext.benchmarks.command_line import make_parser, write_json

METHODS = ("contiguous", "random", "occult", "pairwise", "rows")
PARTITIONER = "mt-kahypar"
TOP_K = 8


def mt_kahypar(sets: partition.RoutedSets, num_parts: int, seeds: int) -> Tensor:
    """The part (E,) of each expert, by Mt-KaHyPar's best connectivity partition of several seeds.

    Raises:
        ModuleNotFoundError: mtkahypar is not installed.
    """
    import mtkahypar

    partitioner = mtkahypar.initialize(1)
    context = partitioner.context_from_preset(mtkahypar.PresetType.QUALITY)
    context.set_partitioning_parameters(num_parts, 0.0, mtkahypar.Objective.KM1)
    context.logging = False
    hypergraph = partitioner.create_hypergraph(
        context,
        sets.num_experts,
        len(sets.ids_SK),
        [sorted(set(ids)) for ids in sets.ids_SK.tolist()],
        [1] * sets.num_experts,
        sets.weight_S.tolist(),
    )
    found = []
    for seed in range(seeds):
        mtkahypar.set_seed(seed)
        parts = hypergraph.partition(context).get_partition()
        found.append(torch.tensor(list(parts)))
    return min(found, key=lambda part_E: partition.rows_sent(sets, part_E))


def held_out_rows(trace: RoutingTrace, placement: Placement) -> float:
    """Rows of a token, the mean over layers, of the tokens that a placement was not fitted on."""
    later = trace.split(HELD_OUT)[1]
    layers = zip(later.ids_LTK, placement.ranks_LE, strict=True)
    return statistics.fmean(rows_per_token(ids_TK, rank_E) for ids_TK, rank_E in layers)


def kahypar_rows(trace: RoutingTrace, num_ranks: int, seeds: int = 5) -> float:
    """The same with Mt-KaHyPar's partitions, the best of several seeds."""
    fitted, later = trace.split(HELD_OUT)
    rows = []
    for fitted_TK, later_TK in zip(fitted.ids_LTK, later.ids_LTK, strict=True):
        sets = partition.RoutedSets.of(fitted_TK.long(), trace.num_experts)
        rows.append(rows_per_token(later_TK, mt_kahypar(sets, num_ranks, seeds)))
    return statistics.fmean(rows)


def quality(
    paths: Sequence[Path], degrees: Sequence[int], partitioner: bool
) -> list[dict[str, Any]]:
    """A row for each trace and degree: held-out rows of a token by each method."""
    made = []
    methods = [*METHODS, *([PARTITIONER] if partitioner else [])]
    for path in paths:
        trace = load_trace(path)
        for num_ranks in degrees:
            bar = tqdm(methods, desc=f"{path.name}, {num_ranks} ranks", unit="method")
            by_method = {method: _held_out(trace, num_ranks, method) for method in bar}
            made.append({"trace": path.stem, "ranks": num_ranks, "rows_per_token": by_method})
    return made


def _held_out(trace: RoutingTrace, num_ranks: int, method: str) -> float:
    if method == PARTITIONER:
        return kahypar_rows(trace, num_ranks)
    max_load = math.inf if method == "rows" else None
    return held_out_rows(trace, plan(trace, num_ranks, method=method, max_load=max_load))


def quality_table(rows: Sequence[dict[str, Any]]) -> str:
    """Held-out rows of a token for people."""
    methods = list(rows[0]["rows_per_token"])
    compared = PARTITIONER in methods
    lines = [["trace", "ranks", *methods, *([f"rows / {PARTITIONER}"] if compared else [])]]
    for row in rows:
        by_method = row["rows_per_token"]
        lines.append([row["trace"], str(row["ranks"])])
        lines[-1] += [f"{value:.4f}" for value in by_method.values()]
        if compared:
            lines[-1].append(f"{by_method['rows'] / by_method[PARTITIONER]:.4f}")
    return aligned(lines, words=1)


def made_up(num_tokens: int, num_experts: int, top_k: int, seed: int) -> Tensor:
    """Synthetic experts (T, K) of tokens of 64 topics, each of which favours some experts."""
    generator = torch.Generator().manual_seed(seed)
    topics = 2 * torch.randn(64, num_experts, generator=generator)
    topic_T = torch.randint(64, (num_tokens,), generator=generator)
    noise_TE = torch.randn(num_tokens, num_experts, generator=generator)
    return (topics[topic_T] + noise_TE).topk(top_k, dim=1).indices


def speed(num_experts: int, num_layers: int = 4, num_ranks: int = 32) -> dict[str, Any]:
    """How long the search takes for a layer of a large model, on synthetic tokens."""
    num_tokens = round(Effort.of(SECONDS, num_experts).tokens / (1 - HELD_OUT))
    ids_LTK = torch.stack([made_up(num_tokens, num_experts, TOP_K, i) for i in range(num_layers)])
    nothing_T = torch.zeros(num_tokens, dtype=torch.int64)
    names = tuple(f"layers.{i}.moe" for i in range(num_layers))
    trace = RoutingTrace("made up", names, num_experts, 1, ids_LTK.byte(), *[nothing_T] * 3)
    start = time.perf_counter()
    effort = make_plan(trace, num_ranks, progress=True).effort
    return {
        "experts": num_experts,
        "top_k": TOP_K,
        "ranks": num_ranks,
        "tokens": effort.tokens,
        "restarts": effort.restarts,
        "threads": torch.get_num_threads(),
        "layer_s": (time.perf_counter() - start) / num_layers,
    }


def speed_line(row: dict[str, Any]) -> str:
    """A row of ``speed`` for people."""
    return (
        f"{row['experts']} experts, top-{row['top_k']}, on {row['ranks']} ranks, from "
        f"{row['tokens']} tokens and {row['restarts']} restarts, {row['threads']} threads: "
        f"{row['layer_s']:.1f} s a layer"
    )


def main() -> int:
    """Command line. Returns the exit code."""
    parser = make_parser("placement", __doc__)
    parser.add_argument("traces", type=Path, nargs="*", metavar="TRACE")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], help="(4 8)")
    parser.add_argument("--speed", action="store_true", help="time the search on synthetic tokens")
    args = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {"quality": [], "speed": []}
    if args.traces:
        partitioner = importlib.util.find_spec("mtkahypar") is not None
        if not partitioner:
            print("mtkahypar is not installed: its column is left out", file=sys.stderr)
        found["quality"] = quality(args.traces, args.ranks, partitioner)
        print(quality_table(found["quality"]))
    for num_experts in (128, 256) if args.speed else ():
        found["speed"].append(speed(num_experts))
        print(speed_line(found["speed"][-1]))
    write_json(args.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
