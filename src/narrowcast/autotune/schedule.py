"""When shards are sampled, and when compressions are chosen.

step 1 .. warmup_steps      baseline FSDP2; shards are sampled
step warmup_steps           the first choice
every reselect_interval     another choice, from samples of the ``warmup_steps`` before it
"""

from dataclasses import dataclass

_FINAL_HORIZON = 1000  # steps over which a cold cache must be repaid if there is no other choice


@dataclass
class Schedule:
    """Counts steps of the optimizer and says what is due after each. It depends on nothing that
    differs between ranks, so it is the same on every rank.

    Attributes:
        warmup_steps: steps that are sampled before a choice.
        reselect_interval: steps from one choice to the next; 0: the first choice is final.
        always_samples: sample after every step, not only in the ``warmup_steps`` before a choice.
        steps: steps so far.
        steps_since_choice: length of the current sampling window, in steps.
    """

    warmup_steps: int
    reselect_interval: int
    always_samples: bool = False
    steps: int = 0
    steps_since_choice: int = 0
    _postponed: int = 0

    def advance(self) -> None:
        """Counts one step. Call it first after each step; the properties then describe it."""
        self.steps += 1
        self.steps_since_choice += 1

    @property
    def steps_to_choice(self) -> int | None:
        """Steps until the next choice, 0 if it is due now; ``None`` if there is no other."""
        first = self.warmup_steps + self._postponed
        if self.steps <= first:
            return first - self.steps
        return -(self.steps - first) % self.reselect_interval if self.reselect_interval else None

    @property
    def chooses(self) -> bool:
        """Whether a choice is due now."""
        return self.steps_to_choice == 0

    @property
    def samples(self) -> bool:
        """Whether shards are sampled now; always where a choice is due."""
        left = self.steps_to_choice
        return left is not None and (self.always_samples or left <= self.warmup_steps)

    @property
    def is_postponed(self) -> bool:
        """Whether the first choice has been postponed."""
        return self._postponed > 0

    def postpone(self) -> None:
        """Moves the first choice to the next step; the sampling window goes on."""
        self._postponed += 1

    def restart_window(self) -> None:
        """Begins a new sampling window after a choice."""
        self.steps_since_choice = 0

    @property
    def horizon(self) -> int:
        """Steps that a choice stands for, over which the cost of switching is spread."""
        return self.reselect_interval or _FINAL_HORIZON
