"""Pretrain a Llama-3 or GPT-2 model. Reading this file is reading a run.

    python -m data.prepare                                # once: tokenizer and token shards
    python train.py                                       # one process, CPU or one GPU
    torchrun --standalone --nproc_per_node=8 train.py model=llama3_1b parallel=fsdp
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29400 train.py \
        model=llama3_8b parallel=hsdp parallel.shard=8

``--help`` lists every key. The same command with the same ``run.dir`` resumes the run. Exit status: 0 done, 75 start
again from the last checkpoint (0 under torchrun, which takes anything else for a failure), 1 failed, 2 wrong
configuration; ``status.json`` in the run folder says the outcome in any case.
"""

import sys

from conf.command import CONFIG_STATUS, leave_with, read_command_line
from dist import env, signals

if __name__ == "__main__":
    # before torch is imported: a signal may come, and a wrong key must fail at once
    signals.note_stop_signals()
    with env.no_restart_after(CONFIG_STATUS):
        CONFIG = read_command_line("python train.py", sys.argv[1:], env.rank(), env.world_size())

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf import compose, rules
from conf.checks import ConfigError
from conf.schema import Config
from data.loader import Data, Loader, check_identity, eval_batches, open_data
from data.samples import Batch
from dist import agree, parallel, recovery
from dist.bad_steps import BadSteps, RollBack
from dist.checkpoint import Checkpointer
from dist.ending import fail
from dist.evaluation import mean_loss
from dist.group import choose_device, process_group
from dist.out_of_memory import RESTART_STATUS, is_out_of_memory, read_reports
from dist.reduce import check_presence, clip_, global_maxima, global_sums, global_token_count, squared_norm_share
from dist.run_folder import agree_run_folder, write_status
from dist.selfcheck import check_collectives
from dist.skew import measure_skew
from dist.watch import HangWatch
from memopt.build import build_optimizer, decayed_names, lr_factor, prepare_model
from memopt.ledger import TrackerMeter
from memopt.microbatch_run import AutomaticMicrobatch, Microbatch, meter_of, set_microbatch
from memopt.sharded import StateOptimizer
from memopt.subspace import is_subspace
from models.build import build_model
from models.counts import count_parameters, flops_per_token
from models.decoder import LanguageModel
from models.init import init_weights, seed_dropout
from models.names import named_parameters
from models.sample import sample
from observe.memory import memory_usage
from observe.meter import StepMeter
from observe.observer import Observer, build_observer
from observe.profiler import Profiler, build_profiler
from observe.summary import read_outcome

PROMPT_TOKENS = 16


@dataclass
class Run:
    """The parts of a run, and how far it is."""

    config: Config
    folder: Path
    device: torch.device
    data: Data
    model: LanguageModel
    optimizer: StateOptimizer
    checkpointer: Checkpointer
    loader: Loader
    meter: StepMeter
    observer: Observer
    profiler: Profiler
    microbatch: Microbatch
    """Chooses the microbatch of every step."""
    bad_steps: BadSteps
    """Knows the steps that must not be taken."""
    watch: HangWatch
    """Ends the run when a step hangs."""
    ledger: TrackerMeter
    """Measures the memory of a step by owner."""
    start: int
    """The step that was resumed; 0 for a new run."""
    step: int
    """Optimizer steps done, skipped ones included."""
    samples: int
    """Samples consumed: the position in the data."""
    saved: int
    """The step of the last checkpoint: what a rollback returns to."""
    left_out: list[list[int]]
    """First and last batch of what each rollback left behind; batch index = step + batches left out."""
    committed: int = 0
    """The last step whose update has begun: no second attempt at it may be made."""
    stopping: bool = False
    """Whether a rank was asked to stop: agreed by all."""
    doing: str = "start"
    """What the run is at, for the report of a lack of memory."""


def main(config: Config) -> int:
    """Train, resume or finish the run of ``config``; returns the exit status."""
    signals.note_stop_signals()
    try:
        device = choose_device(config.run.device)
        rules.check_device(config, device.type)
    except ConfigError as error:
        leave_with(error, env.rank())
    folder = run = None
    with process_group(device, config.parallel.timeout_seconds):
        try:
            data = agree.together(lambda: open_run_data(config), "opening the data")
            folder = agree_run_folder(config, compose.to_yaml(config))
            run = build_run(config, data, folder, device)
            outcome = train(run)
            finish(run, outcome)
        except BaseException as error:
            attempt = run and run.microbatch.attempt(run.step + 1, run.doing)
            fail(error, folder, started=run is not None, attempt=attempt)
    return 0 if outcome == "done" or env.under_torchrun() else RESTART_STATUS


