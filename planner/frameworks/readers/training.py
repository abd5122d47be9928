"""From a program that was read to the one training in it: trainer, its arguments; the base, quantized by which
configuration, of pictures, sound or text; the adapters that it hands to peft, or to Unsloth."""

import re
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from planner.core.errors import NotATraining, NotPlanned, OwnLoop, Undetermined
from planner.core.records import dataclass
from planner.frameworks.readers import common
from planner.frameworks.readers.objectives import (
    BEHIND_REFERENCE,
    CONFIGS,
    OTHER_TRAINERS,
    PLANNED,
    VISION,
    WITH_AUDIO,
    of_model,
    of_other_trainer,
    refusal,
)
from planner.frameworks.readers.program import embedding, loops
from planner.frameworks.readers.program.loops import Loop, plain_loop
from planner.frameworks.readers.program.reading import Program
from planner.frameworks.readers.program.values import (
    Argument,
    CallResult,
    Constant,
    DictValue,
    ImportedName,
    Instance,
    Unknown,
    Value,
    holds_arguments,
    is_trainer,
    plain,
    trainer_of,
)
from planner.frameworks.readers.values import FileContext, Settings
from planner.models.encoders import MODALITIES
from planner.models.spec import ModelSpec
from planner.options.adapters import ADAPTERS
from planner.options.sound import TEXT_TOKENS

RUN_IT = "plan trace -- python FILE runs it on a phantom GPU and says what it needs"
HF_TRAINERS = ("SFTTrainer", "HfTrainer", "Seq2SeqTrainer", "UnslothTrainer")
LIGHTNING = ("pl", "L", "lightning", "pytorch_lightning")
TRAINERS_OF = ("transformers", "trl", "unsloth", "sentence_transformers", "setfit", "llamafactory", "swift", "pl")
"""Packages whose trainers are transformers' Trainer, or are known by their own names."""
BASE_QUANTIZATIONS = ("BitsAndBytesConfig",)


@dataclass(slots=True)
class Training:
    """The calls that make one training, each None where the program has none.

    Attributes:
        loader: the call that loads the model; model: the model where it is named without one.
        unknown_model: why the model is not known, "" where it is; handed_over: it comes to the program's function as an
            object, and who loaded it knows how.
        loads: why it is not known in which type the model is loaded, "" where it is.
        built: why it is not known whether it comes with adapters, "" where it is: what else makes or changes it.
        adapter: the LoRA settings; continued: adapters loaded to be trained on.
        handed: what the trainer hands to the model's loading (`model_init_kwargs`).
        prepared: `prepare_model_for_kbit_training`.
        touched: every model object on the way, for what was called on it.
        open_objective: why it is not certain that `objective` is what is trained.
        pictures: the class of the model or of the collator, where it is one for pictures; has_audio: for sound.
        contrast: of a contrastive objective, the fields that its data and loss say; None: not known.
        loop: the plain loop of the program's own that is read as a trainer; None: a library's trainer trains.
    """

    trainer: CallResult | None = None
    arguments: CallResult | None = None
    loader: CallResult | None = None
    model: Value | None = None
    unknown_model: str = ""
    handed_over: bool = False
    loads: str = ""
    built: str = ""
    quantization: Value | None = None
    adapter: Value | None = None
    continued: CallResult | None = None
    handed: Value | None = None
    prepared: CallResult | None = None
    model_calls: list[CallResult] = field(default_factory=list)
    objective: str = "sft"
    open_objective: str = ""
    pictures: str = ""
    has_audio: str = ""
    contrast: dict[str, int | None] = field(default_factory=dict)
    loop: Loop | None = None


