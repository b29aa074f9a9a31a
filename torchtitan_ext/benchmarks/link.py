"""How long a step's parameters and gradients take to cross a link, plain and narrowed.

    scripts/slow_links 4 200mbit python -m torchtitan_ext.benchmarks.link \\
        --job.config_file train_configs/links.toml

Every rank runs it, under torchrun or any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT. It trains the job three times in one go, and takes the time of every all-gather and
reduce-scatter of FSDP2, and of what narrowcast does between them, from the moment when all ranks
have come to it: the link and the coder, without the wait for a rank that computes longer. Of each
step the slowest rank counts. Coding that would overlap with computation elsewhere counts in full.
"""

import contextlib
import gc
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

WARM_UP_STEPS = 3

_SECTION = "--narrowcast.{}.enable --narrowcast.{}.compression {}"
VARIANTS = {
    "plain FSDP2, the backend's collectives": "",
    "the exchanges of narrowcast, all raw": " ".join(
        _SECTION.format(section, section, "none") for section in ("all_gather", "reduce_scatter")
    ),
    "narrowcast: value, coded gradients": " ".join(
        _SECTION.format(section, section, compression)
        for section, compression in (("all_gather", "delta"), ("reduce_scatter", "entropy"))
    ),
}
BASELINES = tuple(VARIANTS)[:2]
KINDS = ("all_gather", "reduce_scatter")


@dataclass
class Stopwatch:
    """Seconds by kind of collective, and of all: of the step under way, and of every whole one."""

    current: Counter[str] = field(default_factory=Counter)
    steps: list[Counter[str]] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    def end_step(self) -> None:
        now = time.perf_counter()
        self.current["step"] = now - self.started
        self.steps.append(self.current)
        self.current, self.started = Counter(), now

    def timed(self, kind: str, call: Callable) -> Callable:
        """``call``, timed from when all ranks have come to it until it is done."""
        import torch.distributed as dist

        def timed_call(*args: Any, **kwargs: Any) -> Any:
            dist.barrier()
            start = time.perf_counter()
            work = call(*args, **kwargs)
            if work is not None:
                work.wait()
            self.current[kind] += time.perf_counter() - start
            return work

        return timed_call


@dataclass
class TimedCollective:
    """A parameter group's collective, timed."""

    inner: Any
    call: Callable

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.allocate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def measure(
    flags: list[str], on_trained: Callable[[Any], None] | None = None
) -> tuple[list[Counter[str]], int]:
    """Trains the job of these flags of ``torchtitan_ext.train``, volume not counted.

    Args:
        on_trained: is called with the trainer, after its last step.

    Returns:
        Of every step, the seconds of the slowest rank by kind, and of the whole ``step``; and the
        parameters of the largest group.
    """
    import torch
    import torch.distributed as dist

    from narrowcast.fsdp2 import param_groups

    names = (*KINDS, "step")
    watch = Stopwatch()
    with _trainer([*flags, "--narrowcast.volume.no-enable"]) as trainer:
        groups = param_groups(*trainer.model_parts)
        for group in groups:
            for kind in KINDS:
                comm = getattr(group, kind)
                setattr(group, kind, TimedCollective(comm, watch.timed(kind, comm)))
        if trainer.narrowed is not None:
            trainer.narrowed.refresh = watch.timed("all_gather", trainer.narrowed.refresh)
        trainer.optimizers.register_step_post_hook(lambda *_: watch.end_step())
        largest = max(sum(group.numels) * group.process_group.size() for group in groups)
        trainer.train()
        seconds = torch.tensor([[step[name] for name in names] for step in watch.steps])
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        if on_trained is not None:
            on_trained(trainer)
    return [Counter(dict(zip(names, step, strict=True))) for step in seconds.tolist()], largest


def table(seconds: dict[str, list[Counter[str]]]) -> str:
    """The seconds a step of each variant, and their ratios to the first two."""
    totals = {
        name: [sum(step[kind] for kind in KINDS) for step in steps]
        for name, steps in seconds.items()
    }
    medians = {name: statistics.median(total) for name, total in totals.items()}
    lines = [f"{'':40}{'all-gather':>12}{'reduce-scatter':>16}{'all':>8}{'(min to max)':>18}"]
    lines[0] += "".join(f"{f'/ row {row}':>9}" for row, _ in enumerate(BASELINES, start=1))
    for name, steps in seconds.items():
        gather, reduction = (statistics.median(step[kind] for step in steps) for kind in KINDS)
        spread = f"({min(totals[name]):.2f} to {max(totals[name]):.2f})"
        ratios = "".join(f"{medians[name] / medians[base]:>9.2f}" for base in BASELINES)
        lines.append(
            f"{name:40}{gather:>12.2f}{reduction:>16.2f}{medians[name]:>8.2f}{spread:>18}{ratios}"
        )
    return "\n".join(lines)


@contextlib.contextmanager
def _trainer(flags: list[str]) -> Iterator[Any]:
    from torchtitan.config import ConfigManager

    sys.argv[1:] = ["--module", "torchtitan_ext", "--config", "from_toml", *flags]
    trainer = ConfigManager().parse_args().build()
    try:
        yield trainer
    finally:
        trainer.close()
        gc.enable()  # torchtitan disables it


def main() -> None:
    """Runs every variant on the flags in `sys.argv`; the first rank prints the table."""
    from torchtitan_ext import compat, cpu

    compat.apply()
    cpu.apply()
    import torch.distributed as dist

    flags = sys.argv[1:]
    seconds = {}
    for name, variant in VARIANTS.items():
        steps, largest = measure([*flags, *variant.split()])
        seconds[name] = steps[WARM_UP_STEPS:]
    if dist.get_rank() == 0:
        steps = len(next(iter(seconds.values())))
        print(
            f"\nSeconds a step in FSDP2's collectives, {dist.get_world_size()} ranks, the slowest "
            f"of them; largest group: {largest:,} parameters;\nmedians of {steps} steps after "
            f"{WARM_UP_STEPS} of warm-up\n\n{table(seconds)}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
