"""From the commands of a script, notebook or task file to the run that the first readable one starts."""

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from planner.core.errors import ConfigError, NotATraining, NotPlanned, Undetermined
from planner.core.records import dataclass
from planner.frameworks.readers import common, llamafactory, shell, swift, trl, versions
from planner.frameworks.readers.formats import READERS, detect
from planner.frameworks.readers.loading import parse_yaml
from planner.frameworks.readers.program.source import environment_word
from planner.frameworks.readers.sharding import num_processes, read_accelerate
from planner.frameworks.readers.types import Missing, ReadConfig
from planner.frameworks.readers.values import FileContext, Settings
from planner.frameworks.tools import ASKED, tool_of
from planner.options.layouts import SHARDED

OTHER_ENGINES = ("verl", "openrlhf", "megatron", "nanotron", "mlx_lm", "mlx", "xtuner", "colossalai", "skyrl_train")
FLAGS_OF = {"trl": trl.FORMAT, "llamafactory-cli": llamafactory.FORMAT}
"""Tools that take every setting as a flag -> the format that the flags are of."""
NOT_TRAINING = re.compile(
    r"^(?:run_?)?(?:eval|infer|generat|merge|convert|prepare|preprocess|download|test|plot|serve|setup|rewards\.)"
)
OF_TRL = re.compile(rf"(?:^|/)(?:trl|examples)/scripts/({'|'.join(shell.TRL_COMMANDS)})\.py$")
"""TRL's own programs, which take what `trl` takes."""
OF_PLANS = "trl-orpo.py"
"""A plan's own program, which takes what `trl` takes of a file (`planner.frameworks.exporters.trl`)."""
MAX_SCRIPTS = 4
"""Scripts that start scripts."""