def find(program: Program, name: str) -> Training:
    """The training of a program: the first that certainly runs, else the first."""
    certain = [trainer for trainer, maybe in program.trained if not maybe]
    # a verdict on the supervised warm-up of another objective would be none on the program
    others = (trainer for trainer in certain if trainer.name in OTHER_TRAINERS or trainer.name in PLANNED)
    trained = [*others, *certain, *(trainer for trainer, _ in program.trained)]
    training = Training(trainer=trained[0] if trained else _last(program, is_trainer))
    if training.trainer is None and not any(map(holds_arguments, program.calls)):
        training.loop = plain_loop(program.steps, program.calls)
        training.trainer = training.loop.trainer if training.loop is not None else None
    if training.trainer is not None:
        _recognise(training, training.trainer, name)
    if training.arguments is None:
        training.arguments = _last(
            program, lambda call: call.name.endswith(("TrainingArguments", "SFTConfig", *CONFIGS.values()))
        )
    if training.trainer is not None:
        trainer = training.trainer
        if not program.trained and measures(program, trainer):
            raise NotATraining(f"{name} evaluates and trains nothing", hint="give the script that trains")
        if training.objective == "embedding":
            training.open_objective = embedding.open_loss(trainer, name)
            training.contrast = embedding.contrast(trainer, program.calls)
        by_name = trainer.name in PLANNED or trainer.name.endswith(HF_TRAINERS)
        plainly = trainer.package in ("", "transformers") if trainer.name == "Trainer" else by_name
        if training.arguments is None and not plainly:  # none that takes transformers' defaults for them
            trainer_name = f"{trainer.package}'s " * (trainer.package not in ("", "trainer")) + trainer.name
            raise NotPlanned(
                f"{name} trains with a trainer of its own ({trainer_name}), which cannot be read without running it",
                hint=RUN_IT,
            )
    elif training.arguments is None:
        _refuse(program, name)
    elif not program.module.names.get("OBJECTIVE") and training.arguments.name in CONFIGS.values():
        objective = next(key for key, config in CONFIGS.items() if training.arguments.name == config)
        raise _other_objective(name, objective, "a trainer of its own")
    given = training.arguments
    if given is not None and not given.more and program.do_train_decides and not program.trained:
        do_train = given.argument("do_train")
        if not isinstance(do_train, Constant) or do_train.data is False:
            why = f"{name} does not train with these words: do_train is not among them"
            raise NotATraining(why, hint="add --do_train")
    for key in ON_HOST:
        value = given.argument(key) if given is not None else None
        if isinstance(value, Constant) and value.data is True:
            raise NotATraining(f"{name} trains on the CPU ({key})", hint="give a training on a GPU")
    _follow_model(training, training.trainer.argument("model", 0) if training.trainer is not None else None, name)
    if training.loader is None and training.model is None:
        _only_loader(training, program)
    _find_loading(training, program, name)
    # The adapter's settings, where the way of the model did not show them.
    peft = training.trainer.argument("peft_config") if training.trainer is not None else None
    if training.adapter is None and peft is not None and not (isinstance(peft, Constant) and peft.data is None):
        training.adapter = peft
    if training.adapter is None:
        added = _last(program, lambda call: call.name == "add_adapter")
        training.adapter = added.argument("adapter_config", 0) if added is not None else None
    if training.adapter is None and training.trainer is None:
        training.adapter = _last(program, lambda call: call.name == "LoraConfig")
    return training


def _recognise(training: Training, trainer: CallResult, name: str) -> None:
    training.objective = PLANNED.get(trainer.name, "sft")
    if trainer.package == "trl" and trainer.name not in (*PLANNED, *OTHER_TRAINERS, *HF_TRAINERS):
        raise refusal(f"{name} trains with TRL's {trainer.name}", RUN_IT)
    if trainer.name not in PLANNED:
        objective, called = of_other_trainer((trainer.name, trainer.owner))
        if objective:
            raise _other_objective(name, objective, called)
        objective, evidence = loops.other_objective(trainer, {**OTHER_TRAINERS, **PLANNED})
        if objective:
            raise _other_objective(name, objective, f"{trainer.owner}, which has {evidence}")
        if loops.forwards(trainer) > 1:
            training.open_objective = f"{trainer.where}: {trainer.owner} asks its model more than once a step"
    if trainer.owner in LIGHTNING or "max_epochs" in trainer.keywords:
        raise NotPlanned(
            f"{name} trains with Lightning's Trainer, whose steps cannot be read without running it", hint=RUN_IT
        )
    if trainer.package not in (*TRAINERS_OF, "", trainer.name) and trainer.name not in HF_TRAINERS[2:]:
        foreign = f"{trainer.package}'s {trainer.name}"  # code that is not known
        if trainer.name in PLANNED or trainer.name in OTHER_TRAINERS:
            raise refusal(f"{name} trains with {foreign}", RUN_IT)
        training.open_objective = f"{trainer.where}: what a step of {foreign} is"
    given = trainer.argument("args", 2 if trainer.name in BEHIND_REFERENCE else 1)
    if isinstance(given, CallResult):
        training.arguments = given
    elif isinstance(given, Unknown):
        training.arguments = CallResult("TrainingArguments", where=trainer.where, more=given.reason)


