"""torchtune's recipe of full fine-tuning on one GPU (`tune run full_finetune_single_device --config FILE`), its
optimizer in the backward: of the gradients one tensor's is there at a time, and 8-bit paged states lie in the host's
memory as far as the card has no room. What it takes by name (rows, weights) is a module beside the file.

Read in torchtune 0.6.1, its last release: `recipes/full_finetune_single_device.py`, `models/*/_component_builders.py`.
"""

from typing import Any

from planner.frameworks.exporters import common, prepare
from planner.frameworks.exporters.text import Line, program, section, shown_path, yaml_text
from planner.frameworks.exporters.types import Difference, Draft, ExportRequest, LaunchFile
from planner.frameworks.readers.torchtune import OPTIMIZERS
from planner.models.spec import ModelSpec
from planner.options.optimizers import OPTIMIZERS as ROWS
from planner.setup import TrainSetup

TARGET = "torchtune-in-bwd"
FILE = f"{TARGET}/full.yaml"
PARTS = f"{TARGET}/parts.py"
VALIDATED_WITH = {"torchtune": "0.6.1", "torchao": "0.12.0", "transformers": "5.23.0"}
COMPONENTS = {name: component for component, name in OPTIMIZERS.items()}
LLAMA_SCALING = {8.0: "llama3_1.llama3_1", 32.0: "llama3_2.llama3_2"}
"""Factor of a Llama's rotary scaling -> torchtune's builder of it, whose tied head is the second's own."""


def builder(model: ModelSpec | None) -> str:
    """torchtune's function that builds a model, "" where none does."""
    if model is None or model.model_type not in ("llama", "qwen2"):
        return ""
    config = model.config
    if model.model_type == "qwen2":
        return "" if config.get("use_sliding_window") else "torchtune.models.qwen2.qwen2"
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if config.get("attention_bias") or config.get("mlp_bias"):
        return ""
    if scaling.get("rope_type", "default") == "default":
        return "" if model.tied else "torchtune.models.llama3.llama3"
    name = LLAMA_SCALING.get(float(scaling.get("factor") or 0), "")
    return f"torchtune.models.{name}" if name and model.tied == name.startswith("llama3_2") else ""


def differences(setup: TrainSetup) -> tuple[Difference, ...]:
    runs: dict[str, tuple[object, str]] = {
        "checkpointing": (int(setup.checkpointing > 0), "the recipe checkpoints every layer or none"),
        "precision": ("bf16-pure", "the recipe has one type for weights, gradients and states"),
        "loss": ("full", "torchtune 0.6.1 has no fused loss; it cuts the logits into eight pieces"),
        "attention": ("sdpa", "torchtune's models call SDPA"),
        "kernels": ("eager", "torchtune's models are plain PyTorch"),
        "packing": (False, "packed rows would each bring a mask of tokens x tokens"),
        "compile": (False, "its compiled step was not compared"),
        "selective_checkpointing": (False, "its checkpoints recompute whole layers"),
    }
    return common.differing(setup, runs)


def refusal(setup: TrainSetup, model: ModelSpec | None = None) -> str:
    if not setup.single_gpu:
        return "this recipe of torchtune's trains on one GPU"
    if setup.method != "full" or setup.trained_layers:
        return "this recipe of torchtune's trains whole models"
    if setup.accumulation_steps > 1:
        return "an optimizer in the backward steps with every micro-batch: give --global-batch its size"
    if setup.optimizer != "adamw-fused" and ROWS[setup.optimizer].transformers not in COMPONENTS:
        return f"no {setup.optimizer} was read in torchtune's configs"
    if not builder(model):
        return "torchtune's builders that were read are those of Llama 3 and Qwen 2 and 2.5"
    return common.model_refusal(setup, model, TARGET)


