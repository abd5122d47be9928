"""The training objectives: what a step of each holds and computes beside a supervised one, who runs it, and from which
data. To add one, add its row.

"sft" is the supervised step that every other row is read against: one forward and backward of the sequences of a
micro-batch, and the loss that `TrainSetup.loss` names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, final

DEFAULT = "sft"
"""The objective of a plan for which nobody names one."""

Head = Literal["vocabulary", "score"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """One objective, as its trainer's step treats memory and time.

    Attributes:
        title: its name for people.
        sample: what one sample of the micro-batch is, for people.
        seqs_per_sample: sequences of `seq_len_tokens` that a sample puts into one forward.
        reference: whether the step also asks the model as it was before training: its base with the adapters switched
            off, or a second copy of the weights in full fine-tuning.
        extra_forwards: forwards of a micro-batch without gradients in every step, the reference's among them.
        head: what stands on the layers.
        losses: values of `TrainSetup.loss` that some trainer of it has.
        packs: whether several samples may fill one sequence.
        rate_factor: on the learning rate of supervised training; `rate_reason` says whose.
        targets: launch targets that have a file for it, and what each calls it.
        columns: what its data must have, for people.
        source: where all this was read.
    """

    name: str
    title: str
    sample: str
    seqs_per_sample: int
    reference: bool
    extra_forwards: int
    head: Head
    losses: tuple[str, ...]
    packs: bool
    rate_factor: float
    rate_reason: str
    targets: Mapping[str, str]
    columns: str
    source: str


_ROWS = (
    Objective(
        name="sft",
        title="supervised fine-tuning",
        sample="sequence",
        seqs_per_sample=1,
        reference=False,
        extra_forwards=0,
        head="vocabulary",
        losses=("full", "chunked", "liger"),
        packs=True,
        rate_factor=1.0,
        rate_reason="",
        targets={
            "trl": "sft",
            "hf": "sft",
            "axolotl": "sft",
            "llamafactory": "sft",
            "unsloth": "sft",
            "accelerate": "sft",
            "deepspeed": "sft",
            "torchtitan": "sft",
        },
        columns="messages, prompt and completion, or text",
        source="trl 1.16 trainer/sft_trainer.py",
    ),
    Objective(
        name="dpo",
        title="direct preference optimization",
        sample="pair",
        seqs_per_sample=2,
        reference=True,
        extra_forwards=1,
        head="vocabulary",
        losses=("chunked",),
        packs=False,
        rate_factor=0.05,
        rate_reason="DPO, as TRL's DPOConfig: 1e-6 for full fine-tuning",
        targets={"trl": "dpo"},
        columns="chosen and rejected, with or without prompt",
        source="trl 1.16 trainer/dpo_trainer.py: DataCollatorForPreference puts chosen and rejected into one batch; "
        "_compute_loss runs policy, then reference under no_grad without checkpointing, both with the fused head; "
        "__init__ loads a second model where there are no adapters, in the policy's type",
    ),
)

OBJECTIVES: Mapping[str, Objective] = {row.name: row for row in _ROWS}
"""Every objective by its name."""
