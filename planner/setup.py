"""`TrainSetup`: one point of the space. Impossible combinations cannot be built.

`model` and `gpu` are not part of it: the same setup is tried on any. The interchange form (one JSON object with model,
gpu and the setup's fields) lives in `planner.interchange`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, Self

from planner.choices.adapters import ADAPTERS as _ADAPTERS
from planner.choices.adapters import Adapter
from planner.choices.adapters import refusal as _adapter_refusal
from planner.choices.kernels import KERNELS as _KERNELS
from planner.choices.losses import LOSSES as _LOSSES
from planner.choices.objectives import DEFAULT as _DEFAULT_OBJECTIVE
from planner.choices.objectives import OBJECTIVES as _OBJECTIVES
from planner.choices.objectives import Objective
from planner.choices.optimizers import OPTIMIZERS as _OPTIMIZERS
from planner.choices.precisions import PRECISIONS as _PRECISIONS
from planner.errors import SetupError
from planner.stacks import DEFAULT as _DEFAULT_STACK
from planner.stacks import STACKS as _STACKS
from planner.stacks import Stack

METHODS = ("full", "lora", "qlora")
PRECISIONS = tuple(name for name, row in _PRECISIONS.items() if row.offered)
"""fp32; bf16-pure: bf16 weights, no autocast; bf16-autocast: bf16 weights under autocast; bf16-mixed: fp32 weights
under autocast; fp16-autocast: frozen fp16 weights under autocast with loss scaling (adapters only: a scaler cannot
unscale fp16 gradients); fp16-mixed: fp32 weights under fp16 autocast with loss scaling."""
QUANTIZATIONS = ("none", "int8", "nf4", "nf4-double")
OPTIMIZERS = tuple(_OPTIMIZERS)
ATTENTIONS = ("eager", "sdpa", "flash-attention-2")
LOSSES = tuple(_LOSSES)
KERNEL_FAMILIES = tuple(_KERNELS)
OBJECTIVE_NAMES = tuple(_OBJECTIVES)
ADAPTER_KINDS = tuple(_ADAPTERS)
ADAPTER_DTYPES = ("auto", "fp32", "bf16", "fp16")
TARGET_SETS = ("attention", "all-linear")
PARALLELS = ("none", "dp", "ddp", "zero1", "zero2", "zero3", "fsdp2", "device-map")
"""What the data-parallel copies share: nothing ("none": there is one copy), gradients within one process
(nn.DataParallel, "dp") or over processes ("ddp"), optimizer states and more (DeepSpeed ZeRO 1 to 3, FSDP2).
"device-map" is one copy spread over the GPUs by layers, one GPU at work at a time."""
SHARDED = ("zero1", "zero2", "zero3", "fsdp2")
SAVED_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")
SAVED_HEADS = ("lm_head", "embed_out")
SAVED_MODULES = (*SAVED_EMBEDDINGS, *SAVED_HEADS)
"""What `modules_to_save` may name: the input embeddings and the output head, as model classes call them."""
STACK_NAMES = tuple(_STACKS)
"""Whose training step a setup is for (`planner.stacks`)."""
PIPELINE_SCHEDULES = ("1f1b", "gpipe")
OFFLOADS = ("none", "optimizer", "parameters")
"""What lies in the host's memory between its uses: optimizer states, or those and the weights (and gradients)."""

