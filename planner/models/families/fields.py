"""One validating accessor for `config.json`: every value that a family reads comes through `Fields`.

A config is a stranger's file. Whatever it holds (wrong types, NaN, negative or absurd sizes, lists where numbers
belong), reading it either gives a value of the asked type within sane bounds or a `ConfigError` that says what was
expected and what came.
"""

from collections.abc import Callable, Mapping
from typing import Any

from planner.core.errors import ConfigError

_LIMITS = {
    "vocab": 1 << 27,
    "position": 1 << 40,
    "window": 1 << 40,
    "expert": 1 << 14,
    "layers": 10_000,
    "heads": 1 << 14,
    "intermediate": 1 << 24,
    "width": 1 << 20,  # hidden size, head size, low-rank widths
}

ACTIVATIONS = (
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh",
    "gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu", "relu2",
    "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "xielu",
)  # fmt: skip
"""Source: transformers 5.23 `activations.ACT2CLS`."""
NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token")
_ABSENT: Any = object()


def shown(value: object) -> str:
    """`value` as short text, safe for a terminal whatever it is."""
    if isinstance(value, list):  # what is shown ends within its first ones
        value = value[:60]
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested beyond reason; integers of more than 4300 digits
        text = f"a {type(value).__name__}"
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= 60 else text[:57] + "..."


class Fields:
    """Typed, bounded reads from one JSON object; `where` names it in messages ("config.json: text_config")."""

    __slots__ = ("raw", "where")

    def __init__(self, raw: object, where: str) -> None:
        if not isinstance(raw, Mapping):
            raise ConfigError(
                f"{where}: expected a JSON object, got {shown(raw)}",
                hint="point at the config.json of a transformers model",
            )
        self.raw = raw
        self.where = where

    def has(self, name: str) -> bool:
        return name in self.raw

    def _get(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        for name in names:
            value = self.raw.get(name)
            if value is not None:
                return name, value
        if default is _ABSENT:
            wanted = " or ".join(names)
            raise ConfigError(
                f"{self.where}: {wanted} is missing", hint="a complete config.json of a transformers model has it"
            )
        return names[0], default

    def wrong(self, problem: str) -> ConfigError:
        """The error to raise for a value that is there and cannot be meant."""
        return ConfigError(f"{self.where}: {problem}", hint="correct the field in config.json")

    def _wrong(self, name: str, expected: str, value: object) -> ConfigError:
        return self.wrong(f"{name} must be {expected}, got {shown(value)}")

    def count(self, *names: str, kind: str = "width", default: Any = _ABSENT, at_least: int = 1) -> int:
        """A whole number within [at_least, the limit of its kind], the first of `names` that is not null."""
        name, value = self._get(names, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, "a whole number", value)
        limit = _LIMITS[kind]
        if not at_least <= value <= limit:
            raise self._wrong(name, f"between {at_least} and {limit}", value)
        return value

    def optional_count(self, *names: str, kind: str = "width", at_least: int = 1) -> int | None:
        """Like `count`, None where absent or null."""
        if all(self.raw.get(name) is None for name in names):
            return None
        return self.count(*names, kind=kind, at_least=at_least)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def text(self, *names: str, default: Any = _ABSENT) -> str:
        """A string of at most 200 characters."""
        name, value = self._get(names, default)
        if not isinstance(value, str) or len(value) > 200:
            raise self._wrong(name, "a short text", value)
        return value

    def positive(self, name: str) -> bool:
        """Whether a numeric option is set and above 0 (a soft cap); null, absent and 0 mean no."""
        value = self.raw.get(name)
        if value is None:
            return False
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
            raise self._wrong(name, "a number of at least 0", value)
        return value > 0

    def check_what_all_have(self) -> None:
        """What any decoder's configuration may say whatever its type: rotary scaling, constants of norms, experts."""
        places = [self] if self.raw.get("text_config") is None else [self, self.sub("text_config")]
        for place in places:
            for name in ("rope_scaling", "rope_parameters"):
                scaling = place.raw.get(name)
                if scaling is not None and not isinstance(scaling, Mapping):
                    raise place._wrong(name, "a JSON object or null", scaling)
                Fields(scaling or {}, f"{place.where}: {name}").positive("original_max_position_embeddings")
            num, active = (place._get(names, 0)[1] for names in (NUM_EXPERTS, ACTIVE_EXPERTS))
            numbers = isinstance(num, int) and isinstance(active, int)  # some families say them a layer
            if numbers and active > num > 1:  # of one expert, or none, a plain MLP is made
                raise place.wrong(f"{active} experts a token, of {num}")
            for name in ("rms_norm_eps", "layer_norm_eps", "original_max_position_embeddings"):
                place.positive(name)

    def activation(self, *names: str, default: str) -> str:
        name, value = self._get(names, default)
        if value not in ACTIVATIONS:
            raise self._wrong(name, "the name of an activation function of transformers", value)
        return str(value)

    def rotary_fraction(self) -> float:
        """The part of each head that is rotated: at the top, or inside `rope_parameters` as transformers 5 saves it."""
        for place in (self.raw, self.raw.get("rope_parameters"), self.raw.get("rope_scaling")):
            value = place.get("partial_rotary_factor") if isinstance(place, Mapping) else None
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                    raise self._wrong("partial_rotary_factor", "a fraction above 0 and up to 1", value)
                return float(value)
        return 1.0

    def texts(self, name: str, length: int, allowed: tuple[str, ...]) -> tuple[str, ...] | None:
        """A list of `length` strings out of `allowed`, None where absent or null."""
        value = self.raw.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise self._wrong(name, "a list", value)
        if len(value) != length:
            raise self._wrong(name, f"a list of {length} entries, one per layer", f"{len(value)} entries")
        for item in value:
            if not isinstance(item, str) or item not in allowed:
                raise self._wrong(name, f"a list of {' | '.join(allowed)}", item)
        return tuple(value)

    def layers_of(
        self, kind: str, kinds: tuple[str, ...], num_layers: int, otherwise: Callable[[int], bool]
    ) -> list[bool]:
        """Whether each layer is of one of the kinds that `layer_types` may name, by its number where it is absent."""
        types = self.texts("layer_types", num_layers, kinds)
        return (
            [otherwise(index) for index in range(num_layers)]
            if types is None
            else [layer_type == kind for layer_type in types]
        )

    def indices(self, name: str) -> frozenset[int]:
        """A list of layer indices, empty where absent or null."""
        value = self.raw.get(name)
        if value is None:
            return frozenset()
        if not isinstance(value, list | tuple) or len(value) > _LIMITS["layers"]:
            raise self._wrong(name, "a list of layer numbers", value)
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < _LIMITS["layers"]:
                raise self._wrong(name, "a list of layer numbers", item)
        return frozenset(value)

    def sub(self, name: str, defaults: Mapping[str, Any] | None = None) -> "Fields":
        """A nested object, required. transformers leaves values that equal the class defaults out of nested
        configurations when it saves them, so those defaults fill the gaps."""
        nested = Fields(self._get((name,), _ABSENT)[1], f"{self.where}: {name}")
        if defaults:
            nested.raw = {**defaults, **nested.raw}
        return nested

    def divides(self, name: str, divisor: int, whole_name: str, whole: int) -> None:
        if whole % divisor:
            raise self.wrong(f"{whole_name} {whole} must be a multiple of {name} {divisor}")
