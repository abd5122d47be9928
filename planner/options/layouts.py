"""What the fields of a setup that spread it over GPUs may be."""

PARALLELS = ("none", "dp", "ddp", "zero1", "zero2", "zero3", "fsdp2", "device-map")
"""What the data-parallel copies share: nothing ("none": there is one copy), gradients within one process
(nn.DataParallel, "dp") or over processes ("ddp"), optimizer states and more (DeepSpeed ZeRO 1 to 3, FSDP2).
"device-map" is one copy spread over the GPUs by layers, one GPU at work at a time."""
ZERO = ("zero1", "zero2", "zero3")
SHARDED = (*ZERO, "fsdp2")
PIPELINE_SCHEDULES = ("1f1b", "gpipe")
OFFLOADS = ("none", "optimizer", "parameters")
"""What lies in the host's memory between its uses: optimizer states, or those and the weights (and gradients)."""
SPLIT_DEGREES = ("tensor_degree", "context_degree", "expert_degree", "pipeline_degree")
"""Over how many GPUs the matrices, the sequences, the experts and the layers of one copy are cut."""
LAYOUT_FIELDS = (
    *SPLIT_DEGREES,
    "pipeline_schedule",
    "shard_degree",
    "reshard_after_forward",
    "fsdp_version",
    "sync_each_batch",
    "offload",
)
"""Fields that say something only with several GPUs; left out of JSON and keys at their defaults."""
