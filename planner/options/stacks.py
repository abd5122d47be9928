"""The stacks: whose training step a figure is for, and what each does otherwise than another; and the launch targets,
most of them stacks too: what each calls things. To add one, add its row; a target's files are
`planner/frameworks/exporters/NAME.py`.

A `TrainSetup` says what is trained; its `stack` says by whose code. What a field of the setup says itself (precision,
loss, adapters' type where it is not "auto") is never changed by the stack: a row holds what no field says, and the
stack's own default where a published run does not say it. Every stack here releases gradients after its step
(`zero_grad(set_to_none=True)`, torch's default since 2.0).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import Any, Literal, final

from planner.core import plugins
from planner.core.records import dataclass

DEFAULT = "trl"
"""The stack that a plan is made for where nobody names one."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """One training program, as its step treats memory and the host.

    Attributes:
        title: its name for people.
        keeps_outputs: the loop's variable holds the model's outputs, and so all logits of a full loss, until the next
            forward's replace them. A trainer drops them as its loss function returns.
        compiles_loss: torch.compile reaches the full loss: "within" the model's own forward, which hands the logits out
            too; "beside" the layers, compiled for itself; "": not.
        traces_masks: torch.compile traces transformers' making of the attention mask, which SDPA is then always handed;
            False where each layer alone is compiled, or the model is none of transformers'.
        widens_outputs: accelerate casts the outputs of a forward under autocast to fp32.
        upcasts_logits: the full loss is computed on an fp32 copy of the logits.
        loss_chunks, loss_chunk_tokens: the full loss is cut into so many pieces, or into pieces of so many tokens; 0:
            it is not. Each piece has its own fp32 copy and its own gradients.
        in_place_loss: the full loss's own kernel writes the gradient over the logits.
        shifted_loss: that kernel is given a shifted copy of fp32 logits, which stay beside it.
        clips_gradients: the step computes the gradients' norm and scales them.
        steps_in_backward: each parameter is stepped, and its gradient dropped, as that comes: nothing accumulates.
        fuses_plain_adapters: whether its fused kernels take adapters of a base that is not quantized.
        quantized_adapters: data type of the adapters of a quantized base whose embeddings were not cast to fp32, where
            `adapter_dtype` is "auto"; of any other base they are fp32 unless `plain_adapters` says otherwise.
        plain_adapters: data type of the adapters of a 16-bit base, "" for the base's own.
        reentrant_checkpointing: the form of checkpointing that it asks for by itself.
        checkpoints_trained: it checkpoints those layers alone of which something trains.
        expandable_segments: whether it, or what starts it, sets the allocator so.
        runs_trainer: it is transformers' Trainer around its models: its steps issue the same calls, and its loop looks
            at the loss after every backward, and so waits for the device (transformers 5.23 `Trainer._run_epoch`,
            `logging_nan_inf_filter`, on by default).
        trainer_overhead: host time of a trainer around every step.
        fused: norm, rotary, gated-MLP and LoRA kernels of its own.
        gates_with_lora: a gated MLP is one kernel within its LoRA function alone, all three of its matrices adapted.
        overlaps_offload: what is offloaded of activations is copied beside the computation.
        single_operations: softmax, activation and loss are operations of Python's, every matrix an einsum and every
            rearrangement einops', as a course's transformer is written.
        evaluates_whole: under Liger's loss an evaluation makes whole logits, which that forward leaves out in training,
            until transformers 5.15.
        one_kernel_gelu: its own models compute GPT-2's GELU by `F.gelu(approximate="tanh")`.
        newest_transformers: version that the tool takes ("5.6"); "": today's.
        deep_ep: it deals experts out by DeepEP, with all the rest whole on every GPU.
        own_models: its models are none of transformers', whose classes' limits are not theirs.
        selects_products: what its selective checkpointing keeps is every second product of matrices too.
        packs_rows: packed samples fill rows of the length asked for; elsewhere a micro-batch is one flattened row.
        masks_samples: packed samples do not see each other; False: attention is causal over a whole row, with no mask.
        sequence_parallel: its tensor parallelism cuts the residual stream and its norms along the sequence between the
            split matrices, and leaves the logits cut by vocabulary (loss parallelism).
        reduces_fp32: FSDP2 reduces gradients in fp32, whatever the weights are gathered in.
        wide_embedding_states: optimizers of 8-bit states keep those of every embedding table in 32 bits.
        torch_nf4: matrices in 4 bits are torchao's NF4Tensor, which operations of torch unpack.
        grouped_experts: kernels of its own multiply with 4-bit stacks of experts where they lie, adapters beside them:
            nothing is unpacked whole, and a stack can carry adapters of its own (target set EXPERT_TARGETS).
        one_root: under FSDP2 layers alone are groups of their own and everything else is one, all in the type that it
            was loaded in.
        widens_stacks: beside a quantized base bare stacks of experts are fp32: of what peft's k-bit preparation cast,
            norms and tables alone are cast back.
        builds_encoders: text alone, too, is trained by the class that the checkpoint names, with its encoders.
        stages_nf4: 4-bit matrices under FSDP2 are made by one process, on the host, and every GPU gets its part of
            each: "always", "offloaded" where the base stays on the host, "" never.
        widens_loaded: it loads its weights on the GPU and makes fp32 of what trains there, before DeepSpeed halves it.
        streams_experts: those stacks lie in the host's memory, one layer's at a time on the card.
        source: where all this was read.
    """

    name: str
    title: str
    keeps_outputs: bool = False
    compiles_loss: Literal["", "beside", "within"] = "within"
    traces_masks: bool = True
    widens_outputs: bool = False
    upcasts_logits: bool = True
    loss_chunks: int = 0
    loss_chunk_tokens: int = 0
    in_place_loss: bool = False
    shifted_loss: bool = False
    clips_gradients: bool = True
    steps_in_backward: bool = False
    quantized_adapters: str = "fp32"
    fuses_plain_adapters: bool = True
    plain_adapters: str = "fp32"
    reentrant_checkpointing: bool = False
    checkpoints_trained: bool = False
    expandable_segments: bool = False
    runs_trainer: bool = False
    trainer_overhead: bool = True
    fused: bool = False
    gates_with_lora: bool = False
    overlaps_offload: bool = False
    single_operations: bool = False
    evaluates_whole: bool = False
    one_kernel_gelu: bool = False
    newest_transformers: str = ""
    deep_ep: bool = False
    own_models: bool = False
    selects_products: bool = False
    packs_rows: bool = False
    masks_samples: bool = True
    sequence_parallel: bool = False
    reduces_fp32: bool = False
    wide_embedding_states: bool = False
    torch_nf4: bool = False
    grouped_experts: bool = False
    streams_experts: bool = False
    one_root: bool = False
    widens_stacks: bool = False
    builds_encoders: bool = False
    stages_nf4: str = ""
    widens_loaded: bool = False
    source: str

    @property
    def transformers_loss(self) -> bool:
        """Whether the model's own forward computes the full loss, as transformers' do."""
        return self.upcasts_logits and not (self.in_place_loss or self.loss_chunks or self.loss_chunk_tokens)

    def num_chunks(self, tokens: int) -> int:
        """Into how many pieces the full loss of so many tokens is cut."""
        return -(-tokens // self.loss_chunk_tokens) if self.loss_chunk_tokens else max(1, self.loss_chunks)

    def adapter_dtype(self, *, quantized: bool, cast: bool, weights: str) -> str:
        """Data type of the adapters where the setup leaves it to the trainer ("auto").

        Args:
            quantized: whether the base is; `cast`: whether peft's k-bit preparation cast the rest of it to fp32.
            weights: data type of what is not quantized.
        """
        if quantized and not cast:
            return self.quantized_adapters or weights
        return "fp32" if cast else self.plain_adapters or weights


_TRAINER: dict[str, Any] = {"runs_trainer": True, "widens_outputs": True, "wide_embedding_states": True}
_LOOP: dict[str, Any] = {"clips_gradients": False, "trainer_overhead": False}
_OWN_MODEL: dict[str, Any] = {"own_models": True, "traces_masks": False, "upcasts_logits": False}
_TORCHTUNE: dict[str, Any] = {"own_models": True, "overlaps_offload": True, "packs_rows": True}
_OWN_TYPE: dict[str, Any] = {"quantized_adapters": "", "plain_adapters": ""}
_BF16_ADAPTERS: dict[str, Any] = {"quantized_adapters": "bf16", "plain_adapters": "bf16"}
_AXOLOTL = Stack(
    name="axolotl",
    title="Axolotl",
    expandable_segments=True,
    deep_ep=True,
    one_root=True,
    widens_stacks=True,
    builds_encoders=True,
    stages_nf4="offloaded",
    source="axolotl 0.21 utils/__init__.py set_pytorch_cuda_alloc_conf, utils/config/__init__.py normalize_config "
    "(is_multimodal, by the model's type), loaders/model.py _prepare_model_for_quantization, "
    "_convert_embedding_modules_dtype, monkeypatch/accelerate/fsdp2.py fsdp2_prepare_model (in the place of "
    "accelerate's), integrations/expert_parallel/plugin.py; peft 0.21 autocast_adapter_dtype, "
    "prepare_model_for_kbit_training",
    **_TRAINER,
)
_ROWS = (
    Stack(
        name="trl",
        title="TRL's SFTTrainer",
        quantized_adapters="bf16",
        source="trl 1.16 trainer/sft_trainer.py (adapters of a quantized base to bf16, use_reentrant False); "
        "transformers 5.23 Trainer.training_step, compute_loss, create_optimizer (GlobalOptimManager overrides every "
        "nn.Embedding); accelerate 1.15 Accelerator.prepare_model",
        **_TRAINER,
    ),
    Stack(
        name="hf",
        title="transformers' Trainer",
        evaluates_whole=True,
        source="transformers 5.23 trainer.py (use_reentrant False by default); peft 0.21 autocast_adapter_dtype",
        **_TRAINER,
    ),
    Stack(
        name="ms-swift",
        title="ms-swift",
        evaluates_whole=True,
        builds_encoders=True,
        source="ms-swift 4.6 trainers/seq2seq_trainer.py (transformers' Trainer), model/models/qwen.py; its step "
        "of Qwen2.5-7B, LoRA, traced: 0.5 % fewer bytes, 0.2 % more tokens/s than the formula says "
        "(transformers 5.19, peft 0.20)",
        **_TRAINER,
    ),
    Stack(
        name="ms-swift-cut-loss",
        title="ms-swift with the loss of cut sequences in pieces",
        evaluates_whole=True,
        builds_encoders=True,
        loss_chunk_tokens=2048,
        source="as ms-swift; ms-swift 4.6 trainers/utils.py per_token_loss_func_sp (CELOSS_PARALLEL_SIZE), "
        "sequence_parallel/utils.py ChunkedCrossEntropyLoss (the gradient over the logits, which accelerate cast to "
        "fp32); 2,048 tokens in all its examples",
        **_TRAINER,
    ),
    Stack(
        name="sentence-transformers",
        title="sentence-transformers' Trainer",
        source="sentence-transformers 6.2 base/trainer.py (transformers' Trainer, which wraps the whole "
        "SentenceTransformer); add_adapter leaves adapters in the weights' type, our file casts them as peft does; "
        "base/modules/transformer.py takes AutoModel",
        builds_encoders=True,
        **_TRAINER,
    ),
    Stack(
        name="plain-loop",
        title="a loop of one's own that keeps `outputs`",
        keeps_outputs=True,
        source="Python: a loop variable holds `outputs = model(...)` until it is assigned again; transformers 5.23 "
        "loss/loss_utils.py ForCausalLMLoss. Measured: 11 runs on an RTX 4080, docs/accuracy/bands.md",
        **_LOOP,
    ),
    Stack(
        name="accelerate-loop",
        title="a loop of one's own under Accelerate's mixed precision that keeps `outputs`",
        keeps_outputs=True,
        widens_outputs=True,
        source="as plain-loop; accelerate 1.15 Accelerator.prepare_model (convert_outputs_to_fp32 around the forward)",
        **_LOOP,
    ),
    Stack(
        name="plain-loop-drops-outputs",
        title="a loop of one's own that drops `outputs`",
        trainer_overhead=False,
        source="as plain-loop, with `loss = model(...).loss`. Its runs are PEFT's comparison of methods: peft "
        "method_comparison/MetaMathQA/run.py (clip_grad_norm_ after every backward, in all its versions) and "
        "default_training_params.json (grad_norm_clip 1.0). That loop does hold `outputs`, but its BucketIterator "
        "(utils.py) sorts each bucket of 20 batches long to short: what lies beside a longest batch's step are the "
        "logits of the shortest batch of the bucket before",
    ),
    Stack(
        name="accelerate-loop-drops-outputs",
        title="a loop of one's own under Accelerate's mixed precision that drops `outputs`",
        evaluates_whole=True,
        runs_trainer=True,
        widens_outputs=True,
        source="as accelerate-loop, with `loss = model(...).loss`: the calls of transformers' Trainer, but for its "
        "create_optimizer (bitsandbytes itself overrides no embedding)",
    ),
    Stack(
        name="plain-loop-own-model",
        title="a loop of one's own around a model of one's own",
        compiles_loss="",
        source="rasbt/LLMs-from-scratch ch05/10_llm-training-speed: cross_entropy(logits.flatten(0, 1), targets) in a "
        "function beside the model",
        **_LOOP,
        **_OWN_MODEL,
    ),
    Stack(
        name="cs336",
        title="the transformer of Stanford's CS336",
        compiles_loss="",
        single_operations=True,
        source="stanford-cs336/assignment2-systems cs336-basics (model.py, nn_utils.py): einops.einsum and rearrange, "
        "softmax, silu and cross_entropy of single operations",
        **_LOOP,
        **_OWN_MODEL,
    ),
    Stack(
        name="nanogpt",
        title="nanoGPT's loop",
        trainer_overhead=False,
        source="karpathy/nanoGPT and build-nanogpt: F.cross_entropy(logits.view(-1, V), targets.view(-1)) in the "
        "model's forward, which is compiled whole; clip_grad_norm_",
        **_OWN_MODEL,
    ),
    Stack(
        name="fms-acceleration",
        title="TRL with fms-acceleration's kernels",
        widens_outputs=True,
        in_place_loss=True,
        shifted_loss=True,
        quantized_adapters="bf16",
        fuses_plain_adapters=False,
        gates_with_lora=True,
        wide_embedding_states=True,
        source="fms-acceleration plugins/fused-ops-and-kernels (framework_plugin_fast_kernels.py: 'fused_lora only "
        "required for quant-peft'; models/llama.py: an MLP by trigger_fused_ops alone; Unsloth's "
        "cross-entropy in the place of torch.nn.CrossEntropyLoss) under "
        "transformers 4.44 and 4.45 (logits.float(), shift_logits.contiguous())",
    ),
    Stack(
        name="prime-rl",
        title="prime-rl's trainers",
        traces_masks=False,
        keeps_outputs=True,
        compiles_loss="",
        widens_outputs=True,
        trainer_overhead=False,
        reduces_fp32=True,
        source="prime-rl c330a6d4 (15 January 2026) trainer/sft/train.py (`out = forward(...)`: `del logits` leaves "
        "them in `out` until the next forward), trainer/model.py cast_float_and_contiguous, apply_compile (layers), "
        "setup_fsdp (reduce_dtype float32)",
    ),
    Stack(
        name="torchtune",
        title="torchtune's recipes",
        traces_masks=False,
        loss_chunks=8,
        compiles_loss="beside",
        torch_nf4=True,
        source="torchtune 0.6 modules/loss/ce_chunked_output_loss.py (8 chunks, fp32 per chunk), recipes/"
        "lora_finetune_single_device.py (one dtype for all parameters, `del logits` before the backward), "
        "training/_activation_offloading.py (use_streams), datasets/_packed.py (rows, each with its mask)",
        **_TORCHTUNE,
        **_OWN_TYPE,
    ),
    Stack(
        name="torchtune-in-bwd",
        title="torchtune's full recipe with its optimizer in the backward",
        compiles_loss="beside",
        traces_masks=False,
        loss_chunks=8,
        clips_gradients=False,
        steps_in_backward=True,
        source="as torchtune; recipes/full_finetune_single_device.py (optimizer_in_bwd: refuses accumulation and "
        "clipping), training/memory.py register_optim_in_bwd_hooks (step and zero_grad of one parameter as its "
        "gradient comes)",
        **_TORCHTUNE,
    ),
    Stack(
        name="torchtune-whole-loss",
        title="torchtune's recipes before their loss was cut",
        traces_masks=False,
        compiles_loss="",
        torch_nf4=True,
        source="torchtune 0.1 to 0.3 modules/transformer.py (`self.output(h).float()`), recipes (torch.nn."
        "CrossEntropyLoss, not compiled)",
        **_TORCHTUNE,
        **_OWN_TYPE,
    ),
    Stack(
        name="torchtitan",
        title="torchtitan",
        compiles_loss="beside",
        own_models=True,
        traces_masks=False,
        expandable_segments=True,
        selects_products=True,
        packs_rows=True,
        masks_samples=False,
        sequence_parallel=True,
        reduces_fp32=True,
        source="torchtitan 0.2 models/llama3/infra/parallelize.py apply_tp (SequenceParallel, loss_parallel), "
        "models/llama3/model/model.py (SDPA gets no mask), components/loss.py (pred.float()), train.py (`del pred` "
        "before the backward), run_train.sh (PYTORCH_ALLOC_CONF expandable_segments), "
        "distributed/activation_checkpoint.py _apply_op_sac, config mixed_precision_reduce (float32)",
    ),
    Stack(
        name="litgpt",
        title="LitGPT",
        one_kernel_gelu=True,
        keeps_outputs=True,
        loss_chunk_tokens=128,
        compiles_loss="",
        clips_gradients=False,
        source="litgpt 0.5 finetune/lora.py (`logits` lives through fabric.backward; adapters in the precision's "
        "type), utils.py chunked_cross_entropy (128 tokens at a time, logits in their own type); 0.5.13 model.py "
        "GptNeoxMLP (F.gelu)",
        **_OWN_TYPE,
        **_OWN_MODEL,
    ),
    Stack(
        name="unsloth",
        title="Unsloth",
        in_place_loss=True,
        fused=True,
        gates_with_lora=True,
        overlaps_offload=True,
        expandable_segments=True,
        wide_embedding_states=True,
        source="unsloth_zoo 2026.10 gradient_checkpointing.py (EXTRA_STREAM, double buffering); unsloth 2026.10 "
        "kernels/cross_entropy_loss.py (gradient written over the logits), models/_utils.py (PYTORCH_CUDA_ALLOC_"
        "CONF), prepare_model_for_training (trained parameters in fp32), models/llama.py (patch_peft_model alone sets "
        "an MLP's forward)",
    ),
    _AXOLOTL,
    replace(
        _AXOLOTL,
        name="axolotl-staged",
        title="Axolotl, NF4 staged on the host",
        stages_nf4="always",
        source="axolotl 0.21 loaders/nf4.py load_nf4_model, utils/nf4.py, utils/schemas/validation.py "
        "check_fsdp2_cpu_ram_efficient_loading_w_4bit, STAGED_NF4_CONSTRAINTS",
    ),
    replace(_AXOLOTL, name="axolotl-unstaged", title="Axolotl, NF4 made on every GPU", stages_nf4=""),
    Stack(
        name="loggetta",
        title="Loggetta",
        packs_rows=True,
        grouped_experts=True,
        streams_experts=True,
        trainer_overhead=False,
        source="loggetta 0.7.0 backends/experts4bit_train.py; experts4bit-qlora 0.58.1 recipe.py (QLoRASetup, "
        "estimate_qlora_footprint), engines/offload.py (one layer's stacks on the card, copied for its forward and "
        "again for its backward), engines/chunked_lm_loss.py",
        **_BF16_ADAPTERS,
    ),
    Stack(
        name="loggetta-resident",
        title="Loggetta with all experts on the card",
        packs_rows=True,
        grouped_experts=True,
        trainer_overhead=False,
        source='as loggetta, expert_residency "device"',
        **_BF16_ADAPTERS,
    ),
    Stack(
        name="mlx",
        title="MLX-LM",
        clips_gradients=False,
        compiles_loss="",
        source="mlx-lm 0.32 tuner/trainer.py (default_loss: logits in their own type, no clipping), tuner/lora.py "
        "(adapters in fp32)",
        **_OWN_MODEL,
    ),
    Stack(
        name="llamafactory",
        title="LLaMA-Factory",
        evaluates_whole=True,
        newest_transformers="5.6",
        reentrant_checkpointing=True,
        checkpoints_trained=True,
        builds_encoders=True,
        widens_loaded=True,
        source="LLaMA-Factory 0.9.5 hparams/model_args.py use_reentrant_gc (True), hparams/parser.py (device_map), "
        "model/adapter.py (trained parameters in fp32 unless pure_bf16 or ZeRO-3), model/model_utils/checkpointing.py "
        "get_custom_gradient_checkpointing_func (trained layers alone, whose input it makes ask for gradients), "
        "model/loader.py (load_class)",
        **_TRAINER,
    ),
)

STACKS: Mapping[str, Stack] = {row.name: row for row in _ROWS}
"""Every stack by its name."""


_OF_FULL_LOSS = ("keeps_outputs", "upcasts_logits", "loss_chunks", "loss_chunk_tokens", "in_place_loss", "shifted_loss")
_OF_STEP = (
    "own_models", "packs_rows", "masks_samples", "torch_nf4", "grouped_experts", "streams_experts", "steps_in_backward",
    "single_operations", "selects_products", "one_kernel_gelu", "fuses_plain_adapters",
)  # fmt: skip


@cache
def stack_of_bytes(name: str, *, full_loss: bool, autocast: bool) -> str:
    """The first stack whose step holds what this one's does, the optimizer's apart, where the setup says the rest:
    adapters' type, kind of checkpointing, all of one model trained."""
    fields = (*_OF_STEP, *_OF_FULL_LOSS * full_loss, *("widens_outputs",) * (full_loss and autocast))
    alike = attrgetter(*fields)
    return next(row.name for row in _ROWS if alike(row) == alike(STACKS[name]))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TargetRow:
    """One launch target: a tool for which files are written.

    Attributes:
        title: what a refusal calls it.
        objectives: those that it has a file for, and what it calls each.
        kernels: kernel families that a plan for it tries, its own first; (): what every tool on transformers runs.
        program: what starts its file where a trace can follow that; "" where it starts processes of others.
        module: what writes its files (`refusal`, `differences`, `export`, `VALIDATED_WITH`); "" of those in
            `planner.frameworks.exporters`.
    """

    title: str
    objectives: Mapping[str, str]
    kernels: tuple[str, ...] = ()
    program: str = ""
    module: str = ""


