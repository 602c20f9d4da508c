"""Every key of a run: its type, default, unit and meaning.

One dataclass per section; the string under a field is its documentation (``train.py --help`` prints it). The YAML
groups beside this file (``model/``, ``optimizer/``, ``parallel/``, ``data/``, ``log/``, ``experiment/``) only choose
values: one file is one choice, and anyone may add one. Rules on a single key are in ``__post_init__`` here, rules
that join sections in ``conf.rules``; the update rules' own sections in ``conf.optimizers``. ``conf.compose`` turns a
command line into a ``Config``; no ``DictConfig`` travels further than that. Nothing here imports torch: a wrong key
fails before it would be loaded.
"""

from dataclasses import dataclass, field
from typing import Any

from conf.checks import ConfigError, above, at_least, at_most, choice, share
from conf.optimizers import OptimizerConfig


@dataclass
class RunConfig:
    """Where the run lives and what it runs on."""

    name: str = "run"
    """Name of the run: part of the default folder, and the W&B run name."""
    dir: str | None = None
    """Run folder. Relative paths count from where the command was started. Default
    ``outputs/<date>-<time>-<name>``, decided once for all ranks. A folder that holds a run of this configuration is
    resumed."""
    device: str = "auto"
    """``cpu``, ``cuda`` or ``auto`` (cuda where there is a GPU)."""
    sample_tokens: int = 96
    """Tokens of the text sample printed and saved at the end; 0 for none."""

    def __post_init__(self) -> None:
        choice("run.device", self.device, ("auto", "cpu", "cuda"))
        at_least("run.sample_tokens", self.sample_tokens, 0)
        if not self.name or "/" in self.name:
            raise ConfigError(f"run.name={self.name!r} must be a non-empty name without '/'. Set run.dir for a path.")


@dataclass
class ModelConfig:
    """A decoder-only transformer. ``family`` decides the architecture; the other fields are its sizes."""

    family: str = "llama3"
    """``llama3`` (RMSNorm, rotary positions, grouped queries, SwiGLU) or ``gpt2`` (LayerNorm, learned positions,
    GELU)."""
    name: str = "custom"
    """Label used in logs and results."""
    dim: int = 256
    """Width of the residual stream."""
    layers: int = 4
    """Number of transformer blocks."""
    heads: int = 4
    """Query heads; ``dim`` must be a multiple of it."""
    kv_heads: int | None = None
    """Key/value heads (llama3); null means as many as ``heads``."""
    hidden: int = 1024
    """Width of the feed-forward layer."""
    vocab_size: int = 4096
    """Rows of the embedding and of the head; at least the tokenizer's vocabulary."""
    max_seq_len: int = 2048
    """Longest sequence the model is defined for, in tokens. gpt2 holds one learned position for each."""
    tied: bool = False
    """Whether embedding and head are one matrix."""
    norm_eps: float = 1e-5
    """Epsilon of the normalisation layers."""
    dropout: float = 0.0
    """Dropout on embedding, attention output and feed-forward output (gpt2 only)."""
    rope_theta: float = 500000.0
    """Base of the rotary frequencies (llama3)."""
    rope_scaling: str = "none"
    """``none``, or ``llama`` for Llama 3.1's long-context scaling of the rotary frequencies (llama3)."""
    experts: int = 1
    """Mixture-of-experts is not supported: must stay 1."""
    microbatch: int = 8
    """Sequences per rank and forward pass where neither ``microbatch`` nor a memory budget is set."""

    def __post_init__(self) -> None:
        choice("model.family", self.family, ("llama3", "gpt2"))
        choice("model.rope_scaling", self.rope_scaling, ("none", "llama"))
        for key in ("dim", "layers", "heads", "hidden", "vocab_size", "max_seq_len", "microbatch"):
            at_least(f"model.{key}", getattr(self, key), 1)
        at_least("model.kv_heads", self.kv_heads, 1)
        above("model.norm_eps", self.norm_eps, 0)
        above("model.rope_theta", self.rope_theta, 0)
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"model.dropout={self.dropout} must lie in [0, 1). Set model.dropout=0 for none.")


@dataclass
class ScheduleConfig:
    """Learning rate by optimizer step, as a factor of ``optimizer.lr``."""

    kind: str = "cosine"
    """After the warm-up: ``constant``, ``linear`` or ``cosine`` down to ``min_ratio`` at the last step, or ``wsd``
    (stable, then linear down over the last ``decay_share`` of the steps; arXiv 2404.06395)."""
    warmup: int = 10
    """Steps of linear warm-up; step k of the warm-up (from 1) has factor k / warmup."""
    min_ratio: float = 0.1
    """Floor of the factor after the warm-up."""
    decay_share: float = 0.2
    """Share of all steps in which ``wsd`` decays."""

    def __post_init__(self) -> None:
        choice("schedule.kind", self.kind, ("constant", "linear", "cosine", "wsd"))
        at_least("schedule.warmup", self.warmup, 0)
        share("schedule.min_ratio", self.min_ratio)
        share("schedule.decay_share", self.decay_share)