def open_run_data(config: Config) -> Data:
    """What ``data.prepare`` made, checked against the model; before a folder is made for a run that cannot read it."""
    return open_data(config.data, config.train.seq_len, config.model.vocab_size, config.train.seed)


def build_run(config: Config, data: Data, folder: Path, device: torch.device) -> Run:
    """Everything that a run needs, resumed from the newest checkpoint of ``folder`` if there is one."""
    rank, world_size, settings = env.rank(), env.world_size(), config.train
    if settings.deterministic:
        env.ask_deterministic_cublas()
    torch.use_deterministic_algorithms(settings.deterministic)
    model = build_sharded_model(config, device)
    optimizer = build_optimizer(config.optimizer, named_parameters(model), model)
    optimizer.init_state()
    checkpointer = Checkpointer(folder / "checkpoints", config.checkpoint.keep, config.checkpoint.async_save)
    meta = resume(config.checkpoint.resume, checkpointer, model, optimizer, data)
    if config.checkpoint.interval:
        checkpointer.reserve(tensors_of(model, optimizer.state_tensors()))

    prefetch, pin = config.data.prefetch, device.type == "cuda"
    loader = Loader(data.train, settings.global_batch, rank, world_size, meta["samples"], prefetch, pin)
    flops = flops_per_token(config.model, settings.seq_len)
    step_tokens = settings.global_batch * settings.seq_len
    meter = StepMeter(step_tokens, world_size, flops, device, tokens=meta["tokens"])
    header = describe(config, folder, device, model)
    observer = build_observer(config, folder, rank == 0, meta["step"], header, meta.get("observer"))
    if meta["step"]:
        observer.event("resume", meta["step"])
    for note in optimizer.notes():
        observer.event("optimizer", meta["step"], **note)
    microbatch = choose_microbatch(config, folder, device, model, optimizer, observer, meta)
    ledger = meter_of(model, optimizer, device, model.lm_head)
    profiler = build_profiler(config.log, folder, rank, device)
    watch = HangWatch(config.health, folder, on_hang=partial(fail, folder=folder, started=True))
    return Run(
        config, folder, device, data, model, optimizer, checkpointer, loader, meter, observer, profiler, microbatch,
        BadSteps(settings, meta.get("losses", ())), watch, ledger, meta["step"], meta["step"], meta["samples"],
        saved=meta["step"], left_out=meta.get("left_out", []),
    )  # fmt: skip


def choose_microbatch(
    config: Config, folder: Path, device: torch.device, model: LanguageModel, optimizer: StateOptimizer,
    observer: Observer, meta: dict[str, Any],
) -> Microbatch:  # fmt: skip
    """The microbatch that was set, or what finds it; what ran out of memory in an earlier start is not tried again."""
    rows = rules.microbatch_of(config, device.type)
    if rows is not None:
        return set_microbatch(config, rows, env.world_size())
    reports = agree.on_first(lambda: read_reports(folder), "reading what has run out of memory")
    switch = partial(parallel.set_recomputation, model)
    microbatch = AutomaticMicrobatch(
        config, model, optimizer, device, meta["step"], observer.event, switch,
        whole_gradients=not parallel.reduces_every_microbatch(config.parallel),
        recovers=env.world_size() == 1 and recovery.is_exact(model, device),
    )  # fmt: skip
    microbatch.resume(meta.get("microbatch"), reports)
    return microbatch


def build_sharded_model(config: Config, device: torch.device) -> LanguageModel:
    """The model with its initial weights, sharded as ``parallel`` says."""
    settings = config.train
    low_precision = settings.precision == "bf16" or (settings.precision == "auto" and device.type == "cuda")
    compute_dtype = torch.bfloat16 if low_precision else torch.float32
    model = build_model(
        config.model, settings.seq_len, device.type, config.data.document_mask, settings.loss_chunk,
        settings.recompute_swiglu,
    )  # fmt: skip
    prepare_model(config.optimizer, model, compute_dtype)
    mesh = parallel.build_mesh(config.parallel, env.world_size(), device.type)
    if config.health.self_check:
        check_collectives(device, mesh)
    parallel.apply_parallel(
        model, mesh, config.parallel, compute_dtype=compute_dtype,
        activation_checkpoint=config.activation_checkpoint, compile_blocks=settings.compile,
    )  # fmt: skip
    init_weights(model, settings.seed, device)
    return model


