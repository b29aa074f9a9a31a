"""The command ``narrowcast``: shows routing traces, plans and evaluates placements of experts, and
profiles training jobs."""

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

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
    placement_objects,
    placement_table,
    with_loads_of,
)
from narrowcast.placement.placement import Placement, contiguous, load_placement
from narrowcast.placement.planning import DEFAULT_MAX_LOAD, HELD_OUT, Method, Plan, make_plan
from narrowcast.placement.routers import measure_router, router_objects, router_table
from narrowcast.placement.trace import RoutingTrace, load_trace
from narrowcast.util import check_writable, write_text


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments; by default those of the process.

    Returns:
        The exit code: 0; 2 after an error, which is one line on stderr; 130 if interrupted.
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
        if isinstance(error, BrokenPipeError):  # the reader has ended, as ``head`` does
            _discard_stdout()
            return 2
        if isinstance(error, OSError) and error.strerror and error.filename is None:
            # Errors of files name them.
            text = f"standard output cannot be written: {error.strerror}"
            _discard_stdout()
        print(f"narrowcast: {' '.join(text.split())}", file=sys.stderr)
        return 2
    return 0


def _discard_stdout() -> None:
    """Discard what could not be written, which Python would try to write again when it exits."""
    with contextlib.suppress(OSError, ValueError):  # in-memory streams have no number
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="narrowcast",
        description="Routing traces, placements of experts, and profiles of training jobs.",
    )
    nouns = parser.add_subparsers(required=True, metavar="{trace,placement,profile}")
    trace = nouns.add_parser("trace", help="show routing traces")
    _add_trace_show(trace.add_subparsers(required=True, metavar="{show}"))
    placement = nouns.add_parser("placement", help="plan and evaluate placements of experts")
    placement_verbs = placement.add_subparsers(required=True, metavar="{plan,show}")
    _add_placement_plan(placement_verbs)
    _add_placement_show(placement_verbs)
    _add_profile(nouns)
    return parser


def _add_trace_show(verbs: Any) -> None:
    show = verbs.add_parser("show", help="show loads and correlations of experts")
    show.set_defaults(run=_show_trace)
    show.add_argument("trace", type=Path, metavar="FILE")
    show.add_argument(
        "--layers", nargs="+", metavar="NAME", help="only these, with the load of every expert"
    )
    _add_json(show)


def _add_placement_plan(verbs: Any) -> None:
    planner = verbs.add_parser("plan", help="plan a placement of experts from a trace")
    planner.set_defaults(run=_plan)
    planner.add_argument(
        "trace", type=Path, metavar="TRACE", help="or co-selection counts, FILE.npz"
    )
    planner.add_argument("--ranks", type=int, required=True, help="expert-parallel degree")
    planner.add_argument("--nodes", type=int, default=1, help="number of nodes of the ranks")
    planner.add_argument(
        "--method",
        choices=get_args(Method),
        help="rows by default; pairwise for counts of a router that is not known to be top-2",
    )
    planner.add_argument(
        "--max-load",
        type=float,
        help="bound on the load of the busiest rank over the mean, by all tokens; inf for no "
        f"bound; by default {DEFAULT_MAX_LOAD}, or the load of contiguous where that is larger",
    )
    planner.add_argument(
        "--cross-node-weight",
        type=float,
        help="cost of each further node of a token, in rows; by default nodes come first",
    )
    planner.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help="time for each layer on one core: for tokens to fit on, then for restarts; equal "
        f"numbers give equal plans ({SECONDS})",
    )
    planner.add_argument(
        "--restarts", type=int, help="random starts of rows; by default what the seconds allow"
    )
    planner.add_argument("--seed", type=int, default=0)
    planner.add_argument("--top-k", type=int, help="experts of a token, for co-selection counts")
    planner.add_argument(
        "--output", metavar="FILE", help="for the plan; - for standard output; by default none"
    )
    _add_json(planner)


