"""Compares the ways to place experts, on traces, with each other and with a hypergraph partitioner.

`python -m torchtitan_ext.benchmarks.placement TRACE [TRACE ...] --ranks 4 8` plans with every
method from the earlier four fifths of each trace, without a bound on load, and counts the rows that
the later
fifth sends. Mt-KaHyPar (PyPI: mtkahypar), where it is installed, partitions the hypergraph of the
same tokens, its connectivity the objective, with exactly E / R experts a rank.

`--speed` times the search alone, on tokens made up: 128 and 256 experts, top-8, 32 ranks.
"""

import argparse
import math
import statistics
import sys
import time
from pathlib import Path

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

METHODS = ("contiguous", "random", "occult", "pairwise", "rows")


def mt_kahypar(sets: partition.RoutedSets, num_parts: int, seeds: int) -> Tensor:
    """(E,) the part of each expert, by Mt-KaHyPar's best connectivity partition of several seeds.

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
    """Rows a token, mean of the layers, of the tokens that a placement was not fitted on."""
    later = trace.split(HELD_OUT)[1]
    layers = zip(later.ids_LTK, placement.ranks_LE, strict=True)
    return statistics.fmean(rows_per_token(ids_TK, rank_E) for ids_TK, rank_E in layers)


def kahypar_rows(trace: RoutingTrace, num_ranks: int, seeds: int = 5) -> float:
    """The same of Mt-KaHyPar's partitions, the best of several seeds."""
    fitted, later = trace.split(HELD_OUT)
    rows = []
    for fitted_TK, later_TK in zip(fitted.ids_LTK, later.ids_LTK, strict=True):
        sets = partition.RoutedSets.of(fitted_TK.long(), trace.num_experts)
        rows.append(rows_per_token(later_TK, mt_kahypar(sets, num_ranks, seeds)))
    return statistics.fmean(rows)


def quality(paths: list[Path], degrees: list[int], partitioner: bool) -> list[list[str]]:
    """A table of held-out rows a token: a line for each trace and degree, a column a method."""
    columns = [*METHODS, *(["mt-kahypar"] if partitioner else [])]
    table = [["trace", "ranks", *columns, *(["rows / mt-kahypar"] if partitioner else [])]]
    for path in paths:
        trace = load_trace(path)
        for num_ranks in degrees:
            bar = tqdm(columns, desc=f"{path.name}, {num_ranks} ranks", unit="method")
            no_bound = {"rows": math.inf}
            rows = {
                name: kahypar_rows(trace, num_ranks)
                if name == "mt-kahypar"
                else held_out_rows(
                    trace, plan(trace, num_ranks, method=name, max_load=no_bound.get(name))
                )
                for name in bar
            }
            line = [path.stem, str(num_ranks), *(f"{value:.4f}" for value in rows.values())]
            if partitioner:
                line.append(f"{rows['rows'] / rows['mt-kahypar']:.4f}")
            table.append(line)
    return table


def made_up(num_tokens: int, num_experts: int, top_k: int, seed: int) -> Tensor:
    """(T, K) experts of tokens of 64 topics, each of which favours some experts."""
    generator = torch.Generator().manual_seed(seed)
    topics = 2 * torch.randn(64, num_experts, generator=generator)
    topic_T = torch.randint(64, (num_tokens,), generator=generator)
    noise_TE = torch.randn(num_tokens, num_experts, generator=generator)
    return (topics[topic_T] + noise_TE).topk(top_k, dim=1).indices


def speed(num_experts: int, num_layers: int = 4, num_ranks: int = 32) -> str:
    """How long the search takes for a layer of a large model, made-up tokens aside."""
    num_tokens = round(Effort.of(SECONDS, num_experts).tokens / (1 - HELD_OUT))
    ids_LTK = torch.stack([made_up(num_tokens, num_experts, 8, i) for i in range(num_layers)])
    nothing_T = torch.zeros(num_tokens, dtype=torch.int64)
    names = tuple(f"layers.{i}.moe" for i in range(num_layers))
    trace = RoutingTrace("made up", names, num_experts, 1, ids_LTK.byte(), *[nothing_T] * 3)
    start = time.perf_counter()
    effort = make_plan(trace, num_ranks, progress=True).effort
    seconds = (time.perf_counter() - start) / num_layers
    return (
        f"{num_experts} experts, top-8, on {num_ranks} ranks, from {effort.tokens} tokens and "
        f"{effort.restarts} restarts, {torch.get_num_threads()} threads: {seconds:.1f} s a layer"
    )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path, nargs="*", metavar="TRACE")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], help="(4 8)")
    parser.add_argument("--speed", action="store_true", help="time the search, on made-up tokens")
    args = parser.parse_args()
    if args.traces:
        try:
            import mtkahypar  # noqa: F401
        except ModuleNotFoundError:
            print("mtkahypar is not installed: its column is left out", file=sys.stderr)
            print(aligned(quality(args.traces, args.ranks, partitioner=False), words=1))
        else:
            print(aligned(quality(args.traces, args.ranks, partitioner=True), words=1))
    if args.speed:
        for num_experts in (128, 256):
            print(speed(num_experts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
