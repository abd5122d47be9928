"""Notices of libraries that a person who plans cannot act on."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def errors_only(library: str) -> Iterator[None]:
    """Within it the logger of that name says errors alone."""
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
