"""What counting costs a training step: bytes in every step, and passes over the data in some.

    python -m torchtitan_ext.benchmarks.telemetry --json telemetry.json

Two gloo ranks on this machine train the same model without a ledger, with one that counts bytes
alone, with one that samples in every step, and with one that samples in every tenth. Blocks of ten
steps take turns, in another order in each round, and a round gives the ratio of each variant to the
one without a ledger. A second model without a ledger shows the noise of these ratios. CPU time, of
both ranks together, is less noisy than wall time where other programs run too.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from narrowcast import Ledger, narrow_all_gather, narrow_reduce_scatter
from narrowcast.util import aligned, write_text

RANKS = 2
STEPS = 10  # of a block
OFF = "off"
# Steps from one sample to the next; None: no ledger.
VARIANTS = {OFF: None, "off again": None, "bytes alone": 0, "every step": 1, "every 10th": STEPS}


@dataclass(frozen=True)
class Row:
    """A variant and a clock (wall or CPU): milliseconds of a step (median of all rounds), and the
    ratio to a step without a ledger (median, least and greatest of all rounds)."""

    variant: str
    clock: str
    rounds: int
    step_ms: float
    ratio_to_off: float
    ratio_to_off_least: float
    ratio_to_off_greatest: float


class Trained:
    """A model with narrowed collectives, whose ledger counts only while the model is trained."""

    def __init__(self, layers: int, width: int, sample_interval: int | None) -> None:
        torch.manual_seed(0)
        self.width = width
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        mesh = init_device_mesh("cpu", (RANKS,))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for layer in (*self.model, self.model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        volume = sample_interval is not None
        narrow_all_gather(self.model, self.optimizer, compression="delta", volume=volume)
        handle = narrow_reduce_scatter(
            self.model, self.optimizer, compression="entropy", volume=volume
        )
        self.ledger: Ledger | None = handle.ledger
        if self.ledger is not None:
            self.ledger.sample_interval = sample_interval
            self.ledger.stop()

    def block_seconds(self) -> dict[str, float]:
        """Seconds of ``STEPS`` steps by clock: wall time from when all ranks start until all are
        done, and CPU time of all ranks together."""
        if self.ledger is not None:
            self.ledger.start()
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            self.model(torch.randn(8, self.width)).float().square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        cpu_seconds = torch.tensor(time.process_time() - cpu_start, dtype=torch.float64)
        dist.barrier()
        seconds = time.perf_counter() - start
        if self.ledger is not None:
            self.ledger.stop()
        dist.all_reduce(cpu_seconds)
        return {"wall": seconds, "cpu": cpu_seconds.item()}


def rank_main(rank: int, folder: str, rounds: int, layers: int, width: int) -> None:
    """Measures on one rank; the first writes the seconds of all blocks to ``folder``."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    trained = {name: Trained(layers, width, every) for name, every in VARIANTS.items()}
    names = list(trained)
    for model in trained.values():
        model.block_seconds()  # caches are cold, and step 1 is sampled
    seconds = []
    for number in range(rounds):
        order = names[number % len(names) :] + names[: number % len(names)]
        seconds.append({name: trained[name].block_seconds() for name in order})
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def rows(seconds: list[dict[str, dict[str, float]]]) -> list[Row]:
    """A row for each variant and clock.

    Args:
        seconds: of a block in each round, by variant and clock.
    """
    found = []
    for clock in ("wall", "cpu"):
        for name in VARIANTS:
            ratios = [one[name][clock] / one[OFF][clock] for one in seconds]
            step_ms = 1e3 * statistics.median(one[name][clock] for one in seconds) / STEPS
            spread = statistics.median(ratios), min(ratios), max(ratios)
            found.append(Row(name, clock, len(seconds), step_ms, *spread))
    return found


def table(measured: list[Row]) -> str:
    """A line for each row."""
    lines = [["variant", "clock", "step ms", "/ off", "least", "greatest"]]
    for row in measured:
        ratios = (row.ratio_to_off, row.ratio_to_off_least, row.ratio_to_off_greatest)
        numbers = [f"{row.step_ms:.1f}", *(f"{ratio:.3f}" for ratio in ratios)]
        lines.append([row.variant, row.clock, *numbers])
    return aligned(lines, 2)


def main(arguments: list[str] | None = None) -> int:
    """Command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m torchtitan_ext.benchmarks.telemetry",
        description=(__doc__ or "").partition("\n\n")[0],
    )
    parser.add_argument("--rounds", type=int, default=15, help="(15)")
    parser.add_argument("--layers", type=int, default=4, help="(4)")
    parser.add_argument("--width", type=int, default=1024, help="of a square layer (1024)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder, args.rounds, args.layers, args.width), nprocs=RANKS)
        seconds = json.loads(Path(folder, "seconds.json").read_text())
    measured = rows(seconds)
    print(table(measured))
    if args.json is not None:
        write_text(args.json, json.dumps([asdict(row) for row in measured], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
