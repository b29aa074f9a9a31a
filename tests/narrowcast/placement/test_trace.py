"""Files of routing traces: whole, self-describing, and refused where they are not."""

import gzip
import json
import math
import os
from dataclasses import fields, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from narrowcast.placement import trace
from narrowcast.placement.placement import contiguous
from narrowcast.placement.trace import RoutingTrace, load_trace


def make(num_experts: int = 8, scores: bool = True, tokens: int = 10) -> RoutingTrace:
    generator = torch.Generator().manual_seed(0)
    score_LTK, ids_LTK = torch.rand(2, tokens, num_experts, generator=generator).topk(3)
    ids_LTK[0, 0, 0] = num_experts - 1
    token_T = torch.arange(tokens)
    return RoutingTrace(
        model="qwen3 demo",
        layers=("layers.0.moe", "layers.2.moe"),
        num_experts=num_experts,
        num_ranks=4,
        ids_LTK=ids_LTK,
        step_T=token_T // 5 + 1,
        rank_T=token_T % 5 // 3,
        position_T=token_T * 7,
        scores_LTK=score_LTK if scores else None,
        num_groups=4 if scores and num_experts % 4 == 0 else None,
        num_limited_groups=2 if scores and num_experts % 4 == 0 else None,
    )


def assert_same(a: RoutingTrace, b: RoutingTrace) -> None:
    for name in (field.name for field in fields(RoutingTrace)):
        x, y = getattr(a, name), getattr(b, name)
        if isinstance(x, torch.Tensor):
            assert torch.equal(x.to(y.dtype), y), name
        else:
            assert x == y, name


@pytest.mark.parametrize("scores", [True, False])
@pytest.mark.parametrize(
    ("num_experts", "dtype"), [(8, torch.uint8), (256, torch.uint8), (257, torch.int16)]
)
def test_a_trace_is_read_as_it_was_saved(tmp_path, num_experts, dtype, scores) -> None:
    trace = make(num_experts, scores)
    trace.save(tmp_path / "new" / "folder" / "trace")
    loaded = load_trace(tmp_path / "new" / "folder" / "trace")
    assert_same(trace, loaded)
    assert loaded.ids_LTK.dtype == dtype
    assert loaded.num_tokens == 10
    assert loaded.top_k == 3
    loaded.tokens(slice(2, 7)).save(tmp_path / "part")
    assert_same(trace.tokens(slice(2, 7)), load_trace(tmp_path / "part"))


def test_safetensors_alone_reads_tensors_and_header(tmp_path) -> None:
    trace = make()
    trace.save(tmp_path / "trace")
    tensors = load_file(tmp_path / "trace")
    assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} == {
        "expert_ids": (torch.uint8, (2, 10, 3)),
        "step": (torch.int32, (10,)),
        "rank": (torch.int32, (10,)),
        "position": (torch.int32, (10,)),
        "scores": (torch.float32, (2, 10, 3)),
    }
    assert torch.equal(tensors["expert_ids"].long(), trace.ids_LTK)
    assert torch.equal(tensors["position"].long(), trace.position_T)
    assert torch.equal(tensors["scores"], trace.scores_LTK)
    with safe_open(tmp_path / "trace", framework="pt") as file:
        header = file.metadata()
    assert (header["format"], header["version"]) == ("narrowcast.routing_trace", "1")
    assert json.loads(header["trace"]) == {
        "model": "qwen3 demo",
        "layers": ["layers.0.moe", "layers.2.moe"],
        "num_experts": 8,
        "top_k": 3,
        "num_ranks": 4,
        "num_groups": 4,
        "num_limited_groups": 2,
    }


def test_a_failed_save_leaves_the_older_file_whole(tmp_path) -> None:
    make(tokens=4).save(tmp_path / "trace")

    def full_disk(tensors: dict, path: Path, header: dict) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("No space left on device")

    with patch.object(trace, "save_file", full_disk), pytest.raises(OSError, match="No space"):
        make().save(tmp_path / "trace")
    assert_same(make(tokens=4), load_trace(tmp_path / "trace"))


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.safetensors: there is no such"):
        load_trace(tmp_path / "gone.safetensors")


