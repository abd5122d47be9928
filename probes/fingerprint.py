"""The key of a measurement: what was run, where, and how much of it."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from planner.setup.interchange import setup_to_dict
from planner.setup.outcome import Environment
from probes.gpu.environment import fingerprint_environment
from probes.gpu.request import ProbeRequest

# Keys of a config.json that change no tensor and no kernel of a training step.
_NOT_SHAPE = frozenset(
    (
        "architectures", "bos_token_id", "eos_token_id", "decoder_start_token_id", "torch_dtype", "dtype",
        "transformers_version", "use_cache", "initializer_range", "initializer_factor", "id2label", "label2id",
    )
)  # fmt: skip


def config_shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a configuration that shapes the model: private keys ("_name_or_path") and labels left out, nested
    configurations (a text encoder) cleaned likewise."""
    shape: dict[str, Any] = {}
    for key, value in config.items():
        if key.startswith("_") or key in _NOT_SHAPE:
            continue
        shape[key] = config_shape(value) if isinstance(value, Mapping) else value
    return shape


def config_digest(config: Mapping[str, Any]) -> str:
    """Sixteen hex digits that name a model's shape."""
    return _digest(config_shape(config))


def fingerprint(request: ProbeRequest, environment: Environment) -> str:
    """Thirty-two hex digits that name a measurement: model shape, setup, environment, depth and memory limits.

    The time limits are left out: they bound a probe, they do not change what it measures.
    """
    return _digest({"setup": setup_to_dict(request.setup), **_conditions(request, environment)}, digits=32)


def conditions_digest(request: ProbeRequest, environment: Environment) -> str:
    """Sixteen hex digits that name all of a fingerprint but the setup."""
    return _digest(_conditions(request, environment))


def _conditions(request: ProbeRequest, environment: Environment) -> dict[str, Any]:
    return {
        "model": config_shape(request.config),
        "environment": fingerprint_environment(environment, layout=request.num_ranks > 1),
        "level": request.level.value,
        "depths": list(request.depths),
        "memory_bytes": request.limits.memory_bytes,
        "cpu_memory_bytes": request.limits.cpu_memory_bytes,
    }


def _digest(value: object, digits: int = 16) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:digits]
