"""The losses of other objectives than supervised training, as their trainers compute them: which tensors live when."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from planner.setup import TrainSetup
from probes.stack.batch import Batch
from probes.stack.heads import head_loss, headless

BETA = 0.1


def preference_loss(
    setup: TrainSetup, batch: Batch, policy: tuple[Any, Any, Any], reference: Any, again: Callable[[], None]
) -> torch.Tensor:
    """TRL's sigmoid DPO loss of pairs: the policy's forward, then the reference's without gradients.

    Args:
        policy: the model, the transformers model inside it, and its forward under the trainer's autocast.
        reference: such a pair (inner model, forward) of the frozen copy, None for the policy with its adapters off.
        again: tells that another forward begins.

    Source: TRL 1.16 `DPOTrainer._compute_loss`.
    """
    model, inner, forward = policy

    def log_probs(of: Any, run: Any) -> torch.Tensor:
        with headless(of, partial(head_loss, of, setup.loss)):
            found: torch.Tensor = run(**batch.model_inputs, labels=batch.labels)["log_probs"]
        return found

    with headless(inner, partial(head_loss, inner, setup.loss)):
        outputs = forward(**batch.model_inputs, labels=batch.labels)  # alive to the end, as the trainer's are
    chosen, rejected = outputs["log_probs"].sum(dim=1).chunk(2)
    again()
    with torch.no_grad():
        if reference is None:
            with model.disable_adapter(), uncheckpointed(inner):
                before = log_probs(inner, forward)
        else:
            before = log_probs(*reference)
        ref_chosen, ref_rejected = before.sum(dim=1).chunk(2)
    margin = (chosen - ref_chosen) - (rejected - ref_rejected)
    return -torch.nn.functional.logsigmoid(BETA * margin).mean()


@contextmanager
def uncheckpointed(inner: Any) -> Iterator[None]:
    """Within it, no layer is checkpointed. Source: TRL 1.16 `disable_gradient_checkpointing`."""
    with ExitStack() as stack:
        for module in inner.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False
                stack.callback(setattr, module, "gradient_checkpointing", True)
        yield
