"""What torch 2.15 added to FSDP2 trains as without narrowcast: parameters of one group that are
gathered in dtypes of their own, gradients in dtypes of their own, and backward finalized by hand.

Two ranks share each reduction, where sums of narrowed gradients are bitwise those of FSDP2.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from narrowcast import narrow_all_gather
from narrowcast.fsdp2 import param_groups
from narrowcast.telemetry.counted import count_volume
from tests.narrowcast.training import DIM, Experts, Setup, narrowed, same_bits, state_of

SINCE_2_15 = pytest.mark.skipif(torch.__version__ < "2.15", reason="torch 2.15 added it")
ENTROPY = {"compression": "entropy"}


def vectors_in_fp32(parameter: nn.Parameter) -> torch.dtype | None:
    return torch.float32 if parameter.ndim < 2 else None


class Layer(nn.Module):
    """Experts between a norm and a scale in fp32; a rank has none of the scale."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.router = nn.Linear(DIM, 3, bias=False)
        self.experts = Experts(6)
        self.scale = nn.Parameter(torch.empty(1))

    def forward(self, x_TD: Tensor) -> Tensor:
        normed_TD = self.norm(x_TD.float()).to(x_TD.dtype)
        score_T1 = self.router(normed_TD).softmax(dim=-1).amax(dim=-1, keepdim=True)
        return x_TD + (self.experts(normed_TD) * score_T1 * self.scale).to(x_TD.dtype)


@dataclass(frozen=True)
class Case:
    """How to train.

    Attributes:
        reduced: The policy's ``reduce_dtype``.
        grad_dtypes: By the number of dimensions of a parameter, its ``grad_dtype``.
        options: Further options of ``fully_shard``.
        replicas: Of each shard.
        microbatches: In each step; gradients are reduced after the last.
        manual: Whether backward is finalized by hand, asynchronously.
        keeps_storage: Whether gathered parameters keep their storage after resharding.
    """

    reduced: torch.dtype | None = torch.float32
    grad_dtypes: dict[int, torch.dtype | None] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    replicas: int = 1
    microbatches: int = 1
    manual: bool = False
    keeps_storage: bool = False


CASES = {
    "reduced in fp32": Case(),
    "reduced in the dtype of the parameters": Case(reduced=None),
    "gradients of two dtypes": Case(reduced=None, grad_dtypes={2: torch.bfloat16}),
    "gradients of any dtype": Case(reduced=None, grad_dtypes={1: None, 2: None, 3: None}),
    "gradients of two dtypes, accumulated": Case(
        reduced=None, grad_dtypes={3: torch.bfloat16}, microbatches=2
    ),
    "kept for backward": Case(options={"reshard_after_forward": False}),
    "finalized by hand": Case(manual=True, reduced=None, grad_dtypes={2: torch.bfloat16}),
    "kept storage": Case(keeps_storage=True),
}
OF_FOUR_RANKS = {
    "replicated": Case(replicas=2, reduced=None, grad_dtypes={2: torch.bfloat16}, microbatches=2),
    "resharded over two ranks": Case(options={"reshard_after_forward": 2}),
}


def _build(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
        if parameter.ndim in case.grad_dtypes:
            parameter.grad_dtype = case.grad_dtypes[parameter.ndim]
    shape = (case.replicas, dist.get_world_size() // case.replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(
        torch.bfloat16, case.reduced, param_dtype_override_fn=vectors_in_fp32
    )
    for module in (model[0], model[1], model):
        mesh_of_module = mesh if case.replicas > 1 else mesh["shard"]
        fully_shard(module, mesh=mesh_of_module, mp_policy=policy, **case.options)
    model.set_keep_unsharded_storage(case.keeps_storage)
    model.set_manual_backward_finalization(case.manual)
    # AdamW takes no gradients of another dtype than their parameters'.
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def _train(case: Case, narrow: Setup, steps: int = 4) -> tuple[list[float], list[Tensor]]:
    model, optimizer = _build(case)
    losses = []
    with narrowed(narrow, model, optimizer):
        for batch in range(steps * case.microbatches):
            is_last = (batch + 1) % case.microbatches == 0
            model.set_requires_gradient_sync(is_last)
            generator = torch.Generator().manual_seed(100 * batch + dist.get_rank())
            x_TD = torch.randn(7, DIM, generator=generator)
            loss = model(x_TD).float().square().mean()
            loss.backward()
            losses.append(loss.item())
            if is_last:
                if case.manual:
                    model.finalize_backward(async_op=True).wait()
                optimizer.step()
                optimizer.zero_grad()
        return losses, state_of(model, optimizer)


def _is_as_plain(case: Case, narrow: Setup) -> bool:
    losses, state = _train(case, narrow)
    plain_losses, plain_state = _train(case, Setup())
    assert len(set(losses)) == len(losses)
    return losses == plain_losses and same_bits(state, plain_state)


@SINCE_2_15
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gathers_and_gradients_of_mixed_dtypes_are_as_plain(ranks, case) -> None:
    narrow = Setup(narrow={"compression": "delta"}, gradients=ENTROPY)
    assert ranks(2).run(_is_as_plain, case, narrow) == [True, True]


@SINCE_2_15
@pytest.mark.parametrize("case", OF_FOUR_RANKS.values(), ids=OF_FOUR_RANKS)
def test_they_are_as_plain_over_more_ranks(ranks, case) -> None:
    gradients = ENTROPY if case.replicas == 2 else None
    narrow = Setup(narrow={"compression": "delta"}, gradients=gradients)
    assert ranks(4).run(_is_as_plain, case, narrow) == [True] * 4


@SINCE_2_15
@pytest.mark.parametrize(
    "narrow",
    [
        {"compression": "exponent", "exponent_coding": "blocks", "verify_interval": 1},
        {"compression": "entropy"},
        {"compression": "auto", "warmup_steps": 3, "reselect_interval": 1},
    ],
    ids=lambda narrow: narrow["compression"],
)
def test_every_compression_takes_mixed_dtypes(ranks, narrow) -> None:
    assert ranks(2).run(_is_as_plain, Case(), Setup(narrow=narrow)) == [True, True]


class WithTable(nn.Linear):
    """A layer with a frozen parameter of integers."""

    def __init__(self) -> None:
        super().__init__(6, 4, bias=False)
        self.table = nn.Parameter(torch.zeros(6, dtype=torch.int32), requires_grad=False)


def _parameters_of_a_mixed_group(compression: str | None) -> int:
    """That one gather is counted for on a rank; ``None``: it is FSDP2's own."""
    model = WithTable()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    if compression is None:
        handle = count_volume(param_groups(model))
    else:
        handle = narrow_all_gather(model, compression=compression)
    model(torch.ones(1, 6)).sum().backward()
    handle.ledger.end_step()
    handle.remove()
    return handle.ledger.last.first.parameters


@pytest.mark.parametrize("compression", [None, "delta"])
def test_gathers_are_counted_by_parameter_where_dtypes_are_mixed(ranks, compression) -> None:
    """Each rank has 12 bf16 values and 3 integers, which FSDP2 gathers as 36 bytes."""
    assert ranks(2).run(_parameters_of_a_mixed_group, compression) == [15, 15]
