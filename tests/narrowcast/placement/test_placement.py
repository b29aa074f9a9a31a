"""Placements: slots and ranks of experts, their file, and the refusal of what they are not for."""

import json
import math
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from narrowcast.placement.placement import Placement, contiguous, from_parts, load_placement

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

    def full_disk(path: Path, text: str, **_: object) -> None:
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


OTHER_FILES = {
    "an empty file": b"",
    "text": b"step 1: loss 7.5",
    "binary data": b"\xff\xfe\x00",
    "a file of torch.save": b"PK\x03\x04\x00\x00archive/data.pkl",
    "an .npz of numpy.savez": b"PK\x03\x04\x00\x00a.npy",
    "a safetensors file": b"\x08\0\0\0\0\0\0\0{}      ",
    "a pickle": b"\x80\x04\x95",
}


@pytest.mark.parametrize("kind", OTHER_FILES)
def test_a_file_of_another_kind_is_distinguished_from_a_damaged_one(tmp_path, kind) -> None:
    (tmp_path / "a.json").write_bytes(OTHER_FILES[kind])
    with pytest.raises(
        ValueError, match=r"a\.json is not a narrowcast\.placement of .*: "
    ) as caught:
        load_placement(tmp_path / "a.json")
    if kind != "text":  # whose message names where it is not JSON
        assert f": it is {kind}, expected the JSON that `narrowcast placement plan` writes" in str(
            caught.value
        )


def test_a_folder_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="it is a folder, expected the JSON that"):
        load_placement(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", "it is [], expected an object"),
        ("null", "it is null, expected an object"),
        ("7", "it is 7, expected an object"),
        ("{}", "it lacks 'format', expected \"narrowcast.placement\""),
        ('{"calibration": 1, "seen": 2}', "it lacks 'format' (it has calibration, seen), expected"),
        ("[" * 100_000, "nested too deeply"),
        ('{"format": "a", "format": "narrowcast.placement"}', 'it has "format" twice'),
        ('{"a": 1' + "0" * 5000 + "}", "Exceeds the limit"),
    ],
)
def test_json_of_another_shape_is_refused_with_what_is_expected(tmp_path, content, message) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(
        ValueError, match=r"a\.json is not a narrowcast\.placement of .*: "
    ) as caught:
        load_placement(tmp_path / "a.json")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        "format",
        "version",
        "model",
        "num_experts",
        "num_ranks",
        "num_nodes",
        "method",
        "experts_by_slot",
    ],
)
def test_a_file_that_lacks_a_key_is_refused_with_its_name(tmp_path, key) -> None:
    PLACEMENT.save(tmp_path / "a.json")
    described = json.loads((tmp_path / "a.json").read_text())
    del described[key]
    (tmp_path / "a.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=rf"a\.json is not a .*: it lacks '{key}' .*expected"):
        load_placement(tmp_path / "a.json")


def test_a_layer_that_is_there_twice_is_refused(tmp_path) -> None:
    PLACEMENT.save(tmp_path / "a.json")
    text = (tmp_path / "a.json").read_text().replace(LAYERS[1], LAYERS[0])
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r'it has "layers\.0\.moe" twice'):
        load_placement(tmp_path / "a.json")
    with pytest.raises(ValueError, match=r"has layer layers\.0\.moe twice"):
        replace(PLACEMENT, layers=LAYERS[:1] * 2).save(tmp_path / "b.json")
    assert not (tmp_path / "b.json").exists()


def test_what_could_not_be_read_again_is_not_written(tmp_path) -> None:
    for wrong in (
        replace(PLACEMENT, experts_LE=EXPERTS_LE + 0.5),
        replace(PLACEMENT, experts_LE=EXPERTS_LE + 1),
        replace(PLACEMENT, num_ranks=4),
        replace(PLACEMENT, model=""),
    ):
        with pytest.raises(ValueError, match="expected"):
            wrong.save(tmp_path / "a.json")
    assert not list(tmp_path.iterdir())


def of_a(*experts: object) -> dict:
    return {"experts_by_slot": {"a": list(experts)}}


