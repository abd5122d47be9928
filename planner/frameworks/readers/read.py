"""From a path to a `ReadConfig`: which format it is, and the reader for it.

Task files of schedulers are read as shell scripts; what only the scheduler would put in stays a `$NAME`.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.core.errors import ConfigError, NotATraining, NotPlanned
from planner.frameworks.exporters.text import LAUNCH, WRITTEN
from planner.frameworks.readers import (
    common,
    evaluating,
    generic,
    loading,
    script,
    shell,
    swift,
    torchtitan,
    torchtune,
    trl,
    unsloth,
    versions,
)
from planner.frameworks.readers.formats import detect, of_mapping, with_words
from planner.frameworks.readers.launched import Launches, allocator_of, under_launcher, weight, with_open
from planner.frameworks.readers.loading import (
    Parsed,
    json_duplicates,
    parse_documents,
    parse_json,
    parse_toml,
    read_bounded,
)
from planner.frameworks.readers.program.interpret import run
from planner.frameworks.readers.program.source import Source, of_cells, of_notebook, of_requirements, of_script
from planner.frameworks.readers.program.values import CallResult, Unknown, Value, as_table, plain
from planner.frameworks.readers.sharding import LAUNCHERS
from planner.frameworks.readers.types import EXPANDABLE, ReadConfig
from planner.frameworks.readers.values import FileContext, Settings
from planner.frameworks.tools import PROGRAMS, TOOLS
from planner.frameworks.tools.transformers import SYNC
from planner.hardware.gpu import GpuSpec
from planner.hardware.instances import cards_of
from planner.models.spec import ModelSpec
from planner.options.stacks import STACKS
from planner.setup import TrainSetup

SUFFIXES = (".yaml", ".yml", ".json", ".toml", ".py", ".ipynb", *shell.SUFFIXES)
MAKEFILES = ("Makefile", "makefile", "justfile")
MAX_ANCESTORS = 6
"""Folders above a file in which what it names is looked for; none above the one that holds .git."""


def read_text(
    text: str,
    name: str,
    *,
    model: ModelSpec | None = None,
    base: TrainSetup | None = None,
    around: FileContext | None = None,
    launcher: str | None = None,
) -> ReadConfig:
    """The setup of a config given as text; `name` says which kind of file it is by its ending.

    `base` stands for what Accelerate and DeepSpeed files do not say (None: it is `missing`); `launcher` is the text of
    an Accelerate config that the run is launched with.

    Raises:
        ConfigError: not a config of a known tool, or a wrong one.
    """
    inside = replace(around or FileContext(), model=model, base=base)
    if (launch := _own_launch(text, name, inside)) is not None:
        inside = replace(inside, num_gpus=inside.num_gpus if inside.num_gpus > 1 else launch.num_gpus or 1)
        launcher = launcher or (inside.read_by_suffix(launch.launcher) if launch.launcher else None)
    reading = _read(text, name, inside, launcher)
    of_format = STACK_OF.get(reading.format, reading.setup.stack)
    stack = reading.setup.stack if reading.setup.stack.startswith(of_format) else of_format  # or a form of it
    default = reading.setup.checkpointing > 0 and (STACKS[stack].reentrant_checkpointing or reading.reentrant)
    # the form of checkpointing that the file asks for, under the names that its tools have for it
    keys = ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
    blocks = [block for key in keys if isinstance(block := reading.values.get(key), Mapping)]
    forms = [block["use_reentrant"] for block in blocks if "use_reentrant" in block]
    forms += [reading.values["use_reentrant_gc"]] if "use_reentrant_gc" in reading.values else []
    reentrant = forms[0] is True if forms else default
    written = common.keys(TOOLS[reading.format], reading.values) if reading.format in TOOLS else {}
    older = versions.computing(around.versions) if around is not None and reading.format in BY_TRANSFORMERS else {}
    setup = reading.setup.replace(stack=stack, reentrant_checkpointing=reentrant, **older)
    reading = _with_segments(replace(reading, setup=setup), text, name)
    eval_seqs = 0 if reading.format in PROGRAMS else evaluating.sequences(reading.format, reading.values)
    reading = replace(reading, keys={**written, **reading.keys}, eval_seqs=reading.eval_seqs or eval_seqs)
    if reading.values.get("auto_find_batch_size") is True:
        reading = replace(reading, assumptions=(*reading.assumptions, HALVED))
    if around is not None and not reading.older and reading.format in TRAINERS:
        named = reading.setup.transformers_version or around.versions.get("transformers")
        running = versions.transformers(named, (), None)
        reading = replace(reading, older=running.older, lacks=running.lacks)
    if name.endswith(shell.SUFFIXES):
        reading = replace(reading, lacks=(*reading.lacks, *NO_WORDS))
    return _with_waiting_gradients(reading)


_HEADER = re.compile(rf"^# {WRITTEN}\d.*?^# {LAUNCH}(.*?)$", re.MULTILINE | re.DOTALL)
"""The head of a plan's own file, with the command that starts it."""
_COMPLETIONS = re.compile(r" completions of (\d+)\s+(?:#\s+)?tokens\.")
"""What it says of samples that are generated."""


