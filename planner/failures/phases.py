"""Which part of a run asked for the memory that was not there, by the calls of the traceback.

The names are those of torch, transformers, TRL, peft, accelerate, bitsandbytes, DeepSpeed and the tools built on them.
"""

import re
from collections.abc import Iterable
from functools import lru_cache

from planner.failures.message import Frame
from planner.records import dataclass


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of a run.

    Attributes:
        name: for programs.
        words: what was being done.
        why: what holds or asks for memory there.
        changes: what makes less of it there, the smallest change first; each "setting: what it does".
    """

    name: str
    words: str
    why: str
    changes: tuple[str, ...]


GRADIENT_CHECKPOINTING = "gradient_checkpointing=True: activations of one layer at a time, about a quarter slower"
MICRO_BATCH = "per_device_train_batch_size down, gradient_accumulation_steps up by as much: the same training"
SHORTER = "a shorter maximum length: changes what is learned, last"
FUSED_LOSS = "use_liger_kernel=True (or TRL's loss_type='chunked_nll'): the logits never exist as a whole"
QUANTIZED = "a 4-bit base (QLoRA): a quarter of the weights"
LORA = "LoRA instead of full fine-tuning: no gradients and optimizer states of the base"

PHASES = {
    one.name: one
    for one in (
        Phase(
            name="load",
            words="loading the weights",
            why="the weights alone do not fit beside what is there (a merge or a cast to 32 bits holds them twice)",
            changes=(
                "dtype=torch.bfloat16 in from_pretrained: 32 bits are the default of transformers before 5 and of TRL",
                QUANTIZED,
                "torch.load(..., map_location='cpu') of a checkpoint, deleted once it is in the model",
                "device_map={'': local_rank} with several processes, so that each loads on its own card",
            ),
        ),
        Phase(
            name="kbit-cast",
            words="casting the unquantized rest to 32 bits (prepare_model_for_kbit_training)",
            why="embeddings, norms and head of a quantized base are copied into 32 bits; an unquantized base whole",
            changes=(
                "without prepare_model_for_kbit_training: TRL and transformers need only enable_input_require_grads",
            ),
        ),
        Phase(
            name="wrap",
            words="spreading the model over the GPUs (DDP, FSDP, DeepSpeed)",
            why="each process holds the whole model, and its buckets or flat parameters beside it, while it is cut up",
            changes=(
                "FSDP: cpu_ram_efficient_loading and sync_module_states, the model loaded on the CPU",
                "DeepSpeed: ZeRO-3 with the model made under HfDeepSpeedConfig, so that it is never whole",
                LORA,
            ),
        ),
        Phase(
            name="attention",
            words="attention in the forward pass",
            why="the scores of every pair of tokens exist at once: eager attention, or a mask that SDPA refuses",
            changes=(
                "attn_implementation='sdpa' (or 'flash_attention_2'): scores in pieces, same result",
                GRADIENT_CHECKPOINTING,
                MICRO_BATCH,
                SHORTER,
            ),
        ),
        Phase(
            name="forward",
            words="the forward pass",
            why="what each layer keeps for the backward pass adds up: it grows with micro-batch x length",
            changes=(GRADIENT_CHECKPOINTING, MICRO_BATCH, QUANTIZED, SHORTER),
        ),
        Phase(
            name="loss",
            words="the loss over the vocabulary",
            why="logits are tokens x vocabulary numbers, in 16 and in 32 bits, and their gradient once more",
            changes=(FUSED_LOSS, MICRO_BATCH, SHORTER),
        ),
        Phase(
            name="recompute",
            words="the backward pass, running a checkpointed layer again",
            why="one layer's activations and gradients exist beside the kept ones",
            changes=(FUSED_LOSS, MICRO_BATCH, "checkpointing of every layer, not every n-th", QUANTIZED, SHORTER),
        ),
        Phase(
            name="backward",
            words="the backward pass",
            why="gradients grow while activations are still there",
            changes=(GRADIENT_CHECKPOINTING, FUSED_LOSS, MICRO_BATCH, LORA, SHORTER),
        ),
        Phase(
            name="optimizer",
            words="the optimizer's step",
            why="AdamW makes two states of each trained parameter in its first step: 8 bytes each in 32 bits",
            changes=(
                "optim='paged_adamw_8bit' (or adamw_8bit): a quarter of the states",
                LORA,
                "FSDP or ZeRO over more GPUs",
            ),
        ),
        Phase(
            name="evaluation-gather",
            words="an evaluation that keeps every batch's logits",
            why="with compute_metrics the logits of the whole evaluation set stay on the GPU until it ends",
            changes=(
                "eval_accumulation_steps=1: each batch's logits go to the host",
                "preprocess_logits_for_metrics: keep what the metric needs (argmax), not the logits",
                "prediction_loss_only=True: no logits at all",
            ),
        ),
        Phase(
            name="evaluation",
            words="an evaluation",
            why="nothing is checkpointed and the whole logits exist, at per_device_eval_batch_size (8 unless set)",
            changes=("per_device_eval_batch_size=1", "prediction_loss_only=True", "eval_accumulation_steps=1"),
        ),
        Phase(
            name="generation",
            words="generating completions",
            why="keys and values of every token are cached, for all completions made at once",
            changes=(
                "fewer completions at once (num_generations, generation_batch_size, steps_per_generation)",
                "vllm_gpu_memory_utilization down, or vllm_enable_sleep_mode=True",
                "ds3_gather_for_generation=False (DeepSpeed ZeRO-3): the weights stay spread, slower",
                "a shorter max_completion_length",
            ),
        ),
        Phase(
            name="reference",
            words="the reference model's pass",
            why="a second whole model, or a pass with the adapters off, beside the one that is trained",
            changes=(
                "precompute_ref_log_probs=True: the reference runs once, before training",
                "LoRA: the reference is the base with its adapters off, no second copy",
                MICRO_BATCH,
            ),
        ),
        Phase(
            name="save",
            words="saving, merging or loading a checkpoint",
            why="the weights are gathered or copied whole beside what training holds",
            changes=(
                "FSDP: state_dict_type SHARDED_STATE_DICT; DeepSpeed: stage3_gather_16bit_weights_on_model_save off",
                "merge adapters in a process of its own, on the CPU",
                "load_best_model_at_end=False",
            ),
        ),
    )
}

_TRAINER_EVALUATES = (
    "evaluate|evaluation_loop|prediction_loop|prediction_step|predict|_evaluate|eval_loop|validation_step"
)
_SAVES = (
    "_?(?:[a-z]+_)?save_(?!evaluate)\\w+|merge_and_\\w+|_merge_lora|unsloth_\\w*save\\w*|_load_best_model|_save|_load_from_checkpoint"
    "|full_tensor|get_model_state_dict|push_to_hub\\w*|_\\w*state_dict_hook"
)
_REFERENCE = "compute_reference_log_probs|compute_ref_log_probs|_get_per_token_logps_ref|compute_ref_logprobs"
_LOSSES = (
    "cross_entropy|\\w*log_softmax|ForCausalLMLoss|compute_log_probs|get_batch_logps|entropy_from_logits|logsumexp"
)
_LOADS = (
    "from_pretrained|_load_pretrained_model|_load_state_dict_into_meta_model|_load_from_state_dict|load_shard_files?"
    "|_move_model_to_device|create_quantized_param|load_model|prepare_model"
)
_RULES = (
    # phase, pattern of "file:function": the first rule that any frame meets
    (
        "evaluation-gather",
        r":(?:pad_across_processes|\w*pad_and_concatenate|nested_concat|nested_numpify|_?gather_for_metrics)$",
    ),
    ("save", rf":(?:{_SAVES}|consolidate\w*|merge)$"),
    (
        "generation",
        r"generation/utils\.py:|(?::_?generate\w*|:unwrap_model_for_generation)$|vllm/|:_sample$|:_prefill$",
    ),
    ("evaluation", rf":(?:{_TRAINER_EVALUATES})$"),
    ("save", r"torch/optim/optimizer\.py:load_state_dict$"),
    (
        "optimizer",
        r"torch/optim/(?!lr_scheduler)\w+\.py:|bitsandbytes/optim/|:(?:init_state|_init_group|_take_model_step)$",
    ),
    ("optimizer", r"accelerate/optimizer\.py:step$|grad_scaler\.py:(?:step|_maybe_opt_step)$"),
    ("optimizer", r"(?:low_level_optim|hybrid_adam|stage_1_and_2|stage3|cpu_adam|fused_adam)\.py:step$"),
    ("kbit-cast", r":prepare_model_for_kbit_training$"),
    ("reference", rf":(?:{_REFERENCE})$"),
    ("recompute", r":(?:unpack_hook|inner_unpack|recompute_fn\w*)$|checkpoint(?:ing)?\.py:(?:backward)?$"),
    ("loss", r"accelerate/utils/operations\.py:_?convert_to_fp32$"),
    (
        "loss",
        rf"loss/loss_\w+\.py:|(?:loss|cross_entropy)\.py:forward$|:(?:{_LOSSES}|fixed_cross_entropy|fused_linear\w*)$",
    ),
    ("backward", r":(?:backward|_engine_run_backward|apply_backward)$"),
    (
        "attention",
        r":(?:\w*attention_forward|scaled_dot_product_attention|_flash_attention_forward|softmax|repeat_kv)$",
    ),
    ("attention", r"attention\.py:|:_?(?:attn|attention)\w*$|:_make_causal_mask$|:_expand_mask$|:_update_causal_mask$"),
    (
        "wrap",
        r"(?:parallel/distributed|fully_sharded_data_parallel|_init_utils|_?flat_param|fsdp2?_utils)\.py:_{0,2}init",
    ),
    ("wrap", r":(?:fully_shard|fsdp2_prepare_model|_sync_module_states|_verify_param_shape_across_processes)$"),
    ("wrap", r"deepspeed/(?:__init__\.py:initialize|runtime/(?:engine|zero/\w+)\.py:(?:__init__|_configure\w*))"),
    (
        "load",
        rf":(?:{_LOADS}|set_module_tensor_to_device|load_checkpoint\w*|load_state_dict)$|torch/serialization\.py:",
    ),
    ("forward", r":(?:training_step|compute_loss|_inner_training_loop|(?:new_|old_)?forward|train_step|forward_pass)$"),
    ("load", r":(?:cuda|to|_quantize|half|bfloat16)$|nn/modules/module\.py:(?:_apply|convert)$"),
    ("forward", r"nn/modules/module\.py:(?:(?:_wrapped)?_call_impl|__call__)$"),
)
_CODE_RULES = (
    # phase, pattern of a source line
    ("evaluation-gather", r"\bpreds\w* = .{0,80}(?:torch\.cat|nested_concat)"),
    ("save", r"state_dict\(\)|save_pretrained\w*\(|torch\.save\(|merge_and_unload\("),
    ("generation", r"\.generate\("),
    ("optimizer", r"optim\w*['\"\]]{0,2}\.step\(|\bexp_avg"),
    ("loss", r"lm_head\(|cross_entropy|log_softmax|logsumexp|logits\.float\("),
    ("backward", r"\.backward\(|run_backward"),
    (
        "attention",
        r"att(?:entio)?n\w*\.softmax|attn_(?:weights|scores|probs) = |scaled_dot_product|matmul\(q|softmax\(att",
    ),
    ("load", r"\.to\((?:self\.)?(?:args\.)?\w*device|\.cuda\(\)|from_pretrained\(|prepare_model\("),
    ("forward", r"\bF\.\w+\(|\b_?(?:model|unet|transformer)\(|(?:loss|train|training|forward)_step\(|compute_loss\("),
)
_WHEN = r"\b(?:during|while|when|in|on|at|calling|doing)\s+(?:the\s|a\s|my\s|each\s|first\s|model\s){0,2}"
_SAID = (
    # phase, pattern of a sentence that tells of the error
    (
        "save",
        r"\bmodel checkpointing\b|\b(?:checkpoint|ckpt|model|weights?)[ -]sav(?:e|ing)\b"
        r"|\bsav(?:e|ing)\b.{0,40}\b(?:model|checkpoint|ckpt|weights?|states?|adapter)|保存"
        r"|\bmerg(?:e|ing)\b.{0,40}\b(?:lora|models?|weights?|adapters?)|\b(?:lora|models?|weights?) merging|合并",
    ),
    ("optimizer", r"\boptim(?:i[sz]er)?(?:'s |\.|[ _])(?:step|states?)\b"),
    ("backward", r"\bbackward(?:\(|[ -]pass|\b.{0,20}propagat)|" + _WHEN + r"`?(?:loss\.)?back(?:ward|-?prop)"),
    (
        "evaluation",
        r"(?<![a-z])(?<!after )(?<!after a )(?<!after the )(?<!after each )(?:eval|validation|validating)|评估",
    ),
    ("wrap", r"\binitiali[sz]\w{1,5} (?:ddp|fsdp|deepspeed|distributed)"),
    (
        "generation",
        r"cumem_allocator|" + _WHEN + r"(?:generat|rollouts?\b|rolling out|sampling|inference|decoding)|推理",
    ),
    ("load", _WHEN + r"(?:load|initiali[sz])|\bloading\b.{0,30}\b(?:model|checkpoint|weights?)|加载"),
    ("forward", _WHEN + "`?forward"),
    ("attention", r"\b(?:solved|fixed|resolved)\b.{0,60}\bflash[- _]?att|\bflash[- _]?att.{0,60}\b(?:solves|fixes)\b"),
)
"""Where neither calls nor source lines are known: what its author says of the moment."""
_REFINED = {
    None: {name for name, _ in _CODE_RULES},
    "forward": {"loss", "attention"},
    "evaluation": {"evaluation-gather"},
}
"""Phase by the calls -> what the source lines may make of it."""


def phase_of(frames: Iterable[Frame], code: str = "", words: Iterable[str] = ()) -> Phase | None:
    """The part of the run that these calls, and the line before the error, belong to, else that the words tell; None
    where no rule knows them.

    A rule counts wherever it is met: an evaluation's forward pass is evaluation, a checkpointed layer's is recompute.
    """
    frames = list(frames)
    calls = (f"{frame.file.replace(chr(92), '/')}:{frame.function}" for frame in frames)
    first = min(map(_rule_of, calls), default=len(_RULES))
    found = _RULES[first][0] if first < len(_RULES) else None
    lines = [*(frame.code for frame in frames if frame.code and "torch/_" not in frame.file), code]
    allowed = _REFINED.get(found, set())
    refined = (name for name, said in _CODE_RULES if name in allowed and any(re.search(said, line) for line in lines))
    name = next(refined, found) or _in_words(words)
    return PHASES[name] if name else None


def _in_words(sentences: Iterable[str]) -> str | None:
    """The part of the run that the first sentence names which names any."""
    found = (name for one in sentences for name, said in _SAID if re.search(said, one, re.IGNORECASE))
    return next(found, None)


@lru_cache(maxsize=20_000)
def _rule_of(call: str) -> int:
    """The first rule that a call meets; a snapshot has each call thousands of times."""
    return next((number for number, (_, called) in enumerate(_RULES) if re.search(called, call)), len(_RULES))
