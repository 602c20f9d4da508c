"""Small configurations and batches that the model tests share."""

import torch

from conf.schema import ModelConfig
from models.build import build_model
from models.decoder import LanguageModel
from models.init import init_weights
from models.loss import IGNORE

CPU = torch.device("cpu")
# 97 rows: no world size from 2 to 4 divides them, and the last rank holds fewer
VOCAB = 97

LLAMA3 = ModelConfig(
    family="llama3", dim=32, layers=2, heads=4, kv_heads=2, hidden=40, vocab_size=VOCAB, max_seq_len=64
)
LLAMA3_TIED = ModelConfig(
    family="llama3", dim=32, layers=2, heads=4, kv_heads=1, hidden=40, vocab_size=VOCAB, max_seq_len=64, tied=True
)
GPT2 = ModelConfig(family="gpt2", dim=32, layers=2, heads=4, hidden=40, vocab_size=VOCAB, max_seq_len=64, tied=True)
GPT2_DROPOUT = ModelConfig(
    family="gpt2", dim=32, layers=2, heads=4, hidden=40, vocab_size=VOCAB, max_seq_len=64, tied=True, dropout=0.1
)
ALL = {"llama3": LLAMA3, "llama3_tied": LLAMA3_TIED, "gpt2": GPT2, "gpt2_dropout": GPT2_DROPOUT}


def built(config: ModelConfig, seed: int = 0, seq_len: int = 24, loss_chunk: int = 7) -> LanguageModel:
    """The model of ``config`` with weights, on the CPU."""
    model = build_model(config, seq_len, "cpu", loss_chunk=loss_chunk)
    init_weights(model, seed, CPU)
    return model


def batch(rows: int = 12, seq_len: int = 24, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels (rows, seq_len), about a tenth of the labels ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (rows, seq_len), generator=generator)
    labels = torch.randint(0, VOCAB, (rows, seq_len), generator=generator)
    return tokens, labels.masked_fill(torch.rand(rows, seq_len, generator=generator) < 0.1, IGNORE)


def lively(model: LanguageModel) -> LanguageModel:
    """Larger block weights, biases and norms off their start: attention is sharp, and a part left out shows."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
            elif name.startswith("layers."):
                parameter *= 12
    return model
