"""What narrowed collectives cost a rank in Python and messages, with more ranks than this machine.

    python -m torchtitan_ext.benchmarks.scale --ranks 4 64 1024 --groups 10 300

One process is a rank of a job over torch's "fake" process group, whose collectives send nothing.
It receives what it sends itself in place of what peers send, so that everything can be decoded. The
table has, for each number of ranks and of parameter groups, calls of collectives and microseconds
of one gather, before the payloads are decoded, and of decoding them; the same of one reduction,
where each receiver has a payload of its own; and of what follows a step of the optimizer, for each
group. It does not show the time of the link.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from narrowcast import narrow_all_gather, narrow_reduce_scatter
from narrowcast.allgather.comm import NarrowAllGather
from narrowcast.allgather.gather import Gather
from narrowcast.reducescatter.comm import NarrowReduceScatter
from narrowcast.util import aligned
from narrowcast.wire import exchange
from torchtitan_ext.benchmarks.command_line import make_parser, write_json

_STEPS = 2  # the last is measured


@dataclass(frozen=True)
class Scale:
    """Messages of this rank and microseconds for one parameter group.

    Attributes:
        decode_us: of checking and decoding all payloads of a gather.
        hook_us: of all that follows a step of the optimizer, over the number of groups.
    """

    ranks: int
    groups: int
    gather_calls: float
    gather_us: float
    decode_us: float
    reduction_calls: float
    reduction_us: float
    hook_us: float


@contextmanager
def _peers_that_send_the_same() -> Iterator[Counter[str]]:
    """Fill what the fake group leaves empty, and count calls."""
    calls: Counter[str] = Counter()
    gather, pairwise = dist.all_gather_single, exchange._start_pairwise

    def all_gather_single(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls["gather"] += 1
        work = gather(output, input, *args, **kwargs)
        output.view(-1, input.numel()).copy_(input)
        return work

    def start_pairwise(local: Tensor, remote: Tensor, *args: Any) -> Any:
        calls["reduction"] += 1
        works = pairwise(local, remote, *args)
        remote.copy_(local)
        return works

    dist.all_gather_single, exchange._start_pairwise = all_gather_single, start_pairwise
    try:
        yield calls
    finally:
        dist.all_gather_single, exchange._start_pairwise = gather, pairwise


class _Clock:
    """Adds up the time of a method over all objects of a class."""

    def __init__(self, owner: type, name: str) -> None:
        self.seconds, self.calls = 0.0, 0
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self.calls += 1

        setattr(owner, name, timed)
        self._undo = lambda: setattr(owner, name, method)

    def clear(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def stop(self) -> None:
        self._undo()


def measure(ranks: int, groups: int) -> Scale:
    """Train a model of ``groups`` tiny layers as rank 0 of ``ranks``."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=ranks)
    clocks = [
        _Clock(NarrowAllGather, "__call__"),
        _Clock(Gather, "finish"),
        _Clock(NarrowReduceScatter, "__call__"),
    ]
    gather, decode, reduction = clocks
    try:
        with _peers_that_send_the_same() as calls:
            mesh = init_device_mesh("cpu", (ranks,))
            model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(groups)))
            for layer in model:
                fully_shard(layer, mesh=mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            handle = narrow_all_gather(model, optimizer, compression="delta")
            narrow_reduce_scatter(model)
            hook = _Clock(type(handle), "_after_step")
            clocks.append(hook)
            for step in range(_STEPS):
                if step == _STEPS - 1:
                    calls.clear()
                    for clock in clocks:
                        clock.clear()
                model(torch.ones(1, 64)).sum().backward()
                handle._after_step()
                optimizer.zero_grad()
    finally:
        for clock in clocks:
            clock.stop()
        dist.destroy_process_group()
    micro = 1e6
    return Scale(
        ranks,
        groups,
        calls["gather"] / gather.calls,
        micro * (gather.seconds - decode.seconds) / gather.calls,
        micro * decode.seconds / gather.calls,
        calls["reduction"] / reduction.calls,
        micro * reduction.seconds / reduction.calls,
        micro * hook.seconds / hook.calls / groups,
    )


def table(scales: list[Scale]) -> str:
    """A line for each number of ranks and of groups."""
    rows = [list(asdict(scales[0]))]
    rows += [[f"{value:.0f}" for value in asdict(scale).values()] for scale in scales]
    return aligned(rows, 0)


def main(arguments: list[str] | None = None) -> int:
    """Command line. Returns the exit code."""
    parser = make_parser("scale", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 64, 1024], help="(4 64 1024)")
    parser.add_argument("--groups", type=int, nargs="+", default=[10, 300], help="(10 300)")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    scales = [measure(r, g) for r in args.ranks for g in args.groups]
    print(table(scales))
    write_json(args.json, [asdict(scale) for scale in scales])
    return 0


if __name__ == "__main__":
    sys.exit(main())
