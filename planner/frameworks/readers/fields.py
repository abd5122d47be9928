"""A tool's table of fields on a file: what single settings say, what they are called there, and where they stand."""

from collections.abc import Mapping
from typing import Any

from planner.frameworks.readers import common, schema
from planner.frameworks.readers.types import Missing, ReadConfig
from planner.frameworks.readers.values import Settings
from planner.frameworks.tools import Tool
from planner.options.adapters import ADAPTERS


def settings_fields(settings: Settings, tool: Tool, *names: str) -> dict[str, Any]:
    """Fields of a setup that one setting each says; the tool's default, and a note, where the file says nothing.

    Args:
        settings: the file, or the block of it in which the settings stand.
    """
    fields: dict[str, Any] = {}
    for name in names:
        field = tool.field(name)
        assert field is not None, (tool.name, name)
        key = settings.first(*(alias.rpartition(".")[2] for alias in (field.key, *field.older)))
        default = field.default
        if isinstance(default, bool):
            fields[name] = settings.flag(key, default)
            continue
        if not settings.has(key):
            settings.assume(f"{key} absent: {default}, {tool.title}'s default")
        fields[name] = (
            settings.real(key, default) if isinstance(default, float) else settings.integer(key, default, at_least=1)
        )
    return fields


def config(tool: Tool, settings: Settings, fields: dict[str, Any], **more: Any) -> ReadConfig:
    """The reading of a tool's file: its fields as a setup, with what was asked, assumed and approximated on the way.

    Args:
        settings: the whole file; more: other fields of the reading, the model's name where its setting does not say it.

    Raises:
        ConfigError: an impossible combination.
    """
    every = (settings, *settings.blocks.values())
    if "model_id" not in more and "model" not in settings.missing:
        more["model_id"] = named_model(settings, tool)
    return ReadConfig(
        format=tool.name,
        path=settings.name,
        setup=common.build(settings, fields),
        missing=tuple(Missing(field=of, reason=why) for part in every for of, why in part.missing.items()),
        assumptions=tuple(dict.fromkeys(assumption for part in every for assumption in part.assumptions)),
        approximations=tuple(dict.fromkeys(approximation for part in every for approximation in part.approximations)),
        refusals=tuple(refusal for part in every for refusal in part.refusals),
        adapted_tables=tuple(table for part in every for table in part.tables),
        unknown_keys=tuple(key for part in every for key in part.unknown_keys),
        values=settings.values,
        **more,
    )


def named_model(settings: Settings, tool: Tool) -> str | None:
    """The model by the setting that names it, None where none does."""
    field = tool.field("model")
    return settings.optional_text(settings.first(field.key, *field.older)) if field is not None else None


def adapter_kind(settings: Settings, tool: str) -> str:
    """The kind of adapter that a file's switches ask for, in the words that each kind has in that tool, else in peft's
    LoraConfig. Kinds that need other memory come before those that only start otherwise."""
    for row in sorted(ADAPTERS.values(), key=lambda row: row.start_only):
        arguments = getattr(row, tool, row.arguments if row.config == "LoraConfig" else None)
        if arguments and all(_asks(settings, key, word) for key, word in arguments.items()):
            return row.name
    return "lora"


def _asks(settings: Settings, key: str, word: Any) -> bool:
    """Whether a file sets a switch, or a word of a family ("pissa_niter_16": any of "pissa")."""
    if isinstance(word, bool):
        return settings.raw(key) is not None and settings.flag(key, False) is word
    return str(settings.raw(key, "")).startswith(str(word).partition("_")[0])


def keys(tool: Tool, values: Mapping[str, Any]) -> dict[str, str]:
    """Field -> its key in this file: the name of it that stands there, else today's."""
    by_field: dict[str, str] = {}
    for field in tool.fields:
        names = (field.key, *field.older)
        by_field[field.of] = next((name for name in names if _value(values, name) is not None), field.key)
    return by_field


def origins(
    tool: Tool, values: Mapping[str, Any], lines: Mapping[str, int], file: str, running: Mapping[str, str]
) -> dict[str, str]:
    """Field -> where its value comes from: "file:line", or the default of which version of the tool.

    Args:
        lines: dotted key -> its line; running: package -> the version that was named for this run.
    """
    newest = schema.snapshot().get(tool.name, {}).get("version", "")
    version = running.get(tool.name, newest)
    default = f"default of {tool.title} {version}".strip()
    sources: dict[str, str] = {}
    for field in tool.fields:
        stands = [name for name in (field.key, *field.older, *field.more) if _value(values, name) is not None]
        if stands and stands[0] in lines:
            sources[field.of] = f"{file}:{lines[stands[0]]}"
        elif not stands and field.of not in ("model", "num_gpus", "parallel"):
            sources[field.of] = default
    return sources


def _value(values: Mapping[str, Any], key: str) -> Any:
    value: Any = values
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
