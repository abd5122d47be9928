"""From a path to a `ReadConfig`: which format it is, and the reader for it."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.errors import ConfigError, NotATraining, NotPlanned, Undetermined
from planner.gpu import GpuSpec
from planner.models.spec import ModelSpec
from planner.readers import (
    axolotl,
    fields,
    firefly,
    hydra,
    launchers,
    litgpt,
    llamafactory,
    llamafactory_v1,
    nemo,
    own,
    script,
    shell,
    swift,
    torchtitan,
    torchtitan_python,
    torchtune,
    trl,
    unsloth,
    versions,
)
from planner.readers.loading import MAX_FILE_BYTES, Parsed, parse_json, parse_toml, parse_yaml, read_bounded
from planner.readers.program.source import of_cells, of_notebook, of_requirements
from planner.readers.sharding import Sharding
from planner.readers.types import Missing, ReadConfig
from planner.setup import TrainSetup
from planner.stacks import STACKS
from planner.tools import ASKED, TOOLS, tool_of

FORMATS = (
    "trl", "axolotl", "llamafactory", "unsloth", "accelerate", "deepspeed", "torchtitan", "ms-swift", "torchtune",
    "nemo-automodel", "litgpt", "firefly", "hf-script", "notebook", "shell script",
)  # fmt: skip
SUFFIXES = (".yaml", ".yml", ".json", ".toml", ".py", ".ipynb", *shell.SUFFIXES)
MAKEFILES = ("Makefile", "makefile", "justfile")
MAX_NOTEBOOK_BYTES = 8 << 20
MAX_PROGRAM_BYTES = 512 << 10
MAX_ANCESTORS = 6
"""Folders above a file in which what it names is looked for; none above the one that holds .git."""
READERS = {
    trl.FORMAT: trl.read,
    axolotl.FORMAT: axolotl.read,
    llamafactory.FORMAT: llamafactory.read,
    llamafactory_v1.FORMAT: llamafactory_v1.read,
    unsloth.FORMAT: unsloth.read,
    swift.FORMAT: swift.read,
    litgpt.FORMAT: litgpt.read,
    torchtune.FORMAT: torchtune.read,
    firefly.FORMAT: firefly.read,
    nemo.FORMAT: nemo.read,
    own.FORMAT: own.read,
}
OTHER_TOOLS = {
    "nanotron": {"data_stages", "parallelism", "tokens"},
    "verl": {"actor_rollout_ref"},
    "verl's SFT": {"data", "model", "optim", "trainer"},
    "Megatron": {"tensor_model_parallel_size"},
    "mlx-lm": {"lora_parameters", "model"},
    "MMEngine": {"train_dataloader", "optim_wrapper"},
}
"""Engines that are not planned -> settings that only their files have together."""
OTHER_ENGINES = ("verl", "openrlhf", "megatron", "nanotron", "mlx_lm", "mlx", "xtuner", "colossalai", "skyrl_train")
FLAGS_OF = {"trl": trl.FORMAT, "litgpt": litgpt.FORMAT, "llamafactory-cli": llamafactory.FORMAT}
"""Tools that take every setting as a flag -> the format that the flags are of."""
NOT_TRAINING = re.compile(
    r"^(?:run_?)?(?:eval|infer|generat|merge|convert|prepare|preprocess|download|test|plot|serve|setup)"
)
MAX_STRANGERS = 0.25
"""Part of a TRL config's settings that TRL does not know: recipes built on it add to 24 %, other programs have more."""
MAX_SCRIPTS = 4
"""Scripts that start scripts."""
AXOLOTL_KEYS = {
    "micro_batch_size", "sequence_len", "adapter", "datasets", "sample_packing", "lora_target_linear", "num_epochs",
    "pretraining_dataset", "deepspeed", "fsdp", "val_set_size", "special_tokens", "rl",
}  # fmt: skip
LLAMAFACTORY_KEYS = {"finetuning_type", "stage", "cutoff_len", "lora_rank", "lora_target", "template", "dataset_dir"}
LLAMAFACTORY_TASKS = {"do_train", "do_predict", "finetuning_type", "stage", "template", "export_dir"}
"""Without any of these LLaMA-Factory does nothing: the file is another program's."""


