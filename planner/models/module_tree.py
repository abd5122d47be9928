"""A `ModelSpec` for an architecture that no family knows: read off the module tree that transformers builds.

Those of the catalogue ship (`python -m tools.build_trees`). torch is no part of this package, so another process reads
any other (`probes.module_tree`): the one that loads the dry run's libraries where there is one (`read_with`), else a
child of its own, which answers in JSON. The answer is kept in the user's cache: the next plan of the same configuration
asks nobody.
"""

import contextlib
import gzip
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from planner.core.children import child_environment, python_argv
from planner.core.errors import ConfigError
from planner.core.inputs import parse_object, read_bytes
from planner.core.install import install_command
from planner.core.outputs import write_whole
from planner.core.shipped import DATA
from planner.models.spec import ModelSpec
from planner.setup.codec import decode
from planner.setup.interchange import to_jsonable

NEEDED = ("torch", "transformers", "peft")
LIMIT_S = 120.0
MAX_BYTES = 16 * 1024**2
VERSION = 12
"""Part of the cache's key: raise it whenever the reading of a tree can change."""
SHIPPED = DATA / "module_trees.jsonl.gz"
"""A line for each model of the catalogue whose type is of no known family: the digests of its configuration, as
published and as transformers saves it, and its spec."""
_OF_NO_TREE = frozenset(
    {
        *("architectures", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "use_cache"),
        *("decoder_start_token_id", "initializer_range", "transformers_version", "quantization_config"),
    }
)
"""Keys of a configuration that decide no module's shape: a fine-tune's are often other than its base's."""

Reader = Callable[[Mapping[str, Any]], Mapping[str, Any] | None]
"""From a configuration to `probes.module_tree`'s answer; None where it has none."""
_readers: list[Reader] = []


def read_with(reader: Reader) -> None:
    """From now on this is asked before a child is started."""
    _readers[:] = [reader]


class NoTree(Exception):
    """There is no module tree to read; the message says why, `hint` what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def spec_from_tree(config: Mapping[str, Any], model_type: str) -> ModelSpec:
    """The inventory of a configuration: as it ships, or of whatever the installed transformers builds of it; the first
    time some five seconds, then from the cache. `from_tree` where no shipped tree is of its type, so that nothing of
    that type was compared with dry runs.

    Raises:
        NoTree: libraries are missing, transformers does not know the type, or its tree is of no known form.
    """
    text = _shipped()
    at = text.find(f'"{tree_digest(config)}"'.encode())
    if at >= 0:
        line = json.loads(text[text.rfind(b"\n", 0, at) + 1 : text.index(b"\n", at)])
        spec = decode(ModelSpec, line["spec"], SHIPPED.name)
    else:
        spec = _read_tree(config, model_type)
    return replace(spec, from_tree=model_type.removesuffix("_text") not in shipped_types())


def tree_digest(config: Mapping[str, Any]) -> str:
    """16 hexadecimal digits that stand for what a configuration makes of a module tree."""

    def kept(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {
            name: kept(entry) for name, entry in value.items() if name not in _OF_NO_TREE and not name.startswith("_")
        }

    return hashlib.sha256(json.dumps(kept(config), sort_keys=True, default=str).encode()).hexdigest()[:16]


@cache
def _shipped() -> bytes:
    return gzip.decompress(SHIPPED.read_bytes())


@cache
def shipped_types() -> frozenset[str]:
    """The `model_type`s of shipped trees."""
    return frozenset(model_type.decode() for model_type in re.findall(rb'"model_type":"([^"]+)"', _shipped()))


def _read_tree(config: Mapping[str, Any], model_type: str) -> ModelSpec:
    """The tree from the user's cache, or read off what transformers builds."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise NoTree(
            f"its module tree cannot be read: {', '.join(missing)} not installed",
            hint=f"with {install_command('torch')} any decoder of transformers is planned",
        )
    package = find_spec("transformers")
    assert package is not None
    assert package.origin is not None
    # its tables name the type: without importing it
    tables = (Path(package.origin).parent / "models" / "auto").glob("*.py")
    if not any(f'("{model_type}", ' in path.read_text(encoding="utf-8") for path in tables):
        raise NoTree(f"transformers {version('transformers')} does not know it")
    path = _cached(config)
    try:
        return decode(ModelSpec, parse_object(read_bytes(path, max_bytes=MAX_BYTES), path.name))
    except ConfigError:  # nothing is kept there, or it cannot be read
        spec = decode(ModelSpec, _ask(config), "module tree")
        with contextlib.suppress(OSError):  # a cache that cannot be written is no error
            write_whole(path, json.dumps(to_jsonable(spec)).encode())
    return spec


def _cached(config: Mapping[str, Any]) -> Path:
    from platformdirs import user_cache_path

    parts = {
        "config": {name: value for name, value in config.items() if not name.startswith("_")},
        "versions": [version("torch"), version("transformers"), VERSION],
    }
    key = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
    return user_cache_path("finetune-planner") / "module-trees" / f"{key}.json"


def _ask(config: Mapping[str, Any]) -> dict[str, Any]:
    answer = next((reply for reader in _readers if (reply := reader(config)) is not None), None)
    answer = _child_answer(config) if answer is None else answer
    spec = answer.get("spec")
    if isinstance(spec, dict):
        return spec
    failure = str(answer.get("failure", "no answer"))
    if failure.startswith("ImportError"):
        hint = "install that package, or plan the text model (its text_config as config.json)"
        raise NoTree(f"transformers needs another package to build it: {failure.partition(': ')[2]}", hint=hint)
    raise NoTree(
        f"no decoder can be read off what transformers {version('transformers')} builds of it: {failure}",
        hint="`plan trace -- python train.py` follows a program of yours that trains it",
    )


def _child_answer(config: Mapping[str, Any]) -> Mapping[str, Any]:
    environment = {**child_environment(), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            python_argv("-m", "probes.module_tree"),
            input=json.dumps(config, default=str),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NoTree(f"its module tree took longer than {LIMIT_S:g} s to build") from error
    except OSError as error:
        raise NoTree(f"no process could be started to read its module tree: {os.strerror(error.errno or 0)}") from error
    try:
        return parse_object(done.stdout[-MAX_BYTES:], "module tree")
    except ConfigError as error:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise NoTree(f"its module tree could not be read: {last[:300]}") from error
