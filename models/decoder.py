"""What Llama-3 and GPT-2 share: one forward pass from tokens to logits or to the loss.

Decided here: the call that the trainer makes, ``model(tokens, labels)``, and the attributes beside it. The modules
keep torchtitan's names (``tok_embeddings``, ``layers``, ``norm``, ``lm_head``, ``enable_weight_tying``), which its FSDP
application and activation checkpointing look for.
"""

from torch import Tensor
from torchtitan.models.common.decoder import Decoder

from conf.schema import ModelConfig
from models.loss import LossHead


class LanguageModel(Decoder):
    """A decoder that ends in ``LossHead``. Built by ``models.build.build_model``, which sets the attributes."""

    settings: ModelConfig
    """The configuration the model was built from."""
    context: int
    """Longest input in tokens."""
    document_mask: bool = False
    """Whether attention stays within documents; then ``positions`` are needed."""

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits (B, T, V) of ``tokens`` (B, T) int64, or the summed cross entropy (fp32 scalar) against ``labels``.

        ``labels`` (B, T) int64 are the next tokens; ``models.loss.IGNORE`` marks those that do not count.
        ``positions`` (B, T) int64 restart at 0 with every document; they are required by a model with
        ``document_mask`` and refused by others. ``last_only`` gives the logits of the last token, (B, 1, V).
        """
        if tokens.shape[1] > self.context:
            raise ValueError(
                f"the input has {tokens.shape[1]} tokens, the model was built for {self.context}. "
                "Cut the input, or build the model with a longer seq_len."
            )
        if (positions is not None) != self.document_mask:
            raise ValueError(
                f"positions {'are missing' if self.document_mask else 'were given'}, but the model was built with "
                f"document_mask={self.document_mask}. Pass positions exactly when it is True."
            )
        hidden = self.tok_embeddings(tokens)
        masks = self.get_attention_masks(positions) if positions is not None else None
        for layer in self.layers.values():
            hidden = layer(hidden, masks, positions)
        hidden = self.norm(hidden)
        if last_only:
            hidden = hidden[:, -1:]
        return self.lm_head(hidden, labels)


def build_head(config: ModelConfig, loss_chunk: int) -> LossHead.Config:
    """The head of either family: no bias, ``loss_chunk`` tokens of logits at a time."""
    return LossHead.Config(in_features=config.dim, out_features=config.vocab_size, chunk=loss_chunk)