def _find_loading(training: Training, program: Program, name: str) -> None:
    if training.loader is not None:
        plainly = training.trainer is not None and training.trainer.name == "Trainer"  # transformers' own
        if training.objective == "sft" and "SequenceClassification" in training.loader.owner and plainly:
            training.objective = "classification"
        if training.objective not in ("reward", "classification", "embedding"):
            classes = [
                training.loader.owner,
                *(str(plain(training.loader.keywords.get(key))) for key in ("auto_model", "model_class")),
            ]
            objective, owner = of_model(classes)
            if objective == VISION:
                training.pictures = owner
            elif owner in WITH_AUDIO and training.objective == "sft":
                training.has_audio = owner
            elif objective:
                raise _other_objective(name, objective, owner)
            for made in program.calls:
                if made.name.endswith("VisionDataCollator"):
                    training.pictures = training.pictures or made.name
                if plain(made.keywords.get("finetune_audio_layers")) is True:
                    raise _other_objective(name, "audio", "finetune_audio_layers")
                if (made.package, made.name) == ("datasets", "Audio") and not training.has_audio:
                    raise _other_objective(name, "audio", "datasets.Audio")
        given = training.loader.argument("quantization_config")
        training.quantization = None if isinstance(given, Constant) and given.data is None else given
    elif training.trainer is not None:
        calls = (training.trainer, training.arguments)  # older TRL took them on the trainer itself
        given_to = (call.argument("model_init_kwargs") for call in calls if call is not None)
        training.handed = next((kwargs for kwargs in given_to if kwargs is not None), None)
        inner = training.handed.entries.get("quantization_config") if isinstance(training.handed, DictValue) else None
        open_ = training.handed if isinstance(training.handed, Unknown) else None
        training.quantization = training.trainer.argument("quantization_config") or inner or open_


def measures(program: Program, trainer: CallResult | None) -> bool:
    """Whether the program itself calls a trainer's evaluation."""
    called = {
        call.name
        for call in program.calls
        if isinstance(call.receiver, CallResult) and trainer_of(call.receiver) is trainer
    }
    return bool(called & {"evaluate", "predict"})


ON_HOST = ("use_cpu", "no_cuda")
"""Arguments that keep a training off the GPU."""


def _last(program: Program, wanted: Callable[[CallResult], bool]) -> CallResult | None:
    return next((call for call in reversed(program.calls) if wanted(call)), None)


def _refuse(program: Program, name: str) -> None:
    called = {call.name for call in program.calls}
    loads = "from_pretrained" in called and called & {"backward", "step"}
    engine = any((call.package, call.name) == ("deepspeed", "initialize") for call in program.calls)
    custom_loop = name in program.differentiates or (program.differentiates and _TRAINS.search(name.lower()))
    if loads or engine or custom_loop or {"backward", "zero_grad"} <= called:
        raise OwnLoop(
            f"{name} trains in a loop of its own, which cannot be read without running it",
            hint=f"{RUN_IT}; plan estimate answers for a setup that you name",
        )
    trains = (call for call in program.calls if "train" in call.called and call.name != "from_pretrained")
    unknown = next((call.more for call in trains if call.more), "")
    if unknown:
        raise Undetermined(f"{name} trains with a trainer that is not known ({unknown})", hint=RUN_IT)
    if foreign := _hands_over(program):
        raise NotPlanned(
            f"{name} hands its training over to {foreign}, which stands in another package",
            hint=f"give the config or the launch that it reads; {RUN_IT}",
        )
    imports = {
        value.path.partition(".")[0] for value in program.module.names.values() if isinstance(value, ImportedName)
    }
    if runner := next((title for package, title in OTHER_ENGINES.items() if package in imports), ""):
        raise NotPlanned(f"{name} is a config of {runner}: not planned", hint="plan estimate takes a setup you name")
    other = next((title for package, title in OTHER_FRAMEWORKS.items() if package in imports), "")
    if other and (called & {"train", "fit", "grad", "value_and_grad"} or _TRAINS.search(name.lower())):
        raise NotPlanned(f"{name} trains with {other}: not planned, only PyTorch is", hint="give a program of PyTorch")
    raise NotATraining(
        f"{name} has no call of TrainingArguments or SFTConfig with its settings, and no trainer",
        hint="give the script that trains; settings of a command line go into --args",
    )


