"""Draws figures 1 to 5 of the CIERA paper (sections 2.1 to 2.5) for a job, from its profile."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from narrowcast.util import whole

_COLORS = {
    "all": "black",
    "expert_ffn": "tab:blue",
    "router": "tab:red",
    "attention": "tab:orange",
    "norm": "tab:green",
    "embedding": "tab:purple",
    "other": "tab:gray",
}
# The collectives under each name, of times and of bytes.
_COLLECTIVES = {
    "all-gather": ("all_gather",),
    "reduce-scatter": ("reduce_scatter",),
    "all-to-all": ("all_to_all", "dispatch", "combine"),
    "all-reduce, other": ("all_reduce", "other"),
}
_COLLECTIVE_COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:gray")
_SIZE = (6.4, 4.2)
_WIDE = (11, 4.2)


def check_drawable() -> None:
    """Check that figures can be drawn.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "figures need matplotlib: pip install 'narrowcast[plots]'", name=error.name
        ) from error


def draw(profile: dict[str, Any], folder: Path) -> list[Path]:
    """Write ``figure_1.png`` to ``figure_5.png``.

    Args:
        profile: as ``narrowcast profile`` writes it, and ``docs/profile.md`` describes it.
        folder: for the files; it must exist.

    Returns:
        The files.

    Raises:
        ImportError: matplotlib is missing.
    """
    check_drawable()
    figures = (_collectives, _change_by_step, _change_rates, _change_by_type, _checks)
    return [
        _write(profile, draw_figure, folder / f"figure_{number}.png")
        for number, draw_figure in enumerate(figures, start=1)
    ]


def _write(profile: dict[str, Any], draw_figure: Callable[[dict, Any], None], path: Path) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    draw_figure(profile, figure)
    job = profile["job"]
    figure.supxlabel(
        f"{job['name']}, {job['world_size']} ranks, {job['backend']}, {job['device']}, "
        f"lr {job['learning_rate']:.3g}, {job['steps']} steps",
        x=0.99,
        ha="right",
        size=7,
        color="tab:gray",
    )
    with whole(path) as unfinished:
        figure.savefig(unfinished, format="png", bbox_inches="tight")
    return path


def _collectives(profile: dict[str, Any], figure: Any) -> None:
    communication = profile["communication"]
    seconds, sent = (
        {name: sum(given.get(part, 0) for part in parts) for name, parts in _COLLECTIVES.items()}
        for given in (communication["seconds_per_step"], communication["bytes_per_step"])
    )
    bars = {
        f"time\n{_ms(sum(seconds.values()))} a step": seconds,
        f"bytes\n{sum(sent.values()) / 2**20:,.1f} MiB a step": sent,
    }
    axes = figure.subplots()
    for place, parts in enumerate(bars.values()):
        left, total = 0.0, sum(parts.values()) or 1
        for (name, part), color in zip(parts.items(), _COLLECTIVE_COLORS, strict=True):
            share = 100 * part / total
            axes.barh(place, share, left=left, color=color, height=0.6, label="" if place else name)
            if share >= 5:
                middle = left + share / 2
                axes.text(middle, place, f"{share:.1f}%", ha="center", va="center", color="w")
            left += share
    axes.set(
        title="Figure 1: share of each collective, baseline FSDP2",
        xlabel="% of communication",
        xlim=(0, 100),
        yticks=range(len(bars)),
        yticklabels=bars,
    )
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.14), ncols=4, frameon=False)


def _change_by_step(profile: dict[str, Any], figure: Any) -> None:
    entries = profile["exponent_change_by_step"]
    axes = figure.subplots()
    for kind in _kinds(entry["rates"] for entry in entries):
        points = [(e["step"], e["rates"][kind]) for e in entries if kind in e["rates"]]
        axes.plot(*_columns(points), **_style(kind), marker=".", markersize=4)
    axes.axvspan(
        profile["job"]["settled_after_step"] + 0.5,
        profile["job"]["steps"] + 0.5,
        color="0.93",
        label="steps of figures 3 to 5",
        zorder=0,
    )
    axes.set(
        title="Figure 2: exponents changed by a step",
        xlabel="step",
        ylabel="% of exponents",
        xlim=(1.5, profile["job"]["steps"] + 0.5),
    )
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, frameon=False, fontsize="small"
    )


