"""How long the parameters and gradients of a step take on a link, baseline FSDP2 and narrowcast.

    scripts/slow_links 4 200mbit python -m torchtitan_ext.benchmarks.link \\
        --job.config_file train_configs/links.toml

Every rank runs it, under torchrun or any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT. It trains the job three times in one process, and measures the time of every all-gather
and reduce-scatter of FSDP2, and of what narrowcast does between them, from the moment when all
ranks have come to it: link and coder, without the wait for a rank that computes longer. The slowest
rank counts in each step. Coding that would overlap with computation elsewhere counts in full.
"""

import contextlib
import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from narrowcast.fsdp2 import param_groups
from narrowcast.util import aligned
from torchtitan_ext import compat
from torchtitan_ext.benchmarks.command_line import make_job_parser, write_json
from torchtitan_ext.job import parse_job

WARM_UP_STEPS = 3

_SECTION = "--narrowcast.{}.enable --narrowcast.{}.compression {}"
VARIANTS = {
    "baseline FSDP2, the backend's collectives": "",
    "narrowcast's exchanges, uncompressed": " ".join(
        _SECTION.format(section, section, "none") for section in ("all_gather", "reduce_scatter")
    ),
    "narrowcast: delta, gradients entropy": " ".join(
        _SECTION.format(section, section, compression)
        for section, compression in (("all_gather", "delta"), ("reduce_scatter", "entropy"))
    ),
}
KINDS = ("all_gather", "reduce_scatter")


@dataclass
class Stopwatch:
    """Seconds by kind of collective and of the whole step: of the current step, and of each one
    that has ended."""

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
    flags: Sequence[str], on_trained: Callable[[Any], None] | None = None
) -> tuple[list[Counter[str]], int]:
    """Train the job of these flags of ``torchtitan_ext.train``, without counting volume.

    Args:
        on_trained: is called with the trainer after its last step.

    Returns:
        For every step the seconds of the slowest rank by kind, and of the whole ``step``; and the
        number of parameters of the largest group.
    """
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


def rows(seconds: dict[str, list[Counter[str]]]) -> list[dict[str, Any]]:
    """A row for each variant: median seconds a step, and their ratios to the first two variants."""
    totals = {
        name: [sum(step[kind] for kind in KINDS) for step in steps]
        for name, steps in seconds.items()
    }
    baseline, uncompressed = list(map(statistics.median, totals.values()))[:2]
    return [
        {
            "variant": name,
            **{f"{kind}_s": statistics.median(step[kind] for step in steps) for kind in KINDS},
            "all_s": statistics.median(totals[name]),
            "all_min_s": min(totals[name]),
            "all_max_s": max(totals[name]),
            "all_over_baseline": statistics.median(totals[name]) / baseline,
            "all_over_uncompressed": statistics.median(totals[name]) / uncompressed,
        }
        for name, steps in seconds.items()
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people."""
    head = ["", "all-gather", "reduce-scatter", "all", "(min to max)", "/ row 1", "/ row 2"]
    return aligned(
        [
            head,
            *(
                [
                    row["variant"],
                    f"{row['all_gather_s']:.2f}",
                    f"{row['reduce_scatter_s']:.2f}",
                    f"{row['all_s']:.2f}",
                    f"({row['all_min_s']:.2f} to {row['all_max_s']:.2f})",
                    f"{row['all_over_baseline']:.2f}",
                    f"{row['all_over_uncompressed']:.2f}",
                ]
                for row in rows
            ),
        ],
        words=1,
    )


@contextlib.contextmanager
def _trainer(flags: Sequence[str]) -> Iterator[Any]:
    trainer = parse_job(flags).build()
    try:
        yield trainer
    finally:
        trainer.close()
        gc.enable()  # torchtitan disables it


def main() -> None:
    """Run every variant on the flags of the command line. The first rank prints the table."""
    args, flags = make_job_parser("link", __doc__).parse_known_args()
    compat.apply()
    seconds = {}
    for name, variant in VARIANTS.items():
        steps, largest = measure([*flags, *variant.split()])
        seconds[name] = steps[WARM_UP_STEPS:]
    if dist.get_rank() == 0:
        num_steps, measured = len(next(iter(seconds.values()))), rows(seconds)
        print(
            f"\nSeconds a step in FSDP2's collectives, {dist.get_world_size()} ranks, the slowest "
            f"of them; largest group: {largest:,} parameters;\nmedians of {num_steps} steps after "
            f"{WARM_UP_STEPS} of warm-up\n\n{table(measured)}"
        )
        job = {"ranks": dist.get_world_size(), "largest_group_parameters": largest}
        write_json(args.json, [{**row, **job, "steps": num_steps} for row in measured])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