OTHER_ENGINES = {"xtuner": "xtuner", "mmengine": "MMEngine"}
"""Packages whose configs are Python -> the engine."""
OTHER_FRAMEWORKS = {
    "jax": "JAX", "flax": "JAX", "tensorflow": "TensorFlow", "keras": "Keras", "paddle": "PaddlePaddle",
    "paddlenlp": "PaddlePaddle", "mindspore": "MindSpore", "mlx": "MLX", "mlx_lm": "MLX",
}  # fmt: skip
"""Packages of other frameworks than PyTorch -> the framework."""
_TRAINS = re.compile(r"(?:^|[._])(?:pre)?(?:train|finetun|fine_tun|sft|dpo|rlhf)(?!_test|ing_args|er_utils)")
"""In the full name of a function: it trains."""


def _hands_over(program: Program) -> str:
    """The function of another package by which a program trains: it is called, or given to what starts a program; ""
    where there is none."""
    called = {call.name for call in program.calls}
    given = {
        argument.path for made in program.calls for argument in made.positional if isinstance(argument, ImportedName)
    }
    foreign = (value.path for value in program.module.names.values() if isinstance(value, ImportedName))
    functions = (path for path in foreign if "." in path and path.rpartition(".")[2][:1].islower())
    ways = (path for path in functions if path in given or path.rpartition(".")[2] in called)
    others = (path for path in ways if path.partition(".")[0] not in (*CHANGES_NOTHING, "sklearn"))
    return next(filter(_TRAINS.search, others), "")


def _other_objective(name: str, objective: str, kind: str) -> NotPlanned:
    return refusal(f"{name} trains with {kind} ({objective})", RUN_IT)


CHANGES_NOTHING = ("accelerate", "copy", "datasets", "deepspeed", "peft", "torch", "transformers", "trl", "unsloth")
"""Packages whose functions give a model back as they got it, or say in a configuration what they make of it."""


def _follow_model(training: Training, model: Value | None, name: str) -> None:
    """From what the trainer got back to what loaded the model."""
    for step in range(16):
        owner = model.receiver if isinstance(model, CallResult) else model  # what a call is made on
        kind = owner.made_by if isinstance(owner, Instance) else None
        if kind is not None and "forward" in kind.attributes:
            raise refusal(f"{name} trains a model of its own ({kind.name})", RUN_IT)
        if isinstance(model, Constant) and isinstance(model.data, str) and model.data:
            training.model = model
            last = training.model_calls[-1] if step else None
            training.loads = f"{last.where}: how {last.name}() loads the model" if last is not None else ""
            return
        if isinstance(model, Unknown):
            training.unknown_model = training.built = model.reason
            training.handed_over = isinstance(model, Argument) and model.name.endswith("model")
            return
        if not isinstance(model, CallResult):
            last = training.model_calls[-1] if step else None
            if model is not None and last is not None:
                training.unknown_model = training.built = f"{last.where}: what {last.name or 'a call'}() makes"
            return
        training.model_calls.append(model)
        if model.name == "from_config" or model.name[:1].isupper():  # built, not loaded
            objective, kind_of = of_model((model.owner, model.name))
            if objective not in ("", "embedding") and training.objective != "reward":
                raise _other_objective(name, objective, kind_of)
        if model.name == "SentenceTransformer":
            training.loader = embedding.loader_of(model)
            return
        if model.name == "from_pretrained" and not model.owner.startswith(("Peft", "AutoPeft")):
            training.loader = model
            return
        configs = ("LoraConfig", *(row.config for row in ADAPTERS.values()))
        handed = [value for value in (*model.positional, *model.keywords.values()) if isinstance(value, CallResult)]
        if model.receiver is None and model.package not in (*CHANGES_NOTHING, ""):  # it may put adapters on it
            training.built = training.built or f"{model.where}: what {model.name}() makes of the model"
        if model.name == "from_pretrained":
            training.continued = model
            if model.owner.startswith("AutoPeft"):
                training.unknown_model = f"{model.where}: {model.owner} takes the model from the adapter's own config"
                return
        elif model.name == "get_peft_model" and training.adapter is None:
            training.adapter = _handed_to_peft(model)
        elif training.adapter is None and (given := [value for value in handed if value.name in configs]):
            training.adapter = given[0]  # a wrapper's own `get_peft_model`
        elif model.name in ("prepare_model_for_kbit_training", "prepare_model_for_int8_training"):
            training.prepared = training.prepared or model
        elif model.name == "from_config":
            training.unknown_model = f"{model.where}: the model is built from a configuration"
            return
        model = model.argument("model", 0) or model.receiver