def train(run: Run) -> str:
    """Train to the last step: ``done``. ``preempted`` after ``train.stop_after`` or a signal to any rank."""
    settings, interval = run.config.train, run.config.checkpoint.interval
    if env.rank() == 0:
        # a kill leaves this, not the outcome of an earlier start
        write_status(run.folder, "running", step=run.step)
    stop = min(settings.steps, settings.stop_after or settings.steps)
    run.stopping = agree.any_rank(signals.requested())
    if rules.rolls_back(run.config) and not run.step:
        save(run)
    while run.step < stop and not run.stopping:
        try:
            with run.profiler.step(run.step + 1), run.watch.step(run.step + 1):
                record = take_step(run)
        except RollBack as cause:
            roll_back(run, str(cause))
            continue
        due = settings.eval_interval and run.step % settings.eval_interval == 0 and not run.stopping
        if due or run.step == settings.steps:
            with run.meter.pause():
                record["val_loss"] = evaluate(run)
        run.observer.step(record)
        if run.microbatch.settled:
            run.observer.memory(run.ledger.of(run.microbatch.candidate), run.config.memory.budget_gib)
        if interval and (run.step == stop or run.stopping or run.step % interval == 0):
            with run.meter.pause():
                save(run)
                run.stopping = run.stopping or agree.any_rank(signals.requested())
    if run.stopping:
        run.observer.event("stop", run.step, signals=signals.received())
    return "done" if run.step >= settings.steps else "preempted"


def take_step(run: Run) -> dict[str, Any]:
    """The next step at the microbatch of the moment, its memory measured where that is asked for. Its record.

    A single process that runs out of memory tries the step again with a smaller microbatch; several ranks cannot, since
    the others are within a collective (``dist.out_of_memory``).
    """
    with run.meter.phase("data"):
        batch = next(run.loader)
    retried = False
    while True:
        run.doing = "deciding"
        watched = run.microbatch.choose() or wants_ledger(run)
        try:
            with watching(run) if watched else nullcontext(), run.microbatch.watch():
                record = train_step(run, batch)
            break
        except (RuntimeError, MemoryError) as error:
            if run.committed > run.step or not is_out_of_memory(error) or not run.microbatch.rule_out():
                raise
            run.observer.event("out of memory", run.step, doing=run.doing, error=str(error))
        # outside of the handler: what the error held is gone
        recovery.drop_gradients(run.model)
        retried = True
    ledger = run.ledger.ledgers[run.microbatch.candidate] if watched else None
    disturbed = retried or watched or record["paused_seconds"] > 0
    run.microbatch.record(record["step_seconds"], disturbed, ledger and ledger.peak_bytes)
    return record | ({"ledger": ledger.record(), "steady": False} if ledger is not None else {})


def wants_ledger(run: Run) -> bool:
    """Whether the next step is to be measured by owner: one that is settled, from ``memory.ledger_step`` on."""
    wanted, now = run.config.memory.ledger_step, run.step + 1 - run.start
    new = run.microbatch.settled and run.microbatch.candidate not in run.ledger.ledgers
    return new and 0 < wanted <= now and not run.config.train.compile


@contextmanager
def watching(run: Run) -> Iterator[None]:
    """Measure the memory of the step within."""
    with run.ledger.measure(run.step + 1, run.microbatch.candidate) as tracker:
        run.meter.beside = tracker.phase
        try:
            yield
        finally:
            run.meter.beside = None


