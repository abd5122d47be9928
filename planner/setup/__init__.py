"""`TrainSetup`: one point of the space, made of the records before it, by what they decide. Impossible combinations
(`planner.setup.allowed`) cannot be built. Defaults are those of a plan that nobody asked for anything.

`model` and `gpu` are not part of it: the same setup is tried on any. The interchange form (one JSON object with model,
gpu and the setup's fields) lives in `planner.setup.interchange`.
"""

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any, Self

from planner.core.records import dataclass
from planner.options.adapters import ADAPTERS, Adapter
from planner.options.images import Images
from planner.options.kernels import COMPILED, FUSED_LORA, KERNELS, LIGER_PARTS
from planner.options.layouts import LAYOUT_FIELDS as LAYOUT_FIELDS
from planner.options.layouts import SHARDED, ZERO
from planner.options.objectives import DEFAULT as _DEFAULT_OBJECTIVE
from planner.options.objectives import OBJECTIVES, Objective
from planner.options.precisions import PRECISIONS
from planner.options.rollouts import Rollout
from planner.options.stacks import DEFAULT as _DEFAULT_STACK
from planner.options.stacks import STACKS, Stack
from planner.options.zero_buffers import ZeroBuffers
from planner.setup.allowed import check

AROUND_FIELDS = ("stack", "expandable_segments", "reentrant_checkpointing")
"""Whose code runs a setup and how it is started: no plan chooses them."""
OF_OTHERS = ("transformers_version", "bitsandbytes_version", "trl_version", "use_cache")
"""What only other people's runs have: every launch file says today's."""
LATER_FIELDS = (
    "kernels",
    "activation_offload",
    "quantize_experts",
    "modules_to_save",
    "trained_layers",
    "objective",
    "adapter",
    "rollout",
    "images",
    "selective_checkpointing",
    "precomputed_reference",
    "hard_negatives",
    "cached_seqs",
    "frozen_encoder",
    "linear_attention",
    "uneven",
    "zero_buffers",
    *OF_OTHERS,
    *AROUND_FIELDS,
)
"""Fields that came after the first studies and plans; left out of JSON and keys at their defaults as well."""

# No slots: `TrainSetup.replace_trusted` copies a dictionary, thousands a plan.


@dataclass(frozen=True, kw_only=True, init=False)
class Program:
    """Whose code runs the step."""

    stack: str = _DEFAULT_STACK
    """One of STACK_NAMES, whose training step it is (`planner.options.stacks`)."""
    transformers_version: str = ""
    """Whose code computes the step ("4.44"); "": today's. No plan chooses an older one."""
    bitsandbytes_version: str = ""
    """As `transformers_version`."""
    trl_version: str = ""
    """As `transformers_version`."""

    @property
    def trainer(self) -> Stack:
        return STACKS[self.stack]

    def before_transformers(self, *version: int) -> bool:
        """Whether the modeling code is that of an older transformers than this version."""
        return _before(self.transformers_version or self.trainer.newest_transformers, version)

    def before_trl(self, *version: int) -> bool:
        """Whether the trainer of an objective is that of an older TRL than this version."""
        return _before(self.trl_version, version)


@dataclass(frozen=True, kw_only=True, init=False)
class Goal:
    """What the step trains for."""

    objective: str = _DEFAULT_OBJECTIVE
    """One of OBJECTIVE_NAMES (`planner.options.objectives`)."""
    rollout: Rollout | None = None
    """How an objective that generates its completions does so; None: as its trainer does by default
    (`objective_spec.rolls_out`)."""
    precomputed_reference: bool = False
    """The reference's log-probabilities of all data were computed before the first step."""
    hard_negatives: int = 0
    """Texts beside each pair of a contrastive batch, every one a column with a forward of its own."""
    cached_seqs: int = 0
    """Sequences at once of a contrastive loss with a gradient cache; 0: none, whole columns at once."""

    @property
    def objective_spec(self) -> Objective:
        return OBJECTIVES[self.objective]

    @property
    def seqs_per_sample(self) -> int:
        """Sequences that one sample puts into all forwards of its micro-batch."""
        return self.objective_spec.seqs_per_sample + self.hard_negatives


