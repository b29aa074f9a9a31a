"""The command `narrowcast`: looks at routing traces; plans and judges placements of experts; finds
out what pays for a training job."""

import argparse
import contextlib
import importlib
import importlib.util
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import torch

from narrowcast.placement.correlation import MIN_TOKENS
from narrowcast.placement.coselection import (
    CoselectionCounts,
    is_coselection,
    load_coselection,
    measure_counts,
)
from narrowcast.placement.effort import SECONDS
from narrowcast.placement.heatmap import coselection_heatmap
from narrowcast.placement.metrics import (
    UNEVEN,
    WIDTH,
    PlacementMetrics,
    measure,
    placement_table,
    with_loads_of,
)
from narrowcast.placement.placement import Placement, contiguous, load_placement
from narrowcast.placement.planning import DEFAULT_LOAD, HELD_OUT, Method, make_plan
from narrowcast.placement.routers import measure_router, router_table
from narrowcast.placement.trace import RoutingTrace, load_trace
from narrowcast.util import check_writable


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: its arguments; by default those of the process.

    Returns:
        The exit code: 0; 2 after an error, of which one line on stderr tells; 130 if interrupted.
    """
    parser = _parser()
    arguments, flags = parser.parse_known_args(argv)
    if arguments.run is not _profile and flags:
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    try:
        if arguments.run is _profile:
            return _profile(arguments, flags)
        arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError, ImportError) as error:
        text = str(error)
        if isinstance(error, BrokenPipeError):  # the reader has enough, as `head`
            _write_no_more()
            return 2
        if isinstance(error, OSError) and error.strerror and error.filename is None:
            # Files are named by those who write them.
            text = f"standard output cannot be written: {error.strerror}"
            _write_no_more()
        print(f"narrowcast: {' '.join(text.split())}", file=sys.stderr)
        return 2
    return 0


def _write_no_more() -> None:
    """Python would try again what could not be written, when it ends."""
    with contextlib.suppress(OSError, ValueError):  # in-memory streams have no number
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="narrowcast",
        description="Routing traces, placements of experts, and what pays for a training job.",
    )
    nouns = parser.add_subparsers(required=True, metavar="{trace,placement,profile}")
    trace = nouns.add_parser("trace", help="look at routing traces")
    trace_verbs = trace.add_subparsers(required=True, metavar="{show}")

    show = trace_verbs.add_parser("show", help="show loads and correlations of experts")
    show.set_defaults(run=_show_trace)
    show.add_argument("trace", type=Path, metavar="FILE")
    show.add_argument(
        "--layers", nargs="+", metavar="NAME", help="only these, with the load of every expert"
    )

    placement = nouns.add_parser("placement", help="plan placements of experts, and judge them")
    placement_verbs = placement.add_subparsers(required=True, metavar="{plan,show}")

    planner = placement_verbs.add_parser("plan", help="place experts by a trace")
    planner.set_defaults(run=_plan)
    planner.add_argument(
        "trace", type=Path, metavar="TRACE", help="or co-selection counts, FILE.npz"
    )
    planner.add_argument("--ranks", type=int, required=True, help="expert-parallel degree")
    planner.add_argument("--nodes", type=int, default=1, help="that the ranks are spread over")
    planner.add_argument(
        "--method", choices=get_args(Method), help="(rows; pairwise of counts beyond top-2)"
    )
    planner.add_argument(
        "--max-load",
        type=float,
        help="of the busiest rank, over the mean, of all tokens; inf for no bound; by default "
        f"{DEFAULT_LOAD}, or what contiguous has where that is more",
    )
    planner.add_argument(
        "--cross-node-weight",
        type=float,
        help="what one more node of a token costs, in rows; by default nodes come first",
    )
    planner.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help="of one core for each layer: for tokens to fit on, then for restarts; equal ones give "
        f"equal plans ({SECONDS})",
    )
    planner.add_argument(
        "--restarts", type=int, help="seeded starts of rows; by default what the seconds allow"
    )
    planner.add_argument("--seed", type=int, default=0)
    planner.add_argument("--top-k", type=int, help="experts of a token, of co-selection counts")
    planner.add_argument(
        "--output", metavar="FILE", help="for the plan; - for standard output; by default none"
    )

    judge = placement_verbs.add_parser("show", help="judge a placement by a trace")
    judge.set_defaults(run=_show_placement)
    judge.add_argument("trace", type=Path, metavar="TRACE")
    judge.add_argument("placement", type=Path, metavar="PLACEMENT")
    judge.add_argument("--heatmap", metavar="FILE.png", help="draw co-selections")
    judge.add_argument("--layer", metavar="NAME", help="to draw; by default the first")

    profile = nouns.add_parser(
        "profile",
        allow_abbrev=False,
        help="train a job for some steps, and find out what pays",
        description="All other flags are torchtitan's. Within torchrun this is one of its ranks.",
    )
    profile.set_defaults(run=_profile)
    profile.add_argument("--job.config_file", required=True, metavar="FILE.toml", dest="file")
    profile.add_argument(
        "--ranks", type=int, metavar="N", help="of this machine; by default its accelerators"
    )
    profile.add_argument("--profile.steps", metavar="N", dest="steps", help="to train (40)")
    return parser


def _profile(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    if importlib.util.find_spec("torchtitan") is None:
        raise ImportError(
            "profile trains a job by torchtitan, which is not installed: "
            "pip install 'narrowcast[torchtitan]'"
        )
    # By its name: the library does not depend on the plugin.
    profile = importlib.import_module("torchtitan_ext.profile.command")
    ours = ["--job.config_file", arguments.file]
    if arguments.steps is not None:
        ours += ["--profile.steps", arguments.steps]
    return profile.launch(arguments.ranks, [*ours, *flags])


def _show_trace(arguments: argparse.Namespace) -> None:
    trace = load_trace(arguments.trace)
    chosen = arguments.layers or trace.layers
    if unknown := set(chosen) - set(trace.layers):
        raise ValueError(
            f"{arguments.trace} has no layer {', '.join(sorted(unknown))}: "
            f"it has {', '.join(trace.layers)}"
        )
    layers = measure_router(trace, chosen, processes=None, progress=True)
    print(_head(trace))
    print(f"\n{router_table(layers)}")
    if trace.num_tokens < 2 * MIN_TOKENS:
        print(
            f"\nThe trace is short: correlations need {MIN_TOKENS} tokens, and held-out ones as "
            "many in each half."
        )
    if arguments.layers:
        for layer in layers:
            loads = " ".join(map(str, layer.load_E.tolist()))
            print(f"\n{layer.layer}, tokens of each expert:\n{textwrap.fill(loads, WIDTH)}")


def _plan(arguments: argparse.Namespace) -> None:
    trace, method = _source_of(arguments)
    if arguments.output == "":
        raise ValueError("--output is empty: give a file, - for standard output, or leave it out")
    to_stdout = arguments.output == "-"
    if arguments.output and not to_stdout:
        check_writable(Path(arguments.output))
    made = make_plan(
        trace,
        arguments.ranks,
        num_nodes=arguments.nodes,
        method=method,
        max_load=arguments.max_load,
        cross_node_weight=arguments.cross_node_weight,
        seconds=arguments.seconds,
        restarts=arguments.restarts,
        seed=arguments.seed,
        processes=None,
        progress=True,
    )
    placement = made.placement
    placements = {"before": _contiguous(trace, placement), "after": placement}
    if not torch.equal(made.free.experts_LE, placement.experts_LE):
        placements["no bound"] = made.free
    restarts = f", {made.effort.restarts} restarts a layer" if method == "rows" else ""
    if isinstance(trace, CoselectionCounts):
        head = f"{_head_of_counts(trace)}\nFitted on and judged on all counts{restarts}"
        measured = {name: measure_counts(trace, of) for name, of in placements.items()}
    else:
        fitted, held_out = trace.split(HELD_OUT)
        used = f"{min(fitted.num_tokens, made.effort.tokens)} of the earlier {fitted.num_tokens}"
        head = (
            f"{_head(trace)}\nFitted on {used} tokens{restarts}; "
            f"judged on the later {held_out.num_tokens}, load on all {trace.num_tokens}"
        )
        measured = {
            name: with_loads_of(trace, of, measure(held_out, of)) for name, of in placements.items()
        }
    table = sys.stderr if to_stdout else sys.stdout
    print(f"{head}\n{_described(placement)}\n\n{placement_table(measured)}", file=table)
    if to_stdout:
        sys.stdout.write(placement.as_json())
    elif arguments.output:
        placement.save(arguments.output)
        print(f"\nWrote {arguments.output}")
    _warn_of_load(measured, arguments.max_load, method)


def _source_of(arguments: argparse.Namespace) -> tuple[RoutingTrace | CoselectionCounts, Method]:
    """What to plan from, and how unless that is said."""
    if is_coselection(arguments.trace):
        counts = load_coselection(arguments.trace, arguments.top_k)
        return counts, arguments.method or ("rows" if counts.top_k == 2 else "pairwise")
    if arguments.top_k is not None:
        raise ValueError(
            f"--top-k {arguments.top_k} is of co-selection counts, and {arguments.trace} is none: "
            "a trace has its own"
        )
    return load_trace(arguments.trace), arguments.method or "rows"


def _show_placement(arguments: argparse.Namespace) -> None:
    trace = load_trace(arguments.trace)
    placement = load_placement(arguments.placement)
    if arguments.layer and not arguments.heatmap:
        raise ValueError(f"--layer {arguments.layer} is drawn by --heatmap FILE.png: give both")
    if arguments.heatmap == "-":
        raise ValueError("--heatmap -: a picture goes to a file, FILE.png")
    if arguments.heatmap:
        check_writable(Path(arguments.heatmap))
    table = _before_and_after(trace, placement)
    if arguments.heatmap:
        layer = arguments.layer or trace.layers[0]
        coselection_heatmap(trace, placement, layer, arguments.heatmap)
    print(f"{_head(trace)}\n{table}")
    if arguments.heatmap:
        print(f"\nWrote {arguments.heatmap}")


def _head(trace: RoutingTrace) -> str:
    steps = trace.step_T.unique().tolist()
    span = (
        f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
    )
    return (
        f"{trace.model}: {len(trace.layers)} MoE layers, top-{trace.top_k} of {trace.num_experts} "
        f"experts, recorded at EP {trace.num_ranks}; {trace.num_tokens} tokens of {span}"
    )


def _head_of_counts(counts: CoselectionCounts) -> str:
    router = "top-k unknown" if counts.top_k is None else f"top-{counts.top_k}"
    return (
        f"{counts.model}: co-selection counts of {len(counts.layers)} MoE layers, {router} of "
        f"{counts.num_experts} experts"
    )


def _before_and_after(trace: RoutingTrace, placement: Placement) -> str:
    placements = {"before": _contiguous(trace, placement), "after": placement}
    table = placement_table({name: measure(trace, of) for name, of in placements.items()})
    return f"{_described(placement)}\n\n{table}"


def _described(placement: Placement) -> str:
    nodes = "1 node" if placement.num_nodes == 1 else f"{placement.num_nodes} nodes"
    return (
        f"Before: contiguous; after: {placement.method}; on {placement.num_ranks} ranks of {nodes}"
    )


def _contiguous(trace: RoutingTrace | CoselectionCounts, placement: Placement) -> Placement:
    """Where experts live without the placement."""
    return contiguous(
        trace.model, trace.layers, trace.num_experts, placement.num_ranks, placement.num_nodes
    )


def _warn_of_load(
    measured: Mapping[str, Sequence[PlacementMetrics]], max_load: float | None, method: Method
) -> None:
    """Of a bound that was not reached; of a rank that a method without one makes much busier."""
    if method != "rows":
        bounds = [UNEVEN * layer.busiest_load for layer in measured["before"]]
        cause = "more than a quarter busier than it was: --method rows would bound this"
    elif max_load is not None:
        bounds = [max_load + 1e-6] * len(measured["after"])
        cause = "--max-load is not reached"
    else:
        return  # is never above that of contiguous, or the default bound
    pairs = zip(measured["after"], bounds, strict=True)
    over = [layer for layer, bound in pairs if layer.busiest_load > bound]
    if over:
        worst = max(over, key=lambda layer: layer.busiest_load)
        print(
            f"narrowcast: warning: the busiest rank gets too much in {len(over)} of "
            f"{len(measured['after'])} layers, the most in {worst.layer} with "
            f"{worst.busiest_load:.2f} of the mean: {cause}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(main())
