"""Shows every file that `check_corpus.py --fix --fixed FOLDER` wrote to the parser of the tool that runs it.

    python tools/validators/validate_fixed.py TOOL FOLDER     (in the tool's venv; "trl" and "python": the project's)

TOOL: trl, axolotl, llamafactory (YAML by the tool's own parser), python (programs: the text by Python's, and every
keyword of the arguments by the signature of their class). Prints how many of how many were accepted, and each refusal.
A file whose original the parser refuses in the same words is counted apart: it was written for another version, or for
a wrapper with settings of its own. Exit 1 where one is refused for what was written.
"""

import ast
import inspect
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import stand_ins
import yaml

Check = Callable[[str], None]
WRITTEN = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "packing", "optim", "dtype", "bf16",
    "fp16", "attn_implementation", "activation_checkpointing", "activation_checkpointing_kwargs", "use_liger_kernel",
    "liger_kernel_config", "torch_compile", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type",
    "use_bnb_nested_quant",
)  # fmt: skip
"""What `--fix` writes into TRL's files: none of it may be left out."""
ARGUMENTS = ("SFTConfig", "TrainingArguments", "Seq2SeqTrainingArguments")


def trl() -> Check:
    stand_ins.half_precision()
    from trl import DPOConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser
    from trl.scripts.utils import DatasetMixtureConfig

    def check(text: str) -> None:
        values = yaml.safe_load(text)
        kind = DPOConfig if "beta" in values else SFTConfig
        classes = (ScriptArguments, kind, ModelConfig, DatasetMixtureConfig)
        names = {field.name for owner in classes for field in fields(owner)}
        values = {key: value for key, value in values.items() if key in names or key in WRITTEN}  # wrappers add some
        parser = TrlParser(classes)
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(yaml.safe_dump(values))
            file.flush()
            parser.parse_args_and_config(["--config", file.name], fail_with_unknown_args=True)

    return check


def axolotl() -> Check:
    from axolotl.utils.config import prepare_plugins, validate_config
    from axolotl.utils.dict import DictDefault

    def check(text: str) -> None:
        values = yaml.safe_load(text)
        config = DictDefault(values)
        prepare_plugins(config)
        validate_config(config, **stand_ins.AXOLOTL)

    return check


def llamafactory() -> Check:
    get_train_args = stand_ins.llamafactory()

    def check(text: str) -> None:
        values = yaml.safe_load(text)
        for key in ("deepspeed", "plot_loss"):
            values.pop(key, None)  # a file beside it, and a package for pictures
        os.environ.pop("FORCE_TORCHRUN", None)
        get_train_args(values)

    return check


def python() -> Check:
    """Programs: the text parses, and what was written into the arguments' call is a keyword of that class."""
    import transformers
    import trl

    by_class: dict[str, set[str]] = {}

    def keywords(name: str) -> set[str]:
        if name not in by_class:
            config_class = getattr(trl, name, None) or getattr(transformers, name, None)
            by_class[name] = set(inspect.signature(config_class).parameters) if config_class is not None else set()
        return by_class[name]

    def check(text: str) -> None:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                fields = keywords(name) if name in ARGUMENTS else set()
                strangers = {keyword.arg for keyword in node.keywords if keyword.arg} - fields if fields else set()
                if strangers:
                    raise TypeError(f"{name} takes no {sorted(strangers)}")

    return check


def text_of(path: Path) -> str:
    """A file's text; of a program its Python, without lines for the shell."""
    text = path.read_text("utf-8")
    if path.suffix not in (".py", ".ipynb"):
        return text
    from planner.frameworks.readers.program.source import of_notebook, of_script

    return (of_script(text) if path.suffix == ".py" else of_notebook(text, path.name)).text


def refusal(check: Check, text: str) -> str:
    """Why the parser refuses a text, "" where it does not."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check(text)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


def main() -> None:
    tool, folder = sys.argv[1], Path(sys.argv[2])
    check = {"trl": trl, "axolotl": axolotl, "llamafactory": llamafactory, "python": python}[tool]()
    lines = [json.loads(line) for line in (folder / "fixed.jsonl").read_text().splitlines()]
    mine = [line for line in lines if line["validator"] == tool]
    wrong = before = 0
    for line in mine:
        after = refusal(check, text_of(folder / line["fixed"]))
        if after and (old := refusal(check, text_of(folder / line["original"]))):
            same = old == after
            before, wrong = before + same, wrong + (not same)
            print(f"{'refused as before' if same else f'REFUSED otherwise than {old}'}: {line['file']}: {after}")
        elif after:
            wrong += 1
            print(f"REFUSED: {line['file']}: {after}")
    accepted = len(mine) - wrong - before
    print(f"{tool}: {len(mine)} rewritten, {accepted} accepted, {before} refused as their originals are, {wrong} wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
