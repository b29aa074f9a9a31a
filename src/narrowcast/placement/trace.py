"""Traces of routing decisions: which experts each token selected in each layer.

A trace is one safetensors file: tensors ``expert_ids`` (L, T, K), ``step``, ``rank`` and
``position`` (T,), optionally ``scores`` (L, T, K), and a header that describes the model and its
layers. A token is one column of all of them, so that layers are joined by token.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from narrowcast.placement.reading import (
    SAFETENSORS,
    are_names,
    field,
    is_integer,
    is_name,
    kind_of,
    parse_json,
    shown,
)
from narrowcast.util import whole

FORMAT = "narrowcast.routing_trace"
VERSION = 1

_TENSORS = ("step", "rank", "position", "expert_ids", "scores")
_MAX_EXPERTS = 1 << 15  # whose ids fit into an int16


@dataclass(frozen=True)
class RoutingTrace:
    """The routing of T tokens to K of ``num_experts`` experts in L layers.

    Attributes:
        model: name and flavor, such as "qwen3 demo".
        layers: names of the MoE modules, in the order of the model.
        num_experts: experts of each layer.
        num_ranks: expert-parallel degree of the recorded run.
        ids_LTK: (L, T, K) the selected experts, in the numbering of the model and in the order of
            the router.
        step_T: (T,) training step, from 1.
        rank_T: (T,) the share of the step's tokens that the token is in, from 0: the data-parallel
            rank, subdivided by context and sequence parallelism. At expert-parallel degree R the
            EP rank of the token is ``rank_T % R``.
        position_T: (T,) position of the token within that share.
        scores_LTK: (L, T, K) factors of the outputs of the selected experts, or None.
        num_groups, num_limited_groups: expert groups of a node-limited router, and how many of them
            a token may select from, or None.
    """

    model: str
    layers: tuple[str, ...]
    num_experts: int
    num_ranks: int
    ids_LTK: Tensor
    step_T: Tensor
    rank_T: Tensor
    position_T: Tensor
    scores_LTK: Tensor | None = None
    num_groups: int | None = None
    num_limited_groups: int | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.ids_LTK.shape[1]

    @property
    def top_k(self) -> int:
        """K, experts of each token."""
        return self.ids_LTK.shape[2]

    def tokens(self, index: slice | Tensor) -> "RoutingTrace":
        """Return the trace of some of the tokens."""
        return replace(
            self,
            ids_LTK=self.ids_LTK[:, index],
            step_T=self.step_T[index],
            rank_T=self.rank_T[index],
            position_T=self.position_T[index],
            scores_LTK=None if self.scores_LTK is None else self.scores_LTK[:, index],
        )

    def split(self, held_out: float) -> tuple["RoutingTrace", "RoutingTrace"]:
        """Return the earlier tokens to fit on, and a share ``held_out`` of later ones to judge by.

        Tokens are in the order of step, rank and position, so that the two parts share no text
        except at the cut.
        """
        cut = self.num_tokens - round(self.num_tokens * held_out)
        return self.tokens(slice(None, cut)), self.tokens(slice(cut, None))

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            ValueError: the file could not be read again, as with an expert twice in one token.
            OSError: the file cannot be written. The message names it.
        """
        described = {
            "model": self.model,
            "layers": self.layers,
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "num_ranks": self.num_ranks,
            "num_groups": self.num_groups,
            "num_limited_groups": self.num_limited_groups,
        }
        header = {"format": FORMAT, "version": str(VERSION), "trace": json.dumps(described)}
        try:
            _described(header)
            _check_values(self)
        except ValueError as error:
            raise ValueError(f"{path} is not written: {error}") from error
        tensors = {
            "expert_ids": self.ids_LTK.to(id_dtype(self.num_experts)),
            "step": self.step_T.to(torch.int32),
            "rank": self.rank_T.to(torch.int32),
            "position": self.position_T.to(torch.int32),
        }
        if self.scores_LTK is not None:
            tensors["scores"] = self.scores_LTK
        with whole(Path(path)) as unfinished:
            save_file({name: t.contiguous() for name, t in tensors.items()}, unfinished, header)


def load_trace(path: str | Path) -> RoutingTrace:
    """Read a trace.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is not a trace, is of another version, or is damaged. The message names the
            file and what is wrong in it.
    """
    header, tensors = _read(path)
    try:
        described = _described(header)
        _check_tensors(tensors, described)
        trace = RoutingTrace(
            model=described["model"],
            layers=tuple(described["layers"]),
            num_experts=described["num_experts"],
            num_ranks=described["num_ranks"],
            ids_LTK=tensors["expert_ids"],
            step_T=tensors["step"],
            rank_T=tensors["rank"],
            position_T=tensors["position"],
            scores_LTK=tensors.get("scores"),
            num_groups=described["num_groups"],
            num_limited_groups=described["num_limited_groups"],
        )
        _check_values(trace)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}. Record the trace again") from error
    return trace


