"""`plan check`'s reading of published training files: how each was answered, and what was open.

    python -m benchmarks.check_corpus DIRECTORY [--gpu GPU] [--model STAND_IN] [--out FILE] [--fix [--fixed FOLDER]]

--fix also makes, in memory alone, what `plan check --fix` would write, and counts how it ends; --fixed keeps the files
and their originals for `tools/validators/validate_fixed.py`. Readings that a person compared with their files stand in
benchmarks/data/check_expected.jsonl: any that differs is told.

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

from benchmarks.shared import DATA, rows_of, write_rows
from finetune_planner.cli.check import fixed_text
from finetune_planner.cli.checking import CheckRequest, load, predictor
from finetune_planner.improvement import improve
from planner.core.errors import PlannerError, Undetermined, UnknownModelError
from planner.frameworks.readers.read import MAKEFILES, SUFFIXES
from planner.planning.check import Verdict, check
from planner.planning.predict import predict

HEADROOM_FRACTION = 0.04


VALIDATORS = ("trl", "axolotl", "llamafactory")


def fixed(path: Path, config: Any, spec: Any, card: Any, keep: Path | None) -> str:
    """How `--fix` ends on the formula level: "fits already", "fixed", "no change helps", "not writable" or a fault."""
    predict = predictor(spec, card)
    budget = round(card.memory_bytes * (1 - HEADROOM_FRACTION))
    result = check(config, spec, card, budget, predict)
    if result.verdict is Verdict.FITS:
        return "fits already"
    improvement = improve(result, spec, predict)
    labels = improvement.labels
    if improvement.verdict is not Verdict.FITS:
        return "no change helps"
    if improvement.setup.global_batch_seqs != config.setup.global_batch_seqs:
        return "another effective batch"
    try:
        text = fixed_text(path, config, improvement, spec, card=card)
    except PlannerError as error:
        return f"not writable ({error.message})"
    if keep is not None:
        program = path.suffix in (".py", ".ipynb")
        tool = "python" if program else config.format if config.format in VALIDATORS else ""
        number = len(list(keep.glob("*-after*")))
        before, after = f"{number}-before{path.suffix}", f"{number}-after{path.suffix}"
        (keep / before).write_bytes(path.read_bytes())
        (keep / after).write_text(text, "utf-8")
        line = {"file": str(path), "validator": tool, "original": before, "fixed": after, "changes": labels}
        with (keep / "fixed.jsonl").open("a") as lines:
            lines.write(json.dumps(line) + "\n")
    return f"fixed ({', '.join(labels)})"


def differences(name: str, config: Any, expected: dict[str, dict[str, Any]]) -> list[str]:
    """Where a reading is not what a person read in the file."""
    reading = expected.get(name, {})
    return [
        f"{key}: {getattr(config.setup, key)} instead of {value}"
        for key, value in reading.items()
        if key not in ("file", "model") and getattr(config.setup, key) != value
    ]


def one(
    path: Path, name: str, model: str | None, expected: dict[str, dict[str, Any]], args: argparse.Namespace
) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        config, spec, card = load(path, args.gpu, CheckRequest(model=model))
        level = predict(spec, card, config.setup, None).level
        setup = config.setup
        line: dict[str, Any] = {
            "outcome": "read",
            "format": config.format,
            "level": level.value,
            "model": config.model_id,
            "said": f"{setup.method} r{setup.lora_rank} {setup.precision} {setup.quantization} "
            f"{setup.micro_batch_seqs}x{setup.accumulation_steps}x{setup.seq_len_tokens} ck{setup.checkpointing} "
            f"{setup.loss} {setup.optimizer} {setup.attention} pack{int(setup.packing)}",
            "assumed": list(config.assumptions),
        }
        line |= {"differs": wrong} if (wrong := differences(name, config, expected)) else {}
        line |= {"fix": fixed(path, config, spec, card, args.fixed)} if args.fix else {}
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
    parser.add_argument("--fix", action="store_true")
    parser.add_argument("--fixed", type=Path, help="an empty folder for the rewritten files and their originals")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.fixed is not None:
        args.fixed.mkdir(parents=True)
    if args.list:
        every = [args.directory / place(line) for line in args.list.read_text().splitlines()]
    else:
        every = [path for path in args.directory.rglob("*") if path.suffix in SUFFIXES or path.name in MAKEFILES]
    files = sorted(path for path in every if path.is_file() and args.only in str(path))
    expected = {str(place(reading["file"])): reading for reading in rows_of(DATA / "check_expected.jsonl")}
    lines = []
    for path in files:
        name = str(path.relative_to(args.directory))
        row = one(path, name, None, expected, args)
        if row["outcome"] == "model not at hand" and args.model:
            row = one(path, name, args.model, expected, args) | {"stand_in": args.model}
        lines.append({"file": name, **row})
        print(json.dumps(lines[-1]), flush=True)
    if args.out:
        write_rows(args.out, lines)
    compared = [line for line in lines if line["file"] in expected and line["outcome"] == "read"]
    wrong = [line["file"] for line in compared if "differs" in line]
    print(f"{len(compared)} readings compared with a person's: {len(wrong)} differ {wrong}")
    if args.fix:
        print(
            f"--fix: {dict(Counter(line['fix'].partition(' (')[0] for line in lines if 'fix' in line).most_common())}"
        )
    print(f"by {dict(Counter(line['level'] for line in lines if 'level' in line).most_common())}")
    counts = Counter(line["outcome"] for line in lines)
    times = sorted(line["seconds"] for line in lines)
    print(f"{len(files)} files: {dict(counts.most_common())}; median {times[len(times) // 2]} s, worst {times[-1]} s")


if __name__ == "__main__":
    main()
