"""Functions of other modules, replaced for a while, beside others who replace them too.

Tools may put their own functions in the same places, before us or after, and leave in any order.
Hence every place keeps the function that was found in it; what is not ours any more is not touched;
and what of ours a tool has put back after we left is taken out at the next look.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class _Replaced:
    owner: Any
    name: str
    found: Callable
    ours: Callable


@dataclass
class Patches:
    """Functions of ours in the place of others'."""

    _replaced: list[_Replaced] = field(default_factory=list)

    def replace(self, owner: Any, name: str, wrapped: Callable[[Callable], Callable]) -> None:
        """Puts ``wrapped(found)`` in the place of the function ``found``, unless ours is there. One
        function that is found in two places gets one in return."""
        found = getattr(owner, name)
        if any(found is one.ours for one in self._replaced):
            return
        again = (one.ours for one in self._replaced if one.found is found)
        ours = next(again, None) or wrapped(found)
        self._replaced.append(_Replaced(owner, name, found, ours))
        setattr(owner, name, ours)

    def restore(self) -> None:
        """Puts back what was found wherever ours is. Where another function is, it may still call
        ours, and it may put ours back some day: call this again then."""
        hidden = []
        for one in reversed(self._replaced):
            if getattr(one.owner, one.name) is one.ours:
                setattr(one.owner, one.name, one.found)
            else:
                hidden.append(one)
        self._replaced = hidden[::-1]