def rewritten(
    path: Path, tensors: dict | None = None, header: dict | None = None, num_experts: int = 8
) -> Path:
    """A good trace, saved again with some tensors and parts of the header replaced."""
    make(num_experts).save(path)
    with safe_open(path, framework="pt") as file:
        header_before = file.metadata()
    save_file({**load_file(path), **(tensors or {})}, path, {**header_before, **(header or {})})
    return path


def test_another_safetensors_file_is_refused(tmp_path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "model")
    with pytest.raises(ValueError, match="model is not a routing trace"):
        load_trace(tmp_path / "model")


def test_another_version_is_refused_with_both_named(tmp_path) -> None:
    path = rewritten(tmp_path / "trace", header={"version": "7"})
    with pytest.raises(
        ValueError, match="of version 7, but this release reads version 1: record it again"
    ):
        load_trace(path)


def _torch_save(path: Path) -> None:
    torch.save({"expert_ids": torch.zeros(3)}, path)


def _old_torch_save(path: Path) -> None:
    torch.save({"expert_ids": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)


OTHER_FILES = {
    "a folder": Path.mkdir,
    "an empty file": Path.touch,
    "text": lambda path: path.write_text("step,rank\n1,2\n" * 1000 + "é" * 5000),
    "JSON of another kind": lambda path: path.write_text('{"a": 1}'),
    "a list in JSON": lambda path: path.write_text("[1, 2]"),
    'JSON of format "narrowcast.placement"': lambda path: contiguous("m", ("a",), 4, 2).save(path),
    "a pickle": _old_torch_save,
    "a file of torch.save": _torch_save,
    "an .npz of numpy.savez": lambda path: np.savez(path.open("wb"), a=np.zeros(3)),
    "an array of numpy.save": lambda path: np.save(path.open("wb"), np.zeros(3)),
    "a gzip archive": lambda path: path.write_bytes(gzip.compress(b"text")),
    "binary data": lambda path: path.write_bytes(b"\xff" * 100),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a named pipe": os.mkfifo,
}


@pytest.mark.parametrize("kind", OTHER_FILES)
def test_a_file_of_another_kind_is_distinguished_from_a_damaged_one(tmp_path, kind) -> None:
    OTHER_FILES[kind](tmp_path / "trace")
    with pytest.raises(ValueError, match="trace is not a routing trace: ") as caught:
        load_trace(tmp_path / "trace")
    assert f": it is {kind}, expected the safetensors file that [narrow" in str(caught.value)


def test_a_file_cut_anywhere_is_refused(tmp_path) -> None:
    make().save(tmp_path / "trace")
    content = (tmp_path / "trace").read_bytes()
    for length in (1, 8, 9, 100, len(content) // 2, len(content) - 1):
        (tmp_path / "cut").write_bytes(content[:length])
        # Of a safetensors file, the first eight bytes say nothing.
        with pytest.raises(ValueError, match="cut is damaged" if length > 8 else "cut is no"):
            load_trace(tmp_path / "cut")


WRONG_TENSORS = {
    "float ids": {"expert_ids": torch.zeros(2, 10, 3)},
    "wider ids": {"expert_ids": torch.zeros(2, 10, 3, dtype=torch.int32)},
    "no tokens": {
        "expert_ids": torch.zeros(2, 0, 3, dtype=torch.uint8),
        "scores": torch.zeros(2, 0, 3),
        **dict.fromkeys(("step", "rank", "position"), torch.zeros(0, dtype=torch.int32)),
    },
    "float steps": {"step": torch.ones(10)},
    "boolean ranks": {"rank": torch.zeros(10, dtype=torch.bool)},
    "step 0": {"step": torch.zeros(10, dtype=torch.int32)},
    "steps that descend": {"step": torch.arange(10, 0, -1, dtype=torch.int32)},
    "a negative rank": {"rank": torch.full((10,), -1, dtype=torch.int32)},
    "a negative position": {"position": torch.arange(-1, 9, dtype=torch.int32)},
    "scores that are no numbers": {"scores": torch.full((2, 10, 3), math.nan)},
    "integer scores": {"scores": torch.zeros(2, 10, 3, dtype=torch.int32)},
    "an id too large": {"expert_ids": torch.full((2, 10, 3), 8, dtype=torch.uint8)},
    "another number of layers": {"expert_ids": torch.zeros(3, 10, 3, dtype=torch.uint8)},
    "another number of dimensions": {"expert_ids": torch.zeros(2, 10, dtype=torch.uint8)},
    "another k": {
        "expert_ids": torch.zeros(2, 10, 4, dtype=torch.uint8),
        "scores": torch.zeros(2, 10, 4),
    },
    "fewer steps": {"step": torch.zeros(9)},
    "fewer ranks": {"rank": torch.zeros(9)},
    "more positions": {"position": torch.zeros(11)},
    "scores of another shape": {"scores": torch.zeros(2, 10, 2)},
}


@pytest.mark.parametrize("what", WRONG_TENSORS)
def test_tensors_that_contradict_the_header_are_refused(tmp_path, what) -> None:
    path = rewritten(tmp_path / "trace", tensors=WRONG_TENSORS[what])
    with pytest.raises(ValueError, match=r"trace is damaged: .*Record the trace again") as caught:
        load_trace(path)
    assert what == "no tokens" or "expected " in str(caught.value)


@pytest.mark.parametrize("wrong", [-1, 300])
def test_one_id_out_of_range_is_refused(tmp_path, wrong) -> None:
    ids_LTK = torch.arange(3, dtype=torch.int16).repeat(2, 10, 1)
    ids_LTK[1, 4, 2] = wrong
    path = rewritten(tmp_path / "trace", {"expert_ids": ids_LTK}, num_experts=300)
    message = rf"token 4 in layers\.2\.moe name expert {wrong}, expected an integer from 0 to 299"
    with pytest.raises(ValueError, match=rf"trace is damaged: expert_ids of {message}"):
        load_trace(path)


@pytest.mark.parametrize(("first", "second"), [(0, 1), (0, 2), (1, 2)])
def test_an_expert_twice_in_a_token_is_refused(tmp_path, first: int, second: int) -> None:
    ids_LTK = torch.arange(3, dtype=torch.uint8).repeat(2, 10, 1)
    ids_LTK[1, 9, [first, second]] = 7
    path = rewritten(tmp_path / "trace", {"expert_ids": ids_LTK})
    message = r"token 9 in layers\.2\.moe name expert 7 twice, expected 3 different experts"
    with pytest.raises(ValueError, match=f"trace is damaged: expert_ids of {message}"):
        load_trace(path)


LAYERS = "expected a list of names, none of them twice"
TO_8 = "expected an integer from 1 to 8"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": None}, "model is null, expected the model's name"),
        ({"model": ["qwen3"]}, 'model is ["qwen3"], expected the model'),
        ({"layers": ["a", "a"]}, f'layers is ["a", "a"], {LAYERS}'),
        ({"layers": "ab"}, f'layers is "ab", {LAYERS}'),
        ({"layers": ["a", 1]}, f'layers is ["a", 1], {LAYERS}'),
        ({"layers": ["a", ["b"]]}, f'layers is ["a", ["b"]], {LAYERS}'),
        ({"layers": ["a", "b\n"]}, f'layers is ["a", "b\\n"], {LAYERS}'),
        ({"layers": []}, f"layers is [], {LAYERS}"),
        ({"layers": ["a"]}, "expected torch.uint8 of shape (1, 10, 3)"),
        ({"num_experts": 0}, "num_experts is 0, expected an integer from 1 to 32768"),
        ({"num_experts": 10**9}, f"num_experts is {10**9}, expected an integer from 1 to 32768"),
        ({"num_experts": 8.0}, "num_experts is 8.0, expected an integer"),
        ({"num_experts": None}, "num_experts is null, expected an integer"),
        ({"top_k": 0}, f"top_k is 0, {TO_8}"),
        ({"top_k": 9}, f"top_k is 9, {TO_8}"),
        ({"top_k": "3"}, f'top_k is "3", {TO_8}'),
        ({"num_ranks": "x"}, f'num_ranks is "x", {TO_8}'),
        ({"num_ranks": 0}, f"num_ranks is 0, {TO_8}"),
        ({"num_ranks": -1}, f"num_ranks is -1, {TO_8}"),
        ({"num_ranks": True}, f"num_ranks is true, {TO_8}"),
        ({"num_ranks": 10**30}, f"num_ranks is {10**30}, {TO_8}"),
        ({"num_ranks": math.nan}, f"num_ranks is NaN, {TO_8}"),
        (
            {"num_groups": 3},
            "num_groups is 3, expected null or an integer that divides num_experts",
        ),
        ({"num_groups": 0}, "num_groups is 0, expected null or an integer that divides"),
        ({"num_groups": "4"}, 'num_groups is "4", expected null or an integer that divides'),
        ({"num_groups": 1.5}, "num_groups is 1.5, expected null or an integer that divides"),
        (
            {"num_limited_groups": 5},
            "num_limited_groups is 5, expected null or an integer from 1 to",
        ),
        ({"num_groups": None}, "num_limited_groups is 2, expected null or an integer from 1 to"),
    ],
)
def test_every_field_of_the_header_must_be_what_is_due(tmp_path, changed, message) -> None:
    path = tmp_path / "trace"
    make().save(path)
    with safe_open(path, framework="pt") as file:
        described = {**json.loads(file.metadata()["trace"]), **changed}
    rewritten(path, header={"trace": json.dumps(described)})
    with pytest.raises(ValueError, match="trace is damaged: ") as caught:
        load_trace(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model", "layers", "num_experts", "top_k", "num_ranks"])
def test_a_header_that_lacks_a_field_is_refused_with_its_name(tmp_path, name) -> None:
    path = tmp_path / "trace"
    make().save(path)
    with safe_open(path, framework="pt") as file:
        described = json.loads(file.metadata()["trace"])
    del described[name]
    rewritten(path, header={"trace": json.dumps(described)})
    with pytest.raises(ValueError, match=f"trace is damaged: it lacks '{name}'"):
        load_trace(path)


def test_what_others_write_beside_it_does_no_harm(tmp_path) -> None:
    path = rewritten(tmp_path / "trace", {"note": torch.ones(3)}, {"note": "of last week"})
    assert_same(load_trace(path), make())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers": ("a", "a")}, "layers is"),
        ({"num_ranks": 0}, "num_ranks is 0"),
        ({"num_groups": 3}, "num_groups is 3"),
        ({"ids_LTK": make().ids_LTK * 0}, "name expert 0 twice"),
        ({"ids_LTK": make().ids_LTK + 256}, "expected an integer from 0 to 7"),
        ({"step_T": torch.zeros(10, dtype=torch.int64)}, "step of token 0 is 0"),
    ],
)
def test_what_could_not_be_read_again_is_not_written(tmp_path, changed, message) -> None:
    with pytest.raises(ValueError, match=r"trace is not written: .*expected ") as caught:
        replace(make(), **changed).save(tmp_path / "trace")
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("described", ["{", "{}", "[]", "null", '{"model": "m", "layers": 2}'])
def test_a_damaged_header_is_refused(tmp_path, described) -> None:
    path = rewritten(tmp_path / "trace", header={"trace": described})
    with pytest.raises(ValueError, match=r"trace is damaged: .*Record the trace again"):
        load_trace(path)


