"""Follows the optimizer that trains a model, and the one that a user puts in its place."""

import logging
from collections.abc import Callable
from weakref import WeakKeyDictionary, WeakSet, ref

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from narrowcast.fsdp2 import ParamGroup

logger = logging.getLogger(__name__)

_followed: WeakSet[Optimizer] = WeakSet()  # in the place of others, with a warning


class StepHook:
    """Calls ``on_step`` after each step of an optimizer.

    Another optimizer that trains parameters of the same groups may be used beside it or within it
    (a container steps after those that it contains), or may have replaced it. It has replaced it if
    parameters are needed again, or it steps again, before the first has stepped: from then on
    it is followed, with a warning.

    Args:
        optimizer: of several, the one that steps last.
        groups: of the parameters that are trained.
    """

    def __init__(
        self, optimizer: Optimizer, groups: list[ParamGroup], on_step: Callable[[], None]
    ) -> None:
        self._groups, self._on_step = groups, on_step
        self._training: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        self._other: ref[Optimizer] | None = None  # has stepped after the followed one
        self._follow(optimizer)
        self._all = register_optimizer_step_post_hook(self._after_any)

    def missed(self) -> bool:
        """Whether there was a step for which ``on_step`` was not called, because another optimizer
        has replaced the followed one. From now on that one is followed."""
        other = self._other() if self._other is not None else None
        if other is None:
            return False
        if other not in _followed:
            _followed.add(other)
            logger.warning(
                "narrowcast: the optimizer that it was given no longer steps, but %s trains the "
                "same parameters: it is followed from now on. Give narrow_all_gather and "
                "narrow_reduce_scatter the new optimizer where you make one",
                type(other).__name__,
            )
        self._own.remove()
        self._follow(other)
        return True

    def remove(self) -> None:
        self._own.remove()
        self._all.remove()

    def _follow(self, optimizer: Optimizer) -> None:
        self._optimizer = ref(optimizer)
        self._own = optimizer.register_step_post_hook(lambda *_: self._after_own())
        self._other = None

    def _after_own(self) -> None:
        self._other = None
        self._on_step()

    def _after_any(self, optimizer: Optimizer, *_: object) -> None:
        if optimizer is self._optimizer() or not self._trains(optimizer):
            return
        if self._other is not None and self._other() is optimizer and self.missed():
            self._on_step()
        else:
            self._other = ref(optimizer)

    def _trains(self, optimizer: Optimizer) -> bool:
        if optimizer not in self._training:
            ours = {id(param) for group in self._groups for param in group.parameters}
            trained = [id(p) for part in optimizer.param_groups for p in part["params"]]
            self._training[optimizer] = not ours.isdisjoint(trained)
        return self._training[optimizer]
