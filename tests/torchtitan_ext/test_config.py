import dataclasses
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import ConfigManager
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug
from torchtitan.trainer import Trainer

from torchtitan_ext import (
    AllGatherConfig,
    DispatchConfig,
    JobConfig,
    NarrowcastConfig,
    PlacementConfig,
    ReduceScatterConfig,
    RoutingTraceConfig,
    VolumeConfig,
    with_narrowcast,
)
from torchtitan_ext.metrics import MetricsPlugin
from torchtitan_ext.plugin import TrainerPlugin
from torchtitan_ext.toml import reference

DOCS = Path(__file__).parents[2] / "docs" / "toml.md"


class MyTrainer(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        my_key: int = 7

        def __post_init__(self) -> None:
            # Not super(): a slotted dataclass is a new class, which super() does not know.
            Trainer.Config.__post_init__(self)
            if self.my_key < 0:
                raise ValueError("my_key must not be negative")


class MyMetrics(MetricsProcessor):
    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        my_metric: str = "mine"


def my_job() -> Trainer.Config:
    """A config function such as a user writes."""
    return with_narrowcast(qwen3_moe_debug(), NarrowcastConfig(all_gather=AllGatherConfig()))


def owner_made_by(config: object, monkeypatch: pytest.MonkeyPatch) -> type:
    """The class that build() makes an object of, without running its constructor."""
    made = []
    owner = type(config)._owner
    monkeypatch.setattr(owner, "__init__", lambda self, config: made.append((self, config)))
    built = config.build()
    assert made[0][0] is built
    assert made[0][1] == config
    return type(built)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"compression": "exponents"},
            "narrowcast.all_gather.compression = 'exponents': "
            'must be "auto" or "observe" or "delta" or "exponent" or "entropy" or "none"',
        ),
        (
            {"exponent_coding": "block"},
            'narrowcast.all_gather.exponent_coding = \'block\': must be "delta" or "blocks"',
        ),
        (
            {"block_check": "crc"},
            'narrowcast.all_gather.block_check = \'crc\': must be "compare" or "hash"',
        ),
        (
            {"entropy_coder": "lz4"},
            'narrowcast.all_gather.entropy_coder = \'lz4\': must be "auto" or "zstd"',
        ),
        (
            {"block_size": 0},
            "narrowcast.all_gather.block_size = 0: must be an integer from 1 to 262144",
        ),
        ({"block_size": True}, "narrowcast.all_gather.block_size = True: must be an integer"),
        ({"block_size": "512"}, "narrowcast.all_gather.block_size = '512': must be an integer"),
        (
            {"verify_interval": -1},
            "narrowcast.all_gather.verify_interval = -1: must be an integer of at least 0",
        ),
        ({"parameters": []}, "narrowcast.all_gather.parameters = []: must be one or more patterns"),
        ({"parameters": "*"}, "narrowcast.all_gather.parameters = '*': must be one or more"),
        (
            {"cache_budget_gib": -1.0},
            "narrowcast.all_gather.cache_budget_gib = -1.0: must be a number of at least 0",
        ),
        (
            {"warmup_steps": 2},
            "narrowcast.all_gather.warmup_steps = 2: must be an integer of at least 3",
        ),
        (
            {"reselect_interval": -1},
            "narrowcast.all_gather.reselect_interval = -1: must be an integer of at least 0",
        ),
        (
            {"compression": "delta", "cache_budget_gib": 1.0},
            "narrowcast.all_gather.cache_budget_gib = 1.0: works with compression = "
            '"auto" or "observe", not "delta"',
        ),
        (
            {"compression": "delta", "exponent_coding": "blocks"},
            "narrowcast.all_gather.exponent_coding = 'blocks': works with compression = "
            '"exponent", "auto" or "observe", not "delta"',
        ),
        (
            {"compression": "exponent", "block_check": "hash"},
            "narrowcast.all_gather.block_check = 'hash': works with exponent_coding = \"blocks\", "
            'not "delta"',
        ),
        ({"enable": "yes"}, "narrowcast.all_gather.enable = 'yes': must be true or false"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_what_is_allowed(given, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        AllGatherConfig(**given)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"compression": "x"}, 'compression = \'x\': must be "auto" or "entropy" or "none"'),
        (
            {"compression": "delta"},
            'compression = \'delta\': must be "auto" or "entropy" or "none"',
        ),
        ({"compression": 1}, 'compression = 1: must be "auto" or "entropy" or "none"'),
        ({"force": 1}, "force = 1: must be true or false"),
        (
            {"compression": "entropy", "warmup_steps": 5},
            'warmup_steps = 5: works with compression = "auto", not "entropy": leave it out, or at '
            "30",
        ),
        (
            {"compression": "none", "reselect_interval": 0},
            'reselect_interval = 0: works with compression = "auto", not "none": leave it out, or '
            "at 100",
        ),
        ({"entropy_coder": "lz4"}, 'entropy_coder = \'lz4\': must be "auto" or "zstd"'),
        ({"enable": "yes"}, "enable = 'yes': must be true or false"),
    ],
)
def test_a_wrong_value_for_gradients_is_named_with_its_key_and_what_is_allowed(given, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        ReduceScatterConfig(**given)
    assert str(caught.value) == f"narrowcast.reduce_scatter.{message}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"enable": 1}, "enable = 1: must be true or false"),
        ({"file": ""}, "file = '': must be a path, not empty"),
        ({"file": 3}, "file = 3: must be a path, not empty"),
        ({"first_step": 0}, "first_step = 0: must be an integer of at least 1"),
        ({"num_steps": 0}, "num_steps = 0: must be an integer of at least 1"),
        ({"interval": True}, "interval = True: must be an integer of at least 1"),
        ({"scores": "yes"}, "scores = 'yes': must be true or false"),
        ({"max_mib": 0.5}, "max_mib = 0.5: must be an integer of at least 1"),
    ],
)
def test_a_wrong_value_for_a_routing_trace_is_named_with_its_key_and_what_is_allowed(
    given, message
):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        RoutingTraceConfig(**given)
    assert str(caught.value) == f"narrowcast.routing_trace.{message}"


