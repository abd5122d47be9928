"""Task files of schedulers (SkyPilot, dstack, Kubernetes, Compose, Azure ML, W&B sweeps) as shell scripts.

Nothing is executed; what only the scheduler would put in stays a `$NAME`, which is asked for.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

MARKS = (
    {"run", "resources"}, {"run", "setup"}, {"run", "envs"}, {"commands", "type"}, {"commands", "resources"},
    {"apiVersion", "kind"}, {"services"}, {"command", "compute"}, {"command", "code"}, {"command", "image"},
    {"entrypoint", "resources"}, {"entrypoint", "hyperparameters"}, {"program", "parameters", "method"},
    {"commands", "environment"}, {"tasks", "budget"},
)  # fmt: skip
"""Settings that task files have together, one row a kind."""
SCRIPTS = ("setup", "run", "commands", "script", "entrypoint")
"""Settings that hold commands of a shell; `command` and `args` hold one command's words."""
ENVIRONMENTS = ("env", "envs", "environment", "environment_variables", "envVars")
_GPUS = re.compile(r"^[A-Za-z][\w-]*:(\d+)$")
MAX_DEPTH = 12


def is_task(values: Mapping[str, Any]) -> bool:
    """Whether a mapping is a scheduler's task file."""
    return any(marks <= set(values) for marks in MARKS)


def script_of(values: Mapping[str, Any]) -> str:
    """The commands of a task file as a shell script, with its variables set before them."""
    if {"program", "parameters", "method"} <= set(values):
        return _sweep(values)
    lines = [f"export SKYPILOT_NUM_GPUS_PER_NODE={count}" for count in _gpus(values, 0)][:1]
    inputs = values.get("inputs")
    given = inputs if isinstance(inputs, Mapping) else {}

    def put_in(match: re.Match[str]) -> str:
        block, _, name = match[1].rpartition(".")
        known = block == "inputs" and isinstance(given.get(name), (str, int, float))
        return str(given[name]) if known else f"${name}"

    return re.sub(r"\$\{\{\s*([\w.]+)\s*\}\}", put_in, "\n".join([*lines, *_scripts(values, 0)]))


def files_of(values: Mapping[str, Any]) -> dict[str, str]:
    """The files that a Kubernetes ConfigMap holds, by their names."""
    data = values.get("data") if values.get("kind") == "ConfigMap" else None
    return {str(key): text for key, text in (data or {}).items() if isinstance(text, str)}


def _scripts(values: Mapping[str, Any], depth: int) -> Iterator[str]:
    """Every command in a task file, in order, behind the variables of its block."""
    for key in ENVIRONMENTS:
        yield from (f"export {name}={shlex.quote(value)}" for name, value in _variables(values.get(key)))
    for key in SCRIPTS:
        given = values.get(key)
        if isinstance(given, list) and all(isinstance(word, str) for word in given):
            yield shlex.join(given) if key == "entrypoint" else "\n".join(given)
        elif isinstance(given, str):
            yield given
    words = [word for key in ("command", "args", "arguments") for word in _words(values.get(key))]
    if words:
        yield " ".join(words)
    for value in values.values() if depth < MAX_DEPTH else ():
        for inner in value if isinstance(value, list) else (value,):
            if isinstance(inner, Mapping):
                yield from _scripts(inner, depth + 1)


def _words(given: Any) -> list[str]:
    """The words of a command that is one text or a list."""
    if isinstance(given, list):
        return [shlex.quote(str(word)) if not re.search(r"^\$[\w({]", str(word)) else str(word) for word in given]
    return [given] if isinstance(given, str) else []


def _variables(given: Any) -> Iterator[tuple[str, str]]:
    """Environment variables: a mapping, `NAME=VALUE` lines, or `{name:, value:}` entries."""
    if isinstance(given, Mapping):
        given = [{"name": name, "value": value} for name, value in given.items()]
    for one in given if isinstance(given, list) else ():
        if isinstance(one, str) and "=" in one:
            one = dict(zip(("name", "value"), one.split("=", 1), strict=True))
        pair = (str(one.get("name")), one.get("value")) if isinstance(one, Mapping) else ("", None)
        if re.fullmatch(r"[A-Za-z_]\w*", pair[0]) and isinstance(pair[1], (str, int, float)):
            yield pair[0], str(pair[1])


def _gpus(values: Mapping[str, Any], depth: int) -> Iterator[int]:
    """The GPUs of a task, as `accelerators: H100:8`, `gpu: 8`, `nvidia.com/gpu: 8` say it."""
    for key, value in values.items():
        if key in ("accelerators", "gpu", "gpus", "nvidia.com/gpu", "gpuCount", "num_gpus"):
            named = {*value.values()} if isinstance(value, Mapping) else {value}
            for one in named:
                match = _GPUS.match(str(one))
                if match or str(one).isdigit():
                    yield int(match[1] if match else one)
        elif isinstance(value, Mapping) and depth < MAX_DEPTH:
            yield from _gpus(value, depth + 1)
        elif isinstance(value, list) and depth < MAX_DEPTH:
            for one in value:
                if isinstance(one, Mapping):
                    yield from _gpus(one, depth + 1)


def _sweep(values: Mapping[str, Any]) -> str:
    """A W&B sweep: the program with each parameter that has one value; the others are open."""
    words: list[str] = []
    parameters = values["parameters"]
    for name, said in parameters.items() if isinstance(parameters, Mapping) else ():
        said = said if isinstance(said, Mapping) else {}
        some = said.get("values")
        one = said.get("value", some[0] if isinstance(some, list) and len(some) == 1 else None)
        if isinstance(one, (str, int, float, bool)):
            words += [f"--{name}", shlex.quote(str(one))]
        else:
            words += [f"--{name}", f"${name}"]
    program = str(values["program"])
    return " ".join(["bash" if program.endswith(".sh") else "python", shlex.quote(program), *words])