def detect(values: dict[str, Any]) -> str:
    """The format of a mapping, by keys that only one tool has; "" when none is there."""
    keys = set(values)
    if nemo.is_recipe(values):
        return nemo.FORMAT
    if isinstance(values.get("model"), dict) and "_component_" in values["model"]:
        return torchtune.FORMAT
    if "checkpoint_dir" in keys and keys & {"lora_r", "train", "precision", "quantize"}:
        return litgpt.FORMAT
    if {"train_file", "model_name_or_path", "max_seq_length"} <= keys and keys & {"train_mode", "template_name"}:
        return firefly.FORMAT
    if keys & swift.MODELS and keys & swift.MARKS:
        return swift.FORMAT
    flat = not any(isinstance(value, dict) for value in values.values())
    if {"base_model", "model"} & keys == {"base_model"} and (keys & AXOLOTL_KEYS or flat):
        return axolotl.FORMAT
    if {"micro_batch_size", "sequence_len"} <= keys and "model" not in keys:
        return axolotl.FORMAT
    if keys & {"zero_optimization", "train_micro_batch_size_per_gpu"}:
        return "deepspeed"
    if (
        keys & {"compute_environment", "distributed_type", "fsdp_config", "deepspeed_config"}
        and "num_processes" in keys
    ):
        return "accelerate"
    if keys & {"compute_environment", "distributed_type"}:
        return "accelerate"
    if unsloth.is_config(values):
        return unsloth.FORMAT
    if "model" in keys and keys & {"train_dataset", "dist_config", "peft_config", "micro_batch_size"}:
        return llamafactory_v1.FORMAT
    others = keys - trl.known_keys()
    if keys & LLAMAFACTORY_KEYS and keys & LLAMAFACTORY_TASKS and ("model_name_or_path" in keys or not own.is_training(values)):
        return llamafactory.FORMAT
    if others & own.SPOKEN and own.is_training(values):
        return own.FORMAT  # another program's names, no slips of the pen
    strangers = len(others)
    if keys & {"model_name_or_path", "per_device_train_batch_size"} and max(2, MAX_STRANGERS * len(keys)) >= strangers:
        return trl.FORMAT
    if own.is_training(values):
        return own.FORMAT
    return trl.FORMAT if keys & {"model_name_or_path", "use_peft", "dataset_name"} and not strangers else ""


def read_text(
    text: str,
    name: str,
    *,
    model: ModelSpec | None = None,
    base: TrainSetup | None = None,
    sharding: Sharding | None = None,
    launcher: str | None = None,
) -> ReadConfig:
    """The setup of a config given as text; `name` says which kind of file it is by its ending.

    `base` stands for what Accelerate and DeepSpeed files do not say (None: it is `missing`); `launcher` is the text of
    an Accelerate config that the run is launched with.

    Raises:
        ConfigError: not a config of a known tool, or a wrong one.
    """
    found = _read(text, name, model=model, base=base, sharding=sharding or Sharding(), launcher=launcher)
    stack = STACK_OF.get(found.format, found.setup.stack)
    default = STACKS[stack].reentrant_checkpointing and found.setup.checkpointing > 0
    reentrant = _reentrant(found.values, default=default)
    named = fields.keys(TOOLS[found.format], found.values) if found.format in TOOLS else {}
    setup = found.setup.with_(stack=stack, reentrant_checkpointing=reentrant)
    found = replace(found, setup=setup, keys={**named, **found.keys})
    if sharding is not None and not found.older and found.format in TRAINERS:
        found = replace(found, older=versions.transformers(sharding.versions.get("transformers"), (), None).older)
    if not _keeps_whole_gradients(found):
        return found
    return replace(found, approximations=(*found.approximations, WHOLE_GRADIENTS))


