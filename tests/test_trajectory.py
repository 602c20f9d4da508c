"""One trajectory: the loss and the weights are a function of configuration and seed, not of how the work is cut.

Background: gradient accumulation that syncs at the wrong microbatch, means of means, a norm of one shard, a data order
that depends on the number of ranks and a resume that repeats a batch all train, and all train something else. The
reference is one process with one microbatch; every other way to run must follow it, and the same way twice must agree
bit for bit.
"""

import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import train
from conf.compose import load_config
from data.loader import open_data
from tests.spawn import run_ranks
from tests.tiny import TINY, UNEVEN, losses, train_ranks

STEPS = 50
# world size, overrides
LAYOUTS = [
    (1, ["microbatch=5"]),
    (1, ["microbatch=1", "activation_checkpoint=full"]),
    (2, ["parallel=fsdp"]),
    (2, ["parallel=fsdp", "microbatch=1", "parallel.reduce=last"]),
    (2, ["parallel=ddp", "microbatch=4"]),
    (3, ["parallel=fsdp", "microbatch=3", "activation_checkpoint=selective"]),
    (3, ["parallel=ddp", "microbatch=1", "parallel.reduce=every"]),
    (4, ["parallel=fsdp", "microbatch=2", "parallel.reshard=false"]),
    (4, ["parallel=hsdp", "parallel.shard=2", "microbatch=1"]),
    (4, ["parallel=hsdp", "parallel.shard=2", "microbatch=2", "parallel.reduce=last", "activation_checkpoint=full"]),
]


@functools.cache
def reference(tokens: Path, *overrides: str):
    return train_ranks(1, tokens, f"train.steps={STEPS}", *UNEVEN, *overrides)[0]


def assert_same_trajectory(result, expected, rtol: float = 1e-5) -> None:
    torch.testing.assert_close(losses(result), losses(expected), rtol=rtol, atol=0)
    norms = [torch.tensor([record["grad_norm"] for record in run["records"]]) for run in (result, expected)]
    torch.testing.assert_close(*norms, rtol=1e-3, atol=0)
    assert [record["lr"] for record in result["records"]] == [record["lr"] for record in expected["records"]]
    assert [record["tokens"] for record in result["records"]] == [record["tokens"] for record in expected["records"]]
    for name, tensor in expected["tensors"].items():
        error = (result["tensors"][name] - tensor).double().norm()
        # a bias on keys does not change a softmax: its gradient is rounding, which adam scales up to steps of its own
        limit = 1e-3 if "wqkv.bias" in name else rtol
        assert error <= limit * tensor.double().norm() + 1e-9, name


@pytest.mark.parametrize("world_size, overrides", LAYOUTS, ids=lambda value: str(value).replace("'", ""))
def test_every_layout_follows_one_process(world_size: int, overrides: list[str], tokens: Path, tmp_path: Path):
    expected = reference(tokens, f"run.dir={tmp_path.parent / 'reference'}")
    results = train_ranks(world_size, tokens, f"train.steps={STEPS}", f"run.dir={tmp_path}", *UNEVEN, *overrides)
    assert_same_trajectory(results[0], expected)
    for other in results[1:]:
        assert all(torch.equal(tensor, other["tensors"][name]) for name, tensor in results[0]["tensors"].items())
        assert torch.equal(losses(other), losses(results[0]))
    # rank r takes rows r*B to (r+1)*B of every global batch
    ids = [sum((result["ids"][step] for result in results), []) for step in range(STEPS)]
    assert ids == expected["ids"]


@pytest.mark.parametrize(
    "optimizer, world_size, overrides",
    [
        ("gefen", 1, ["microbatch=5"]),
        ("gefen", 2, ["parallel=ddp", "microbatch=3"]),
        ("gefen", 3, ["parallel=fsdp", "microbatch=2", "activation_checkpoint=full"]),
        ("gefen", 4, ["parallel=hsdp", "parallel.shard=2"]),
        ("gefen_paper", 3, ["parallel=fsdp", "microbatch=2"]),
    ],
    ids=str,
)
def test_gefen_follows_one_process(optimizer: str, world_size: int, overrides: list[str], tokens: Path, tmp_path: Path):
    """An 8-bit momentum turns a difference of a last bit into one of a level, so that the bound holds for 20 steps."""
    settings = ["train.steps=20", f"optimizer={optimizer}"]
    expected = reference(tokens, *settings, f"run.dir={tmp_path.parent / optimizer}")
    results = train_ranks(world_size, tokens, *settings, *UNEVEN, *overrides, f"run.dir={tmp_path}")
    torch.testing.assert_close(losses(results[0]), losses(expected), rtol=1e-5, atol=0)
    for other in results[1:]:
        assert all(torch.equal(tensor, other["tensors"][name]) for name, tensor in results[0]["tensors"].items())
    for name, tensor in expected["tensors"].items():
        if name.startswith("model."):
            error = (results[0]["tensors"][name] - tensor).norm()
            assert error <= 1e-3 * tensor.norm(), name
        elif name.endswith((".period", ".step")):
            assert torch.equal(results[0]["tensors"][name], tensor), name
    assert results[0]["records"][-1]["optimizer"]["nonfinite_blocks"] == 0


