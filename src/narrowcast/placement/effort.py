"""The effort of a placement search: seconds, converted to tokens and restarts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from narrowcast.placement.correlation import MIN_TOKENS

SECONDS = 2.0
"""The default time for the search of a layer, on one core."""

_RESTARTS = (4, 64)  # minimum and maximum


@dataclass(frozen=True)
class Effort:
    """The effort for one layer.

    It is computed from numbers alone and not from a clock, so that equal arguments give equal
    plans, however busy or slow a machine is.

    Attributes:
        tokens: the most tokens that are fitted on.
        restarts: random divisions that the search starts from.
    """

    tokens: int
    restarts: int

    @classmethod
    def of(
        cls, seconds: float, num_experts: int, num_tokens: int | None = None, num_nodes: int = 1
    ) -> Effort:
        """Return the effort for a time. Tokens come first, and restarts get the remaining time. The
        least effort is ``MIN_TOKENS`` and 4 restarts.

        Args:
            seconds: time for the layer.
            num_experts: experts of the layer.
            num_tokens: tokens that can be fitted on; None for any number.
            num_nodes: with several nodes, experts are divided over nodes, over ranks, and over
                both.
        """
        seconds = seconds / 3 if num_nodes > 1 else seconds
        # Measured (docs/results.md). Sets are sorted, and counted by pairs of experts. There are
        # about as many swaps as experts, each of which uses tables of pairs of experts.
        a_token, swaps = 4e-6 + 6.8e-8 * num_experts, 1.4e-5 * num_experts**2
        most = math.inf if num_tokens is None else num_tokens
        tokens = int(max(MIN_TOKENS, min(most, (seconds - swaps) / a_token)))
        a_round = 0.02 + swaps / 2 + 0.4 * tokens * a_token
        rounds = max(0.0, seconds - swaps - tokens * a_token) / a_round
        least, most_restarts = _RESTARTS
        return cls(tokens, min(least + 4 * int(rounds), most_restarts))

    def bytes(self, num_experts: int) -> int:
        """Return the peak memory of the search of a layer, in bytes, as measured."""
        return 24 * self.tokens * num_experts
