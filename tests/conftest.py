"""What every test may rely on, whatever the machine and the shell that started it.

Nothing of the caller's terminal, configuration or network reaches a test, and generated examples are the same in every
run: a failure can be repeated, and there is none by chance. `HYPOTHESIS_PROFILE=explore` looks for new examples.
"""

import os

import pytest
from hypothesis import HealthCheck, settings

from probes.dryrun.standins import give_up

for _name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "PYTHONWARNINGS"):
    os.environ.pop(_name, None)
os.environ["TERM"] = "xterm-256color"
os.environ["HF_HUB_OFFLINE"] = "1"

give_up()  # whether a module is the real one must not depend on which files a worker was given before

# How long an example takes, or how many are made per second, says something about the machine only.
_ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
settings.register_profile("repeatable", _ANY_SPEED, derandomize=True)
settings.register_profile("explore", _ANY_SPEED, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(scope="session", autouse=True)
def _own_data_directory(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No measurement that the user made is in a test's answer; for the whole process and its children."""
    os.environ["XDG_DATA_HOME"] = str(tmp_path_factory.mktemp("data"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that train first, then those with other slow tests: whole files are handed to the workers in this order
    (test.sh), and a long one that comes last would keep one worker busy and the others waiting."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path.parent.name != "launch", item.path not in slow))
