"""From ``conf.schema.ModelConfig`` to a model on the meta device.

Decided here: which family a configuration builds, and what a device cannot do. Memory and values come from
``models.init.init_weights``, after the model was checkpointed, compiled and sharded.
"""

import torch

from conf.checks import ConfigError
from conf.schema import ModelConfig
from models.decoder import LanguageModel
from models.gpt2 import build_gpt2
from models.llama3 import build_llama3


def build_model(
    config: ModelConfig,
    seq_len: int,
    device_type: str,
    document_mask: bool = False,
    loss_chunk: int = 1024,
    recompute_swiglu: bool = False,
) -> LanguageModel:
    """The model of ``config`` for inputs of up to ``seq_len`` tokens, on the meta device, in fp32 and training mode.

    ``device_type`` ("cpu" or "cuda") is where it will run. ``document_mask`` keeps attention within documents.
    ``loss_chunk`` is the number of tokens whose logits the loss holds at a time. ``recompute_swiglu`` keeps less for
    backward (``models.llama3.SwiGLU``). Raises ``ConfigError``.
    """
    if seq_len > config.max_seq_len:
        raise ConfigError(
            f"train.seq_len={seq_len} is longer than model.max_seq_len={config.max_seq_len}. "
            f"Set train.seq_len to {config.max_seq_len} or less, or raise model.max_seq_len."
        )
    if document_mask and (config.family != "llama3" or device_type != "cuda"):
        raise ConfigError(
            f"data.document_mask=true needs flex attention (model.family=llama3 on cuda); this is {config.family} on "
            f"{device_type}. Set data.document_mask=false."
        )
    with torch.device("meta"):
        if config.family == "llama3":
            model: LanguageModel = build_llama3(config, seq_len, document_mask, loss_chunk, recompute_swiglu)
        else:
            model = build_gpt2(config, loss_chunk)
    model.settings = config
    # gpt2 has learned a vector for every position of its table
    model.context = seq_len if config.family == "llama3" else config.max_seq_len
    model.document_mask = document_mask
    return model