INTEGER = "expected an integer from 0 to 5"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": "narrowcast.routing_trace"}, 'format is "narrowcast.routing_trace", expected'),
        ({"version": 2}, "version is 2, expected 1"),
        ({"version": True}, "version is true, expected 1"),
        ({"version": "1"}, 'version is "1", expected 1'),
        ({"model": None}, "model is null, expected the model's name"),
        ({"model": 7}, "model is 7, expected"),
        ({"model": "two\nlines"}, 'model is "two\\nlines", expected'),
        ({"method": None}, "method is null, expected"),
        (of_a(0, 1, 2, 3, 4, 4), "a has expert 4 twice, expected each of the 6 experts once"),
        (of_a(1, 2, 3, 4, 5, 6), f"a has 6 in slot 5, {INTEGER}"),
        (of_a(-1, 1, 2, 3, 4, 5), f"a has -1 in slot 0, {INTEGER}"),
        (of_a(0, 1.5, 2, 3, 4, 5), f"a has 1.5 in slot 1, {INTEGER}"),
        (of_a(0, 1.0, 2, 3, 4, 5), f"a has 1.0 in slot 1, {INTEGER}"),
        (of_a(0, True, 2, 3, 4, 5), f"a has true in slot 1, {INTEGER}"),
        (of_a(0, None, 2, 3, 4, 5), f"a has null in slot 1, {INTEGER}"),
        (of_a(0, [1], 2, 3, 4, 5), f"a has [1] in slot 1, {INTEGER}"),
        (of_a(0, math.nan, 2, 3, 4, 5), f"a has NaN in slot 1, {INTEGER}"),
        (of_a(0, 10**30, 2, 3, 4, 5), f"a has {10**30} in slot 1, {INTEGER}"),
        (of_a("x"), f'a has "x" in slot 0, {INTEGER}'),
        (of_a(0, 1, 2), "a has 3 experts, expected each of the 6 experts once"),
        ({"experts_by_slot": {"a": 3}}, "a is 3, expected a list: each of the 6 experts once"),
        ({"experts_by_slot": {}}, "experts_by_slot is {}, expected an object"),
        ({"experts_by_slot": {"": [0]}}, 'experts_by_slot is {"": [0]}, expected an object'),
        (
            {"experts_by_slot": [[0, 1, 2, 3, 4, 5]]},
            "experts_by_slot is [[0, 1, 2, 3, 4, 5]], expected",
        ),
        ({"num_experts": 9}, "layers.0.moe has 6 experts, expected each of the 9 experts once"),
        ({"num_experts": 6.0}, "num_experts is 6.0, expected an integer from 1 to"),
        ({"num_experts": 10**12}, f"num_experts is {10**12}, expected an integer from 1 to"),
        ({"num_ranks": 4}, "num_ranks is 4, expected an integer that divides num_experts, 6"),
        ({"num_ranks": 0}, "num_ranks is 0, expected an integer that divides"),
        ({"num_ranks": "3"}, 'num_ranks is "3", expected an integer that divides'),
        ({"num_ranks": -3}, "num_ranks is -3, expected an integer that divides"),
        ({"num_ranks": True}, "num_ranks is true, expected an integer that divides"),
        ({"num_nodes": 2}, "num_nodes is 2, expected an integer that divides num_ranks, 3"),
        ({"num_nodes": math.inf}, "num_nodes is Infinity, expected an integer that divides"),
    ],
)
def test_a_file_with_wrong_values_is_refused(tmp_path, changed, message) -> None:
    PLACEMENT.save(tmp_path / "a.json")
    described = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps({**described, **changed}))
    with pytest.raises(ValueError, match=r"a\.json is not a .*Plan it again") as caught:
        load_placement(tmp_path / "a.json")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_others_write_beside_it_does_no_harm(tmp_path) -> None:
    PLACEMENT.save(tmp_path / "a.json")
    described = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps({**described, "note": "of last week"}))
    assert_same(load_placement(tmp_path / "a.json"), PLACEMENT)


def test_layers_go_by_their_names_and_not_by_their_order() -> None:
    reversed_order = PLACEMENT.in_order(LAYERS[::-1])
    reversed_order.check(**HERE)
    assert reversed_order.experts_LE.tolist() == EXPERTS_LE.flip(0).tolist()
    assert_same(reversed_order.in_order(LAYERS), PLACEMENT)