@dataclass
class TrainConfig:
    """The length of the run and its numerics."""

    steps: int = 100
    """Optimizer steps of the whole run, resumed parts included."""
    seq_len: int = 256
    """Tokens per sequence."""
    global_batch: int = 16
    """Sequences per optimizer step over all ranks and microbatches."""
    seed: int = 0
    """Seed of the weights, of the data order and of dropout."""
    max_norm: float = 1.0
    """Clip the global gradient norm to this; 0 does not clip (the norm is logged all the same)."""
    stop_after: int | None = None
    """Save and stop after this step as if the job had been preempted."""
    eval_interval: int = 50
    """Steps between evaluations on the held-out split; 0 evaluates at the end only."""
    eval_tokens: int | None = 262144
    """Evaluate on the first this many held-out tokens; null takes all of them."""
    precision: str = "auto"
    """Compute type: ``fp32``, ``bf16`` (fp32 masters and reductions), or ``auto``: bf16 on CUDA, fp32 on CPU."""
    compile: bool = False
    """Compile each transformer block with torch.compile."""
    deterministic: bool = False
    """Ask torch for deterministic kernels; an operation that has none is an error."""
    nonfinite: str = "skip"
    """What a non-finite loss or gradient does, decided by all ranks before the update: ``skip`` the update of that
    step (its batch is consumed, the schedule advances), ``rollback`` to the last checkpoint and go on behind the
    batches seen since then, or ``stop`` the run."""
    spike: str = "off"
    """The same for a finite loss that jumps: ``off``, ``skip``, ``rollback`` or ``stop``."""
    spike_sigmas: float = 6.0
    """A loss jumps when it lies this many standard deviations above the mean of the last 64."""
    max_skips: int = 10
    """Stop after this many skipped steps in a row."""
    max_rollbacks: int = 3
    """Stop after this many returns to one checkpoint."""
    loss_chunk: int = 1024
    """Tokens of a microbatch whose logits are in memory at a time."""
    recompute_swiglu: bool = False
    """Keep only the gate and up projections for backward, and compute silu and their product again (llama3)."""

    def __post_init__(self) -> None:
        for key in ("steps", "seq_len", "global_batch", "loss_chunk"):
            at_least(f"train.{key}", getattr(self, key), 1)
        for key in ("seed", "max_norm", "eval_interval", "max_skips", "max_rollbacks"):
            at_least(f"train.{key}", getattr(self, key), 0)
        # what a generator of torch takes
        at_most("train.seed", self.seed, 2**63 - 1)
        at_least("train.stop_after", self.stop_after, 1)
        at_least("train.eval_tokens", self.eval_tokens, 1)
        choice("train.precision", self.precision, ("auto", "fp32", "bf16"))
        choice("train.nonfinite", self.nonfinite, ("skip", "rollback", "stop"))
        choice("train.spike", self.spike, ("off", "skip", "rollback", "stop"))
        above("train.spike_sigmas", self.spike_sigmas, 0)


@dataclass
class ParallelConfig:
    """How the ranks share the work. One process is never wrapped."""

    mode: str = "fsdp"
    """``ddp`` (every rank holds all parameters), ``fsdp`` (parameters sharded over all ranks) or ``hsdp`` (sharded
    over groups of ``shard`` ranks, replicated between the groups)."""
    shard: int | None = None
    """Ranks that share one copy of the parameters under ``hsdp``; must divide the number of ranks."""
    reduce: str = "auto"
    """When gradients are reduced: ``every`` microbatch (least memory), the ``last`` of a step (least traffic, whole
    gradients held meanwhile), or ``auto``: last under ddp, every under fsdp and hsdp."""
    reshard: bool = True
    """Free the gathered parameters of a block after its forward and gather them again for its backward."""
    timeout_seconds: float = 600.0
    """How long a collective may wait for a rank before the run fails."""
    tensor: int = 1
    """Tensor parallelism is not supported: must stay 1."""
    pipeline: int = 1
    """Pipeline parallelism is not supported: must stay 1."""
    context: int = 1
    """Context parallelism is not supported: must stay 1."""

    def __post_init__(self) -> None:
        choice("parallel.mode", self.mode, ("ddp", "fsdp", "hsdp"))
        choice("parallel.reduce", self.reduce, ("auto", "every", "last"))
        at_least("parallel.shard", self.shard, 1)
        above("parallel.timeout_seconds", self.timeout_seconds, 0)
        # three years; some clocks count nanoseconds in 64 bits
        at_most("parallel.timeout_seconds", self.timeout_seconds, 10**8)


