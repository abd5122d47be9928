"""No test, and no child of a test, reads or writes what belongs to the user who runs it."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conftest import HOME_VARIABLE

RACING = ("Popen(", "os.kill(", "os.fork(", "own_port(", "launch_cold")
PLACES = """
import json, os, tempfile
from pathlib import Path
from huggingface_hub.constants import HF_HUB_CACHE, HF_TOKEN_PATH
from finetune_planner.app.machine import default_store_path
from planner.speed.roofline.calibration import VARIABLE
from probes.dryrun.cache import default_directory
assert VARIABLE not in os.environ
print(json.dumps([str(place) for place in (
    Path.home(), HF_HUB_CACHE, HF_TOKEN_PATH, default_store_path(), default_directory(), tempfile.mkdtemp()
)]))
"""


def test_caches_stores_and_temporary_files_of_a_child_are_this_runs_own() -> None:
    done = subprocess.run([sys.executable, "-c", PLACES], capture_output=True, text=True, check=True)
    for place in json.loads(done.stdout):
        assert Path(place).is_relative_to(os.environ[HOME_VARIABLE])


def test_temporary_files_of_this_process_are_this_runs_own() -> None:
    assert Path(tempfile.mkdtemp()).is_relative_to(os.environ[HOME_VARIABLE])


_stores: set[Path] = set()


def test_a_test_leaves_measurements() -> None:
    _another_store()


def test_another_test_does_not_see_them() -> None:
    _another_store()


def _another_store() -> None:
    """Writes into this test's default store, which nobody wrote to before."""
    from finetune_planner.app.machine import default_store_path

    path = default_store_path()
    assert path not in _stores
    assert not path.exists()
    path.parent.mkdir(parents=True)
    path.touch()
    _stores.add(path)


def test_a_test_changes_the_process() -> None:
    os.environ["LEFT_BY_A_TEST"] = "1"
    os.environ["XDG_CACHE_HOME"] = "/"
    os.chdir("/")


def test_another_test_does_not_see_the_change() -> None:
    assert "LEFT_BY_A_TEST" not in os.environ
    assert os.environ["XDG_CACHE_HOME"] != "/"
    assert Path.cwd() != Path("/")


def test_what_starts_processes_that_race_is_marked() -> None:
    """They get a second try (tests/conftest.py), which nothing else gets."""
    for path in Path(__file__).parent.rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if any(word in text for word in RACING) and path != Path(__file__):
            assert "pytest.mark.processes" in text, path