@dataclass(frozen=True, kw_only=True, init=False)
class Sharding:
    """How FSDP cuts weights, gradients and optimizer states."""

    shard_degree: int = 0
    """FSDP2 shards within groups of so many GPUs and replicates over the groups (hybrid shard); 0: all."""
    reshard_after_forward: bool = True
    """FSDP2 frees a layer's gathered weights after its forward (ZeRO-3 always does)."""
    fsdp_version: int = 2
    """Of FSDP, 1 or 2; no plan chooses 1, the older (`planner.memory.micro_batch.hooked_bytes`)."""
    sync_each_batch: bool = True
    """FSDP2 cuts the gradients of every micro-batch, as every launch file asks; else those of the whole model wait on
    every GPU for the step's last one, as transformers' Trainer has it by itself."""
    zero_buffers: ZeroBuffers | None = None
    """DeepSpeed's buffers as a configuration of its says them; None: as a plan's own files size them."""


@dataclass(frozen=True, kw_only=True, init=False)
class Layout:
    """How the model's copies, and one copy, lie on several GPUs."""

    tensor_degree: int = 1
    """GPUs over which every matrix is split (Megatron's column and row splits)."""
    context_degree: int = 1
    """GPUs over which every sequence is cut (context or sequence parallelism): as a ring under FSDP2, by attention
    heads under ZeRO (Ulysses)."""
    expert_degree: int = 1
    """GPUs over which every layer's experts are distributed, whole (expert parallelism)."""
    pipeline_degree: int = 1
    """Stages into which the layers are cut; accumulation_steps is then the micro-batches in flight."""
    pipeline_schedule: str = "1f1b"
    """One of PIPELINE_SCHEDULES."""

    @property
    def degrees(self) -> tuple[int, ...]:
        """The values of SPLIT_DEGREES, in their order."""
        return self.tensor_degree, self.context_degree, self.expert_degree, self.pipeline_degree

    @property
    def split_degree(self) -> int:
        """GPUs over which one copy's matrices, sequences and layers are cut."""
        return self.tensor_degree * self.context_degree * self.pipeline_degree

    @property
    def is_split(self) -> bool:
        """Whether something of one copy is cut or distributed over GPUs that sharding would gather again."""
        return self.split_degree > 1 or self.expert_degree > 1


@dataclass(frozen=True, kw_only=True, init=False)
class Devices:
    """Which GPUs, and what lies elsewhere."""

    num_gpus: int = 1
    """All GPUs of the job, over all nodes."""
    parallel: str = "none"
    """How data-parallel copies work together: "none", "ddp", "dp", "fsdp2", "zero1" to "zero3", "device-map"."""
    offload: str = "none"
    """What lies in host memory: "none", "optimizer" or "parameters"."""
    expandable_segments: bool = True
    """The allocator's setting, as every launch file here has it."""

    @property
    def single_gpu(self) -> bool:
        """Whether one GPU holds everything, without an engine that brings states from the host's memory."""
        return self.num_gpus == 1 and self.parallel == "none"

    @property
    def num_processes(self) -> int:
        """Processes that a launcher starts: one per GPU, except where one process drives all of them."""
        return 1 if self.parallel in ("dp", "device-map") else self.num_gpus

    @property
    def zero(self) -> bool:
        """Whether DeepSpeed's ZeRO shards it, at whichever stage."""
        return self.parallel in ZERO


@dataclass(frozen=True, kw_only=True, init=False)
class Recomputation:
    """What of the activations is recomputed, or lies in the host's memory."""

    checkpointing: int = 1
    """0 off, 1 every layer, n every n-th layer (layer i is checkpointed when i % n == 0)."""
    selective_checkpointing: bool = False
    """Checkpointed layers keep what their attention gave and recompute the rest (TRL's and Axolotl's selective
    activation checkpointing; torchtitan's keeps every second product of matrices too)."""
    reentrant_checkpointing: bool = False
    """The older form of torch's checkpointing (`use_reentrant=True`)."""
    activation_offload: bool = False
    """The inputs of checkpointed layers lie in the host's memory from forward to backward."""


