"""torchtitan's TOML (`torchrun -m torchtitan.train --job.config_file FILE`): FSDP2, tensor and pipeline parallelism.

Field names of torchtitan 0.2.2; from 0.3 on settings are Python functions. torchtitan trains its own copies of a few
architectures, loaded from and saved to transformers' format.
"""

import json
from collections.abc import Mapping

from planner.core.shipped import by_model_type
from planner.frameworks.exporters import prepare, several_gpus
from planner.frameworks.exporters.common import counted_steps, differing
from planner.frameworks.exporters.text import Line, Section, section, shown_path
from planner.frameworks.exporters.types import Difference, Draft, ExportRequest, LaunchFile
from planner.frameworks.tools.others import TORCHTITAN, TORCHTITAN_ADAMW
from planner.models.spec import ModelSpec
from planner.samples.steps import steps_between_saves
from planner.setup import TrainSetup

TARGET = "torchtitan"
FILE = "torchtitan/torchtitan.toml"
VALIDATED_WITH = {"torchtitan": "0.2.2", "torch": "2.13.0"}
MODULE = f"-m torchtitan.train --job.config_file launch/{FILE}"
LLAMA = "llama3"


def family(model: ModelSpec) -> str:
    """The folder of torchtitan's `models` that has a model's type, or would."""
    return LLAMA if model.model_type == "llama" else model.model_type.removesuffix("_moe")


def flavor(model: ModelSpec | None) -> str:
    """torchtitan's name of a model's size, "" where it has no such model."""
    if model is None:
        return ""
    if family(model) == LLAMA:
        scaling = model.config.get("rope_scaling") or model.config.get("rope_parameters") or {}
        # torchtitan's Llama scales its rotary frequencies like Llama 3.1 does
        if model.vocab_size != 128256 or scaling.get("factor") != 8:
            return ""
    flavors: Mapping[str, str] = by_model_type("torchtitan").get(family(model), {})
    return flavors.get(f"{model.hidden_size} x {model.num_layers}", "")


def differences(setup: TrainSetup) -> tuple[Difference, ...]:
    mixed = "bf16-mixed" if setup.precision == "bf16-autocast" else setup.precision
    runs: dict[str, tuple[object, str]] = {
        "precision": (mixed, "torchtitan holds fp32 weights under mixed precision"),
        "loss": ("full", "torchtitan computes the logits in full"),
        "attention": ("sdpa", "torchtitan's models call SDPA"),
        "activation_offload": (False, "torchtitan's checkpoints stay on the GPU"),
        "kernels": ("eager", "torchtitan has kernels of its own, by torch.compile"),
        "packing": (True, "torchtitan fills every sequence with the next samples"),
    }
    return differing(setup, runs)


def refusal(setup: TrainSetup, model: ModelSpec | None = None) -> str:
    if setup.num_gpus == 1:
        return "the torchtitan config is written for several GPUs"
    if not flavor(model):
        return "torchtitan 0.2.2 has Llama 3.1 and Qwen 3, not this model"
    if setup.method != "full":
        return "torchtitan 0.2.2 trains whole models: no peft adapters"
    if setup.parallel not in ("none", "ddp", "fsdp2"):
        return f"torchtitan shards with FSDP2 only, not {setup.parallel}"
    if setup.parallel == "ddp" and setup.tensor_degree * setup.pipeline_degree > 1:
        return "torchtitan's DDP does not combine with other parallelism: use fsdp2"
    if reason := several_gpus.context_refusal(setup, "torchtitan", ring=True):
        return reason
    pieces = 2 * setup.tensor_degree * setup.context_degree
    if pieces > 2 and setup.seq_len_tokens % pieces:
        return f"torchtitan cuts every sequence into {pieces} equal pieces, not {setup.seq_len_tokens:,} tokens"
    if setup.compute_dtype == "fp16":
        return "torchtitan computes in bf16 or fp32, without loss scaling"
    if setup.parallel == "none" and setup.autocast_dtype is not None:
        return "torchtitan mixes precision only under FSDP or DDP: bf16-pure works with tensor or pipeline parallelism"
    if setup.optimizer not in TORCHTITAN_ADAMW.values():
        return f"torchtitan steps with Adam or AdamW, not {setup.optimizer}"
    return several_gpus.sharding_refusal(setup, model)


def export(request: ExportRequest, differences: tuple[Difference, ...]) -> Draft:
    command = several_gpus.torchrun(request, MODULE)
    notes = [
        "The model's folder must be on disk: config, tokenizer and safetensors in transformers' format; of a model on "
        "the hub `bash launch/run.sh fetch torchtitan` puts it there.",
        f"It counts steps, not epochs: training.steps is yours to set (here {counted_steps(request)}).",
        "Accepted by torchtitan's own parser; it was not run here (no GPU).",
    ]
    notes += [several_gpus.PER_NODE] * (request.num_nodes > 1)
    lines = []
    for block in _sections(request):  # strings as JSON writes them are TOML strings too
        lines.append(f"\n[{block.title}]")
        lines += [f"{line.key} = {json.dumps(line.value, ensure_ascii=False)}{line.tail}" for line in block.lines]
    main = LaunchFile(path=FILE, text="\n".join(lines) + "\n")
    return Draft(title="torchtitan", main=main, command=command, notes=tuple(notes))


