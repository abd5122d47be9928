"""What a job holds around its steps: evaluating, saving, merging; one GPU. Settings that keep each below the step.

How the trainers behave (transformers 5.23, TRL 1.16, peft 0.21): `evaluate` without `compute_metrics` keeps losses
only; with it every batch's logits stay on the GPU in fp32, and joining them (`eval_do_concat_batches`) holds them
twice, unless `eval_accumulation_steps` sends each batch to the host. TRL makes them with a second, whole forward.
`save_model` writes tensor by tensor and takes nothing of the GPU; `merge_and_unload` adds one matrix after the other.
Measured: `git show e34acc15:benchmarks/trace_evaluation.py`, on a GPU that computes nothing.
"""

from planner.core.records import dataclass
from planner.hardware.gpu import GpuSpec
from planner.memory.dtypes import SIZE_BYTES
from planner.memory.micro_batch import checkpointed_inputs_bytes
from planner.memory.model import predict_memory
from planner.memory.step import loss_parts
from planner.memory.trained import trained_parameters
from planner.memory.workspace import context_bytes
from planner.models.spec import ModelSpec
from planner.models.targets import lora_linears
from planner.setup import TrainSetup
from planner.setup.memory_terms import MemoryBreakdown, Term, total_bytes

DEFAULT_EVAL_SEQS = 8
"""transformers' per_device_eval_batch_size where nobody sets one, whatever the training micro-batch is."""
SHARD_BYTES = 50 * 10**9
"""The largest file that transformers writes of a model (`max_shard_size`): as much lies on the host at once."""


@dataclass(frozen=True, kw_only=True)
class Occasion:
    """One thing that a job does beside its steps.

    Attributes:
        device_bytes: peak on the device, at most; host_bytes: of the host's memory beside it.
        setting: what keeps it so.
    """

    name: str
    device_bytes: int
    host_bytes: int = 0
    setting: str = ""


