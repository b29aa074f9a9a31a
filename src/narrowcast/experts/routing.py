"""Traces of routing decisions: which experts each token selected in each layer.

A trace is one safetensors file that anything can read: tensors `expert_ids` (L, T, K), `step`,
`rank` and `position` (T,), on wish `scores` (L, T, K), and a header that says of which model and
layers. A token is one column of all of them, so that layers are joined by token.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from narrowcast.experts.files import whole

FORMAT = "narrowcast.routing_trace"
VERSION = 1


@dataclass(frozen=True)
class RoutingTrace:
    """L layers' routing of T tokens to K of `num_experts` experts.

    Attributes:
        model: name and flavor, as "qwen3 demo".
        layers: names of the MoE modules, in the order of the model.
        num_experts: of each layer.
        num_ranks: expert-parallel degree of the run that was recorded.
        ids_LTK: selected experts, in the model's own numbering; in the order of the router.
        step_T: training step, from 1.
        rank_T: which share of the step's tokens, from 0: the data-parallel rank, refined by context
            and sequence parallelism. At expert-parallel degree R the token's own EP rank is
            `rank_T % R`.
        position_T: of the token within its rank's share of the step.
        scores_LTK: what the selected experts' outputs are multiplied by, or None.
        num_groups, num_limited_groups: of a node-limited router, or None.
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
        return self.ids_LTK.shape[1]

    @property
    def top_k(self) -> int:
        return self.ids_LTK.shape[2]

    def tokens(self, index: slice | Tensor) -> "RoutingTrace":
        """The same trace of some of the tokens."""
        return replace(
            self,
            ids_LTK=self.ids_LTK[:, index],
            step_T=self.step_T[index],
            rank_T=self.rank_T[index],
            position_T=self.position_T[index],
            scores_LTK=None if self.scores_LTK is None else self.scores_LTK[:, index],
        )

    def split(self, held_out: float) -> tuple["RoutingTrace", "RoutingTrace"]:
        """The earlier tokens to fit on, and the share `held_out` of later ones to judge on.

        Tokens lie in the order of step, rank and position, so that the two parts share no text but
        at the cut.
        """
        cut = self.num_tokens - round(self.num_tokens * held_out)
        return self.tokens(slice(None, cut)), self.tokens(slice(cut, None))

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all."""
        tensors = {
            "expert_ids": self.ids_LTK.to(id_dtype(self.num_experts)),
            "step": self.step_T.to(torch.int32),
            "rank": self.rank_T.to(torch.int32),
            "position": self.position_T.to(torch.int32),
        }
        if self.scores_LTK is not None:
            tensors["scores"] = self.scores_LTK
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
        with whole(Path(path)) as unfinished:
            save_file({name: t.contiguous() for name, t in tensors.items()}, unfinished, header)


def load_trace(path: str | Path) -> RoutingTrace:
    """Read a trace.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no trace, of another version, or damaged.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: there is no such routing trace")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise ValueError(f"{path} is no routing trace: it lacks the header of one")
            if header.get("version") != str(VERSION):
                raise ValueError(
                    f"{path} is a routing trace of version {header.get('version')}, this is for "
                    f"version {VERSION}: record it again"
                )
            described = json.loads(header["trace"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
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
            damage = _damage(trace, described["top_k"])
    except (SafetensorError, json.JSONDecodeError, TypeError) as error:
        damage = str(error)
    except KeyError as error:
        damage = f"it lacks {error}"
    if damage:
        raise ValueError(f"{path} is damaged: {damage}. Record the trace again")
    return trace


def id_dtype(num_experts: int) -> torch.dtype:
    """The smallest dtype that holds expert ids."""
    return torch.uint8 if num_experts <= 256 else torch.int16


def _damage(trace: RoutingTrace, top_k: int) -> str:
    """How the tensors contradict the header; empty if they do not."""
    ids_LTK = trace.ids_LTK
    columns = (trace.step_T, trace.rank_T, trace.position_T)
    if ids_LTK.ndim != 3 or ids_LTK.shape != (len(trace.layers), trace.num_tokens, top_k):
        of = f"{len(trace.layers)} layers and top-{top_k}"
        return f"expert_ids of shape {tuple(ids_LTK.shape)} for {of}"
    if any(column.shape != (trace.num_tokens,) for column in columns):
        return f"step, rank and position are not all of {trace.num_tokens} tokens"
    if trace.scores_LTK is not None and trace.scores_LTK.shape != ids_LTK.shape:
        return "scores are not of the shape of expert_ids"
    if ids_LTK.dtype != id_dtype(trace.num_experts):
        return f"expert_ids are {ids_LTK.dtype}, for {trace.num_experts} experts"
    # As Python numbers: 256 does not fit into a uint8.
    if ids_LTK.numel() and not 0 <= int(ids_LTK.min()) <= int(ids_LTK.max()) < trace.num_experts:
        return f"an expert id is not below {trace.num_experts}"
    return ""