def export(request: ExportRequest, differences: tuple[Difference, ...]) -> Draft:
    """`full.yaml`, and the parts that it names."""
    command = f"tune run full_finetune_single_device --config launch/{FILE}"
    notes = (
        "Every micro-batch is a step: there is no accumulation, and nothing is clipped.",
        "It evaluates nothing, and saves the weights at the end of each epoch.",
    )
    main = LaunchFile(path=FILE, text=yaml_text(_sections(request)))
    parts = LaunchFile(path=PARTS, text=program("TORCHTUNE"))
    command = common.after(common.environment(request.gpu), command)
    return Draft(title="torchtune", main=main, files=(parts,), command=command, notes=notes)


def _part(name: str, **arguments: Any) -> dict[str, Any]:
    return {"_component_": f"launch.{PARTS.removesuffix('.py').replace('/', '.')}.{name}", **arguments}


def _model(request: ExportRequest) -> dict[str, Any]:
    model, setup = request.model, request.setup
    assert model is not None
    config = model.config
    scaling = config.get("rope_parameters") or {}
    heads = int(config["num_attention_heads"])
    built = {
        "_component_": builder(model),
        "vocab_size": model.vocab_size,
        "num_layers": model.num_layers,
        "num_heads": heads,
        "num_kv_heads": int(config.get("num_key_value_heads") or heads),
        "embed_dim": model.hidden_size,
        "intermediate_dim": int(config["intermediate_size"]),
        "max_seq_len": setup.seq_len_tokens,
        "rope_base": int(config.get("rope_theta") or scaling.get("rope_theta") or 10_000),
        "norm_eps": float(config.get("rms_norm_eps") or 1e-6),
    }
    return built | ({"tie_word_embeddings": model.tied} if model.model_type == "qwen2" else {})


def _sections(request: ExportRequest) -> list[Any]:
    setup, hyper = request.setup, request.hyper
    fused = setup.optimizer == "adamw-fused"
    optimizer: dict[str, Any] = {
        "_component_": "torch.optim.AdamW" if fused else COMPONENTS[ROWS[setup.optimizer].transformers],
        "lr": hyper.learning_rate,
        "weight_decay": hyper.weight_decay,
    }
    schedule = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
    warmup = max(1, round(hyper.warmup_fraction * common.counted_steps(request)))
    kind = "QWEN2" if request.model is not None and request.model.model_type == "qwen2" else "LLAMA3"
    output = shown_path(request.output_dir)
    folders = {"checkpoint_dir": shown_path(request.model_id), "output_dir": output, "recipe_checkpoint": None}
    return [
        section(
            "model",
            Line("model", _model(request)),
            Line("checkpointer", _part("weights", **folders, model_type=kind), "a hub id, or a folder on disk"),
            Line("resume_from_checkpoint", False),
            Line("dtype", "bf16", "of weights, gradients and states"),
            Line("device", "cuda"),
        ),
        section(
            "data",
            Line("tokenizer", _part("padding", max_seq_len=setup.seq_len_tokens)),
            Line("dataset", _part("rows", path=prepare.folder(request, TARGET), packed=False)),
            Line("shuffle", True),
            Line("seed", hyper.seed),
        ),
        section(
            "step",
            Line("batch_size", setup.micro_batch_seqs),
            Line("gradient_accumulation_steps", 1),
            Line("optimizer_in_bwd", True, "each parameter is stepped as its gradient comes"),
            Line("optimizer", optimizer | ({"fused": True} if fused else {})),
            Line("lr_scheduler", {"_component_": schedule, "num_warmup_steps": warmup}),
            Line("clip_grad_norm", None, "not with the optimizer in the backward"),
            Line("loss", {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}),
            Line("epochs", max(1, round(hyper.num_epochs))),
            Line("max_steps_per_epoch", hyper.max_steps),
        ),
        section(
            "memory",
            Line("enable_activation_checkpointing", setup.checkpointing > 0),
            Line("enable_activation_offloading", setup.activation_offload),
            Line("compile", False),
        ),
        section(
            "output",
            Line("output_dir", output),
            Line("metric_logger", {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": output}),
            Line("log_every_n_steps", request.logging_steps),
            Line("log_peak_memory_stats", True),
        ),
    ]
