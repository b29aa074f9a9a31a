"""How long the parameters and gradients of a step take on a link, baseline FSDP2 and narrowcast.

    scripts/slow_links 4 200mbit python -m torchtitan_ext.benchmarks.link \\
        --job.config_file train_configs/links.toml

Every rank runs it, under torchrun or any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT. It trains the job three times in one process, and measures the time of every all-gather
and reduce-scatter of FSDP2, and of what narrowcast does between them, from the moment when all
ranks have come to it: link and coder, without the wait for a rank that computes longer. The slowest
rank counts in each step. Coding that would overlap with computation elsewhere counts in full.

With nodes of several ranks (``scripts/slow_links 2x2 500mbit/50mbit``) narrowcast's exchanges run
in two levels, and what counts is the bytes that enter a node: those of the last step, as the ledger
has them. For the baseline that is a ring's count, and gloo sends more.
"""

import contextlib
import gc
import hashlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils as utils
from torch.distributed.tensor import DTensor

from narrowcast.fsdp2 import param_groups
from narrowcast.telemetry.over_ranks import reduce_over_ranks
from narrowcast.telemetry.step_volume import StepVolume
from narrowcast.util import aligned
from torchtitan_ext import compat
from torchtitan_ext.benchmarks.command_line import make_job_parser, write_json
from torchtitan_ext.job import parse_job

WARM_UP_STEPS = 3
_MIB = 1 << 20

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
    """Train the job of these flags of ``torchtitan_ext.train``.

    Args:
        on_trained: is called with the trainer after its last step.

    Returns:
        For every step the seconds of the slowest rank by kind, and of the whole ``step``; and the
        number of parameters of the largest group.
    """
    names = (*KINDS, "step")
    watch = Stopwatch()
    with _trainer(flags) as trainer:
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


@dataclass(frozen=True)
class Sent:
    """What a variant sent in its last step, and what it ended with.

    Attributes:
        volume: over all ranks.
        parameters: a digest of this rank's shards after the last step.
    """

    volume: StepVolume
    parameters: str

    @classmethod
    def by(cls, trainer: Any) -> "Sent":
        """Of a trainer after its last step. Every rank must call this."""
        ledger = trainer.metrics_processor.ledger
        digest = hashlib.sha256()
        for part in trainer.model_parts:
            for parameter in part.parameters():
                shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                digest.update(shard.detach().cpu().reshape(-1).view(torch.uint8).numpy())
        volume = reduce_over_ranks(ledger.last, torch.device(utils.device_type))
        return cls(volume, digest.hexdigest())


def bytes_of(sent: dict[str, Sent]) -> list[dict[str, Any]]:
    """What each variant sent by node, and whether its parameters are bitwise those of the same
    exchanges uncompressed: of the baseline where it is the baseline. Every rank must call this."""
    baseline, uncompressed, *_ = sent.values()
    found = []
    for one in sent.values():
        reference = baseline if one is baseline else uncompressed
        equal = torch.tensor(one.parameters == reference.parameters, dtype=torch.int32)
        dist.all_reduce(equal, op=dist.ReduceOp.MIN)
        volume = one.volume
        found.append(
            {
                "bytes_into_node": sum(volume.leaving.values()) / volume.nodes,
                "bytes_within_node": sum(volume.staying.values()) / volume.nodes,
                "bits_per_parameter_into_node": volume.bits_into_node[0],
                "cache_bytes": volume.cache_bytes,
                "bitwise_equal": bool(equal),
            }
        )
    return found


def rows(
    seconds: dict[str, list[Counter[str]]], sent: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """A row for each variant: median seconds a step, their ratios to the first two variants, and
    what it sent (``bytes_of``)."""
    totals = {
        name: [sum(step[kind] for kind in KINDS) for step in steps]
        for name, steps in seconds.items()
    }
    baseline, uncompressed = list(map(statistics.median, totals.values()))[:2]
    return [
        {
            "name": name,
            "step_seconds": statistics.median(step["step"] for step in steps),
            **{f"{k}_seconds": statistics.median(step[k] for step in steps) for k in KINDS},
            "collective_seconds": statistics.median(totals[name]),
            "collective_seconds_min": min(totals[name]),
            "collective_seconds_max": max(totals[name]),
            "over_baseline": statistics.median(totals[name]) / baseline,
            "over_uncompressed": statistics.median(totals[name]) / uncompressed,
            **of_variant,
        }
        for (name, steps), of_variant in zip(seconds.items(), sent, strict=True)
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people."""
    head = ["", "all-gather", "reduce-scatter", "all", "(min to max)", "/ row 1", "/ row 2"]
    head += ["MiB into a node", "within", "bits", "equal"]
    return aligned(
        [
            head,
            *(
                [
                    row["name"],
                    f"{row['all_gather_seconds']:.2f}",
                    f"{row['reduce_scatter_seconds']:.2f}",
                    f"{row['collective_seconds']:.2f}",
                    f"({row['collective_seconds_min']:.2f} to {row['collective_seconds_max']:.2f})",
                    f"{row['over_baseline']:.2f}",
                    f"{row['over_uncompressed']:.2f}",
                    f"{row['bytes_into_node'] / _MIB:.2f}",
                    f"{row['bytes_within_node'] / _MIB:.2f}",
                    f"{row['bits_per_parameter_into_node']:.2f}",
                    "yes" if row["bitwise_equal"] else "no",
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
    seconds, sent = {}, {}
    for name, variant in VARIANTS.items():

        def note(trainer: Any, name: str = name) -> None:
            sent[name] = Sent.by(trainer)

        steps, largest = measure([*flags, *variant.split()], note)
        seconds[name] = steps[WARM_UP_STEPS:]
    of_variants = bytes_of(sent)
    if dist.get_rank() == 0:
        num_steps, measured = len(next(iter(seconds.values()))), rows(seconds, of_variants)
        print(
            f"\nSeconds a step in FSDP2's collectives, {dist.get_world_size()} ranks, the slowest "
            f"of them; largest group: {largest:,} parameters;\nmedians of {num_steps} steps after "
            f"{WARM_UP_STEPS} of warm-up; MiB and bits a parameter into a node, of the last step; "
            f"equal: to\nthe same exchanges uncompressed\n\n{table(measured)}"
        )
        job = {"ranks": dist.get_world_size(), "largest_group_parameters": largest}
        write_json(args.json, [{**row, **job, "steps": num_steps} for row in measured])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
