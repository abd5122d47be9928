"""Seconds of generating the completions of a step."""

from planner.memory.dtypes import SIZE_BYTES
from planner.memory.rollout import cache_bytes
from planner.setup import TrainSetup
from planner.speed.roofline.family import Family
from planner.speed.roofline.model import SpeedModel
from planner.speed.roofline.rented import UPDATE_S

CACHE_PASSES = {"transformers": 3.0}
"""How often keys and values go over the memory's bus for each token: read, and with DynamicCache copied to a longer
tensor; others read them once."""
SAMPLING_KERNELS = 60
"""Kernels of `GenerationMixin._sample` around a forward: inputs, logits, the draw, the stopping criteria. Counted in
transformers 5.23."""


class Generation:
    """Generation's seconds by the completions of an optimizer step.

    A token reads every weight and all keys and values, so it is bound by the memory's bus; transformers issues its
    kernels one by one, as a training forward does. vLLM is taken to replay them without the host's time, a server to
    run on a card like this one.

    Source: Pope et al. 2022, Efficiently Scaling Transformer Inference, section 2.1, https://arxiv.org/abs/2211.05102.
    Not counted: vLLM's waking and the copy of the weights to it, the rewards, completions that end early.
    Measured: nothing.
    """

    def __init__(self, speed: SpeedModel, family: Family, setup: TrainSetup) -> None:
        self._speed, self._family, self._setup = speed, family, setup
        inv, head = speed.inv, speed.inv.head
        weights = sum(group.weights for group in inv.groups) + sum(linear.num_weights for linear in inv.outer)
        weights += head.num_weights if head is not None else 0
        self._weights_s = weights * SIZE_BYTES[family.dtypes.compute] / speed.bandwidth
        self._host_s = 0.0
        if setup.rollout_settings.generator == "transformers":
            sampling = SAMPLING_KERNELS * UPDATE_S * speed.host_scale
            self._host_s = family.forward_host_s + sampling

    def seconds(self, step_seqs: int, copies: int) -> float:
        """Of one optimizer step, in the mean of those that a generation serves.

        Args:
            step_seqs: completions of the step on each of `copies` GPUs, which share a generation; a server makes all.
        """
        roll = self._setup.rollout_settings
        made = roll.at_once(step_seqs * copies)
        return step_seqs * copies / made * self._of(made if roll.generator == "vllm-server" else made // copies)

    def _of(self, seqs: int) -> float:
        setup, family, roll = self._setup, self._family, self._setup.rollout_settings
        prompt = setup.prompt_tokens
        cache = cache_bytes(self._speed.model, setup, seqs, prompt + roll.completion_tokens // 2)
        passes = CACHE_PASSES.get(roll.generator, 1.0)
        busy = self._weights_s + passes * cache / self._speed.bandwidth + family.work.unpacking_s
        power = family.work.power
        token = (busy**power + self._host_s**power) ** (1.0 / power)
        return family.work.forward_s(seqs, prompt) + roll.completion_tokens * float(token)
