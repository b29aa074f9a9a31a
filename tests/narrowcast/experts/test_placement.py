"""Placements: slots and ranks of experts, their file, and the refusal of what they are not for."""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from narrowcast.experts.placement import Placement, contiguous, from_parts, load_placement

LAYERS = ("layers.0.moe", "layers.10.moe")
# Slots 0 and 1 are on rank 0, and so on.
EXPERTS_LE = torch.tensor([[3, 0, 5, 1, 2, 4], [0, 1, 2, 3, 4, 5]])
PLACEMENT = Placement("qwen3 demo", LAYERS, 3, 1, "rows", EXPERTS_LE)


def assert_same(a: Placement, b: Placement) -> None:
    assert torch.equal(a.experts_LE, b.experts_LE)
    assert replace(a, experts_LE=None) == replace(b, experts_LE=None)


def test_slots_and_ranks_are_those_of_the_experts_in_them() -> None:
    assert PLACEMENT.num_experts == 6
    assert PLACEMENT.slots_LE.tolist() == [[1, 3, 4, 0, 5, 2], [0, 1, 2, 3, 4, 5]]
    assert PLACEMENT.ranks_LE.tolist() == [[0, 1, 2, 0, 2, 1], [0, 0, 1, 1, 2, 2]]


def test_slots_are_the_inverse_of_experts() -> None:
    generator = torch.Generator().manual_seed(0)
    experts_LE = torch.stack([torch.randperm(64, generator=generator) for _ in range(5)])
    placement = Placement("m", tuple("abcde"), 8, 2, "random", experts_LE)
    every_LE = torch.arange(64).repeat(5, 1)
    assert torch.equal(placement.slots_LE.gather(1, experts_LE), every_LE)
    assert torch.equal(placement.ranks_LE.gather(1, experts_LE), every_LE // 8)


def test_a_contiguous_placement_leaves_every_expert_in_its_own_slot() -> None:
    placement = contiguous("m", LAYERS, 6, 3, num_nodes=3)
    assert placement.experts_LE.tolist() == [list(range(6))] * 2
    assert (placement.method, placement.num_ranks, placement.num_nodes) == ("contiguous", 3, 3)


def test_parts_become_slots_with_experts_in_ascending_order_on_a_rank() -> None:
    assert from_parts(torch.tensor([1, 0, 2, 0, 2, 1])).tolist() == [1, 3, 0, 5, 2, 4]


def test_a_placement_is_read_as_it_was_saved(tmp_path) -> None:
    PLACEMENT.save(tmp_path / "new" / "folder" / "placement.json")
    assert_same(load_placement(tmp_path / "new" / "folder" / "placement.json"), PLACEMENT)


def test_the_file_is_json_that_lists_the_experts_of_each_layer_by_slot(tmp_path) -> None:
    PLACEMENT.save(tmp_path / "placement.json")
    text = (tmp_path / "placement.json").read_text()
    assert json.loads(text) == {
        "format": "narrowcast.placement",
        "version": 1,
        "model": "qwen3 demo",
        "num_experts": 6,
        "num_ranks": 3,
        "num_nodes": 1,
        "method": "rows",
        "experts_by_slot": dict(zip(LAYERS, EXPERTS_LE.tolist(), strict=True)),
    }
    assert '"layers.0.moe": [3, 0, 5, 1, 2, 4],\n' in text


def test_a_failed_save_leaves_the_older_file_whole(tmp_path) -> None:
    PLACEMENT.save(tmp_path / "placement.json")

    def full_disk(path: Path, text: str) -> None:
        path.write_bytes(b"{")
        raise OSError("No space left on device")

    with patch.object(Path, "write_text", full_disk), pytest.raises(OSError, match="No space"):
        replace(PLACEMENT, method="occult").save(tmp_path / "placement.json")
    assert_same(load_placement(tmp_path / "placement.json"), PLACEMENT)


HERE = {"model": "qwen3 demo", "layers": LAYERS, "num_experts": 6, "num_ranks": 3}


def test_a_placement_fits_what_it_was_made_for() -> None:
    PLACEMENT.check(**HERE)


@pytest.mark.parametrize(
    ("here", "message"),
    [
        ({"model": "qwen3 8B"}, "another model: qwen3 demo there, qwen3 8B here"),
        ({"layers": LAYERS[:1]}, "another number of MoE layers: 2 there, 1 here"),
        (
            {"layers": ("layers.0.moe", "layers.1.moe")},
            "another MoE layers: layers.0.moe, layers.10.moe there, "
            "layers.0.moe, layers.1.moe here",
        ),
        ({"num_experts": 12}, "another number of experts: 6 there, 12 here"),
        ({"num_ranks": 2}, "made for expert-parallel degree 3, and here it is 2: plan one for 2"),
    ],
)
def test_a_placement_of_something_else_is_refused_with_both_values(here, message) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        PLACEMENT.check(**{**HERE, **here})
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.json: there is no such placement"):
        load_placement(tmp_path / "gone.json")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"7", b"{}", b"\xff\xfe\x00"])
def test_a_file_of_another_kind_is_refused(tmp_path, content) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.json is no narrowcast\.placement of version 1: .*"):
        load_placement(tmp_path / "a.json")


@pytest.mark.parametrize(
    "key", ["format", "version", "model", "num_experts", "num_ranks", "num_nodes", "method"]
)
def test_a_file_that_lacks_a_key_is_refused_with_its_name(tmp_path, key) -> None:
    PLACEMENT.save(tmp_path / "a.json")
    described = json.loads((tmp_path / "a.json").read_text())
    del described[key]
    (tmp_path / "a.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=rf"a\.json is no .*: '{key}'"):
        load_placement(tmp_path / "a.json")


DOUBLE = [0, 1, 2, 3, 4, 4]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": "narrowcast.routing_trace"}, "it is narrowcast.routing_trace version 1"),
        ({"version": 2}, "it is narrowcast.placement version 2"),
        ({"experts_by_slot": {"a": DOUBLE}}, "a does not hold every expert once"),
        ({"experts_by_slot": {"a": [1, 2, 3, 4, 5, 6]}}, "a does not hold every expert once"),
        ({"experts_by_slot": {"a": [-1, 1, 2, 3, 4, 5]}}, "a does not hold every expert once"),
        ({"experts_by_slot": {"a": [0, 1, 2]}}, "its layers do not list 6 experts each"),
        ({"experts_by_slot": {"a": [0, 1], "b": [0]}}, ""),
        ({"experts_by_slot": {"a": ["x"]}}, ""),
        ({"experts_by_slot": {}}, "its layers do not list 6 experts each"),
        ({"experts_by_slot": [[0, 1, 2, 3, 4, 5]]}, ""),
        ({"num_experts": 8}, "its layers do not list 8 experts each"),
        ({"num_ranks": 4}, "6 experts, 4 ranks and 1 nodes do not divide"),
        ({"num_ranks": 0}, "(6, 0, 1) experts, ranks and nodes are not all positive"),
        ({"num_ranks": "3"}, "(6, '3', 1) experts, ranks and nodes are not all positive"),
        ({"num_ranks": -3}, "(6, -3, 1) experts, ranks and nodes are not all positive"),
        ({"num_nodes": 2}, "6 experts, 3 ranks and 2 nodes do not divide"),
    ],
)
def test_a_file_with_wrong_values_is_refused(tmp_path, changed, message) -> None:
    PLACEMENT.save(tmp_path / "a.json")
    described = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps({**described, **changed}))
    with pytest.raises(ValueError, match=r"a\.json is no .*Plan it again") as caught:
        load_placement(tmp_path / "a.json")
    assert message in str(caught.value)
