"""Writes the settings that one tool's own parser knows into planner/data/launch_fields.json.

Run inside the tool's venv (see the .sh files beside this one): python tools/validators/snapshot.py TOOL
"""

import ast
import json
import sys
from importlib.metadata import version
from pathlib import Path

TARGET = Path(__file__).parents[2] / "planner" / "data" / "launch_fields.json"


def trl() -> tuple[str, list[str]]:
    from trl import (
        DatasetMixtureConfig,
        DPOConfig,
        GRPOConfig,
        KTOConfig,
        ModelConfig,
        RewardConfig,
        RLOOConfig,
        ScriptArguments,
        SFTConfig,
        TrlParser,
    )
    from trl.experimental.orpo import ORPOConfig

    names = set()
    for config in (SFTConfig, DPOConfig, KTOConfig, ORPOConfig, RewardConfig, GRPOConfig, RLOOConfig):
        parser = TrlParser((ScriptArguments, config, ModelConfig, DatasetMixtureConfig))
        names |= {action.dest for action in parser._actions if action.dest != "help"}
    return version("trl"), sorted(names)


def transformers() -> tuple[str, list[str]]:
    from dataclasses import fields

    from transformers import TrainingArguments

    return version("transformers"), [field.name for field in fields(TrainingArguments)]


def peft() -> tuple[str, list[str]]:
    from dataclasses import fields

    from peft import LoraConfig

    return version("peft"), [field.name for field in fields(LoraConfig)]


def axolotl() -> tuple[str, list[str]]:
    from axolotl.utils.config import merge_input_args

    fields = merge_input_args()[1].model_fields
    names = set(fields) | {str(field.alias) for field in fields.values() if field.alias}
    # plugins add settings; their classes are read as text because importing them needs trl
    import axolotl as package

    for path in Path(package.__path__[0]).glob("integrations/*/args.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return version("axolotl"), sorted(names)


def llamafactory() -> tuple[str, list[str]]:
    from dataclasses import fields

    from llamafactory.hparams import DataArguments, FinetuningArguments, GeneratingArguments, ModelArguments
    from llamafactory.hparams.training_args import TrainingArguments

    classes = (ModelArguments, DataArguments, TrainingArguments, FinetuningArguments, GeneratingArguments)
    return version("llamafactory"), sorted({field.name for owner in classes for field in fields(owner)})


def accelerate() -> tuple[str, list[str]]:
    from dataclasses import fields

    from accelerate.commands.config.config_args import ClusterConfig

    return version("accelerate"), [field.name for field in fields(ClusterConfig)]


def deepspeed() -> tuple[str, list[str]]:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields
    return version("deepspeed"), sorted({*fields, *(str(field.alias) for field in fields.values() if field.alias)})


def torchtitan() -> tuple[str, list[str]]:
    """Settings as "table.key"."""
    from dataclasses import fields

    import stand_ins

    stand_ins.torchtitan()
    from torchtitan.config import JobConfig

    tables = {table.name: table.default_factory() for table in fields(JobConfig)}
    return version("torchtitan"), [f"{name}.{field.name}" for name, table in tables.items() for field in fields(table)]


def unsloth() -> tuple[str, list[str]]:
    """Parameters of the calls in an Unsloth script, read as text from an unpacked wheel: importing needs a GPU."""
    folder = Path(sys.argv[2])
    names = set()
    for file in ("unsloth/models/loader.py", "unsloth/models/llama.py"):
        for node in ast.walk(ast.parse((folder / file).read_text())):
            if isinstance(node, ast.FunctionDef) and node.name in ("from_pretrained", "get_peft_model"):
                names |= {f"{node.name}.{argument.arg}" for argument in node.args.args + node.args.kwonlyargs}
    return next(folder.glob("unsloth-*.dist-info")).name.split("-")[1].removesuffix(".dist"), sorted(names)


if __name__ == "__main__":
    tool = sys.argv[1]
    tool_version, names = globals()[tool]()
    data = json.loads(TARGET.read_text()) if TARGET.exists() else {}
    data[tool] = {**data.get(tool, {}), "version": tool_version, "fields": sorted(names)}
    TARGET.write_text(json.dumps(dict(sorted(data.items())), indent=1) + "\n")
    print(tool, tool_version, len(names), "settings")
