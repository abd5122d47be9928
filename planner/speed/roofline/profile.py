"""`ThroughputProfile`: a family with its loss and optimizer, asked thousands of times for micro-batches."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from planner.core.notes import measured
from planner.options.kernels import COMPILES_NOTHING, speed_note
from planner.setup import TrainSetup
from planner.setup.allowed import FLEX
from planner.speed.roofline.bands import Level, Uncertainty, base_of
from planner.speed.roofline.family import Family, family_of
from planner.speed.roofline.model import SpeedModel
from planner.speed.roofline.rented import HOST_SPREAD, collated_s
from planner.speed.roofline.types import WITHOUT_GRADIENTS, StepTime, conditions_of
from planner.speed.roofline.work import Work, trained_share

if TYPE_CHECKING:
    from planner.speed.roofline.encoders import EncoderTime
    from planner.speed.roofline.rollout import Generation

UNCOMPARED_BAND = 0.5
"""Half-width of the band of speeds with experts in 4 bits, or by FlexAttention. Judgement: no run of it is known."""
STREAMED_BAND = 1.1
"""Of experts that come from the host's memory: 1.6 and 2.1 times as long as said on links of half the rate taken
(tests/planner/test_streamed_experts.py)."""
COMPARED_OBJECTIVES = {"dpo": "One run"}
"""Llama 3.2 1B with LoRA on an H100 under TRL: dry run -0.9 %, formula +3.5 % (docs/accuracy/operators.md)."""
HOST_SAID = 0.3
"""Share of a step that such a host would add from which it is said."""


def profile_of(speed: SpeedModel, setup: TrainSetup, work: Work | None = None) -> "ThroughputProfile":
    """The (remembered) profile of a setup; `work`: its own, where that is known."""
    family = family_of(speed, setup, work)
    alike = speed.profiles.setdefault((id(family), setup.loss, setup.num_gpus), {})
    profile: ThroughputProfile | None = alike.get(setup.optimizer)
    if profile is None:
        times = next(iter(alike.values())).times if alike else None
        profile = alike[setup.optimizer] = ThroughputProfile(speed, setup, family, times)
    return profile


class ThroughputProfile:
    """Step times of all setups that differ only in micro-batch and accumulation.

    Attributes:
        times: seconds of a micro-batch by its samples, which all optimizers of a loss share.
    """

    __slots__ = (
        "_encoder",
        "_family",
        "_generation",
        "_parts",
        "_setup",
        "_speed",
        "times",
    )

    def __init__(
        self, speed: SpeedModel, setup: TrainSetup, family: Family | None = None, times: dict[int, float] | None = None
    ) -> None:
        self._speed, self._setup = speed, setup
        self._family = family if family is not None else family_of(speed, setup)
        self._parts: dict[int, dict[str, float]] = {}
        self.times: dict[int, float] = {} if times is None else times
        self._encoder = _encoder_time(speed, setup)
        self._generation = _generation(speed, self._family, setup) if setup.objective_spec.rolls_out else None

    def _optimizer_s(self, optimizer: str) -> tuple[float, float]:
        """GPU and host seconds of an optimizer's step."""
        family = self._family
        trained = family.trained_params, family.trained_bytes, family.trained_tensors
        return self._speed.optimizer_s(optimizer, *trained, scaled=self._setup.scales_loss)

    @property
    def _step_s(self) -> float:
        """Seconds after the last backward."""
        return max(self._optimizer_s(self._setup.optimizer)) + self._family.trainer_s

    def sibling(self, setup: TrainSetup) -> "ThroughputProfile":
        """The profile of a setup with all else the same but what is recomputed, loss and optimizer."""
        return profile_of(self._speed, setup, self._family.work)

    @property
    def speed(self) -> SpeedModel:
        """Of its model on its GPU."""
        return self._speed

    @property
    def family(self) -> Family:
        """What the layers of this profile cost."""
        return self._family

    def encoder_host_s(self, samples: int) -> float:
        """Host seconds to issue the kernels of a micro-batch's pictures or sound."""
        return self._encoder.host_s(samples) if self._encoder is not None else 0.0

    def micro_parts(self, micro_batch_seqs: int) -> dict[str, float]:
        """GPU seconds of one micro-batch by part, the loss included; host and trainer are not."""
        parts = self._parts.get(micro_batch_seqs)
        if parts is None:
            parts = self._parts[micro_batch_seqs] = self._family.parts(micro_batch_seqs)
            parts["loss"] = self._family.work.loss_s(self._setup.loss, micro_batch_seqs)
            if self._encoder is not None:
                parts[self._encoder.name] = self._encoder.seconds(micro_batch_seqs)
        return dict(parts)

    def at(self, micro_batch_seqs: int, accumulation_steps: int) -> tuple[float, float]:
        """Step time in seconds and tokens/s of one GPU."""
        pair = (micro_batch_seqs, accumulation_steps)
        step = self._steps_s(self._step_s, (pair,))[0]
        return step, self._tokens(micro_batch_seqs) * accumulation_steps / step

    def tokens_per_s(self, optimizer: str, pairs: Sequence[tuple[int, int]], /) -> list[float]:
        """Tokens/s of one GPU at every (micro-batch, accumulation), with an optimizer that may be another one."""
        seconds = self._steps_s(max(self._optimizer_s(optimizer)) + self._family.trainer_s, pairs)
        sample_tokens = self._tokens(1)
        return [micro * sample_tokens * steps / step for (micro, steps), step in zip(pairs, seconds, strict=True)]

    def _steps_s(self, step_s: float, pairs: Sequence[tuple[int, int]]) -> list[float]:
        """Seconds of each step, of which `step_s` after the last backward."""
        times, add_s, step_times = self.times, self._family.add_s, []
        for samples, steps in pairs:
            micro = times.get(samples)
            if micro is None:
                busy = self._family.busy_s(samples) + self._family.work.loss_s(self._setup.loss, samples)
                busy += self._encoder.seconds(samples) if self._encoder is not None else 0.0
                micro = times[samples] = self._with_host(busy, samples) + self._family.trainer_micro_s
            step_times.append(steps * micro + (steps - 1) * add_s + step_s + self._collated_s(samples, steps))
        if self._generation is not None:
            step_times = [
                seconds_each + self.generation_s(samples * steps)
                for seconds_each, (samples, steps) in zip(step_times, pairs, strict=True)
            ]
        return step_times

    def generation_s(self, step_seqs: int, copies: int = 1) -> float:
        """Seconds of generating an optimizer step's completions, so many on each of `copies` GPUs; 0 of objectives that
        are given theirs."""
        return self._generation.seconds(step_seqs, copies) if self._generation is not None else 0.0

    def _tokens(self, samples: int) -> int:
        return samples * self._family.work.seqs_per_sample * self._setup.seq_len_tokens

    def _collated_s(self, samples: int, steps: int) -> float:
        """Seconds of the trainer between two steps that their tokens take."""
        family = self._family
        return collated_s(self._tokens(samples) * steps) if family.trainer_micro_s else 0.0

    def _with_host(self, busy: float, samples: int, slower: float = 1.0) -> float:
        """GPU and a host so many times slower run side by side: about the larger of the two."""
        work = self._family.work
        power, host = work.power, work.micro(samples).forwards * self._family.host_s + self.encoder_host_s(samples)
        return float((busy**power + (slower * host) ** power) ** (1.0 / power))

    def flops(self, micro_batch_seqs: int, accumulation_steps: int) -> float:
        """Floating-point operations that the step needs on one GPU: recomputation and unpacking not counted."""
        inv, setup = self._speed.inv, self._setup
        full = setup.method == "full"
        tokens, seqs = self._tokens(micro_batch_seqs), micro_batch_seqs * self._family.work.seqs_per_sample
        weights = sum(g.count * g.linear.num_active * g.linear.in_features * g.linear.out_features for g in inv.groups)
        weights += sum(linear.num_weights for linear in inv.outer)
        head = inv.head.num_weights if inv.head is not None else 0
        share = trained_share(self._speed, setup)
        inputs = 2.0 * self._family.above  # of the activations' gradients; the weights' where they train
        needed = (2.0 + inputs + (2.0 * share if full else 0.0)) * weights * tokens
        needed += self.head_flops(micro_batch_seqs, 1)
        needed += (1.0 + inputs) * self._family.work.attention_flops * seqs
        if not full and setup.kind.like_lora:
            needed += share * 6.0 * setup.lora_rank * self._speed.adapters(setup, self._family.dtypes)[1] * tokens
        needed += setup.extra_forwards * (2.0 * (weights + head) * tokens + self._family.work.attention_flops * seqs)
        if self._encoder is not None:
            needed += self._encoder.flops(micro_batch_seqs, full=full)
        return needed * accumulation_steps

    def head_flops(self, micro_batch_seqs: int, accumulation_steps: int) -> float:
        """Of these those of the head, which any number of layers needs; an extra forward's are not counted."""
        head, setup = self._speed.inv.head, self._setup
        passes = 6.0 if setup.method == "full" and not setup.trained_layers else 4.0
        weights = head.num_weights if head is not None else 0
        return passes * weights * self._tokens(micro_batch_seqs) * accumulation_steps

    def mfu_fraction(self, flops: float, seconds: float) -> float:
        """`flops` in so many seconds against the data sheet's rate for the compute type, 0 where there is none."""
        nominal = self._speed.rates.nominal.get(self._family.dtypes.compute, 0.0)
        return flops / seconds / nominal if nominal else 0.0

    def step_time(self, setup: TrainSetup) -> StepTime:
        """The full answer for one setup of this profile."""
        steps, seqs = setup.accumulation_steps, setup.micro_batch_seqs
        micro = self.micro_parts(seqs)
        busy = sum(micro.values())
        micro["host"] = self._with_host(busy, seqs) - busy
        parts = {name: seconds * steps for name, seconds in micro.items()}
        gpu, host = self._optimizer_s(self._setup.optimizer)
        family = self._family
        paging = self._speed.paging_s(setup.optimizer, family.trained_params, family.trained_bytes)
        unpaged = gpu - paging
        parts["optimizer"] = unpaged + (steps - 1) * family.add_s
        parts["host"] += max(host - unpaged, 0.0)
        if paging:
            parts["paging"] = max(gpu, host) - max(unpaged, host)
        parts["trainer"] = steps * family.trainer_micro_s + self._step_s - max(gpu, host)
        parts["trainer"] += self._collated_s(seqs, steps)
        if generation := self.generation_s(seqs * steps):
            parts["generation"] = generation
        total = sum(parts.values())
        flops = self.flops(seqs, steps)
        slower, faster = (self._at_host(total, parts, setup, busy, scale) for scale in (HOST_SPREAD, 1 / HOST_SPREAD))
        alone = ["Communication between GPUs is not counted."] if self._setup.num_gpus > 1 else []
        return StepTime(
            step_time_s=total,
            parts_s=parts,
            flops=flops,
            mfu_fraction=self.mfu_fraction(flops, total),
            tokens_per_s=setup.tokens_per_step / total,
            uncertainty=self.uncertainty("formula", setup, parts, slower=slower / total, faster=faster / total),
            notes=(*self.notes(), *alone, *_host_note(slower / total - 1)),
        )

    def _at_host(
        self, total_s: float, parts: Mapping[str, float], setup: TrainSetup, busy_s: float, scale: float
    ) -> float:
        """Seconds of a step with a host whose calls take so many times as long."""
        seqs = setup.micro_batch_seqs
        more = setup.accumulation_steps * (self._with_host(busy_s, seqs, scale) - self._with_host(busy_s, seqs))
        return total_s + more + (scale - 1) * parts["trainer"]

    def uncertainty(
        self, level: Level, setup: TrainSetup, parts: Mapping[str, float], *, slower: float, faster: float
    ) -> Uncertainty:
        """How far off a step of one GPU may be.

        Args:
            parts: its seconds by this profile.
            slower, faster: how many times as long it takes with a host as slow, and as fast, as one may be.
        """
        speed, gained = self._speed, 1 + self.gained_s(setup) / sum(parts.values())
        return Uncertainty(
            base=base_of(level, speed.gpu, speed.calibration, several=False),
            slower=(slower, gained),
            faster=(faster, 1 / gained),
            unmeasured=self.unmeasured_fraction(setup.micro_batch_seqs, setup.accumulation_steps, parts),
            judged=self.judged,
        )

    def gained_s(self, setup: TrainSetup) -> float:
        """Seconds that torch.compile is predicted to save of a step: it may save none, or twice as many."""
        if not self._setup.compiled:
            return 0.0
        plain, speed = self._setup.replace_trusted(compile=False), self._speed
        published = speed.conditions != conditions_of(self._setup)
        conditions = speed.conditions if published else conditions_of(plain)
        eager = ThroughputProfile(SpeedModel(speed.model, speed.gpu, speed.calibration, conditions), plain)
        pair = setup.micro_batch_seqs, setup.accumulation_steps
        return max(0.0, eager.at(*pair)[0] - self.at(*pair)[0])

    def unmeasured_fraction(self, seqs: int, steps: int, parts: Mapping[str, float]) -> float:
        """The share of a step that nobody has measured in a run of the setup's kind."""
        unmeasured = self._family.unmeasured_s(seqs) * steps + parts.get("generation", 0.0)
        unmeasured += parts[self._encoder.name] if self._encoder is not None else 0.0
        if not self._setup.objective_spec.supervised:
            unmeasured += parts["loss"] + parts.get(WITHOUT_GRADIENTS, 0.0)
        return float(unmeasured / sum(parts.values()))

    @property
    def judged(self) -> float:
        """The least band of what nobody has timed, by judgement."""
        if not self._setup.quantize_experts and self._setup.attention != FLEX:
            return 0.0
        return STREAMED_BAND if self._setup.trainer.streams_experts else UNCOMPARED_BAND

    def notes(self) -> list[str]:
        """What a person must know of the card and of the model, one sentence each."""
        speed, notes = self._speed, self._uncompared()
        compute = self._family.dtypes.compute
        if compute in speed.rates.emulated:
            notes.append(f"{speed.gpu.name} has no {compute} units: it is emulated at fp32 speed; use fp16.")
        if speed.rates.share_source != "gpu":
            source = speed.rates.share_source
            notes.append(f"No measured matmul rate for {speed.gpu.name}: its share of peak is its {source}'s.")
        if unmeasured := speed_note(self._setup.kernels, speed.gpu.key, compiled=self._setup.compiled):
            notes.append(unmeasured)
        if self._setup.compile and not self._setup.compiled:
            notes.append(f"torch.compile gains nothing: {COMPILES_NOTHING}.")
        if self._setup.trainer.streams_experts:
            notes.append("Every micro-batch fetches the experts twice over PCIe, which a slower slot shows.")
        elif self._setup.quantize_experts:
            notes.append("Nobody has measured the speed of experts in 4 bits: unpacking them is counted.")
        elif speed.model.expert_stacks and self._family.work.stacked == "fp32" != compute:
            notes.append(
                measured(
                    "The experts multiply in fp32, several times slower: transformers' grouped product is not "
                    "autocast's (--precision bf16-pure, or FSDP2, which casts the weights, has 16 bits)."
                )
            )
        if self._setup.attention == FLEX:
            notes.append(
                "No run by FlexAttention has been compared: its rate is PyTorch's own, beside flash attention's."
            )
        if speed.inv.mixer_width:
            notes.append("Linear-attention layers are approximated by the bytes they move.")
        return notes

    def _uncompared(self) -> list[str]:
        """What of the setup no measured run has been compared with."""
        notes = []
        if self._setup.method != "full" and not self._setup.kind.like_lora:
            name = self._setup.kind.title
            notes.append(
                f"No run with {name} has been compared: what it costs is counted from peft's code, and the band is "
                "wider by all of it."
            )
        if not self._setup.objective_spec.supervised:
            runs = COMPARED_OBJECTIVES.get(self._setup.objective, "No run")
            notes.append(
                f"{runs} of {self._setup.objective_spec.title} has been compared in speed: its layers cost what they "
                "cost in supervised training, and the band is wider by all of its loss and of its forwards without "
                "gradients."
            )
        if self._encoder is not None:
            notes.append(self._encoder.note)
        if self._generation is not None:
            notes.append(
                "No run with generation has been compared: it is counted from the bytes of each token and the host's "
                "time to issue its kernels, for prompts of one length and completions that all reach theirs."
            )
        return notes


def _generation(speed: SpeedModel, family: Family, setup: TrainSetup) -> "Generation":
    from planner.speed.roofline.rollout import Generation  # late: what is given its completions needs none of it

    return Generation(speed, family, setup)


def _encoder_time(speed: SpeedModel, setup: TrainSetup) -> "EncoderTime | None":
    if setup.images is None and not speed.model.encoder_tokens:
        return None
    from planner.speed.roofline import encoders  # late: text alone needs none of it

    return encoders.clips(speed, setup) if speed.model.encoder_tokens else encoders.pictures(speed, setup)


def _host_note(slow_host: float) -> list[str]:
    """One sentence where the host's kernel launches set the pace."""
    if slow_host < HOST_SAID:
        return []
    words = f"a CPU {HOST_SPREAD:.2g} times slower adds {slow_host:.0%}"
    return [f"Launching kernels takes the host much of this step: {words}."]
