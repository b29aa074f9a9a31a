"""Every private name of torchtitan that is used here, as seen in torchtitan 0.3.0.

Each function says why no public name serves.
"""

import importlib
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.metrics import BaseLogger, TensorBoardLogger
from torchtitan.config import ConfigManager, Configurable
from torchtitan.models import qwen3
from torchtitan.models.common.moe import MoE, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.protocols.module import Module

from narrowcast.attribution import counted_by_caller
from narrowcast.fsdp2 import pending_collectives
from narrowcast.telemetry.ledger import Ledger

# The initializers and the layer builder of the qwen3 family, which a model of other widths would
# have to copy otherwise.
QWEN3_EMBEDDING_INIT = qwen3._EMBEDDING_INIT
QWEN3_LINEAR_INIT = qwen3._LINEAR_INIT
build_qwen3_moe_layers = qwen3._build_qwen3_moe_layers
qwen3_norm = qwen3._qwen3_norm


class BaseError(ValueError):
    """An error that a config function raised itself, or its module.

    Attributes:
        of_module: whether the module raised it when it was imported.
    """

    def __init__(self, error: BaseException, of_module: bool) -> None:
        where = traceback.extract_tb(error.__traceback__)[-1]
        message = " ".join(str(error).split())
        super().__init__(
            f"raised {type(error).__name__}: {message} ({where.filename}, line {where.lineno})"
        )
        self.of_module = of_module


def load_base_config(module: str, function: str) -> Any:
    """The config that ``--module module --config function`` starts from.

    ``ConfigManager._load_config`` is where torchtitan resolves short names such as ``qwen3``; its
    public ``parse_args`` would parse flags as well, and warn twice.

    Raises:
        ValueError, ImportError: the module or the function does not exist.
        BaseError: one of them raised.
    """
    try:
        config, _ = ConfigManager()._load_config(["--module", module, "--config", function])
        return config
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame.name for frame in frames].index("_load_config")
        if ours < len(frames) - 1:
            raise BaseError(error, frames[ours + 1].name == "import_module") from error
        if isinstance(error, ImportError):
            _import(module)  # torchtitan's own message does not say why
        if isinstance(error, ImportError | ValueError):
            raise
        raise BaseError(error, of_module=False) from error  # it cannot even be called


def _import(module: str) -> None:
    """Raise a ``BaseError`` if a module exists and cannot import another one."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise BaseError(error, of_module=True) from error


def owner(config_cls: type[Configurable.Config]) -> type[Configurable]:
    """The class of the object that ``config_cls.build()`` returns.

    torchtitan keeps it in ``_owner``, and has no public name for it.
    """
    assert config_cls._owner is not None, f"{config_cls.__qualname__} has no owner"
    return config_cls._owner


def skip_final_sleep() -> None:
    """Let training end without the two seconds for which the first rank waits for the others.

    That wait is the only use that ``torchtitan.trainer`` makes of ``time.sleep``.
    """
    import torchtitan.trainer

    torchtitan.trainer.time = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})


def tensorboard_writers(logger: BaseLogger) -> list[SummaryWriter]:
    """The TensorBoard writers behind a metrics logger; none on ranks that do not log.

    ``LoggerContainer`` keeps its loggers in ``_loggers``, and publicly passes scalars only.
    """
    loggers = getattr(logger, "_loggers", [])
    return [one.writer for one in loggers if isinstance(one, TensorBoardLogger)]


def moe_layers(model_part: nn.Module) -> dict[str, MoE]:
    """The MoE modules of a model by name, in its order.

    ``canonical_fqn`` removes what activation checkpointing and compilation add to names.
    """
    return {
        canonical_fqn(name): module
        for name, module in model_part.named_modules()
        if isinstance(module, MoE)
    }


class _Recorded:
    """A dispatcher's ``dispatch`` that calls functions with what each call is given."""

    def __init__(self, replaced: Callable[..., Any] | None, dispatch: Callable[..., Any]) -> None:
        self.replaced = replaced  # of the dispatcher itself; None where its class has it
        self.records: list[Callable[[torch.Tensor, torch.Tensor], None]] = []
        self._dispatch = dispatch

    def __call__(
        self, x_TD: torch.Tensor, scores_TK: torch.Tensor, ids_TK: torch.Tensor, *rest: Any
    ) -> Any:
        for record in self.records:
            record(ids_TK, scores_TK)
        return self._dispatch(x_TD, scores_TK, ids_TK, *rest)


