"""A checkpoint comes back bit for bit under any layout, and what does not fit or is damaged is refused.

How saves behave while the run goes on, fails or is killed is in ``test_checkpoint_faults``.
"""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Partial

from dist import shard_files
from dist.checkpoint import Checkpointer
from dist.manifest import manifest_digest
from tests.dist.states import TENSORS, Warnings, attempt, build, differing, layout, local, whole
from tests.spawn import run_ranks

META = {"samples": 80, "order": {"epoch": 1}, "lr": 0.001, "skips": [3, 4], "note": None, "done": False, "name": "é"}


def save(rank: int, world_size: int, folder: str, layout_name: str, async_save: bool) -> int:
    """Step 5, with a random state of each rank's own; the source is overwritten as soon as save returns.

    Returns the bytes that this rank copied.
    """
    saver = Checkpointer(Path(folder), 2, async_save)
    state = build(layout_name)
    state[f"rng.{rank}"] = torch.full((4,), rank, dtype=torch.uint8)
    saver.save(5, state, META)
    for tensor in state.values():
        local(tensor).zero_()
    copied = sum(copy.numel() * copy.element_size() for copy in saver._copies.values())
    saver.close()
    return copied


def load(rank: int, world_size: int, folders: list[str], layout_names: list[str]) -> dict[tuple[str, str], list[str]]:
    """For each folder and layout, the names that did not come back exactly on this rank."""
    wrong = {}
    expected = {name: build(name) for name in layout_names}
    for folder in folders:
        saver = Checkpointer(Path(folder), 2)
        assert saver.find("auto") == 5 and saver.read_meta(5) == META
        for name in layout_names:
            state = build(name, fill=9)
            saver.load(5, state, skip=["rng.*"])
            wrong[folder, name] = differing(state, expected[name])
    return wrong


# how it was saved: ranks, layout, asynchronous
SAVES = [(1, "fsdp", False), (2, "fsdp", True), (3, "ddp", True), (4, "hsdp", True), (4, "state", False)]
# how it is loaded: ranks, layouts
LOADS = [(1, ["fsdp"]), (3, ["fsdp", "ddp"]), (4, ["fsdp", "hsdp", "state", "ddp"])]


@pytest.fixture(scope="module")
def saved_each_way(tmp_path_factory) -> list[str]:
    """One folder for each of ``SAVES``."""
    folders = []
    for world_size, layout_name, async_save in SAVES:
        folders.append(str(tmp_path_factory.mktemp(f"{layout_name}{world_size}")))
        run_ranks(world_size, save, folders[-1], layout_name, async_save)
    return folders


@pytest.mark.parametrize(("world_size", "layout_names"), LOADS)
def test_every_layout_loads_into_every_other_exactly(world_size, layout_names, saved_each_way):
    outcomes = run_ranks(world_size, load, saved_each_way, layout_names)
    assert outcomes == [{(folder, name): [] for folder in saved_each_way for name in layout_names}] * world_size


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder with step 5, saved by 2 ranks."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, save, str(folder), "fsdp", False)
    return folder


def test_each_chunk_is_written_once_and_spread_over_the_ranks(tmp_path: Path):
    copied = run_ranks(3, save, str(tmp_path), "ddp", True)
    manifest = json.loads((tmp_path / "step-00000005" / "manifest.json").read_text())
    sizes = [entry["size"] for name, entry in manifest["files"].items() if name.endswith(".distcp")]
    values = sum(whole(name).numel() * whole(name).element_size() for name in TENSORS)
    # each rank's own random state and the counter besides
    assert sum(copied) == values + 3 * 4 + 8 and max(copied) < values
    assert len(sizes) == 3 and sum(sizes) < values + 20 * 4096, "replicas are not written again"


def test_a_plain_torch_program_can_read_it(saved: Path):
    state = {name: torch.zeros_like(whole(name)) for name in TENSORS}
    dcp.load(state, checkpoint_id=saved / "step-00000005", no_dist=True)
    assert all(torch.equal(state[name], whole(name)) for name in TENSORS)


def test_the_manifest_says_what_is_inside(saved: Path):
    manifest = json.loads((saved / "step-00000005" / "manifest.json").read_text())
    assert manifest["format_version"] == 1 and manifest["world_size"] == 2 and manifest["step"] == 5
    assert manifest["tensors"]["layers.0.codes"] == {"dtype": "uint8", "shape": [7, 3]}
    assert set(manifest["files"]) == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    assert {path.name for path in (saved / "step-00000005").iterdir()} == {*manifest["files"], "manifest.json"}
    assert manifest["versions"]["torch"] == torch.__version__


class _Payload:
    def __reduce__(self):
        return eval, ("1 + 1",)


def test_an_index_that_would_run_code_is_refused(tmp_path: Path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Payload()))
    with pytest.raises(pickle.UnpicklingError, match="eval"):
        shard_files.PlainReader(tmp_path).read_metadata()


