"""The fast part of the corpus of hostile inputs (tools/fuzz.py has 7,500; `make fuzz` runs them all)."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FIRST = 80
"""Inputs of the default tests: some eight CPU seconds."""


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "fuzz.py"
    spec = importlib.util.spec_from_file_location("fuzz", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_first_hostile_inputs_end_in_an_answer_or_a_clear_error(
    fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    outcomes = [fuzz.run_one(number) for number in range(FIRST)]
    found = [f"--seed {one.number}: {one.fault}\n{one.text[-600:]}" for one in outcomes if one.fault]
    assert not found, "\n".join(found)
    assert len({one.kind for one in outcomes}) >= 10
    assert {one.status for one in outcomes} <= {0, 1, 2, 3}
    assert sum(one.status == 0 for one in outcomes) >= FIRST // 8  # the inputs are near enough to ordinary ones


def test_an_input_is_the_same_every_time(fuzz: ModuleType, tmp_path: Path) -> None:
    one, two = (fuzz.case_of(17, tmp_path / name) for name in ("a", "b"))
    assert one.kind == two.kind
    assert [word.replace("/a/", "/b/") for word in one.words] == two.words


def test_a_traceback_a_hang_and_a_gigabyte_are_found(fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> object:
        raise ZeroDivisionError

    def endless() -> object:
        while True:
            pass

    def greedy() -> object:
        return len(bytearray(fuzz.MAX_BYTES + (64 << 20)))

    for call, fault in ((broken, "traceback"), (endless, "hang"), (greedy, "memory")):
        monkeypatch.setattr(fuzz, "LIMIT_S", 2 if call is endless else 60)  # a gigabyte takes a busy machine its time
        monkeypatch.setattr(fuzz, "case_of", lambda number, folder, call=call: fuzz.Case("x", [], call=call))
        assert fuzz.run_one(1).fault == fault
