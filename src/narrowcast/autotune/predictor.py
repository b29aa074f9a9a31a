"""Predicts what the gathers of a step cost with each compression: from the calibration, the samples
of all ranks, and corrections that training teaches."""

from collections.abc import Mapping

from narrowcast.allgather.codec import Scheme
from narrowcast.autotune import cost_model
from narrowcast.autotune.calibration import Calibration
from narrowcast.autotune.consensus import Consensus
from narrowcast.autotune.corrections import Corrections, measured_coding, predicted_coding
from narrowcast.autotune.gathers import Gathers
from narrowcast.autotune.problem import Group
from narrowcast.autotune.sample_stats import ALL, SampleHistory, SampleStats, sum_over_ranks
from narrowcast.autotune.schedule import Schedule
from narrowcast.wire.coders import CODERS, Coder


class Predictor:
    """What is known of the cost of a model's gathers.

    Attributes:
        links: of each parameter group, by label.
        corrections: of predicted costs by measured ones.

    Args:
        scheme: of all parameters but for their compression.
    """

    def __init__(
        self,
        gathers: Gathers,
        calibration: Calibration,
        consensus: Consensus,
        scheme: Scheme,
        coder: Coder,
    ) -> None:
        self._gathers, self._calibration, self._consensus = gathers, calibration, consensus
        self._scheme = scheme
        self._coder = next(name for name, known in CODERS.items() if known == coder)
        self.links = consensus.slowest_links(
            calibration.links, gathers.groups, lambda links: links.all_gather.seconds(1 << 20)
        )
        self.corrections = Corrections()
        self._history = SampleHistory()

    @property
    def samples(self) -> Mapping[str, SampleStats]:
        """What was sampled of each parameter on all ranks; empty before the first sample."""
        return self._history.samples

    @property
    def has_samples(self) -> bool:
        """Whether any shard was sampled."""
        return self._history.has_any

    def add_samples(self, samples: dict[str, SampleStats]) -> None:
        """Adds the samples of this rank and of all others. Every rank must call this."""
        consensus = self._consensus
        names = [ALL, *consensus.params]
        self._history.add(sum_over_ranks(samples, names, consensus.device, consensus.group))

    def learn_from_gathers(self, steps: int) -> float:
        """Corrects the cost of links by the gathers of the last ``steps``. Every rank must call
        this.

        Returns:
            Seconds of coding that were measured in a step.
        """
        comms = self._gathers.comms
        coding_seconds = measured_coding(list(comms.values()), steps, self._consensus)
        self.corrections.learn_links(comms, self.links, self._consensus)
        return coding_seconds

    def problem(self, coding_seconds: float, schedule: Schedule) -> list[Group]:
        """What there is to choose from, after a correction of the cost of coding.

        Args:
            coding_seconds: of a step, measured.
        """
        steps = schedule.steps_since_choice
        uncorrected = self.problem_with(1.0, schedule)
        predicted = predicted_coding(uncorrected, self._gathers.comms, self.links, steps)
        self.corrections.learn_coding(coding_seconds, predicted)
        return self.problem_with(self.corrections.coding, schedule)

    def problem_with(self, coding_scale: float, schedule: Schedule) -> list[Group]:
        """What there is to choose from where coding takes ``coding_scale`` times what samples
        predict."""
        links = {label: self.corrections.corrected(label, one) for label, one in self.links.items()}
        steps = schedule.steps_since_choice
        return cost_model.make_problem(
            self._gathers.describe(links, self._calibration, self._coder, steps),
            self._history.samples,
            self._scheme,
            schedule.horizon,
            coding_scale,
        )
