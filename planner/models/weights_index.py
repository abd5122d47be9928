"""The index of a checkpoint beside its config.json: does it hold the model that the configuration describes?"""

from pathlib import Path

from planner.errors import ConfigError
from planner.inputs import parse_object, read_bytes
from planner.models.spec import ModelSpec

INDEX_NAME = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 * 1024 * 1024
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TOLERANCE_FRACTION = 0.25
"""What towers, extra prediction layers and a stored tied head may add, or a saved part lack."""


def check_against_weights(spec: ModelSpec, directory: Path) -> None:
    """Refuses a configuration that describes another model than the weights beside it.

    Only where the index tells its size and the configuration its data type; quantized checkpoints are left alone.

    Raises:
        ConfigError: the sizes contradict each other by more than `TOLERANCE_FRACTION`.
    """
    file = directory / INDEX_NAME
    config = spec.config
    size = _BYTES.get(str(config.get("dtype") or config.get("torch_dtype") or ""))
    if size is None or config.get("quantization_config") or not file.is_file():
        return
    metadata = parse_object(read_bytes(file, max_bytes=MAX_INDEX_BYTES), str(file)).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, bool) or not isinstance(total, (int, float)) or total <= 0:
        return
    stored = total / size
    if abs(stored / spec.num_params - 1) > TOLERANCE_FRACTION:
        raise ConfigError(
            f"{directory}: config.json describes {spec.num_params / 1e9:.2f} B parameters, {INDEX_NAME} holds "
            f"{stored / 1e9:.2f} B",
            hint="the configuration lacks a size, or belongs to another model: take both from the same revision",
        )