def _own_launch(text: str, name: str, around: FileContext) -> shell.Command | None:
    """How a plan's own file is started, as its head says; None: it says nothing of it."""
    launches: Sequence[shell.Command] = ()
    if head := _HEADER.search(text):
        with suppress(NotATraining):  # the Accelerate config itself starts whatever SCRIPT is
            launches = shell.commands(head[1], name, around.num_gpus)
    words = ((launch, word) for launch in launches for word in (launch.target, *launch.arguments))
    return next((launch for launch, word in words if word.endswith(f"/{name}")), None)


def _with_segments(reading: ReadConfig, text: str, name: str) -> ReadConfig:
    """The reading with the allocator as its tool sets it, or a program for itself; a launch has said it already."""
    sets_variables = reading.format == trl.FORMAT or name.endswith((".py", ".ipynb"))
    allocator = allocator_of(text, {}) if sets_variables else ""
    if allocator:
        segments = reading.setup.replace(expandable_segments="expandable_segments:True" in allocator)
        return replace(reading, setup=segments, origins={**reading.origins, "expandable_segments": name})
    if STACKS[reading.setup.stack].expandable_segments:
        return replace(reading, setup=reading.setup.replace(expandable_segments=True))
    if "expandable_segments" in reading.origins or not reading.setup.expandable_segments:
        return reading
    return replace(reading, assumptions=(*reading.assumptions, EXPANDABLE))


NO_WORDS = ("liger_kernel_config", SYNC)
"""Settings that no word of a command line sets: transformers 5.23 `HfArgumentParser` takes no text for a dictionary
that is not in `TrainingArguments._VALID_DICT_FIELDS`."""
HALVED = "auto_find_batch_size: a micro-batch that does not fit is halved until it does"
STACK_OF = {name: name for name in STACKS} | {script.UNSLOTH: unsloth.FORMAT}
"""Format of a file -> the stack that runs it; a program says itself which trainer it makes."""


WHOLE_GRADIENTS = (
    "with accumulation FSDP keeps the whole model's gradients on every GPU between micro-batches, as nothing sets "
    f"{SYNC}"
)


def _with_waiting_gradients(reading: ReadConfig) -> ReadConfig:
    """The reading as its Trainer reduces gradients under FSDP: by itself with the step's last micro-batch.

    Source: transformers 5.23 `Trainer._inner_training_loop`; accelerate 1.15 `Accelerator.no_sync`.
    """
    setup = reading.setup
    by_trainer = setup.parallel == "fsdp2" and setup.tensor_degree == 1 and reading.format in BY_TRANSFORMERS
    if not by_trainer or common.written(reading.values, SYNC) is True:
        return reading
    waits = replace(reading, setup=setup.replace(sync_each_batch=False))
    if setup.accumulation_steps == 1:
        return waits
    return replace(waits, assumptions=(*reading.assumptions, WHOLE_GRADIENTS))


