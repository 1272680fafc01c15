"""A scalar with gradients formed beforehand behaves like any other scalar of a graph."""

import pytest
import torch

from yunque.ops.blockwise.formed_gradients import with_gradients


def square(x: torch.Tensor) -> torch.Tensor:
    """sum x^2 with its gradient 2x formed beforehand."""
    plain = x.detach()
    return with_gradients((plain**2).sum(), [x], [2 * plain], name="square")


def test_gradients_follow_the_chain_rule():
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    (grad,) = torch.autograd.grad(3.0 * square(2 * x) + x.sum(), x)
    assert grad.tolist() == [25.0, -47.0]  # 3 * 8x + 1


def test_backward_twice_over_a_kept_graph_counts_twice():
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    value = square(x)
    value.backward(retain_graph=True)
    value.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [4.0, -8.0]


def test_an_unwanted_gradient_stays_absent():
    x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    value = with_gradients(torch.tensor(7.0), [x, y], [torch.tensor([5.0]), None], name="half")
    value.backward()
    assert value.item() == 7.0
    assert x.grad is not None
    assert x.grad.tolist() == [5.0]
    assert y.grad is None


def test_no_graph_is_built_without_gradients():
    with torch.no_grad():
        assert not square(torch.ones(2, requires_grad=True)).requires_grad
    assert not square(torch.ones(2)).requires_grad


def test_a_second_derivative_is_refused_by_name():
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="square has no second derivative"):
        torch.autograd.grad(square(x), x, create_graph=True)
