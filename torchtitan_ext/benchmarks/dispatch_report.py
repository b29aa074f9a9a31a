"""What the dispatch benchmark measured, as rows and as tables."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from narrowcast.util import aligned
from torchtitan_ext.benchmarks.dispatch_steps import Step

# A row is sent in each of four passes: dispatch and combine, forward and backward.
PASSES = 4
_MIB = 1 << 20


@dataclass(frozen=True)
class Measured:
    """A variant: each step of each rank, and the ranks of a token (C_T) by the trace."""

    steps: list[list[Step]]
    traced_rows: float

    def total(self, count: Callable[[Step], float]) -> float:
        """The sum over all steps of all ranks."""
        return sum(count(step) for steps in self.steps for step in steps)

    def mean(self, count: Callable[[Step], float]) -> float:
        """The mean over all steps of all ranks."""
        return self.total(count) / sum(map(len, self.steps))

    def worst(self, count: Callable[[Step], float]) -> list[float]:
        """Of each step, the largest count of any rank."""
        return [max(map(count, ranks)) for ranks in zip(*self.steps, strict=True)]

    def busiest_node_bytes(self, nodes: int) -> list[int]:
        """Of each step, the bytes that all ranks of one node send to others, of the node that
        sends most."""
        per_node = len(self.steps) // nodes
        return [
            max(
                sum(s.exchanges.node_bytes for s in ranks[node * per_node : (node + 1) * per_node])
                for node in range(nodes)
            )
            for ranks in zip(*self.steps, strict=True)
        ]


def rows(measured: dict[str, Measured], top_k: int, nodes: int) -> list[dict[str, Any]]:
    """A row for each variant. Times are compared with those of the first one."""
    # The same in all variants that count them.
    tokens = max(m.total(lambda step: step.tokens) for m in measured.values())
    made: list[dict[str, Any]] = []
    for name, m in measured.items():
        rank_rows = m.total(lambda step: step.rank_rows) / tokens or top_k
        has_interface = all(s.interface_bytes is not None for steps in m.steps for s in steps)
        row = {
            "variant": name,
            "traced_ranks_per_token": m.traced_rows,
            "ranks_per_token": rank_rows,
            "rows_removed_share": 1 - rank_rows / top_k,
            "rows_to_ranks_per_token": m.total(lambda s: s.exchanges.rows) / PASSES / tokens,
            "rows_to_nodes_per_token": m.total(lambda s: s.exchanges.node_rows) / PASSES / tokens,
            "dispatch_mib": statistics.median(m.worst(lambda s: s.dispatch_bytes)) / _MIB,
            "combine_mib": statistics.median(m.worst(lambda s: s.combine_bytes)) / _MIB,
            "busiest_node_mib": statistics.median(m.busiest_node_bytes(nodes)) / _MIB,
            **_spread("all_to_all", m.worst(lambda s: s.exchanges.seconds)),
            **_spread("step", m.worst(lambda s: s.seconds)),
            "ledger_mib": m.mean(lambda s: s.sent_bytes) / _MIB,
            "interface_mib": m.mean(lambda s: s.interface_bytes) / _MIB if has_interface else None,
        }
        first = made[0] if made else row
        for key in ("all_to_all", "step"):
            row[f"{key}_over_first"] = row[f"{key}_s"] / first[f"{key}_s"]
        made.append(row)
    return made


def rows_table(rows: Sequence[dict[str, Any]], nodes: int) -> str:
    """Rows a token and bytes a step of each variant."""
    lines = [["", "trace C_T", "C_T", "removed", "to ranks", "to nodes"]]
    lines[0] += ["dispatch", "combine", "node"]
    for row in rows:
        lines.append(
            [
                row["variant"],
                f"{row['traced_ranks_per_token']:.3f}",
                f"{row['ranks_per_token']:.3f}",
                f"{row['rows_removed_share']:.1%}",
                f"{row['rows_to_ranks_per_token']:.3f}",
                f"{row['rows_to_nodes_per_token']:.3f}",
                f"{row['dispatch_mib']:.2f}",
                f"{row['combine_mib']:.2f}",
                f"{row['busiest_node_mib']:.2f}",
            ]
        )
    return aligned(lines if nodes > 1 else [[*r[:5], *r[6:8]] for r in lines], words=1)


def time_table(rows: Sequence[dict[str, Any]]) -> str:
    """Seconds a step of each variant, and their ratios to the first one."""
    lines = [["", "all-to-alls", "(min to max)", "ratio", "step", "(min to max)", "ratio"]]
    for row in rows:
        lines.append([row["variant"]])
        for key in ("all_to_all", "step"):
            spread = f"({row[f'{key}_min_s']:.2f} to {row[f'{key}_max_s']:.2f})"
            lines[-1] += [f"{row[f'{key}_s']:.3f}", spread, f"{row[f'{key}_over_first']:.2f}"]
    return aligned(lines, words=1)


def interface_table(rows: Sequence[dict[str, Any]]) -> str:
    """MiB a step in all collectives by the ledger and by the interface, a rank, and how much less
    they are than those of the first variant, which is due to dispatch and combine alone."""
    lines = [["", "ledger", "interface", "ratio", "less", "less", "ratio"]]
    first = rows[0]
    for row in rows:
        lines.append([row["variant"]])
        sent = row["ledger_mib"], row["interface_mib"]
        less = first["ledger_mib"] - sent[0], first["interface_mib"] - sent[1]
        for ledger, interface in (sent, less):
            ratio = f"{interface / ledger:.3f}" if ledger else "-"
            lines[-1] += [f"{ledger:.2f}", f"{interface:.2f}", ratio]
    return aligned(lines, words=1)


def _spread(key: str, seconds: Sequence[float]) -> dict[str, float]:
    return {
        f"{key}_s": statistics.median(seconds),
        f"{key}_min_s": min(seconds),
        f"{key}_max_s": max(seconds),
    }
