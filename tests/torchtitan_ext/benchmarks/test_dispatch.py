"""The dispatch benchmark times what really crosses, changes nothing of it, and counts it right."""

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from narrowcast.moe.dispatch import combine, dispatch
from narrowcast.moe.hop import one_level
from tests.torchtitan_ext.tiny import _parse_docstrings_once, write_toml
from torchtitan_ext import compat
from torchtitan_ext.benchmarks import dispatch as dispatch_benchmark
from torchtitan_ext.benchmarks.dispatch import measure, variants
from torchtitan_ext.benchmarks.dispatch_report import (
    PASSES,
    Measured,
    interface_table,
    rows,
    rows_table,
    time_table,
)
from torchtitan_ext.benchmarks.dispatch_steps import Exchanges, Step, timed

SENT = [[1, 3], [2, 0]]  # rows from rank to rank
DIM = 6


def _theirs(x_ND: torch.Tensor) -> torch.Tensor:
    """One all-to-all, and its gradient."""
    from torchtitan.models.common.token_dispatcher import all_to_all_single

    rank = dist.get_rank()
    received = [sent[rank] for sent in SENT]
    return all_to_all_single(x_ND, received, SENT[rank], dist.group.WORLD) * 1


def _ours(x_ND: torch.Tensor) -> torch.Tensor:
    """Two, and their gradients. One expert a rank, one a token."""
    slot_NK = torch.tensor(
        [[slot] for slot, n in enumerate(SENT[dist.get_rank()]) for _ in range(n)]
    )
    prob_NK = torch.ones(slot_NK.shape)
    there = dispatch(x_ND, prob_NK, slot_NK, 2, one_level(dist.group.WORLD))
    return combine(there.x_SD * 3, there)


def _exchanged(exchange: str, nodes: int) -> tuple[list[bool], bool, Exchanges]:
    operator = torch.ops._c10d_functional.all_to_all_single
    generator = torch.Generator().manual_seed(dist.get_rank())
    rows_ND = torch.randn(sum(SENT[dist.get_rank()]), DIM, generator=generator)

    def once() -> tuple[torch.Tensor, torch.Tensor]:
        x_ND = rows_ND.clone().requires_grad_()
        out_ND = {"theirs": _theirs, "ours": _ours}[exchange](x_ND)
        out_ND.backward(1.0 + torch.arange(out_ND.numel()).view_as(out_ND))
        return out_ND.detach(), x_ND.grad

    plain = once()
    with timed(exchanges := Exchanges(), nodes):
        counted = once()
    undone = torch.ops._c10d_functional.all_to_all_single is operator
    return (
        [torch.equal(one, other) for one, other in zip(plain, counted, strict=True)],
        undone,
        exchanges,
    )


@pytest.mark.parametrize(("exchange", "rows"), [("theirs", 3 + 2), ("ours", 2 * (3 + 2))])
@pytest.mark.parametrize("nodes", [1, 2])
def test_all_to_alls_that_are_timed_are_the_very_same_both_ways(
    ranks, exchange: str, rows: int, nodes: int
) -> None:
    """And undone after. What a rank sends one way it gets back the other way."""
    for equal, undone, exchanges in ranks(2).run(_exchanged, exchange, nodes):
        assert equal == [True, True]
        assert undone
        assert exchanges.seconds > 0
        assert exchanges.rows == rows
        assert exchanges.node_rows == (rows if nodes == 2 else 0)
        if exchange == "theirs":
            assert exchanges.node_bytes == exchanges.node_rows * DIM * 4


def _first_and_last(trace: Path, nodes: int) -> dict[str, list[str]]:
    return dict(list(variants(trace, nodes).items())[:: len(variants(trace, nodes)) - 1])


def _measured(toml: str) -> tuple[dict[str, Measured], int]:
    compat.apply()
    _parse_docstrings_once()
    flags = ["--job.config_file", toml, "--parallelism.expert_parallel_degree", "2"]
    flags += ["--training.steps", "2", "--training.local_batch_size", "16"]  # for a plan
    with (
        patch("torchtitan.trainer.time.sleep"),
        patch.object(sys, "argv", ["it"]),
        patch.object(dispatch_benchmark, "variants", _first_and_last),
    ):
        return measure(flags, nodes=2, batch=2, rounds=1)


