import re
import subprocess
import sys
from pathlib import Path

import pytest
import torchtitan.train
from torchtitan.config import ConfigManager
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug
from torchtitan.trainer import Trainer

import torchtitan_ext.train
from torchtitan_ext.metrics import MetricsPlugin
from torchtitan_ext.plugin import TrainerPlugin
from torchtitan_ext.toml import load as toml_load
from torchtitan_ext.toml.load import TomlError, load_config, to_toml

QWEN = '[base]\nmodule = "qwen3"\nconfig = "qwen3_moe_debug"\n'
DEEPSEEK = '[base]\nmodule = "deepseek_v3"\nconfig = "deepseek_v3_debugmodel"\n'
DOCS = Path(__file__).parents[3] / "docs" / "toml.md"

_kept = qwen3_moe_debug()


def kept_config() -> Trainer.Config:
    """A config function that returns the same object every time."""
    return _kept


def no_config() -> dict:
    return {}


def raises_a_value_error() -> Trainer.Config:
    raise ValueError("lr is\n too high")


def raises_another_error() -> Trainer.Config:
    return {}["lr"]


def asks(for_what: str) -> Trainer.Config:
    return raises_another_error()


def exits() -> Trainer.Config:
    sys.exit("not here")


@pytest.fixture
def write(tmp_path):
    def write_file(text: str, base: str = QWEN) -> str:
        file = tmp_path / "job.toml"
        file.write_text(base + text, encoding="utf-8")
        return str(file)

    return write_file


@pytest.fixture
def load(write):
    return lambda text, base=QWEN: load_config(write(text, base))


@pytest.fixture
def problems(write):
    """What is said of a wrong file: its lines, the file's name taken off the first."""

    def of(text: str, base: str = QWEN) -> list[str]:
        file = write(text, base)
        with pytest.raises(TomlError) as caught:
            load_config(file)
        first, *others = str(caught.value).split("\n  ")
        assert first.startswith(f"{file}: ")
        return [first.removeprefix(f"{file}: "), *others]

    return of


# What a file can set.


def test_a_file_with_a_base_alone_is_the_base_with_our_sections(load):
    config, base = load(""), qwen3_moe_debug()
    assert isinstance(config, Trainer.Config)
    assert issubclass(type(config)._owner, TrainerPlugin)
    assert issubclass(type(config.metrics)._owner, MetricsPlugin)
    assert config.training == base.training
    assert config.optimizer == base.optimizer
    assert config.model_spec.model.to_dict().keys() == base.model_spec.model.to_dict().keys()
    assert not config.narrowcast.all_gather.enable


def test_keys_of_torchtitan_and_ours_are_set_and_the_others_keep_the_bases_values(load):
    config = load(
        """
        [training]
        steps = 60
        max_norm = 2.5
        mixed_precision_param = "float32"
        [parallelism]
        module_fqns_per_model_part = [["a", "b"], ["c"]]
        [compile]
        components = ["model"]
        [narrowcast.all_gather]
        enable = true
        compression = "exponent"
        parameters = ["*.experts.*"]
        [narrowcast.reduce_scatter]
        enable = true
        compression = "none"
        [narrowcast.volume]
        enable = false
        """
    )
    assert config.training.steps == 60
    assert config.training.max_norm == 2.5
    assert config.training.mixed_precision_param == "float32"
    assert config.training.seq_len == qwen3_moe_debug().training.seq_len
    assert config.parallelism.module_fqns_per_model_part == [["a", "b"], ["c"]]
    assert config.compile.components == ["model"]
    assert config.narrowcast.all_gather.compression == "exponent"
    assert config.narrowcast.all_gather.parameters == ["*.experts.*"]
    assert config.narrowcast.reduce_scatter.enable
    assert config.narrowcast.reduce_scatter.compression == "none"
    assert config.narrowcast.reduce_scatter.entropy_coder == "auto"
    assert not config.narrowcast.volume.enable


def test_keys_before_the_first_table_are_those_of_the_trainer(write, tmp_path):
    config = load_config(write(QWEN, base='hf_assets_path = "assets/bpe"\n'))
    assert config.hf_assets_path == "assets/bpe"


