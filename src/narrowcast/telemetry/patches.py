"""Replaces functions of other modules for a while, although other tools may replace them too.

Tools may put their own functions in the same places, earlier or later, and restore what they found
in any order. Hence the function that was found is remembered for every place; a function that is
not ours any more is not touched; and one of ours that a tool has restored after the end is removed
at the next call of ``restore``.
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
        """Puts ``wrapped(found)`` in the place of the function ``found``, unless ours is there. A
        function that is found in two places is replaced by the same one in both."""
        found = getattr(owner, name)
        if any(found is one.ours for one in self._replaced):
            return
        again = (one.ours for one in self._replaced if one.found is found)
        ours = next(again, None) or wrapped(found)
        self._replaced.append(_Replaced(owner, name, found, ours))
        setattr(owner, name, ours)

    def restore(self) -> None:
        """Restores what was found wherever ours is. Another tool's function may still call ours,
        and the tool may put ours back later: call this again then."""
        hidden = []
        for one in reversed(self._replaced):
            if getattr(one.owner, one.name) is one.ours:
                setattr(one.owner, one.name, one.found)
            else:
                hidden.append(one)
        self._replaced = hidden[::-1]