@pytest.mark.wide
def test_torchtitan_and_two_levels_are_measured_on_the_real_job(ranks, folder: Path) -> None:
    """Two ranks, each a node: what leaves the rank leaves the node."""
    toml = write_toml(folder, folder / "corpus", folder / "dispatch", config="top4")
    measured, again = ranks(2).run(_measured, str(toml))
    assert measured == again  # of all ranks, on both
    of, top_k = measured
    assert top_k == 4
    assert list(of) == ["torchtitan", "ours, in two levels"]
    for name, variant in of.items():
        steps = [step for steps in variant.steps for step in steps]
        assert len(steps) == 2
        assert all(step.seconds > 0 and step.exchanges.seconds > 0 for step in steps)
        assert all(step.exchanges.rows == step.exchanges.node_rows > 0 for step in steps)
        sent = [step.dispatch_bytes + step.combine_bytes for step in steps]
        # The ledger counts a step, and the exchanges are those of the next.
        assert sum(sent) == pytest.approx(sum(s.exchanges.node_bytes for s in steps), rel=0.1)
        ranks_a_token = sum(step.rank_rows for step in steps) / (2 * 2 * 32 * 2)
        assert ranks_a_token == pytest.approx(0 if name == "torchtitan" else 2, abs=0.5)
        assert sum(step.sent_bytes for step in steps) > sum(sent)


def _step(seconds: float, rows: int, rank_rows: int, **changed: Any) -> Step:
    fields = {
        "seconds": 2 * seconds,
        "exchanges": Exchanges(seconds, rows=rows * PASSES, node_rows=rows * PASSES // 2),
        "dispatch_bytes": rows << 20,
        "combine_bytes": rows << 19,
        "sent_bytes": rows << 21,
        "interface_bytes": rows * 11 << 18,
        "tokens": 10 if rank_rows else 0,
        "rank_rows": rank_rows,
    }
    return Step(**{**fields, **changed})


def _table(seconds: float) -> dict[str, Measured]:
    first = [_step(1.0, 30, 0), _step(3.0, 30, 0), _step(1.5, 30, 0)]
    slower = [_step(seconds + step.exchanges.seconds, 28, 0) for step in first]
    deduplicated = [_step(1.0, 15, 20)] * 3
    return {
        "torchtitan": Measured([first, slower], 4.0),
        "ours": Measured([deduplicated, deduplicated], 1.9),
    }


def test_the_tables_have_medians_of_the_slowest_rank_spread_and_ratios() -> None:
    found = rows(_table(seconds=0.5), top_k=4, nodes=2)
    lines = [line.split() for line in time_table(found).splitlines()[1:]]
    assert lines[0][1:6] == ["2.000", "(1.50", "to", "3.50)", "1.00"]
    assert lines[1][1:6] == ["1.000", "(1.00", "to", "1.00)", "0.50"]
    assert [lines[1][6], lines[1][-1]] == ["2.000", "0.50"]


def test_the_tables_have_rows_a_token_and_bytes_of_the_worst_rank() -> None:
    found = rows(_table(0.5), top_k=4, nodes=2)
    lines = rows_table(found, nodes=2).splitlines()[1:]
    assert [" ".join(line.split()) for line in lines] == [
        "torchtitan 4.000 4.000 0.0% 2.900 1.450 30.00 15.00 0.00",
        "ours 1.900 2.000 50.0% 1.500 0.750 15.00 7.50 0.00",
    ]


def test_what_the_interface_sends_stands_beside_the_ledger() -> None:
    lines = interface_table(rows(_table(0.5), top_k=4, nodes=2)).splitlines()[1:]
    assert [" ".join(line.split()) for line in lines] == [
        "torchtitan 58.00 79.75 1.375 0.00 0.00 -",
        "ours 30.00 41.25 1.375 28.00 38.50 1.375",
    ]


@pytest.mark.parametrize(
    "arguments",
    [("2x2", "1gbit"), ("2", "1gbit/200mbit"), ("2x", "1gbit/200mbit"), ("20x20", "1gbit/200mbit")],
)
def test_slow_links_of_nodes_shows_its_usage_before_it_does_anything(
    arguments: tuple[str, str],
) -> None:
    script = Path(__file__).parents[3] / "scripts" / "slow_links"
    done = subprocess.run([script, *arguments, "true"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "NODESxRANKS RATE_WITHIN/RATE_BETWEEN command" in done.stderr