@dataclass(frozen=True, kw_only=True, init=False)
class Batch:
    """What one micro-batch and one optimizer step are of."""

    micro_batch_seqs: int = 1
    """Samples per forward on one GPU: sequences, or what the objective makes of a sample (pairs)."""
    accumulation_steps: int = 1
    """Micro-batches per optimizer step."""
    seq_len_tokens: int = 2048
    """Length of every sequence of the worst batch."""
    packing: bool = False
    """Sequences are filled with several samples; False: padded to the longest."""
    uneven: bool = False
    """Of a padded micro-batch some samples are shorter than the longest; False: all are of `seq_len_tokens`."""
    images: Images | None = None
    """The pictures of every sample, whose tokens are part of its sequence; None: text alone."""


@dataclass(frozen=True, kw_only=True, init=False)
class Compute:
    """Data types, optimizer and kernels."""

    precision: str = "bf16-autocast"
    """One of PRECISIONS."""
    optimizer: str = "adamw-fused"
    """One of OPTIMIZERS ("adamw" is PyTorch's default foreach form)."""
    attention: str = "sdpa"
    """The implementation asked of transformers; which kernel SDPA then picks depends on the GPU."""
    loss: str = "full"
    """ "full" (logits materialised), "chunked" (TRL's default head), "liger" (fused linear cross-entropy)."""
    kernels: str = "eager"
    """ "eager" (transformers' and peft's own operations), "liger" (Liger's norm, rotary and gated kernels), "fused"
    (those or Unsloth's, with LoRA as fused functions)."""
    linear_attention: str = "torch"
    """What computes a hybrid's gated delta rule: "torch" (transformers' own loop over chunks) or "fla"
    (flash-linear-attention's kernels, `planner.setup.packages.CHUNKED_TYPES`)."""
    compile: bool = False
    """torch.compile."""
    use_cache: bool = False
    """The model fills its key-value cache while it trains, as transformers' do in a loop that leaves `config.use_cache`
    on (their own checkpointing switches it off, a wrapper's does not)."""

    @property
    def autocast_dtype(self) -> str | None:
        """ "bf16" or "fp16" under autocast, else None."""
        return PRECISIONS[self.precision].autocast

    @property
    def weight_dtype(self) -> str:
        """Data type of weights that are not quantized, before any k-bit cast: "fp32", "bf16" or "fp16"."""
        return PRECISIONS[self.precision].weights

    @property
    def compute_dtype(self) -> str:
        """Data type of matrix multiplications: "fp32", "bf16" or "fp16"."""
        return PRECISIONS[self.precision].compute


@dataclass(frozen=True, kw_only=True, init=False)
class Adaptation:
    """The adapters."""

    adapter: str = "lora"
    """One of ADAPTER_KINDS (`planner.options.adapters`); no plan proposes another than "lora" by itself."""
    lora_rank: int = 16
    """0 for full fine-tuning; of other adapters than LoRA their size (`planner.options.adapters`)."""
    lora_targets: str | tuple[str, ...] = "all-linear"
    """ "attention", "all-linear" or a tuple of module names."""
    lora_dropout: float = 0.0
    """Above 0 each adapted matrix keeps a dropped copy of its input."""
    adapter_dtype: str = "auto"
    """ "auto" follows the stack: TRL's are bf16 for quantized bases without the fp32 cast, else fp32 (peft's
    `autocast_adapter_dtype`); always fp32 under fp16 autocast."""
    modules_to_save: tuple[str, ...] = ()
    """peft's: embedding and head (SAVED_MODULES) trained whole beside the adapters, as copies in the type of their
    weights."""

    @property
    def kind(self) -> Adapter:
        return ADAPTERS[self.adapter]

    @property
    def virtual_tokens(self) -> int:
        """Tokens that the adapter puts before every sequence or before its keys."""
        return self.lora_rank if self.adapter in ("prompt", "p-tuning", "prefix") else 0