@dataclass(frozen=True)
class Launches:
    """The launches of one file; `read` reads what they start: (text, name, outside)."""

    name: str
    read: Callable[[str, str, FileContext], ReadConfig]

    def first(self, text: str, around: FileContext) -> ReadConfig:
        """The setup of the first launch whose program or config can be read."""
        name = self.name
        problems: list[ConfigError] = []
        launches = shell.commands(text, name, around.num_gpus, around.arguments or ())
        given_up: set[tuple[str, ...]] = set()
        of_tool = False
        waiting = list(reversed(launches))
        while waiting:
            command = waiting.pop()
            alike = (command.target, *(word for word in command.arguments if word.startswith("-")))
            if alike in given_up:
                continue  # a loop over sizes or seeds of a program in which nothing is read
            tried = replace(around, read=set())  # what a launch that is given up names is not what runs
            if command.target.rpartition("/")[2] == OF_PLANS and command.arguments[:1] == ("--config",):
                tried.below(command.folder).read_by_suffix(command.target)  # which its file says all of
                command = replace(command, tool="trl", target=command.arguments[1])
            try:
                reading = self.of_command(command, tried)
            except ConfigError as error:
                problems.append(error)
                of_tool = of_tool or (command.tool in shell.TOOLS and isinstance(error, Undetermined))
                if command.tool in ("python", "script"):
                    given_up.add(alike)
                inner = shell.nested(command.arguments) if command.tool == "python" else None
                waiting += [inner] if inner is not None else []  # what a program that submits jobs is told to start
                continue
            if of_tool and any(entry.field == "model" for entry in reading.missing):
                continue  # a program that may not even train, behind a tool's training
            assumptions = [f"read from the launch in {name}"]
            if len(launches) > 1:
                assumptions = [f"{name} launches {len(launches)} runs: the first that can be read is taken"]
            reading = with_launcher(with_segments(reading, command, tried), command, tried)
            num_nodes = reading.num_nodes if command.num_nodes == 1 else command.num_nodes
            if num_nodes > 1:
                assumptions.append(f"{reading.setup.num_gpus} GPUs on {num_nodes} nodes, as the launch says")
            assumptions += reading.assumptions
            started = reading.started | tried.read
            return replace(reading, path=name, assumptions=tuple(assumptions), started=started, num_nodes=num_nodes)
        raise min(problems, key=weight)

    def of_command(self, command: shell.Command, around: FileContext) -> ReadConfig:
        """The setup of one launch."""
        name = self.name
        inside = replace(
            around,
            num_gpus=command.num_gpus or around.num_gpus,
            arguments=command.arguments,
            environment={**around.environment, **dict(command.environment)},
            written={**around.written, **command.written},
        ).below(command.folder)
        if command.tool == "script":
            text = inside.read_by_suffix(command.target) if around.depth < MAX_SCRIPTS else None
            if text is None:
                raise NotATraining(f"{name} starts {command.target}, which is not beside it", hint="give that script")
            inner = replace(self, name=command.target.rpartition("/")[2])
            return inner.first(text, replace(inside, depth=around.depth + 1))
        if command.tool == "swift":
            given: dict[str, Any] = dict(shell.flags(command.arguments))
            path = next(iter(command.arguments[1:2]), "")
            if path.endswith((".yaml", ".yml", ".json")):
                file = self._settings_of(path, inside)
                variables = {key: str(value) for key, value in Settings(file, path).mapping("ENV").items()}
                processes = "" if command.num_gpus else variables.get("NPROC_PER_NODE", "")
                num_gpus = int(processes) if processes.isdigit() else inside.num_gpus
                inside = replace(inside, environment={**variables, **inside.environment}, num_gpus=num_gpus)
                given = {key: value for key, value in {**file, **given}.items() if key != "ENV"}
            if "rlhf" in command.arguments[:1]:
                given.setdefault("rlhf_type", swift.DEFAULT_RLHF)
            # a process's layers lie over its GPUs where it sees several (ms-swift 4 get_default_device_map, is_mp)
            processes = inside.environment.get("NPROC_PER_NODE", "1")
            each = shell.num_visible(inside.environment) // max(1, int(processes)) if processes.isdigit() else 0
            if processes != "1" and each > 1 and not (given.get("deepspeed") or given.get("fsdp")):
                alone = replace(inside, num_gpus=each)
                reading = self._of_given(command, swift.FORMAT, alone, {**given, "device_map": "auto"})
                note = (
                    f"of {processes} processes with a model over {each} GPUs each (DDP over device maps) one is counted"
                )
                return replace(reading, approximations=(*reading.approximations, note))
            if inside.num_gpus > 1 and "NPROC_PER_NODE" not in inside.environment:
                given["device_map"] = "auto"
            return self._of_given(command, swift.FORMAT, inside, given)
        kind = FLAGS_OF.get(command.tool)
        named = next(iter(command.arguments[1:2]), "")
        if not command.target and command.tool not in ("python", "script") and shell.is_open(named):
            raise what_only_words_say(name, f"{command.tool} {named}")
        if kind is not None and not command.target:
            return self._of_flags(command, kind, inside)
        if not command.target and command.tool in shell.NAMED:
            tool = shell.NAMED[command.tool]
            raise NotPlanned(f"{name} trains with {tool}, whose flags are not read", hint="plan estimate takes a setup")
        if not command.target:
            built_in = "tune cp NAME config.yaml writes a built-in one out; " * (command.tool == "tune")
            raise ConfigError(f"{name}: {command.tool} names no config", hint=f"{built_in}give the config itself")
        return self._of_target(command, inside)

    def _of_target(self, command: shell.Command, inside: FileContext) -> ReadConfig:
        name, target = self.name, command.target
        of_verl = any(word.startswith("actor_rollout_ref.") for word in command.arguments)
        of_megatron = "--tensor-model-parallel-size" in command.arguments
        engine = "verl" if of_verl else "megatron" if of_megatron else target.partition("/")[0]
        if engine in OTHER_ENGINES:
            raise NotPlanned(
                f"{name} trains with {engine}: not planned", hint="plan trace runs programs on a phantom GPU"
            )
        if target == "torchtitan/train.py":
            module = shell.flags(command.arguments).get("module")
            places = (f"torchtitan/{part}/{module}/config_registry.py" for part in ("models", "experiments"))
            target = next((place for place in places if inside.read_relative(place) is not None), target)
        if target.endswith(swift.PROGRAMS):  # as torchrun starts it, on every node or process
            kind = {"rlhf_type": swift.DEFAULT_RLHF} if target.endswith("rlhf.py") else {}
            return self._of_flags(command, swift.FORMAT, inside, {**kind, **shell.flags(command.arguments)})
        of_factory = target.endswith(llamafactory.PROGRAMS)
        if of_factory and (reading := self._of_words(command, inside, (llamafactory.FORMAT,))):
            return reading
        text = inside.read_by_suffix(target)
        if text is None and target.endswith(".py"):  # `python -m package`
            inner = f"{target.removesuffix('.py')}/__main__.py"
            text, target = inside.read_by_suffix(inner), target if inside.read_by_suffix(inner) is None else inner
        problem: ConfigError | None = None
        published = OF_TRL.search(target)
        if text is None and published and "--dataset_name" in command.arguments:
            words = (published[1], *command.arguments)
            return self._of_flags(replace(command, arguments=words), trl.FORMAT, replace(inside, arguments=words))
        if text is not None:
            try:
                return self._read(text, target, command, inside)
            except NotATraining as error:  # a wrapper around a tool: its words may say all
                problem = error
        prepares = problem is not None and NOT_TRAINING.search(target.rpartition("/")[2])
        if command.tool == "python" and not prepares and (reading := self._of_words(command, inside)):
            return reading
        if problem is not None:
            raise problem
        if shell.is_open(target):
            raise what_only_words_say(name, target)
        if NOT_TRAINING.search(target.rpartition("/")[2]):
            raise NotATraining(f"{name} starts {target}, which does not train by its name", hint="give what trains")
        option = f" --args {shlex.quote(shlex.join(command.arguments))}" if command.tool == "python" else ""
        option += f" --accelerate {shlex.quote(command.launcher)}" if command.launcher else ""
        raise Undetermined(
            f"{name} starts {command.target}, which is not beside it and says what trains",
            hint=f"in its folder, with the same --gpu: plan check {command.target.rpartition('/')[2]}{option}",
        )

    def _of_words(self, command: shell.Command, inside: FileContext, tools: tuple[str, ...] = ()) -> ReadConfig | None:
        """The setup that a program's words say: a config, or the flags of a tool; `tools`: of these alone."""
        config = next(iter(command.arguments), "")
        if config.endswith((".yaml", ".yml", ".json")) and (text := inside.read_by_suffix(config)) is not None:
            reading = self._read(text, config, command, inside)
            return reading if not tools or reading.format in tools else None
        values = shell.flags(command.arguments)
        kind = detect(dict(values))
        of_factory = kind == llamafactory.FORMAT and "finetuning_type" in values
        sufficient = of_factory or (kind == swift.FORMAT and not tools)
        return self._of_flags(command, kind, inside) if sufficient else None

    def _settings_of(self, path: str, inside: FileContext) -> dict[str, Any]:
        """The settings in a file whose keys stand for flags.

        Raises:
            Undetermined: it is not at hand.
        """
        text = inside.read_by_suffix(path)
        if text is None:
            raise Undetermined(f"{self.name} starts {path}, which is not beside it", hint="give that file")
        return dict(parse_yaml(text, path).values)

    def _read(self, text: str, path: str, command: shell.Command, inside: FileContext) -> ReadConfig:
        return _launched(lambda context: self.read(text, path.rpartition("/")[2], context), command, inside)

    def _of_flags(
        self, command: shell.Command, kind: str, around: FileContext, extra: Mapping[str, Any] | None = None
    ) -> ReadConfig:
        return self._of_given(command, kind, around, {**shell.flags(command.arguments), **(extra or {})})

    def _of_given(self, command: shell.Command, kind: str, around: FileContext, given: Mapping[str, Any]) -> ReadConfig:
        given = versions.of_words(given, kind)
        texts = ((key, value) for key, value in given.items() if isinstance(value, str) and value not in around.written)
        opened = {key: value for key, value in texts if shell.is_open(value)}
        resolved = {key: value for key, value in given.items() if key not in opened}
        reading = _launched(lambda inside: READERS[kind](Settings(resolved, self.name, inside)), command, around)
        reasons = {key: f"{value}, which is set when the script runs" for key, value in opened.items()}
        return with_open(reading, reasons, self.name, around.num_gpus)


