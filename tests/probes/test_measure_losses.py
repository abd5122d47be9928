"""The trainers' own loss kernels against this project's forms of them: the same numbers, so the same step."""

import pytest
import torch

from planner.setup import TrainSetup
from probes.stack import losses
from probes.stack.losses import ChunkedNll


def test_chunked_form_equals_trl_s_kernel_in_value_and_gradient() -> None:
    real = losses.real_loss("chunked")
    if real is None:
        pytest.skip("trl is not installed")
    torch.manual_seed(0)
    weight, targets = torch.randn(300, 16), torch.randint(0, 300, (50,))
    pairs = []
    for function in (real, ChunkedNll.apply):
        hidden = torch.linspace(-1, 1, 800).reshape(50, 16).clone().requires_grad_()
        log_probs = function(hidden, weight, None, targets)[0]
        (gradient,) = torch.autograd.grad(log_probs.sum(), hidden)
        pairs.append((log_probs.detach(), gradient))
    torch.testing.assert_close(pairs[0], pairs[1])
    wanted = torch.log_softmax(torch.linspace(-1, 1, 800).reshape(50, 16) @ weight.t(), -1)
    torch.testing.assert_close(pairs[0][0], wanted.gather(-1, targets[:, None]).squeeze(-1))


def test_loss_is_called_emulated_where_its_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "find_spec", lambda name: None)
    losses.real_loss.cache_clear()
    try:
        assert losses.real_loss("liger") is None
        assert losses.loss_is_emulated(TrainSetup(loss="liger"))
        assert losses.loss_is_emulated(TrainSetup(loss="chunked"))
        assert not losses.loss_is_emulated(TrainSetup(loss="full"))
    finally:
        losses.real_loss.cache_clear()
