"""A measurement from its JSON form, every field looked at: what the store, a probe's child and a study hold."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from math import inf
from typing import Any

from planner.outcome import Environment, Measurement, Rung

_LARGEST = 1e18
"""No byte count of a GPU and no rate is above it."""


def environment_from_dict(values: Mapping[str, Any]) -> Environment:
    """An `Environment` from its JSON form; unknown keys are ignored (a newer writer).

    Raises:
        ValueError: it is none, and why.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"environment must be an object, got {type(values).__name__}")
    known = {one.name for one in fields(Environment)}
    try:
        found = Environment(**{name: value for name, value in values.items() if name in known})
    except TypeError as error:
        raise ValueError(f"environment: {error}") from error
    for one in fields(Environment):
        value = getattr(found, one.name)
        if one.name == "libraries":
            if not isinstance(value, Mapping):
                raise ValueError(f"environment.libraries must be an object, got {value!r:.80}")
        elif one.name == "power_limit_w":
            _optional(number, value, "environment.power_limit_w", least=0.0)
        elif value is not None and not isinstance(value, str):
            raise ValueError(f"environment.{one.name} must be text, got {value!r:.80}")
    return found


def measurement_from_dict(values: Mapping[str, Any]) -> Measurement:
    """A `Measurement` from its JSON form; unknown keys are ignored (a newer writer).

    Raises:
        ValueError: a field that is missing, of the wrong type, or that nothing can measure (a negative peak, a step
            without time); the message begins with the field.
    """
    known = {one.name: values[one.name] for one in fields(Measurement) if one.name in values}
    try:
        times = tuple(
            number(value, "step_times_s", above=0.0) for value in _list(values["step_times_s"], "step_times_s")
        )
        if not times:
            raise ValueError("step_times_s must hold at least one step, got none")
        known["rung"] = Rung(values["rung"])
        known["step_times_s"] = times
        known["environment"] = environment_from_dict(values["environment"])
        phases = values["phase_peaks_bytes"]
        if not isinstance(phases, Mapping):
            raise ValueError(f"phase_peaks_bytes must be an object, got {phases!r:.80}")
        known["phase_peaks_bytes"] = {
            str(name): whole(size, f"phase_peaks_bytes.{name}") for name, size in phases.items()
        }
        layers = _list(values["layers_measured"], "layers_measured")
        known["layers_measured"] = tuple(whole(depth, "layers_measured") for depth in layers)
        known["rank_peaks"] = tuple(
            (str(name), whole(num, "rank_peaks", least=1), whole(size, "rank_peaks"))
            for name, num, size in _list(values.get("rank_peaks", []), "rank_peaks")
        )
        for name in ("flags", "notes"):
            known[name] = tuple(str(item) for item in _list(values.get(name, []), name))
        for name in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes"):
            known[name] = whole(values[name], name)
        known["tokens_per_step"] = whole(values["tokens_per_step"], "tokens_per_step", least=1)
        for name in ("extrapolation_error_fraction", "mfu_fraction", "copy_bandwidth_bytes_per_s"):
            _optional(number, values.get(name), name)
        if not isinstance(values.get("device_peak_is_nvml", True), bool):
            raise ValueError("device_peak_is_nvml must be true or false")
        return Measurement(**known)
    except KeyError as error:
        raise ValueError(f"{error.args[0]} is missing") from error
    except TypeError as error:
        raise ValueError(str(error)) from error


def number(value: Any, name: str, *, least: float = -inf, above: float = -inf) -> float:
    """A finite number.

    Raises:
        ValueError: anything else, with the field's name.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > _LARGEST or value != value:
        raise ValueError(f"{name} must be a finite number, got {value!r:.80}")
    if value < least or value <= above:
        bound = f"at least {least:g}" if value < least else f"above {above:g}"
        raise ValueError(f"{name} must be {bound}, got {value!r:.80}")
    return float(value)


def whole(value: Any, name: str, *, least: int = 0) -> int:
    """A whole number of at least `least`: bytes, tokens, counts.

    Raises:
        ValueError: anything else, with the field's name.
    """
    found = number(value, name, least=least)
    if found != int(found):
        raise ValueError(f"{name} must be a whole number, got {value!r:.80}")
    return int(value)


def _optional(check: Callable[..., Any], value: Any, name: str, **limits: Any) -> None:
    if value is not None:
        check(value, name, **limits)


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} must be a list, got {value!r:.80}")
    return list(value)