STACK_OF = {name: name for name in STACKS} | {
    llamafactory_v1.FORMAT: llamafactory.FORMAT,
    script.UNSLOTH: unsloth.FORMAT,
}
"""Format of a file -> the stack that runs it; a program says itself which trainer it makes."""


def _reentrant(values: Mapping[str, Any], *, default: bool) -> bool:
    """The form of checkpointing that a file asks for, under the names that its tools have for it."""
    for key in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        if isinstance(values.get(key), Mapping) and "use_reentrant" in values[key]:
            return values[key]["use_reentrant"] is True
    return values["use_reentrant_gc"] is True if "use_reentrant_gc" in values else default


WHOLE_GRADIENTS = (
    "with accumulation FSDP2 keeps the whole model's gradients on every GPU between micro-batches unless "
    "accelerator_config.gradient_accumulation_kwargs.sync_each_batch is true: counted as if it were"
)


def _keeps_whole_gradients(found: ReadConfig) -> bool:
    """Whether the Trainer would not reduce gradients before the last micro-batch of an FSDP2 step.

    Source: transformers 5.23 `Trainer._inner_training_loop`; accelerate 1.15 `Accelerator.no_sync`.
    """
    setup = found.setup
    sharded = setup.parallel == "fsdp2" and setup.tensor_degree == 1 and setup.accumulation_steps > 1
    if not sharded or found.format not in TRAINERS:
        return False
    value: Any = found.values
    for key in ("accelerator_config", "gradient_accumulation_kwargs", "sync_each_batch"):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value is not True


TRAINERS = ("trl", "axolotl", "llamafactory", "hf-script")
"""Formats that run transformers' Trainer."""


def _read(
    text: str,
    name: str,
    *,
    model: ModelSpec | None,
    base: TrainSetup | None,
    sharding: Sharding,
    launcher: str | None = None,
) -> ReadConfig:
    """`read_text` without its last word."""
    if launcher is not None:
        values = parse_yaml(launcher, "accelerate config").values
        processes = launchers.num_processes(values, "accelerate config", sharding.num_gpus)
        inside = replace(sharding, num_gpus=processes)
        inner = _read(text, name, model=model, base=base, sharding=inside)
        spread = launchers.read_accelerate(values, "accelerate config", inner.setup, sharding=inside)
        setup = spread.setup
        if inner.format == trl.FORMAT and setup.parallel == "zero3" and setup.method == "lora":
            setup = setup.with_(adapter_dtype=setup.weight_dtype)  # TRL switches peft's cast off under ZeRO-3
        return replace(
            inner,
            setup=setup,
            assumptions=(*inner.assumptions, *spread.assumptions),
            approximations=(*inner.approximations, *spread.approximations),
        )
    if name.endswith(".py") and torchtitan_python.is_registry(text):
        return torchtitan_python.read(text, name, model, sharding=sharding)
    if name.endswith(".py"):
        return script.read(text, name, model, sharding=sharding)
    if name.endswith(".ipynb"):
        return _of_notebook(text, name, model=model, sharding=sharding)
    if name.endswith(shell.SUFFIXES) or name in MAKEFILES:
        return _of_commands(text, name, model=model, base=base, sharding=sharding)
    if name.endswith(".toml"):
        values = parse_toml(text, name)
        if torchtitan.is_config(values):
            return torchtitan.read(values, name, model, sharding=sharding)
        return _of_mapping(values, detect(values), name, model, sharding)
    parsed = Parsed(parse_json(text, name), (), {}) if name.endswith(".json") else parse_yaml(text, name)
    said: tuple[str, ...] = ()
    opened: dict[str, str] = {}
    if hydra.is_composed(parsed.values):
        composed, files = hydra.composed(parsed.values, sharding.exactly, "", sharding.arguments or ())
        parsed = parsed._replace(values=composed)
        said = tuple(f"{file} beside it was read as well" for file in files)
    kind = detect(parsed.values)
    if kind in ("", own.FORMAT):  # a wrapper's file may hold a tool's whole config as a block of its name
        blocks = {key: parsed.values.get(key) for key in READERS}
        block = next((key for key, one in blocks.items() if isinstance(one, dict) and detect(one) == key), "")
        if block:
            lines = {key.removeprefix(f"{block}."): line for key, line in parsed.lines.items()}
            kind, parsed = block, parsed._replace(values=parsed.values[block], lines=lines)
    if kind == trl.FORMAT and name.endswith(".json") and own.is_training(parsed.values):
        kind = own.FORMAT  # `trl` reads YAML: another program's, with defaults of its own
    if kind != own.FORMAT:
        known, opened = hydra.without_open(parsed.values)
        parsed = parsed._replace(values=known)
    if kind == "deepspeed":
        found = launchers.read_deepspeed(parsed.values, name, base, sharding.num_gpus)
    elif kind == "accelerate":
        found = launchers.read_accelerate(parsed.values, name, base, sharding=sharding)
    else:
        inner = _of_mapping(parsed.values, kind, name, model, sharding)
        found = _with_open(inner, opened, name, sharding.num_gpus) if opened else inner
    said += tuple(f"{key} is written twice: the last one counts" for key in parsed.duplicates)
    where: dict[str, str] = {}
    if kind in TOOLS:
        where = fields.origins(TOOLS[kind], parsed.values, parsed.lines, name, sharding.versions)
    elif kind == own.FORMAT:
        where = {of: f"{name}:{parsed.lines[key]}" for of, key in found.keys.items() if key in parsed.lines}
    return replace(found, assumptions=(*said, *found.assumptions), origins=where)