_MAX_COUNT = 1 << 40  # anything larger is a typing mistake, and would overflow nothing but patience


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSetup:
    """One complete training setup.

    Attributes:
        method: "full", "lora" (16- or 32-bit frozen base) or "qlora" (quantized frozen base).
        precision: one of PRECISIONS.
        quantization: of the frozen base, "none" unless method is "qlora".
        kbit_fp32_cast: peft's `prepare_model_for_kbit_training` casts what is not quantized to fp32 (qlora only).
        lora_rank: 0 for full fine-tuning; of other adapters than LoRA their size (`planner.choices.adapters`).
        lora_targets: "attention", "all-linear" or a tuple of module names.
        lora_dropout: above 0 each adapted matrix keeps a dropped copy of its input.
        adapter_dtype: "auto" follows the stack: TRL's are bf16 for quantized bases without the fp32 cast, else fp32
            (peft's `autocast_adapter_dtype`); always fp32 under fp16 autocast.
        optimizer: one of OPTIMIZERS ("adamw" is PyTorch's default foreach form).
        attention: the implementation asked of transformers; which kernel SDPA then picks depends on the GPU.
        checkpointing: 0 off, 1 every layer, n every n-th layer (layer i is checkpointed when i % n == 0).
        loss: "full" (logits materialised), "chunked" (TRL's default head), "liger" (fused linear cross-entropy).
        kernels: "eager" (transformers' and peft's own operations), "liger" (Liger's norm, rotary and gated kernels),
            "fused" (those or Unsloth's, with LoRA as fused functions).
        activation_offload: the inputs of checkpointed layers lie in the host's memory from forward to backward.
        micro_batch_seqs: samples per forward on one GPU: sequences, or what the objective makes of a sample (pairs).
        accumulation_steps: micro-batches per optimizer step.
        seq_len_tokens: length of every sequence of the worst batch.
        packing: sequences are filled with several samples; False: padded to the longest.
        compile: torch.compile.
        num_gpus: all GPUs of the job, over all nodes.
        parallel: one of PARALLELS, over the data-parallel copies.
        tensor_degree: GPUs over which every matrix is split (Megatron's column and row splits).
        pipeline_degree: stages into which the layers are cut; accumulation_steps is then the micro-batches in flight.
        pipeline_schedule: one of PIPELINE_SCHEDULES.
        shard_degree: FSDP2 shards within groups of so many GPUs and replicates over the groups (hybrid shard); 0: all.
        reshard_after_forward: FSDP2 frees a layer's gathered weights after its forward (ZeRO-3 always does).
        offload: one of OFFLOADS.
        modules_to_save: peft's: embedding and head (SAVED_MODULES) trained whole beside the adapters, as copies in the
            type of their weights.
        stack: one of STACK_NAMES, whose training step it is (`planner.stacks`).
        expandable_segments: the allocator's setting, as every launch file here has it.
        quantize_experts: stacked experts are stored in the base's 4 bits too and unpacked whole, a layer's at a time
            (bitsandbytes' `replace_parameter_4bit`; Axolotl's `quantize_moe_experts`).
        reentrant_checkpointing: the older form of torch's checkpointing (`use_reentrant=True`).
        objective: one of OBJECTIVE_NAMES, what the step trains for (`planner.choices.objectives`).
        adapter: one of ADAPTER_KINDS (`planner.choices.adapters`); no plan proposes another than "lora" by itself.
    """

    method: str = "lora"
    precision: str = "bf16-autocast"
    quantization: str = "none"
    kbit_fp32_cast: bool = False
    lora_rank: int = 16
    lora_targets: str | tuple[str, ...] = "all-linear"
    lora_dropout: float = 0.0
    adapter_dtype: str = "auto"
    optimizer: str = "adamw-fused"
    attention: str = "sdpa"
    checkpointing: int = 1
    loss: str = "full"
    micro_batch_seqs: int = 1
    accumulation_steps: int = 1
    seq_len_tokens: int = 2048
    packing: bool = False
    compile: bool = False
    kernels: str = "eager"
    activation_offload: bool = False
    num_gpus: int = 1
    parallel: str = "none"
    tensor_degree: int = 1
    pipeline_degree: int = 1
    pipeline_schedule: str = "1f1b"
    shard_degree: int = 0
    reshard_after_forward: bool = True
    offload: str = "none"
    modules_to_save: tuple[str, ...] = ()
    stack: str = _DEFAULT_STACK
    expandable_segments: bool = True
    reentrant_checkpointing: bool = False
    quantize_experts: bool = False
    objective: str = _DEFAULT_OBJECTIVE
    adapter: str = "lora"

    def __post_init__(self) -> None:
        _one_of("method", self.method, METHODS)
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("quantization", self.quantization, QUANTIZATIONS)
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("attention", self.attention, ATTENTIONS)
        _one_of("loss", self.loss, LOSSES)
        _one_of("kernels", self.kernels, KERNEL_FAMILIES)
        _one_of("adapter_dtype", self.adapter_dtype, ADAPTER_DTYPES)
        if self.adapter not in _ADAPTERS and (refused := _adapter_refusal(str(self.adapter))):
            raise SetupError(f"adapter {self.adapter!r} is not planned: {refused}")
        _one_of("adapter", self.adapter, ADAPTER_KINDS)
        _one_of("parallel", self.parallel, PARALLELS)
        _one_of("stack", self.stack, STACK_NAMES)
        _one_of("objective", self.objective, OBJECTIVE_NAMES)
        for name in ("micro_batch_seqs", "accumulation_steps", "seq_len_tokens", "num_gpus"):
            _count(name, getattr(self, name), at_least=1)
        _count("lora_rank", self.lora_rank, at_least=0)
        _count("checkpointing", self.checkpointing, at_least=0)
        if not 0.0 <= self.lora_dropout < 1.0:
            raise SetupError(f"lora_dropout must be in [0, 1), got {self.lora_dropout}")
        if isinstance(self.lora_targets, str):
            _one_of("lora_targets", self.lora_targets, TARGET_SETS, hint="or a list of module names")
        elif not self.lora_targets or not all(isinstance(name, str) and name for name in self.lora_targets):
            raise SetupError(f"lora_targets must name at least one module, got {self.lora_targets!r}")
        if self.activation_offload and not self.checkpointing:
            raise SetupError(
                "activation_offload moves the inputs of checkpointed layers, got checkpointing off",
                hint="switch checkpointing on",
            )
        if self.quantize_experts and (not self.quantization.startswith("nf4") or self.kbit_fp32_cast):
            raise SetupError(
                f"quantize_experts stores experts in the base's 4 bits, got quantization {self.quantization!r}"
                + (" with kbit_fp32_cast" if self.kbit_fp32_cast else ""),
                hint="use --quantization nf4-double or nf4",
            )
        if self.method == "full":
            self._check_full()
        else:
            self._check_adapter()
        if self.attention == "flash-attention-2" and self.precision == "fp32":
            raise SetupError(
                "flash-attention-2 has no fp32 kernel, got precision 'fp32'",
                hint="use --attention sdpa, or a 16-bit precision",
            )
        if self.num_gpus > 1 or self.parallel != "none" or self._spread_fields() != _NO_SPREAD:
            self._check_spread()
        if self.objective != _DEFAULT_OBJECTIVE:
            self._check_objective()

    def _check_objective(self) -> None:
        """What another objective than supervised training leaves of the other fields."""
        row = self.aim
        if self.loss not in row.losses:
            raise SetupError(
                f"no trainer of objective {self.objective!r} has loss {self.loss!r}",
                hint=f"use --loss {' or '.join(row.losses)}",
            )
        if self.packing and not row.packs:
            raise SetupError(f"objective {self.objective!r} trains on {row.sample}s, which no trainer packs")
        if self.num_gpus > 1 and not row.supervised:
            raise SetupError(
                f"objective {self.objective!r} is planned on one GPU: how its {row.sample}s and its reference are "
                "spread is not modelled",
                hint="leave --gpus out",
            )

    def _spread_fields(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in SPREAD_FIELDS)

    def _check_spread(self) -> None:
        """How the job is spread over GPUs."""
        for name in ("tensor_degree", "pipeline_degree"):
            _count(name, getattr(self, name), at_least=1)
        _count("shard_degree", self.shard_degree, at_least=0)
        _one_of("pipeline_schedule", self.pipeline_schedule, PIPELINE_SCHEDULES)
        _one_of("offload", self.offload, OFFLOADS)
        if not isinstance(self.reshard_after_forward, bool):
            raise SetupError(f"reshard_after_forward must be true or false, got {self.reshard_after_forward!r}")
        if self.num_gpus == 1:
            if self.parallel != "none":
                raise SetupError(f"parallel {self.parallel!r} needs more than one GPU", hint="give --gpus 2 or more")
            raise SetupError("tensor, pipeline and shard degrees, and offloading, need more than one GPU")
        split = self.tensor_degree * self.pipeline_degree
        if self.num_gpus % split:
            raise SetupError(
                f"{self.num_gpus} GPUs cannot be cut into tensor_degree {self.tensor_degree} x pipeline_degree "
                f"{self.pipeline_degree}",
                hint="their product must divide the number of GPUs",
            )
        if self.quantize_experts and self.parallel != "ddp":
            raise SetupError("quantize_experts is planned for one GPU or ddp")
        if self.activation_offload and (split > 1 or self.parallel not in ("none", "ddp")):
            raise SetupError("activation_offload is for one GPU or ddp: sharding engines checkpoint by themselves")
        if self.tensor_degree > 1 and self.kernels != "eager":
            raise SetupError(f"kernels {self.kernels!r} do not take matrices and norms that tensor parallelism cuts")
        if self.parallel in ("dp", "device-map") and split > 1:
            raise SetupError(f"parallel {self.parallel!r} does not combine with tensor or pipeline parallelism")
        if (self.parallel == "none") != (self.num_gpus == split):
            raise SetupError(
                f"parallel {self.parallel!r} does not suit {self.num_gpus // split} data-parallel copies",
                hint="'none' with one copy; else one of " + ", ".join(PARALLELS[1:]),
            )
        if self.shard_degree and (self.parallel != "fsdp2" or self.data_degree % self.shard_degree):
            raise SetupError(
                f"shard_degree {self.shard_degree} needs parallel 'fsdp2' and must divide its {self.data_degree} copies"
            )
        if not self.reshard_after_forward and self.parallel != "fsdp2":
            raise SetupError("reshard_after_forward off belongs to parallel 'fsdp2'")
        allowed = {"zero1": OFFLOADS[:2], "zero2": OFFLOADS[:2], "zero3": OFFLOADS, "fsdp2": ("none", "parameters")}
        if self.offload not in allowed.get(self.parallel, ("none",)):
            raise SetupError(
                f"parallel {self.parallel!r} cannot offload {self.offload!r}",
                hint="zero1 and zero2 offload 'optimizer', zero3 'optimizer' or 'parameters', fsdp2 'parameters'",
            )

    def _check_full(self) -> None:
        if self.quantization != "none":
            raise SetupError(
                f"method 'full' cannot train {self.quantization} weights",
                hint="quantized weights are frozen: use --method qlora, or --quantization none",
            )
        if self.lora_rank != 0:
            raise SetupError(f"method 'full' has no LoRA rank, got {self.lora_rank}", hint="leave --rank out")
        if not _PRECISIONS[self.precision].trains_weights:
            raise SetupError(
                "method 'full' cannot train fp16 weights: the loss scaler cannot unscale fp16 gradients",
                hint="use --precision fp16-mixed (fp32 weights under fp16 autocast)",
            )
        if self.kbit_fp32_cast:
            raise SetupError("kbit_fp32_cast belongs to method 'qlora', got method 'full'")
        if self.modules_to_save:
            raise SetupError("modules_to_save belongs to adapters, method 'full' trains every module")
        if self.adapter != "lora":
            raise SetupError(f"adapter {self.adapter!r} belongs to method 'lora' or 'qlora', got method 'full'")
        if "lora" in _KERNELS[self.kernels].parts:
            raise SetupError(f"kernels {self.kernels!r} fuse adapters, got method 'full'", hint="use --kernels liger")

    def _check_adapter(self) -> None:
        unknown = [name for name in self.modules_to_save if name not in SAVED_MODULES]
        if unknown or not isinstance(self.modules_to_save, tuple):
            raise SetupError(
                f"modules_to_save must name embeddings or the head, got {', '.join(map(str, unknown))}",
                hint=f"names: {', '.join(SAVED_MODULES)}",
            )
        if self.adapter != "lora":
            self._check_kind()
        elif self.lora_rank < 1:
            raise SetupError(f"method {self.method!r} needs a LoRA rank of at least 1, got {self.lora_rank}")
        if self.method == "qlora" and self.quantization == "none":
            raise SetupError(
                "method 'qlora' needs a quantization, got 'none'",
                hint="use --quantization nf4-double, nf4 or int8; or --method lora",
            )
        if self.method == "lora" and self.quantization != "none":
            raise SetupError(
                f"method 'lora' has an unquantized base, got quantization {self.quantization!r}",
                hint="use --method qlora for a quantized base",
            )
        if self.kbit_fp32_cast and self.method != "qlora":
            raise SetupError(f"kbit_fp32_cast belongs to method 'qlora', got method {self.method!r}")
        if "lora" in _KERNELS[self.kernels].parts and not isinstance(self.lora_targets, str):
            raise SetupError(
                f"kernels {self.kernels!r} take attention or all linear layers whole, got lora_targets "
                f"{self.lora_targets!r}",
                hint="use --kernels liger",
            )
        if "lora" in _KERNELS[self.kernels].parts and (self.lora_dropout or self.quantization == "int8"):
            raise SetupError(
                f"kernels {self.kernels!r} have neither a LoRA dropout nor 8-bit weights, got lora_dropout "
                f"{self.lora_dropout:g}, quantization {self.quantization!r}",
                hint="use --kernels liger",
            )

    def _check_kind(self) -> None:
        """What another adapter than LoRA needs."""
        row = _ADAPTERS[self.adapter]
        if row.size and self.lora_rank < 1:
            raise SetupError(f"adapter {row.name!r} needs a {row.size} of at least 1, got {self.lora_rank}")
        if not row.size and self.lora_rank:
            raise SetupError(f"adapter {row.name!r} has no size, got rank {self.lora_rank}", hint="give lora_rank 0")
        if self.quantization not in row.quantizations:
            raise SetupError(
                f"adapter {row.name!r} does not take quantization {self.quantization!r}",
                hint=f"it takes {', '.join(row.quantizations)}",
            )
        if self.lora_dropout and not row.dropout:
            raise SetupError(f"adapter {row.name!r} has no dropout here, got lora_dropout {self.lora_dropout:g}")
        if not row.adapts_matrices and (self.lora_targets != "all-linear" or self.modules_to_save or self.packing):
            raise SetupError(
                f"adapter {row.name!r} adapts no matrices: it takes no lora_targets, no modules_to_save and no packing"
            )
        if self.checkpointing and not row.checkpointing:
            raise SetupError(
                f"peft refuses adapter {row.name!r} under gradient checkpointing", hint="use --checkpointing off"
            )
        if row.like_lora:
            return
        if self.objective != _DEFAULT_OBJECTIVE:
            raise SetupError(
                f"adapter {row.name!r} is planned for supervised fine-tuning, got objective {self.objective!r}",
                hint="use --adapter lora, rslora, pissa or loftq",
            )
        if "lora" in _KERNELS[self.kernels].parts:
            raise SetupError(
                f"kernels {self.kernels!r} fuse LoRA, got adapter {row.name!r}", hint="use --kernels liger"
            )
        if self.num_gpus > 1 and self.parallel != "ddp":
            raise SetupError(
                f"adapter {row.name!r} is planned for one GPU or for ddp, got parallel {self.parallel!r}",
                hint="lora, rslora, pissa and loftq take every way of sharing",
            )
        if (
            row.form in ("norms", "shared")
            and not self.autocast_dtype
            and self.resolved_adapter_dtype != self.weight_dtype
        ):
            raise SetupError(
                f"adapter {row.name!r} computes in {self.resolved_adapter_dtype} beside {self.weight_dtype} weights, "
                "which only autocast can bring together",
                hint="use --precision bf16-autocast",
            )

    # What the fields mean, in one place for formula, dry run, probe and exporters.

    @property
    def autocast_dtype(self) -> str | None:
        """ "bf16" or "fp16" under autocast, else None."""
        return _PRECISIONS[self.precision].autocast

    @property
    def weight_dtype(self) -> str:
        """Data type of weights that are not quantized, before any k-bit cast: "fp32", "bf16" or "fp16"."""
        return _PRECISIONS[self.precision].weights

    @property
    def compute_dtype(self) -> str:
        """Data type of matrix multiplications: "fp32", "bf16" or "fp16"."""
        return _PRECISIONS[self.precision].compute

    @property
    def resolved_adapter_dtype(self) -> str:
        """Data type of the LoRA matrices, with "auto" resolved as the stack does it.

        Source: `planner.stacks`; peft 0.21 `get_peft_model(autocast_adapter_dtype=True)` casts 16-bit adapters to fp32.
        Under fp16 autocast only fp32 adapters train: PyTorch's GradScaler refuses fp16 gradients and has no bf16 kernel
        (`torch/amp/grad_scaler.py` _unscale_grads_, `AmpKernels.cu`).
        """
        if self.adapter_dtype != "auto":
            return self.adapter_dtype
        if self.autocast_dtype == "fp16":
            return "fp32"
        return self.by.adapter_dtype(quantized=self.quantized, cast=self.kbit_fp32_cast, weights=self.weight_dtype)

    @property
    def scaler_refusal(self) -> str:
        """Why the loss scaler of fp16 autocast cannot step this setup's adapters, "" where it can."""
        if self.method == "full" or self.autocast_dtype != "fp16" or self.resolved_adapter_dtype == "fp32":
            return ""
        return f"the fp16 loss scaler cannot unscale {self.resolved_adapter_dtype} adapters' gradients"

    @property
    def aim(self) -> Objective:
        """The objective's row."""
        return _OBJECTIVES[self.objective]

    @property
    def kind(self) -> Adapter:
        """The adapter's row."""
        return _ADAPTERS[self.adapter]

    @property
    def by(self) -> Stack:
        """The stack's row."""
        return _STACKS[self.stack]

    def run_by(self, target: str) -> Self:
        """The setup as a launch target's own stack runs it from a file written here; itself where it is no stack."""
        around: dict[str, Any] = {"stack": target, "expandable_segments": True, "reentrant_checkpointing": False}
        if target not in _STACKS or all(getattr(self, name) == value for name, value in around.items()):
            return self
        moved = replace(self, **around)
        if moved.resolved_adapter_dtype != self.resolved_adapter_dtype:
            moved = replace(moved, adapter_dtype=self.resolved_adapter_dtype)
        return moved

    @property
    def quantized(self) -> bool:
        """Whether the base is quantized."""
        return self.quantization != "none"

    @property
    def global_batch_seqs(self) -> int:
        """Samples per optimizer step over all data-parallel copies."""
        return self.micro_batch_seqs * self.accumulation_steps * self.data_degree

    @property
    def data_degree(self) -> int:
        """Data-parallel copies of the model: each sees its own sequences."""
        if self.num_gpus == 1 or self.parallel == "device-map":
            return 1
        return self.num_gpus // (self.tensor_degree * self.pipeline_degree)

    @property
    def shards(self) -> int:
        """GPUs over which sharded states are cut; 1 where nothing is sharded."""
        if self.parallel not in SHARDED:
            return 1
        return self.shard_degree or self.data_degree

    @property
    def virtual_tokens(self) -> int:
        """Tokens that the adapter puts before every sequence or before its keys."""
        return self.lora_rank if self.adapter in ("prompt", "p-tuning", "prefix") else 0

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens of one forward on one GPU, virtual ones that pass through the layers included."""
        length = self.seq_len_tokens + (self.lora_rank if self.adapter in ("prompt", "p-tuning") else 0)
        return self.micro_batch_seqs * self.aim.seqs_per_sample * length

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all GPUs."""
        return self.global_batch_seqs * self.aim.seqs_per_sample * self.seq_len_tokens

    @property
    def spread(self) -> dict[str, Any]:
        """The fields of SPREAD_FIELDS that differ from their defaults."""
        values = zip(SPREAD_FIELDS, self._spread_fields(), _NO_SPREAD, strict=True)
        return {name: value for name, value, default in values if value != default}

    def trusted_with(self, **changes: Any) -> Self:
        """A copy with some fields changed, not validated: for walks over values that are known to combine."""
        copy = object.__new__(type(self))
        for put, value in zip(_PUTTERS, _VALUES(self), strict=True):
            put(copy, value)
        for name, value in changes.items():
            _PUTTER[name](copy, value)
        return copy

    @property
    def seldom(self) -> dict[str, Any]:
        """The fields of SPREAD_FIELDS and LATER_FIELDS that differ from their defaults."""
        later = {name: getattr(self, name) for name in LATER_FIELDS}
        return {name: value for name, value in later.items() if value != _DEFAULTS[name]} | self.spread

    def with_(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated anew."""
        return replace(self, **changes)


SPREAD_FIELDS = (
    "tensor_degree",
    "pipeline_degree",
    "pipeline_schedule",
    "shard_degree",
    "reshard_after_forward",
    "offload",
)
"""Fields that say something only with several GPUs; left out of JSON and keys at their defaults."""
AROUND_FIELDS = ("stack", "expandable_segments", "reentrant_checkpointing")
"""Whose code runs a setup and how it is started: no plan chooses them."""
LATER_FIELDS = (
    "kernels",
    "activation_offload",
    "quantize_experts",
    "modules_to_save",
    "objective",
    "adapter",
    *AROUND_FIELDS,
)
"""Fields that came after the first studies and plans; left out of JSON and keys at their defaults as well."""
_DEFAULTS = {field.name: field.default for field in fields(TrainSetup)}
_NO_SPREAD = tuple(_DEFAULTS[name] for name in SPREAD_FIELDS)
_VALUES = attrgetter(*_DEFAULTS)
_PUTTER: dict[str, Callable[[TrainSetup, Any], None]] = {name: getattr(TrainSetup, name).__set__ for name in _DEFAULTS}
_PUTTERS = tuple(_PUTTER.values())


def _one_of(name: str, value: object, allowed: tuple[str, ...], *, hint: str = "") -> None:
    if value not in allowed:
        options = ", ".join(allowed)
        raise SetupError(f"{name} must be one of {options}; got {value!r}", hint=hint or f"choose one of {options}")


def _count(name: str, value: object, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SetupError(f"{name} must be a whole number, got {value!r}")
    if not at_least <= value <= _MAX_COUNT:
        raise SetupError(f"{name} must be at least {at_least} and at most {_MAX_COUNT}, got {value}")