def written_out(rank: int, world_size: int, tokens: str) -> list[float]:
    """The losses of TINY by a loop in plain torch: whole batch, whole logits, torch's AdamW."""
    config = load_config([*TINY, "data=tokens", f"data.path={tokens}"])
    data = open_data(config.data, config.train.seq_len, config.model.vocab_size, config.train.seed)
    model = train.build_sharded_model(config, torch.device("cpu"))
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    losses = []
    for step, factor in enumerate((0.5, 1.0, 0.868198, 0.55, 0.231802, 0.1)):
        batch = torch.from_numpy(data.train.gather(data.train.order.sample_ids(step * 12, 12)))
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * factor
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_one_process_follows_a_loop_that_is_written_out(tokens: Path, tmp_path: Path):
    (expected,) = run_ranks(1, written_out, str(tokens))
    result = train_ranks(1, tokens, "microbatch=5", f"run.dir={tmp_path}")[0]
    torch.testing.assert_close(losses(result), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)


def test_sgd_shows_the_scale_of_the_gradient(tokens: Path, tmp_path: Path):
    """Adam hides a gradient that is too large by the number of ranks; SGD does not."""
    settings = ["optimizer=sgd", "optimizer.lr=0.5", "train.max_norm=0", "microbatch=2", *UNEVEN]
    expected = train_ranks(1, tokens, *settings, f"run.dir={tmp_path / '1'}")[0]
    for world_size, mode in ((2, "fsdp"), (2, "ddp"), (3, "fsdp"), (4, "ddp")):
        result = train_ranks(
            world_size, tokens, *settings, f"parallel={mode}", f"run.dir={tmp_path / mode}{world_size}"
        )
        torch.testing.assert_close(losses(result[0]), losses(expected), rtol=1e-5, atol=0)
        for name, tensor in expected["tensors"].items():
            torch.testing.assert_close(result[0]["tensors"][name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("max_norm", [0.01, 1e9])
def test_clipping_happens_once_on_the_whole_gradient(max_norm: float, tokens: Path, tmp_path: Path):
    def run(world_size: int, *overrides: str):
        folder = tmp_path / f"{world_size}{len(overrides)}"
        settings = ["optimizer=sgd", "optimizer.lr=1", f"train.max_norm={max_norm}", f"run.dir={folder}"]
        return train_ranks(world_size, tokens, *settings, *overrides)[0]

    expected = run(1)
    for result in (run(1, "microbatch=3"), run(2, "parallel=ddp"), run(2, "parallel=fsdp", "microbatch=2")):
        assert_same_trajectory(result, expected)
    first_norm = expected["records"][0]["grad_norm"]
    assert 0.1 < first_norm < 1e3, "the norm that is logged is the one before clipping"


def test_the_same_run_twice_is_the_same_bit_for_bit(tokens: Path, tmp_path: Path):
    first, second = (
        train_ranks(2, tokens, "microbatch=2", f"run.dir={tmp_path / name}")[0] for name in ("first", "second")
    )
    assert torch.equal(losses(first), losses(second))
    assert all(torch.equal(tensor, second["tensors"][name]) for name, tensor in first["tensors"].items())


GPT2 = ["model=gpt2_debug", "model.hidden=256", "model.kv_heads=null"]


@pytest.mark.parametrize("world_size, mode", [(2, "fsdp"), (3, "ddp")])
def test_gpt2_follows_one_process(world_size: int, mode: str, tokens: Path, tmp_path: Path):
    expected = train_ranks(1, tokens, *GPT2, f"run.dir={tmp_path / '1'}")[0]
    settings = [*GPT2, f"parallel={mode}", "microbatch=2", "activation_checkpoint=full", f"run.dir={tmp_path / 'n'}"]
    assert_same_trajectory(train_ranks(world_size, tokens, *settings)[0], expected)
    names = [name for name in expected["tensors"] if name.startswith("model.")]
    assert "model.tok_embeddings.weight" in names and not any("lm_head" in name for name in names), "tied: held once"


def test_dropout_does_not_depend_on_recomputation(tokens: Path, tmp_path: Path):
    def run(policy: str):
        settings = [*GPT2, "model.dropout=0.1", f"activation_checkpoint={policy}", f"run.dir={tmp_path / policy}"]
        return train_ranks(2, tokens, *settings)[0]

    kept, full, selective = run("none"), run("full"), run("selective")
    assert torch.equal(losses(kept), losses(full)) and torch.equal(losses(kept), losses(selective))


def test_evaluation_leaves_the_training_stream_alone(tokens: Path, tmp_path: Path):
    often, never = (
        train_ranks(2, tokens, f"train.eval_interval={interval}", f"run.dir={tmp_path / str(interval)}")[0]
        for interval in (1, 0)
    )
    assert torch.equal(losses(often), losses(never)) and often["ids"] == never["ids"]
    assert all("val_loss" in record for record in often["records"])


def test_held_out_loss_is_the_same_everywhere(tokens: Path, tmp_path: Path):
    """Every token once: an odd number of windows over 1 to 4 ranks, and the same again at a learning rate of 0."""
    settings = ["optimizer.lr=0", "train.eval_interval=1", "train.steps=2", "train.eval_tokens=null"]
    results = [
        train_ranks(world_size, tokens, *settings, f"run.dir={tmp_path / str(world_size)}", "microbatch=2")[0]
        for world_size in (1, 2, 3, 4)
    ]
    values = [[record["val_loss"] for record in result["records"]] for result in results]
    assert all(value[0] == value[1] for value in values)
    torch.testing.assert_close(torch.tensor(values), torch.tensor(values[0]).expand(4, 2), rtol=1e-6, atol=0)


def note_start(run) -> dict[str, torch.Tensor]:
    """Weights and buffers before the first step, by name."""
    weights = {
        name: copy_whole(tensor) for name, tensor in train.tensors_of(run.model, run.optimizer.state_tensors()).items()
    }
    return weights | {name: buffer.clone() for name, buffer in run.model.named_buffers()}


def copy_whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@pytest.mark.parametrize("world_size", [1, 2])
def test_bf16_compute_keeps_fp32_weights_that_small_steps_move(world_size: int, tokens: Path, tmp_path: Path):
    """A norm weight of 1 in bf16 does not see a step of 1e-4; a rotary table in bf16 turns by wrong angles."""
    expected = train_ranks(1, tokens, "train.steps=1", f"run.dir={tmp_path / 'fp32'}", hook=note_start)[0]["noted"]
    settings = ["train.precision=bf16", "optimizer.lr=1e-4", "schedule.kind=constant", "microbatch=3"]
    for result in train_ranks(world_size, tokens, *settings, f"run.dir={tmp_path / 'bf16'}", hook=note_start):
        start = result["noted"]
        assert start.keys() == expected.keys() and any(tensor.is_complex() for tensor in start.values())
        assert all(torch.equal(start[name], tensor) for name, tensor in expected.items())
        for name, tensor in result["tensors"].items():
            assert tensor.dtype == torch.float32
            # a moment stays 0 in the rows of the embedding that no batch holds; the weight decays there
            moved = (tensor != start[name]).double().mean()
            assert not name.startswith("model.") or moved > 0.9, f"{name} stood still"


def freeze_first_layer(run) -> dict[str, torch.Tensor]:
    """The first layer gets no gradient in steps 1 to 3; its weights and state after them."""
    layer, step, noted = next(iter(run.model.layers.values())), run.observer.step, {}
    layer.requires_grad_(False)

    def observe(record):
        step(record)
        if record["step"] == 3:
            tensors = train.tensors_of(run.model, run.optimizer.state_tensors())
            noted.update({name: copy_whole(tensor) for name, tensor in tensors.items() if "layers.0" in name})
            layer.requires_grad_(True)

    run.observer.step = observe
    return noted


@pytest.mark.parametrize("world_size, layout", [(2, "fsdp"), (3, "ddp")])
def test_a_layer_without_gradients_keeps_weights_and_state(world_size: int, layout: str, tokens: Path, tmp_path: Path):
    """State that follows the place among the gradients of a step lands on another parameter once one is missing."""

    def run(ranks: int, *overrides: str):
        folder = f"run.dir={tmp_path / str(ranks)}"
        return train_ranks(ranks, tokens, *UNEVEN, "optimizer.weight_decay=0.1", *overrides, folder, hook=hook)[0]

    hook = freeze_first_layer
    expected, result = run(1), run(world_size, f"parallel={layout}", "microbatch=2")
    assert_same_trajectory(result, expected)
    assert set(result["noted"]) == {name for name in result["tensors"] if "layers.0" in name}
    for name, tensor in result["noted"].items():
        assert torch.equal(tensor, expected["noted"][name]) and (name.startswith("model.") or not tensor.any())
        assert not torch.equal(tensor, result["tensors"][name]), f"{name} is left alone for good"