def _of_notebook(text: str, name: str, *, model: ModelSpec | None, sharding: Sharding) -> ReadConfig:
    """The setup of a notebook: of what its cells train, else of what they launch."""
    source = of_notebook(text, name)
    try:
        return script.read("", name, model, sharding=sharding, source=source)
    except NotATraining:
        commands, written = of_cells(text)
        named = {**written, **{path.rpartition("/")[2]: one for path, one in written.items()}}
        inside = replace(sharding, written=named, versions={**dict(source.pins), **sharding.versions})
        try:
            return _of_commands(commands, name, model=model, base=None, sharding=inside)
        except NotATraining:
            pass
        raise


def _with_open(found: ReadConfig, opened: Mapping[str, str], name: str, num_gpus: int) -> ReadConfig:
    """A reading with the settings as open that only the shell, or Hydra, would fill in."""
    names = {one: field.of for field in tool_of(found.format).fields if field.of in ASKED for one in field.names}
    missing = {names[key]: f"{name}: {key} is {text}" for key, text in opened.items() if key in names}
    if num_gpus == 1:
        missing.pop("parallel", None)
    others = tuple(one for one in found.missing if one.field not in missing)
    return replace(found, missing=(*(Missing(field=field, reason=why) for field, why in missing.items()), *others))


def _of_mapping(
    values: dict[str, Any], kind: str, name: str, model: ModelSpec | None, sharding: Sharding
) -> ReadConfig:
    """The setup of settings that stand as a mapping, in a file or on a command line."""
    other = next((tool for tool, marks in OTHER_TOOLS.items() if marks <= set(values)), "") if not kind else ""
    if other:
        raise NotPlanned(f"{name}: a config of {other}: not planned", hint="plan estimate answers for a setup you name")
    if kind not in READERS:
        raise NotATraining(
            f"{name} is no config of a known tool (its settings: {', '.join(list(values)[:6]) or 'none'})",
            hint=f"known: {', '.join(FORMATS)}",
        )
    if kind == own.FORMAT and trl.objective_of(values, name) != ("sft", True):
        raise NotPlanned(
            f"{name}: preferences or rewards in a program's own settings are not planned, its memory is not modelled",
            hint="plan trace runs other programs on a phantom GPU",
        )
    return READERS[kind](values, name, model, sharding=sharding)


