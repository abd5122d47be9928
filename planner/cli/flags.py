"""Options declared once: a command names one parameter and gets all of a class's.

typer reads a command's options from its signature. `takes_options` writes the fields of every parameter that is a
dataclass into it, in that parameter's place.
"""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

R = TypeVar("R")


def takes_options(command: Callable[..., R]) -> Callable[..., R]:
    """A command whose parameters annotated with a dataclass become the options that its fields declare."""
    classes: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        annotation = parameter.annotation
        if isinstance(annotation, type) and is_dataclass(annotation):
            classes[parameter.name] = annotation
            parameters += [
                inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type)
                for one in fields(annotation)
            ]
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def run(**values: Any) -> R:
        groups = {
            name: of_class(**{one.name: values.pop(one.name) for one in fields(of_class)})
            for name, of_class in classes.items()
        }
        return command(**values, **groups)

    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run
