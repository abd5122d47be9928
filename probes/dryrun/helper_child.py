"""The child of `helper.py`: loads a dry run's libraries, then makes reports until nobody asks any more.

python -P -m probes.dryrun.helper_child [one-gpu]    # requests and answers: pickles on its standard input and output

With "one-gpu" the libraries are loaded as runs on one GPU need them (`standins.py`).
"""

import importlib
import logging
import os
import pickle
import sys
import warnings
from pkgutil import resolve_name
from typing import Any

from probes.dryrun import standins
from probes.dryrun.startup import collection_paused, load_libraries


def main() -> None:
    """Answers until nobody asks any more."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    if "one-gpu" in sys.argv:
        standins.stand_in()

    def send(answer: Any) -> None:
        pickle.dump(answer, answers)
        answers.flush()

    with collection_paused():
        load_libraries()
        importlib.import_module("peft")
    while True:
        try:
            make, args, options = pickle.load(requests)
        except EOFError:
            return
        if "say" in options:
            options["say"] = send
        try:
            send(resolve_name(make)(*args, **options))
        except ValueError as error:  # what the asker is to know
            send(error)


if __name__ == "__main__":
    main()
