"""`plan check`'s reading of published training files: how each was answered, and what was open.

    python benchmarks/check_corpus.py DIRECTORY [--gpu a100-80gb] [--model STAND_IN] [--out FILE]

DIRECTORY holds the files of benchmarks/data/check_corpus.txt (repository:path@commit, one a line) as OWNER+NAME/PATH.
Only reading and the formula are run: no network, no dry run. Outcomes: read (an answer), asked (exit 3, naming what is
open), other objective (refused by name), refused (nothing in it that trains, or broken), traceback.
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from planner.cli.checking import load
from planner.errors import PlannerError, Undetermined, UnknownModelError
from planner.predict import predict
from planner.readers.read import MAKEFILES, SUFFIXES


def one(path: Path, gpu: str, model: str | None) -> dict[str, Any]:
    """How one file is answered."""
    start = time.perf_counter()
    line: dict[str, Any] = {}
    try:
        config, spec, card = load(path, gpu, model=model)
        predict(spec, card, config.setup, None)
        setup = config.setup
        line = {
            "outcome": "read",
            "format": config.format,
            "model": config.model_id,
            "said": f"{setup.method} r{setup.lora_rank} {setup.precision} {setup.quantization} "
            f"{setup.micro_batch_seqs}x{setup.accumulation_steps}x{setup.seq_len_tokens} ck{setup.checkpointing} "
            f"{setup.loss} {setup.optimizer} {setup.attention} pack{int(setup.packing)}",
            "assumed": list(config.assumptions),
        }
    except UnknownModelError as error:
        line = {"outcome": "model not at hand", "said": error.message}
    except Undetermined as error:
        line = {"outcome": "asked", "said": error.message}
    except PlannerError as error:
        other = "not planned" in error.message or "not a training" in error.message
        line = {"outcome": "other objective" if other else "refused", "said": error.message}
    except Exception as error:
        line = {"outcome": "traceback", "said": f"{type(error).__name__}: {error}"}
    return {**line, "seconds": round(time.perf_counter() - start, 3)}


def place(line: str) -> Path:
    """Where the file of one line of a list lies below the directory: OWNER+NAME/PATH."""
    repository, _, rest = line.partition(":")
    return Path(repository.replace("/", "+"), rest.rpartition("@")[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gpu", default="a100-80gb")
    parser.add_argument("--model", help="stand-in for models that are not at hand")
    parser.add_argument("--list", type=Path, help="repository:path@commit, one a line: those files alone")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.list:
        every = [args.directory / place(line) for line in args.list.read_text().splitlines()]
    else:
        every = [path for path in args.directory.rglob("*") if path.suffix in SUFFIXES or path.name in MAKEFILES]
    files = sorted(path for path in every if path.is_file() and args.only in str(path))
    counts: Counter[str] = Counter()
    lines = []
    for path in files:
        found = one(path, args.gpu, None)
        if found["outcome"] == "model not at hand" and args.model:
            found = {**one(path, args.gpu, args.model), "stand_in": args.model}
        counts[found["outcome"]] += 1
        lines.append({"file": str(path.relative_to(args.directory)), **found})
        print(json.dumps(lines[-1]), flush=True)
    if args.out:
        args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    times = sorted(line["seconds"] for line in lines)
    print(f"{len(files)} files: {dict(counts.most_common())}; median {times[len(times) // 2]} s, worst {times[-1]} s")


if __name__ == "__main__":
    main()