TRAINERS = ("trl", "axolotl", "llamafactory", "hf-script")
"""Formats that run transformers' Trainer."""
BY_TRANSFORMERS = (*TRAINERS, swift.FORMAT)
"""Formats whose steps are computed by transformers and bitsandbytes, whatever trainer runs them."""


def _read(text: str, name: str, around: FileContext, launcher: str | None = None) -> ReadConfig:
    if launcher is not None:
        words = {"num_processes": around.num_gpus} if around.num_gpus > 1 else {}  # as `accelerate launch` takes them
        return under_launcher(lambda inside: _read(text, name, inside), launcher, around, words)
    reading = _of_kind(text, name, around)
    head = _HEADER.search(text)
    return replace(_with_prompts(reading, head[0]), planned=True) if head else reading


def _with_prompts(reading: ReadConfig, head: str) -> ReadConfig:
    """The reading with the prompts that a plan's own file is for, where none of its settings cuts them."""
    planned, made = _COMPLETIONS.search(head), reading.setup.rollout_settings.completion_tokens
    missing = tuple(gap for gap in reading.missing if gap.field != "seq_len_tokens")
    if planned is None or missing == reading.missing or int(planned[1]) <= made:
        return reading
    setup = reading.setup.replace(seq_len_tokens=int(planned[1]))
    assumption = f"prompts of {setup.prompt_tokens} tokens, as it was planned for"
    return replace(reading, setup=setup, missing=missing, assumptions=(*reading.assumptions, assumption))


def _of_kind(text: str, name: str, around: FileContext) -> ReadConfig:
    if name.endswith(".py") and torchtitan.is_registry(text):
        return torchtitan.read_registry(text, name, around)
    launches = Launches(name, _read)
    if name.endswith(".py"):
        try:
            return script.read(text, name, around)
        except NotATraining:
            if (reading := _of_job(of_script(text), launches, around)) is not None:
                return reading
            raise
    if name.endswith(".ipynb"):
        return _of_notebook(text, launches, around)
    if name.endswith(shell.SUFFIXES) or name in MAKEFILES:
        return launches.first(text, around)
    if name.endswith(".toml"):
        values = parse_toml(text, name)
        if torchtitan.is_config(values):
            values = with_words(values, torchtitan.FORMAT, around.arguments or ())
            return torchtitan.read(Settings(values, name, around))
        return of_mapping(Settings(values, name, around), detect(values))
    if name.endswith(".json"):
        documents: tuple[Parsed, ...] = (Parsed(parse_json(text, name), json_duplicates(text), {}),)
    else:
        documents = parse_documents(text, name)
    written = {file: content for document in documents for file, content in files_of(document.values).items()}
    inside = replace(around, written={**around.written, **written}) if written else around
    problems: list[ConfigError] = []
    for number, document in enumerate(documents, start=1):
        try:
            reading = _of_settings(document, launches, inside)
        except ConfigError as error:
            problems.append(error)
            continue
        assumptions = (
            (f"{name} holds {len(documents)} documents: number {number} is read",) if len(documents) > 1 else ()
        )
        return replace(reading, assumptions=(*assumptions, *reading.assumptions))
    raise min(problems, key=weight)