def edit_manifest(path: Path, **fields) -> None:
    manifest = json.loads((path / "manifest.json").read_text()) | fields
    del manifest["sha256"]
    (path / "manifest.json").write_text(json.dumps(manifest | {"sha256": manifest_digest(manifest)}))


def change_meta(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"meta": {}}))


def replace_manifest_by_folder(path: Path) -> None:
    (path / "manifest.json").unlink()
    (path / "manifest.json").mkdir()


def truncate(path: Path, size: int) -> None:
    with path.open("r+b") as stream:
        stream.truncate(size)


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


# what is done to a whole step 10 beside step 5 -> words of the message that says why it is not used
DAMAGE = {
    "empty folder": (empty, "no manifest.json"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "no manifest.json"),
    "manifest cut off": (lambda path: truncate(path / "manifest.json", 100), "manifest.json cannot be read"),
    "manifest of nothing": (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json cannot be read"),
    "manifest changed": (change_meta, "manifest.json has another checksum"),
    "manifest unreadable": (replace_manifest_by_folder, "manifest.json cannot be read"),
    "another step": (lambda path: edit_manifest(path, step=5), "its manifest is of step 5"),
    "newer format": (lambda path: edit_manifest(path, format_version=99), "format version 99"),
    "no index": (lambda path: (path / ".metadata").unlink(), ".metadata is missing"),
    "shard cut off": (lambda path: truncate(path / "__1_0.distcp", 50), "__1_0.distcp has 50 bytes instead of"),
    "shard of no length": (lambda path: truncate(path / "__0_0.distcp", 0), "__0_0.distcp has 0 bytes instead of"),
    "shard absent": (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "bit flipped": (lambda path: flip_bit(path / "__1_0.distcp"), "__1_0.distcp has the right size but another"),
}


def resume(rank: int, world_size: int, folders: dict[str, str]) -> dict:
    """For each folder: what ``auto`` and an explicit 10 decide, and the warnings of this rank."""
    outcomes = {}
    warnings = Warnings()
    for name, folder in folders.items():
        saver = Checkpointer(Path(folder))
        warnings.messages.clear()
        outcomes[name] = saver.find("auto"), list(warnings.messages), attempt(lambda: saver.find("10"))  # noqa: B023
    return outcomes


def test_a_damaged_newest_checkpoint_is_passed_over_with_its_fault_or_refused(saved: Path, tmp_path: Path):
    folders = {}
    for name, (damage, _) in DAMAGE.items():
        folders[name] = tmp_path / name.replace(" ", "-")
        shutil.copytree(saved / "step-00000005", folders[name] / "step-00000005")
        shutil.copytree(saved / "step-00000005", folders[name] / "step-00000010")
        edit_manifest(folders[name] / "step-00000010", step=10)
        damage(folders[name] / "step-00000010")
    outcomes = run_ranks(2, resume, {name: str(folder) for name, folder in folders.items()})
    for name, (_, words) in DAMAGE.items():
        (step, warnings, explicit), (other_step, other_warnings, other_explicit) = (each[name] for each in outcomes)
        assert step == other_step == 5, name
        assert len(warnings) == 1 and words in warnings[0] and "step-00000010" in warnings[0], (name, warnings)
        assert other_warnings == [], "one rank warns"
        assert explicit == other_explicit and explicit[0] == "ConfigError", name
        assert words in explicit[1] and "complete steps: 5" in explicit[1], (name, explicit)
        assert (folders[name] / "step-00000010").is_dir(), "nothing is removed"


def test_the_undamaged_copy_is_used(saved: Path, tmp_path: Path):
    shutil.copytree(saved / "step-00000005", tmp_path / "step-00000010")
    edit_manifest(tmp_path / "step-00000010", step=10)
    assert run_ranks(2, resume, {"whole": str(tmp_path)}) == [{"whole": (10, [], 10)}] * 2


def choose(rank: int, world_size: int, folder: str, wishes: list[str]) -> list:
    saver = Checkpointer(Path(folder))
    return [attempt(lambda: saver.find(wish)) for wish in wishes]  # noqa: B023


def test_resume_settings(saved: Path, tmp_path: Path):
    fresh = run_ranks(2, choose, str(tmp_path / "new"), ["auto", "none", "7"])
    assert fresh[0] == fresh[1] and fresh[0][:2] == [None, None]
    assert "no such checkpoint (there is no complete one)" in fresh[0][2][1]
    there = run_ranks(2, choose, str(saved), ["auto", "5", "none", "7"])
    assert there[0] == there[1] and there[0][:2] == [5, 5]
    assert there[0][2][0] == "ConfigError" and "checkpoint.resume=auto to continue" in there[0][2][1]
    assert "complete steps: 5" in there[0][3][1]
    (tmp_path / "bad" / "step-00000003").mkdir(parents=True)
    all_damaged = run_ranks(1, choose, str(tmp_path / "bad"), ["auto"])[0][0]
    assert all_damaged[0] == "ConfigError" and "none of the checkpoints" in all_damaged[1]


# change to the live tensors -> words of the refusal
MISFITS = {
    "absent in the checkpoint": (lambda state: state.update(extra=torch.zeros(2)), "it lacks extra"),
    "absent in the run": (lambda state: state.pop("norm.weight"), "it has norm.weight, which this run does not have"),
    "other shape": (
        lambda state: state.update({"counts": torch.zeros(6, 3, dtype=torch.int64)}),
        "counts has shape [5, 3] there and [6, 3] here",
    ),
    "codes as floats": (
        lambda state: state.update({"layers.0.codes": torch.zeros(7, 3)}),
        "layers.0.codes is uint8 there and float32 here",
    ),
    "half precision": (
        lambda state: state.update({"layers.0.weight": torch.zeros(7, 3, dtype=torch.bfloat16)}),
        "layers.0.weight is float32 there and bfloat16 here",
    ),
}


def load_misfits(rank: int, world_size: int, folder: str) -> dict:
    saver = Checkpointer(Path(folder))
    outcomes = {}
    for name, (change, _) in MISFITS.items():
        state = build("fsdp", fill=9)
        # only one rank sees the fault; all must refuse
        if rank == 1 or name == "absent in the run":
            change(state)
        before = {key: local(tensor).clone() for key, tensor in state.items()}
        outcomes[name] = attempt(lambda: saver.load(5, state, skip=["rng.*"]))  # noqa: B023
        assert all(torch.equal(local(state[key]), before[key]) for key in state), f"{name} changed live tensors"
    outcomes["unasked"] = attempt(lambda: saver.load(5, build("fsdp"), skip=["rng.0"]))
    return outcomes


def test_a_misfit_is_named_on_all_ranks_and_changes_nothing(saved: Path):
    first, second = run_ranks(2, load_misfits, str(saved))
    assert first == second
    for name, (_, words) in MISFITS.items():
        assert first[name][0] == "AgreedConfigError" and words in first[name][1], (name, first[name])
    assert "it has rng.1, which" in first["unasked"][1]


def save_wrongly(rank: int, world_size: int, folder: str) -> dict:
    """Saves that would lose something in silence; a correct one at the end."""
    saver = Checkpointer(Path(folder), 0, True)
    mesh, _ = layout("fsdp")
    good = torch.ones(3)
    pending = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    saves = {
        "values": ({"moment": torch.full((3,), float(rank))}, {}),
        "shapes": ({"moment": torch.ones(2 + rank)}, {}),
        "one rank's DTensor": (build("fsdp") if rank == 0 else {}, {}),
        "unreduced": ({"gradient": pending}, {}),
        "meta device": ({"weight": torch.ones(3, device="meta")}, {}),
        "not plain": ({"a": good}, {"when": Path("x")}),
        "not equal": ({"a": good}, {"position": rank}),
        "good": ({"a": good}, {"position": 1}),
    }
    outcomes = {}
    for name, (tensors, meta) in saves.items():
        result = attempt(lambda: saver.save(1, tensors, meta))  # noqa: B023
        outcomes[name] = "saved" if isinstance(result, float) else result[1]
    saver.close()
    assert saver.steps() == [1]
    return outcomes


def test_a_save_that_would_lose_something_is_refused_on_all_ranks(tmp_path: Path):
    first, second = run_ranks(2, save_wrongly, str(tmp_path))
    assert first == second and first.pop("good") == "saved"
    words = {
        "values": "one name and different values on different ranks: moment",
        "shapes": "different values on different ranks: moment",
        "one rank's DTensor": "missing on ranks [1]",
        "unreduced": "gradient is placed",
        "meta device": "weight is on the meta device",
        "not plain": "meta.when is a PosixPath, not a plain value",
        "not equal": "meta differs between ranks",
    }
    for name, expected in words.items():
        assert expected in first[name], (name, first[name])


def reserve_then_save(rank: int, world_size: int, folder: str) -> tuple[bool, list[str]]:
    """Whether the save copied into the memory that was reserved, and the names that did not come back exactly."""
    saver = Checkpointer(Path(folder), async_save=True)
    saver.reserve(build("fsdp", fill=0))
    saver.wait()
    reserved = {name: copy.data_ptr() for name, copy in saver._copies.items()}
    saver.save(1, build("fsdp"), {})
    used = reserved != {} and {name: copy.data_ptr() for name, copy in saver._copies.items()} == reserved
    saver.close()
    state = build("fsdp", fill=9)
    saver.load(1, state)
    return used, differing(state, build("fsdp"))


def test_the_first_save_copies_into_what_was_reserved(tmp_path: Path):
    assert run_ranks(2, reserve_then_save, str(tmp_path)) == [(True, [])] * 2
