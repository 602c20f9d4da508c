"""What every test shares: the small corpus."""

from pathlib import Path

import pytest
import torch

from tests.tiny import prepare_tokens

# many tests fork, and a child waits for ever for the OpenMP threads that its parent had
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of token shards of the small corpus."""
    return prepare_tokens(tmp_path_factory.mktemp("data"))
