from pathlib import Path

import pytest

from torchtitan_ext import corpus


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a small corpus in it."""
    folder = tmp_path_factory.mktemp("training")
    documents = corpus.standard_library()[:200]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "standard_library", lambda: documents)
        corpus.make_corpus(folder / "corpus")
    return folder