def _change_rates(profile: dict[str, Any], figure: Any) -> None:
    figure.set_size_inches(*_WIDE)
    by_world_size, by_block_size = figure.subplots(1, 2)
    points = profile["shard_change_by_world_size"]
    by_world_size.plot(
        *_columns([(p["world_size"], p["rate"]) for p in points]), color="black", linestyle=":"
    )
    markers = {
        "joined": ("s", "white", "joined: neighboring shards"),
        "measured": ("o", "black", "measured"),
        "projected": ("o", "white", "projected: shards divided"),
    }
    for how, (marker, fill, label) in markers.items():
        some = [(p["world_size"], p["rate"]) for p in points if p["how"] == how]
        if some:
            by_world_size.plot(
                *_columns(some), marker, color="black", markerfacecolor=fill, label=label
            )
    by_world_size.set_xscale("log", base=2)
    world_sizes = [point["world_size"] for point in points]
    by_world_size.set(
        title="Figure 3a: shards with any exponent changed",
        xlabel="ranks that a parameter is sharded over",
        ylabel="% of shards, a step",
        ylim=(0, 103),
        xticks=world_sizes,
        xticklabels=world_sizes,
    )
    by_world_size.minorticks_off()
    by_world_size.legend(frameon=False)

    rates, block_sizes = (
        profile["block_change_by_block_size"][k] for k in ("rates", "block_sizes")
    )
    for kind in _kinds([rates]):
        points = [(b, r) for b, r in zip(block_sizes, rates[kind], strict=True) if r is not None]
        by_block_size.plot(*_columns(points), **_style(kind), marker="o", markersize=3)
    by_block_size.set_xscale("log", base=2)
    by_block_size.set(
        title="Figure 3b: blocks with any exponent changed",
        xlabel="values in a block",
        ylabel="% of blocks, a step",
        ylim=(0, 103),
        xticks=block_sizes,
        xticklabels=block_sizes,
    )
    by_block_size.minorticks_off()
    by_block_size.legend(frameon=False)


def _change_by_type(profile: dict[str, Any], figure: Any) -> None:
    given = profile["block_change_by_shard_type"]
    kinds = [kind for kind in _kinds([given["shards"]]) if kind != "all"]
    numbers = [given["shards"][kind] for kind in kinds]
    axes = figure.subplots()
    boxes = axes.bxp(
        [
            {
                "whislo": 100 * of_kind["least"],
                "q1": 100 * of_kind["lower_quartile"],
                "med": 100 * of_kind["median"],
                "q3": 100 * of_kind["upper_quartile"],
                "whishi": 100 * of_kind["most"],
                "label": f"{_readable(kind)}\n{of_kind['shards']} shards",
            }
            for kind, of_kind in zip(kinds, numbers, strict=True)
        ],
        showfliers=False,
        patch_artist=True,
        widths=0.5,
        medianprops={"color": "black", "linewidth": 1.5},
    )
    for place, (kind, of_kind, box) in enumerate(
        zip(kinds, numbers, boxes["boxes"], strict=True), start=1
    ):
        box.set(facecolor=_COLORS[kind], alpha=0.6)
        axes.text(
            place + 0.29, 100 * of_kind["median"], f"{of_kind['median']:.1%}", va="center", size=8
        )
    axes.set(
        title=f"Figure 4: blocks of {given['block_size']} values with any exponent changed",
        ylabel="% of a shard's blocks, a step",
        ylim=(-3, 103),
    )
    axes.set_xlim(right=len(kinds) + 0.8)
    axes.set_xlabel("line: median; box: quartiles; whiskers: all shards of all ranks", size=8)


def _checks(profile: dict[str, Any], figure: Any) -> None:
    figure.set_size_inches(*_WIDE)
    of_time, of_exponents = figure.subplots(1, 2)
    cost = profile["check_cost"]
    labels = {
        "hash": "128-bit hashes, as in the paper",
        "compare": "comparison with cached exponents",
    }
    for (name, shares), color in zip(
        cost["share_of_step"].items(), _COLLECTIVE_COLORS, strict=False
    ):
        label = f"{labels[name]}: {_ms(cost['seconds'][name])}"
        points = list(zip(cost["intervals"], shares, strict=True))
        of_time.plot(*_columns(points), color=color, marker="o", markersize=4, label=label)
    of_time.set(
        title="Figure 5a: time of exponent checks, not overlapped",
        xlabel="steps from one check to the next",
        ylabel="% of a step with its checks",
        xticks=cost["intervals"],
    )
    of_time.set_ylim(bottom=0)
    of_time.legend(frameon=False, title="one check of a rank's shards", title_fontsize="medium")

    change = profile["exponent_change_by_interval"]
    points = [
        (interval, rate)
        for interval, rate in zip(change["intervals"], change["rates"], strict=True)
        if rate is not None
    ]
    sampled = change["sampled_share"]
    label = "all exponents" if sampled == 1 else f"sample of {sampled:.1%} of the exponents"
    of_exponents.plot(*_columns(points), color="black", marker="o", markersize=4, label=label)
    of_exponents.set(
        title="Figure 5b: exponents changed between checks",
        xlabel="steps from one check to the next",
        ylabel="% of exponents",
        xticks=change["intervals"],
    )
    of_exponents.set_ylim(bottom=0)
    of_exponents.legend(frameon=False)


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """The x values, and the rates in percent."""
    return [x for x, _ in points], [100 * rate for _, rate in points]


def _kinds(rates: Any) -> list[str]:
    """The kinds of shards that occur, in the order of the legend."""
    there = {kind for one in rates for kind in one}
    return [kind for kind in _COLORS if kind in there]


def _style(kind: str) -> dict[str, Any]:
    width = 2.2 if kind == "all" else 1.2
    return {"color": _COLORS[kind], "linewidth": width, "label": _readable(kind), "clip_on": False}


def _readable(kind: str) -> str:
    names = {"all": "all shards", "expert_ffn": "expert FFN", "embedding": "embed, LM head"}
    return names.get(kind, kind)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"
