"""torchtitan trains from TOML, and with narrowcast it trains the same, to the bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from narrowcast.volume import COLLECTIVES
from tests.narrowcast.training import same_bits
from tests.ranks import Ranks
from tests.torchtitan_ext.tiny import Trained, is_untouched, train, write_toml
from torchtitan_ext import corpus
from torchtitan_ext.metrics import layout

ON = "--narrowcast.all_gather.enable"
LAYOUTS = {
    "fsdp": (),
    "ep 2": ("--parallelism.expert_parallel_degree", "2"),
    "ep 4": ("--parallelism.expert_parallel_degree", "4"),
    "tp 2": ("--parallelism.tensor_parallel_degree", "2"),
    "tp 2, ep 2": (
        *("--parallelism.tensor_parallel_degree", "2"),
        *("--parallelism.expert_parallel_degree", "2"),
    ),
    "hsdp": ("--parallelism.data_parallel_replicate_degree", "2"),
    "hsdp, ep 2": (
        *("--parallelism.data_parallel_replicate_degree", "2"),
        *("--parallelism.expert_parallel_degree", "2"),
    ),
    "never resharded": ("--parallelism.fsdp_reshard_after_forward", "never"),
    "accumulated": ("--training.global_batch_size", "8"),
    "fp32 gathers": ("--training.mixed_precision_param", "float32"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a small corpus in it."""
    folder = tmp_path_factory.mktemp("training")
    documents = corpus.standard_library()[:200]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "standard_library", lambda: documents)
        corpus.make_corpus(folder / "corpus")
    return folder


def _run(ranks: Ranks, folder: Path, name: str, *flags: str) -> list[Trained]:
    toml = write_toml(folder, folder / "corpus", folder / name.replace(" ", "_"))
    return ranks.run(train, str(toml), *flags)


def _assert_same(plain: list[Trained], narrowed: list[Trained]) -> None:
    for ours, theirs in zip(narrowed, plain, strict=True):
        assert ours.narrowed
        assert not theirs.narrowed
        assert ours.losses == theirs.losses
        assert ours.state.keys() == theirs.state.keys()
        assert same_bits(list(ours.state.values()), list(theirs.state.values()))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_plain_torchtitan(ranks, folder: Path, name: str) -> None:
    flags = LAYOUTS[name]
    plain = _run(ranks(4), folder, f"{name} plain", *flags)
    narrowed = _run(ranks(4), folder, f"{name} narrowed", ON, *flags)
    _assert_same(plain, narrowed)
    assert len(set(plain[0].losses)) == 4


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputation_trains_as_plain_torchtitan(ranks, folder: Path, kind: str) -> None:
    toml = write_toml(folder, folder / "corpus", folder / kind)
    with toml.open("a") as file:
        file.write(f'[activation_checkpoint]\ntype = "{kind}"\n')
    plain = ranks(4).run(train, str(toml))
    _assert_same(plain, ranks(4).run(train, str(toml), ON))


SAVE = ("--checkpoint.enable", "--checkpoint.interval", "2", "--checkpoint.no-last-save-model-only")
FIRST_HALF = ("--training.steps", "2")


@pytest.mark.parametrize("world_size", [4, 2])
def test_a_run_resumes_with_and_without_narrowcast(ranks, folder: Path, world_size: int) -> None:
    """Saved by either and resumed by either, on as many ranks or on fewer: always the same."""
    resumed = {}
    # torchtitan resumes its data only on as many ranks.
    resume = SAVE if world_size == 4 else (*SAVE, "--checkpoint.exclude_from_loading", "dataloader")
    for saver, flags in (("plain", ()), ("narrowed", (ON,))):
        for resumer, resumer_flags in (("plain", ()), ("narrowed", (ON,))):
            name = f"{saver} to {resumer} {world_size}"
            _run(ranks(4), folder, name, *SAVE, *FIRST_HALF, *flags)
            resumed[saver, resumer] = _run(ranks(world_size), folder, name, *resume, *resumer_flags)
    assert len(resumed["plain", "plain"][0].losses) == 2
    for saver in ("plain", "narrowed"):
        _assert_same(resumed["plain", "plain"], resumed[saver, "narrowed"])
    ours, theirs = resumed["plain", "plain"], resumed["narrowed", "plain"]
    assert [one.losses for one in ours] == [one.losses for one in theirs]
    if world_size == 4:
        whole = _run(ranks(4), folder, "whole", *SAVE)
        assert whole[0].losses[2:] == ours[0].losses


