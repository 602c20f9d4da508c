"""The layout rules of the project: who may import whom, how long a file and a function may be, what git keeps."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 500
MAX_FUNCTION = 80
MAX_TRAIN_FUNCTION = 60
# folder -> the first-party folders it may import; train.py, tests/ and the entry points below may import all of them
MAY_IMPORT = {
    "kernels": set(),
    "conf": set(),
    "dist": {"conf"},
    "data": {"conf"},
    "observe": {"conf"},
    "slurm": {"conf"},
    "models": {"conf", "kernels"},
    "memopt": {"conf", "kernels"},
    "bench": {"conf", "data", "dist", "kernels", "memopt", "models", "observe"},
}
ENTRY_POINTS = {"observe/generate.py", "memopt/plan.py", "dist/export.py"}
# parts of the plan: it runs the trainer's own model, wrapping and passes on fake tensors, and counts its FLOPs
PARTS_OF_PLAN = {f"memopt/plan_{part}.py" for part in ("arms", "estimate", "peaks", "report", "state", "trace")}
SOURCES = sorted(path for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.py"))
ALL_FILES = [ROOT / "train.py", *SOURCES, *sorted((ROOT / "tests").rglob("*.py"))]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported_modules(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


def test_there_is_something_to_check():
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == MAY_IMPORT.keys()


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_imports_point_down(path: Path):
    if relative(path) in ENTRY_POINTS | PARTS_OF_PLAN:
        return
    folder = path.relative_to(ROOT).parts[0]
    roots = {name.split(".")[0] for name in imported_modules(path)}
    wrong = (roots & MAY_IMPORT.keys()) - MAY_IMPORT[folder] - {folder}
    assert not wrong, f"{folder}/ may not import {sorted(wrong)}; see MAY_IMPORT"


@pytest.mark.parametrize("path", [path for path in ALL_FILES if "tests" not in path.parts], ids=relative)
def test_nothing_imports_an_entry_point(path: Path):
    entry_modules = {name.removesuffix(".py").replace("/", ".") for name in ENTRY_POINTS}
    assert not imported_modules(path) & entry_modules


@pytest.mark.parametrize("path", ALL_FILES, ids=relative)
def test_files_and_functions_are_short(path: Path):
    text = path.read_text()
    lines = len(text.splitlines())
    assert lines <= MAX_LINES, f"{lines} lines; split it (limit {MAX_LINES})"
    limit = MAX_TRAIN_FUNCTION if path.name == "train.py" else MAX_FUNCTION
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= limit, f"{node.name}: {length} lines (limit {limit})"


@pytest.mark.parametrize("path", ALL_FILES, ids=relative)
def test_torch_distributed_is_spelled_out(path: Path):
    """``dist`` is our package."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.asname for alias in node.names if alias.name == "torch.distributed"]
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            names = [alias.asname or alias.name for alias in node.names if alias.name == "distributed"]
        assert not [name for name in names if name], f"line {node.lineno}: write torch.distributed out"


@pytest.mark.parametrize("folder", [*MAY_IMPORT, "tests"])
def test_folder_is_not_git_ignored(folder: str):
    command = ["git", "check-ignore", "-q", f"{folder}/x.py"]
    assert subprocess.run(command, cwd=ROOT).returncode == 1, f"{folder}/ would never be committed"


def test_our_folders_are_not_shadowed():
    import dist
    import kernels

    assert Path(dist.__file__).parent == ROOT / "dist"
    assert Path(kernels.__file__).parent == ROOT / "kernels"
