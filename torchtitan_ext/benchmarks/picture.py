"""Draws the bits that are sent for a parameter in each collective, from the summary of a demo.

    python -m torchtitan_ext.benchmarks.picture outputs/demo/summary.json \\
        docs/bits_per_parameter.png

It needs matplotlib: ``pip install 'narrowcast[plots]'``.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from narrowcast.util import whole
from torchtitan_ext.benchmarks.comparison import short_number

COLLECTIVES = {
    "first_gather": "first all-gather\nof a step",
    "later_gathers": "later all-gathers\n(backward)",
    "gradients": "reduce-scatter\nof gradients",
}
# What is drawn: the label, the compression in the demo, and the color.
DRAWN = (
    ("baseline FSDP2", "plain", "#9aa5b1"),
    ("narrowcast: delta, gradients entropy", "delta_gradients", "#1f6feb"),
)
_WIDTH = 0.38


def bits(summary: dict[str, Any]) -> dict[str, list[float]]:
    """The bits of each collective by compression, at the first learning rate of the demo.

    Raises:
        ValueError: a compression that is drawn did not run.
    """
    first = {}
    for run in summary["runs"]:
        first.setdefault(run["compression"], run["bits_per_parameter"])
    missing = [compression for _, compression, _ in DRAWN if compression not in first]
    if missing:
        raise ValueError(f"the demo has no runs of {', '.join(missing)}: run scripts/demo")
    return {
        compression: [first[compression][part] for part in COLLECTIVES]
        for _, compression, _ in DRAWN
    }


def draw(summary: dict[str, Any]) -> Figure:
    """The picture, on a white background."""
    figure = Figure(figsize=(7.2, 3.2), dpi=140, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    by_compression = bits(summary)
    for place, (label, compression, color) in enumerate(DRAWN):
        x = [i + (place - (len(DRAWN) - 1) / 2) * _WIDTH for i in range(len(COLLECTIVES))]
        bars = axes.bar(x, by_compression[compression], _WIDTH - 0.03, color=color, label=label)
        texts = [f"{value:.2g}" if value < 10 else f"{value:.1f}" for value in bars.datavalues]
        axes.bar_label(bars, texts, padding=2, color="#24292f")
    axes.set_xticks(range(len(COLLECTIVES)), COLLECTIVES.values())
    axes.set_ylabel("bits sent for a parameter")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", length=0)
    axes.legend(frameon=False, loc="upper left")
    axes.margins(y=0.1)
    rate = short_number(summary["runs"][0]["learning_rate"])
    figure.supxlabel(
        f"MoE of {summary['parameters'] / 1e6:.1f} million parameters, {summary['world_size']} "
        f"ranks, learning rate {rate}, medians of the last steps, headers included",
        size=7,
        color="#57606a",
    )
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_ext.benchmarks.picture",
        description=(__doc__ or "").partition("\n\n")[0],
    )
    parser.add_argument("summary", type=Path, help="of the demo, such as outputs/demo/summary.json")
    parser.add_argument("picture", type=Path, help="the PNG to write")
    args = parser.parse_args(arguments)
    try:
        figure = draw(json.loads(args.summary.read_text(encoding="utf-8")))
        with whole(args.picture) as unfinished:
            figure.savefig(unfinished, format="png")
    except (OSError, ValueError) as error:
        print(f"picture: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
