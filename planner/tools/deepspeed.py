"""DeepSpeed's JSON."""

from planner.tools.field import Field, Tool

DEEPSPEED = Tool(
    name="deepspeed",
    title="DeepSpeed",
    fields=(
        Field(of="micro_batch_seqs", key="train_micro_batch_size_per_gpu"),
        Field(of="accumulation_steps", key="gradient_accumulation_steps"),
        Field(of="parallel", key="zero_optimization", fix=False),
        Field(of="precision", key="bf16.enabled", more=("fp16.enabled",), fix=False),
    ),
)
