"""The all-gathers of a model as the controller handles them: by label of the parameter group."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from narrowcast.allgather.codec import Scheme
from narrowcast.allgather.comm import NarrowAllGather
from narrowcast.autotune import cost_model
from narrowcast.autotune.calibration import Calibration
from narrowcast.autotune.links import Links
from narrowcast.autotune.problem import Choice, Compressions, Group
from narrowcast.autotune.trial import Proposal
from narrowcast.fsdp2 import ParamGroup

PLAIN = "plain"  # in the place of a compression: the group is gathered by baseline FSDP2


def group_labels(groups: Sequence[ParamGroup]) -> list[str]:
    """Names of the groups, with their first parameter where several have one name."""
    counts = Counter(group.name for group in groups)
    return [
        group.name if counts[group.name] == 1 else f"{group.name} ({group.names[0]} ..)"
        for group in groups
    ]


class Gathers:
    """The all-gathers whose compressions are chosen.

    Attributes:
        comms: by label of the parameter group, in the order of the model.
        compressible: names of the parameters that may be compressed.
    """

    def __init__(self, comms: Sequence[NarrowAllGather], compressible: set[str]) -> None:
        labels = group_labels([comm.group for comm in comms])
        self.comms = dict(zip(labels, comms, strict=True))
        self.compressible = compressible

    @property
    def groups(self) -> dict[str, ParamGroup]:
        """The parameter groups by label."""
        return {label: comm.group for label, comm in self.comms.items()}

    @property
    def params(self) -> dict[str, tuple[str, ...]]:
        """Names of the parameters by the label of their group."""
        return {label: comm.group.names for label, comm in self.comms.items()}

    @property
    def uncompared(self) -> set[str]:
        """Names of the parameters in groups that baseline FSDP2 gathers: nothing of them is cached
        to compare with."""
        plain = [comm.group.names for comm in self.comms.values() if comm.schemes is None]
        return {name for names in plain for name in names}

    def compressions(self, chosen: Compressions) -> dict[str, str]:
        """The chosen compression of each parameter; ``PLAIN`` where its group is not narrowed."""
        return {
            name: chosen.get(label, {}).get(name, PLAIN)
            for label, names in self.params.items()
            for name in names
        }

    def proposal(self, problem: Sequence[Group], choice: Choice) -> Proposal:
        """A choice as it is put on trial."""
        return Proposal(
            compressions=self.compressions(choice.compressions),
            sizes={shard.name: shard.values for group in problem for shard in group.shards},
            costs=(choice.plain_seconds, choice.seconds),
        )

    def apply(self, chosen: Compressions, scheme: Scheme) -> None:
        """Changes the compressions, between two steps. Every rank must call this.

        Args:
            scheme: of all parameters but for their compression.
        """
        for label, comm in self.comms.items():
            schemes = None
            if label in chosen:
                schemes = {
                    name: replace(scheme, compression=compression)
                    for name, compression in chosen[label].items()
                }
            if schemes != comm.schemes:
                comm.change_schemes(schemes)

    def clear_times(self) -> None:
        """Begins to count and time gathers anew."""
        for comm in self.comms.values():
            comm.telemetry.clear()

    def clear_plain_times(self) -> None:
        """Forgets the times of baseline gathers, which nobody will ask for."""
        for comm in self.comms.values():
            comm.telemetry.plain_seconds.clear()

    def describe(
        self, links: Mapping[str, Links], calibration: Calibration, coder: str, steps: int
    ) -> list[cost_model.Gathered]:
        """The gathers of a step as the cost model takes them.

        Args:
            links: by label.
            coder: name of the entropy coder.
            steps: since the gathers were first counted.
        """
        sharing = Counter(comm.group.process_group.group_name for comm in self.comms.values())
        host = calibration.host
        return [
            cost_model.Gathered(
                label=label,
                params=comm.group.params,
                times={
                    site: count / steps
                    for site, count in cost_model.merged_times(comm.telemetry.gathers).items()
                },
                links=links[label],
                hidden=calibration.coders[coder].hidden,
                host=(host.from_host.seconds_per_byte, host.to_host.seconds_per_byte)
                if host is not None
                else (0.0, 0.0),
                announce=links[label].announce / sharing[comm.group.process_group.group_name],
                compressions={
                    name: scheme.compression for name, scheme in (comm.schemes or {}).items()
                },
                compressible=frozenset(self.compressible),
            )
            for label, comm in self.comms.items()
        ]
