"""Rules that join sections of the configuration: combinations that cannot work, each with its message.

They run before any process group, file or folder is made, without torch. What needs torch to know (is there a GPU?)
is ``check_device``, which the caller runs as soon as it knows the device.
"""

from conf.checks import ConfigError
from conf.optimizers import GefenConfig
from conf.schema import Config


def check(config: Config, world_size: int) -> None:
    """Raise ``ConfigError`` for the first combination that ``world_size`` processes cannot run."""
    _check_refused(config)
    _check_model(config)
    _check_batch(config, world_size)
    _check_memory(config, world_size)
    _check_parallel(config, world_size)
    _check_data(config)
    _check_optimizer(config)
    if config.train.stop_after is not None and config.checkpoint.interval == 0:
        raise ConfigError(
            "train.stop_after saves a checkpoint, but checkpoint.interval=0 saves none. "
            "Set checkpoint.interval, or leave out train.stop_after."
        )
    if rolls_back(config) and config.checkpoint.interval == 0:
        raise ConfigError(
            f"train.nonfinite={config.train.nonfinite}, train.spike={config.train.spike}: a rollback needs "
            "checkpoints, and checkpoint.interval=0 saves none. Set checkpoint.interval, or skip instead of rollback."
        )


def rolls_back(config: Config) -> bool:
    """Whether the run may have to return to a checkpoint."""
    return "rollback" in (config.train.nonfinite, config.train.spike)


def check_device(config: Config, device_type: str) -> None:
    """Raise ``ConfigError`` for settings that ``device_type`` ("cpu" or "cuda") does not have."""
    if isinstance(config.optimizer, GefenConfig):
        backend = config.optimizer.backend
        needed = {"numba": "cpu", "triton": "cuda"}.get(backend, device_type)
        if needed != device_type:
            raise ConfigError(
                f"optimizer.backend={backend} runs on {needed} only, and the device is {device_type}. "
                "Set optimizer.backend=auto."
            )
    if device_type == "cuda":
        return
    if microbatch_of(config, device_type) is None:
        _check_cpu_memory(config)
    if config.data.document_mask:
        raise ConfigError(
            "data.document_mask=true needs flex attention, which runs on CUDA only; the device is cpu. "
            "Set data.document_mask=false."
        )
    if config.log.memory_snapshot:
        raise ConfigError(
            "log.memory_snapshot=true records CUDA allocations; the device is cpu. Set log.memory_snapshot=false."
        )


def microbatch_of(config: Config, device_type: str) -> int | None:
    """Sequences per forward pass; None where the run chooses them (``microbatch=auto``)."""
    if config.microbatch == "auto" or config.activation_checkpoint == "auto":
        return None
    if config.microbatch is None and (device_type == "cuda" or config.memory.budget_gib is not None):
        return None
    return config.model.microbatch if config.microbatch is None else int(config.microbatch)


def _check_cpu_memory(config: Config) -> None:
    key = "microbatch" if config.microbatch == "auto" else "activation_checkpoint"
    if config.memory.budget_gib is None:
        raise ConfigError(
            f"{key}=auto needs memory.budget_gib on a CPU, whose memory is not the run's alone. "
            "Set for example memory.budget_gib=4, or microbatch to a number."
        )
    if config.train.compile:
        raise ConfigError(
            "microbatch=auto measures memory on a CPU operation by operation, which compiled code hides "
            "(train.compile=true). Set microbatch to a number, or train.compile=false."
        )


def _check_refused(config: Config) -> None:
    refused = {
        "parallel.tensor": config.parallel.tensor,
        "parallel.pipeline": config.parallel.pipeline,
        "parallel.context": config.parallel.context,
        "model.experts": config.model.experts,
    }
    for key, value in refused.items():
        if value != 1:
            raise ConfigError(
                f"{key}={value} is not supported: Gossamer shards data-parallel ranks only (ddp, fsdp, hsdp). "
                f"Set {key}=1."
            )


def _check_model(config: Config) -> None:
    model = config.model
    if model.dim % model.heads:
        raise ConfigError(
            f"model.dim={model.dim} is not a multiple of model.heads={model.heads}. "
            f"Set model.dim to {model.dim // model.heads * model.heads or model.heads} or change model.heads."
        )
    if model.family == "llama3":
        kv_heads = model.kv_heads or model.heads
        if model.heads % kv_heads:
            raise ConfigError(
                f"model.heads={model.heads} is not a multiple of model.kv_heads={kv_heads}. "
                "Set model.kv_heads to a divisor of model.heads."
            )
        if model.dim // model.heads % 2:
            raise ConfigError(
                f"model.dim={model.dim} / model.heads={model.heads} gives heads of odd width, which rotary positions "
                "cannot turn. Choose an even width per head."
            )
        if model.dropout:
            raise ConfigError(f"model.dropout={model.dropout} exists for model.family=gpt2 only. Set model.dropout=0.")
    else:
        if config.train.recompute_swiglu:
            raise ConfigError(
                "train.recompute_swiglu=true is for the SwiGLU of model.family=llama3; gpt2 has none. Set it to false."
            )
        if model.kv_heads not in (None, model.heads):
            raise ConfigError(
                f"model.kv_heads={model.kv_heads} exists for model.family=llama3 only. Set model.kv_heads=null."
            )
        if config.data.document_mask:
            raise ConfigError(
                "data.document_mask=true needs flex attention, which gpt2 does not use. Set data.document_mask=false."
            )
    if config.train.seq_len > model.max_seq_len:
        raise ConfigError(
            f"train.seq_len={config.train.seq_len} is longer than model.max_seq_len={model.max_seq_len}. "
            f"Set train.seq_len to {model.max_seq_len} or less, or raise model.max_seq_len."
        )


