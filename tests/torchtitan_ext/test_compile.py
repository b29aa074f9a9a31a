"""torchtitan compiles each block, and narrowcast leaves the graphs alone."""

from pathlib import Path

import pytest

from tests.narrowcast.training import same_bits
from tests.torchtitan_ext.tiny import train, write_toml

COMPILED = ("--compile.enable", "--compile.backend", "aot_eager", "--training.steps", "2")
NARROWED = (
    "--narrowcast.all_gather.enable",
    *("--narrowcast.all_gather.compression", "delta"),
    "--narrowcast.reduce_scatter.enable",
    *("--narrowcast.reduce_scatter.compression", "entropy"),
)


@pytest.mark.wide
def test_a_compiled_job_trains_bitwise_as_without_narrowcast(ranks, folder: Path) -> None:
    runs = []
    for name, flags in {"baseline": (), "narrowed": NARROWED}.items():
        toml = write_toml(folder, folder / "corpus", folder / f"compiled_{name}")
        runs.append(ranks(2).run(train, str(toml), *COMPILED, *flags))
    for baseline, narrowed in zip(*runs, strict=True):
        assert narrowed.narrowed
        assert narrowed.narrowed_gradients
        assert narrowed.losses == baseline.losses
        assert same_bits(list(narrowed.state.values()), list(baseline.state.values()))