def test_the_class_of_a_part_is_the_bases(load):
    config = load('[dataloader]\ndataset = "c4"\n[checkpoint]\nasync_mode = "async"\n')
    base = qwen3_moe_debug()
    assert type(config.dataloader) is type(base.dataloader)
    assert config.dataloader.dataset == "c4"
    assert config.checkpoint.async_mode == "async"


def test_an_integer_is_a_number(load):
    value = load("[lr_scheduler]\nmin_lr_factor = 1\n").lr_scheduler.min_lr_factor
    assert (value, type(value)) == (1.0, float)


def test_none_is_written_as_on_the_command_line(load):
    config = load('[lr_scheduler]\ndecay_ratio = "None"\n[debug]\nseed = 3\n')
    assert config.lr_scheduler.decay_ratio is None
    assert config.debug.seed == 3


@pytest.mark.parametrize(
    ("name", "cls"),
    [("selective", SelectiveAC), ("full", FullAC), ("memory-budget", MemoryBudgetAC)],
)
def test_type_chooses_the_class_of_activation_checkpointing(load, name, cls):
    text = f'[activation_checkpoint]\ntype = "{name}"\npreserve_rng_state = false\n'
    config = load(text + '[compile]\nenable = true\ncomponents = ["model"]\n')
    assert type(config.activation_checkpoint) is cls.Config
    assert not config.activation_checkpoint.preserve_rng_state


def test_type_none_turns_activation_checkpointing_off(load):
    assert load('[activation_checkpoint]\ntype = "none"\n').activation_checkpoint is None


def test_without_type_the_bases_activation_checkpointing_is_changed(load):
    config = load("[activation_checkpoint]\ndebug = true\n")
    assert type(config.activation_checkpoint) is type(qwen3_moe_debug().activation_checkpoint)
    assert config.activation_checkpoint.debug


def test_the_only_parameter_group_is_changed_key_by_key(load):
    config = load("[optimizer.param_groups.optimizer_kwargs]\nlr = 1\nbetas = [0.9, 0.99]\n")
    [group], [base] = config.optimizer.param_groups, qwen3_moe_debug().optimizer.param_groups
    assert group.optimizer_kwargs == base.optimizer_kwargs | {"lr": 1.0, "betas": (0.9, 0.99)}
    assert type(group.optimizer_kwargs["lr"]) is float
    assert group.pattern == base.pattern


def test_an_array_of_tables_replaces_the_parameter_groups(load):
    config = load(
        """
        [[optimizer.param_groups]]
        pattern = "gate"
        optimizer_name = "Adam"
        optimizer_kwargs = { lr = 1e-4 }
        [[optimizer.param_groups]]
        pattern = ".*"
        optimizer_name = "AdamW"
        optimizer_kwargs = { lr = 8e-4, weight_decay = 0.1 }
        """
    )
    groups = config.optimizer.param_groups
    assert [group.pattern for group in groups] == ["gate", ".*"]
    assert [group.optimizer_kwargs["lr"] for group in groups] == [1e-4, 8e-4]
    assert groups[0].optimizer_kwargs == {"lr": 1e-4}


def test_keys_choose_one_of_several_parameter_groups(load):
    base = '[base]\nmodule = "qwen3"\nconfig = "qwen3_debugmodel_moe_param_groups"\n'
    config = load("[optimizer.param_groups.1]\noptimizer_kwargs.lr = 0.5\n", base)
    assert [g.optimizer_kwargs["lr"] for g in config.optimizer.param_groups] == [8e-4, 0.5, 8e-4]


def test_model_fields_are_set_in_all_layers_a_range_or_one(load):
    config = load(
        """
        [model_spec.model]
        enable_weight_tying = true
        [model_spec.model.layers."*".attention.inner_attention]
        block_size = 64
        [model_spec.model.layers.1-5.moe]
        router.top_k = 2
        shared_experts = "None"
        [model_spec.model.layers.0.feed_forward.w1]
        bias = true
        """,
        DEEPSEEK,
    )
    model = config.model_spec.model
    assert model.enable_weight_tying
    assert [layer.attention.inner_attention.block_size for layer in model.layers] == [64] * 6
    assert [layer.moe.router.top_k for layer in model.layers[1:]] == [2] * 5
    assert all(layer.moe.shared_experts is None for layer in model.layers[1:])
    assert model.layers[0].feed_forward.w1.bias