def test_a_file_without_a_tensor_is_refused(tmp_path) -> None:
    path = rewritten(tmp_path / "trace")
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    tensors = load_file(path)
    del tensors["rank"]
    save_file(tensors, path, header)
    with pytest.raises(ValueError, match=r"trace is damaged: .*rank"):
        load_trace(path)


def test_a_split_keeps_order_and_every_token() -> None:
    trace = make()
    fitted, held_out = trace.split(0.3)
    assert (fitted.num_tokens, held_out.num_tokens) == (7, 3)
    assert_same(trace.tokens(slice(0, 7)), fitted)
    assert_same(trace.tokens(slice(7, 10)), held_out)
    positions = [fitted.position_T, held_out.position_T]
    assert torch.equal(torch.cat(positions), trace.position_T)
    assert torch.equal(torch.cat([fitted.scores_LTK, held_out.scores_LTK], dim=1), trace.scores_LTK)
    assert [part.num_tokens for part in trace.split(0)] == [10, 0]


def test_chosen_tokens_keep_all_that_was_recorded_of_them() -> None:
    trace, index_T = make(), torch.tensor([9, 0, 4])
    chosen = trace.tokens(index_T)
    assert chosen.position_T.tolist() == [63, 0, 28]
    assert chosen.step_T.tolist() == [2, 1, 1]
    assert chosen.rank_T.tolist() == [1, 0, 1]
    assert torch.equal(chosen.ids_LTK, trace.ids_LTK[:, index_T])
    assert torch.equal(chosen.scores_LTK, trace.scores_LTK[:, index_T])
    assert replace(trace, scores_LTK=None).tokens(index_T).scores_LTK is None
