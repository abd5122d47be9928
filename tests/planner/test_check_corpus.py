"""The list of published files and the readings that a person compared with them: what a script can then measure."""

import json
import re
from pathlib import Path

from planner.setup import TrainSetup

DATA = Path(__file__).parents[2] / "benchmarks" / "data"


def test_every_reading_that_a_person_checked_is_a_setup_of_a_listed_file() -> None:
    listed = DATA.joinpath("check_corpus.txt").read_text().splitlines()
    assert len(listed) == len(set(listed)) >= 1000
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+:.+@[0-9a-f]{40}", line) for line in listed)
    readings = [json.loads(line) for line in DATA.joinpath("check_expected.jsonl").read_text().splitlines()]
    assert len({fact["file"] for fact in readings}) == len(readings) >= 60
    for fact in readings:
        assert fact["file"] in listed
        TrainSetup(**{key: value for key, value in fact.items() if key not in ("file", "model")})