def test_one_layer_is_changed_alone_where_layers_share_a_config_object(load):
    layers = qwen3_moe_debug().model_spec.model.layers
    assert layers[0].attention.inner_attention is layers[1].attention.inner_attention
    config = load("[model_spec.model.layers.0.attention.inner_attention]\nblock_size = 64\n")
    sizes = [x.attention.inner_attention.block_size for x in config.model_spec.model.layers]
    assert sizes == [64, *[128] * 7]


def test_an_absent_part_is_made_from_a_table(load):
    config = load(
        """
        [model_spec.model.layers.0.feed_forward]
        w1 = { in_features = 256, out_features = 64 }
        w2 = { in_features = 64, out_features = 256 }
        w3 = { in_features = 256, out_features = 64, bias = true }
        """
    )
    first, second = config.model_spec.model.layers[:2]
    assert first.feed_forward.w3.bias
    assert not first.feed_forward.w1.bias
    assert second.feed_forward is None


def test_override_imports_take_names_and_pairs_of_name_and_arguments(load):
    config = load('[override]\nimports = ["m.f", ["m.g", { size = 3 }]]\n')
    assert config.override.imports == ["m.f", ("m.g", {"size": 3})]


def test_the_objects_of_the_base_function_are_not_changed(load):
    before = to_toml(_kept)
    base = f'[base]\nmodule = "{__name__}"\nconfig = "kept_config"\n'
    config = load(
        """
        [training]
        steps = 77
        [optimizer.param_groups.optimizer_kwargs]
        lr = 0.5
        [model_spec.model.layers."*".moe.router]
        top_k = 3
        """,
        base,
    )
    assert config.training.steps == 77
    assert to_toml(_kept) == before
    assert type(_kept) is Trainer.Config


