from pathlib import Path

import pytest

from torchtitan_ext import corpus


@pytest.fixture(scope="session")
def _corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small one, made once."""
    folder = tmp_path_factory.mktemp("corpus")
    documents = corpus.standard_library()[:200]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "standard_library", lambda: documents)
        corpus.make_corpus(folder / "corpus")
    return folder / "corpus"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, _corpus: Path) -> Path:
    """With a small corpus in it."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "corpus").symlink_to(_corpus)
    return folder
