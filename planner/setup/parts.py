"""The fields of a training setup, by what they decide: nine records, of which `planner.setup.TrainSetup` is all.

What a field may be, and which cannot be combined: `planner.setup.allowed`. Defaults are those of a plan that nobody
asked for anything.
"""

from planner.core.records import dataclass
from planner.options.adapters import ADAPTERS, Adapter
from planner.options.images import Images
from planner.options.layouts import ZERO
from planner.options.objectives import DEFAULT as _DEFAULT_OBJECTIVE
from planner.options.objectives import OBJECTIVES, Objective
from planner.options.precisions import PRECISIONS
from planner.options.rollouts import Rollout
from planner.options.stacks import DEFAULT as _DEFAULT_STACK
from planner.options.stacks import STACKS, Stack

# No slots: `TrainSetup.replace_trusted` copies a dictionary, thousands a plan.


@dataclass(frozen=True, kw_only=True)
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
        """The stack's row."""
        return STACKS[self.stack]

    def before_transformers(self, *version: int) -> bool:
        """Whether the modeling code is that of an older transformers than this version."""
        return _before(self.transformers_version, version)

    def before_bitsandbytes(self, *version: int) -> bool:
        """Whether the quantized products are those of an older bitsandbytes than this version."""
        return _before(self.bitsandbytes_version, version)

    def before_trl(self, *version: int) -> bool:
        """Whether the trainer of an objective is that of an older TRL than this version."""
        return _before(self.trl_version, version)


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What the step trains for."""

    objective: str = _DEFAULT_OBJECTIVE
    """One of OBJECTIVE_NAMES (`planner.options.objectives`)."""
    rollout: Rollout | None = None
    """How an objective that generates its completions does so; None: as its trainer by itself (`rolls`)."""
    precomputed_reference: bool = False
    """The reference's log-probabilities of all data were computed before the first step."""
    hard_negatives: int = 0
    """Texts beside each pair of a contrastive batch, every one a column with a forward of its own."""
    cached_seqs: int = 0
    """Sequences at once of a contrastive loss with a gradient cache; 0: none, whole columns at once."""

    @property
    def aim(self) -> Objective:
        """The objective's row."""
        return OBJECTIVES[self.objective]

    @property
    def seqs_per_sample(self) -> int:
        """Sequences that one sample puts into all forwards of its micro-batch."""
        return self.aim.seqs_per_sample + self.hard_negatives


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the model's copies, and one copy, lie on several GPUs."""

    tensor_degree: int = 1
    """GPUs over which every matrix is split (Megatron's column and row splits)."""
    context_degree: int = 1
    """GPUs over which every sequence is cut (context or sequence parallelism): as a ring under FSDP2, by attention
    heads under ZeRO (Ulysses)."""
    expert_degree: int = 1
    """GPUs over which every layer's experts are dealt out, whole (expert parallelism)."""
    pipeline_degree: int = 1
    """Stages into which the layers are cut; accumulation_steps is then the micro-batches in flight."""
    pipeline_schedule: str = "1f1b"
    """One of PIPELINE_SCHEDULES."""
    shard_degree: int = 0
    """FSDP2 shards within groups of so many GPUs and replicates over the groups (hybrid shard); 0: all."""
    reshard_after_forward: bool = True
    """FSDP2 frees a layer's gathered weights after its forward (ZeRO-3 always does)."""
    fsdp_version: int = 2
    """Of FSDP, 1 or 2; no plan chooses 1, the older (`planner.memory.micro_batch.hooked_bytes`)."""

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
        """Whether something of one copy is cut or dealt out over GPUs that sharding would gather again."""
        return self.split_degree > 1 or self.expert_degree > 1

    @property
    def sharded_at_loading(self) -> bool:
        """Whether transformers shards the model while it loads (`DistributedConfig`), and Accelerate wraps nothing."""
        return self.tensor_degree > 1 or self.expert_degree > 1


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Which GPUs, and what lies elsewhere."""

    num_gpus: int = 1
    """All GPUs of the job, over all nodes."""
    parallel: str = "none"
    """One of PARALLELS, over the data-parallel copies."""
    offload: str = "none"
    """One of OFFLOADS."""
    expandable_segments: bool = True
    """The allocator's setting, as every launch file here has it."""

    @property
    def alone(self) -> bool:
        """Whether one GPU holds everything: no other GPU, nothing in the host's memory that an engine brings."""
        return self.num_gpus == 1 and self.parallel == "none"

    @property
    def zero(self) -> bool:
        """Whether DeepSpeed's ZeRO shards it, at whichever stage."""
        return self.parallel in ZERO


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
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
    images: Images | None = None
    """The pictures of every sample, whose tokens are part of its sequence; None: text alone."""


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
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
        """The adapter's row."""
        return ADAPTERS[self.adapter]

    @property
    def virtual_tokens(self) -> int:
        """Tokens that the adapter puts before every sequence or before its keys."""
        return self.lora_rank if self.adapter in ("prompt", "p-tuning", "prefix") else 0


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What trains, and how the rest is stored."""

    method: str = "lora"
    """ "full", "lora" (16- or 32-bit frozen base) or "qlora" (quantized frozen base)."""
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
        """Whether the base is quantized."""
        return self.quantization != "none"

    @property
    def four_bit(self) -> bool:
        """Whether the base is held in 4 bits."""
        return self.quantization in ("nf4", "nf4-double")

    @property
    def trains_everything(self) -> bool:
        """Whether the weights train, those outside the layers too."""
        return self.method == "full" and not self.trained_layers


def _before(said: str, version: tuple[int, ...]) -> bool:
    """Whether a version that is said ("4.44.2", "" for today's) is older than another."""
    return bool(said) and tuple(int(part) for part in said.split(".")[: len(version)]) < version