# What is said of a wrong file.


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[training]\nstep = 60",
            'training.step = 60: unknown key; did you mean "steps"? (allowed: local_batch_size, ',
        ),
        ("[trainin]\nsteps = 60", "trainin = {steps = 60}: unknown key; did you mean"),
        (
            '[narrowcast.all_gather]\ncompression = "exponents"',
            'narrowcast.all_gather.compression = "exponents": '
            'must be "auto" or "observe" or "delta" or "exponent" or "entropy" or "none"',
        ),
        (
            "[narrowcast.all_gather]\nblock_size = 0",
            "narrowcast.all_gather.block_size = 0: must be an integer from 1 to 262144",
        ),
        (
            "[narrowcast.allgather]\nenable = true",
            "narrowcast.allgather = {enable = true}: unknown key; "
            'did you mean "all_gather"? (allowed: topology, all_gather, reduce_scatter, '
            "routing_trace, placement, dispatch, volume)",
        ),
        (
            '[narrowcast.reduce_scatter]\ncompression = "x"',
            'narrowcast.reduce_scatter.compression = "x": must be "auto" or "entropy" or "none"',
        ),
        (
            "[narrowcast.reduce_scatter]\nenable = 1",
            "narrowcast.reduce_scatter.enable = 1: must be true or false",
        ),
        (
            '[narrowcast.all_gather]\ntreatment = "value"',
            'narrowcast.all_gather.treatment = "value": unknown key; it is called "compression" '
            "now",
        ),
        (
            '[narrowcast.all_gather]\ncompression = "raw"',
            'narrowcast.all_gather.compression = "raw": must be "auto" or "observe" or "delta" or '
            '"exponent" or "entropy" or "none"; "raw" is called "none" now',
        ),
        (
            '[narrowcast.reduce_scatter]\nparameters = ["*"]',
            'narrowcast.reduce_scatter.parameters = ["*"]: unknown key',
        ),
        ('[training]\nsteps = "60"', 'training.steps = "60": must be an integer'),
        ("[training]\nsteps = 60.0", "training.steps = 60.0: must be an integer"),
        ("[training]\nsteps = true", "training.steps = true: must be an integer"),
        ("[training]\nmax_norm = true", "training.max_norm = true: must be a number or an integer"),
        ("[training]\ngc_debug = 1", "training.gc_debug = 1: must be true or false"),
        ("[checkpoint]\nfolder = 1", "checkpoint.folder = 1: must be a string"),
        ("[debug]\nseed = 2020-01-01", 'debug.seed = 2020-01-01: must be an integer or "None"'),
        (
            '[training]\ndtype = "float16"',
            'training.dtype = "float16": must be "bfloat16" or "float32"',
        ),
        (
            '[compile]\ncomponents = "model"',
            'compile.components = "model": must be an array, each element a string',
        ),
        (
            '[compile]\ncomponents = ["model", 3]',
            'compile.components = ["model", 3]: must be an array, each element a string',
        ),
        (
            "[parallelism]\nmodule_fqns_per_model_part = [3]",
            "parallelism.module_fqns_per_model_part = [3]: "
            'must be an array, each element an array, each element a string or "None"',
        ),
        (
            "[override]\nimports = [3]",
            "override.imports = [3]: must be an array, each element a string "
            "or an array of 2: a string, a table",
        ),
        ("training = 3\n" + QWEN, "training = 3: must be a table"),
        (
            '[activation_checkpoint]\ntype = "ful"',
            'activation_checkpoint.type = "ful": '
            'must be "selective" or "full" or "memory-budget" or "none"',
        ),
        (
            '[activation_checkpoint]\ntype = "none"\ndebug = true',
            'activation_checkpoint.debug = true: unknown key with type = "none"',
        ),
        (
            '[activation_checkpoint]\ntype = "full"\nforce_recompute_mm_shapes_by_fqns = []',
            "activation_checkpoint.force_recompute_mm_shapes_by_fqns = []: unknown key",
        ),
        (
            '[optimizer.param_groups.optimizer_kwargs]\nlr = "x"',
            'optimizer.param_groups.optimizer_kwargs.lr = "x": must be a number',
        ),
        (
            '[[optimizer.param_groups]]\npattern = "x"',
            "optimizer.param_groups[0].optimizer_name is missing",
        ),
        ("[optimizer]\nparam_groups = 3", "optimizer.param_groups = 3: must be an array of tables"),
        (
            "[model_spec.model.layers.8]\nmoe.num_experts = 4",
            "model_spec.model.layers.8 = {moe = {num_experts = 4}}: no such element: "
            'the list has 8, chosen by a key as "*" (all), "0" (one) or "0-7" (first to last)',
        ),
        ("[model_spec.model.layers.moe]\nnum_experts = 4", "model_spec.model.layers.moe = "),
        ("[model_spec.model.layers.5-3]\nmoe.num_experts = 4", "model_spec.model.layers.5-3 = "),
        (
            '[model_spec.model.layers."*".moe]\nnum_expert = 4',
            'model_spec.model.layers."*".moe.num_expert = 4: unknown key; '
            'did you mean "num_experts"? (allowed: num_experts, ',
        ),
        (
            '[model_spec.model.layers."*".feed_forward.w1]\nbias = true',
            'model_spec.model.layers."*".feed_forward.w1.in_features is missing',
        ),
        ('[model_spec]\nflavor = "8B"', 'model_spec.flavor = "8B": cannot be set from TOML'),
        (
            '[model_spec]\nparallelize_fn = "f"',
            'model_spec.parallelize_fn = "f": cannot be set from TOML',
        ),
        (
            "[model_spec.model.lm_head.param_init]\nweight = 1",
            "model_spec.model.lm_head.param_init = {weight = 1}: cannot be set from TOML",
        ),
        (
            '[job]\nconfig_file = "y.toml"',
            'job = {config_file = "y.toml"}: cannot be set from TOML',
        ),
        (
            "[parallelism]\npipeline_parallel_microbatch_size = 0",
            "parallelism.pipeline_parallel_microbatch_size must be greater than 0.",
        ),
        (
            '[parallelism]\ncontext_parallel_load_balancer = ""',
            "[parallelism]: context_parallel_load_balancer cannot be an empty string.",
        ),
    ],
)
def test_an_error_names_the_file_the_key_what_was_given_and_what_is_allowed(problems, text, said):
    base = "" if QWEN in text else QWEN
    found = problems(text + "\n", base)
    assert any(line.startswith(said) for line in found), found


