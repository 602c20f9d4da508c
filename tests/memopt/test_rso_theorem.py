"""Background: the theorem of RSO (Chen et al., arXiv 2502.07222), which assumes P^T P = (in / r) I and E[P P^T] = I.
Let f have an L-Lipschitz gradient, L_hat be L times the largest in / r of all layers, eta = 1 / (2 L_hat), and let each
outer step k minimise, from B = 0 and up to eps_k,

    g(B) = f(W_k + B P^T) + |B|^2 / (2 eta),        W_{k+1} = W_k + B P^T.

Then mean |grad f(W_k)|^2 <= 18 L_hat (Delta_0 / K + eps) over k < K, in expectation, with Delta_0 = f(W_0) - f* and eps
the mean of eps_k = g(B) - min g.

Where 18 comes from, which also fixes the reading of eta: along B, f has an L_hat-Lipschitz gradient, and the term is
L_hat |B|^2, its second derivative 1 / eta = 2 L_hat (``proximal`` of ``memopt.rso``). So g is L_hat-strongly convex
with a 3 L_hat-Lipschitz gradient, g(0) - g(B*) >= L_hat / 2 |B*|^2 and |grad f P| = |grad g(0)| <= 3 L_hat |B*|.
Together, without any expectation:

    |grad f(W_k) P|^2 <= 18 L_hat (f(W_k) - f(W_{k+1}) + eps_k)                                                (step)

whose mean is the theorem, as E[P P^T] = I. Both are tested; the theorem on every path alone and not only on average,
which the margin of its constant allows. Each subproblem also takes gradient steps of size eta: they shrink the error at
least by half, as |1 - eta h| <= 1/2 for h in [L_hat, 3 L_hat].

If f = L/2 |W - W*|^2, then B* = -(W - W*) P / (3 in / r): the part of W - W* inside the subspace shrinks to 2/3, and
f - f* on average to q = 1 - (1 - 4/9) r / in = 1 - (5/9) r / in. (A term of L_hat / 2 |B|^2 would give 1/2 and
1 - (3/4) r / in.) The mean of |grad f|^2 is then 3.6 (1 - q^K) L_hat Delta_0 / K, a fifth of the bound.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor, nn

from memopt.projection import Projection, draw
from memopt.rso import RSO

EXACT = ("haar", "coordinate")
CONSTANT = 18.0
WIDTH, ROWS, LAYER = 32, 6, "0"

Matrices = list[Tensor]


@dataclass
class Problem:
    """f of one weight (out, in) per layer."""

    value: Callable[[Matrices], float]
    gradient: Callable[[Matrices], Matrices]
    smooth: float
    """L."""
    start: Matrices
    minimum: float
    """f*."""
    solve: Callable[[Matrices, Matrices, float], Matrices] | None = None
    """(weights, projections, 1 / eta) -> the minimiser of g, where there is a formula."""

    def l_hat(self, ranks: list[int]) -> float:
        return self.smooth * max(w.shape[1] / r for w, r in zip(self.start, ranks, strict=True))


@dataclass
class Path:
    """What is measured at every outer step."""

    values: list[float] = field(default_factory=list)
    """f(W_0) to f(W_K)."""
    squares: list[float] = field(default_factory=list)
    """|grad f(W_k)|^2."""
    projected: list[float] = field(default_factory=list)
    """|grad f(W_k) P|^2."""
    inexact: list[float] = field(default_factory=list)
    """eps_k."""
    weights: list[Matrices] = field(default_factory=list)
    """W_0 to W_K."""

    def ratio(self, problem: Problem, l_hat: float) -> float:
        """Left side of the theorem over its right side."""
        steps = len(self.squares)
        eps = sum(self.inexact) / steps
        bound = CONSTANT * l_hat * ((self.values[0] - problem.minimum) / steps + eps)
        return sum(self.squares) / steps / bound

    def assert_every_step(self, l_hat: float) -> None:
        for k, (projected, eps) in enumerate(zip(self.projected, self.inexact, strict=True)):
            fallen = self.values[k] - self.values[k + 1] + 1e-14 * abs(self.values[k])
            assert projected <= CONSTANT * l_hat * (fallen + eps), k


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def total(matrices: Matrices) -> float:
    """Sum of squares."""
    return sum(float(matrix.square().sum()) for matrix in matrices)


def matrix(kind: str, width: int, rank: int, seed: int, index: int, name: str = LAYER) -> Tensor:
    """P (in, r) of the repository in fp64."""
    p = Projection(kind, width, rank, torch.device("cpu"), torch.float64)
    p.values.copy_(draw(kind, width, rank, seed, name, index))
    # dense() would round the factor to fp32
    return (p.dense() != 0).double() * p.scale if kind == "coordinate" else p.values


def moved(weights: Matrices, bs: Matrices, ps: Matrices) -> Matrices:
    """W + B P^T."""
    return [w + b @ p.t() for w, b, p in zip(weights, bs, ps, strict=True)]


def subproblem_gradient(problem: Problem, weights: Matrices, bs: Matrices, ps: Matrices, proximal: float) -> Matrices:
    grads = problem.gradient(moved(weights, bs, ps))
    return [g @ p + proximal * b for g, b, p in zip(grads, bs, ps, strict=True)]


def subproblem_value(problem: Problem, weights: Matrices, bs: Matrices, ps: Matrices, proximal: float) -> float:
    return problem.value(moved(weights, bs, ps)) + proximal / 2 * total(bs)


def descend(problem: Problem, weights: Matrices, ps: Matrices, proximal: float, steps: int) -> Matrices:
    """``steps`` gradient steps of size eta on g from B = 0."""
    bs = [w.new_zeros(len(w), p.shape[1]) for w, p in zip(weights, ps, strict=True)]
    for _ in range(steps):
        grads = subproblem_gradient(problem, weights, bs, ps, proximal)
        bs = [b - g / proximal for b, g in zip(bs, grads, strict=True)]
    return bs


def run(
    problem: Problem,
    ps_of: Callable[[int], Matrices],
    steps: int,
    l_hat: float,
    inner: Callable[[Matrices, Matrices, float], Matrices] | None = None,
) -> Path:
    """K = ``steps`` outer steps; ``inner`` finds B, by default the formula.

    eps_k is g(B) - min g where there is a formula, otherwise |grad g(B)|^2 / (2 L_hat), which is no less, since g is
    L_hat-strongly convex.
    """
    proximal = 2.0 * l_hat
    inner = inner or problem.solve
    weights, path = problem.start, Path()
    path.values.append(problem.value(weights))
    path.weights.append(weights)
    for k in range(steps):
        ps = ps_of(k)
        grads = problem.gradient(weights)
        bs = inner(weights, ps, proximal)
        path.squares.append(total(grads))
        path.projected.append(total([g @ p for g, p in zip(grads, ps, strict=True)]))
        if problem.solve:
            best = problem.solve(weights, ps, proximal)
            found, least = (subproblem_value(problem, weights, b, ps, proximal) for b in (bs, best))
            path.inexact.append(max(0.0, found - least))
        else:
            left = subproblem_gradient(problem, weights, bs, ps, proximal)
            path.inexact.append(total(left) / (2 * l_hat))
        weights = moved(weights, bs, ps)
        path.values.append(problem.value(weights))
        path.weights.append(weights)
    return path


def one_layer(kind: str, rank: int, seed: int, factor: float = 1.0) -> Callable[[int], Matrices]:
    """Index -> ``factor`` times the P of the only layer."""
    return lambda index: [factor * matrix(kind, WIDTH, rank, seed, index)]


def quadratic(h: Tensor, start: Tensor, target: Tensor) -> Problem:
    """f = 1/2 tr((W - W*) H (W - W*)^T): L is the largest eigenvalue of H, f* is 0, and B has a formula."""

    def value(weights: Matrices) -> float:
        error = weights[0] - target
        return 0.5 * float((error @ h * error).sum())

    def solve(weights: Matrices, ps: Matrices, proximal: float) -> Matrices:
        # B (P^T H P + I / eta) = -(W - W*) H P
        (p,) = ps
        system = p.t() @ h @ p + proximal * torch.eye(p.shape[1], dtype=p.dtype)
        return [-torch.linalg.solve(system, (weights[0] - target) @ h @ p, left=False)]

    smooth = float(torch.linalg.eigvalsh(h)[-1])
    return Problem(value, lambda weights: [(weights[0] - target) @ h], smooth, [start], 0.0, solve)


def uneven_quadratic() -> Problem:
    """With eigenvalues from 0.01 to 3 in a random basis."""
    q = torch.linalg.qr(normal(1, WIDTH, WIDTH))[0]
    h = q * torch.logspace(-2, math.log10(3), WIDTH, dtype=torch.float64) @ q.t()
    return quadratic((h + h.t()) / 2, torch.zeros(ROWS, WIDTH, dtype=torch.float64), normal(2, ROWS, WIDTH))


def isotropic(error: Tensor) -> Problem:
    """H = 0.7 I. ``error``: W_0 - W*; W* is 0."""
    return quadratic(0.7 * torch.eye(WIDTH, dtype=torch.float64), error, torch.zeros_like(error))


def logistic() -> Problem:
    """Mean over examples of log(1 + exp(-y w x)), a sum over ROWS independent rows w of W.

    The second derivative is the mean of s (1 - s) x x^T in every row, so that L is the largest eigenvalue of
    X^T X / (4 n) exactly (at W = 0). f* by Newton's method; the labels of the examples cannot be separated.
    """
    n = 240
    x = normal(4, n, WIDTH) * torch.linspace(0.3, 2.0, WIDTH, dtype=torch.float64)
    y = ((x @ normal(5, WIDTH, ROWS) * 0.3 + normal(6, n, ROWS)) > 0).double() * 2 - 1

    def value(weights: Matrices) -> float:
        return float(nn.functional.softplus(-y * (x @ weights[0].t())).sum()) / n

    def gradient(weights: Matrices) -> Matrices:
        return [(-y * torch.sigmoid(-y * (x @ weights[0].t()))).t() @ x / n]

    best = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for _ in range(12):
        slopes = torch.sigmoid(x @ best.t())
        hessians = torch.einsum("no,ni,nj->oij", slopes * (1 - slopes), x, x) / n
        best = best - torch.linalg.solve(hessians, gradient([best])[0].unsqueeze(-1)).squeeze(-1)
    assert total(gradient([best])) < 1e-24
    smooth = float(torch.linalg.eigvalsh(x.t() @ x / (4 * n))[-1])
    return Problem(value, gradient, smooth, [torch.full((ROWS, WIDTH), -0.5, dtype=torch.float64)], value([best]))


@pytest.mark.parametrize("rank", (2, 8, 16))
@pytest.mark.parametrize("kind", EXACT)
def test_quadratic(kind: str, rank: int):
    """Steps by the formula, as exact as the residual says; then one gradient step for each, eps from the formula."""
    problem = uneven_quadratic()
    l_hat = problem.l_hat([rank])
    assert l_hat == pytest.approx(3 * WIDTH / rank)
    for seed in range(3):
        ps_of = one_layer(kind, rank, seed)
        exact = run(replace(problem, solve=None), ps_of, 120, l_hat, problem.solve)
        assert max(exact.inexact) < 1e-24 * exact.values[0]
        inexact = run(problem, ps_of, 120, l_hat, lambda *given: descend(problem, *given, 1))
        assert sum(inexact.inexact) > 1e-3 * inexact.values[0]
        for path in (exact, inexact):
            path.assert_every_step(l_hat)
            # not vacuous: with a much smaller constant it would not hold
            assert 0.05 < path.ratio(problem, l_hat) < 1


@pytest.mark.parametrize("rank", (2, 8, 16))
@pytest.mark.parametrize("kind", EXACT)
def test_logistic_regression(kind: str, rank: int):
    """Subproblems to a small residual, and far from solved by one gradient step; eps from the residual."""
    problem = logistic()
    l_hat = problem.l_hat([rank])
    for seed in range(2):
        for steps, left in ((16, 1e-6), (1, math.inf)):
            path = run(
                problem, one_layer(kind, rank, seed), 80, l_hat, lambda *given, n=steps: descend(problem, *given, n)
            )
            assert max(path.inexact) < left * (path.values[0] - problem.minimum)
            path.assert_every_step(l_hat)
            assert 0.01 < path.ratio(problem, l_hat) < 1


NET_SHAPES = ((8, 12), (2, 8))


def two_layers() -> tuple[Problem, Callable[[Tensor], Tensor]]:
    """f = mean |W2 tanh(W1 x) - y|^2 / 2 with y of such a net, so that f* = 0; and f of all weights as one vector.

    L is not known in advance: 1.3 times the norm of the second derivative at the start is taken, and the test measures
    along the path that it is enough.
    """
    x = normal(7, 60, 12)
    teacher = [normal(8, 8, 12) * 0.4, normal(9, 2, 8) * 0.6]
    y = torch.tanh(x @ teacher[0].t()) @ teacher[1].t()

    def loss(first: Tensor, second: Tensor) -> Tensor:
        return 0.5 * (torch.tanh(x @ first.t()) @ second.t() - y).square().sum() / len(x)

    def of_vector(vector: Tensor) -> Tensor:
        first, second = vector.split([rows * columns for rows, columns in NET_SHAPES])
        return loss(first.view(NET_SHAPES[0]), second.view(NET_SHAPES[1]))

    def gradient(weights: Matrices) -> Matrices:
        first, second = weights
        hidden = torch.tanh(x @ first.t())
        error = (hidden @ second.t() - y) / len(x)
        return [(error @ second * (1 - hidden.square())).t() @ x, error.t() @ hidden]

    start = [normal(10, 8, 12) * 0.3, normal(11, 2, 8) * 0.5]
    smooth = 1.3 * curvature(of_vector, start)
    return Problem(lambda weights: float(loss(*weights)), gradient, smooth, start, 0.0), of_vector


def curvature(of_vector: Callable[[Tensor], Tensor], weights: Matrices) -> float:
    """Norm of the second derivative of f."""
    hessian = torch.func.hessian(of_vector)(torch.cat([w.flatten() for w in weights]))
    return float(torch.linalg.eigvalsh(hessian).abs().max())


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("ranks", ([3, 4], [6, 1]))
def test_two_layer_network(kind: str, ranks: list[int]):
    """Both layers in one subproblem, L_hat of the layer with the larger in / r.

    L is measured as the largest norm of the second derivative at the ends and in the middle of every segment from W_k
    to W_{k+1}; eps from the residual.
    """
    problem, of_vector = two_layers()
    grads = torch.func.grad(of_vector)(torch.cat([w.flatten() for w in problem.start]))
    torch.testing.assert_close(torch.cat([g.flatten() for g in problem.gradient(problem.start)]), grads)
    l_hat = problem.l_hat(ranks)
    assert l_hat == problem.smooth * {3: 4, 6: 8}[ranks[0]]

    def ps_of(index: int) -> Matrices:
        sizes = zip(NET_SHAPES, ranks, strict=True)
        return [matrix(kind, shape[1], r, 0, index, f"layer{n}") for n, (shape, r) in enumerate(sizes)]

    path = run(problem, ps_of, 60, l_hat, lambda *given: descend(problem, *given, 20))
    for before, after in zip(path.weights, path.weights[1:], strict=False):
        for t in (0.5, 1.0):
            between = [(1 - t) * w + t * v for w, v in zip(before, after, strict=True)]
            assert curvature(of_vector, between) <= problem.smooth
    assert max(path.inexact) < 1e-8 * path.values[0]
    path.assert_every_step(l_hat)
    assert 0.01 < path.ratio(problem, l_hat) < 1


@pytest.mark.parametrize("kind", EXACT)
def test_without_its_factor_the_bound_breaks(kind: str):
    """in / r = 16, K = 400, isotropic f, exact steps: planted errors that the bound must show. W - W* has orthogonal
    columns at first, which keeps paths near the average.

    A P without sqrt(in / r) has P^T P = I: the part inside the subspace shrinks to 32/33 only, and the mean of
    |grad f|^2 is 2 (1 - q^K) / (1 - q) L Delta_0 / K with q = 1 - (1 - (32/33)^2) / 16: 1.44 of the bound.
    An L_hat without in / r shrinks it to 1/9: 32 / (1 - 1/81) L Delta_0 / K, which is 1.8 of the bound.
    """
    rank, steps = WIDTH // 16, 400
    problem = isotropic(2.0 * torch.linalg.qr(normal(3, WIDTH, WIDTH))[0])
    right = problem.l_hat([rank])
    q = 1 - (1 - (32 / 33) ** 2) / 16
    planted = 2 * (1 - q**steps) / (1 - q) / (CONSTANT * 16)
    cases = ((1.0, right, 3.6 / CONSTANT), (rank**0.5 / WIDTH**0.5, right, planted), (1.0, problem.smooth, 1.8))
    assert planted == pytest.approx(1.444, abs=1e-3)
    for factor, l_hat, expected in cases:
        ratios = []
        for seed in range(2):
            path = run(problem, one_layer(kind, rank, seed, factor), steps, l_hat)
            ratios.append(path.ratio(problem, l_hat))
            assert (ratios[-1] > 1) == (expected > 1)
        assert sum(ratios) / len(ratios) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("rank", (2, 8, 16))
@pytest.mark.parametrize("kind", EXACT)
def test_contraction_of_one_step(kind: str, rank: int):
    """Isotropic f. W - W* with orthogonal columns of one length contracts by 1 - (5/9) r / in under every P; any other,
    even of rank 1, on average over P."""
    expected = 1 - 5 / 9 * rank / WIDTH
    level = isotropic(2.0 * torch.linalg.qr(normal(12, WIDTH, WIDTH))[0])
    l_hat = level.l_hat([rank])
    for seed in range(5):
        before, after = run(level, one_layer(kind, rank, seed), 1, l_hat).values
        assert after / before == pytest.approx(expected, rel=1e-6)

    problem = isotropic(normal(13, ROWS, 1) * normal(14, 1, WIDTH))
    found = torch.tensor(contractions(problem, kind, rank, count=1000))
    error = float(found.std()) / len(found) ** 0.5
    assert error < 0.05 * (1 - expected)
    assert abs(float(found.mean()) - expected) < 4 * error


def contractions(problem: Problem, kind: str, rank: int, count: int) -> list[float]:
    """f(W_1) / f(W_0) for many P."""
    (start,), proximal, found = problem.start, 2 * problem.l_hat([rank]), []
    before = problem.value([start])
    for index in range(count):
        ps = one_layer(kind, rank, 0)(index)
        found.append(problem.value(moved([start], problem.solve([start], ps, proximal), ps)) / before)
    return found


@pytest.mark.parametrize("kind", EXACT)
def test_contraction_of_many_steps(kind: str):
    """Every subspace is new: after 12 steps the average is (1 - (5/9) r / in)^12."""
    rank, steps = 8, 12
    problem = isotropic(normal(15, 1, WIDTH))
    l_hat = problem.l_hat([rank])
    paths = [run(problem, one_layer(kind, rank, seed), steps, l_hat) for seed in range(120)]
    found = torch.tensor([path.values[-1] / path.values[0] for path in paths])
    expected, error = (1 - 5 / 9 * rank / WIDTH) ** steps, float(found.std()) / len(found) ** 0.5
    assert error < 0.1 * expected
    assert abs(float(found.mean()) - expected) < 4 * error


@pytest.mark.parametrize("kind", EXACT)
def test_an_inexact_subproblem_costs_its_error(kind: str):
    """From the minimum, Delta_0 = 0, with a random error D of one length added to every exact B: eps alone carries the
    bound.

    On isotropic f eps_k = 3/2 L_hat |D|^2, and |W - W*|^2 rises by in / r |D|^2 a step until the contraction balances
    it: |grad f|^2 comes to 6/5 L_hat eps, a fifteenth of the bound.
    """
    rank, steps, size = 8, 400, 0.01
    problem = isotropic(torch.zeros(ROWS, WIDTH, dtype=torch.float64))
    l_hat = problem.l_hat([rank])
    errors = iter(normal(16, steps, ROWS, rank))

    def inner(weights: Matrices, ps: Matrices, proximal: float) -> Matrices:
        error = next(errors)
        return [problem.solve(weights, ps, proximal)[0] + size * error / error.norm()]

    path = run(problem, one_layer(kind, rank, 0), steps, l_hat, inner)
    assert path.values[0] == problem.minimum
    assert path.inexact == pytest.approx([1.5 * l_hat * size**2] * steps)
    path.assert_every_step(l_hat)
    q = 1 - 5 / 9 * rank / WIDTH
    expected = 1.2 / CONSTANT * (1 - (1 - q**steps) / (1 - q) / steps)
    assert path.ratio(problem, l_hat) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("factor", (1.0, 3.0))
@pytest.mark.parametrize("kind", EXACT)
def test_the_proximal_option_is_the_term_of_the_theorem(kind: str, factor: float):
    """``RSO`` with ``proximal`` = 1 / eta = 2 L_hat, also of an L_hat that is too large, and many small steps of SGD
    takes the step of the formula in every subspace: its B, added to W, and a term that starts anew from there. So it
    obeys the bound."""
    rank, outer, inner, examples = 8, 12, 100, 50
    x = normal(17, examples, WIDTH) * torch.linspace(0.2, 1.5, WIDTH, dtype=torch.float64)
    target = normal(18, ROWS, WIDTH)
    problem = quadratic(x.t() @ x / examples, normal(19, ROWS, WIDTH), target)
    l_hat = factor * problem.l_hat([rank])
    expected = run(problem, one_layer(kind, rank, 5), outer, l_hat)
    expected.assert_every_step(l_hat)

    model = nn.Sequential(nn.Linear(WIDTH, ROWS, bias=False, dtype=torch.float64))
    RSO.convert(model, rank=rank, projection=kind, layers=[LAYER], dtype=torch.float64)
    weight = model[0].weight
    weight.data.copy_(problem.start[0])
    # the second derivative of g is at most 3 L_hat
    optimizer = RSO(model, 0.5 / (3 * l_hat), inner="sgd", proximal=2 * l_hat, interval=inner, seed=5)
    scale = total([problem.start[0] - target]) ** 0.5
    path = Path(values=[problem.value([weight])])
    for k in range(outer):
        path.squares.append(total(problem.gradient([weight])))
        for step in range(inner):
            optimizer.zero_grad()
            loss = 0.5 * (model(x) - x @ target.t()).square().sum() / examples
            loss.backward()
            if step == inner - 1:
                # B before the last step of this subspace, as the option keeps it
                b = optimizer.state_tensors()[f"{LAYER}.subspace.value"].clone()
            optimizer.step()
        best = problem.solve(expected.weights[k], one_layer(kind, rank, 5)(k), 2 * l_hat)[0]
        torch.testing.assert_close(b, best, rtol=0, atol=1e-8 * scale)
        assert not optimizer.state_tensors()[f"{LAYER}.subspace.value"].any()
        torch.testing.assert_close(weight, expected.weights[k + 1][0], rtol=0, atol=1e-8 * scale)
        path.values.append(problem.value([weight]))
        path.inexact.append(0.0)
    assert path.ratio(problem, l_hat) < 1
