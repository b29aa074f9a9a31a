"""What an unannounced change costs: the buffer that was announced, and the payload again.

`python -m tests.narrowcast.allgather.test_unannounced` prints the figures of docs/all_gather.md.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from narrowcast import NarrowedModel, narrow_all_gather
from tests.narrowcast.training import local
from tests.ranks import Ranks

SIZE = 512
TOLERANCE = 0.1  # bits, of headers and padding


def _bits(handle: NarrowedModel, model: nn.Module) -> float:
    """Bits a parameter of the next gather."""
    handle.ledger.end_step()
    model.unshard()
    model.reshard()
    return handle.ledger.current.first.bits_per_parameter


def costs() -> dict[str, float]:
    """Bits a parameter of one gather of a layer of 262,144, compression "delta"."""
    torch.manual_seed(0)
    model = nn.Linear(SIZE, SIZE, bias=False)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    handle = narrow_all_gather(model, compression="delta")
    weight = local(model.weight).detach()
    generator = torch.Generator().manual_seed(1)

    def step(scale: float = 1e-4) -> Tensor:
        return weight.add_(scale * torch.randn(weight.shape, generator=generator))

    def other_weights() -> Tensor:
        return weight.normal_(std=0.02, generator=generator)

    def other_bits() -> Tensor:
        return weight.view(torch.int32).random_(-(2**31), 2**31 - 1, generator=generator)

    def cost(*changes: Callable[[], Tensor] | None) -> float:
        """Of changes, with an announcement where ``None`` stands."""
        for change in changes:
            handle.refresh() if change is None else change()
        return _bits(handle, model)

    found = {"cold, announced": cost(None)}
    handle.reset()
    found["cold, then other bits"] = cost(None, other_bits)
    cost(other_weights, None)
    found["a step, announced"] = cost(step, None)
    found["a step, not announced"] = cost(step)
    found["a step, announced, then another"] = cost(step, None, lambda: step(1e-3))
    cost(None)
    found["other weights, not announced"] = cost(other_weights)
    cost(None)
    found["other weights, announced"] = cost(other_weights, None)
    found["a step, announced, then other weights"] = cost(step, None, other_weights)
    handle.remove()
    return found


def test_an_unannounced_change_costs_the_announced_buffer_and_the_payload_again(ranks) -> None:
    for found in ranks(2).run(costs):

        def about(name: str, bits: float, found: dict[str, float] = found) -> bool:
            return abs(found[name] - bits) < TOLERANCE

        # Where nothing was announced a header is sent, and then the payload.
        assert about("a step, not announced", found["a step, announced"])
        # All bits are new: uncompressed after what was announced.
        assert about("cold, then other bits", found["cold, announced"] + 16)
        assert about("other weights, not announced", found["other weights, announced"])
        both = found["a step, announced"] + found["other weights, announced"]
        assert about("a step, announced, then other weights", both)
        assert found["a step, announced, then another"] > 2 * found["a step, announced"]


if __name__ == "__main__":
    pool = Ranks(2)
    for name, bits in pool.run(costs)[0].items():
        print(f"{name:40}{bits:6.1f}")
    pool.end()