def on_dispatch(
    moe: MoE, record: Callable[[torch.Tensor, torch.Tensor], None]
) -> Callable[[], None]:
    """Call ``record(ids_TK, scores_TK)`` with what this rank's tokens selected, at every dispatch.

    Dispatchers are no modules and have no hooks.

    Returns:
        A function that ends it. Where several record, these may be called in any order.
    """
    dispatcher = moe.routed_experts.token_dispatcher
    recorded = dispatcher.dispatch
    if not isinstance(recorded, _Recorded):
        recorded = _Recorded(vars(dispatcher).get("dispatch"), recorded)
        dispatcher.dispatch = recorded
    recorded.records.append(record)

    def undo() -> None:
        recorded.records.remove(record)
        # A function that another tool has put in its place since stays there, and calls this one.
        if recorded.records or dispatcher.dispatch is not recorded:
            return
        if recorded.replaced is None:
            del dispatcher.dispatch
        else:
            dispatcher.dispatch = recorded.replaced

    return undo


def shared_experts_meanwhile(moe: MoE) -> Callable[[], None]:
    """A function that computes the shared experts of a layer ahead of its forward, which then
    takes the result. For layers with shared experts that are not compiled.

    ``MoE.forward`` calls its routed experts first, and then its shared experts on the same input;
    where parallelized, both calls are bound to the ``forward`` of the modules.
    """
    shared = moe.shared_experts
    forward = shared.forward
    given: list[torch.Tensor] = []
    computed: list[torch.Tensor] = []

    def keep_input(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        given[:], computed[:] = args[:1], []

    def forward_once(x_BLD: torch.Tensor) -> torch.Tensor:
        return computed.pop() if computed else forward(x_BLD)

    def meanwhile() -> None:
        computed.append(shared(given.pop()))

    moe.routed_experts.register_forward_pre_hook(keep_input)
    shared.forward = forward_once
    return meanwhile


def around_checkpoints(
    checkpointer: BaseCheckpointManager,
    in_model_order: Callable[[], AbstractContextManager],
    after_loading: Callable[[], None],
) -> None:
    """Save and load checkpoints within ``in_model_order()``.

    ``_should_save`` alone knows whether a step is to be saved, and ``_save`` reads parameters
    before it calls anything public. Staging in the background must end before parameters change.

    Args:
        checkpointer: of a class that has passed ``check_checkpoints``.
        in_model_order: a context within which experts are in the model's own order.
        after_loading: is called after a checkpoint was loaded.
    """
    save, load = checkpointer._save, checkpointer.load

    def save_in_model_order(curr_step: int, last_step: bool = False) -> bool:
        if not checkpointer._should_save(curr_step, last_step):
            return save(curr_step, last_step)
        checkpointer.maybe_wait_for_saving()
        with in_model_order():
            saved = save(curr_step, last_step)
            checkpointer.maybe_wait_for_staging()
            return saved

    def load_in_model_order(step: int = -1) -> bool:
        with in_model_order():
            loaded = load(step)
        after_loading()
        return loaded

    checkpointer._save, checkpointer.load = save_in_model_order, load_in_model_order


def check_checkpoints(checkpointer_cls: type) -> None:
    """Check that ``around_checkpoints`` knows how a class saves and loads.

    Raises:
        ValueError: it does not.
    """
    if not issubclass(checkpointer_cls, CheckpointManager):
        raise ValueError(
            f"checkpoints are written by a {checkpointer_cls.__qualname__}: experts are put in "
            "the model's own order for torchtitan's CheckpointManager alone"
        )


def token_dispatchers(model_parts: list[nn.Module]) -> list[AllToAllTokenDispatcher]:
    """The dispatchers of a model that move tokens between expert-parallel ranks by all-to-all."""
    dispatchers = [
        module.token_dispatcher
        for part in model_parts
        for module in part.modules()
        if isinstance(module, RoutedExperts)
    ]
    return [
        dispatcher
        for dispatcher in dispatchers
        if isinstance(dispatcher, AllToAllTokenDispatcher) and dispatcher.ep_mesh is not None
    ]


def count_token_dispatch(dispatcher: AllToAllTokenDispatcher, ledger: Ledger) -> None:
    """Count the bytes that a dispatcher sends under "dispatch" and "combine", backward included.

    The three all-to-alls are private methods; ``dispatch`` and ``combine`` do not return how many
    rows are sent. Rows are not counted within graphs of ``torch.compile``.
    """
    rank, world_size = dispatcher.ep_mesh.get_local_rank(), dispatcher.ep_mesh.size()
    exchange_counts = dispatcher._token_count_exchange
    exchange_dispatch = dispatcher._dispatch_token_exchange
    exchange_combine = dispatcher._combine_token_exchange

    def add(name: str, rows: torch.Tensor, splits: list[int]) -> None:
        row_bytes = rows.shape[-1] * rows.element_size()
        ledger.add(name, (sum(splits) - splits[rank]) * row_bytes)

    def counted(name: str, exchange: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(
            rows: torch.Tensor, group: Any, received: list[int], sent: list[int]
        ) -> torch.Tensor:
            if torch.compiler.is_compiling():
                return exchange(rows, group, received, sent)
            pending = pending_collectives()
            with counted_by_caller():
                out = exchange(rows, group, received, sent)
            if pending_collectives() > pending:  # not replayed by activation checkpointing
                add(name, rows, sent)
            if out.requires_grad:
                # The gradient is sent back along the path of its rows.
                out.register_hook(lambda grad: add(name, grad, received))
            return out

        return run

    def counted_counts(counts: torch.Tensor, group: Any, ep_size: int) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return exchange_counts(counts, group, ep_size)
        pending = pending_collectives()
        with counted_by_caller():
            received = exchange_counts(counts, group, ep_size)
        if pending_collectives() > pending:
            nbytes = counts.numel() * counts.element_size()
            ledger.add("dispatch", nbytes * (world_size - 1) // world_size)
        return received

    dispatcher._token_count_exchange = counted_counts
    dispatcher._dispatch_token_exchange = counted("dispatch", exchange_dispatch)
    dispatcher._combine_token_exchange = counted("combine", exchange_combine)


class ReorderingTokenDispatcher(AllToAllTokenDispatcher):
    """An ``AllToAllTokenDispatcher`` whose subclasses change the order in which rows are sent.

    Rows are sorted in ``_local_reorder`` alone, between the public ``dispatch`` and the exchange.
    """

    def reordered(
        self, topk_expert_ids_TK: Tensor, rows_ND: Tensor, scores_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The rows in another order, the place of each in the order of experts, and their scores.

        Args:
            topk_expert_ids_TK: (T, K) the experts that tokens select.
            rows_ND, scores_N: (N, D) and (N,) sorted by expert, N = T * K.
        """
        raise NotImplementedError

    def _local_reorder(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows_ND, _, scores_N = super()._local_reorder(x_TD, topk_scores_TK, topk_expert_ids_TK)
        return self.reordered(topk_expert_ids_TK, rows_ND, scores_N)


def wrap_parameter_initialization(
    wrap: Callable[[Callable[[Module], None]], Callable[[Module], None]],
) -> None:
    """Replace the method by which a module initializes its own parameters by ``wrap`` of it.

    The public ``init_states`` initializes the children of a module as well.
    """
    Module._init_self_parameters = wrap(Module._init_self_parameters)
