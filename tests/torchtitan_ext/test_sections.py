"""Every pair of our sections at once, and all of them: trained, resumed and closed."""

import functools
import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torchtitan.trainer import Trainer

from narrowcast.fsdp2 import is_default, param_groups
from narrowcast.placement.trace import load_trace
from tests.ranks import Ranks
from tests.torchtitan_ext.test_placement import (
    EP2,
    FULL,
    SAVE,
    UNCLIPPED,
    _assert_equal,
    _placed,
    _toml,
)
from tests.torchtitan_ext.tiny import Trained, train
from torchtitan_ext.private import moe_layers, on_dispatch

# A plan of one step takes 1,024 tokens.
JOB = (*EP2, *SAVE, FULL, *UNCLIPPED, "--training.local_batch_size", "16")
SECTIONS = {
    "all_gather": (
        "--narrowcast.all_gather.enable",
        "--narrowcast.all_gather.compression",
        "delta",
    ),
    "reduce_scatter": (
        "--narrowcast.reduce_scatter.enable",
        "--narrowcast.reduce_scatter.compression",
        "entropy",
    ),
    # Steps 2 and 3, of which the second one comes after the checkpoint.
    "routing_trace": (
        "--narrowcast.routing_trace.enable",
        *("--narrowcast.routing_trace.first_step", "2"),
        *("--narrowcast.routing_trace.num_steps", "2"),
    ),
    "placement.file": (),  # needs one
    "placement.after_steps": ("--narrowcast.placement.after_steps", "1"),
    "dispatch": ("--narrowcast.dispatch.deduplicate",),
    "volume": ("--narrowcast.volume.no-enable",),
}
PAIRS = [
    pair
    for pair in itertools.combinations(SECTIONS, 2)
    if not all(name.startswith("placement") for name in pair)
]
ALL = [tuple(name for name in SECTIONS if name != "placement.file" and name != "volume")]
QUICK = [("routing_trace", "placement.after_steps"), *ALL]


def _flags(folder: Path, names: tuple[str, ...]) -> list[str]:
    flags = [flag for name in names for flag in SECTIONS[name]]
    return [*flags, *(_placed(folder, 2) if "placement.file" in names else ())]


@functools.cache
def _whole(ranks: Ranks, folder: Path, names: tuple[str, ...]) -> list[Trained]:
    """Four steps, with a checkpoint after the second."""
    toml = _toml(folder, f"whole-{'-'.join(names)}")
    return ranks.run(train, toml, *JOB, *_flags(folder, names))


def _resumed(ranks: Ranks, folder: Path, names: tuple[str, ...]) -> list[Trained]:
    """The last two of these steps, from their checkpoint."""
    whole, name = folder / f"whole-{'-'.join(names)}", f"resumed-{'-'.join(names)}"
    step, plan = "checkpoint/step-2", "placement/step-00000001.json"
    shutil.copytree(whole / step, folder / name / step)
    if (whole / plan).exists():
        (folder / name / "placement").mkdir()
        shutil.copy(whole / plan, folder / name / plan)
    return ranks.run(train, _toml(folder, name), *JOB, *_flags(folder, names))