def _of_commands(
    text: str, name: str, *, model: ModelSpec | None, base: TrainSetup | None, sharding: Sharding
) -> ReadConfig:
    """The setup of the first launch of a shell script whose program or config can be read.

    Raises:
        ConfigError: no launch, or what the first one says where none can be read.
    """
    problems: list[ConfigError] = []
    launches = shell.commands(text, name, sharding.num_gpus, sharding.arguments or ())
    given_up: set[str] = set()
    waiting = list(reversed(launches))
    while waiting:
        command = waiting.pop()
        if command.target in given_up:
            continue  # a loop over sizes or seeds of a program in which nothing is read
        try:
            found = _of_command(command, name, model=model, base=base, sharding=sharding)
        except ConfigError as error:
            problems.append(error)
            if command.tool in ("python", "script"):
                given_up.add(command.target)
            inner = shell.nested(command.arguments) if command.tool == "python" else None
            waiting += [inner] if inner is not None else []  # what a program that submits jobs is told to start
            continue
        said = (f"read from the launch in {name}",)
        if len(launches) > 1:
            said = (f"{name} launches {len(launches)} runs: the first that can be read is taken",)
        return replace(found, path=name, assumptions=(*said, *found.assumptions))
    raise min(problems, key=_weight)


def _weight(problem: ConfigError) -> int:
    """Which of several launches' problems to tell: that of a training comes before "not a training"."""
    ranks = {NotPlanned: 0, Undetermined: 1, NotATraining: 3}
    return ranks.get(type(problem), 2)


def _of_command(
    command: shell.Command, name: str, *, model: ModelSpec | None, base: TrainSetup | None, sharding: Sharding
) -> ReadConfig:
    inside = replace(sharding, num_gpus=command.num_gpus or sharding.num_gpus, arguments=command.arguments)
    inside = inside.below(command.folder)
    launcher = inside.by_end(command.launcher) if command.launcher else None
    if command.tool == "script":
        text = inside.by_end(command.target) if sharding.depth < MAX_SCRIPTS else None
        if text is None:
            raise NotATraining(f"{name} starts {command.target}, which is not beside it", hint="give that script")
        inside = replace(inside, depth=sharding.depth + 1)
        return _of_commands(text, command.target.rpartition("/")[2], model=model, base=base, sharding=inside)
    if command.tool == "swift":
        extra = {"rlhf_type": "rlhf"} if "rlhf" in command.arguments[:1] else {}
        return _of_flags(command, swift.FORMAT, name, model, inside, extra)
    kind = FLAGS_OF.get(command.tool)
    if kind is not None and not command.target:
        return _of_flags(command, kind, name, model, inside)
    if not command.target:
        raise ConfigError(f"{name}: {command.tool} names no config", hint="give the config itself")
    target = command.target
    of_verl = any(word.startswith("actor_rollout_ref.") for word in command.arguments)
    engine = "verl" if of_verl else target.partition("/")[0]
    if engine in OTHER_ENGINES:
        raise NotPlanned(f"{name} trains with {engine}: not planned", hint="plan trace runs programs on a phantom GPU")
    if target == "torchtitan/train.py":
        module = shell.flags(command.arguments).get("module")
        places = (f"torchtitan/{part}/{module}/config_registry.py" for part in ("models", "experiments"))
        target = next((place for place in places if inside.beside(place) is not None), target)
    text = inside.by_end(target)
    problem: ConfigError | None = None
    if text is not None:
        try:
            return _read(text, target.rpartition("/")[2], model=model, base=base, sharding=inside, launcher=launcher)
        except NotATraining as error:  # a wrapper around a tool: its words may say all
            problem = error
    if command.tool == "python":
        config = next(iter(command.arguments), "")
        if config.endswith((".yaml", ".yml", ".json")) and (text := inside.by_end(config)) is not None:
            return _read(text, config.rpartition("/")[2], model=model, base=base, sharding=inside, launcher=launcher)
        values = shell.flags(command.arguments)
        kind = detect(dict(values))
        if (kind == llamafactory.FORMAT and "finetuning_type" in values) or kind == swift.FORMAT:
            return _of_flags(command, kind, name, model, inside)
    if problem is not None:
        raise problem
    if shell.is_open(target):
        raise Undetermined(
            f"{name} starts {target}: what that is its own command line says", hint='give its words: --args "WORDS"'
        )
    if NOT_TRAINING.search(target.rpartition("/")[2]):
        raise NotATraining(f"{name} starts {target}, which does not train by its name", hint="give what trains")
    words = f' --args "{" ".join(command.arguments)[:200]}"' if command.tool == "python" else ""
    raise Undetermined(
        f"{name} starts {command.target}, which is not beside it and says what trains",
        hint=f"plan check {command.target.rpartition('/')[2]}{words}",
    )


