"""The choice of compressions as a mixed-integer program, solved by SciPy's ``milp`` (HiGHS).

Its variables are 0 or 1: whether a group is narrowed, at first without caches, and whether a shard
has a certain cache. It minimises

    sum over groups   n_g * (least gain of g - gain of g without caches)
    + sum over caches c_i * (seconds of the shard with cache i - seconds without)

where the caches of a shard, of which it has one at most and only if its group is narrowed, satisfy
``sum of c_i <= n_g``, and all caches together ``sum of c_i * bytes_i <= limit``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from narrowcast.autotune.problem import Compressions, Group

_SCALE = 1e6  # of costs and of the budget: the solver's tolerances are absolute, 1e-6
# To a millionth of what is saved, or as far as these nodes and seconds go: all ranks wait.
_OPTIONS = {"mip_rel_gap": 1e-6, "node_limit": 1000, "time_limit": 10.0}

Frontiers = dict[str, dict[str, list[str]]]
"""By group and shard: compressions from no cache to the largest, each faster than those before."""


@dataclass(frozen=True, order=True)
class Variable:
    """One decision: a group is narrowed, or (with ``shard``) a shard has a cache.

    Attributes:
        cost: seconds a step, if it is taken.
        cache_bytes: on a rank, if it is taken.
    """

    cost: float
    cache_bytes: int
    group: str
    shard: str = ""
    compression: str = ""


@dataclass(frozen=True)
class Program:
    """The program but for the limit.

    Attributes:
        variables: in the order of the columns.
        one_each: rows that must not exceed 0: the caches of a shard less its group.
        uncached: compression of each shard that has no cache, by group.
    """

    variables: tuple[Variable, ...]
    one_each: csr_array
    uncached: Compressions


def formulate(
    groups: Sequence[Group], frontiers: Frontiers, margin: float, price: float
) -> Program:
    """The program of these groups.

    Args:
        margin: share of a group's baseline time that narrowing it must save.
        price: of a byte of cache, in seconds a step.
    """
    variables: list[Variable] = []
    entries: list[tuple[int, int, int]] = []  # value, row, column
    num_rows = 0
    uncached = {
        group: {shard: frontier[0] for shard, frontier in of_group.items()}
        for group, of_group in frontiers.items()
    }
    for group in groups:
        narrowed = len(variables)
        loss = group.least_gain(margin) - group.gain(uncached[group.name])
        variables.append(Variable(loss, 0, group.name))
        for shard in group.shards:
            first, *cached = frontiers[group.name][shard.name]
            for name in cached:
                option = shard.options[name]
                cost = option.seconds + price * option.cache_bytes - shard.options[first].seconds
                entries.append((1, num_rows, len(variables)))
                variables.append(Variable(cost, option.cache_bytes, group.name, shard.name, name))
            if cached:
                entries.append((-1, num_rows, narrowed))
                num_rows += 1
    values, *indices = zip(*entries, strict=True)
    one_each = csr_array((values, indices), shape=(num_rows, len(variables)))
    return Program(tuple(variables), one_each, uncached)


def solve(program: Program, limit: float) -> Compressions | str:
    """The compressions of the least cost within the limit; may include groups that are not
    worthwhile. If the search takes too long: what the solver says.

    Args:
        limit: bytes of caches on a rank; at least those of the smallest cache.
    """
    costs = np.array([variable.cost for variable in program.variables])
    cache_bytes = np.array([[variable.cache_bytes for variable in program.variables]])
    result = milp(
        costs * (_SCALE / np.abs(costs).sum()),
        integrality=np.ones(len(costs)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(program.one_each, -np.inf, 0),
            LinearConstraint(csr_array(cache_bytes * (_SCALE / limit)), -np.inf, _SCALE),
        ],
        options=_OPTIONS,
    )
    if result.x is None or "Time limit" in result.message:
        return result.message
    taken = [v for v, x in zip(program.variables, result.x, strict=True) if x > 0.5]
    compressions = {v.group: dict(program.uncached[v.group]) for v in taken if not v.shard}
    # Within its tolerance the solver may exceed the limit. Then the caches that gain least go.
    left = limit
    for variable in sorted(taken):
        if variable.shard and variable.group in compressions and variable.cache_bytes <= left:
            compressions[variable.group][variable.shard] = variable.compression
            left -= variable.cache_bytes
    return compressions
