"""Sees every collective that Python code of this process starts."""

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.attribution import counted_as, current_owner
from narrowcast.fsdp2 import SENDING_METHODS, functional_collectives, parameter_group, world_size_of
from narrowcast.telemetry.patches import Patches

logger = logging.getLogger(__name__)

_patches = Patches()
_listeners: list[Callable[[int], None]] = []
_depth = threading.local()


def count_collectives(on_collective: Callable[[int], None]) -> Callable[[], None]:
    """Calls ``on_collective(sent_bytes)`` whenever Python code of this process starts a collective.

    It replaces the functions of ``torch.distributed`` and of its functional collectives, which
    DTensor uses, by ones that count and then call them. (The dispatcher would see more, but a
    kernel in Python holds the GIL while gloo takes its queue's lock, and gloo's workers take the
    two in the other order: it deadlocks.) What FSDP2 starts for a parameter group is ``counted_as``
    that group. Not seen are collectives within compiled graphs, in the backward of functional ones,
    point-to-point sends of pipeline stages, and calls by a name that was imported before.

    Other tools may replace the same functions, earlier or later, and restore them in any order. A
    tool that restores torch's own function where ours is ends the counting there, until another
    ledger starts.

    ``sent_bytes`` is what this rank hands to the wire in a ring (all-gather, reduce-scatter,
    all-reduce) or pairwise (all-to-all) algorithm, which is the least that any algorithm sends.

    Returns:
        A function that ends the counting.
    """
    _listeners.append(on_collective)
    for owner, name in SENDING_METHODS:
        _patches.replace(owner, name, _counted_as_its_group)
    for collective in _COLLECTIVES:
        for place in collective.places:
            _patches.replace(place, collective.name, collective.counted)

    def stop() -> None:
        _listeners.remove(on_collective)
        if not _listeners:
            _patches.restore()

    return stop


def _counted_as_its_group(method: Callable) -> Callable:
    """A method of FSDP2's parameter groups, whose collectives are then counted as the group's."""

    @functools.wraps(method)
    def attributed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _listeners:
            _patches.restore()
        elif current_owner() is None:
            with counted_as(parameter_group(self)):
                return method(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    return attributed


@dataclass(frozen=True)
class _Collective:
    """A function that starts a collective.

    Attributes:
        places: modules in which the function is found.
        tensors: name of the parameter that holds what is sent.
        sent_share: the share of its bytes that a rank sends, by the number of ranks.
        signature: torch's own, since a tool may replace the function by one that takes anything.
    """

    places: tuple[Any, ...]
    name: str
    tensors: str
    sent_share: Callable[[int], float]
    signature: inspect.Signature | None

    @classmethod
    def of(
        cls, places: tuple[Any, ...], name: str, tensors: str, sent_share: Callable[[int], float]
    ) -> "_Collective":
        signatures = [inspect.signature(getattr(place, name)) for place in places]
        found = next((one for one in signatures if tensors in one.parameters), None)
        if found is None:
            logger.warning(
                "narrowcast: %s of torch.distributed was replaced before narrowcast was imported: "
                "what it sends is not counted. Import narrowcast first",
                name,
            )
        return cls(places, name, tensors, sent_share, found)

    def counted(self, original: Callable) -> Callable:
        """``original``, which first reports to the listeners what it sends, if there are any."""

        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or getattr(_depth, "inside", False):
                return original(*args, **kwargs)
            if not _listeners:  # a tool has restored this function, or a caller kept it
                _patches.restore()
                return original(*args, **kwargs)
            sent_bytes = self._sent_bytes(args, kwargs)
            if sent_bytes is None:
                return original(*args, **kwargs)
            _depth.inside = True
            try:
                for on_collective in list(_listeners):
                    on_collective(sent_bytes)
                return original(*args, **kwargs)
            finally:
                _depth.inside = False

        return counted

    def _sent_bytes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """``None`` where this rank takes no part in the collective, or the arguments are not
        torch's: then the function itself must judge them."""
        try:
            arguments = self.signature.bind(*args, **kwargs).arguments
            group = arguments.get("group")
            if group is dist.GroupMember.NON_GROUP_MEMBER:
                return None
            nbytes = sum(t.numel() * t.element_size() for t in _flat(arguments.get(self.tensors)))
            world_size = world_size_of(group)
        except Exception:
            return None
        return int(nbytes * self.sent_share(world_size))


def _flat(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    elif nested is not None:
        for item in nested:
            yield from _flat(item)


def _to_all_others(world_size: int) -> float:
    return world_size - 1


def _all_but_own_share(world_size: int) -> float:
    return (world_size - 1) / world_size


def _twice_all_but_own_share(world_size: int) -> float:
    return 2 * (world_size - 1) / world_size


_PUBLIC, _FUNCTIONAL = (dist, dist.distributed_c10d), (functional_collectives,)
_COLLECTIVES = [
    one
    for arguments in (
        (_PUBLIC, "all_reduce", "tensor", _twice_all_but_own_share),
        (_PUBLIC, "all_reduce_coalesced", "tensors", _twice_all_but_own_share),
        (_PUBLIC, "all_gather", "tensor", _to_all_others),
        (_PUBLIC, "all_gather_single", "input_tensor", _to_all_others),
        (_PUBLIC, "all_gather_into_tensor", "input_tensor", _to_all_others),
        (_PUBLIC, "reduce_scatter", "input_list", _all_but_own_share),
        (_PUBLIC, "reduce_scatter_single", "input", _all_but_own_share),
        (_PUBLIC, "reduce_scatter_tensor", "input", _all_but_own_share),
        (_PUBLIC, "all_to_all", "input_tensor_list", _all_but_own_share),
        (_PUBLIC, "all_to_all_single", "input", _all_but_own_share),
        (_PUBLIC, "broadcast", "tensor", _all_but_own_share),
        (_PUBLIC, "reduce", "tensor", _all_but_own_share),
        (_FUNCTIONAL, "all_reduce", "self", _twice_all_but_own_share),
        (_FUNCTIONAL, "all_gather_tensor", "self", _to_all_others),
        (_FUNCTIONAL, "all_gather_single", "self", _to_all_others),
        (_FUNCTIONAL, "reduce_scatter_tensor", "self", _all_but_own_share),
        (_FUNCTIONAL, "reduce_scatter_single", "self", _all_but_own_share),
        (_FUNCTIONAL, "all_to_all_single", "self", _all_but_own_share),
        (_FUNCTIONAL, "broadcast", "self", _all_but_own_share),
    )
    if (one := _Collective.of(*arguments)).signature is not None
]