def _handed_to_peft(call: CallResult) -> Value | None:
    return call if call.owner.startswith("Fast") else call.argument("peft_config", 1)


def contrast(training: Training, arguments: Settings) -> dict[str, int]:
    """What a contrastive program's data and loss say; a cache holds no more than the batch."""
    fields = {name: value for name, value in training.contrast.items() if value is not None}
    if "cached_seqs" in fields:
        fields["cached_seqs"] = min(fields["cached_seqs"], arguments.integer("per_device_train_batch_size", 8))
    elif "cached_seqs" in training.contrast:
        arguments.missing["cached_seqs"] = "mini_batch_size of its cached loss is not known"
    return fields


def _only_loader(training: Training, program: Program) -> None:
    """The only model that the program loads before it trains, where the way to the trainer is not known."""
    trainer = training.trainer
    before = program.calls[: program.calls.index(trainer)] if trainer in program.calls else program.calls
    loaders = [call for call in before if call.name == "from_pretrained" and loads_model(call.owner)]
    named = [plain(named_model(loader)) for loader in loaders]
    names = {"one that is not known" if isinstance(name, Unknown) else str(name) for name in named}
    if len(names) == 1:
        training.loader, training.unknown_model = max(loaders, key=lambda loader: "CausalLM" in loader.owner), ""
        wrapped = [call for call in before if call.name == "get_peft_model"]
        if training.adapter is None and wrapped:
            training.adapter = _handed_to_peft(wrapped[-1])
        prepared = [call for call in program.calls if call.name == "prepare_model_for_kbit_training"]
        training.prepared = training.prepared or (prepared[-1] if prepared else None)
    elif len(names) > 1:
        training.unknown_model = f"{loaders[-1].where}: several models are loaded ({', '.join(sorted(names)[:3])})"


def loads_model(owner: str) -> bool:
    return ("Model" in owner or owner.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel"))) and (
        not owner.startswith(("Peft", "AutoPeft"))
    )


def named_model(loader: CallResult) -> Value | None:
    for key in ("model_name", "pretrained_model_name_or_path"):
        if key in loader.keywords:
            return loader.keywords[key]
    return loader.positional[0] if loader.positional else None


def settings(made: Value | None, name: str, context: FileContext | None = None) -> Settings:
    """The keyword arguments of a call as settings, with what is not known and why."""
    values: dict[str, object] = {}
    unknown: dict[str, str] = {}
    where: dict[str, str] = {}
    more = ""
    entries: dict[str, Value] = {}
    if isinstance(made, CallResult):
        entries, more = {**made.keywords, **made.attributes}, made.more
    elif isinstance(made, DictValue):
        entries, more = made.entries, made.more
    for key, value in entries.items():
        data = plain(value)
        if isinstance(data, Unknown):
            unknown[key] = data.reason
        else:
            values[key] = data
            where[key] = getattr(value, "where", "")
    return Settings(values, name, context, unknown=unknown, more=more, where=where)


def trained_times(program: Program) -> int:
    return len({id(trainer_of(trainer)) for trainer, _ in program.trained})