def train_step(run: Run, batch: Batch) -> dict[str, Any]:
    """One optimizer step on a global batch. Returns its record."""
    config, meter, model = run.config, run.meter, run.model
    step, size = run.step + 1, run.microbatch.candidate
    seed_dropout(config.train.seed, step, env.rank())
    run.doing = "training"
    with meter.phase("data"):
        microbatches = batch.split(size.accumulation, run.device)
        count = global_token_count([labels for _, labels, _ in microbatches])
    summed = torch.zeros((), dtype=torch.float64, device=run.device)
    every = parallel.reduces_every_microbatch(config.parallel)
    for index, (tokens, labels, positions) in enumerate(microbatches):
        with parallel.gradient_sync(model, last=index == len(microbatches) - 1, every=every):
            with meter.phase("forward"):
                loss = model(tokens, labels, positions)
            with meter.phase("backward"):
                (loss / count).backward()
        summed += loss.detach()

    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    with meter.phase("reduce"):
        held, asked = summed.new_tensor(len(gradients)), summed.new_tensor(float(signals.requested()))
        total, squared, held_everywhere, stops = global_sums(summed, squared_norm_share(gradients), held, asked)
        check_presence(len(gradients), held_everywhere)
    step_tokens = int(count)
    loss_value, norm = total / step_tokens, math.sqrt(squared)
    lr = config.optimizer.lr * lr_factor(config.schedule, step, config.train.steps)
    with meter.phase("optimizer"):
        # every rank has the same two numbers, so every rank decides the same
        if (bad := run.bad_steps.judge(loss_value, norm)) is None:
            clip_(gradients, norm, config.train.max_norm)
            run.optimizer.set_lr(lr)
            run.committed, run.doing = step, "updating"
            run.optimizer.step()
        run.optimizer.zero_grad()
    run.step, run.samples = step, run.samples + config.train.global_batch
    # a sum over all ranks: they stop after the same step
    run.stopping = stops > 0
    if bad is not None:
        # what is being written is from before the trouble: let it become whole
        run.bad_steps.act(step, bad, before_end=run.checkpointer.wait)
        run.observer.event("skip", step, reason=bad, loss=str(loss_value), grad_norm=str(norm))
    return {
        "step": step,
        "loss": loss_value,
        "lr": lr,
        "grad_norm": norm,
        **meter.step(step_tokens),
        "data_wait_seconds": run.loader.wait_seconds,
        "skipped": bad is not None,
        "microbatch": size.rows,
        "accumulation": size.accumulation,
        **run.microbatch.gauges(),
        "memory": memory_usage(run.device),
        **(measure_ranks(run) if step % config.log.interval == 0 else {}),
    }


def measure_ranks(run: Run) -> dict[str, Any]:
    """For the record of some steps: what the optimizer says of itself, and which rank is slow. Collective."""
    return {"optimizer": run.optimizer.gauges(), "skew": measure_skew(run.device, run.loader.wait_seconds)}


def evaluate(run: Run) -> float | None:
    """Mean held-out loss per token over all ranks; None without held-out tokens, or where a signal asks to stop."""
    run.doing = "evaluating"
    if run.data.val is None:
        return None
    settings, rows = run.config.train, run.microbatch.candidate.rows
    batches = eval_batches(run.data.val, rows, env.rank(), env.world_size(), settings.eval_tokens)
    stops = signals.requested if run.step < settings.steps else lambda: False
    result = mean_loss(run.model, (batch.split(1, run.device)[0] for batch in batches), run.device, stops)
    run.stopping = run.stopping or result.interrupted
    return result.loss