def _of_settings(parsed: Parsed, launches: Launches, around: FileContext) -> ReadConfig:
    name = launches.name
    if {"schema_version", "kind", "workload"} <= set(parsed.values):
        raise NotATraining(f"{name} is a plan", hint="plan report and plan compare read it; check its launch files")
    # a scheduler's task file
    if any(marks <= set(parsed.values) for marks in MARKS):
        try:
            return launches.first(script_of(parsed.values), around)
        except NotATraining:
            if not detect(parsed.values):
                raise
    # torchtune takes OmegaConf throughout
    if loading.without_open(parsed.values)[1] or detect(parsed.values) == torchtune.FORMAT:
        parsed = parsed._replace(values=loading.with_words(parsed.values, around.arguments or ()))
    kind = detect(parsed.values)
    if kind == trl.FORMAT and name.endswith(".json") and generic.is_training(parsed.values):
        kind = generic.FORMAT  # `trl` reads YAML: another program's, with defaults of its own
    parsed = parsed._replace(values=with_words(parsed.values, kind, around.arguments or ()))
    opened: dict[str, str] = {}
    if kind != generic.FORMAT:
        resolved, opened = loading.without_open(parsed.values)
        parsed = parsed._replace(values=resolved)
    settings = Settings(parsed.values, name, around)
    if kind in LAUNCHERS:
        reading = LAUNCHERS[kind](settings)
    else:
        inner = of_mapping(settings, kind)
        reading = with_open(inner, opened, name, around.num_gpus) if opened else inner
    where: dict[str, str] = {}
    if kind in TOOLS:
        where = common.origins(TOOLS[kind], parsed.values, parsed.lines, name, around.versions)
    elif kind == generic.FORMAT:
        where = {of: f"{name}:{parsed.lines[key]}" for of, key in reading.keys.items() if key in parsed.lines}
    return replace(reading, assumptions=(*parsed.assumptions, *reading.assumptions), origins=where)


def _of_job(source: Source, launches: Launches, around: FileContext) -> ReadConfig | None:
    """What a program that trains nothing itself submits to SageMaker: the commands of that job's containers.

    Source: sagemaker 2.2 `estimator.py` (Framework: `hyperparameters` become `--name value`), 3 `modules/train`.

    Raises:
        NotPlanned: SageMaker's own engine trains.
    """
    for job in run(source.text, launches.name, around.of_program()).calls if "sagemaker" in source.text else ():
        source_code = job.keywords.get("source_code")  # of sagemaker 3
        code = source_code.keywords if isinstance(source_code, CallResult) else job.keywords
        entry = plain(code.get("entry_script") if code is not job.keywords else code.get("entry_point"))
        if job.package != "sagemaker" or not isinstance(entry, str):
            continue
        folder, given = plain(code.get("source_dir")), job.argument("hyperparameters")
        words = [_sagemaker_launcher(job, launches.name) if entry.endswith(".py") else "bash", shlex.quote(entry)]
        table = as_table(given) if given is not None else None
        for name, value in table.entries.items() if table is not None else ():
            data, variable = plain(value), f"${name.upper().replace('-', '_')}"
            words += [f"--{name}", variable if isinstance(data, Unknown) else shlex.quote(str(data))]
        lines = [f"cd {shlex.quote(folder)}"] if isinstance(folder, str) else []
        version = plain(job.keywords.get("transformers_version"))
        versions = {"transformers": version, **around.versions} if isinstance(version, str) else around.versions
        return launches.first("\n".join([*lines, " ".join(words)]), replace(around, versions=versions))
    return None


def _sagemaker_launcher(job: CallResult, name: str) -> str:
    """What starts the program: one process, or torchrun on every card of the instances."""
    spread = job.keywords.get("distribution")
    table = as_table(spread) if spread is not None else None
    by: Mapping[str, Value] = table.entries if table is not None else {}
    if "smdistributed" in by:
        raise NotPlanned(f"{name} trains with SageMaker's own engine (smdistributed): not planned", hint="")
    by_torchrun = isinstance(job.keywords.get("distributed"), CallResult) or {"torch_distributed", "pytorchddp"} & {*by}
    compute = job.argument("compute")
    machine = compute.keywords if isinstance(compute, CallResult) else job.keywords
    cards = cards_of(str(plain(machine.get("instance_type"))))
    nodes = plain(machine.get("instance_count"))
    nodes = "$SM_HOST_COUNT" if isinstance(nodes, Unknown) else nodes or 1
    each = cards[0] if cards is not None else "$SM_NUM_GPUS"
    return f"torchrun --nnodes {nodes} --nproc_per_node {each}" if by_torchrun else "python"