_SUPERVISED = {"sft": "sft", "pretrain": "sft"}
TARGET_ROWS: Mapping[str, TargetRow] = {
    "trl": TargetRow(
        title="trl sft",
        objectives={**_SUPERVISED, **{name: name for name in ("dpo", "kto", "reward", "orpo", "grpo", "rloo")}},
        program="trl",
    ),
    "hf": TargetRow(
        title="the Trainer", objectives={**_SUPERVISED, "classification": "classification"}, program="python"
    ),
    "sentence-transformers": TargetRow(
        title="sentence-transformers",
        objectives={"embedding": "MultipleNegativesRankingLoss"},
        kernels=("eager",),
        program="python",
    ),
    "axolotl": TargetRow(
        title="Axolotl",
        objectives={"sft": "sft", "pretrain": "completion", "dpo": "dpo"},
        kernels=("fused", "liger", "eager"),
        program="axolotl",
    ),
    "llamafactory": TargetRow(
        title="LLaMA-Factory",
        objectives={"sft": "sft", "pretrain": "pt", "dpo": "dpo", "orpo": "dpo"},
        kernels=("liger", "eager"),
        program="llamafactory-cli",
    ),
    "unsloth": TargetRow(title="Unsloth", objectives=_SUPERVISED, kernels=("fused", "eager")),
    "accelerate": TargetRow(title="Accelerate", objectives=_SUPERVISED),
    "deepspeed": TargetRow(title="DeepSpeed", objectives=_SUPERVISED),
    "mlx": TargetRow(title="MLX-LM", objectives=_SUPERVISED, kernels=("eager",)),
    "loggetta": TargetRow(title="Loggetta", objectives=_SUPERVISED, kernels=("eager",)),
    "torchtitan": TargetRow(title="torchtitan", objectives=_SUPERVISED, kernels=("eager",)),
    **{name: TargetRow(**row) for name, row in plugins.loaded("targets")},
}
"""Every launch target by its name."""


@cache
def written_by(objective: str) -> Mapping[str, str]:
    """Launch targets that have a file for an objective, and what each calls it."""
    rows = TARGET_ROWS.items()
    return {name: row.objectives[objective] for name, row in rows if objective in row.objectives}
