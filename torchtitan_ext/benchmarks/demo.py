"""Trains one Mixture-of-Experts with plain FSDP2 and with narrowcast, and compares the runs.

`python -m torchtitan_ext.benchmarks.demo` runs `train_configs/demo.toml` on 4 CPU ranks again and
again, with other flags each time, checks to the bit that losses and parameters are those that they
must be, and
shows what crossed the wire. `docs/demo.md` describes what it leaves in `outputs/demo`.
"""

import argparse
import json
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

from narrowcast.util import write_text
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
    """A way to exchange parameters and gradients: its name for people, the flags that choose it,
    and the compression whose losses and parameters it must have; None if it is like no other."""

    label: str
    flags: tuple[str, ...]
    once: bool = False  # at the first learning rate only
    equal_to: str | None = "plain"


_PLAIN = "--narrowcast.all_gather.no-enable"
_COMPRESSION = "--narrowcast.all_gather.compression"
_EXCHANGE = "--narrowcast.all_gather.exponent_coding"
_RESHARD = "--parallelism.fsdp_reshard_after_forward"
_GRADIENTS = "--narrowcast.reduce_scatter.enable"
_GRADIENTS_COMPRESSION = "--narrowcast.reduce_scatter.compression"

COMPRESSIONS = {
    "plain": Compression("plain, gathered twice", (_PLAIN,), equal_to=None),
    "plain_kept": Compression("plain, kept for backward", (_PLAIN, _RESHARD, "never"), once=True),
    "delta": Compression("delta", (_COMPRESSION, "delta")),
    "exponent": Compression(
        "exponent, delta", (_COMPRESSION, "exponent", _EXCHANGE, "delta"), once=True
    ),
    "blocks": Compression(
        "exponent, blocks", (_COMPRESSION, "exponent", _EXCHANGE, "blocks"), once=True
    ),
    "entropy": Compression("entropy", (_COMPRESSION, "entropy"), once=True),
    # The exchange of the one below, and its order of sums, which need not be the backend's.
    "uncompressed_gradients": Compression(
        "plain, gradients none",
        (_PLAIN, _GRADIENTS, _GRADIENTS_COMPRESSION, "none"),
        once=True,
        equal_to=None,
    ),
    "delta_gradients": Compression(
        "delta, gradients entropy",
        (_COMPRESSION, "delta", _GRADIENTS),
        once=True,
        equal_to="uncompressed_gradients",
    ),
}
# What fits into eight minutes on two cores.
DEFAULT_COMPRESSIONS = ("plain_kept", "delta", "exponent", "blocks", "delta_gradients")
QUICK_COMPRESSIONS = ("delta", "delta_gradients")


def run_demo(
    *,
    steps: int = 60,
    compressions: Sequence[str] = DEFAULT_COMPRESSIONS,
    learning_rates: Sequence[float] = (1e-4, 1e-5),
    output: Path = Path("outputs/demo"),
) -> Summary:
    """Train with plain FSDP2 and with each compression, and compare. Shows progress on stderr.

    The corpus must have been made, and the working directory be that of the project. The job is one
    for CPU: hide GPUs from it by `CUDA_VISIBLE_DEVICES`, as the command line does.

    Args:
        steps: of each run.
        compressions: of `COMPRESSIONS`. `plain` always runs, first at each learning rate, and so
            does what another must equal; those marked `once` run at the first one only.
        learning_rates: after the warm-up.
        output: gets a folder for each run, and `summary.json`; those of an earlier demo go.

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
    write_text(output / "summary.json", json.dumps(asdict(summary), indent=1) + "\n")
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
    """Command line. Returns the exit code: 1 if a run failed or is not what it must be."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="4 runs of 25 steps, lr 1e-4")
    parser.add_argument(
        "--compressions", nargs="+", choices=COMPRESSIONS, help="beside plain FSDP2"
    )
    parser.add_argument("--output", type=Path, default=Path("outputs/demo"), help="results' folder")
    args = parser.parse_args()
    compressions = args.compressions or (QUICK_COMPRESSIONS if args.quick else DEFAULT_COMPRESSIONS)
    quick = {"steps": 25, "learning_rates": [1e-4]} if args.quick else {}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        summary = run_demo(compressions=compressions, output=args.output, **quick)
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
    print('Every loss and parameter is that of the run under "equal to", to the last bit.')
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
    """What moves a progress bar on by the lines of a run's log."""
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