METHODS = '"rows" or "pairwise" or "occult" or "random" or "contiguous"'


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"file": None}, ".file = None: must be a path; empty for none"),
        ({"trace": 1}, ".trace = 1: must be a path; empty for none"),
        ({"after_steps": -1}, ".after_steps = -1: must be an integer of at least 0"),
        ({"after_steps": "8"}, ".after_steps = '8': must be an integer of at least 0"),
        (
            {"after_steps": 8, "every_steps": 7},
            ".every_steps = 7: must be 0, or an integer of at least after_steps",
        ),
        (
            {"after_steps": 8, "every_steps": -1},
            ".every_steps = -1: must be 0, or an integer of at least after_steps",
        ),
        ({"method": "best"}, f".method = 'best': must be {METHODS}"),
        ({"nodes": 0}, ".nodes = 0: must be an integer of at least 1"),
        ({"max_load": 0.9}, ".max_load = 0.9: must be 0, or a number of at least 1"),
        ({"max_load": -1}, ".max_load = -1: must be 0, or a number of at least 1"),
        ({"max_load": True}, ".max_load = True: must be 0, or a number of at least 1"),
        (
            {"max_load": float("inf")},
            ".max_load = inf: must be 0, or a number of at least 1",
        ),
        (
            {"cross_node_weight": -0.5, "nodes": 2},
            ".cross_node_weight = -0.5: must be a number of at least 0",
        ),
        (
            {"cross_node_weight": float("nan"), "nodes": 2},
            ".cross_node_weight = nan: must be a number of at least 0",
        ),
        ({"file": "a", "trace": "b"}, ": file = 'a' and trace = 'b': give one of them"),
        ({"file": "a", "after_steps": 8}, ": file = 'a' and after_steps = 8: give one of them"),
        ({"trace": "b", "after_steps": 8}, ": trace = 'b' and after_steps = 8: give one of them"),
        (
            {"every_steps": 9},
            ".every_steps = 9: works with after_steps, which is not given",
        ),
        (
            {"max_load": 1.1, "method": "occult"},
            '.max_load = 1.1: works with method = "rows", not "occult"',
        ),
        (
            {"cross_node_weight": 2.0, "nodes": 2, "method": "pairwise"},
            '.cross_node_weight = 2.0: works with method = "rows", not "pairwise"',
        ),
        ({"cross_node_weight": 2.0}, ".cross_node_weight = 2.0: works with nodes > 1"),
    ],
)
def test_a_wrong_value_for_a_placement_is_named_with_its_key_and_what_is_allowed(given, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        PlacementConfig(**given)
    assert str(caught.value) == f"narrowcast.placement{message}"


@pytest.mark.parametrize(
    "given",
    [
        {"file": "a.json", "nodes": 2},
        {"trace": "a.safetensors", "method": "occult"},
        {"after_steps": 8},
        {"after_steps": 8, "every_steps": 8, "max_load": 1, "cross_node_weight": 4, "nodes": 2},
    ],
)
def test_one_source_of_a_placement_switches_it_on(given):
    assert PlacementConfig(**given).enable


def test_without_a_source_nothing_is_placed():
    assert not PlacementConfig(method="occult", nodes=2).enable


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"deduplicate": "yes"}, ".deduplicate = 'yes': must be true or false"),
        ({"deduplicate": True, "nodes": 0}, ".nodes = 0: must be an integer of at least 1"),
        (
            {"deduplicate": True, "kernels": "cuda"},
            '.kernels = \'cuda\': must be "torch" or "triton"',
        ),
        ({"nodes": 2}, ".nodes = 2: works with deduplicate = true"),
        ({"kernels": "triton"}, ".kernels = 'triton': works with deduplicate = true"),
    ],
)
def test_a_wrong_value_for_a_dispatch_is_named_with_its_key_and_what_is_allowed(given, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        DispatchConfig(**given)
    assert str(caught.value) == f"narrowcast.dispatch{message}"


def test_a_wrong_switch_of_the_ledger_is_named():
    with pytest.raises(ValueError, match=r"narrowcast\.volume\.enable = 1: must be true or false"):
        VolumeConfig(enable=1)


def test_by_default_bytes_are_counted_and_all_that_crosses_is_plain():
    config = with_narrowcast(qwen3_moe_debug())
    assert config.narrowcast == NarrowcastConfig()
    assert not config.narrowcast.all_gather.enable
    assert not config.narrowcast.reduce_scatter.enable
    assert not config.narrowcast.routing_trace.enable
    assert not config.narrowcast.placement.enable
    assert not config.narrowcast.dispatch.deduplicate
    assert config.narrowcast.volume.enable
    assert config.job == JobConfig(config_file="")


def test_the_result_has_the_values_of_the_base_and_builds_its_trainer_with_the_plugin(monkeypatch):
    base = qwen3_moe_debug()
    sections = NarrowcastConfig(all_gather=AllGatherConfig(enable=True))
    config = with_narrowcast(base, sections)
    assert isinstance(config, Trainer.Config)
    assert config.narrowcast is sections
    for f in dataclasses.fields(base):
        if f.name != "metrics":
            assert getattr(config, f.name) is getattr(base, f.name)
    made = owner_made_by(config, monkeypatch)
    assert issubclass(made, TrainerPlugin)
    assert issubclass(made, Trainer)
    assert made.__mro__.index(TrainerPlugin) < made.__mro__.index(Trainer)


def test_metrics_keep_their_values_and_are_built_with_the_plugin():
    base = qwen3_moe_debug()
    base.metrics = MyMetrics.Config(log_freq=3, my_metric="x")
    metrics = with_narrowcast(base).metrics
    assert isinstance(metrics, MyMetrics.Config)
    assert (metrics.log_freq, metrics.my_metric) == (3, "x")
    assert issubclass(type(metrics)._owner, MetricsPlugin)
    assert issubclass(type(metrics)._owner, MyMetrics)


def test_the_base_is_left_as_it_was():
    base = qwen3_moe_debug()
    metrics = base.metrics
    with_narrowcast(base)
    assert type(base) is Trainer.Config
    assert type(base)._owner is Trainer
    assert base.metrics is metrics
    assert type(metrics)._owner is MetricsProcessor


def test_a_subclass_of_the_trainer_keeps_its_class_keys_and_checks(monkeypatch):
    config = with_narrowcast(MyTrainer.Config(my_key=3))
    assert isinstance(config, MyTrainer.Config)
    assert config.my_key == 3
    with pytest.raises(ValueError, match="my_key must not be negative"):
        dataclasses.replace(config, my_key=-1)
    assert issubclass(owner_made_by(config, monkeypatch), MyTrainer)


def test_applied_twice_it_adds_nothing_and_keeps_the_sections():
    sections = NarrowcastConfig(all_gather=AllGatherConfig(enable=True))
    once = with_narrowcast(qwen3_moe_debug(), sections, job=JobConfig(config_file="x.toml"))
    twice = with_narrowcast(once)
    assert type(twice) is type(once)
    assert type(twice.metrics) is type(once.metrics)
    assert twice.narrowcast is sections
    assert twice.job.config_file == "x.toml"
    assert with_narrowcast(once, NarrowcastConfig()).narrowcast == NarrowcastConfig()


def test_two_configs_of_one_class_get_one_class():
    assert type(with_narrowcast(qwen3_moe_debug())) is type(with_narrowcast(qwen3_moe_debug()))


def parse(*flags: str) -> Trainer.Config:
    return ConfigManager().parse_args(["--module", __name__, "--config", "my_job", *flags])


def test_flags_override_our_sections_and_torchtitans():
    config = parse(
        "--narrowcast.all_gather.compression=exponent",
        "--narrowcast.all_gather.enable",
        "--narrowcast.all_gather.parameters=*.experts.*,*.wq.*",
        "--narrowcast.reduce_scatter.enable",
        "--narrowcast.reduce_scatter.compression=none",
        "--narrowcast.routing_trace.enable",
        "--narrowcast.routing_trace.num_steps=2",
        "--narrowcast.placement.after_steps=8",
        "--narrowcast.placement.max_load=1.1",
        "--narrowcast.dispatch.deduplicate",
        "--narrowcast.dispatch.nodes=2",
        "--narrowcast.volume.no-enable",
        "--training.steps=3",
    )
    assert config.narrowcast.all_gather.compression == "exponent"
    assert config.narrowcast.all_gather.enable
    assert config.narrowcast.all_gather.parameters == ["*.experts.*", "*.wq.*"]
    assert config.narrowcast.reduce_scatter == ReduceScatterConfig(enable=True, compression="none")
    assert config.narrowcast.routing_trace == RoutingTraceConfig(enable=True, num_steps=2)
    assert config.narrowcast.placement == PlacementConfig(after_steps=8, max_load=1.1)
    assert config.narrowcast.dispatch == DispatchConfig(deduplicate=True, nodes=2)
    assert not config.narrowcast.volume.enable
    assert config.training.steps == 3
    assert issubclass(type(config)._owner, TrainerPlugin)
    assert issubclass(type(config.metrics)._owner, MetricsPlugin)


def test_a_wrong_flag_of_ours_ends_with_the_allowed_values(capsys):
    with pytest.raises(SystemExit):
        parse("--narrowcast.all_gather.compression=exponents")
    shown = capsys.readouterr().err
    assert all(f"'{name}'" in shown for name in ("delta", "exponent", "entropy", "none"))
    with pytest.raises(SystemExit):
        parse("--narrowcast.all_gather.block_size=0")
    assert "must be an integer from 1 to 262144" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit):
        parse("--narrowcast.reduce_scatter.compression=delta")
    shown = capsys.readouterr().err
    assert all(f"'{name}'" in shown for name in ("entropy", "none"))


def test_help_describes_our_keys_and_still_torchtitans(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Gather FSDP parameters through narrowcast's lossless compression" in shown
    assert "Values per block of exponent_coding" in shown
    assert "Every contribution arrives bitwise identical" in shown
    assert "How many train steps to run" in shown
    assert "How often to log metrics to TensorBoard" in shown


def test_importing_the_package_imports_no_torchtitan():
    program = (
        "import sys, torchtitan_ext;"
        "sys.exit(str([m for m in ('torchtitan', 'tyro') if m in sys.modules]))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stderr.strip() == "[]"


def test_the_reference_page_shows_the_sections_as_they_are():
    page = DOCS.read_text(encoding="utf-8")
    assert reference.with_tables(page) == page
    assert "| `block_size` | `int` | `512` | an integer from 1 to 262144 |" in page
