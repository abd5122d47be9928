"""The training objectives: what a step of each holds and computes beside a supervised one, who runs it, and from which
data. To add one, add its row.

"sft" is the supervised step that every other row is read against: one forward and backward of the sequences of a
micro-batch, and the loss that `TrainSetup.loss` names.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, final

from planner.core.records import dataclass
from planner.options.losses import LossChain, LossShape
from planner.options.stacks import written_by

DEFAULT = "sft"
"""The objective of a plan for which nobody names one."""

Head = Literal["vocabulary", "score", "none"]

SHARED_BY = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
"""Engines of several GPUs under which TRL prepares a reference (trl 1.16 `DPOTrainer.__init__`)."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """One objective, as its trainer's step treats memory and time; what its row leaves out is as in a supervised step
    on unpacked sequences.

    Attributes:
        title: its name for people.
        sample: what one sample of the micro-batch is, for people.
        seqs_per_sample: sequences of `seq_len_tokens` that a sample puts into one forward, or into all of `forwards`.
        forwards: forwards with gradients that a micro-batch is cut into, each of as many sequences, before a backward.
        reference: whether the step also asks the model as it was before training: its base with the adapters switched
            off, or a second copy of the weights in full fine-tuning.
        extra_forwards: forwards of a micro-batch without gradients in every step; `reference_forwards`: of them, those
            of the reference, which need not be made where its log-probabilities were computed beforehand.
        head: what stands on the layers.
        whole_logits: the chain of its own loss where all logits are there, by the stack; None: as in supervised
            training, or no trainer of it makes them.
        losses: values of `TrainSetup.loss` that some trainer of it has.
        supervised: whether its step is that of supervised training.
        packs: whether several samples may fill one sequence; `packed`: whether a plan does it unless told otherwise.
        least_samples: of one micro-batch; `whole_batch`: it is the whole batch, as accumulation adds no negatives.
        rate_factor: on the learning rate of supervised training; `rate_reason` says whose. lora_factor: its best LoRA
            rate over full fine-tuning's, where it is not the supervised one.
        rolls_out: whether a step begins by generating its completions (`planner.options.rollouts`).
        asks_old: whether the policy is always asked, without gradients, for what it generated.
        alone: why it is planned on one GPU; "" where it is planned under every engine of SHARED_BY, supervised training
            under all.
        trainer: TRL's class for it; "" where it has none of its own.
        columns: what its data must have, for people; `data`: the kinds of it (`planner.samples.rows.kinds_of`).
        source: where all this was read.
    """

    name: str
    title: str
    sample: str
    seqs_per_sample: int = 1
    forwards: int = 1
    reference: bool = False
    extra_forwards: int = 0
    reference_forwards: int = 0
    head: Head = "vocabulary"
    whole_logits: Callable[[LossShape, str], LossChain] | None = None
    losses: tuple[str, ...]
    supervised: bool = False
    packs: bool = False
    packed: bool = False
    least_samples: int = 1
    whole_batch: bool = False
    rate_factor: float = 1.0
    rate_reason: str = ""
    lora_factor: float | None = None
    rolls_out: bool = False
    asks_old: bool = False
    alone: str = ""
    trainer: str = ""
    columns: str
    data: tuple[str, ...]
    source: str

    def layout_refusal(self, parallel: str, *, split: bool) -> str:
        """Why no plan spreads it so over several GPUs, "" where one does.

        Args:
            split: whether a copy of the model, or of a sequence, is cut.
        """
        if self.supervised:
            return ""
        if self.alone:
            return f"objective {self.name!r} is planned on one GPU: {self.alone}"
        if parallel in SHARED_BY and not split:
            return ""
        return (
            f"objective {self.name!r} is planned on several GPUs with {', '.join(SHARED_BY)}, each with a whole model"
        )

    def least(self, batch: int) -> int:
        """Samples of the smallest micro-batch that a plan takes of so large a batch."""
        return batch if self.whole_batch else self.least_samples

    @property
    def targets(self) -> Mapping[str, str]:
        """Launch targets that have a file for it, and what each calls it."""
        return written_by(self.name)

    def stack(self, usual: str) -> str:
        """Whose step it is: the usual stack's where that has a trainer of it, else its first target's."""
        return usual if usual in self.targets else next(iter(self.targets))


def _chain(shape: LossShape, forward: float, backward: float, *, extra: int = 0, reference: float = 0) -> LossChain:
    """So many times the logits as they leave the model, in the forward (and `extra` bytes an element), in the backward,
    and while a reference is asked."""
    elements = shape.tokens * shape.vocab_size
    wide, logits = _wide(shape) * elements, shape.logit_bytes * elements
    kept_bytes = (logits if shape.softcap else 0) + shape.cast_bytes
    reference = int(reference * wide) + (logits if shape.softcap else 0) if shape.with_reference else 0
    return LossChain(
        loss_bytes=int(forward * wide) + extra * elements + kept_bytes,
        backward_bytes=int(backward * wide) + kept_bytes,
        logits_bytes=logits,
        reference_forward_bytes=reference,
        inside_bytes=reference + logits + kept_bytes,
    )


def _wide(shape: LossShape) -> int:
    """Bytes of a logit as it leaves the model: accelerate's outputs under autocast are fp32."""
    return 4 if shape.widened else shape.logit_bytes