def _read(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the header and the tensors of a file whose header is that of a trace."""
    try:
        kind = kind_of(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: there is no such routing trace") from None
    expected = "expected the safetensors file that [narrowcast.routing_trace] records"
    if kind != SAFETENSORS:
        raise ValueError(f"{path} is not a routing trace: it is {kind}, {expected}")
    try:
        with safe_open(path, framework="pt") as file:
            header, there = file.metadata() or {}, set(file.keys())
            tensors = {name: file.get_tensor(name) for name in _TENSORS if name in there}
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged: {error}. Record the trace again") from error
    if header.get("format") != FORMAT:
        raise ValueError(f"{path} is not a routing trace: it lacks the header of one, {expected}")
    if header.get("version") != str(VERSION):
        raise ValueError(
            f"{path} is a routing trace of version {header.get('version')}, but this release reads "
            f"version {VERSION}: record it again"
        )
    return header, tensors


def id_dtype(num_experts: int) -> torch.dtype:
    """Return the smallest dtype that can represent expert ids."""
    return torch.uint8 if num_experts <= 256 else torch.int16


def _described(header: dict[str, str]) -> dict[str, Any]:
    """Return the fields of a header that describe the model.

    Raises:
        ValueError: a field is invalid. The message names it.
    """
    described = parse_json(field(header, "trace", bool, "a description in JSON"))
    if not isinstance(described, dict):
        raise ValueError(f"its description is {shown(described)}, expected an object")

    def integer(name: str, most: int) -> int:
        expected = f"an integer from 1 to {most}"
        return field(described, name, lambda n: is_integer(n, 1, most), expected)

    def none_or(name: str, is_valid: Callable[[Any], bool], expected: str) -> int | None:
        return field(described, name, lambda n: n is None or is_valid(n), f"null or {expected}")

    num_experts = integer("num_experts", _MAX_EXPERTS)
    num_groups = none_or(
        "num_groups",
        lambda n: is_integer(n, 1, num_experts) and num_experts % n == 0,
        f"an integer that divides num_experts, {num_experts}",
    )
    return {
        "model": field(described, "model", is_name, "the model's name"),
        "layers": field(described, "layers", are_names, "a list of names, none of them twice"),
        "num_experts": num_experts,
        "top_k": integer("top_k", num_experts),
        "num_ranks": integer("num_ranks", num_experts),
        "num_groups": num_groups,
        "num_limited_groups": none_or(
            "num_limited_groups",
            lambda n: is_integer(n, 1, num_groups or 0),
            f"an integer from 1 to num_groups, {shown(num_groups)}",
        ),
    }


def _check_tensors(tensors: dict[str, Tensor], described: dict[str, Any]) -> None:
    """Raise a ``ValueError`` if dtypes or shapes do not match the description."""
    num_tokens = tensors["step"].numel() if "step" in tensors else 0
    num_layers, top_k = len(described["layers"]), described["top_k"]
    integers, floats = (torch.int32, torch.int64), (torch.float32, torch.bfloat16, torch.float16)
    expected_of = dict.fromkeys(("step", "rank", "position"), (integers, (num_tokens,)))
    shape = (num_layers, num_tokens, top_k)
    expected_of["expert_ids"] = (id_dtype(described["num_experts"]),), shape
    expected_of["scores"] = floats, shape
    for name, (dtypes, expected_shape) in expected_of.items():
        if name not in tensors:
            if name == "scores":
                continue
            raise ValueError(f"it lacks the tensor {name!r}")
        tensor = tensors[name]
        if tensor.dtype not in dtypes or tensor.shape != expected_shape:
            expected = " or ".join(str(dtype) for dtype in dtypes)
            raise ValueError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, expected {expected} "
                f"of shape {expected_shape}: {num_layers} layers, {num_tokens} tokens, top-{top_k} "
                f"of {described['num_experts']} experts"
            )


def _check_values(trace: RoutingTrace) -> None:
    """Raise a ``ValueError`` that names the first value that is invalid."""
    if not trace.num_tokens:
        raise ValueError("it holds no tokens")
    for name, column_T, least in (
        ("step", trace.step_T, 1),
        ("rank", trace.rank_T, 0),
        ("position", trace.position_T, 0),
    ):
        if int(column_T.min()) < least:
            token = int(column_T.argmin())
            raise ValueError(
                f"{name} of token {token} is {column_T[token]}, expected {least} or more"
            )
    if (is_earlier_T := trace.step_T[1:] < trace.step_T[:-1]).any():
        token = int(is_earlier_T.nonzero()[0]) + 1
        raise ValueError(
            f"token {token} is of step {trace.step_T[token]}, and the one before it of step "
            f"{trace.step_T[token - 1]}: expected tokens in the order of steps"
        )
    for name, ids_TK in zip(trace.layers, trace.ids_LTK, strict=True):
        _check_ids(name, ids_TK, trace.num_experts)
    if trace.scores_LTK is not None and not trace.scores_LTK.isfinite().all():
        layer, token, _ = (~trace.scores_LTK.isfinite()).nonzero()[0].tolist()
        scores = trace.scores_LTK[layer, token].tolist()
        raise ValueError(
            f"scores of token {token} in {trace.layers[layer]} are {scores}, expected finite "
            "numbers"
        )


def _check_ids(layer: str, ids_TK: Tensor, num_experts: int) -> None:
    # As Python numbers: 256 does not fit into a uint8.
    if not 0 <= int(ids_TK.min()) <= int(ids_TK.max()) < num_experts:
        is_wrong_TK = (ids_TK.long() < 0) | (ids_TK.long() >= num_experts)
        token, place = is_wrong_TK.nonzero()[0].tolist()
        raise ValueError(
            f"expert_ids of token {token} in {layer} name expert {ids_TK[token, place]}, expected "
            f"an integer from 0 to {num_experts - 1}"
        )
    # All pairs of a token's experts: faster than a sort, as ids have one or two bytes.
    ids_KT = ids_TK.T.contiguous()
    for apart in range(1, len(ids_KT)):
        is_twice_KT = ids_KT[apart:] == ids_KT[:-apart]
        if is_twice_KT.any():
            place, token = is_twice_KT.nonzero()[0].tolist()
            raise ValueError(
                f"expert_ids of token {token} in {layer} name expert {ids_KT[place, token]} twice, "
                f"expected {len(ids_KT)} different experts"
            )