def test_all_errors_of_a_file_are_reported_together_and_each_once(problems):
    found = problems(
        """
        [training]
        step = 60
        dtype = "float16"
        [model_spec.model.layers."*".moe.router]
        top_k = "2"
        [narrowcast.all_gather]
        block_size = -1
        """
    )
    assert found[0] == "4 errors"
    keys = [line.split(" = ")[0] for line in found[1:]]
    assert keys == [
        "training.step",
        "training.dtype",
        'model_spec.model.layers."*".moe.router.top_k',
        "narrowcast.all_gather.block_size",
    ]


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ("", "[base] is missing; it says what the file changes"),
        ('[base]\nmodule = "qwen3"\n', "base.config is missing"),
        ("[base]\nmodule = 3\nconfig = 'x'\n", "base.module = 3: must be a string"),
        (
            "[base]\nmodul = 'qwen3'\nmodule = 'qwen3'\nconfig = 'x'\n",
            'base.modul = "qwen3": unknown key; did you mean "module"? (allowed: module, config)',
        ),
        ("[base]\nmodule = 'qwen'\nconfig = 'x'\n", "[base]: Cannot import module 'qwen'"),
        (
            "[base]\nmodule = 'qwen3'\nconfig = 'x'\n",
            "[base]: Config function 'x' not found in torchtitan.models.qwen3.config_registry",
        ),
        (
            f"[base]\nmodule = '{__name__}'\nconfig = 'no_config'\n",
            'base.config = "no_config": returns dict, not a Trainer.Config',
        ),
        (
            f"[base]\nmodule = '{__name__}'\nconfig = 'raises_a_value_error'\n",
            'base.config = "raises_a_value_error": raised ValueError: lr is too high '
            f"({__file__}, line ",
        ),
        (
            f"[base]\nmodule = '{__name__}'\nconfig = 'raises_another_error'\n",
            f"base.config = \"raises_another_error\": raised KeyError: 'lr' ({__file__}, line ",
        ),
        (
            f"[base]\nmodule = '{__name__}'\nconfig = 'exits'\n",
            'base.config = "exits": raised SystemExit: not here',
        ),
        (
            f"[base]\nmodule = '{__name__}'\nconfig = 'asks'\n",
            'base.config = "asks": raised TypeError: asks() missing 1 required positional argument',
        ),
        ("[base\n", "is not TOML: "),
    ],
)
def test_a_file_without_a_usable_base_says_so(problems, base, said):
    assert problems("", base)[0].startswith(said)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_library", "raised ModuleNotFoundError: No module named 'no_such_library'"),
        ("raise RuntimeError('no device')", "raised RuntimeError: no device"),
        ("x =", "raised SyntaxError: "),
    ],
)
def test_a_base_whose_module_raises_says_so(problems, tmp_path, monkeypatch, source, said):
    (tmp_path / "their_base.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    [found] = problems("", "[base]\nmodule = 'their_base'\nconfig = 'x'\n")
    assert found.startswith(f'base.module = "their_base": {said}')


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TomlError, match=r"nowhere\.toml: cannot be read: No such file"):
        load_config(tmp_path / "nowhere.toml")


# The command line.


@pytest.fixture
def command_line(monkeypatch):
    def set_to(*args: str) -> None:
        monkeypatch.setattr(sys, "argv", ["train", *args])

    return set_to


FROM_TOML = ("--module", "torchtitan_ext", "--config", "from_toml")
STEPS = "[training]\nsteps = 60\nseq_len = 512\n"


@pytest.mark.parametrize(
    "flag",
    ["--job.config_file {}", "--job.config_file={}", "--job.config-file {}"],
)
def test_torchtitans_own_entry_takes_the_file_and_flags_override_it(command_line, write, flag):
    file = write(STEPS)
    command_line(*FROM_TOML, *flag.format(file).split(), "--training.steps", "7")
    config = ConfigManager().parse_args()
    assert config.training.steps == 7
    assert config.training.seq_len == 512
    assert config.job.config_file == file
    assert issubclass(type(config)._owner, TrainerPlugin)


def test_flags_override_the_files_narrowcast_sections_and_activation_checkpointing(
    command_line, write
):
    file = write(
        '[activation_checkpoint]\ntype = "full"\n[narrowcast.all_gather]\nblock_size = 8\n'
    )
    command_line(
        *FROM_TOML, "--job.config_file", file, "--narrowcast.all_gather.compression=entropy"
    )
    config = ConfigManager().parse_args()
    assert type(config.activation_checkpoint) is FullAC.Config
    assert config.narrowcast.all_gather.compression == "entropy"
    assert config.narrowcast.all_gather.block_size == 8
    command_line(*FROM_TOML, "--job.config_file", file, "activation-checkpoint:none")
    assert ConfigManager().parse_args().activation_checkpoint is None