def _add_placement_show(verbs: Any) -> None:
    show = verbs.add_parser("show", help="evaluate a placement on a trace")
    show.set_defaults(run=_show_placement)
    show.add_argument("trace", type=Path, metavar="TRACE")
    show.add_argument("placement", type=Path, metavar="PLACEMENT")
    show.add_argument("--heatmap", metavar="FILE.png", help="draw co-selections")
    show.add_argument("--layer", metavar="NAME", help="layer to draw; by default the first")
    _add_json(show)


def _add_profile(nouns: Any) -> None:
    profile = nouns.add_parser(
        "profile",
        allow_abbrev=False,
        help="train a job for some steps, and report which features reduce step time",
        description="All other flags are torchtitan's. Within torchrun this is one of its ranks.",
    )
    profile.set_defaults(run=_profile)
    profile.add_argument("--job.config_file", required=True, metavar="FILE.toml", dest="file")
    profile.add_argument(
        "--ranks", type=int, metavar="N", help="ranks on this machine; by default its accelerators"
    )
    profile.add_argument("--profile.steps", metavar="N", dest="steps", help="steps to train (40)")
    profile.add_argument("--json", metavar="FILE", help="write what was measured there, too")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the rows of layers there as well")


def _profile(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    if importlib.util.find_spec("torchtitan") is None:
        raise ImportError(
            "profile trains a job by torchtitan, which is not installed: "
            "pip install 'narrowcast[torchtitan]'"
        )
    if not Path(arguments.file).exists():  # before the ranks are checked
        raise FileNotFoundError(f"--job.config_file {arguments.file}: there is no such file")
    # By its name: the library does not depend on the plugin.
    profile = importlib.import_module("torchtitan_ext.profile.command")
    own = ["--job.config_file", arguments.file]
    if arguments.steps is not None:
        own += ["--profile.steps", arguments.steps]
    if arguments.json is not None:
        own += ["--json", arguments.json]
    return profile.launch(arguments.ranks, [*own, *flags])


def _show_trace(arguments: argparse.Namespace) -> None:
    trace = load_trace(arguments.trace)
    selected = arguments.layers or trace.layers
    if unknown := set(selected) - set(trace.layers):
        raise ValueError(
            f"{arguments.trace} has no layer {', '.join(sorted(unknown))}: "
            f"it has {', '.join(trace.layers)}"
        )
    _check_outputs(arguments, "json")
    layers = measure_router(trace, selected, processes=None, progress=True)
    _write_json(arguments, router_objects(layers))
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
    _report_written(arguments, "json")


def _plan(arguments: argparse.Namespace) -> None:
    trace, method = _source_of(arguments)
    to_stdout = arguments.output == "-"
    _check_outputs(arguments, "json", *(() if to_stdout else ("output",)))
    plan = make_plan(
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
    placement = plan.placement
    placements = {"before": _contiguous(trace, placement), "after": placement}
    if not torch.equal(plan.free.experts_LE, placement.experts_LE):
        placements["no bound"] = plan.free
    restarts = f", {plan.effort.restarts} restarts a layer" if method == "rows" else ""
    head, measured = _evaluated(trace, plan, placements, restarts)
    table = sys.stderr if to_stdout else sys.stdout
    print(f"{head}\n{_described(placement)}\n\n{placement_table(measured)}", file=table)
    _write_json(arguments, placement_objects(measured))
    if to_stdout:
        sys.stdout.write(placement.as_json())
    elif arguments.output:
        placement.save(arguments.output)
        _report_written(arguments, "output")
    _report_written(arguments, "json", file=table)
    _warn_of_load(measured, arguments.max_load, method)


def _evaluated(
    trace: RoutingTrace | CoselectionCounts,
    plan: Plan,
    placements: Mapping[str, Placement],
    restarts: str,
) -> tuple[str, dict[str, list[PlacementMetrics]]]:
    """Return a text on what a plan was fitted on and judged by, and the metrics of placements."""
    if isinstance(trace, CoselectionCounts):
        head = f"{_head_of_counts(trace)}\nFitted on and judged by all counts{restarts}"
        return head, {name: measure_counts(trace, of) for name, of in placements.items()}
    fitted, held_out = trace.split(HELD_OUT)
    used = f"{min(fitted.num_tokens, plan.effort.tokens)} of the earlier {fitted.num_tokens}"
    head = (
        f"{_head(trace)}\nFitted on {used} tokens{restarts}; "
        f"judged by the later {held_out.num_tokens}, load by all {trace.num_tokens}"
    )
    return head, {
        name: with_loads_of(trace, of, measure(held_out, of)) for name, of in placements.items()
    }


def _source_of(arguments: argparse.Namespace) -> tuple[RoutingTrace | CoselectionCounts, Method]:
    """Return what to plan from, and the method."""
    if is_coselection(arguments.trace):
        counts = load_coselection(arguments.trace, arguments.top_k)
        return counts, arguments.method or ("rows" if counts.top_k == 2 else "pairwise")
    if arguments.top_k is not None:
        raise ValueError(
            f"--top-k {arguments.top_k} is for co-selection counts, but {arguments.trace} is not "
            "an .npz file of these: a trace has its own top-k"
        )
    return load_trace(arguments.trace), arguments.method or "rows"


def _show_placement(arguments: argparse.Namespace) -> None:
    trace = load_trace(arguments.trace)
    placement = load_placement(arguments.placement)
    if arguments.layer and not arguments.heatmap:
        raise ValueError(f"--layer {arguments.layer} is drawn by --heatmap FILE.png: give both")
    _check_outputs(arguments, "json", "heatmap")
    placements = {"before": _contiguous(trace, placement), "after": placement}
    measured = {name: measure(trace, of) for name, of in placements.items()}
    if arguments.heatmap:
        layer = arguments.layer or trace.layers[0]
        coselection_heatmap(trace, placement, layer, arguments.heatmap)
    _write_json(arguments, placement_objects(measured))
    print(f"{_head(trace)}\n{_described(placement)}\n\n{placement_table(measured)}")
    _report_written(arguments, "heatmap")
    _report_written(arguments, "json")


def _check_outputs(arguments: argparse.Namespace, *names: str) -> None:
    """Raise now what writing a file of these flags would raise later, and a ``ValueError`` if two
    flags name the same file or a flag names none."""
    flag_of: dict[Path, str] = {}
    for name in names:
        file = getattr(arguments, name)
        if file is None:
            continue
        if file in ("", "-"):
            raise ValueError(f'--{name} "{file}": give the name of a file, or omit it')
        check_writable(Path(file))
        flag = flag_of.setdefault(Path(file).resolve(), name)
        if flag != name:
            raise ValueError(f"--{name} {file} is also the file of --{flag}: give another name")


def _write_json(arguments: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows to the file of ``--json``, if it was given, whole or not at all."""
    if arguments.json is not None:
        write_text(Path(arguments.json), json.dumps(rows, indent=1, allow_nan=False) + "\n")


def _report_written(arguments: argparse.Namespace, name: str, file: Any = None) -> None:
    if (written := getattr(arguments, name)) is not None:
        print(f"\nWrote {written}", file=file)


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


def _described(placement: Placement) -> str:
    nodes = "1 node" if placement.num_nodes == 1 else f"{placement.num_nodes} nodes"
    return (
        f"Before: contiguous; after: {placement.method}; on {placement.num_ranks} ranks of {nodes}"
    )


def _contiguous(trace: RoutingTrace | CoselectionCounts, placement: Placement) -> Placement:
    """Return the placement of the same model without a plan."""
    return contiguous(
        trace.model, trace.layers, trace.num_experts, placement.num_ranks, placement.num_nodes
    )


def _warn_of_load(
    measured: Mapping[str, Sequence[PlacementMetrics]], max_load: float | None, method: Method
) -> None:
    """Warn of a bound on load that was not reached, or of a rank that is much busier than before
    because the method has no bound."""
    if method != "rows":
        bounds = [UNEVEN * layer.busiest_load for layer in measured["before"]]
        cause = "more than a quarter busier than it was: --method rows would bound this"
    elif max_load is not None:
        bounds = [max_load + 1e-6] * len(measured["after"])
        cause = "--max-load is not reached"
    else:
        return  # The load is never above that of contiguous or the default bound.
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
