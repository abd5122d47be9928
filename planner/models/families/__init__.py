"""From `config.json` to `ModelSpec`: what is shaped like Llama is one row of options
(`llama_like`), of any other type the module tree is read."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.core.close import close_names
from planner.core.errors import UnknownModelError, UsageError
from planner.core.shipped import by_model_type
from planner.models.families.fields import Fields, shown
from planner.models.spec import ModelSpec
from planner.models.stored import with_kept


def spec_from_config(config: Mapping[str, Any], *, model_id: str, source: str, like: str = "") -> ModelSpec:
    """The module inventory that transformers 5.23 would build from this configuration.

    Args:
        config: the parsed config.json.
        model_id: what the model is called.
        source: where the configuration came from, one line.
        like: the kind (`alike.KINDS`) whose geometry it has where neither a family nor transformers knows its type.

    Raises:
        UsageError: `like` of a type that is known, or of a configuration that tells of another kind.
        UnknownModelError: no family knows its `model_type` and no module tree can be read; the hint names close ones.
        ConfigError: a field is missing, of the wrong type or out of bounds.
    """
    fields = Fields(config, "config.json")
    fields.check_what_all_have()
    model_type = fields.text("model_type", **({"default": "unnamed"} if like else {}))
    if not has_family(model_type):
        spec = _unadapted(fields, model_type, like)
    elif like:
        raise UsageError(f"--like {shown(like)}: model_type {model_type} is known", hint="leave --like out")
    else:
        from planner.models.families import llama_like

        spec = llama_like.build(fields)
    source += _taken_from_defaults(config, spec)
    return with_kept(replace(spec, model_id=model_id, model_type=model_type, config=config, config_source=source))


def spec_from_sizes(config: Mapping[str, Any]) -> ModelSpec | None:
    """The spec of a type of no known family by its sizes alone, at once, as `like` would make it; None where they tell
    of no kind, or of other layers than its.

    Raises:
        ConfigError: a size is of the wrong type or out of bounds.
    """
    from planner.models.families import alike

    fields = Fields(config, "config.json")
    model_type, kind = fields.text("model_type", default="unnamed"), alike.kind_of(fields)
    if not kind or has_family(model_type):
        return None
    try:
        spec = alike.build(fields, kind)
    except UsageError:
        return None
    return with_kept(replace(spec, model_id="", model_type=model_type, config=config, config_source="its sizes alone"))


def model_types() -> tuple[str, ...]:
    """Every `model_type` that a family knows, or that ships module trees."""
    from planner.models.module_tree import shipped_types

    return tuple(sorted((*by_model_type("decoders"), *shipped_types())))


def has_family(model_type: str) -> bool:
    """Whether a family reads configurations of this type."""
    return model_type in by_model_type("decoders")


def _unadapted(fields: Fields, model_type: str, like: str) -> ModelSpec:
    """The spec of a type of no known family: its module tree, else the geometry that it is said to have."""
    from planner.models.module_tree import NoTree, spec_from_tree  # late: most models have a family

    for name, kind in (("hidden_size", "width"), ("num_hidden_layers", "layers"), ("vocab_size", "vocab")):
        fields.optional_count(name, kind=kind)  # absurd sizes are refused before anything is built
    try:
        spec = spec_from_tree(fields.raw, model_type)
    except NoTree as error:
        if not like:
            raise _unknown(fields, model_type, str(error), error.hint) from error
        from planner.models.families import alike

        return alike.build(fields, like)
    words = f"--like {like} is not needed: transformers builds {model_type}'s own layers"
    return replace(spec, taken_as=words) if like else spec


def _taken_from_defaults(config: Mapping[str, Any], spec: ModelSpec) -> str:
    """What a nested configuration leaves to transformers' defaults although it decides the model's size.

    Published ones leave out head sizes and vocabularies that equal the defaults, never width and depth: without those
    it is another model that is planned.
    """
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        return ""
    sizes = {
        "hidden_size": f" {spec.hidden_size:,}",
        "intermediate_size": "",
        "num_hidden_layers": f" {spec.num_layers}",
    }
    if isinstance(nested.get("num_experts"), int) or nested.get("moe_intermediate_size"):
        del sizes["intermediate_size"]
    missing = [f"{name}{value}" for name, value in sizes.items() if nested.get(name) is None]
    return f"; text_config lacks sizes, transformers' defaults stand: {', '.join(missing)}" if missing else ""


def _unknown(fields: Fields, model_type: str, why: str, remedy: str) -> UnknownModelError:
    """What the user is told of a type that nothing here builds: why, and what would plan or run it."""
    from planner.models.families.alike import kind_of

    close, hints = close_names(model_type.lower(), model_types()), [remedy] if remedy else []
    message = f"model_type {shown(model_type)} is of no family known here; {why}"
    if fields.has("auto_map"):
        message += "; it is code that the model brings along (auto_map), which is never run here: no trust_remote_code"
        hints.append("`plan trace -- python train.py` follows a program of yours that loads it with trust_remote_code")
    if kind := kind_of(fields):
        hints.append(f"--like {kind} plans it from its config.json alone, with a wide band")
    elif close:
        hints.append(f"close types: {', '.join(close)}")
    elif not hints:
        hints.append("any decoder that the installed transformers builds is planned: a newer one may build this type")
    return UnknownModelError(message, hint="; ".join(hints))