def _odds_ratio_chain(shape: LossShape, stack: str) -> LossChain:
    """ORPO's chain, in logits of both halves: themselves, a copy of the chosen half and its log-softmax in the forward;
    in the backward themselves, that log-softmax and the gradient of all; then that gradient twice, as the cut to
    shifted positions is undone. LLaMA-Factory's: the logits and the log-softmax of all; in the backward that and two
    gradients.

    Source: TRL 1.16 `ORPOTrainer.concatenated_forward`; `kernels/logprob_entropy.py`, which saves the logits as they
    are and makes one gradient. LLaMA-Factory 0.9.5 `train/trainer_utils.py` get_batch_logps.
    """
    return _chain(shape, 2, 3) if stack == "llamafactory" else _chain(shape, 2, 2.5)


def _pairs_chain(shape: LossShape, stack: str) -> LossChain:
    """DPO's chain on whole logits: the policy's stay while the reference's are made and widened; in the backward them
    and one gradient, then that gradient twice. LLaMA-Factory keeps the log-softmax of the policy's beside them, and
    makes the reference's.

    Source: TRL 1.14 (Axolotl 0.21) `DPOTrainer._compute_loss`, `selective_log_softmax_and_entropy` by its Triton
    kernel; LLaMA-Factory 0.9.5 `train/dpo/trainer.py` get_batch_loss_metrics, `train/trainer_utils.py` get_batch_logps.
    """
    if stack == "llamafactory":
        return _chain(shape, 4 if shape.with_reference else 2, 3, reference=2)
    if shape.log_probs:
        return _older_pairs_chain(shape)
    extra = shape.logit_bytes if shape.widened else 0
    return _chain(shape, 2 if shape.with_reference else 1, 2, extra=extra, reference=1)


def _older_pairs_chain(shape: LossShape) -> LossChain:
    """DPO's chain of TRL before its kernel, in logits. All at once: the policy's log-softmax stays while the
    reference's logits and their own are made; in the backward that, and two gradients. Row by row, fp32: the logits
    stay, in the backward them, the rows' gradients, these stacked, and the picked tokens'; 16 bits: the rows'
    log-softmax stays. A mask's copy of half of them is logged. Before 0.12 the logits stay too, and the chosen half's
    cross-entropy, wanted or not; from 0.29 on the model's outputs, up to 1.5 a copy without the last token.

    Source: `TrainSetup.log_probs`. Measured: against traces of TRL 0.12 to 1.9, docs/objectives.md.
    """
    if shape.log_probs == "gathered beside":
        return _chain(shape, 4.5 if shape.with_reference else 3, 3, reference=2.5)
    if shape.log_probs == "gathered":
        return _chain(shape, 3 if shape.with_reference else 2.5, 3, reference=1)
    wide = _wide(shape) == 4
    if shape.log_probs == "rows" or (wide and shape.log_probs == "kept rows"):
        return _chain(shape, 2.5, 4 if wide else 2, reference=1)
    if shape.log_probs == "kept rows":
        return _chain(shape, 3.5 if shape.with_reference else 2.5, 2, reference=2)
    return _chain(
        shape, (4.5 if wide else 5.5) if shape.with_reference else 3.5, 4 if wide else 2, reference=2 if wide else 3
    )


def _older_completions_chain(shape: LossShape, stack: str) -> LossChain:
    """KTO's chain of TRL before 1.6, in logits: copies of the good and the bad ones' stay beside what the backward
    needs while the reference makes as many; before 0.17 the other prompts' are there too.

    Source: trl 0.12 to 1.5 `KTOTrainer.forward`, `get_batch_loss_metrics`.
    """
    by_gather, wide = shape.log_probs == "gathered", _wide(shape) == 4
    backward = 3 if by_gather else 4 if wide else 2
    others = int(shape.log_probs != "rows apart")  # other prompts'
    policy = 3 if by_gather or not wide else 2
    return _chain(shape, (4 if shape.with_reference else policy) + others, backward, reference=2 + others)


