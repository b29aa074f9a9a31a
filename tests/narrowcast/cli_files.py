"""A small trace and its best placement, and what a command prints, for the tests of commands."""

from pathlib import Path

import pytest
import torch

from narrowcast.cli import main
from narrowcast.placement.effort import Effort
from narrowcast.placement.placement import Placement
from narrowcast.placement.planning import Plan
from narrowcast.placement.trace import RoutingTrace

LAYERS = ("layers.1.moe", "layers.2.moe")
# Expert e is always selected with e + 4 in the first layer, and with e ^ 1 in the second.
PARTNERS = torch.stack([(torch.arange(8) + 4) % 8, torch.arange(8) ^ 1])
# Those who share a rank if four ranks hold two experts each.
BEST = torch.tensor([[0, 4, 1, 5, 2, 6, 3, 7], list(range(8))])


def make_trace(num_tokens: int = 3072) -> RoutingTrace:
    first_T = torch.arange(num_tokens) * 5 % 8
    ids_LTK = torch.stack([torch.stack([first_T, of_E[first_T]], dim=1) for of_E in PARTNERS])
    token_T = torch.arange(num_tokens)
    step_T, rank_T = token_T // 1024 + 1, token_T // 512 % 2
    return RoutingTrace("qwen3 demo", LAYERS, 8, 2, ids_LTK, step_T, rank_T, token_T % 512)


def best() -> Placement:
    return Placement("qwen3 demo", LAYERS, 4, 1, "rows", BEST)


def planned(placement: Placement) -> Plan:
    return Plan(placement, placement, Effort(1024, 4))


def rows_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line on stderr of a command that fails."""
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("narrowcast: ")
    return line