def test_the_dashboard_reads_back_from_the_event_file(ranks, folder: Path) -> None:
    trained = _run(ranks(4), folder, "dashboard", ON)
    (events,) = (folder / "dashboard" / "tb").rglob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(events)).Reload()
    scalars = accumulator.Tags()["scalars"]
    for collective in COLLECTIVES:
        assert f"narrowcast/bytes/{collective}" in scalars
        assert f"narrowcast/plain_bytes/{collective}" in scalars
    for tag in ("changed_values", "changed_exponents", "changed_blocks"):
        for kind in ("expert_ffn", "attention", "router", "norm", "embedding"):
            assert f"narrowcast/{tag}/{kind}" in scalars
    for tag, last in trained[0].metrics[-1].items():
        if tag.startswith("narrowcast/"):
            assert accumulator.Scalars(tag)[-1].value == pytest.approx(last, rel=1e-6)
    last = trained[0].metrics[-1]
    assert last["narrowcast/bytes/all_gather"] < 0.3 * last["narrowcast/plain_bytes/all_gather"]
    assert last["narrowcast/bits_per_parameter/first_gather"] < 6
    drawn = {
        tag.removeprefix("narrowcast/")
        for charts in layout().values()
        for _, tags in charts.values()
        for tag in tags
    }
    logged = {tag.removeprefix("narrowcast/") for tag in scalars if tag.startswith("narrowcast/")}
    assert logged - drawn == {"kept_bytes"}
    assert "custom_scalars__config__" in accumulator.Tags()["tensors"]


def test_plain_training_is_counted_too(ranks, folder: Path) -> None:
    last = _run(ranks(4), folder, "counted", *LAYOUTS["ep 2"])[0].metrics[-1]
    for collective in COLLECTIVES:
        assert last[f"narrowcast/bytes/{collective}"] > 0
        assert (
            last[f"narrowcast/bytes/{collective}"] == last[f"narrowcast/plain_bytes/{collective}"]
        )
    assert last["narrowcast/bits_per_parameter/first_gather"] == 16
    assert last["narrowcast/bits_per_parameter/later_gathers"] == 16


def test_switched_off_it_leaves_torch_and_torchtitan_alone(ranks, folder: Path) -> None:
    toml = write_toml(folder, folder / "corpus", folder / "off")
    assert ranks(2).run(is_untouched, str(toml)) == [True, True]


def test_a_switch_that_cannot_work_is_named(ranks, folder: Path) -> None:
    flags = (ON, "--parallelism.data_parallel_shard_degree", "1")
    flags += ("--parallelism.data_parallel_replicate_degree", "2")
    toml = write_toml(folder, folder / "corpus", folder / "cannot")
    for outcome in ranks(2).outcomes(train, str(toml), *flags):
        assert outcome.type == "ValueError"
        assert "narrowcast.all_gather.enable = true" in outcome.message
        assert "fully_shard" in outcome.message


ENTRIES = {
    "torchtitan_ext.train": (),
    "torchtitan.train": ("--module", "torchtitan_ext", "--config", "from_toml"),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_torchrun_launches_it(folder: Path, entry: str) -> None:
    toml = write_toml(folder, folder / "corpus", folder / entry.replace(".", "_"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", entry, *ENTRIES[entry]]
    command += ["--job.config_file", str(toml), "--training.steps", "2", ON]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step:  2  loss:" in done.stdout
    assert "bits a parameter: first gather" in done.stdout
