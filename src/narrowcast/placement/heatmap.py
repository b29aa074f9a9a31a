"""A heat map of the experts that are selected together, before and after a placement."""

from pathlib import Path

from narrowcast.placement.correlation import coselection, normalized
from narrowcast.placement.placement import Placement
from narrowcast.placement.trace import RoutingTrace
from narrowcast.util import whole


def coselection_heatmap(
    trace: RoutingTrace, placement: Placement, layer: str, path: str | Path
) -> None:
    """Write a PNG of the normalized co-selection matrix of one layer (Occult, equation 4), with
    experts in their own order and in the order of the slots of the placement, and lines between
    ranks.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the placement is for another model, or the layer does not exist.
        OSError: the file cannot be written. The message names it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import PowerNorm
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "a heat map needs matplotlib: pip install 'narrowcast[plots]'", name=error.name
        ) from error
    placement.check(
        model=trace.model,
        layers=trace.layers,
        num_experts=trace.num_experts,
        num_ranks=placement.num_ranks,
    )
    if layer not in trace.layers:
        raise ValueError(f"there is no layer {layer}: there are {', '.join(trace.layers)}")
    index = trace.layers.index(layer)
    graph_EE = normalized(coselection(trace.ids_LTK[index], trace.num_experts))
    expert_E = placement.in_order(trace.layers).experts_LE[index]
    before = ("before: contiguous", graph_EE)
    after = (f"after: {placement.method}", graph_EE[expert_E][:, expert_E])
    size = trace.num_experts // placement.num_ranks

    figure = Figure(figsize=(12, 5.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{trace.model}, {layer}: experts selected together")
    panels = figure.subplots(1, 2)
    # The square root makes the many weak pairs visible.
    scale = PowerNorm(0.5, vmin=0, vmax=1)
    for axes, (title, matrix_EE) in zip(panels, (before, after), strict=True):
        image = axes.imshow(matrix_EE.numpy(), norm=scale, interpolation="nearest")
        for rank in range(1, placement.num_ranks):
            axes.axhline(rank * size - 0.5, color="white", linewidth=0.5)
            axes.axvline(rank * size - 0.5, color="white", linewidth=0.5)
        axes.set(title=title, xlabel="slot", ylabel="slot")
    figure.colorbar(image, ax=panels, label="co-selections over the most frequent pair's")
    with whole(Path(path)) as unfinished:
        figure.savefig(unfinished, format="png")