def _of_notebook(text: str, launches: Launches, around: FileContext) -> ReadConfig:
    source = of_notebook(text, launches.name)
    try:
        return script.read("", launches.name, around, source)
    except NotATraining as error:
        if (reading := _of_job(source, launches, around)) is not None:
            return reading
        commands, written = of_cells(text)
        named = {**written, **{path.rpartition("/")[2]: content for path, content in written.items()}}
        commands += "".join(f"\npython {path}" for path in written if path.endswith(".py") and path not in commands)
        inside = replace(around, written={**around.written, **named}, versions={**dict(source.pins), **around.versions})
        try:
            return launches.first(commands, inside)
        except NotATraining:
            pass
        if source.unreadable:
            error.message += f" (not Python, and left out: cell {', '.join(map(str, source.unreadable))})"
        raise


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
    objective: str = "",
) -> ReadConfig:
    """The setup of a config file.

    Raises:
        ConfigError: the file cannot be read or makes no sense; nothing in it is ever executed.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a directory", hint="give the config file in it")
    if path.suffix not in SUFFIXES and path.name not in MAKEFILES:
        is_text = path.suffix in (".md", ".rst", ".txt") or path.name.startswith("Dockerfile")
        hint = "put the command that trains into a .sh file" if is_text else "rename it"
        raise ConfigError(
            f"{path.name}: a training ends in {', '.join(SUFFIXES)}", hint=f"{hint}, or give the file that trains"
        )
    text = read_bounded(path)
    return read_text(
        text,
        path.name,
        model=model,
        base=base,
        around=FileContext(
            num_gpus=num_gpus,
            roots=roots_of(path),
            gpu=gpu,
            arguments=arguments,
            versions={**pinned(path), **(versions or {})},
            objective=objective,
        ),
        launcher=read_bounded(launcher) if launcher is not None else None,
    )


def roots_of(path: Path) -> tuple[Path, ...]:
    """Folders in which files that `path` names are looked for: its own, those above it within a repository, here."""
    parents = list(path.absolute().parents)
    folders = parents[:2]
    for above in parents[2:MAX_ANCESTORS]:
        if (folders[-1] / ".git").exists() or above in (Path.home(), Path(above.anchor)):
            break
        folders.append(above)
    return (*folders, Path())


def installs(path: Path, packages: Sequence[str]) -> bool:
    """Whether a requirements file beside a config, a run.sh there or above it (as launch folders have it), or a `pip
    install` in the file itself names a package, in whatever version."""
    name = re.compile(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, packages))})(?![\w.-])")
    folder = path.absolute().parent
    for source in (folder / "requirements.txt", folder / "run.sh", folder.parent / "run.sh", path):
        with suppress(ConfigError):
            lines = (line.partition("#")[0] for line in read_bounded(source).splitlines())
            if any(name.search(line) and ("install" in line or source.suffix == ".txt") for line in lines):
                return True
    return False


def pinned(path: Path) -> dict[str, str]:
    """package -> version that the nearest requirements file or pyproject.toml pins, beside a config or above it within
    its repository."""
    for folder in roots_of(path)[:-1]:
        for name in ("requirements.txt", "pyproject.toml"):
            with suppress(ConfigError):
                if pinned_versions := dict(of_requirements(read_bounded(folder / name))):
                    return pinned_versions
    return {}


MARKS = (
    {"run", "resources"}, {"run", "setup"}, {"run", "envs"}, {"commands", "type"}, {"commands", "resources"},
    {"apiVersion", "kind"}, {"services"}, {"command", "compute"}, {"command", "code"}, {"command", "image"},
    {"entrypoint", "resources"}, {"entrypoint", "hyperparameters"},
    {"commands", "environment"}, {"tasks", "budget"},
)  # fmt: skip
"""Settings that task files have together, one row a kind."""
SCRIPTS = ("setup", "run", "commands", "script", "entrypoint")
"""Settings that hold commands of a shell; `command` and `args` hold one command's words."""
ENVIRONMENTS = ("env", "envs", "environment", "environment_variables", "envVars")
_GPUS = re.compile(r"^[A-Za-z][\w-]*:(\d+)$")
MAX_DEPTH = 12