@dataclass(frozen=True, kw_only=True, init=False)
class Weights:
    """What trains, and how the rest is stored."""

    method: str = "lora"
    """ "full", "lora" (16- or 32-bit frozen base) or "qlora" (quantized one), whatever the adapter's type is."""
    quantization: str = "none"
    """Of the frozen base, "none" unless method is "qlora"."""
    kbit_fp32_cast: bool = False
    """peft's `prepare_model_for_kbit_training` casts what is not quantized to fp32 (qlora only)."""
    quantize_experts: bool = False
    """Stacked experts are stored in the base's 4 or 8 bits too and unpacked whole, a layer's at a time (bitsandbytes'
    `replace_parameter_4bit`; Axolotl's `quantize_moe_experts`). No plan takes 8 bits."""
    trained_layers: int | tuple[int, ...] = 0
    """The layers that train, or carry the adapters, and nothing else: so many of the last, as a negative number of the
    first, or a tuple of their numbers in order; 0: all."""
    frozen_encoder: bool = False
    """Of an encoder-decoder the encoder, convolutions included, does not train (`freeze_encoder`)."""

    @property
    def quantized(self) -> bool:
        return self.quantization != "none"

    @property
    def four_bit(self) -> bool:
        return self.quantization in ("nf4", "nf4-double")

    @property
    def trains_everything(self) -> bool:
        """Whether the weights train, those outside the layers too."""
        return self.method == "full" and not self.trained_layers


def _before(stated: str, version: tuple[int, ...]) -> bool:
    """Whether a version that is said ("4.44.2", "" for today's) is older than another."""
    return bool(stated) and tuple(int(part) for part in stated.split(".")[: len(version)]) < version


