"""The phantom GPU of these tests."""

from collections.abc import Iterator

import pytest

from planner.hardware.gpus import find_gpu
from probes.phantom.card import card_of
from probes.phantom.mode import Phantom
from probes.phantom.session import phantom_gpu

CARD = card_of(find_gpu("rtx-4090"))


@pytest.fixture
def phantom() -> Iterator[Phantom]:
    with phantom_gpu(CARD) as virtual_gpu:
        yield virtual_gpu