def _of_flags(
    command: shell.Command,
    kind: str,
    name: str,
    model: ModelSpec | None,
    sharding: Sharding,
    extra: Mapping[str, Any] | None = None,
) -> ReadConfig:
    """The setup that a tool's flags say; those that only the shell would fill in are open."""
    given = {**shell.flags(command.arguments), **(extra or {})}
    opened = {key: value for key, value in given.items() if isinstance(value, str) and shell.is_open(value)}
    found = READERS[kind](
        {key: value for key, value in given.items() if key not in opened}, name, model, sharding=sharding
    )
    said = {key: f"{value}, which is set when the script runs" for key, value in opened.items()}
    return _with_open(found, said, name, sharding.num_gpus)


def read_config(
    path: Path,
    *,
    model: ModelSpec | None = None,
    base: TrainSetup | None = None,
    num_gpus: int = 1,
    launcher: Path | None = None,
    gpu: GpuSpec | None = None,
    arguments: tuple[str, ...] | None = None,
    versions: Mapping[str, str] | None = None,
) -> ReadConfig:
    """The setup of a config file.

    Raises:
        ConfigError: the file cannot be read or makes no sense; nothing in it is ever executed.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a directory", hint="give the config file in it")
    if path.suffix not in SUFFIXES and path.name not in MAKEFILES:
        raise ConfigError(
            f"{path.name}: a training ends in {', '.join(SUFFIXES)}", hint="rename it, or give the file that trains"
        )
    text = text_of(path)
    return read_text(
        text,
        path.name,
        model=model,
        base=base,
        sharding=Sharding(
            num_gpus=num_gpus,
            roots=roots_of(path),
            gpu=gpu,
            arguments=arguments,
            versions={**pinned(path), **(versions or {})},
        ),
        launcher=read_bounded(launcher) if launcher is not None else None,
    )


def text_of(path: Path) -> str:
    """The text of a file, as long as its kind may be.

    Raises:
        ConfigError: larger, or no regular file of text.
    """
    limits = {".ipynb": MAX_NOTEBOOK_BYTES, ".py": MAX_PROGRAM_BYTES}
    return read_bounded(path, max_bytes=limits.get(path.suffix, MAX_FILE_BYTES))


def roots_of(path: Path) -> tuple[Path, ...]:
    """Folders in which files that `path` names are looked for: its own, those above it within a repository, here."""
    parents = list(path.absolute().parents)
    kept = parents[:2]
    for above in parents[2:MAX_ANCESTORS]:
        if (kept[-1] / ".git").exists() or above in (Path.home(), Path(above.anchor)):
            break
        kept.append(above)
    return (*kept, Path())


def pinned(path: Path) -> dict[str, str]:
    """package -> version that a requirements file beside a config pins."""
    try:
        return dict(of_requirements(read_bounded(path.parent / "requirements.txt")))
    except ConfigError:
        return {}