@dataclass(frozen=True, kw_only=True)
class TrainSetup(Program, Goal, Sharding, Layout, Devices, Recomputation, Batch, Compute, Adaptation, Weights):
    """One complete training setup that some step can be: the fields of its records, and what follows from several
    of them for formula, dry run, probe and exporters."""

    def __post_init__(self) -> None:
        check(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:  # at run time too: it is a key, and `replace` checks what is changed
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        self.__dict__[name] = value

    def run_by(self, target: str) -> Self:
        """The setup as a launch target's own stack runs it from a file written here; itself where it is no stack."""
        around: dict[str, Any] = {
            "stack": target,
            "expandable_segments": True,
            "reentrant_checkpointing": False,
            "fsdp_version": 2,
            "sync_each_batch": True,
            "zero_buffers": None,
            **{name: DEFAULTS[name] for name in OF_OTHERS},
        }
        if target not in STACKS or all(getattr(self, name) == value for name, value in around.items()):
            return self
        moved = self.replace(**around)
        if moved.resolved_adapter_dtype != self.resolved_adapter_dtype:
            moved = moved.replace(adapter_dtype=self.resolved_adapter_dtype)
        return moved

    @property
    def layout(self) -> dict[str, Any]:
        """The fields of LAYOUT_FIELDS that differ from their defaults."""
        values = {name: getattr(self, name) for name in LAYOUT_FIELDS}
        return {name: value for name, value in values.items() if value != DEFAULTS[name]}

    @property
    def seldom(self) -> dict[str, Any]:
        """The fields of LAYOUT_FIELDS and LATER_FIELDS that differ from their defaults."""
        later = {name: getattr(self, name) for name in LATER_FIELDS}
        return {name: value for name, value in later.items() if value != DEFAULTS[name]} | self.layout

    def replace_trusted(self, **changes: Any) -> Self:
        """A copy with some fields changed, not validated: for walks over values that are known to combine."""
        copy = object.__new__(type(self))
        values = copy.__dict__
        values.update(self.__dict__)
        values.update(changes)
        assert len(values) == len(DEFAULTS), changes
        return copy

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated anew."""
        copy = self.replace_trusted(**changes)
        check(copy)
        return copy

    def of_length(self, tokens: int) -> Self:
        """A copy with sequences of so many tokens; completions take at most half of shorter ones."""
        roll = self.rollout
        if roll is not None and tokens < self.seq_len_tokens:
            roll = replace(roll, completion_tokens=max(1, min(roll.completion_tokens, tokens // 2)))
        return self.replace(seq_len_tokens=tokens, rollout=roll)

    @property
    def builds_encoders(self) -> bool:
        """Whether the class with encoders is built where a model has another one for text."""
        return self.images is not None or self.trainer.builds_encoders

    @property
    def stream_degree(self) -> int:
        """GPUs over which tensor parallelism also cuts the residual stream, its norms and the logits."""
        return self.tensor_degree if self.trainer.sequence_parallel else 1

    @property
    def sharded_at_loading(self) -> bool:
        """Whether transformers shards the model while it loads (`DistributedConfig`), and Accelerate wraps nothing."""
        experts = self.expert_degree > 1 and self.parallel == "fsdp2"
        return (self.tensor_degree > 1 and self.stream_degree == 1) or experts

    @property
    def defers_reduction(self) -> bool:
        """Whether whole gradients wait for the step's last micro-batch under FSDP2: without `sync_each_batch`, and
        always where transformers cuts tensors at loading (of experts the launch files ask to reduce every time)."""
        at_loading = self.sharded_at_loading and self.expert_degree == 1
        return self.parallel == "fsdp2" and (at_loading or not self.sync_each_batch)

    @property
    def stages_nf4(self) -> bool:
        """Whether the 4-bit base is made in the host's memory and never whole on a GPU (`Stack.stages_nf4`).

        Source: axolotl 0.21 utils/schemas/validation.py STAGED_NF4_CONSTRAINTS.
        """
        when = self.trainer.stages_nf4
        plain = self.adapter in ("lora", "rslora") and not self.modules_to_save and self.shards == self.num_gpus
        staged = self.four_bit and self.parallel == "fsdp2" and plain
        return staged and (when == "always" or (when == "offloaded" and self.offload == "parameters"))

    @property
    def wide_stacks(self) -> bool:
        """Whether a mixture's stacks of experts are fp32 where the weights beside them are not.

        Source: axolotl 0.21 `_prepare_model_for_quantization`: peft's cast is left out beside quantized experts, under
        FSDP (with QLoRA, or efficient loading) and under ZeRO-3. Axolotl's docs/expert_quantization.qmd:
        GLM-4.7-Flash takes about 127 GiB so; its stacks are 103.5 GiB in fp32.
        Not counted: biases of quantized matrices and routers, which are fp32 too.
        """
        apart = self.quantize_experts or self.kbit_fp32_cast or self.parallel in ("fsdp2", "zero3")
        return self.quantized and self.trainer.widens_stacks and not apart

    @property
    def scales_loss(self) -> bool:
        """Whether a loss scaler steps: under fp16 autocast alone."""
        return self.autocast_dtype == "fp16"

    @property
    def resolved_adapter_dtype(self) -> str:
        """Data type of the LoRA matrices, with "auto" resolved as the stack does it.

        Source: `planner.options.stacks`; peft 0.21 `get_peft_model(autocast_adapter_dtype=True)` casts 16-bit
        adapters to fp32.

        Under fp16 autocast only fp32 adapters train: PyTorch's GradScaler refuses fp16 gradients and has no bf16 kernel
        (`torch/amp/grad_scaler.py` _unscale_grads_, `AmpKernels.cu`).
        """
        if self.adapter_dtype != "auto":
            return self.adapter_dtype
        if self.scales_loss:
            return "fp32"
        return self.trainer.adapter_dtype(quantized=self.quantized, cast=self.kbit_fp32_cast, weights=self.weight_dtype)

    @property
    def scaler_refusal(self) -> str:
        """Why the loss scaler of fp16 autocast cannot step this setup's adapters, "" where it can."""
        if self.method == "full" or not self.scales_loss or self.resolved_adapter_dtype == "fp32":
            return ""
        return f"the fp16 loss scaler cannot unscale {self.resolved_adapter_dtype} adapters' gradients"

    @property
    def rollout_settings(self) -> Rollout:
        """How completions come about, of an objective that generates them."""
        return self.rollout or Rollout.usual(self.seq_len_tokens)

    @property
    def prompt_tokens(self) -> int:
        """What is left of a sequence for the prompt, of an objective that generates the rest."""
        return self.seq_len_tokens - self.rollout_settings.completion_tokens

    @property
    def trainer_title(self) -> str:
        """Whose trainer runs the objective's step, for people."""
        return self.trainer.title.replace("SFTTrainer", self.objective_spec.trainer or "SFTTrainer")

    @property
    def generation_seqs(self) -> int:
        """Completions that are generated at once."""
        return self.rollout_settings.at_once(self.global_batch_seqs)

    @property
    def local_generation_seqs(self) -> int:
        """Of these, how many each GPU generates where the model does: those of its own micro-batches."""
        return self.generation_seqs // self.data_degree

    @property
    def has_reference(self) -> bool:
        """Whether the step also asks the model as it was before training."""
        if self.precomputed_reference:
            return False
        return self.objective_spec.reference or (self.objective_spec.rolls_out and self.rollout_settings.reference)

    @property
    def pauses_checkpointing(self) -> bool:
        """Whether its trainer, TRL's, switches checkpointing off within a step, and on again for every layer and with
        nothing on the host, whatever it was told.

        Source: trl 1.9 and 1.16 models/utils.py disable_gradient_checkpointing, which hands transformers' words on to
        torch; seen with transformers 5.23.
        """
        return self.stack in ("trl", "axolotl") and (self.has_reference or self.objective_spec.rolls_out)

    @property
    def copies_reference(self) -> bool:
        """Whether that is a second copy of the weights: with adapters it is the model with them switched off."""
        return self.has_reference and self.method == "full"

    @property
    def asks_reference(self) -> bool:
        """Whether it is asked while the activations of a forward with gradients are there."""
        return self.has_reference and not self.objective_spec.rolls_out

    @property
    def extra_forwards(self) -> int:
        """Forwards of every micro-batch without gradients."""
        if not self.objective_spec.rolls_out:
            precomputed = self.objective_spec.reference_forwards if self.precomputed_reference else 0
            return self.objective_spec.extra_forwards - precomputed + bool(self.cached_seqs)
        old = self.objective_spec.asks_old or self.rollout_settings.old_log_probs(self.global_batch_seqs)
        return int(self.rollout_settings.reference) + int(old)

    def forwards_of(self, samples: int) -> int:
        """Forwards with gradients that a micro-batch of so many samples is cut into, each of as many sequences."""
        pieces = -(-samples // self.cached_seqs) if self.cached_seqs else 1
        return pieces * (self.objective_spec.forwards + self.hard_negatives)

    @property
    def num_forwards(self) -> int:
        """Of its own micro-batch."""
        return self.forwards_of(self.micro_batch_seqs)

    @property
    def live_forwards(self) -> int:
        """Of these, how many keep their activations at once: a gradient cache runs each one's backward before the next.

        Source: Gao et al. 2021, GradCache, https://arxiv.org/abs/2101.06983.
        """
        return 1 if self.cached_seqs else self.num_forwards

    @property
    def forward_tokens(self) -> int:
        """Tokens of one forward with gradients that pass through the layers, virtual ones included."""
        if self.cached_seqs:
            return self.cached_seqs * self.layer_tokens
        return self.tokens_per_micro_batch // self.num_forwards

    def least_seqs(self, batch: int) -> int:
        """The smallest micro-batch allowed for this batch size, in samples: all of it where nothing accumulates."""
        return batch if self.trainer.steps_in_backward else self.objective_spec.least(batch)

    @property
    def adds_gradients(self) -> bool:
        """Whether gradients of an earlier backward of the same step are there while the next one runs."""
        return self.accumulation_steps > 1 or self.cached_seqs > 0

    @property
    def scored_tokens(self) -> int:
        """Tokens of one micro-batch whose logits are asked for: all, or those of the completions."""
        if not self.objective_spec.rolls_out:
            return self.tokens_per_micro_batch
        return self.micro_batch_seqs * self.rollout_settings.completion_tokens

    @property
    def compiled(self) -> bool:
        """Whether torch.compile compiles the layers. In transformers' models flash attention asks whether the positions
        hold packed sequences, and unpads; dynamo leaves the graph there, and since a checkpointed layer is closed to
        it (pytorch/pytorch issue 139989), the whole of such layers runs as it is.

        Source: transformers 5.23 `modeling_flash_attention_utils.py` _is_packed_sequence, _upad_input.
        Measured: benchmarks/compiled_layers.py at e34acc15, PyTorch 2.13: of 12 such layers no graph, of others one.
        """
        return self.compile and not (
            self.trainer.traces_masks and self.checkpointing and self.attention == "flash-attention-2"
        )

    @property
    def log_probs(self) -> str:
        """How TRL takes tokens' log-probabilities of whole logits, before it had a kernel of its own.

        "gathered": of all logits at once. "gathered beside": the same, and the chosen half's cross-entropy.
        "rows": row by row. "kept rows": row by row while the model's outputs are alive. "rows apart": KTO's, when
        the other prompts' logits are freed. "copied": row by row of a copy. "": with the kernel, or another stack.

        Source: trl 0.9 to 0.28 `DPOTrainer.concatenated_forward`, 0.29 to 1.13 `_compute_loss` (1.5 copies, 1.6 does
        not; 1.14 has the kernel for the policy); from 0.15 on `selective_log_softmax`.
        """
        if not self.before_trl(1, 14 if self.objective == "dpo" else 15):
            return ""
        if self.before_trl(0, 15):
            return "gathered beside" if self.objective == "dpo" and self.before_trl(0, 12) else "gathered"
        if self.objective == "kto" and not self.before_trl(0, 17):
            return "rows apart"
        if self.objective != "dpo" or self.before_trl(0, 29):
            return "rows"
        return "copied" if self.before_trl(1, 6) else "kept rows"

    @property
    def upcasts_logits(self) -> bool:
        """Whether the full loss is computed in fp32: by the trainer, or by autocast, on whose list cross-entropy is and
        within which a loop of one's own computes it (LitGPT's Fabric leaves it before the loss)."""
        within = self.autocast_dtype is not None and not self.trainer.loss_chunk_tokens
        return self.trainer.upcasts_logits or within

    @property
    def checkpointed_loss(self) -> bool:
        """Whether TRL's chunked loss is a loop over checkpointed pieces, before it had kernels of its own (1.15)."""
        return self.loss == "chunked" and self.before_trl(1, 15)

    @property
    def widens_head(self) -> bool:
        """Whether each of these pieces makes an fp32 copy of the whole head (TRL 1.4 to 1.12)."""
        return self.checkpointed_loss and self.before_trl(1, 13)

    @property
    def uses_older_code_paths(self) -> bool:
        """Whether the packages of this setup, or the cache that it fills, make its step another than today's."""
        older = self.repeats_keys or self.copies_logits or self.saves_four_bit_inputs or self.checkpointed_loss
        of_pairs = bool(self.log_probs) and not self.objective_spec.supervised
        return self.use_cache or older or of_pairs or self.before_transformers(4, 43)

    @property
    def copies_logits(self) -> bool:
        """Whether transformers' own loss copies all logits but the last ones (before 4.49)."""
        by_transformers = self.objective_spec.supervised and self.trainer.transformers_loss
        return self.loss == "full" and by_transformers and self.before_transformers(4, 49)

    @property
    def saves_four_bit_inputs(self) -> bool:
        """Whether bitsandbytes keeps the input of every 4-bit product (before 0.43.2)."""
        return self.four_bit and _before(self.bitsandbytes_version, (0, 43, 2))

    @property
    def saves_matmul_inputs(self) -> bool:
        """Whether a quantized matrix keeps its input on the node of its graph, where no checkpointing reaches it.

        Source: bitsandbytes 0.50 `MatMul8bitLt` (ctx.tensors); of 4 bits 0.43.1 `MatMul4Bit` ((A, B)), not 0.43.2.
        """
        return self.quantization == "int8" or self.saves_four_bit_inputs

    @property
    def pads(self) -> bool:
        """Whether attention sees padding: SDPA by a mask that hides it, flash attention 2 by copies without it (and one
        of its output with it); Unsloth's own attention is told of none in training, nor is any of a cut sequence.

        Source: transformers 5.23 `masking_utils.py` `_ignore_causal_mask_sdpa`, `flash_attention_mask` (a mask of ones
        is dropped), `modeling_flash_attention_utils.py` `_upad_input`, `_pad_input`; accelerate 1.15 `big_modeling.py`
        _attach_context_parallel_hooks, DeepSpeed 0.19 `ulysses_sp.py` uattn_wrapper (attention_mask = None).
        """
        if not self.uneven or self.packing or self.attention not in ("sdpa", "flash-attention-2"):
            return False
        of_class = not self.trainer.own_models and self.stack != "unsloth"
        return of_class and self.micro_batch_seqs * self.seqs_per_sample > 1 and self.context_degree == 1

    @property
    def repeats_keys(self) -> bool:
        """Whether SDPA is handed keys and values repeated to all query heads, whichever kernel it picks.

        Source: transformers 4.53 `integrations/sdpa_attention.py` (repeat_kv), 4.54 (enable_gqa without a mask).
        """
        return self.attention == "sdpa" and self.before_transformers(4, 54)

    def fused_parts(self, model_type: str, *, compiler: bool = True) -> frozenset[str]:
        """What of a layer of this type runs as kernels of its own: torch.compile's, which has them all, else its kernel
        family's (alone with `compiler` False, as a file that switches them on says them)."""
        if compiler and self.compiled:
            return COMPILED
        takes = self.trainer.fuses_plain_adapters or self.quantization != "none"
        fused_lora = {"lora"} if takes and model_type in FUSED_LORA else frozenset()
        return KERNELS[self.kernels].parts & (LIGER_PARTS.get(model_type, frozenset()) | fused_lora)

    @property
    def sequence_chunks(self) -> int:
        """Chunks of a sequence under context parallelism: ring attention gives each GPU an early and a late one, so
        that all have as much to attend to (head-tail load balancing)."""
        return 2 * self.context_degree if self.uses_ring_attention else self.context_degree

    @property
    def global_batch_seqs(self) -> int:
        """Samples per optimizer step over all data-parallel copies."""
        return self.micro_batch_seqs * self.accumulation_steps * self.data_degree

    @property
    def data_degree(self) -> int:
        """Data-parallel copies of the model: each sees its own sequences."""
        if self.num_gpus == 1 or self.parallel == "device-map":
            return 1
        return self.num_gpus // self.split_degree

    @property
    def shardable_ranks(self) -> int:
        """Ranks that would hold the same if nothing were sharded: those of one sequence count as well as its copies."""
        return self.data_degree * self.context_degree

    @property
    def uses_ring_attention(self) -> bool:
        """Whether the keys and values of a sequence that is cut go round its GPUs (PyTorch's context parallelism)."""
        return self.context_degree > 1 and self.parallel == "fsdp2"

    @property
    def shards(self) -> int:
        """GPUs over which sharded states are cut; 1 where nothing is sharded."""
        if self.parallel not in SHARDED:
            return 1
        return self.shard_degree or self.shardable_ranks

    @property
    def layer_tokens(self) -> int:
        """Tokens of one sequence that pass through the layers: a prefix gives keys and values alone."""
        return self.seq_len_tokens + (self.lora_rank if self.adapter in ("prompt", "p-tuning") else 0)

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens of one micro-batch on one GPU that pass through the layers, virtual ones included."""
        return self.micro_batch_seqs * self.seqs_per_sample * self.layer_tokens

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all GPUs."""
        return self.global_batch_seqs * self.seqs_per_sample * self.seq_len_tokens

    @property
    def widens_trained(self) -> bool:
        """Whether layers that train alone are fp32 beside a frozen rest in 16 bits.

        Source: LLaMA-Factory 0.9 `model/adapter.py` init_adapter, cast_trainable_params_to_fp32.
        """
        partial = bool(self.trained_layers) and self.method == "full"
        return partial and self.stack == "llamafactory" and self.autocast_dtype is not None


DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(TrainSetup)}
FIELDS = tuple(DEFAULTS)
"""The names of all fields."""
