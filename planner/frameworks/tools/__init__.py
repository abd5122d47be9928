"""The tools' own words: one table of fields a tool. Its reader, its exporter and `--fix` take names, defaults and
values from it, and slips of the pen are told by it. To add a setting of a tool, add its row."""

from collections.abc import Mapping

from planner.frameworks.tools import axolotl, llamafactory, others, transformers, unsloth
from planner.frameworks.tools.field import Field, Tool, changed_fields

TOOLS: Mapping[str, Tool] = {
    tool.name: tool
    for tool in (
        transformers.SCRIPT,
        transformers.TRL,
        axolotl.AXOLOTL,
        llamafactory.LLAMAFACTORY,
        others.MLX,
        unsloth.UNSLOTH,
        unsloth.SCRIPT,
        *others.TOOLS,
    )
}
"""Every tool whose files are read, by the format's name."""


PROGRAMS = (transformers.SCRIPT.name, unsloth.SCRIPT.name)
"""Formats of Python programs."""
LAUNCHERS = ("accelerate", "deepspeed")
"""Formats that say how a job is spread, and nothing of the job."""


def tool_of(name: str) -> Tool:
    """The tool of a format; one without settings of its own where the format is nobody's."""
    return TOOLS.get(name) or Tool(name=name, title=name, fields=())


ASKED = (
    "model", "method", "quantization", "precision", "lora_rank", "lora_targets", "micro_batch_seqs",
    "accumulation_steps", "seq_len_tokens", "packing", "checkpointing", "attention", "optimizer", "parallel",
)  # fmt: skip
"""Fields without which there is no verdict: where nobody says them they are asked for."""
FIELD_OF: Mapping[str, str] = {
    name: field.of
    for tool in (others.SWIFT, transformers.TRL, unsloth.SCRIPT, transformers.SCRIPT)
    for field in tool.fields
    for name in field.names
}
"""What programs and command lines call the libraries' settings -> the setup's field that they decide ("model": the
model's name)."""

__all__ = ["ASKED", "FIELD_OF", "LAUNCHERS", "PROGRAMS", "TOOLS", "Field", "Tool", "changed_fields", "tool_of"]
