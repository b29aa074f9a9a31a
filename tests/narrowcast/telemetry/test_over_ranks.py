"""Records are reduced over ranks as their fields state."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from narrowcast.telemetry.over_ranks import by_key, largest, reduce_over_ranks, summed


@dataclass(frozen=True)
class Inner:
    total: int = summed()
    worst: int = largest()


@dataclass
class Outer:
    worst: int = largest()
    inner: Inner = field(default_factory=Inner)
    total: int = summed()
    numbers: dict[str, int] = field(default_factory=dict, metadata=by_key("max", ("a", "b", "c")))
    records: dict[str, Inner] = field(
        default_factory=dict, metadata=by_key(keys=("x", "y", "z"), missing=Inner())
    )
    same_keys: dict[str, Inner] = field(default_factory=dict, metadata=by_key())


def _reduced() -> tuple[Outer, Outer, int]:
    """This rank's record afterwards, the reduced one, and how many collectives that took."""
    calls = 0
    all_reduce = dist.all_reduce

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        return all_reduce(*args, **kwargs)

    rank = dist.get_rank()
    record = Outer(
        worst=10 - rank,
        inner=Inner(total=rank + 1, worst=rank),
        total=1 << 40,
        numbers={"a": rank, "c": 5} if rank else {"a": 7},
        records={"z": Inner(1, 1)} if rank else {"x": Inner(2, 3)},
        same_keys={"q": Inner(rank, rank), "p": Inner(1, -rank)},
    )
    dist.all_reduce = counted
    try:
        reduced = reduce_over_ranks(record, torch.device("cpu"))
    finally:
        dist.all_reduce = all_reduce
    return record, reduced, calls


def test_numbers_are_summed_or_the_largest_at_every_depth(ranks) -> None:
    for rank, (record, reduced, calls) in enumerate(ranks(3).run(_reduced)):
        assert reduced == Outer(
            worst=10,
            inner=Inner(total=6, worst=2),
            total=3 << 40,
            numbers={"a": 7, "c": 5},
            records={"x": Inner(2, 3), "z": Inner(2, 1)},
            same_keys={"q": Inner(3, 2), "p": Inner(3, 0)},
        )
        assert list(reduced.same_keys) == ["q", "p"]
        assert record.worst == 10 - rank  # the rank's own record is left as it is
        assert calls == 2
