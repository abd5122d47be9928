"""Putting something in the place of a library's own for a while."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

Replacement = tuple[Any, str, Any]
"""Owner, name, and what stands in its place."""


@contextmanager
def replaced(replacements: Iterable[Replacement], *, create: bool = False) -> Iterator[None]:
    """Within it all of them hold; with `create` also those that the owner had not."""
    with ExitStack() as stack:
        for owner, name, value in replacements:
            stack.enter_context(mock.patch.object(owner, name, value, create=create))
        yield


def nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for what need not be done."""


@contextmanager
def errors_only(library: str) -> Iterator[None]:
    """Within it the logger of that name says errors alone: no notice that a person who plans cannot act on."""
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