def _launched(read: Callable[[FileContext], ReadConfig], command: shell.Command, around: FileContext) -> ReadConfig:
    none = "{}" if command.layout else None
    launcher = around.read_by_suffix(command.launcher) if command.launcher else none
    words = {**command.layout, **({"num_processes": around.num_gpus} if command.open_gpus else {})}
    return read(around) if launcher is None else under_launcher(read, launcher, around, words)


def under_launcher(
    read: Callable[[FileContext], ReadConfig],
    launcher: str,
    around: FileContext,
    words: Mapping[str, Any] = MappingProxyType({}),
) -> ReadConfig:
    """The setup that `read` gives under the text of the Accelerate config that it is launched with; `words`: what the
    command line says, which goes over the file."""
    parsed = parse_yaml(launcher, "accelerate config")
    values = parsed.values
    merged = {key: {**values[key], **words[key]} for key in words if isinstance(values.get(key), Mapping)}
    settings = Settings({**values, **words, **merged}, "accelerate config", around)
    inside = replace(around, num_gpus=num_processes(settings))
    inner = read(inside)
    layout = read_accelerate(Settings(settings.values, settings.name, replace(inside, base=inner.setup)))
    setup = layout.setup
    by_fsdp = settings.raw("distributed_type") == "FSDP" and common.fsdp_checkpoints(settings.block("fsdp_config"))
    twice = by_fsdp and inner.setup.checkpointing and (inner.call_line or inner.format == trl.FORMAT)
    refusals = [*inner.refusals, *layout.refusals]
    if setup.parallel in SHARDED:
        refusals = [refusal for refusal in refusals if refusal != common.NOT_UNSCALED]
    if setup.parallel == "ddp" and inner.setup.parallel in SHARDED:  # TrainingArguments shard, whatever started it
        setup = setup.replace(parallel=inner.setup.parallel, **inner.setup.layout)
    if inner.format == trl.FORMAT and setup.parallel == "zero3" and setup.method == "lora":
        setup = setup.replace(adapter_dtype=setup.weight_dtype)  # TRL switches peft's cast off under ZeRO-3
    return replace(
        inner,
        setup=setup,
        num_nodes=int(machines) if (machines := str(settings.values.get("num_machines", ""))).isdecimal() else 0,
        missing=tuple(entry for entry in inner.missing if entry.field not in OF_LAUNCHER),
        reentrant=inner.reentrant and not by_fsdp,
        refusals=(*refusals, *([common.CHECKPOINTED_TWICE] if twice else [])),
        assumptions=(*inner.assumptions, *parsed.assumptions, *layout.assumptions),
        approximations=(*inner.approximations, *layout.approximations),
    )


