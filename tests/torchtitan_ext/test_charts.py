"""TensorBoard lays out the charts that have data, and no others."""

import re
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from narrowcast.config import NarrowcastConfig, VolumeConfig
from tests.narrowcast.autotune.test_controller import SLOW, on_a_link
from tests.torchtitan_ext.tiny import Trained, build, train, write_toml
from tests.wide import wide_but
from torchtitan_ext.charts import CHARTS, layout

EP2 = ("--parallelism.expert_parallel_degree", "2")
GATHERS = ("--narrowcast.all_gather.enable", "--narrowcast.all_gather.compression")
GRADIENTS = ("--narrowcast.reduce_scatter.enable", "--narrowcast.reduce_scatter.compression")
DISPATCH = ("--narrowcast.dispatch.deduplicate",)
HASHES = ("--narrowcast.all_gather.exponent_coding", "blocks")
HASHES += ("--narrowcast.all_gather.block_check", "hash")
WARM_UP = ("--narrowcast.all_gather.warmup_steps", "3")
JOBS = {
    "baseline": (),
    "experts of the baseline": EP2,
    "delta, gradients": (*GATHERS, "delta", *GRADIENTS, "entropy"),
    "exponent": (*GATHERS, "exponent"),
    "exponent, hashes": (*GATHERS, "exponent", *HASHES),
    "entropy": (*GATHERS, "entropy"),
    "none": (*GATHERS, "none", *GRADIENTS, "none"),
    "gradients auto": (*GRADIENTS, "auto", "--narrowcast.reduce_scatter.warmup_steps", "3"),
    "observe": (*GATHERS, "observe", *WARM_UP),
    "auto, dispatch": (*GATHERS, "auto", *WARM_UP, *EP2, *DISPATCH),
    "dispatch between nodes": (*EP2, *DISPATCH, "--narrowcast.dispatch.nodes", "2"),
    "auto, not counted": (*GATHERS, "auto", *WARM_UP, "--narrowcast.volume.no-enable"),
    "not counted": ("--narrowcast.volume.no-enable",),
}


def _train(toml: str, *flags: str) -> Trained:
    with on_a_link(SLOW):
        return train(toml, *flags, "--training.steps", "5")


@pytest.mark.parametrize(
    "job", wide_but(JOBS, "delta, gradients", "exponent, hashes", "auto, dispatch", "not counted")
)
def test_every_chart_has_data_and_all_data_a_chart(ranks, folder: Path, job: str) -> None:
    name = re.sub(r"\W+", "_", job)
    toml = write_toml(folder, folder / "corpus", folder / name, config="top4")
    ranks(2).run(_train, str(toml), *JOBS[job])
    (events,) = (folder / name / "tb").rglob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(events)).Reload()
    logged = {tag for tag in accumulator.Tags()["scalars"] if tag.startswith("narrowcast/")}
    charts = _charts(accumulator)
    empty = {
        title: tags for title, tags in charts.items() if not any(_matches(t, tags) for t in logged)
    }
    assert not empty
    undrawn = {tag for tag in logged if not any(_matches(tag, tags) for tags in charts.values())}
    for tag in undrawn:
        assert tag == "narrowcast/cache_bytes"  # is 0 where nothing is cached
        assert not any(event.value for event in accumulator.Scalars(tag))


def test_changes_and_zeros_are_counted_in_the_steps_that_are_logged(ranks, folder: Path) -> None:
    toml = write_toml(folder, folder / "corpus", folder / "every_second")
    flags = (*GATHERS, "delta", *GRADIENTS, "entropy", "--metrics.log_freq", "2")
    ranks(2).run(_train, str(toml), *flags)
    (events,) = (folder / "every_second" / "tb").rglob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(events)).Reload()
    steps = {
        tag: [event.step for event in accumulator.Scalars(f"narrowcast/{tag}")]
        for tag in ("zero_gradients", "changed_values/attention")
    }
    # Nothing is cached yet in the first step.
    assert steps == {"zero_gradients": [1, 2, 4], "changed_values/attention": [2, 4]}


def _sample_interval(toml: str, *flags: str) -> int:
    found: list[int] = []

    def look_up(trainer: Any) -> None:
        found.append(trainer.metrics_processor.ledger.sample_interval)

    build(toml, *flags, then=look_up)
    return found[0]


def test_nothing_is_counted_that_nobody_reads(ranks, folder: Path) -> None:
    toml = str(write_toml(folder, folder / "corpus", folder / "unread"))
    assert ranks(2).run(_sample_interval, toml, "--metrics.log_freq", "7") == [7, 7]
    assert ranks(2).run(_sample_interval, toml, "--metrics.no-enable_tensorboard") == [0, 0]


def _charts(accumulator: EventAccumulator) -> dict[str, list[str]]:
    """The tags of each chart that is laid out, by its title."""
    if "custom_scalars__config__" not in accumulator.Tags()["tensors"]:
        return {}
    (event,) = accumulator.Tensors("custom_scalars__config__")
    laid_out = Layout()
    laid_out.ParseFromString(event.tensor_proto.string_val[0])
    return {
        chart.title: list(chart.multiline.tag)
        for category in laid_out.category
        for chart in category.chart
    }


def _matches(tag: str, patterns: list[str]) -> bool:
    return any(re.fullmatch(pattern, tag) for pattern in patterns)


def test_titles_of_charts_differ() -> None:
    titles = [chart.title for charts in CHARTS.values() for chart in charts]
    assert len(titles) == len(set(titles))


def test_nothing_is_laid_out_where_nothing_is_counted() -> None:
    assert layout(NarrowcastConfig(volume=VolumeConfig(enable=False))) == {}
    assert list(layout(NarrowcastConfig())) == ["Communication volume"]