@pytest.mark.parametrize("flags", [(), ("--job.config_file",), ("--job.config_file=",)])
def test_without_a_file_the_flag_is_asked_for(command_line, flags):
    command_line(*FROM_TOML, *flags)
    with pytest.raises(ValueError, match=r"--job\.config_file is required"):
        ConfigManager().parse_args()


def test_our_entry_trains_by_torchtitans_on_the_file_and_the_flags(
    command_line, write, monkeypatch
):
    trained = []
    monkeypatch.setattr(
        torchtitan.train, "main", lambda: trained.append(ConfigManager().parse_args())
    )
    command_line("--job.config_file", write(STEPS), "--training.steps=7")
    torchtitan_ext.train.main()
    [config] = trained
    assert (config.training.steps, config.training.seq_len) == (7, 512)


def test_our_entry_takes_a_python_config_function_too(command_line, monkeypatch, capsys):
    command_line("--module", "qwen3", "--config=qwen3_moe_debug", "--print-config")
    torchtitan_ext.train.main()
    assert "[model_spec.model" in capsys.readouterr().out


def test_the_printed_config_is_a_file_for_the_same_job(command_line, write, capsys, tmp_path):
    text = STEPS + (
        """
        [optimizer.param_groups.optimizer_kwargs]
        lr = 1e-5
        [activation_checkpoint]
        type = "none"
        [model_spec.model.layers.1-5.moe.router]
        top_k = 2
        [narrowcast.all_gather]
        enable = true
        [narrowcast.reduce_scatter]
        compression = "none"
        """
    )
    command_line("--job.config_file", write(text, DEEPSEEK), "--print-config", "--training.steps=7")
    torchtitan_ext.train.main()
    printed = capsys.readouterr().out
    again = tmp_path / "again.toml"
    again.write_text(printed)
    config = load_config(again)
    assert to_toml(config) == printed
    assert config.training.steps == 7
    assert config.optimizer.param_groups[0].optimizer_kwargs["lr"] == 1e-5
    assert config.activation_checkpoint is None
    assert config.model_spec.model.layers[5].moe.router.top_k == 2
    assert config.narrowcast.all_gather.enable
    assert not config.narrowcast.reduce_scatter.enable
    assert config.narrowcast.reduce_scatter.compression == "none"


def test_only_the_first_rank_prints(command_line, write, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    command_line("--job.config_file", write(STEPS), "--print-config")
    torchtitan_ext.train.main()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("flags", [(), ("--no.such.flag", "1")])
def test_of_a_wrong_config_other_ranks_say_nothing(command_line, write, capsys, monkeypatch, flags):
    monkeypatch.setenv("LOCAL_RANK", "1")
    command_line("--job.config_file", write(STEPS if flags else "[x]\n"), *flags)
    with pytest.raises(SystemExit) as ended:
        torchtitan_ext.train.main()
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", "")


@pytest.mark.wide  # the launch of another wrong file runs always (test_launch.py)
def test_a_wrong_file_ends_the_launch_with_code_2_and_a_message_alone(write):
    ended = subprocess.run(
        [sys.executable, "-m", "torchtitan_ext.train", "--job.config_file", write("[x]\n")],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert "job.toml: x = {}: unknown key" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_every_toml_example_of_the_reference_page_loads(load):
    examples = re.findall(r"```toml\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.S)
    assert len(examples) >= 5
    for example in examples:
        load(example, base="" if "[base]" in example else QWEN)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (True, "true"),
        (None, '"None"'),
        (1e-8, "1e-08"),
        (float("inf"), "inf"),
        ('a "b"\n\\ü\x7f', '"a \\"b\\"\\n\\\\ü\\u007f"'),
        ((0.9, 1), "[0.9, 1]"),
        ({"a.b": [], "c": {}}, '{"a.b" = [], c = {}}'),
    ],
)
def test_values_are_written_so_that_toml_reads_them_back(value, written):
    assert toml_load.to_literal(value) == written
    read = toml_load.tomllib.loads(f"x = {written}")["x"]
    assert read == ("None" if value is None else list(value) if type(value) is tuple else value)