def _older_rollouts_chain(shape: LossShape, stack: str) -> LossChain:
    """GRPO's chain of TRL before its fused head, in logits of the completions: divided by the temperature, then row by
    row as DPO's.

    Source: trl 0.15 to 1.14 `GRPOTrainer._get_per_token_logps`, from 0.20 on with entropies.
    """
    return _chain(shape, 2, 4 if _wide(shape) == 4 else 2)


def _score_chain(shape: LossShape, stack: str) -> LossChain:
    """A score's chain: one number per token is nothing beside the hidden states, so the largest moment is the final
    norm's own fp32 copy of them; in the backward their gradient.

    Source: transformers 5.23 `LlamaRMSNorm`, `GenericForSequenceClassification`.
    """
    hidden = shape.tokens * shape.hidden_size
    return LossChain(loss_bytes=4 * hidden, backward_bytes=shape.hidden_bytes * hidden)


def _pooled_chain(shape: LossShape, stack: str) -> LossChain:
    """The mean over a sequence's tokens: the hidden states times their mask, and accelerate's fp32 copy of them, of one
    forward; in the backward the mean's gradient on every token, and its product with the mask.

    Source: sentence-transformers 6.2 `Pooling._forward_padded`; accelerate 1.15 `convert_outputs_to_fp32`.
    """
    hidden = shape.tokens * shape.hidden_size
    return LossChain(loss_bytes=2 * _wide(shape) * hidden, backward_bytes=4 * shape.hidden_bytes * hidden)


