"""The child of `ahead.py`: loads a dry run's libraries, then makes reports until nobody asks any more.

python -P -m probes.dryrun.beside    # requests and answers are pickles, on its standard input and output
"""

import logging
import os
import pickle
import sys
import warnings
from typing import IO

from probes.dryrun.api import report_for_config
from probes.dryrun.startup import collection_paused


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    with collection_paused():
        from probes.dryrun.engine import load_for_one_gpu

        load_for_one_gpu()
        while True:
            try:
                args, options = pickle.load(requests)
            except EOFError:
                return
            pickle.dump(report_for_config(*args, **options), answers)
            answers.flush()


def main() -> None:
    """Answers until nobody asks any more."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    _serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
