"""Accelerate's launch config (`accelerate launch --config_file FILE`), for one GPU or many. Accelerate 1.15."""

from planner.exporters.spread import split_refusal
from planner.exporters.text import Line, Section, header, launch_file, section, yaml_text
from planner.exporters.types import ExportRequest, Launch, LaunchFile
from planner.setup import TrainSetup

TARGET = "accelerate"
NAME = "accelerate.yaml"
FILE = f"{TARGET}/{NAME}"
VALIDATED_WITH = {"accelerate": "1.15.0"}
DISTRIBUTED = {
    "none": "NO",
    "device-map": "NO",
    "ddp": "MULTI_GPU",
    "zero1": "DEEPSPEED",
    "zero2": "DEEPSPEED",
    "zero3": "DEEPSPEED",
    "fsdp2": "FSDP",
}


def needed(setup: TrainSetup) -> bool:
    """Whether a launch needs a config of its own: more than one process."""
    return setup.parallel not in ("none", "device-map")


def config_file(request: ExportRequest, folder: str = TARGET) -> LaunchFile:
    """The Accelerate config of a request, in the folder of the target that is launched with it."""
    head = header(
        request,
        title="Accelerate launch config",
        command=f"accelerate launch --config_file launch/{folder}/{NAME} SCRIPT",
        validated_with=VALIDATED_WITH,
    )
    return launch_file(f"{folder}/{NAME}", yaml_text(head, _sections(request.setup)))


def export(request: ExportRequest) -> Launch:
    """The config alone, as a target of its own."""
    if reason := split_refusal(request.setup, "Accelerate's config alone"):
        return Launch(target=TARGET, refused=reason)
    return Launch(
        target=TARGET,
        files=(config_file(request),),
        command=f"accelerate launch --config_file launch/{FILE} SCRIPT",
        notes=("holds processes, precision and sharding only: use it with the hf or trl target",),
        validated_with=VALIDATED_WITH,
    )


def _sections(setup: TrainSetup) -> list[Section]:
    processes = setup.num_gpus if needed(setup) else 1
    blocks = [
        section(
            "processes",
            Line("compute_environment", "LOCAL_MACHINE"),
            Line("distributed_type", DISTRIBUTED[setup.parallel]),
            Line("num_machines", 1),
            Line("num_processes", processes),
            Line("machine_rank", 0),
            Line("mixed_precision", setup.autocast_dtype or "no", "autocast"),
            Line("use_cpu", False),
        )
    ]
    if setup.parallel == "fsdp2":
        blocks.append(section("sharding", Line("fsdp_config", _fsdp(setup)), _mesh(setup)))
    elif setup.parallel.startswith("zero"):
        blocks.append(section("sharding", Line("deepspeed_config", _deepspeed(setup))))
    return blocks


def _fsdp(setup: TrainSetup) -> dict[str, object]:
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": setup.reshard_after_forward,
        "fsdp_offload_params": setup.offload == "parameters",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_activation_checkpointing": setup.checkpointing == 1,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _mesh(setup: TrainSetup) -> Line | None:
    """Hybrid sharding: shards within groups, copies over the groups."""
    if setup.shards == setup.data_degree:
        return None
    sizes = {
        "parallelism_config_dp_replicate_size": setup.data_degree // setup.shards,
        "parallelism_config_dp_shard_size": setup.shards,
    }
    return Line("parallelism_config", sizes, "hybrid sharding: copies over the groups")


def _deepspeed(setup: TrainSetup) -> dict[str, object]:
    stage = int(setup.parallel.removeprefix("zero"))
    config: dict[str, object] = {
        "zero_stage": stage,
        "offload_optimizer_device": "none" if setup.offload == "none" else "cpu",
        "offload_param_device": "cpu" if setup.offload == "parameters" else "none",
        "gradient_accumulation_steps": setup.accumulation_steps,
    }
    if stage == 3:
        config |= {"zero3_init_flag": setup.quantization == "none", "zero3_save_16bit_model": True}
    return config
