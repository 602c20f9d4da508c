"""Background: the guarantees of RSO rest on E[P P^T] = I and P^T P = (in / r) I, and a checkpoint holds no P: a sampler
that changes, or two ranks that draw differently, train in another subspace and nothing says so."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memopt import projection
from memopt.projection import KINDS, SAMPLER_VERSION, Projection, draw, draw_all, project
from tests.spawn import run_ranks

CPU = torch.device("cpu")
# width and rank: one entry, a square, a divisor, neither
SIZES = [(1, 1), (6, 6), (12, 3), (41, 7)]
ON_RANKS = [("a", "haar"), ("b", "coordinate"), ("c", "haar"), ("d", "gaussian"), ("e", "haar"), ("f", "haar")]
DRAWS = 3000


def drawn(kind: str, width: int, rank: int, name: str = "layer", index: int = 0) -> Projection:
    p = Projection(kind, width, rank, CPU)
    draw_all([(name, p)], 0, index)
    return p


def many(kind: str, width: int, rank: int) -> torch.Tensor:
    """(draws, in, r): P of successive subspaces, fp64."""
    p = Projection(kind, width, rank, CPU)
    found = []
    for index in range(DRAWS):
        p.values.copy_(draw(kind, width, rank, 0, "layer", index))
        found.append(p.dense().double())
    return torch.stack(found)


def assert_mean(samples: torch.Tensor, expected: torch.Tensor | float) -> None:
    """The mean over dimension 0 is ``expected`` within 5 standard errors, which are small."""
    error = samples.std(0) / math.sqrt(len(samples))
    assert error.max() < 0.1
    assert bool(((samples.mean(0) - expected).abs() <= 5 * error + 1e-6).all())


@pytest.mark.parametrize("width, rank", SIZES)
@pytest.mark.parametrize("kind", ["haar", "coordinate"])
def test_columns_are_orthogonal(kind: str, width: int, rank: int):
    p = drawn(kind, width, rank)
    dense = p.dense()
    assert dense.shape == (width, rank) and dense.dtype == torch.float32
    gram = dense.double().t() @ dense.double() * (rank / width)
    torch.testing.assert_close(gram, torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-6)
    assert p.orthogonality_error() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_on_average_nothing_is_lost(kind: str):
    p = many(kind, 12, 3)
    assert_mean(p @ p.mT, torch.eye(12, dtype=torch.float64))
    # and one subspace says nothing of the next
    lengths = p.square().sum(2)
    assert_mean(lengths[:-1] * lengths[1:], 1.0)


def test_haar_is_uniform_over_rotations():
    """A QR without the signs of its diagonal has a first entry that is never positive."""
    width, rank = 6, 2
    p = many("haar", width, rank)
    assert_mean(p, 0.0)
    # an entry of a uniform unit vector has the fourth moment 3 / (n (n + 2))
    assert_mean(p**4, (width / rank) ** 2 * 3 / (width * (width + 2)))
    # both orientations are as likely, and the square of the trace of a random rotation is 1 on average
    square = many("haar", 3, 3)
    assert_mean(torch.linalg.det(square), 0.0)
    assert_mean(square.diagonal(dim1=1, dim2=2).sum(1) ** 2, 1.0)


def test_coordinates_are_different_columns_in_order():
    p = Projection("coordinate", 41, 7, CPU)
    p.values.copy_(draw("coordinate", 41, 7, 0, "layer", 0))
    assert p.values.dtype == torch.int64 and p.values.shape == (7,)
    assert bool((p.values.diff() > 0).all()) and 0 <= p.values[0] and p.values[-1] < 41
    expected = torch.zeros(41, 7)
    for column, row in enumerate(p.values.tolist()):
        expected[row, column] = math.sqrt(41 / 7)
    assert torch.equal(p.dense(), expected)


def test_gaussian_has_the_moments_of_its_formula():
    p = many("gaussian", 5, 4)
    assert_mean(p, 0.0)
    assert_mean(p**2, 1 / 4)
    assert_mean(p**4, 3 / 16)


@pytest.mark.parametrize("kind", KINDS)
def test_the_key_gives_the_projection(kind: str, monkeypatch: pytest.MonkeyPatch):
    key = {"kind": kind, "width": 40, "rank": 7, "seed": 3, "name": "layers.0.wo", "index": 5}
    random_state = torch.get_rng_state()
    first = draw(**key)
    torch.manual_seed(1)
    assert torch.equal(first, draw(**key))
    torch.set_rng_state(random_state)
    draw(**key)
    assert torch.equal(torch.get_rng_state(), random_state)
    changes = [{"seed": 4}, {"name": "layers.1.wo"}, {"index": 6}, {"index": 3, "seed": 5}]
    others = [draw(**key | change) for change in changes]
    monkeypatch.setattr(projection, "SAMPLER_VERSION", SAMPLER_VERSION + 1)
    others.append(draw(**key))
    for number, other in enumerate(others):
        assert not torch.equal(first, other), number


def test_kinds_draw_different_numbers():
    gaussian, haar = (draw(kind, 12, 3, 0, "layer", 0) for kind in ("gaussian", "haar"))
    spanned = gaussian @ torch.linalg.lstsq(gaussian, haar).solution
    assert (spanned - haar).abs().max() > 0.1


def test_the_sampler_is_the_one_of_its_version():
    """Whoever changes these values raises ``SAMPLER_VERSION``: a checkpoint would resume into other subspaces."""
    assert SAMPLER_VERSION == 1
    key = (3, "layers.0.wo", 5)
    assert draw("coordinate", 40, 7, *key).tolist() == [10, 16, 23, 25, 26, 31, 39]
    assert draw("coordinate", 40, 7, 2**40 + 1, "", 0).tolist() == [3, 5, 6, 9, 16, 38, 39]
    gaussian = torch.tensor([[-0.7609802484512329, -0.4153863191604614], [0.8558944463729858, 0.14434683322906494]])
    torch.testing.assert_close(draw("gaussian", 5, 2, *key)[:2], gaussian, rtol=1e-6, atol=0)
    haar = torch.tensor([[1.2004038095474243, 0.3910144567489624], [-0.30028554797172546, 1.3077998161315918]])
    torch.testing.assert_close(draw("haar", 5, 2, *key)[:2], haar, rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(12,), (5, 12), (2, 3, 12), (0, 12)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_project_is_the_product_with_the_matrix(kind: str, shape: tuple[int, ...]):
    p = drawn(kind, 12, 5)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kept = x.clone()
    found = project(x, p.values, p.scale)
    # the entries of P are fp32, and the scale of a gather is not rounded
    torch.testing.assert_close(found, x @ p.dense().double(), rtol=1e-6, atol=1e-7)
    assert torch.equal(x, kept)
    assert project(x.bfloat16(), p.values, p.scale).dtype == torch.bfloat16


@pytest.mark.parametrize("keep", [1.0, 0.75])
@pytest.mark.parametrize("kind", KINDS)
def test_merge_adds_the_product_with_the_matrix(kind: str, keep: float):
    p = drawn(kind, 12, 5)
    generator = torch.Generator().manual_seed(0)
    weight, step = (torch.randn(9, size, dtype=torch.float64, generator=generator) for size in (12, 5))
    expected = keep * weight + step @ p.dense().double().t()
    merged = weight.clone()
    p.merge_(merged, step, keep)
    torch.testing.assert_close(merged, expected, rtol=1e-6, atol=1e-7)
    for rows in (slice(0, 4), slice(4, 9), slice(3, 3)):
        part = weight.clone()
        p.merge_(part[rows], step[rows], keep)
        torch.testing.assert_close(part[rows], merged[rows], rtol=0, atol=0 if kind == "coordinate" else 1e-14)
        untouched = [row for row in range(9) if row not in range(9)[rows]]
        assert torch.equal(part[untouched], weight[untouched])
    rounded = weight.float()
    p.merge_(rounded, step, keep)
    torch.testing.assert_close(rounded, expected.float(), rtol=1e-5, atol=1e-5)


def test_a_coordinate_merge_writes_its_columns_only():
    p = drawn("coordinate", 12, 5)
    weight = torch.randn(9, 12)
    before = weight.clone()
    p.merge_(weight, torch.ones(9, 5))
    changed = (weight != before).all(0).nonzero().flatten().tolist()
    assert changed == p.values.tolist()
    others = [column for column in range(12) if column not in changed]
    assert torch.equal(weight[:, others], before[:, others])


class Operators(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_coordinate_is_a_gather(kind: str):
    p = drawn(kind, 12, 5)
    x, weight, step = torch.randn(4, 12), torch.randn(9, 12), torch.randn(9, 5)
    with Operators() as operators:
        project(x, p.values, p.scale)
        p.merge_(weight, step, 0.5)
    products = {name for name in operators.names if "mm" in name or "mv" in name or name in ("dot", "einsum", "linear")}
    assert len(operators.names) > 1
    assert products == (set() if kind == "coordinate" else {"mm", "addmm_"})


def draw_on_ranks(rank: int, world_size: int):
    """Values of five P at two indices, and how many QR this rank has computed."""
    decompositions = []
    decompose = torch.linalg.qr

    def counted(matrix: torch.Tensor):
        decompositions.append(tuple(matrix.shape))
        return decompose(matrix)

    torch.linalg.qr = counted
    projections = [(name, Projection(kind, 12 + number, 5, CPU)) for number, (name, kind) in enumerate(ON_RANKS)]
    addresses = [p.values.data_ptr() for _, p in projections]
    found = []
    for index in (0, 7):
        draw_all(projections, 3, index)
        found.append([p.values.clone() for _, p in projections])
    assert addresses == [p.values.data_ptr() for _, p in projections]
    return found, decompositions


def test_all_ranks_draw_the_same_and_one_of_them_decomposes():
    expected = [
        [draw(kind, 12 + number, 5, 3, name, index) for number, (name, kind) in enumerate(ON_RANKS)] for index in (0, 7)
    ]
    for world_size in (1, 2, 3, 4):
        results = run_ranks(world_size, draw_on_ranks)
        for found, _ in results:
            for values, wanted in zip(sum(found, []), sum(expected, []), strict=True):
                assert values.dtype == wanted.dtype and torch.equal(values, wanted), world_size
        computed = sorted(shape for _, shapes in results for shape in shapes)
        assert computed == sorted([(12, 5), (14, 5), (16, 5), (17, 5)] * 2), world_size
        # in turn: no rank computes all of them
        assert max(len(shapes) for _, shapes in results) <= (8 if world_size == 1 else 6)


def test_the_error_shows_a_projection_that_is_none():
    p = drawn("haar", 12, 5)
    p.values.mul_(1.1)
    assert p.orthogonality_error() == pytest.approx(0.21, rel=1e-4)
    p = drawn("haar", 12, 5)
    p.values[:, 1] = p.values[:, 0]
    assert p.orthogonality_error() == pytest.approx(1.0, rel=1e-4)
    p = drawn("coordinate", 12, 5)
    assert p.orthogonality_error() == 0.0
    p.values[1] = p.values[0]
    assert p.orthogonality_error() == 1.0
    assert drawn("gaussian", 12, 5).orthogonality_error() > 0.01


@pytest.mark.parametrize("kind, dtype, size", [("coordinate", torch.bfloat16, 8), ("haar", torch.bfloat16, 2 * 12)])
def test_what_is_held(kind: str, dtype: torch.dtype, size: int):
    p = Projection(kind, 12, 5, torch.device("meta"), dtype)
    p.move(CPU)
    draw_all([("layer", p)], 0, 0)
    assert p.values.dtype == (torch.int64 if kind == "coordinate" else dtype)
    assert p.nbytes() == 5 * size
    assert p.orthogonality_error() < 0.01


@pytest.mark.parametrize(
    "kind, rank, words",
    [
        ("wavelet", 3, "projection='wavelet' is not one of haar, coordinate, gaussian"),
        ("haar", 0, "rank=0 must be from 1 to the 12 entries"),
        ("coordinate", 13, "rank=13 must be from 1 to the 12 entries"),
    ],
)
def test_settings_that_cannot_work(kind: str, rank: int, words: str):
    with pytest.raises(ValueError, match=words):
        Projection(kind, 12, rank, CPU)