def _sections(request: ExportRequest) -> list[Section]:
    setup, hyper = request.setup, request.hyper
    reasons, staged = hyper.reasons, setup.pipeline_degree > 1
    assert request.model is not None
    return [
        section("job", Line("dump_folder", shown_path(request.output_dir))),
        section(
            "model",
            Line("name", family(request.model)),
            Line("flavor", flavor(request.model)),
            Line("hf_assets_path", shown_path(request.model_id), "a folder on disk"),
        ),
        section(
            "optimizer",
            Line("name", "AdamW"),
            Line(*TORCHTITAN.setting(setup, "optimizer")),
            Line("lr", float(hyper.learning_rate), reasons.get("learning_rate", "")),
            Line("beta2", hyper.adam_beta2),
            Line("weight_decay", float(hyper.weight_decay)),
        ),
        section(
            "lr_scheduler",
            Line("warmup_steps", max(1, round(hyper.warmup_fraction * counted_steps(request)))),
            Line("decay_type", "cosine" if hyper.lr_schedule == "cosine" else "linear"),
            Line("min_lr_factor", 0.0),
        ),
        section(
            "training",
            Line("dataset", "c4_test", "its loader reads any data set with a text column"),
            Line(
                "dataset_path",
                prepare.folder(request, TARGET),
                f"text made by launch/{prepare.NAME}: the loss is on all tokens",
            ),
            Line(
                "local_batch_size",
                setup.micro_batch_seqs * (setup.accumulation_steps if staged else 1),
                "all micro-batches of the pipeline" if staged else "",
            ),
            Line("global_batch_size", setup.global_batch_seqs),
            Line("seq_len", setup.seq_len_tokens),
            Line("max_norm", float(request.hyper.max_grad_norm)),
            Line("steps", counted_steps(request)),
            Line(
                "dtype",
                "bfloat16" if setup.precision == "bf16-pure" else "float32",
                "of weights, gradients and optimizer states",
            ),
            Line("mixed_precision_param", "float32" if setup.precision == "fp32" else "bfloat16"),
            Line("enable_cpu_offload", setup.offload == "parameters"),
        ),
        section("parallelism", *_parallelism(setup)),
        section("activation_checkpoint", *_checkpointing(setup)),
        section("compile", Line("enable", setup.compile)),
        section(
            "checkpoint",
            Line("enable", True, "also what loads the model"),
            Line("initial_load_in_hf", True, "the weights in model.hf_assets_path"),
            Line("interval", steps_between_saves(counted_steps(request)) if request.save else counted_steps(request)),
            Line("last_save_in_hf", True),
        ),
        section("metrics", Line("log_freq", request.logging_steps)),
        section("debug", Line("seed", hyper.seed)),
    ]


def _parallelism(setup: TrainSetup) -> list[Line]:
    sharded = setup.parallel == "fsdp2"
    shards = setup.shards if sharded else 1
    lines = [
        Line("data_parallel_replicate_degree", setup.shardable_ranks // shards),
        Line("data_parallel_shard_degree", shards // setup.context_degree),
        Line("tensor_parallel_degree", setup.tensor_degree),
        Line("pipeline_parallel_degree", setup.pipeline_degree),
    ]
    if setup.context_degree > 1:
        lines += [
            Line("context_parallel_degree", setup.context_degree, "GPUs over which every sequence is cut"),
            Line("context_parallel_rotate_method", "allgather"),
        ]
    if setup.expert_degree > 1:
        lines.append(Line("expert_parallel_degree", setup.expert_degree, "GPUs over which experts are distributed"))
    if sharded:
        lines.append(Line("fsdp_reshard_after_forward", "always" if setup.reshard_after_forward else "never"))
    if setup.pipeline_degree > 1:
        lines += [
            Line("pipeline_parallel_schedule", {"1f1b": "1F1B", "gpipe": "GPipe"}[setup.pipeline_schedule]),
            Line("pipeline_parallel_microbatch_size", setup.micro_batch_seqs),
            Line("pipeline_parallel_first_stage_less_layers", 0, "layers are cut evenly, as planned"),
            Line("pipeline_parallel_last_stage_less_layers", 0),
        ]
    return lines


def _checkpointing(setup: TrainSetup) -> list[Line]:
    if setup.selective_checkpointing:
        return [Line("mode", "selective"), Line("selective_ac_option", "op", "attention and every second product kept")]
    if setup.checkpointing <= 1:
        return [Line("mode", "full" if setup.checkpointing else "none")]
    return [Line("mode", "selective"), Line("selective_ac_option", str(setup.checkpointing), "every n-th layer")]
