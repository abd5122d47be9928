"""What every test may rely on, whatever the machine and the shell that started it.

Nothing of the caller's terminal, configuration, caches or network reaches a test, and generated examples are the same
in every run: a failure can be repeated, and there is none by chance. `HYPOTHESIS_PROFILE=explore` looks for new ones.
"""

import gc
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import yaml
from _pytest.runner import runtestprotocol

if "PYTEST_XDIST_WORKER" in os.environ:  # a fork of tests/warm (`pytest_configure`): as if it had been started
    sys.executable = sys.orig_argv[0]
    sys.warnoptions.clear()
    warnings.resetwarnings()
    gc.unfreeze()  # Hypothesis looks for who refers to what was set aside
gc.set_threshold(200_000)  # collecting the tests makes a million objects that stay, and looked through them 5,000 times

for _name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "PYTHONWARNINGS"):
    os.environ.pop(_name, None)
os.environ["TERM"] = "xterm-256color"

HOME_VARIABLE = "FINETUNE_PLANNER_TESTS_HOME"
"""The home of the whole run: made by the process that was started, found by its workers and every child."""
MADE_HERE = HOME_VARIABLE not in os.environ
LEFT_BY_USERS = ("XDG_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TORCH", "TRITON_", "FINETUNE_PLANNER_", "MPLCONFIG")


def _move_into_own_home() -> None:
    """Homes, caches and temporary files of this process and its children lie in a directory of this run's own.

    Every worker of the run shares it: a dry run that one test made may answer another. What the user measured,
    cached, calibrated or logged in to is nowhere in sight. Before anything is imported: libraries read these once.
    """
    if MADE_HERE:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # tmp_path stays, to be looked at
        os.environ[HOME_VARIABLE] = tempfile.mkdtemp(prefix="planner-tests-")
    for name in tuple(os.environ):
        if name.startswith(LEFT_BY_USERS) and name != HOME_VARIABLE:
            del os.environ[name]
    home = Path(os.environ[HOME_VARIABLE])
    places = {"HOME": "", "XDG_CACHE_HOME": ".cache", "XDG_CONFIG_HOME": ".config", "TMPDIR": "tmp"}
    for name, below in places.items():
        (home / below).mkdir(exist_ok=True)
        os.environ[name] = str(home / below)
    tempfile.tempdir = None
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # no test compiles; bitsandbytes would load the compiler in every process
    # Children find this project's bytecode, which the caller may have forbidden to write.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


_move_into_own_home()

if hasattr(yaml, "CSafeLoader"):  # thousands of emitted files are read back: the same loader, ten times as fast in C
    yaml.safe_load = partial(yaml.load, Loader=yaml.CSafeLoader)

from hypothesis import HealthCheck, settings  # noqa: E402

from planner.core.children import python_argv  # noqa: E402
from planner.core.locks import lock  # noqa: E402
from planner.models import module_tree  # noqa: E402
from tests.warm import programs  # noqa: E402

module_tree.LIMIT_S = 1200.0  # a loaded machine takes its time to import torch: only what hangs reaches this