def tensors_of(model: LanguageModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights and optimizer state under the names that a checkpoint has them by: all its tensors."""
    weights = {f"model.{name}": parameter.detach() for name, parameter in weights_of(model).items()}
    return weights | {f"optimizer.{name}": tensor for name, tensor in state.items()}


def weights_of(model: LanguageModel) -> dict[str, Tensor]:
    """The weights by canonical name; B of a projected layer is none."""
    return {name: parameter for name, parameter in named_parameters(model).items() if not is_subspace(name)}


def save(run: Run) -> None:
    """Write the checkpoint of this step."""
    run.doing = "saving"
    meta = {
        "step": run.step,
        "samples": run.samples,
        "tokens": run.meter.tokens,
        "data": run.data.identity,
        "observer": agree.broadcast(run.observer.state),
        "microbatch": agree.broadcast(run.microbatch.state()),
        "config": compose.flatten(run.config),
        "losses": list(run.bad_steps.losses),
        "left_out": run.left_out,
    }
    blocked = run.checkpointer.save(run.step, tensors_of(run.model, run.optimizer.state_tensors()), meta)
    run.saved = run.step
    run.observer.event("checkpoint", run.step, blocked_seconds=blocked)


def roll_back(run: Run, reason: str) -> None:
    """Weights, optimizer state and step of the last checkpoint; the position in the data stays where it is."""
    run.doing, left = "rolling back", run.step
    run.meter.step(0)  # what the step took that is left is no part of the next one
    with run.meter.pause():
        run.checkpointer.wait()
        meta = resume(str(run.saved), run.checkpointer, run.model, run.optimizer, run.data)
    run.step = run.committed = meta["step"]
    run.bad_steps.rolled_back(run.step, meta["losses"], reason)
    last = run.samples // run.config.train.global_batch - 1
    run.left_out.append([last + 1 - (left - run.step), last])
    run.meter.tokens = meta["tokens"]
    run.observer.rewind(run.step)
    run.observer.event("rollback", run.step, reason=reason, left_out=run.left_out[-1])


def resume(
    wanted: str, checkpointer: Checkpointer, model: LanguageModel, optimizer: StateOptimizer, data: Data
) -> dict[str, Any]:
    """Load the checkpoint ``wanted`` (as ``checkpoint.resume``), if any. Its plain values; zeros for a new run."""
    step = checkpointer.find(wanted)
    if step is None:
        return {"step": 0, "samples": 0, "tokens": 0}
    meta = checkpointer.read_meta(step)
    check_identity(step, meta["data"], data.identity)
    shapes = {name: entry.shape for name, entry in checkpointer.read_manifest(step).tensors.items()}
    with optimizer.loading({name.removeprefix("optimizer."): shape for name, shape in shapes.items()}) as state:
        checkpointer.load(step, tensors_of(model, state))
    return meta


def describe(config: Config, folder: Path, device: torch.device, model: LanguageModel) -> dict[str, Any]:
    """What the head of the log says."""
    parameters = weights_of(model)
    decayed = decayed_names(config.optimizer.decay, parameters)
    return {
        "folder": str(folder),
        "model": config.model.name,
        "parameters": count_parameters(config.model),
        "decayed_parameters": sum(parameters[name].numel() for name in decayed),
        "optimizer": config.optimizer.name,
        "parallel": config.parallel.mode,
        "world_size": env.world_size(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "microbatch": rules.microbatch_of(config, device.type) or "auto",
        "global_batch": config.train.global_batch,
        "seq_len": config.train.seq_len,
        "steps": config.train.steps,
    }


def finish(run: Run, outcome: str) -> None:
    """Wait for the last checkpoint, write sample, summary and plot, and say how the run ended."""
    run.watch.close()
    run.loader.close()
    run.profiler.close()
    run.checkpointer.close()
    told = agree.on_first(lambda: read_outcome(run.folder), "reading summary.json")
    if run.step > run.start or told != outcome:
        run.observer.memory(run.ledger.of(run.microbatch.candidate), run.config.memory.budget_gib)
        run.observer.finish(summarise(run, outcome))
    else:
        limits = {"train.steps": run.config.train.steps, "train.stop_after": run.config.train.stop_after}
        run.observer.event("nothing to do", run.step, **{key: limit for key, limit in limits.items() if limit})
    run.observer.close()
    if env.rank() == 0:
        write_status(run.folder, outcome, step=run.step)


def summarise(run: Run, outcome: str) -> dict[str, Any]:
    """What ``summary.json`` says beyond the records of the steps. Collective."""
    (state_bytes,) = global_sums(torch.tensor(float(run.optimizer.state_bytes()), device=run.device))
    text, ledger = None, run.ledger.of(run.microbatch.candidate)
    if outcome == "done" and run.config.run.sample_tokens:
        prompt = next(eval_batches(run.data.val or run.data.train, 1, 0, 1)).tokens[0, :PROMPT_TOKENS].tolist()
        tokenizer, count, seed = run.data.tokenizer, run.config.run.sample_tokens, run.config.train.seed
        with parallel.evaluation(run.model):
            continuation = sample(run.model, prompt, count, seed=seed, vocab_size=tokenizer.vocab_size)
        text = tokenizer.decode([*prompt, *continuation])
    return {
        "status": outcome,
        "steps": run.step,
        "parameters": count_parameters(run.config.model),
        "optimizer_state_bytes": int(state_bytes),
        "optimizer_state_bytes_per_param": state_bytes / count_parameters(run.config.model),
        "microbatch": run.microbatch.candidate.rows,
        "accumulation": run.microbatch.candidate.accumulation,
        "activation_checkpoint": run.microbatch.candidate.policy,
        **run.microbatch.throughput(),
        "memory": None if ledger is None else global_maxima(ledger.record()),
        "world_size": env.world_size(),
        "sample": text,
    }


if __name__ == "__main__":
    with env.no_restart_after(CONFIG_STATUS):
        sys.exit(main(CONFIG))