@dataclass
class MemoryConfig:
    """The memory a run may use, how near it may come to that, and when it is measured."""

    budget_gib: float | None = None
    """GiB that a rank may use of its device: parameters, gradients, optimizer state, activations, buffers. null: all
    that the GPU has. ``microbatch=auto`` and ``activation_checkpoint=auto`` need it on a CPU."""
    margin: float = 0.05
    """Share of the budget that is never planned with: what a measurement does not see."""
    headroom_gib: float = 0.0
    """GiB left free beyond that, for libraries that allocate for themselves (NCCL, cuBLAS)."""
    min_microbatch: int = 1
    """``microbatch=auto`` tries none that is smaller."""
    max_microbatch: int | None = None
    """``microbatch=auto`` tries none that is larger; null: the rank's whole batch."""
    replay: str | None = None
    """``events.jsonl`` of an earlier run, whose decisions on the microbatch are made again instead of new ones."""
    ledger_step: int = 2
    """The step of a start (from 1) whose memory is measured by owner, for ``metrics.jsonl`` and ``memory.png``; with
    ``microbatch=auto``, one after it that runs what was settled on. It takes several times as long and is left out of
    the figures of speed. 0: none."""

    def __post_init__(self) -> None:
        above("memory.budget_gib", self.budget_gib, 0)
        at_least("memory.headroom_gib", self.headroom_gib, 0)
        at_least("memory.min_microbatch", self.min_microbatch, 1)
        at_least("memory.max_microbatch", self.max_microbatch, 1)
        at_least("memory.ledger_step", self.ledger_step, 0)
        if not 0 <= self.margin < 1:
            raise ConfigError(f"memory.margin={self.margin} must lie in [0, 1). Set for example 0.05.")


@dataclass
class HealthConfig:
    """What looks after the ranks while they train."""

    hang_factor: float = 20.0
    """A step that takes this many times the median of the last ones, and ``hang_seconds``, hangs: the stacks of all
    threads are written and the run fails. 0: never."""
    hang_seconds: float = 120.0
    """No step hangs before it has taken this long."""
    self_check: bool = True
    """Try the collectives and the sum of gradients on a few numbers before the model is built."""

    def __post_init__(self) -> None:
        at_least("health.hang_factor", self.hang_factor, 0)
        above("health.hang_seconds", self.hang_seconds, 0)


@dataclass
class SourceConfig:
    """One source of a mixture."""

    path: str = ""
    """Folder of token shards written by ``python -m data.prepare``."""
    weight: float = 1.0
    """Share of the samples drawn from this source, relative to the other sources."""

    def __post_init__(self) -> None:
        above("data.sources.weight", self.weight, 0)
        if not self.path:
            raise ConfigError("data.sources has an entry without path. Give each source {path: ..., weight: ...}.")


@dataclass
class DataConfig:
    """What is trained on. ``python -m data.prepare`` reads this section and writes ``dir``, which training reads."""

    kind: str = "stdlib"
    """``stdlib`` (the source of Python's standard library), ``text`` (files under ``path``), ``hf`` (the same with a
    Hugging Face ``tokenizer.json``) or ``tokens`` (folders of shards that exist already)."""
    path: str | None = None
    """text, hf: a file or folder of .txt, .md, .py, .jsonl, .jsonl.gz or .parquet. tokens: a folder of shards."""
    dir: str = "outputs/data/stdlib"
    """Where ``data.prepare`` writes tokenizer, shards and sidecars, and where training reads them."""
    sources: list[SourceConfig] = field(default_factory=list)
    """tokens: several folders with weights instead of ``path``; all must share one tokenizer."""
    tokenizer: str | None = None
    """A SentencePiece ``.model`` or Hugging Face ``tokenizer.json`` to use; null trains a SentencePiece model."""
    vocab_size: int = 4096
    """Vocabulary of a tokenizer that is trained."""
    allow_lossy: bool = False
    """Accept a given tokenizer that does not give every text back unchanged (one that lower-cases, for example)."""
    text_field: str = "text"
    """JSONL and Parquet: the field that holds the text."""
    add_bos: bool = False
    """Put the begin marker before every document."""
    add_eos: bool = True
    """Put the end marker after every document."""
    bad_input: str = "error"
    """Undecodable bytes, broken records, cut files: ``error`` (stop, naming file and line), ``replace`` (U+FFFD for bad
    bytes, broken records skipped and counted) or ``skip`` (whole record skipped and counted)."""
    val_share: float = 0.02
    """Share of the documents held out for evaluation (whole documents, chosen by a hash of their content)."""
    shard_tokens: int = 67108864
    """Tokens per shard file."""
    workers: int | None = None
    """Processes of ``data.prepare``; null takes one per core."""
    document_mask: bool = False
    """Attend within documents only, and let no document predict the first token of the next. Needs flex attention:
    llama3 on CUDA."""
    verify: bool = False
    """Read all tokens once before training and compare their checksums."""
    prefetch: int = 4
    """Batches that the loader prepares ahead in the background."""

    def __post_init__(self) -> None:
        choice("data.kind", self.kind, ("stdlib", "text", "hf", "tokens"))
        choice("data.bad_input", self.bad_input, ("error", "replace", "skip"))
        at_least("data.vocab_size", self.vocab_size, 1)
        at_least("data.shard_tokens", self.shard_tokens, 1)
        at_least("data.workers", self.workers, 1)
        at_least("data.prefetch", self.prefetch, 1)
        if not 0 <= self.val_share < 1:
            raise ConfigError(f"data.val_share={self.val_share} must lie in [0, 1). Set for example 0.02.")