def script_of(values: Mapping[str, Any]) -> str:
    """The commands of a task file as a shell script, with its variables set before them."""
    lines = [f"export SKYPILOT_NUM_GPUS_PER_NODE={count}" for count in _gpus(values, 0)][:1]
    inputs = values.get("inputs")
    given = inputs if isinstance(inputs, Mapping) else {}

    def put_in(match: re.Match[str]) -> str:
        block, _, name = match[1].rpartition(".")
        supplied = block == "inputs" and isinstance(given.get(name), (str, int, float))
        return str(given[name]) if supplied else f"${name}"

    return re.sub(r"\$\{\{\s*([\w.]+)\s*\}\}", put_in, "\n".join([*lines, *_scripts(values, 0)]))


def files_of(values: Mapping[str, Any]) -> dict[str, str]:
    """The files that a Kubernetes ConfigMap holds, by their names."""
    data = values.get("data") if values.get("kind") == "ConfigMap" else None
    return {str(key): text for key, text in (data or {}).items() if isinstance(text, str)}


def _scripts(values: Mapping[str, Any], depth: int) -> Iterator[str]:
    for key in ENVIRONMENTS:
        yield from (f"export {name}={shlex.quote(value)}" for name, value in _variables(values.get(key)))
    for key in SCRIPTS:
        given = values.get(key)
        if isinstance(given, list) and all(isinstance(word, str) for word in given):
            yield shlex.join(given) if key == "entrypoint" else "\n".join(given)
        elif isinstance(given, str):
            yield given
    words = [word for key in ("command", "args", "arguments") for word in _words(values.get(key))]
    if words:
        yield " ".join(words)
    for value in values.values() if depth < MAX_DEPTH else ():
        for inner in value if isinstance(value, list) else (value,):
            if isinstance(inner, Mapping):
                yield from _scripts(inner, depth + 1)


def _words(given: Any) -> list[str]:
    if isinstance(given, list):
        return [shlex.quote(str(word)) if not re.search(r"^\$[\w({]", str(word)) else str(word) for word in given]
    return [given] if isinstance(given, str) else []


def _variables(given: Any) -> Iterator[tuple[str, str]]:
    """Environment variables: a mapping, `NAME=VALUE` lines, or `{name:, value:}` entries."""
    if isinstance(given, Mapping):
        given = [{"name": name, "value": value} for name, value in given.items()]
    for entry in given if isinstance(given, list) else ():
        if isinstance(entry, str) and "=" in entry:
            entry = dict(zip(("name", "value"), entry.split("=", 1), strict=True))
        pair = (str(entry.get("name")), entry.get("value")) if isinstance(entry, Mapping) else ("", None)
        if re.fullmatch(r"[A-Za-z_]\w*", pair[0]) and isinstance(pair[1], (str, int, float)):
            yield pair[0], str(pair[1])


def _gpus(values: Mapping[str, Any], depth: int) -> Iterator[int]:
    """The GPUs of a task, as `accelerators: H100:8`, `gpu: 8`, `nvidia.com/gpu: 8` say it."""
    for key, value in values.items():
        if key in ("accelerators", "gpu", "gpus", "nvidia.com/gpu", "gpuCount", "num_gpus"):
            named = {*value.values()} if isinstance(value, Mapping) else {value}
            for spec in named:
                match = _GPUS.match(str(spec))
                if match or str(spec).isdigit():
                    yield int(match[1] if match else spec)
            continue
        for inner in value if isinstance(value, list) else (value,):
            if isinstance(inner, Mapping) and depth < MAX_DEPTH:
                yield from _gpus(inner, depth + 1)
