import itertools
import json
from pathlib import Path

import pytest
import torch
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

from torchtitan_ext import corpus

FILES = {"train.jsonl", "validation.jsonl", "tokenizer.json", "tokenizer_config.json", "stamp.json"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "corpus"
    assert corpus.make_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.Config().build(tokenizer_path=str(folder))


def _documents(folder: Path, part: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / f"{part}.jsonl").read_text().splitlines()]


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus of a few documents, quickly made."""
    documents = [
        corpus.Document(f"a{i}.py#0", f"text {i} of a few words\n" * 20) for i in range(40)
    ]
    monkeypatch.setattr(corpus, "standard_library", lambda: documents)


def test_the_same_bytes_are_made_again(folder, tmp_path):
    assert corpus.make_corpus(tmp_path / "again")
    assert _contents(tmp_path / "again") == _contents(folder)
    assert _contents(folder).keys() == FILES


def test_it_holds_some_ten_megabytes_of_text(folder):
    train = sum(len(d["text"]) for d in _documents(folder, "train"))
    validation = sum(len(d["text"]) for d in _documents(folder, "validation"))
    assert 5e6 < train < 30e6
    assert 0.01 < validation / train < 0.15


def test_no_file_is_in_both_parts(folder):
    files = {
        part: {d["name"].split("#")[0] for d in _documents(folder, part)}
        for part in ("train", "validation")
    }
    assert files["train"].isdisjoint(files["validation"])
    assert any(name.startswith("topics/") for name in files["train"])
    assert "argparse.py" in files["train"] | files["validation"]


def test_documents_are_of_bounded_size_and_parts_of_one_file_are_apart(folder):
    names = [d["name"] for d in _documents(folder, "train")]
    assert all(len(d["text"]) <= 16_000 for d in _documents(folder, "train"))
    neighbours = [a.split("#")[0] == b.split("#")[0] for a, b in itertools.pairwise(names)]
    assert sum(neighbours) / len(names) < 0.02


def test_the_parts_of_a_long_file_put_together_are_the_file():
    text = "".join(f"line {i}\n" for i in range(9_000)) + "x" * 40_000
    parts = corpus._parts(text)
    assert "".join(parts) == text
    assert parts[0].endswith("\n")
    assert max(map(len, parts)) <= 16_000


def test_torchtitan_reads_the_tokenizer_with_its_special_tokens(tokenizer):
    text = "def f(x):\n\treturn 'naïve \N{SNOWMAN}'\n"
    tokens = tokenizer.encode(text, add_bos=True, add_eos=True)
    assert (tokens[0], tokens[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
    assert tokenizer.decode(tokens[1:-1]) == text
    assert tokenizer.get_vocab_size() == corpus.VOCAB_SIZE
    assert len(tokens) < len(text.encode())


@pytest.mark.parametrize("dataset", ["narrowcast_corpus", "narrowcast_corpus_validation"])
def test_torchtitan_loads_the_datasets_and_ranks_get_different_text(folder, tokenizer, dataset):
    config = HuggingFaceTextDataLoader.Config(dataset=dataset, dataset_path=str(folder))
    batches = [
        next(
            iter(
                config.build(
                    dp_world_size=2,
                    dp_rank=rank,
                    tokenizer=tokenizer,
                    seq_len=64,
                    local_batch_size=2,
                )
            )
        )
        for rank in range(2)
    ]
    for inputs, labels in batches:
        assert inputs["input"].shape == labels.shape == (2, 64)
        same_document = inputs["positions"][:, 1:] > 0
        assert torch.equal(inputs["input"][:, 1:][same_document], labels[:, :-1][same_document])
    assert not torch.equal(batches[0][0]["input"], batches[1][0]["input"])


def test_a_folder_without_a_corpus_is_named_with_the_command_that_makes_one(tmp_path):
    with pytest.raises(ValueError, match=r"no corpus at .*-m torchtitan_ext\.corpus --output"):
        corpus.load_documents(str(tmp_path), part="train")


def test_a_second_call_leaves_the_files_alone(small, tmp_path):
    assert corpus.make_corpus(tmp_path / "corpus")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "corpus").iterdir()}
    assert not corpus.make_corpus(tmp_path / "corpus")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "corpus").iterdir()} == times


def test_a_corpus_of_another_python_is_replaced(small, tmp_path):
    folder = tmp_path / "corpus"
    corpus.make_corpus(folder)
    fresh = _contents(folder)
    (folder / "stamp.json").write_text('{"python": "3.0.0"}')
    (folder / "train.jsonl").write_text("")
    assert corpus.make_corpus(folder)
    assert _contents(folder) == fresh


def test_an_interruption_leaves_nothing_behind_and_the_next_call_succeeds(
    small, tmp_path, monkeypatch
):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(corpus, "_write_tokenizer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            corpus.make_corpus(tmp_path / "corpus")
    assert list(tmp_path.iterdir()) == []
    assert corpus.make_corpus(tmp_path / "corpus")
    assert _contents(tmp_path / "corpus").keys() == FILES


def test_a_link_to_a_folder_stays_and_the_corpus_is_made_there(small, tmp_path):
    far = tmp_path / "far"
    far.mkdir()
    (tmp_path / "corpus").symlink_to("far")
    assert corpus.make_corpus(tmp_path / "corpus")
    (far / "stamp.json").write_text('{"python": "3.0.0"}')
    assert corpus.make_corpus(tmp_path / "corpus")
    assert (tmp_path / "corpus").readlink() == Path("far")
    assert _contents(far).keys() == FILES
    assert {path.name for path in tmp_path.iterdir()} == {"corpus", "far"}


def test_a_full_disk_leaves_nothing_and_names_the_folder(small, tmp_path, monkeypatch, capsys):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr("sys.argv", ["corpus", "--output", str(tmp_path / "corpus")])
    assert corpus.main() == 2
    told = capsys.readouterr().err
    assert told.startswith(f"torchtitan_ext.corpus: corpus folder {tmp_path / 'corpus'} cannot be")
    assert "No space left on device" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stamp", ["{", "[]", '{"python": "3.0.0"}'])
def test_a_folder_of_something_else_is_kept_whatever_its_stamp(small, tmp_path, stamp):
    (tmp_path / "stamp.json").write_text(stamp)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds files that are no corpus"):
        corpus.make_corpus(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b'{"name": "a"}', b'{"name": "a", "text": 1}', b"\xff", b""], ids=repr
)
def test_a_damaged_line_is_named(tmp_path, line):
    good = b'{"name": "a", "text": "b"}\n'
    (tmp_path / "train.jsonl").write_bytes(good + line + b"\n" + good)
    with pytest.raises(ValueError, match=r"train\.jsonl, line 2: expected"):
        corpus.load_documents(str(tmp_path), part="train")


def test_a_folder_with_other_files_is_refused_and_kept(small, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds files that are no corpus"):
        corpus.make_corpus(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
