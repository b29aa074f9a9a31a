"""How much a search for a placement takes: seconds, turned into tokens and restarts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from narrowcast.placement.correlation import MIN_TOKENS

# What the search of a layer is to take, of one core.
SECONDS = 2.0

_RESTARTS = (4, 64)  # at least, at most


@dataclass(frozen=True)
class Effort:
    """What the seconds of a layer buy.

    It follows from numbers alone and not from a clock, so that equal arguments give equal plans,
    however busy or slow a machine is.

    Attributes:
        tokens: that are fitted on, at most.
        restarts: random divisions that the search starts from.
    """

    tokens: int
    restarts: int

    @classmethod
    def of(
        cls, seconds: float, num_experts: int, num_tokens: int | None = None, num_nodes: int = 1
    ) -> Effort:
        """Tokens come first, and restarts get what they leave. A least effort, of `MIN_TOKENS` and
        4 restarts, is made in any case.

        Args:
            seconds: of a layer.
            num_experts: of the layer.
            num_tokens: that there are to be fitted on; None for any number.
            num_nodes: with several, experts are divided over these, over ranks, and over both.
        """
        seconds = seconds / 3 if num_nodes > 1 else seconds
        # Measured (docs/benchmarks.md). Sets are sorted, and counted by pairs of experts; swaps,
        # about as many as there are experts, each take tables of pairs of experts.
        a_token, swaps = 4e-6 + 6.8e-8 * num_experts, 1.4e-5 * num_experts**2
        most = math.inf if num_tokens is None else num_tokens
        tokens = int(max(MIN_TOKENS, min(most, (seconds - swaps) / a_token)))
        a_round = 0.02 + swaps / 2 + 0.4 * tokens * a_token
        rounds = max(0.0, seconds - swaps - tokens * a_token) / a_round
        least, most_restarts = _RESTARTS
        return cls(tokens, min(least + 4 * int(rounds), most_restarts))

    def bytes(self, num_experts: int) -> int:
        """That the search of a layer of so many experts takes at its peak, as measured."""
        return 24 * self.tokens * num_experts
