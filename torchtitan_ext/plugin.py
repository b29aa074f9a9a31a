"""What narrowcast adds to torchtitan's trainer, once the trainer has built model and optimizer."""

from typing import Any

import torch

from narrowcast.allgather.api import NarrowedModel, narrow_all_gather
from narrowcast.torch_internals import param_groups
from narrowcast.volume import CountedModel, Ledger, count_volume
from torchtitan_ext.metrics import MetricsPlugin
from torchtitan_ext.private import count_token_dispatch, token_dispatchers

__all__ = ["MetricsPlugin", "TrainerPlugin"]


class TrainerPlugin:
    """Mixed into a torchtitan trainer whose config has the section `narrowcast`.

    Attributes:
        narrowed: the handle of the narrowed all-gathers; None where they are plain FSDP2's.
    """

    narrowed: NarrowedModel | None = None
    _counted: CountedModel | None = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.narrowed, self._counted = _install(config, self.model_parts, self.optimizers)
        ledger = self._ledger()
        self.metrics_processor.ledger = ledger
        if ledger is not None:
            for dispatcher in token_dispatchers(self.model_parts):
                count_token_dispatch(dispatcher, ledger)

    def close(self) -> None:
        """Give the model back its own collectives, then close the trainer."""
        for handle in (self.narrowed, self._counted):
            if handle is not None:
                handle.remove()
        super().close()

    def _ledger(self) -> Ledger | None:
        handle = self.narrowed or self._counted
        return handle.ledger if handle is not None else None


def _install(
    config: Any, model_parts: list[torch.nn.Module], optimizers: Any
) -> tuple[NarrowedModel | None, CountedModel | None]:
    """Narrow the all-gathers, or count what plain ones send, or do nothing, as the switches say.

    Raises:
        ValueError: the model cannot be narrowed; the message names the switch.
    """
    switches = config.narrowcast.all_gather
    counts = config.narrowcast.volume.enable
    if not switches.enable:
        return None, count_volume(param_groups(*model_parts), optimizers) if counts else None
    try:
        narrowed = narrow_all_gather(
            model_parts,
            optimizers,
            treatment=switches.treatment,
            exponent_exchange=switches.exponent_exchange,
            block_size=switches.block_size,
            block_check=switches.block_check,
            coder=switches.coder,
            verify_interval=switches.verify_interval,
            parameters=switches.parameters,
            volume=counts,
        )
    except ValueError as error:
        raise ValueError(
            f"narrowcast.all_gather.enable = true cannot work here: {error}"
        ) from error
    return narrowed, None
