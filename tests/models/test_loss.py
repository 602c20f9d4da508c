"""The chunked loss against ``torch.nn.functional.cross_entropy`` on whole logits."""

import pytest
import torch
import torch.nn.functional as F

from models.loss import IGNORE, LossHead, summed_cross_entropy

N, D, V = 29, 12, 53


def inputs(dtype=torch.float64, ignored: float = 0.2):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (N,), generator=generator)
    return hidden, weight, labels.masked_fill(torch.rand(N, generator=generator) < ignored, IGNORE)


def plain(hidden, weight, labels):
    return F.cross_entropy(hidden @ weight.t(), labels, reduction="sum", ignore_index=IGNORE)


# chunks: one token, not a divisor of N, a divisor, exactly N, more than N
@pytest.mark.parametrize("chunk", [1, 8, 29, 1000])
@pytest.mark.parametrize("grad_output", [1.0, -0.37])
def test_loss_and_gradients_are_exact(chunk: int, grad_output: float):
    hidden, weight, labels = inputs()
    (plain(hidden, weight, labels) * grad_output).backward()
    expected = plain(hidden, weight, labels).detach(), hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    loss = summed_cross_entropy(hidden, weight, labels, chunk)
    (loss * grad_output).backward()
    for actual, wanted in zip((loss.detach(), hidden.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


def test_loss_gradients_match_finite_differences():
    hidden, weight, labels = inputs()
    direction = torch.randn(D, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    summed_cross_entropy(hidden, weight, labels, 8).backward()
    for tensor in (hidden, weight):
        step = 1e-6
        with torch.no_grad():
            tensor += step * direction
            above = summed_cross_entropy(hidden, weight, labels, 8)
            tensor -= 2 * step * direction
            below = summed_cross_entropy(hidden, weight, labels, 8)
            tensor += step * direction
        torch.testing.assert_close((above - below) / (2 * step), (tensor.grad @ direction).sum(), rtol=1e-7, atol=1e-7)


def test_bf16_weights_give_fp32_loss_and_gradients_summed_in_fp32():
    hidden, weight, labels = inputs(torch.bfloat16)
    loss = summed_cross_entropy(hidden, weight, labels, 2)
    loss.backward()
    assert loss.dtype == torch.float32 and weight.grad.dtype == torch.bfloat16 and hidden.grad.dtype == torch.bfloat16
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    exact = plain(exact_hidden, exact_weight, labels)
    exact.backward()
    torch.testing.assert_close(loss.double(), exact, rtol=5e-3, atol=0)
    # 15 chunks summed in bf16 would be off by several units in the last place (2**-8)
    error = (weight.grad.double() - exact_weight.grad).norm() / exact_weight.grad.norm()
    assert error < 2**-8, f"{error:.1e}"


def test_autocast_runs_gemms_in_bf16_and_keeps_fp32_gradients():
    hidden, weight, labels = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = summed_cross_entropy(hidden, weight, labels, 8)
    loss.backward()
    rounded = summed_cross_entropy(hidden.detach().bfloat16(), weight.detach().bfloat16(), labels, 8)
    assert torch.equal(loss.detach(), rounded) and not torch.equal(loss.detach(), plain(hidden, weight, labels))
    assert weight.grad.dtype == torch.float32 and hidden.grad.dtype == torch.float32


def test_all_ignored_is_zero_with_zero_gradients():
    hidden, weight, labels = inputs(ignored=2.0)
    loss = summed_cross_entropy(hidden, weight, labels, 8)
    loss.backward()
    assert loss == 0 and not hidden.grad.any() and not weight.grad.any()


def test_no_grad_does_no_gradient_work():
    hidden, weight, labels = inputs()
    with torch.no_grad(), _Counter() as counter:
        loss = summed_cross_entropy(hidden, weight, labels, 8)
    assert counter.gemms == 4 and not loss.requires_grad
    with _Counter() as counter:
        summed_cross_entropy(hidden, weight, labels, 8).backward()
    # three GEMMs a chunk: logits, d hidden, d weight; none of them again in backward
    assert counter.gemms == 12
    with _Counter() as counter:
        summed_cross_entropy(hidden, weight.detach(), labels, 8).backward()
    assert counter.gemms == 8


def test_logits_are_never_whole():
    hidden, weight, labels = inputs()
    with _Counter() as counter:
        summed_cross_entropy(hidden, weight, labels, 8).backward()
    assert counter.largest < N * V and counter.largest == V * D


def test_second_backward_is_refused():
    hidden, weight, labels = inputs()
    loss = summed_cross_entropy(hidden, weight, labels, 8)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_accumulate_over_microbatches():
    hidden, weight, labels = inputs()
    plain(hidden, weight, labels).backward()
    expected = weight.grad.clone()
    weight.grad = None
    for rows in (slice(0, 10), slice(10, N)):
        summed_cross_entropy(hidden[rows], weight, labels[rows], 8).backward()
    torch.testing.assert_close(weight.grad, expected, rtol=1e-12, atol=1e-12)


def test_label_outside_the_vocabulary_is_an_error():
    hidden, weight, labels = inputs()
    labels[3] = V
    with pytest.raises(RuntimeError, match="out of bounds"):
        summed_cross_entropy(hidden, weight, labels, 8)


def test_head_without_labels_gives_logits():
    head = LossHead.Config(in_features=D, out_features=V, chunk=8).build()
    hidden = torch.randn(2, 5, D)
    torch.testing.assert_close(head(hidden), hidden @ head.weight.t())


class _Counter(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts matrix products and the elements of the largest tensor made."""

    def __init__(self):
        super().__init__()
        self.gemms = 0
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.gemms += func.overloadpacket.__name__ in ("mm", "addmm_", "addmm")
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result