_PREFERENCES: dict[str, Any] = {"columns": "chosen and rejected, with or without prompt", "data": ("preference",)}
_ONLINE: dict[str, Any] = {
    "rate_factor": 0.05,
    "rolls_out": True,
    "columns": "prompt, and what its reward functions ask for",
    "data": ("prompt",),
}
_ROWS = (
    Objective(
        name="sft",
        title="supervised fine-tuning",
        sample="sequence",
        losses=("full", "chunked", "liger"),
        supervised=True,
        packs=True,
        columns="chats, questions with answers, prompt and completion, or text",
        data=("messages", "prompt-completion", "text"),
        source="trl 1.16 trainer/sft_trainer.py",
    ),
    Objective(
        name="pretrain",
        title="continued pretraining",
        sample="sequence",
        losses=("full", "chunked", "liger"),
        supervised=True,
        packs=True,
        packed=True,
        columns="text",
        data=("text",),
        source="the supervised step on packed text: LLaMA-Factory 0.9.5 train/pt (packing on by itself); axolotl 0.21 "
        "type completion; trl 1.16 SFTTrainer on a text column",
    ),
    Objective(
        name="dpo",
        title="direct preference optimization",
        sample="pair",
        seqs_per_sample=2,
        reference=True,
        extra_forwards=1,
        reference_forwards=1,
        whole_logits=_pairs_chain,
        losses=("chunked", "full"),
        rate_factor=0.05,
        rate_reason="DPO, as TRL's DPOConfig: 1e-6 for full fine-tuning",
        trainer="DPOTrainer",
        source="trl 1.16 trainer/dpo_trainer.py: DataCollatorForPreference puts chosen and rejected into one batch; "
        "_compute_loss runs policy, then reference under no_grad without checkpointing, both with the fused head; "
        "__init__ loads a second model where there are no adapters, in the policy's type",
        **_PREFERENCES,
    ),
    Objective(
        name="kto",
        title="Kahneman-Tversky optimization",
        sample="completion",
        reference=True,
        extra_forwards=3,
        reference_forwards=2,
        whole_logits=_older_completions_chain,
        losses=("chunked", "full"),
        least_samples=2,
        rate_factor=0.05,
        rate_reason="KTO, as TRL's KTOConfig: 1e-6",
        lora_factor=1.0,
        trainer="KTOTrainer",
        columns="prompt, completion and label (true or false); or chosen and rejected",
        data=("unpaired", "preference"),
        source="trl 1.16 trainer/kto_trainer.py: _compute_loss runs the policy on completions of other prompts under "
        "no_grad (the KL term), the policy, and the reference on both; a micro-batch of 1 is refused (the KL term "
        "pairs neighbours)",
    ),
    Objective(
        name="reward",
        title="reward modelling",
        sample="pair",
        seqs_per_sample=2,
        head="score",
        whole_logits=_score_chain,
        losses=("full",),
        rate_factor=0.5,
        rate_reason="reward models, as TRL's example: 1e-5 for full fine-tuning, 1e-4 for LoRA",
        trainer="RewardTrainer",
        source="trl 1.16 trainer/reward_trainer.py: AutoModelForSequenceClassification with one label, both halves in "
        "one forward, no loss over the vocabulary",
        **_PREFERENCES,
    ),
    Objective(
        name="orpo",
        title="odds ratio preference optimization",
        sample="pair",
        seqs_per_sample=2,
        whole_logits=_odds_ratio_chain,
        losses=("full",),
        rate_factor=0.05,
        rate_reason="ORPO, as TRL's ORPOConfig: 1e-6 for full fine-tuning",
        trainer="ORPOTrainer",
        source="trl 1.16 experimental/orpo/orpo_trainer.py: concatenated_forward keeps the logits of both halves, "
        "cross-entropy of the chosen one, selective_log_softmax of both; no reference. LLaMA-Factory 0.9.5 "
        "train/dpo/trainer.py (pref_loss orpo)",
        **_PREFERENCES,
    ),
    Objective(
        name="classification",
        title="sequence classification",
        sample="sequence",
        head="score",
        whole_logits=_score_chain,
        losses=("full",),
        columns="text and label",
        data=("labelled",),
        source="transformers 5.23 GenericForSequenceClassification under the plain Trainer: the layers, a matrix to "
        "the labels on every token, cross-entropy on the last; counted with one label",
    ),
    Objective(
        name="embedding",
        title="contrastive training of embeddings",
        sample="pair",
        seqs_per_sample=2,
        forwards=2,
        whole_batch=True,
        head="none",
        whole_logits=_pooled_chain,
        losses=("full",),
        least_samples=2,
        columns="anchor and positive",
        data=("pairs",),
        alone="on several each contrasts its own samples alone, so that the same batch has fewer negatives",
        source="sentence-transformers 6.2 MultipleNegativesRankingLoss: embed_columns gives each of two columns a "
        "forward of its own (base/losses/merged_forward.py), the other pairs of the micro-batch are the negatives "
        "(one pair alone has none); the mean of the last hidden states (modules/pooling.py)",
    ),
    Objective(
        name="grpo",
        title="group relative policy optimization",
        sample="completion",
        whole_logits=_older_rollouts_chain,
        losses=("chunked", "full"),
        rate_reason="GRPO, as TRL's GRPOConfig: 1e-6 for full fine-tuning",
        trainer="GRPOTrainer",
        source="trl 1.16 trainer/grpo_trainer.py: _generate_single_turn (generate outside accelerate's autocast where "
        "there are adapters), _get_per_token_logps_and_entropies and _compute_loss (the fused head on the "
        "completions' tokens), no reference at beta 0",
        **_ONLINE,
    ),
    Objective(
        name="rloo",
        title="REINFORCE leave-one-out",
        sample="completion",
        losses=("chunked",),
        rate_reason="RLOO, as TRL's RLOOConfig: 1e-6 for full fine-tuning",
        asks_old=True,
        trainer="RLOOTrainer",
        source="trl 1.16 trainer/rloo_trainer.py: _generate_and_score_completions (old log-probabilities always, the "
        "reference's at beta above 0, both without gradients) and _compute_loss (the fused head, sums of sequences)",
        **_ONLINE,
    ),
)

OBJECTIVES: Mapping[str, Objective] = {row.name: row for row in _ROWS}
"""Every objective by its name."""


def objective_spec_of(fixed: Mapping[str, tuple[Any, ...]]) -> Objective:
    """The objective among the setup fields that a user decided."""
    return OBJECTIVES[fixed.get("objective", (DEFAULT,))[0]]


def packs(fixed: Mapping[str, tuple[Any, ...]]) -> bool:
    """Whether rows hold several samples: as a user decided, else as the objective does by itself."""
    return True in fixed.get("packing", (objective_spec_of(fixed).packed,))


def seqs_per_sample(fixed: Mapping[str, tuple[Any, ...]]) -> int:
    """Sequences of one sample under the setup fields that a user decided."""
    return objective_spec_of(fixed).seqs_per_sample + int(fixed.get("hard_negatives", (0,))[0])