def what_only_words_say(name: str, started: str) -> Undetermined:
    """That a script starts what its own command line names."""
    hint = 'give its words: --args "WORDS"'
    return Undetermined(f"{name} starts {started}: what that is its own command line says", hint=hint)


OF_LAUNCHER = ("num_gpus", "parallel")
"""What a launcher's file says."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def allocator_of(program: str, given: Mapping[str, str]) -> str:
    """The allocator's settings as a program makes them, else as its environment has them."""
    return next(filter(None, (environment_word(program, given, name) for name in ALLOCATOR)), "")


def with_segments(reading: ReadConfig, command: shell.Command, around: FileContext) -> ReadConfig:
    """A reading with the allocator as the launch, or the program that it starts, sets it: segments are fixed where
    neither says more."""
    if command.tool == "script":
        return reading  # that script's own launch has said it
    given = {**around.environment, **dict(command.environment)}
    program = around.below(command.folder).read_by_suffix(command.target) if command.target else None
    setup = reading.setup.replace(expandable_segments="expandable_segments:True" in allocator_of(program or "", given))
    return replace(reading, setup=setup, origins={**reading.origins, "expandable_segments": "the launch"})


def with_launcher(reading: ReadConfig, command: shell.Command, around: FileContext) -> ReadConfig:
    """A reading with what its launcher decides and nobody says as open: how many processes, and what the launcher's own
    file says where that is not at hand."""
    missing: dict[str, str] = {}
    if command.open_gpus:
        missing["num_gpus"] = f"{command.open_gpus}: known to the machine or the shell alone"
    if command.launcher and around.below(command.folder).read_by_suffix(command.launcher) is None:
        why = f"{command.launcher}, Accelerate's config, is not beside it"
        missing |= {"parallel": why} | ({} if command.num_gpus else {"num_gpus": why})
        if reading.setup.autocast_dtype is None:
            missing["precision"] = why
    open_fields = {entry.field for entry in reading.missing}
    more = tuple(Missing(field=of, reason=why) for of, why in missing.items() if of not in open_fields)
    return replace(reading, missing=(*reading.missing, *more))


def weight(problem: ConfigError) -> int:
    """Which of several launches' problems to tell: that of a training comes before "not a training"."""
    ranks = {NotPlanned: 0, Undetermined: 1, NotATraining: 3}
    return ranks.get(type(problem), 2)


def with_open(reading: ReadConfig, opened: Mapping[str, str], name: str, num_gpus: int) -> ReadConfig:
    """A reading with the settings as open that only the shell, or Hydra, would fill in."""
    names = {key: field.of for field in tool_of(reading.format).fields if field.of in ASKED for key in field.names}
    missing = {names[key]: f"{name}: {key} is {text}" for key, text in opened.items() if key in names}
    if num_gpus == 1:
        missing.pop("parallel", None)
    others = tuple(entry for entry in reading.missing if entry.field not in missing)
    return replace(reading, missing=(*(Missing(field=field, reason=why) for field, why in missing.items()), *others))
