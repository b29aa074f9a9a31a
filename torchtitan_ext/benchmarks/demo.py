"""Trains one Mixture-of-Experts with baseline FSDP2 and with narrowcast, and compares the runs.

``python -m torchtitan_ext.benchmarks.demo`` runs ``train_configs/demo.toml`` on 4 CPU ranks several
times with different flags, checks that losses and parameters are bitwise identical where they must
be, and shows what was sent. ``docs/demo.md`` describes what it leaves in ``outputs/demo``.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from tqdm import tqdm

from torchtitan_ext.benchmarks.command_line import make_parser, write_json
from torchtitan_ext.benchmarks.comparison import (
    Job,
    RunSummary,
    Summary,
    compare,
    short_number,
    tables,
)
from torchtitan_ext.benchmarks.runs import Run, RunError, read_run, train

CONFIG_FILE = Path("train_configs/demo.toml")
WORLD_SIZE = 4


@dataclass(frozen=True)
class Compression:
    """A way to exchange parameters and gradients.

    Attributes:
        label: its name for people.
        flags: that choose it.
        once: whether it runs at the first learning rate only.
        equal_to: the compression whose losses and parameters must be bitwise identical; None where
            there is none.
    """

    label: str
    flags: tuple[str, ...]
    once: bool = False
    equal_to: str | None = "plain"


_PLAIN = "--narrowcast.all_gather.no-enable"
_COMPRESSION = "--narrowcast.all_gather.compression"
_EXPONENT_CODING = "--narrowcast.all_gather.exponent_coding"
_RESHARD = "--parallelism.fsdp_reshard_after_forward"
_GRADIENTS = "--narrowcast.reduce_scatter.enable"
_GRADIENTS_COMPRESSION = "--narrowcast.reduce_scatter.compression"

COMPRESSIONS = {
    "plain": Compression("plain, gathered twice", (_PLAIN,), equal_to=None),
    "plain_kept": Compression("plain, kept for backward", (_PLAIN, _RESHARD, "never"), once=True),
    "delta": Compression("delta", (_COMPRESSION, "delta")),
    "exponent": Compression(
        "exponent, delta", (_COMPRESSION, "exponent", _EXPONENT_CODING, "delta"), once=True
    ),
    "blocks": Compression(
        "exponent, blocks", (_COMPRESSION, "exponent", _EXPONENT_CODING, "blocks"), once=True
    ),
    "entropy": Compression("entropy", (_COMPRESSION, "entropy"), once=True),
    # The exchange and the order of sums of the one below. The backend may use another order.
    "uncompressed_gradients": Compression(
        "plain, gradients none",
        (_PLAIN, _GRADIENTS, _GRADIENTS_COMPRESSION, "none"),
        once=True,
        equal_to=None,
    ),
    "delta_gradients": Compression(
        "delta, gradients entropy",
        (_COMPRESSION, "delta", _GRADIENTS, _GRADIENTS_COMPRESSION, "entropy"),
        once=True,
        equal_to="uncompressed_gradients",
    ),
}
# These take eight minutes on two cores.
DEFAULT_COMPRESSIONS = ("plain_kept", "delta", "exponent", "blocks", "delta_gradients")
QUICK_COMPRESSIONS = ("delta", "delta_gradients")


def run_demo(
    *,
    steps: int = 60,
    compressions: Sequence[str] = DEFAULT_COMPRESSIONS,
    learning_rates: Sequence[float] = (1e-4, 1e-5),
    output: Path = Path("outputs/demo"),
) -> Summary:
    """Train with baseline FSDP2 and with each compression, and compare. Shows progress on stderr.

    The corpus must have been made, and the working directory must be that of the project. The job
    is for CPU: hide GPUs from it by ``CUDA_VISIBLE_DEVICES``, as the command line does.

    Args:
        steps: of each run.
        compressions: keys of ``COMPRESSIONS``. ``plain`` always runs, first at each learning rate,
            and so does what another must equal; those with ``once`` run at the first one only.
        learning_rates: after the warm-up.
        output: the folder for a folder of each run, and ``summary.json``. Those of an earlier demo
            are removed.

    Raises:
        ValueError: a compression is unknown.
        RunError: a run failed.
    """
    unknown = sorted(set(compressions) - set(COMPRESSIONS))
    if unknown:
        raise ValueError(f"compressions {unknown} are unknown: there are {', '.join(COMPRESSIONS)}")
    _clear(output)
    jobs = plan(steps, compressions, learning_rates)
    runs: dict[str, Run] = {}
    summaries: list[RunSummary] = []
    for i, job in enumerate(jobs):
        title = f"[{i + 1}/{len(jobs)}] lr {short_number(job.learning_rate)}, {job.label}"
        with _progress(title, steps) as bar:
            train(output / job.name, job.flags, WORLD_SIZE, _show_on(bar))
        run = runs[job.name] = read_run(output / job.name, steps)
        if job.compression == "plain":
            plain = run
        reference = runs[job.equal_to] if job.equal_to else plain
        summaries.append(compare(job, run, plain, reference, WORLD_SIZE))
    summary = Summary(_commit(), WORLD_SIZE, plain.parameter_count, summaries)
    write_json(output / "summary.json", asdict(summary))
    return summary


def plan(steps: int, compressions: Sequence[str], learning_rates: Sequence[float]) -> list[Job]:
    """The jobs of a demo, each after those that it is compared with."""
    chosen = {"plain", *compressions, *(COMPRESSIONS[name].equal_to for name in compressions)}

    def run_name(compression: str, learning_rate: float) -> str:
        return f"lr{short_number(learning_rate)}-{compression}"

    return [
        Job(
            name=run_name(name, learning_rate),
            compression=name,
            label=compression.label,
            learning_rate=learning_rate,
            steps=steps,
            flags=(
                *("--job.config_file", str(CONFIG_FILE)),
                *("--training.steps", str(steps)),
                *("--optimizer.param_groups.0.optimizer_kwargs.lr", str(learning_rate)),
                # After the last step, the model alone.
                *("--checkpoint.enable", "--checkpoint.interval", str(steps)),
                "--metrics.disable_color_printing",
                *compression.flags,
            ),
            equal_to=run_name(compression.equal_to, learning_rate)
            if compression.equal_to
            else None,
        )
        for i, learning_rate in enumerate(learning_rates)
        for name, compression in COMPRESSIONS.items()
        if name in chosen and (i == 0 or not compression.once)
    ]


def main() -> int:
    """Command line. Returns the exit code: 1 if a run failed or differs from what it must equal."""
    parser = make_parser("demo", __doc__)
    parser.add_argument("--quick", action="store_true", help="4 runs of 25 steps, lr 1e-4")
    parser.add_argument(
        "--compressions", nargs="+", choices=COMPRESSIONS, help="beside baseline FSDP2"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/demo"), help="folder of runs and summary.json"
    )
    args = parser.parse_args()
    compressions = args.compressions or (QUICK_COMPRESSIONS if args.quick else DEFAULT_COMPRESSIONS)
    quick = {"steps": 25, "learning_rates": [1e-4]} if args.quick else {}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        summary = run_demo(compressions=compressions, output=args.output, **quick)
        write_json(args.json, asdict(summary)["runs"])
    except (RunError, ValueError, OSError) as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, SignalException):
        print("\ndemo: interrupted, all ranks are stopped", file=sys.stderr)
        return 130
    print(f"\n{tables(summary)}\n\nTensorBoard:  tensorboard --logdir {args.output}")
    print(f"All figures:  {args.output / 'summary.json'}\n")
    if summary.unequal:
        for run in summary.unequal:
            print(f"*** {run.name} IS DIFFERENT FROM {run.equal_to} ***", file=sys.stderr)
        return 1
    print('Every loss and parameter is bitwise identical to that of the run under "equal to".')
    return 0


def _clear(output: Path) -> None:
    """Remove what an earlier demo left, and nothing else."""
    (output / "summary.json").unlink(missing_ok=True)
    for compression in COMPRESSIONS:
        for folder in output.glob(f"lr*-{compression}"):
            shutil.rmtree(folder)


def _progress(title: str, steps: int) -> tqdm:
    bar_format = "{desc} {bar:20} step {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
    return tqdm(total=steps, desc=f"{title:42}", bar_format=bar_format, mininterval=0)


def _show_on(bar: tqdm) -> Callable[[str], None]:
    """A function that moves a progress bar by the lines of a run's log."""
    loss = ""
    bits_of_parts = r"first gather ([\d.]+)(?:, later ([\d.]+))?(?:, gradients ([\d.]+))?"

    def show(line: str) -> None:
        nonlocal loss
        if found := re.search(r"step: +(\d+) +loss: +(\S+)", line):
            loss = f"loss {found[2]}"
            bar.n = int(found[1])
            bar.set_postfix_str(loss)
        elif found := re.search(bits_of_parts, line):
            bits = " + ".join(part for part in found.groups() if part)
            bar.set_postfix_str(f"{loss}, {bits} bits a parameter")

    return show


def _commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    sys.exit(main())