@dataclass
class CheckpointConfig:
    """When the run is saved, how many saves are kept, and what is resumed."""

    interval: int = 50
    """Steps between checkpoints; the last step is always saved. 0: none at all."""
    keep: int = 2
    """Complete checkpoints kept; older ones are deleted once a newer one is durable. 0 keeps all."""
    resume: str = "auto"
    """``auto`` (newest complete checkpoint of the run folder, if any), ``none`` (refuses a folder that has one) or a
    step number, which must be complete."""
    async_save: bool = True
    """Write in the background; training waits only for the copy."""

    def __post_init__(self) -> None:
        at_least("checkpoint.interval", self.interval, 0)
        at_least("checkpoint.keep", self.keep, 0)
        if self.resume not in ("auto", "none") and not self.resume.isdecimal():
            raise ConfigError(f"checkpoint.resume={self.resume} is not auto, none or a step number. Set one of these.")


@dataclass
class WandbConfig:
    """Weights & Biases, rank 0 only. It never blocks or ends a run."""

    mode: str = "offline"
    """``offline`` (written to the run folder, sync later), ``online`` or ``disabled``."""
    project: str = "gossamer"
    """Project name."""
    entity: str | None = None
    """Team or user; null takes the account's default."""
    group: str | None = None
    """Group shown in the interface."""
    timeout_seconds: float = 20.0
    """An online run that is not open after this long goes on offline; the end of the run waits no longer than this."""

    def __post_init__(self) -> None:
        choice("log.wandb.mode", self.mode, ("offline", "online", "disabled"))
        if not self.project or len(self.project) > 128 or set(self.project) & set("/\\#?%:"):
            raise ConfigError(
                f"log.wandb.project={self.project!r} must have 1 to 128 characters and none of / \\ # ? % :. "
                "Set for example log.wandb.project=gossamer."
            )
        above("log.wandb.timeout_seconds", self.timeout_seconds, 0)


@dataclass
class LogConfig:
    """What is recorded besides ``metrics.jsonl``, which always has one object per step."""

    interval: int = 1
    """Steps between lines of the console, W&B and TensorBoard, which then show the means of the steps between."""
    console: bool = True
    """Show the steps: a live table where stdout is a terminal, else one line each."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """Weights & Biases."""
    tensorboard: bool = False
    """Write TensorBoard event files to ``tensorboard/`` in the run folder."""
    profile_start: int = 0
    """First step of a torch profiler window; 0 for none. The trace goes to ``profile/`` in the run folder."""
    profile_steps: int = 3
    """Steps in the profiler window."""
    memory_snapshot: bool = False
    """CUDA: record allocations and write ``profile/memory_snapshot_rank<r>.pickle`` at the end (rank 0) and on any rank
    where memory runs out (view at pytorch.org/memory_viz)."""

    def __post_init__(self) -> None:
        at_least("log.interval", self.interval, 1)
        at_least("log.profile_start", self.profile_start, 0)
        at_least("log.profile_steps", self.profile_steps, 1)


@dataclass
class Config:
    """One run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    microbatch: Any = None
    """Sequences per rank and forward pass: a number, or ``auto``, the fastest that fits into the memory. A step runs
    ceil(rank batch / microbatch) of them, as even as possible. null: auto on GPUs and where ``memory.budget_gib`` is
    set, otherwise ``model.microbatch``."""
    activation_checkpoint: str = "none"
    """What is recomputed in backward instead of kept: ``none``, ``full`` (every block), ``selective`` (torchtitan's
    per-operation policy), or ``auto``: with ``microbatch=auto`` the fastest pair of both that fits."""

    def __post_init__(self) -> None:
        choice("activation_checkpoint", self.activation_checkpoint, ("none", "full", "selective", "auto"))
        number = isinstance(self.microbatch, int) and not isinstance(self.microbatch, bool) and self.microbatch >= 1
        if self.microbatch not in (None, "auto") and not number:
            raise ConfigError(
                f"microbatch={self.microbatch} must be auto or a whole number >= 1. Set for example microbatch=8."
            )
