"""What every test shares: the small corpus."""

from pathlib import Path

import pytest

from tests.tiny import prepare_tokens


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of token shards of the small corpus."""
    return prepare_tokens(tmp_path_factory.mktemp("data"))