def _check_batch(config: Config, world_size: int) -> None:
    batch = config.train.global_batch
    if batch % world_size:
        below, above = batch // world_size * world_size, (batch // world_size + 1) * world_size
        nearest = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(
            f"train.global_batch={batch} is not a multiple of {world_size} data-parallel ranks. "
            f"Set it to {nearest}, or start another number of processes."
        )


def _check_memory(config: Config, world_size: int) -> None:
    memory, fixed = config.memory, isinstance(config.microbatch, int)
    if config.activation_checkpoint == "auto":
        if fixed:
            raise ConfigError(
                f"activation_checkpoint=auto chooses the microbatch too, and microbatch={config.microbatch} fixes it. "
                "Set microbatch=auto, or activation_checkpoint to none, selective or full."
            )
        if config.train.compile:
            raise ConfigError(
                "activation_checkpoint=auto changes what is recomputed during the run, and train.compile=true compiles "
                "one choice. Set activation_checkpoint to none, selective or full."
            )
    rank_batch = config.train.global_batch // world_size
    clamps = {
        "memory.min_microbatch": (memory.min_microbatch, 1),
        "memory.max_microbatch": (memory.max_microbatch, None),
    }
    for key, (value, default) in clamps.items():
        if fixed and value != default:
            raise ConfigError(
                f"{key}={value} bounds microbatch=auto; microbatch={config.microbatch} is fixed. Leave one out."
            )
    if fixed and memory.replay is not None:
        raise ConfigError(
            f"memory.replay={memory.replay} makes the decisions of microbatch=auto again; microbatch="
            f"{config.microbatch} is fixed. Leave one out."
        )
    if memory.min_microbatch > rank_batch:
        raise ConfigError(
            f"memory.min_microbatch={memory.min_microbatch} is above the {rank_batch} sequences that each of "
            f"{world_size} ranks has of train.global_batch={config.train.global_batch}. Set it to {rank_batch} or less."
        )
    if memory.max_microbatch is not None and memory.max_microbatch < memory.min_microbatch:
        raise ConfigError(
            f"memory.max_microbatch={memory.max_microbatch} is below memory.min_microbatch={memory.min_microbatch}. "
            "Set it to that or more."
        )


def _check_parallel(config: Config, world_size: int) -> None:
    mode, shard = config.parallel.mode, config.parallel.shard
    if mode != "hsdp":
        if shard is not None:
            raise ConfigError(
                f"parallel.shard={shard} belongs to parallel=hsdp; the run uses parallel={mode}. "
                "Set parallel=hsdp, or leave parallel.shard out."
            )
    elif shard is None:
        raise ConfigError(
            f"parallel=hsdp needs parallel.shard, the ranks that share one copy of the parameters: a divisor of "
            f"{world_size}. Set for example parallel.shard={max(1, world_size // 2)}."
        )
    elif world_size % shard:
        divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ConfigError(
            f"parallel.shard={shard} does not divide the {world_size} ranks of this run. Set it to one of {divisors}."
        )


def _check_data(config: Config) -> None:
    data = config.data
    if data.kind in ("text", "hf") and data.path is None:
        raise ConfigError(f"data={data.kind} needs data.path, the file or folder to read. Set data.path=<path>.")
    if data.kind == "hf" and data.tokenizer is None:
        raise ConfigError("data=hf needs data.tokenizer, a tokenizer.json. Set data.tokenizer=<path>, or data=text.")
    if data.kind == "tokens" and (data.path is None) == (not data.sources):
        raise ConfigError(
            "data=tokens needs either data.path, one folder of token shards, or data.sources, several with weights. "
            "Set exactly one of them."
        )
    if data.kind != "tokens" and data.sources:
        raise ConfigError(f"data.sources belongs to data=tokens; the run uses data={data.kind}. Set data=tokens.")
    if data.kind in ("stdlib", "text") and data.tokenizer is None and data.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"data.vocab_size={data.vocab_size} is larger than model.vocab_size={config.model.vocab_size}. "
            f"Set data.vocab_size={config.model.vocab_size} or raise model.vocab_size."
        )


def _check_optimizer(config: Config) -> None:
    if not isinstance(config.optimizer, GefenConfig) or config.optimizer.block is None:
        return
    block = config.optimizer.block
    # the matrices' rows have as many entries as the layer has inputs
    for columns in (config.model.dim, config.model.hidden):
        if columns % block:
            raise ConfigError(
                f"optimizer.block={block} does not divide the rows of {columns} entries that this model has. "
                f"Set a divisor of model.dim={config.model.dim} and model.hidden={config.model.hidden}."
            )
