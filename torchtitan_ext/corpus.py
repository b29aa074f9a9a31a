"""A corpus of real text that is part of every Python, and a tokenizer trained on it.

The text is the documentation in ``pydoc_data.topics`` and the sources of the standard library, some
10 MB. ``python -m torchtitan_ext.corpus --output data/corpus`` writes

    train.jsonl, validation.jsonl          one document a line, {"name": ..., "text": ...}
    tokenizer.json, tokenizer_config.json  byte-level BPE, as torchtitan's ``hf_assets_path`` has it
    stamp.json                             what the files were made from

Importing this module registers the datasets ``narrowcast_corpus`` and
``narrowcast_corpus_validation`` with torchtitan; ``dataloader.dataset_path`` is the folder.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import secrets
import shutil
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data import topics
from typing import Any

import tokenizers
from datasets import Dataset, Features, Value
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

from narrowcast.util import write_text

VOCAB_SIZE = 2048
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"

# To be raised when the same Python would give other files.
_VERSION = 1
# Folders that are tests, generated tables, or not part of every installation.
_LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "__pycache__"}
    | {"pydoc_data", "lib2to3", "turtledemo", "ensurepip", "encodings", "lib-dynload"}
)
_FILES = frozenset(
    {"train.jsonl", "validation.jsonl"} | {"tokenizer.json", "tokenizer_config.json", "stamp.json"}
)
_MIN_CHARS = 200
# Longer files become several documents, so that no single file fills the first steps.
_MAX_CHARS = 16_000
_VALIDATION_PERCENT = 5
_TOKENIZER_CHARS = 3_000_000


@dataclass(frozen=True)
class Document:
    """A text. Its name is ``topics/...`` or the path in the standard library, and a part number."""

    name: str
    text: str


def make_corpus(folder: Path) -> bool:
    """Make the corpus and the tokenizer in a folder, or leave the ones made there before.

    The same Python and ``tokenizers`` give the same bytes. The folder appears whole or not at all.

    Returns:
        Whether anything was made.

    Raises:
        ValueError: the folder exists and holds something else.
        OSError: it cannot be written; the message names it.
    """
    stamp, given = _stamp(), folder
    folder = Path(os.path.realpath(folder))
    made_before = _made_before(folder)
    if made_before == stamp:
        return False
    if made_before is None and folder.exists() and not (folder.is_dir() and _is_empty(folder)):
        raise ValueError(
            f"corpus folder {given} holds files that are no corpus: give an empty or a new folder"
        )
    try:
        _make(folder, stamp)
    except OSError as error:
        raise OSError(f"corpus folder {given} cannot be made: {error}") from error
    return True


def _made_before(folder: Path) -> dict[str, Any] | None:
    """The stamp of the corpus in a folder; None if there is none, or anything beside it."""
    try:
        if {file.name for file in folder.iterdir()} <= _FILES:
            stamp = json.loads((folder / "stamp.json").read_text(encoding="utf-8"))
            return stamp if isinstance(stamp, dict) else None
    except (OSError, ValueError):
        pass
    return None


def _is_empty(folder: Path) -> bool:
    return not any(folder.iterdir())


def _make(folder: Path, stamp: dict[str, Any]) -> None:
    train, validation = split(standard_library())
    work = folder.with_name(f".{secrets.token_hex(8)}.part")
    work.mkdir(parents=True)
    try:
        _write_jsonl(work / "train.jsonl", train)
        _write_jsonl(work / "validation.jsonl", validation)
        _write_tokenizer(work, train)
        write_text(work / "stamp.json", json.dumps(stamp, indent=2) + "\n")
        if (folder / "stamp.json").is_file():
            # Moved as a whole, so that an interruption leaves no half of an old corpus.
            os.replace(folder, work / "old")
        os.replace(work, folder)
        shutil.rmtree(folder / "old", ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def standard_library() -> list[Document]:
    """The documentation topics and the sources of this Python, in parts of bounded size."""
    texts = {f"topics/{name}": text for name, text in topics.topics.items()}
    root = Path(sysconfig.get_path("stdlib"))
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if _LEFT_OUT.isdisjoint(name.parts):
            texts[name.as_posix()] = path.read_text(encoding="utf-8", errors="replace")
    return [
        Document(f"{name}#{i}", part)
        for name, text in texts.items()
        if len(text) >= _MIN_CHARS
        for i, part in enumerate(_parts(text))
    ]


def split(documents: Iterable[Document]) -> tuple[list[Document], list[Document]]:
    """Training and validation documents, divided by file, each in an order that mixes files."""
    ordered = sorted(documents, key=lambda d: _digest(d.name))
    held_out = [_digest(d.name.split("#")[0]) % 100 < _VALIDATION_PERCENT for d in ordered]
    return (
        [d for d, held in zip(ordered, held_out, strict=True) if not held],
        [d for d, held in zip(ordered, held_out, strict=True) if held],
    )


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE tokenizer of ``VOCAB_SIZE`` tokens; it adds no special tokens itself."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_documents(folder: str, *, part: str) -> Dataset:
    """One part ("train" or "validation") of a corpus, read into memory.

    Raises:
        ValueError: the folder holds no corpus.
    """
    path = Path(folder) / f"{part}.jsonl"
    if not path.is_file():
        raise ValueError(
            f"no corpus at {folder}: make it with `python -m torchtitan_ext.corpus --output "
            f"{folder}`, or set dataloader.dataset_path to the folder of one"
        )
    with path.open("rb") as lines:
        rows = [_row(path, number, line) for number, line in enumerate(lines, start=1)]
    features = Features({"name": Value("string"), "text": Value("string")})
    return Dataset.from_list(rows, features=features)


def _row(path: Path, number: int, line: bytes) -> dict[str, str]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or [type(row.get(k)) for k in ("name", "text")] != [str, str]:
        raise ValueError(
            f'{path}, line {number}: expected {{"name": "...", "text": "..."}}. Delete the folder, '
            f"and make it again with `python -m torchtitan_ext.corpus --output {path.parent}`"
        )
    return {"name": row["name"], "text": row["text"]}


def _text(sample: dict[str, Any]) -> str:
    return sample["text"]


for _name, _part in (
    ("narrowcast_corpus", "train"),
    ("narrowcast_corpus_validation", "validation"),
):
    DATASETS[_name] = DatasetConfig(
        path="data/corpus",
        loader=partial(load_documents, part=_part),
        sample_processor=_text,
    )


def _parts(text: str) -> list[str]:
    """The text in parts of at most ``_MAX_CHARS`` characters, cut at line ends where possible."""
    size = math.ceil(len(text) / math.ceil(len(text) / _MAX_CHARS))
    parts = []
    start = 0
    while start < len(text):
        end = start + size
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        parts.append(text[start:end])
        start = end
    return parts


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _stamp() -> dict[str, Any]:
    return {
        "version": _VERSION,
        "python": platform.python_version(),
        "tokenizers": tokenizers.__version__,
    }


def _write_jsonl(path: Path, documents: Iterable[Document]) -> None:
    rows = ({"name": document.name, "text": document.text} for document in documents)
    write_text(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def _write_tokenizer(folder: Path, documents: Iterable[Document]) -> None:
    sample: list[str] = []
    chars = 0
    for document in documents:
        if chars >= _TOKENIZER_CHARS:
            break
        sample.append(document.text)
        chars += len(document.text)
    write_text(folder / "tokenizer.json", train_tokenizer(sample).to_str(pretty=True))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
    }
    write_text(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


def main() -> int:
    """Command line: make the corpus unless it exists. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Make the corpus and its tokenizer.")
    parser.add_argument("--output", type=Path, default=Path("data/corpus"), help="folder to make")
    output: Path = parser.parse_args().output
    try:
        print(f"{'made' if make_corpus(output) else 'found'} corpus in {output}")
    except (OSError, ValueError) as error:
        print(f"torchtitan_ext.corpus: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