# How long an example takes, or how many are made per second, says something about the machine only.
_ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
settings.register_profile("repeatable", _ANY_SPEED, derandomize=True)
settings.register_profile("explore", _ANY_SPEED, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

_numbers = count()
_num_frozen = [0]
"""Modules that were loaded when their objects were last set aside."""
MANY_OBJECTS = 50_000
"""Made since objects were last set aside, and still there."""
WARM = Path(os.environ[HOME_VARIABLE]) / "warm"
"""Programs that start with the libraries of training and searching loaded (tests/warm), of one server."""
_until_the_end = ExitStack()


@pytest.fixture(scope="session")
def warm_programs() -> Path:
    """A directory of programs that start with everything imported."""
    return WARM


@pytest.fixture
def warm_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python processes that the planner starts itself are warm; tests/probes/test_children.py starts them cold."""
    from probes.gpu import runner
    from probes.gpu.executors import LocalExecutor

    monkeypatch.setattr(sys, "executable", str(WARM / "python"))
    monkeypatch.setattr(runner, "AGENT_ARGV", python_argv("-m", "probes.gpu.agent"))
    for starts in (runner.run_probe, LocalExecutor.__init__):
        monkeypatch.setitem(starts.__kwdefaults__, "argv", python_argv("-m", "probes.gpu.worker"))


@pytest.fixture(autouse=True)
def _own_data_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No measurement or correction that the user or another test made is in a test's answer."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    monkeypatch.setenv("XDG_DATA_HOME", f"{os.environ[HOME_VARIABLE]}/data/{worker}-{next(_numbers)}")


def _freeze_what_is_loaded() -> None:
    """Loaded libraries are not looked through for garbage again and again (a sixth of the time), as `plan` does it:
    models and trainers load most of them while the first tests run, and every probe and dry run collects."""
    if len(sys.modules) > _num_frozen[0] + 100:
        _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()
    _num_frozen[0] = len(sys.modules)


@pytest.fixture(autouse=True, scope="module")
def _files_before_set_aside() -> None:
    """Nor is what the files before left for good."""
    if gc.get_count()[0] > MANY_OBJECTS or gc.get_count()[1]:
        _freeze()


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    """Variables and the working directory are what they were, whatever a test and the libraries that it calls changed
    (a Trainer leaves ACCELERATE_MIXED_PRECISION): no test's answer depends on which ran before it."""
    variables, folder = dict(os.environ), Path.cwd()
    _freeze_what_is_loaded()
    yield
    os.chdir(folder)
    variables["PYTEST_CURRENT_TEST"] = os.environ["PYTEST_CURRENT_TEST"]
    now = dict(os.environ)
    for name in now.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables.items() - now.items())


def pytest_configure(config: pytest.Config) -> None:
    """Nothing is started here: a server starts when the first test asks. Of a run of everything the workers are the
    first to ask: they need what it imports, once for all of them."""
    if not MADE_HERE:
        return
    _until_the_end.enter_context(programs(WARM))
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        config.option.tx = [f"{spec}//python={WARM / 'python'}" for spec in config.option.tx]


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A worker tells of a test once, by what it came to; xdist sends five messages, and looks through all tests done
    for each. What may be tried again is told as pytest-rerunfailures does it."""
    if not hasattr(item.config, "workerinput") or item.get_closest_marker("flaky"):
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """The workers of a run collect one after the other: each finds the bytecode that the first one wrote, of a fresh
    checkout's tests and of the libraries, which pip left as they are (test.sh)."""
    with open(Path(os.environ[HOME_VARIABLE]) / "collecting", "ab") as mine:
        lock(mine.fileno())
        return (yield)


def pytest_collection_finish() -> None:
    """Few collections by themselves, none of what collecting the tests has loaded."""
    _freeze_what_is_loaded()


def pytest_unconfigure() -> None:
    """The run's home goes with the process that made it."""
    if MADE_HERE:
        _until_the_end.close()
        shutil.rmtree(os.environ[HOME_VARIABLE], ignore_errors=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which tests needed a second try."""
    lost = {failure.nodeid for name in ("failed", "error") for failure in terminalreporter.stats.get(name, [])}
    for report in terminalreporter.stats.get("rerun", []):
        what = "failed twice; the first time" if report.nodeid in lost else "passed only the second time"
        terminalreporter.write_line(f"{what}: {report.nodeid}\n{report.longreprtext}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that train first, then those with other slow tests: whole files are handed to the workers in this order
    (test.sh), and a long one that comes last would keep one worker busy and the others waiting. What starts processes
    that race gets a second try: what fails twice is a fault."""
    for item in items:
        if item.get_closest_marker("processes"):
            item.add_marker(pytest.mark.flaky(reruns=1))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path.parent.name != "launch", item.path not in slow))
