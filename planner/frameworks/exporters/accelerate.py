"""Accelerate's launch config (`accelerate launch --config_file FILE`), for one GPU or many. Accelerate 1.15."""

from planner.frameworks.exporters import deepspeed
from planner.frameworks.exporters.common import after, attention_line, family_refusal
from planner.frameworks.exporters.several_gpus import (
    PER_NODE,
    accelerate_flags,
    cpu_threads,
    launched,
    sharding_refusal,
    split_refusal,
)
from planner.frameworks.exporters.text import Line, comments, header, section, yaml_text
from planner.frameworks.exporters.types import Difference, Draft, ExportRequest, LaunchFile
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup

TARGET = "accelerate"
NAME = "accelerate.yaml"
FILE = f"{TARGET}/{NAME}"
VALIDATED_WITH = {"accelerate": "1.15.0"}


def config_files(request: ExportRequest, folder: str = TARGET) -> list[LaunchFile]:
    """The Accelerate config of a request, in the folder of the target that is launched with it.

    ZeRO's settings stand in DeepSpeed's own JSON beside it: Accelerate's block has no bucket sizes.
    """
    alone = command(request, "SCRIPT", folder)
    head = comments(header(request, "Accelerate launch config", alone, VALIDATED_WITH))
    setup = request.setup
    kind, half = distributed_type(setup), setup.autocast_dtype
    several = request.num_nodes > 1
    config: dict[str, object]
    blocks = [
        section(
            "processes",
            Line("compute_environment", "LOCAL_MACHINE"),
            Line("distributed_type", kind),
            Line("num_machines", request.num_nodes),
            Line("num_processes", setup.num_processes, "on all machines" if several else ""),
            Line("machine_rank", 0, "every node gives its own with --machine_rank" if several else ""),
            # beside DeepSpeed's own file Accelerate refuses a second opinion on precision
            *[Line("mixed_precision", half or "no", "autocast" if half else "no autocast")] * (kind != "DEEPSPEED"),
            Line("use_cpu", False),
        )
    ]
    if kind == "FSDP":
        config = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": setup.reshard_after_forward,
            "fsdp_offload_params": setup.offload == "parameters",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_activation_checkpointing": checkpoints(setup),
            # with SHARDED_STATE_DICT the Trainer's save_model writes no model at all
            "fsdp_state_dict_type": "FULL_STATE_DICT",
        }
        blocks.append(section("sharding", Line("fsdp_config", config), _mesh(setup)))
    elif kind == "DEEPSPEED":
        config = {"deepspeed_config_file": f"launch/{folder}/{deepspeed.NAME}"}
        if deepspeed.STAGES[setup.parallel] == 3:
            config["zero3_init_flag"] = setup.quantization == "none"
        if request.num_nodes > 1:
            config["deepspeed_multinode_launcher"] = "standard"  # torchrun's rendezvous instead of ssh
        blocks.append(section("sharding", Line("deepspeed_config", config), _ulysses(request)))
    files = [LaunchFile(path=f"{folder}/{NAME}", text=head + yaml_text(blocks))]
    return [*files, *deepspeed.config_files(request, folder)]


def command(request: ExportRequest, script: str, folder: str) -> str:
    """`accelerate launch` of a script with the config in `folder`, for every node the same."""
    launched_by = f"accelerate launch --config_file launch/{folder}/{NAME}{accelerate_flags(request)} {script}"
    return after(cpu_threads(request, folder), launched_by)


def refusal(setup: TrainSetup, model: ModelSpec | None = None) -> str:
    refused = family_refusal(setup, TARGET)  # it starts the plain script, or TRL
    return refused or split_refusal(setup, "Accelerate's config alone") or sharding_refusal(setup, model)


def differences(setup: TrainSetup) -> tuple[Difference, ...]:
    return deepspeed.differences(setup)


def export(request: ExportRequest, differences: tuple[Difference, ...]) -> Draft:
    """The config alone, as a target of its own."""
    notes: tuple[str, ...] = ("holds processes, precision and sharding only: use it with the hf or trl target",)
    notes += (PER_NODE,) * (request.num_nodes > 1)
    script = command(request, "SCRIPT", TARGET)
    return Draft(files=tuple(config_files(request)), command=script, complete=False, notes=notes)


def distributed_type(setup: TrainSetup) -> str:
    """Accelerate's name for the way a setup layouts."""
    if not launched(setup):
        return "NO"
    if setup.sharded_at_loading:
        return "MULTI_GPU"  # transformers shards while it loads; Accelerate must not do it again
    if setup.parallel in deepspeed.STAGES:
        return "DEEPSPEED"
    return "FSDP" if setup.parallel == "fsdp2" else "MULTI_GPU"


def checkpoints(setup: TrainSetup) -> bool:
    """Whether Accelerate's FSDP checkpoints the layers; the Trainer does what FSDP's own cannot say."""
    return distributed_type(setup) == "FSDP" and setup.checkpointing == 1 and not setup.activation_offload


def _mesh(setup: TrainSetup) -> Line | None:
    """Hybrid sharding: shards within groups, copies over the groups; sequences cut within a group.

    Source: accelerate 1.15 `ParallelismConfig`: FSDP2 shards over dp_shard and cp together.
    """
    degree = setup.context_degree
    if setup.shards == setup.shardable_ranks and degree == 1:
        return None
    sizes: dict[str, object] = {
        "parallelism_config_dp_replicate_size": setup.shardable_ranks // setup.shards,
        "parallelism_config_dp_shard_size": setup.shards // degree,
    }
    if degree == 1:
        return Line("parallelism_config", sizes, "hybrid sharding: copies over the groups")
    sizes |= {"parallelism_config_cp_size": degree, "parallelism_config_cp_comm_strategy": "allgather"}
    return Line("parallelism_config", sizes, f"every sequence is cut over {degree} GPUs")


def _ulysses(request: ExportRequest) -> Line | None:
    """DeepSpeed's sequence parallelism; its attention is the one that the model was loaded with, by the same name.

    Source: accelerate 1.15 `Accelerator._prepare_deepspeed` (train_batch_size: micro-batch x accumulation x dp sizes);
    DeepSpeed 0.19 `UlyssesSPAttentionHF.register_with_transformers`; TRL's alst_ulysses_4gpu.yaml.
    """
    setup, kernel = request.setup, attention_line(request)
    if setup.context_degree == 1 or kernel is None:
        return None
    sizes: dict[str, object] = {
        "parallelism_config_dp_shard_size": setup.data_degree,
        "parallelism_config_sp_size": setup.context_degree,
        "parallelism_config_sp_backend": "deepspeed",
        "parallelism_config_sp_seq_length_is_variable": True,
        "parallelism_config_sp_attn_implementation": kernel.value,
    }
    return Line("parallelism_config", sizes, f"every sequence is cut over {setup.context_degree} GPUs")