def quantization(training: Training, arguments: Settings, *, unsloth: bool) -> str:
    """How the base is quantized, by the configuration that it is loaded with.

    `arguments` note what has to be asked for; blocks of them are the settings of the loading and that configuration.
    """
    made, missing = training.quantization, arguments.missing
    loader, given = arguments.blocks["loader"], arguments.blocks["quantization"]
    if isinstance(made, Unknown):
        missing["quantization"] = made.reason
        return "none"
    if made is None and training.loader is None and training.handed_over:
        missing["quantization"] = missing["precision"] = training.unknown_model
    if isinstance(made, CallResult) and made.name not in BASE_QUANTIZATIONS:
        plainly = "Mxfp4" in made.name or plain(made.argument("dequantize")) is True
        if made.name.endswith("Config") and not plainly:
            if bits := bits_of(made):
                return common.counted_bits(loader, bits, made.name)
            missing["quantization"] = f"{made.where}: to how many bits {made.name} quantizes"
        elif not plainly:
            missing["quantization"] = f"{made.where}: what {made.name}() returns"
        return "none"
    source = given if made is not None else loader
    if source.flag("load_in_8bit", False):
        return "int8"
    if not source.flag("load_in_4bit", unsloth):
        return common.stored(loader) if made is None else "none"
    if made is None and unsloth and (loader.flag("full_finetuning", False) or loader.flag("load_in_16bit", False)):
        return "none"
    double = True if unsloth else source.flag("bnb_4bit_use_double_quant", False)
    return "nf4-double" if double else "nf4"


BITS = {
    "HqqConfig": 4, "AwqConfig": 4, "HiggsConfig": 4, "AutoRoundConfig": 4, "FPQuantConfig": 4, "QuantoConfig": 8,
    "EetqConfig": 8, "AqlmConfig": 2, "VptqConfig": 2, "BitNetQuantConfig": 2,
}  # fmt: skip
"""transformers' quantizing classes -> bits of a weight where nothing says them.

Source: transformers 5.23 `utils/quantization_config.py`.
"""
_IN_NAME = re.compile(r"(?:int|float|fp)(\d+)", re.IGNORECASE)


BITS_FIRST = ("HqqConfig", "AwqConfig", "GPTQConfig", "AutoRoundConfig", "HiggsConfig")
"""Quantizing configurations whose first argument is the weights' bits; torchao's is a group's size."""


def bits_of(made: CallResult) -> int:
    """Bits of a weight under a quantizing configuration, by its own words (the weights' stand behind the activations':
    `Int8DynamicActivationInt4WeightConfig`); 0: nothing says."""
    for key in ("bits", "nbits", "w_bit", "bit_width"):
        if isinstance(bits := plain(made.argument(key, 0 if made.name in BITS_FIRST else -1)), int):
            return bits
    words = [made.name]
    for key, value in [*(("", value) for value in made.positional), *made.keywords.items()]:
        if isinstance(value, CallResult) and (bits := bits_of(value)):
            return bits
        if any(word in key for word in ("activation", "scale", "compute")):
            continue
        if isinstance(value, ImportedName):
            words.append(value.name)
        elif isinstance(value, Constant) and isinstance(value.data, str):
            words.append(value.data)
    named = [match for word in words for match in _IN_NAME.findall(word)]
    return int(named[-1]) if named else BITS.get(made.name, 0)


def shows_pictures(training: Training, model: ModelSpec | None) -> str:
    """What says that samples show pictures, or sound: a class for those alone, or the class that a model of them has;
    "" where text may be all."""
    owner = training.loader.owner if training.loader is not None else ""
    multimodal = model is not None and not MODALITIES.isdisjoint(model.config)
    return training.pictures or (owner if multimodal and owner.endswith("ForConditionalGeneration") else "")


def heard(training: Training, arguments: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    """The setup's fields of a model that hears; none of another.

    Args:
        given: the fields that are known; what `arguments` miss loses what is settled here.
    """
    model = arguments.model
    if not training.has_audio:
        return {}
    if model is not None and model.front_end is None:
        raise refusal(f"{model.model_id} trains with {training.has_audio} (speech)", RUN_IT)
    tokens = int(given["seq_len_tokens"])
    positions = model.max_position_embeddings if model is not None else None
    if arguments.missing.pop("seq_len_tokens", "") or (positions is not None and tokens > positions):
        tokens = TEXT_TOKENS
        arguments.assume(f"texts are taken to be {tokens} tokens long: only the data says it (--set seq_len=N)")
    if arguments.flag("predict_with_generate", False):
        arguments.approximate("evaluation that generates is counted as forwards")
    models = [*training.model_calls, *([training.loader] if training.loader is not None else [])]
    frozen = given["method"] == "full" and any("freeze_encoder" in call.called for call in models)
    return {"seq_len_tokens": tokens, "frozen_encoder": frozen, "loss": "full", "kernels": "eager"}
