"""The JSON Schema of the short answers: what `--json` prints for plan, estimate, check, which-gpu and oom, made of the
types that write them. `plan --json-schema` prints it, and the tests validate real answers."""

import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from planner.setup import TrainSetup
from planner.setup.interchange import SCHEMA_VERSION
from reports.brief_json import LEFT_OUT, OF_FOLDER, TYPES

Schema = dict[str, Any]
_PLAIN: dict[Any, Schema] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
}
_LISTS_OR_NAMES: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_WRITTEN_AS: dict[str, Schema] = {
    "checkpointing": {"type": ["boolean", "integer"]},
    "lora_targets": _LISTS_OR_NAMES,
    "modules_to_save": _LISTS_OR_NAMES,
    "trained_layers": {"type": ["string", "array", "integer", "null"]},
    "rollout": {"type": ["object", "null"]},
    "images": {"type": ["object", "null"]},
    "zero_buffers": {"type": ["object", "null"]},
}
"""Fields of a setup that the interchange form writes otherwise than their types say (`planner.setup.interchange`)."""


def _object(properties: Mapping[str, Schema], required: Sequence[str] = ()) -> Schema:
    return {"type": "object", "properties": dict(properties), "required": list(required), "additionalProperties": False}


def _array(items: Schema) -> Schema:
    """A list, which may end in how many more there are."""
    more = {"type": "object", "properties": {LEFT_OUT: _PLAIN[int]}, "required": [LEFT_OUT]}
    return {"type": "array", "items": {"anyOf": [items, more]}}


def _of(kind: Any, defs: dict[str, Schema]) -> Schema:
    """What a value of this type is written as; each dataclass once, in `defs`.

    Raises:
        TypeError: a type that JSON has no form of.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any or kind is object:
        return {}
    if kind in _PLAIN:
        return _PLAIN[kind]
    if origin in (Union, types.UnionType):
        return {"anyOf": [_of(argument, defs) for argument in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (tuple, list, Sequence):
        return _array(_of(arguments[0], defs))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _of(arguments[1], defs)}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise TypeError(f"no JSON form of {kind!r}")
    hints = get_type_hints(kind)
    if kind is TrainSetup:
        name, required = "Setup", []  # those at their defaults may be absent
        properties = {field: _WRITTEN_AS.get(field) or _of(hint, {}) for field, hint in hints.items()}
    else:
        name = kind.__name__
        required = [
            field.name
            for field in fields(kind)
            if (hints[field.name] in (int, bool) or get_origin(hints[field.name]) is Literal)
            and field.default is MISSING
            and field.default_factory is MISSING
        ]  # nulls and empty parts are left out
        properties = {field.name: _of(hints[field.name], defs) for field in fields(kind)}
        properties |= {"schema_version": {"const": SCHEMA_VERSION}} if "schema_version" in properties else {}
    defs[name] = _object(properties, required)
    return {"$ref": f"#/$defs/{name}"}


def answer_schema() -> Schema:
    """The schema of all that the commands print with `--json`."""
    defs: dict[str, Schema] = {}
    answers = [_of(kind, defs) for kind in TYPES]
    answers.append(_array({"anyOf": [_of(kind, defs) for kind in OF_FOLDER]}))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:finetune-planner:answer:{SCHEMA_VERSION}",
        "title": "Answers of plan, estimate, check, which-gpu, oom: --json",
        "anyOf": answers,
        "$defs": dict(sorted(defs.items())),
    }
