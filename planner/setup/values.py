"""`SetupValues`: all fields of a training setup, and what follows from several of its records for formula, dry run,
probe and exporters.

Which of them cannot be combined: `planner.setup.allowed`. Setups are made as `planner.setup.TrainSetup`, which asks.
"""

from planner.core.records import dataclass
from planner.options.kernels import parts_of
from planner.options.layouts import SHARDED
from planner.options.objectives import OBJECTIVES
from planner.options.rollouts import Rollout
from planner.setup.parts import Adaptation, Batch, Compute, Devices, Goal, Layout, Program, Recomputation, Weights


@dataclass(frozen=True, kw_only=True)
class SetupValues(Program, Goal, Layout, Devices, Recomputation, Batch, Compute, Adaptation, Weights):
    """One complete training setup: the fields of all its records."""

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
        if self.autocast_dtype == "fp16":
            return "fp32"
        return self.trainer.adapter_dtype(quantized=self.quantized, cast=self.kbit_fp32_cast, weights=self.weight_dtype)

    @property
    def scaler_refusal(self) -> str:
        """Why the loss scaler of fp16 autocast cannot step this setup's adapters, "" where it can."""
        if self.method == "full" or self.autocast_dtype != "fp16" or self.resolved_adapter_dtype == "fp32":
            return ""
        return f"the fp16 loss scaler cannot unscale {self.resolved_adapter_dtype} adapters' gradients"

    @property
    def rolls(self) -> Rollout:
        """How completions come about, of an objective that generates them."""
        return self.rollout or Rollout.usual(self.seq_len_tokens)

    @property
    def prompt_tokens(self) -> int:
        """What is left of a sequence for the prompt, of an objective that generates the rest."""
        return self.seq_len_tokens - self.rolls.completion_tokens

    @property
    def generation_seqs(self) -> int:
        """Completions that are generated at once."""
        return self.rolls.at_once(self.global_batch_seqs)

    @property
    def has_reference(self) -> bool:
        """Whether the step also asks the model as it was before training."""
        if self.precomputed_reference:
            return False
        return self.aim.reference or (self.aim.rolls_out and self.rolls.reference)

    @property
    def copies_reference(self) -> bool:
        """Whether that is a second copy of the weights: with adapters it is the model with them switched off."""
        return self.has_reference and self.method == "full"

    @property
    def asks_reference(self) -> bool:
        """Whether it is asked while the activations of a forward with gradients are there."""
        return self.has_reference and not self.aim.rolls_out

    @property
    def extra_forwards(self) -> int:
        """Forwards of every micro-batch without gradients."""
        if not self.aim.rolls_out:
            known = self.aim.reference_forwards if self.precomputed_reference else 0
            return self.aim.extra_forwards - known + bool(self.cached_seqs)
        old = self.aim.asks_old or self.rolls.old_log_probs(self.global_batch_seqs)
        return int(self.rolls.reference) + int(old)

    @property
    def num_forwards(self) -> int:
        """Forwards with gradients that a micro-batch is cut into, each of as many sequences."""
        pieces = -(-self.micro_batch_seqs // self.cached_seqs) if self.cached_seqs else 1
        return pieces * (self.aim.forwards + self.hard_negatives)

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
        """Samples of the smallest micro-batch that a plan takes of so large a batch: all of them where nothing
        accumulates."""
        return batch if self.trainer.steps_in_backward else self.aim.least(batch)

    @property
    def adds_gradients(self) -> bool:
        """Whether gradients of an earlier backward of the same step are there while the next one runs."""
        return self.accumulation_steps > 1 or self.cached_seqs > 0

    @property
    def scored_tokens(self) -> int:
        """Tokens of one micro-batch whose logits are asked for: all, or those of the completions."""
        if not self.aim.rolls_out:
            return self.tokens_per_micro_batch
        return self.micro_batch_seqs * self.rolls.completion_tokens

    @property
    def compiled(self) -> bool:
        """Whether torch.compile compiles the layers. In transformers' models flash attention asks whether the positions
        hold packed sequences, and unpads; dynamo leaves the graph there, and since a checkpointed layer is closed to
        it (pytorch/pytorch issue 139989), the whole of such layers runs as it is.

        Source: transformers 5.23 `modeling_flash_attention_utils.py` _is_packed_sequence, _upad_input.
        Measured: benchmarks/compiled_layers.py under PyTorch 2.13: of 12 such layers no graph, of others one.
        """
        return self.compile and not (
            self.trainer.traces_masks and self.checkpointing and self.attention == "flash-attention-2"
        )

    @property
    def log_probs(self) -> str:
        """How TRL takes tokens' log-probabilities of whole logits, in front of its own kernel; "" where it has that,
        or of another stack: of all at once ("gathered"; "gathered beside": them, and the chosen half's cross-
        entropy), row by row ("rows"; "kept rows": beside the model's outputs; "rows apart": KTO's other prompts' are
        gone by then), or so of a copy ("copied").

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
    def computed_otherwise(self) -> bool:
        """Whether the packages of this setup, or the cache that it fills, make its step another than today's."""
        older = self.repeats_keys or self.copies_logits or self.pins_four_bit
        return self.use_cache or older or self.before_transformers(4, 43)

    @property
    def copies_logits(self) -> bool:
        """Whether transformers' own loss copies all logits but the last ones (before 4.49)."""
        own = OBJECTIVES[self.objective].supervised and self.trainer.transformers_loss
        return self.loss == "full" and own and self.before_transformers(4, 49)

    @property
    def pins_four_bit(self) -> bool:
        """Whether bitsandbytes keeps the input of every 4-bit product (before 0.43.2)."""
        return self.four_bit and self.before_bitsandbytes(0, 43, 2)

    @property
    def pins_inputs(self) -> bool:
        """Whether a quantized matrix keeps its input on the node of its graph, where no checkpointing reaches it.

        Source: bitsandbytes 0.50 `MatMul8bitLt` (ctx.tensors); of 4 bits 0.43.1 `MatMul4Bit` ((A, B)), not 0.43.2.
        """
        return self.quantization == "int8" or self.pins_four_bit

    @property
    def repeats_keys(self) -> bool:
        """Whether SDPA is handed keys and values repeated to all query heads, whichever kernel it picks.

        Source: transformers 4.53 `integrations/sdpa_attention.py` (repeat_kv), 4.54 (enable_gqa without a mask).
        """
        return self.attention == "sdpa" and self.before_transformers(4, 54)

    def fused_parts(self, model_type: str) -> frozenset[str]:
        """What of a layer of this type runs as kernels of its own (`planner.options.kernels.parts_of`)."""
        return parts_of(self.kernels, model_type, compiled=self.compiled)

    @property
    def pieces(self) -> int:
        """Pieces of a sequence that is cut over GPUs: a ring gives each an early and a late one, so that all have as
        much to attend to."""
        return 2 * self.context_degree if self.rings else self.context_degree

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
    def copies(self) -> int:
        """Ranks that would hold the same if nothing were sharded: those of one sequence count as well as its copies."""
        return self.data_degree * self.context_degree

    @property
    def rings(self) -> bool:
        """Whether the keys and values of a sequence that is cut go round its GPUs (PyTorch's context parallelism)."""
        return self.context_degree > 1 and self.parallel == "fsdp2"

    @property
    def shards(self) -> int:
        """GPUs over which sharded states are cut; 1 where nothing is sharded."""
        if self.parallel not in SHARDED:
            return 1
        return self.shard_degree or self.copies

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
