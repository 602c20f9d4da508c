"""Parameters and FLOPs of a configuration, exact, from its sizes alone.

Decided here: the convention by which utilisation is stated. A matrix product of (a, b) by (b, c) is 2abc FLOPs, the
backward pass costs twice the forward pass. The head counts, the embedding look-up does not, nor do normalisation,
rotary positions, softmax and bias additions. Attention scores and values are counted for half of the T x T square
(causal). What activation checkpointing computes again is not counted.
"""

from conf.schema import ModelConfig


def count_parameters(config: ModelConfig) -> int:
    """Parameters of the model, a tied matrix once: the sum of ``numel`` over its parameters."""
    embeddings = config.vocab_size * config.dim * (1 if config.tied else 2)
    matrices = config.layers * sum(_block_matrices(config))
    if config.family == "llama3":
        return embeddings + matrices + (2 * config.layers + 1) * config.dim
    # gpt2: position table, a bias per matrix row, weight and bias per norm
    embeddings += config.max_seq_len * config.dim
    biases = config.layers * (3 * config.dim + config.dim + config.hidden + config.dim)
    return embeddings + matrices + biases + (2 * config.layers + 1) * 2 * config.dim


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """FLOPs of forward and backward per token in sequences of ``seq_len`` tokens, by the convention above."""
    matrices = config.layers * sum(_block_matrices(config)) + config.vocab_size * config.dim
    # forward, whole square: 2 products (scores, values) of 2 * seq_len * dim; half of it is causal.
    # grouped queries share keys and values but every query head has its own scores
    attention = config.layers * 2 * seq_len * config.dim
    return 3 * (2 * matrices + attention)


def _block_matrices(config: ModelConfig) -> tuple[int, ...]:
    """Elements of the weight matrices of one block: queries, keys and values; output; feed-forward."""
    kv_heads = config.kv_heads or config.heads
    kv_dim = config.dim // config.heads * kv_heads
    feed_forward = (3 if config.family == "llama3" else 2) * config.dim * config.hidden
    return config.dim * (config.dim + 2 * kv_dim), config.dim * config.dim, feed_forward