def occasions(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> tuple[Occasion, ...]:
    """Evaluating, saving and merging in the order in which a job comes to them."""
    seqs, whole = setup.micro_batch_seqs, SIZE_BYTES["bf16"] * model.num_params
    logits = logits_bytes(model, setup)
    trained = trained_parameters(model, setup).size_bytes
    events = [
        Occasion(
            name=f"evaluation, {seqs} at once",
            device_bytes=evaluation_bytes(model, gpu, setup, seqs),
            setting="per_device_eval_batch_size",
        ),
        Occasion(
            name="the same, compute_metrics",
            device_bytes=evaluation_bytes(model, gpu, setup, seqs, logits=True),
            host_bytes=logits * seqs,
            setting="eval_accumulation_steps 1",
        ),
        Occasion(
            name="saving",
            device_bytes=between_steps_bytes(model, gpu, setup),
            host_bytes=min(trained, SHARD_BYTES),
            setting="written tensor by tensor",
        ),
    ]
    if setup.method != "full" and setup.kind.merges and setup.kind.adapts_matrices:
        merging = merging_bytes(model, gpu, setup)
        events.append(Occasion(name="merging", device_bytes=merging, setting="a process of its own, base in 16 bits"))
        events.append(
            Occasion(name="merging on the host", device_bytes=0, host_bytes=whole, setting='device_map "cpu"')
        )
    return tuple(events)


def evaluation_bytes(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, seqs: int, *, logits: bool = False) -> int:
    """Device peak of evaluating `seqs` sequences at once between two training steps, at most.

    Without gradients nothing is kept but the layer at hand, and the loss is the same, or Liger's with whole logits:
    what a training step under checkpointing holds up to its loss, but for the inputs of all layers except one and for
    the loss's own backward.

    Args:
        logits: whether a metric wants them, of this batch alone: whole, whatever the loss.
    """
    every = int(setup.method == "full" or setup.kind.checkpointing)
    loss = "full" if evaluates_whole(setup) else setup.loss
    plain = {"accumulation_steps": 1, "activation_offload": False, "selective_checkpointing": False}
    forward = setup.replace(micro_batch_seqs=seqs, checkpointing=every, loss=loss, **plain)
    memory = predict_memory(model, gpu, forward)
    inputs = checkpointed_inputs_bytes(model, forward)
    others = inputs - inputs // model.num_layers
    backward = 0
    if loss == "full" and setup.weight_dtype != "fp32":  # with fp32 weights their casts are in it: stays a bound
        backward = sum(term.size_bytes for term in memory.terms if term.category == "loss")
        backward -= min(backward, loss_parts(model, forward).loss_bytes)
    phases = [memory.phase_bytes["forward"] - others, memory.phase_bytes["loss"] - others - backward]
    if logits:  # whole, in the weights' type and in fp32
        made = seqs * setup.seq_len_tokens * model.vocab_size * SIZE_BYTES[setup.weight_dtype]
        phases.append(phases[0] + made + seqs * logits_bytes(model, setup))
    return max(phases) + memory.peak_device_bytes - memory.peak_allocated_bytes


def evaluating_bytes(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, seqs: int, *, logits: bool = False) -> int:
    """`evaluation_bytes`, 0 where it surely stays below the step's peak, or is not known."""
    more = seqs > setup.micro_batch_seqs or (seqs and (logits or evaluates_whole(setup)))
    if not more or setup.num_gpus > 1 or setup.objective_spec.rolls_out or setup.objective_spec.whole_batch:
        return 0
    return evaluation_bytes(model, gpu, setup, seqs, logits=logits)


def evaluates_whole(setup: TrainSetup) -> bool:
    """Whether the training's loss makes no logits and the evaluation's does.

    Source: Liger 0.8.4 `transformers/model/llama.py` lce_forward (skip_logits: self.training unless it is said);
    transformers says it since 5.15 (trainer.py prediction_step; not in 5.14); TRL 1.16 has its own.
    Measured: ms-swift 4.6 on transformers 5.19, all of Qwen2.5-3B at 8,192 tokens, traced: 29.51 GiB reserved with
    and without an evaluation of as many tokens.
    """
    return setup.loss == "liger" and setup.trainer.evaluates_whole and setup.before_transformers(5, 15)


def logits_bytes(model: ModelSpec, setup: TrainSetup) -> int:
    """Logits of one sequence as `compute_metrics` gets them: in fp32 under autocast (accelerate
    `convert_outputs_to_fp32`), twice that on the GPU while they are joined at the evaluation's end, unless
    `eval_accumulation_steps` is set. A head of scores gives one for each label, counted with one."""
    size = SIZE_BYTES["fp32" if setup.autocast_dtype else setup.weight_dtype]
    return setup.seq_len_tokens * model.vocab_size * size if setup.objective_spec.head == "vocabulary" else size


def between_steps_bytes(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> int:
    """Device memory between two steps: weights, adapters and states; the gradients are gone (`set_to_none`)."""
    memory = predict_memory(model, gpu, setup)
    return total_bytes(between_steps_terms(memory)) + memory.peak_device_bytes - memory.peak_reserved_bytes


def between_steps_terms(memory: MemoryBreakdown) -> tuple[Term, ...]:
    """What of a rank's memory lies there between two steps."""
    return tuple(
        (term.category, term.name, term.size_bytes)
        for term in memory.terms
        if "load" in term.phases or (term.category == "optimizer" and "forward" in term.phases)
    )


def merging_bytes(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> int:
    """Device peak of `merge_and_unload` in a process of its own: the base in 16 bits, the adapters, and the largest
    matrix's difference twice in the adapters' type (the product, and scaled).

    Source: peft 0.21.2 tuners/lora/layer.py, `Linear.get_delta_weight`. A quantized base is loaded again in 16 bits:
    merged into 4 bits it would be rounded anew.
    """
    adapters = trained_parameters(model, setup)
    matrices = [linear for _, _, linears in lora_linears(model, setup.lora_targets) for linear in linears]
    largest = max(matrix.in_features * matrix.out_features for matrix in matrices)
    base = SIZE_BYTES["bf16"] * model.num_params
    return base + adapters.size_bytes + 2 * SIZE_BYTES[adapters.dtype] * largest + context_bytes(gpu)
