"""Which rows of a sharded tensor lie on which ranks."""

import itertools

from torch.distributed.tensor import DTensor

from narrowcast.fsdp2 import local_shape_and_offset


def rows_by_rank(tensor: DTensor) -> dict[int, range]:
    """Which rows (dimension 0) of a tensor lie on which global ranks, this rank among them.

    Only ranks that hold the same part of the other dimensions and belong to the same replica are
    listed. Each holds consecutive rows, whether expert parallelism, FSDP or both shard them.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    local = mesh.get_coordinate()
    assert local is not None, "this rank holds no part of the tensor"
    split = [
        dim for dim, placement in enumerate(placements) if getattr(placement, "dim", None) == 0
    ]
    rows = {}
    for coordinate in itertools.product(*(range(mesh.size(dim)) for dim in split)):
        remote = list(local)
        for dim, index in zip(split, coordinate, strict=True):
            remote[dim] = index
        shape, offset = local_shape_and_offset(tensor.shape, mesh.shape, remote, placements)
        rows[int(mesh.mesh[tuple(remote)])] = range(offset[0], offset[0] + shape[0])
    parts = sorted((part for part in rows.values() if len(part)), key=lambda part: part.start)
    covered = [row for part in parts for row in part]
    assert covered == list(range(tensor.shape[0])), f"rows of {placements} are not consecutive"
    return rows