@pytest.mark.parametrize(
    "names",
    [
        *QUICK,
        *(pytest.param(pair, marks=pytest.mark.wide) for pair in PAIRS if pair not in QUICK),
    ],
    ids=" and ".join,
)
def test_sections_work_together(ranks, folder: Path, names: tuple[str, ...]) -> None:
    """Training is what each of them promises, resumed too, and the trainer closes."""
    trained = _whole(ranks(2), folder, names)
    placed = any(name.startswith("placement") for name in names)
    if "dispatch" not in names:
        _assert_equal(trained, _whole(ranks(2), folder, ()))
    elif not placed:
        _assert_equal(trained, _whole(ranks(2), folder, ("dispatch",)))
    else:  # sums are made rank by rank
        plain = _whole(ranks(2), folder, ())
        for ours, theirs in zip(trained, plain, strict=True):
            assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)
    assert len(set(trained[0].losses)) == 4
    assert trained[0].narrowed == ("all_gather" in names)
    assert trained[0].narrowed_gradients == ("reduce_scatter" in names)
    assert ("narrowcast/ratio/all" in trained[0].metrics[0]) == ("volume" not in names)
    if placed:
        assert not torch.equal(trained[0].experts_LE, torch.arange(8).expand(2, -1))
    if "routing_trace" in names:
        file = folder / f"whole-{'-'.join(names)}" / "routing_trace.safetensors"
        assert load_trace(file).step_T.unique().tolist() == [2, 3]
    for rest, whole in zip(_resumed(ranks(2), folder, names), trained, strict=True):
        assert rest.losses == whole.losses[2:]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_records_of_a_dispatcher_end_in_any_order(order: tuple[int, ...]) -> None:
    class Dispatcher:
        def dispatch(self, x: str, scores: str, ids: str, counts: str) -> tuple[str, ...]:
            return x, scores, ids, counts

    dispatcher = Dispatcher()
    moe = SimpleNamespace(routed_experts=SimpleNamespace(token_dispatcher=dispatcher))
    told: list[int] = []
    undo = [
        on_dispatch(moe, lambda ids, scores, i=i: told.append((i, ids, scores))) for i in range(3)
    ]
    left = {0, 1, 2}
    for i in order:
        assert dispatcher.dispatch("x", "scores", "ids", "counts") == (
            "x",
            "scores",
            "ids",
            "counts",
        )
        assert set(told) == {(i, "ids", "scores") for i in left}
        told.clear()
        undo[i]()
        left.remove(i)
    assert not vars(dispatcher)


def test_what_another_tool_puts_over_a_recorded_dispatch_stays() -> None:
    dispatcher = SimpleNamespace(dispatch=lambda *args: args)
    theirs = dispatcher.dispatch
    moe = SimpleNamespace(routed_experts=SimpleNamespace(token_dispatcher=dispatcher))
    undo = on_dispatch(moe, lambda *_: None)
    undo()
    assert dispatcher.dispatch is theirs
    undo = on_dispatch(moe, lambda *_: None)
    ours = dispatcher.dispatch
    dispatcher.dispatch = lambda *args: ours(*args)
    over = dispatcher.dispatch
    undo()
    assert dispatcher.dispatch is over
    assert over(1, 2, 3) == (1, 2, 3)


def _closed(toml: str, *flags: str, fails: str) -> tuple[str, bool, bool]:
    """How a run with a failure ended; whether torchtitan's own close ran; whether the model is as
    it was."""
    opened: list[Any] = []

    def fail(trainer: Any) -> None:
        opened.append(trainer)

        def raises(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"{fails} failed")

        if fails == "a step":
            trainer.optimizers.step = raises
        else:
            trainer.placed.remove = raises

    with patch.object(Trainer, "close", autospec=True, side_effect=Trainer.close) as close:
        try:
            train(toml, *flags, before=fail)
        except RuntimeError as error:
            ended = str(error)
    [trainer] = opened
    groups = param_groups(*trainer.model_parts)
    dispatchers = [moe.routed_experts.token_dispatcher for moe in _moe_layers(trainer)]
    untouched = (
        all(is_default(group.all_gather) for group in groups)
        and all(is_default(group.reduce_scatter) for group in groups)
        and not trainer.optimizers._optimizer_step_post_hooks
        and (fails != "a step" or not any("dispatch" in vars(one) for one in dispatchers))
    )
    return ended, close.called, untouched


def _moe_layers(trainer: Any) -> list[Any]:
    return [moe for part in trainer.model_parts for moe in moe_layers(part).values()]


@pytest.mark.parametrize("fails", ["a step", "a handle"])
def test_a_failed_run_is_closed_to_the_end(ranks, folder: Path, fails: str) -> None:
    """Whether training raises or what is to be undone: all else is, torchtitan closes, and the
    error is raised."""
    toml = _toml(folder, f"failed {fails}")
    flags = (*JOB, *_flags(folder, ALL[0]))
    for outcome in ranks(2).outcomes(functools.partial(_closed, fails=fails), toml, *flags):
        assert outcome == (f"{fails} failed", True, True)
