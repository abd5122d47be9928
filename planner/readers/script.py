"""Python training programs as setups: scripts and notebooks, read up to the trainer that trains. Nothing is executed.

The program is followed by `planner.readers.program`; what it hands to the trainer is read here, with the libraries' own
defaults for what it leaves out. A setting that only running it would tell is `Missing`, never a default.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.choices.adapters import Adapter
from planner.choices.objectives import OBJECTIVES, Objective
from planner.errors import ConfigError, NotPlanned
from planner.inputs import reason
from planner.models.spec import ModelSpec
from planner.models.targets import scaling_targets
from planner.readers import common, hf, training, versions
from planner.readers.fields import adapter_kind, said
from planner.readers.objectives import CONFIGS
from planner.readers.program import Known, Made, Program, Unknown, own_steps, plain, run
from planner.readers.program.embedding import PAIRS
from planner.readers.program.reading import LENGTH_NAMES
from planner.readers.program.source import Source, imported, of_script
from planner.readers.rollouts import rollout_fields
from planner.readers.sharding import Sharding, loaded, parallel_of
from planner.readers.training import Training
from planner.readers.trl import loss_of, sharded
from planner.readers.types import Missing, ReadConfig
from planner.readers.values import Settings
from planner.tools import ASKED, FIELD_OF, TOOLS
from planner.tools.unsloth import own_kernels

FORMAT = "hf-script"
UNSLOTH = "unsloth-script"
UNSLOTH_WHOLE = "embed_tokens"
ARGUMENTS = ("TrainingArguments", "SFTConfig", "Seq2SeqTrainingArguments", "UnslothTrainingArguments")


def read(
    text: str,
    name: str,
    model: ModelSpec | None = None,
    *,
    sharding: Sharding | None = None,
    source: Source | None = None,
) -> ReadConfig:
    """The setup of a training program; `source` is its text where it does not stand in a .py file.

    Raises:
        ConfigError: not Python, or nothing in it that trains as is planned.
    """
    outside = sharding or Sharding()
    source = source or of_script(text)
    try:
        pinned = {"trl", "transformers"} & {*dict(source.pins), *outside.versions}
        program = run(source.text, name, replace(outside.of_program(), newest=not pinned), source.label)
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise ConfigError(
            f"{name} is not Python that can be read: {reason(error)}",
            hint="give a script that Python itself accepts",
        ) from error
    return _Script(program, training.find(program, name), source, name, model, outside).config()


def _has_trainer(aim: Objective) -> bool:
    """Whether TRL has a trainer of the objective, beside SFTTrainer."""
    return not aim.supervised and "trl" in aim.targets


class _Script:
    """One program's training on its way to a setup."""

    def __init__(
        self,
        program: Program,
        found: Training,
        source: Source,
        name: str,
        model: ModelSpec | None,
        sharding: Sharding,
    ) -> None:
        self.program, self.found, self.source, self.name = program, found, source, name
        self.model, self.sharding = model, sharding
        self.missing: dict[str, str] = {}
        owner = found.loader.owner if found.loader is not None else ""
        self.unsloth = owner.startswith("Fast")
        kind = found.trainer.name if found.trainer is not None else ""
        self.aim = OBJECTIVES[found.objective]
        self.trl = self.unsloth or kind == "SFTTrainer" or self._made("SFTConfig") or _has_trainer(self.aim)
        self.arguments = training.settings(found.arguments, name)
        self._trainer_extras()
        self.loader = training.settings(found.loader, name)
        if found.handed is not None:
            self.loader = training.settings(found.handed, name)
        self.bnb = training.settings(found.quantization, name)
        self.lora = training.settings(found.adapter, name)
        named = {**dict(source.pins), **sharding.versions}
        trainer = found.trainer.keywords if found.trainer is not None else {}
        imports = imported(source.text, "trl") if self.trl else ()
        bound = versions.taking(
            trainer if self.trl else (), self._configured(), imports, preferences=not self.aim.supervised
        )
        self.defaults = versions.trl(named.get("trl"), bound)
        used = {*self.arguments.values, *self.arguments.unknown}
        older = {"evaluation_strategy"} if "tokenizer" in trainer and not self.trl else set()
        self.transformers = versions.transformers(
            named.get("transformers"), used | older, self.defaults if self.trl and not self.unsloth else None
        )
        if self.trl and not self.unsloth and self.defaults.assumed:
            self.arguments.assume(
                f"no TRL version named: the defaults of {self.defaults.said} (--assume trl==VERSION for another)"
            )

    def _contrast(self) -> dict[str, int]:
        """What a contrastive program's data and loss say; a cache holds no more than the batch."""
        found = {name: value for name, value in self.found.contrast.items() if value is not None}
        if "cached_seqs" in found:
            found["cached_seqs"] = min(found["cached_seqs"], self.arguments.integer("per_device_train_batch_size", 8))
        elif "cached_seqs" in self.found.contrast:
            self.missing["cached_seqs"] = "mini_batch_size of its cached loss is not known"
        return found

    def _configured(self) -> tuple[str, ...]:
        """The settings of the configuration class that TRL has for the objective."""
        made = self.found.arguments
        own = made is not None and made.name == CONFIGS.get(self.aim.name, "SFTConfig")
        return (*self.arguments.values, *self.arguments.unknown) if own else ()

    def _made(self, name: str) -> bool:
        return any(one.name == name for one in self.program.made)

    def _trainer_extras(self) -> None:
        """Old TRL took some settings on the trainer itself."""
        outer = training.settings(self.found.trainer, self.name)
        for key in ("max_seq_length", "packing"):
            if outer.values.get(key) is not None:
                self.arguments.values = {**self.arguments.values, key: outer.values[key]}
                self.arguments.where[key] = outer.where.get(key, "")
            elif key in outer.unknown:
                self.arguments.unknown[key] = outer.unknown[key]

    def config(self) -> ReadConfig:
        """The answer."""
        name, arguments = self.name, self.arguments
        fields = said(arguments, TOOLS[FORMAT], "micro_batch_seqs", "accumulation_steps", "compile")
        adapted = self._adapted()
        quantization = self._quantization()
        fields["method"] = "full" if not adapted else "lora" if quantization == "none" else "qlora"
        fields["quantization"] = quantization if adapted else "none"
        if not adapted and (line := training.freezes_parameters(self.source.text)):
            self.missing.setdefault("method", f"{name}:{line}: some parameters are frozen one by one")
        fields["precision"] = self._precision(fields["method"])
        fields["kbit_fp32_cast"] = fields["method"] == "qlora" and (
            self.found.prepared is not None or self._trainer_prepares(quantization)
        )
        if adapted:
            fields |= self._lora(fields["method"])
        else:
            fields["lora_rank"] = 0
        fields["checkpointing"] = self._checkpointing()
        fields["activation_offload"] = self._offloads(fields["checkpointing"])
        fields["seq_len_tokens"] = self._length()
        constants = self.program.module.names
        packed = plain(constants.get("PACKING")) is True
        fields["packing"] = arguments.flag("packing", packed) if self.trl else packed
        fields["optimizer"] = common.optimizer(arguments, "optim", self.transformers.optimizer)
        fields["attention"] = "sdpa" if self.unsloth else self._attention()
        liger = arguments.flag("use_liger_kernel", False)
        if self.unsloth:
            fields |= {"loss": "chunked", "kernels": own_kernels(fields)}
        elif self.trl and self.defaults.loss(None, liger=True) == "chunked":
            fields |= common.liger(arguments, liger, "chunked", self.model)
        else:
            loss = self.defaults.loss(arguments.optional_text("loss_type"), liger=False) if self.trl else "full"
            fields |= common.liger(arguments, liger, "full" if liger else loss, self.model)
        if _has_trainer(self.aim):
            fields |= self._objective(fields, liger)
        elif not self.aim.supervised:
            fields |= {"objective": self.aim.name, "loss": self.aim.losses[0]}
        if self.found.open_objective:
            self.missing["objective"] = self.found.open_objective
        fields["stack"] = "trl" if self.trl else "hf"  # Unsloth's is known by the format
        if self.aim.whole_batch:
            arguments.assume(PAIRS)
            fields["stack"] = "sentence-transformers"
            fields |= self._contrast()
        fields |= self._spread(constants)
        if adapted:
            fields = common.adapter(arguments, fields, self._kind(), self.model)
        self._note_what_is_unusual()
        parts = (arguments, self.loader, self.bnb, self.lora)
        alone = ("parallel",) if self.sharding.num_gpus == 1 else ()
        for part in parts:
            for key, why in part.undetermined.items():
                if FIELD_OF.get(key) in ASKED and FIELD_OF[key] not in ("model", *alone):
                    self.missing.setdefault(FIELD_OF[key], why)
        if self.found.loads:
            self.missing.setdefault("precision", self.found.loads)
        if "precision" in self.missing and fields["precision"] == "fp32":
            fields["precision"] = "bf16-mixed"  # stands in until it is said: not every kernel computes in fp32
        model_id = self._model_id()
        dataset = plain(constants.get("DATASET"))
        return ReadConfig(
            format=UNSLOTH if self.unsloth else FORMAT,
            path=name,
            model_id=model_id,
            setup=common.build(arguments, fields),
            missing=tuple(Missing(field=field, reason=reason) for field, reason in self.missing.items()),
            origins=self._origins(parts),
            assumptions=tuple(dict.fromkeys(one for part in parts for one in part.assumptions)),
            approximations=tuple(dict.fromkeys(one for part in parts for one in part.approximations)),
            dataset=dataset if isinstance(dataset, str) else None,
            keys=self.transformers.keys,
            only=self.transformers.only,
            values=arguments.values,
            adapted_tables=self.lora.tables,
            older=self.transformers.older,
            reentrant=self._reentrant(),
            call_line=_line(self.found.arguments),
        )

    def _attention(self) -> str:
        loader = self.loader
        if not loader.has("attn_implementation") and loader.flag("use_flash_attention_2", False):
            return "flash-attention-2"  # transformers 4's older switch
        return common.attention(loader, "attn_implementation", self.model)

    def _objective(self, base: Mapping[str, Any], liger: bool) -> dict[str, Any]:
        """What another objective than supervised training makes of the fields.

        Raises:
            NotPlanned: of a TRL whose trainer makes another step.
        """
        arguments, trainer, method = self.arguments, self.found.trainer, base["method"]
        if self.unsloth or not self._own_arguments():
            why = "Unsloth" if self.unsloth else "an older TRL (TrainingArguments)"
            raise NotPlanned(
                f"{self.name} trains {self.aim.name} with {why}, whose step is another: not modelled",
                hint=training.RUN_IT,
            )
        fields: dict[str, Any] = {"objective": self.aim.name, "packing": False}
        fields |= common.liger(arguments, liger, loss_of(self.aim, self.defaults, self.name), self.model)
        if method != "full" and arguments.flag("disable_dropout", not self.aim.rolls_out):
            fields["lora_dropout"] = 0.0
        if self.aim.rolls_out:
            fields |= rollout_fields(arguments, base)
            self.missing |= arguments.missing
        wrapped = trainer is not None and trainer.argument("peft_config") is None
        asked = self.aim.reference or ("rollout" in fields and fields["rollout"].reference)
        if method != "full" and wrapped and asked:
            arguments.approximate("a model that comes with adapters gets a frozen copy of them as its reference")
        if method == "qlora" and self.aim.name == "orpo":
            arguments.approximate("TRL's ORPO prepares a quantized base by itself (norms in fp32)")
        if self.aim.reference and arguments.flag("precompute_ref_log_probs", False):
            fields["precomputed_reference"] = True
        return fields

    def _origins(self, parts: tuple[Settings, ...]) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for part in parts:
            for key, where in part.where.items():
                if key in FIELD_OF and where:
                    found.setdefault(FIELD_OF[key], where)
        return found

    def _model_id(self) -> str | None:
        named = self.found.model
        if named is None and self.found.loader is not None:
            named = training.named_model(self.found.loader)
        if isinstance(named, Known) and isinstance(named.data, str) and named.data:
            return named.data
        data = plain(named)
        if isinstance(data, Unknown):
            reason = data.reason
        elif isinstance(named, Known):
            reason = f"{named.where}: nothing is named until the program runs"
        else:
            reason = self.found.unknown_model or f"{self.name}: no call that loads a model was found"
        self.missing["model"] = reason
        return None

    def _adapted(self) -> bool:
        adapter = self.found.adapter
        if isinstance(adapter, Unknown):
            self.missing["method"] = adapter.reason
            return True
        if self.found.continued is not None and adapter is None:
            self.missing["lora_rank"] = f"{self.found.continued.where}: adapters that stand in another file are trained"
            return True
        if isinstance(adapter, Made) and not adapter.owner.startswith("Fast"):
            if adapter.name == "from_pretrained" and adapter.owner in ("LoraConfig", "PeftConfig"):
                self.missing["lora_rank"] = f"{adapter.where}: the adapter's settings stand in another file"
                self.missing["lora_targets"] = self.missing["lora_rank"]
            elif adapter.name == "get_peft_config":
                self.missing["method"] = f"{adapter.where}: the adapter's settings come from the command line"
            elif adapter.name.endswith("Config") and adapter.name not in ("LoraConfig", "PeftConfig", *common.CONFIGS):
                raise NotPlanned(
                    f"{self.name}: adapters of {adapter.name} are not planned, only LoRA's",
                    hint=training.RUN_IT,
                )
            elif adapter.name != "LoraConfig" and adapter.name not in common.CONFIGS:
                self.missing["method"] = f"{adapter.where}: what {adapter.name}() returns"
        return adapter is not None

    def _quantization(self) -> str:
        given = self.found.quantization
        if isinstance(given, Unknown):
            self.missing["quantization"] = given.reason
            return "none"
        if given is None and self._handed_over():
            self.missing["quantization"] = self.missing["precision"] = self.found.unknown_model
        if isinstance(given, Made) and given.name not in training.BASE_QUANTIZATIONS:
            if given.name.endswith("Config") and "Mxfp4" not in given.name:
                self.loader.approximate(f"{given.name} is counted as 4-bit NF4")
                return "nf4"
            if not given.name.endswith("Config"):
                self.missing["quantization"] = f"{given.where}: what {given.name}() returns"
            return "none"
        source = self.bnb if given is not None else self.loader
        if source.flag("load_in_8bit", False):
            return "int8"
        if not source.flag("load_in_4bit", self.unsloth):
            return "none"
        if (
            given is None
            and self.unsloth
            and (self.loader.flag("full_finetuning", False) or self.loader.flag("load_in_16bit", False))
        ):
            return "none"
        double = True if self.unsloth else source.flag("bnb_4bit_use_double_quant", False)
        return "nf4-double" if double else "nf4"

    def _handed_over(self) -> bool:
        """Whether the model comes to the program's function as an object: who loaded it knows how."""
        return (
            self.found.loader is None and re.search(r"argument \w*model is not", self.found.unknown_model) is not None
        )

    def _precision(self, method: str) -> str:
        own_default = self.unsloth or (self._own_arguments() and self.defaults.bf16)
        autocast = hf.autocast(self.arguments, bf16_default=self.trl and own_default)
        loader = self.loader
        key = loader.first("dtype", "torch_dtype")
        if self.unsloth:
            if method == "full":
                if loader.flag("float32_mixed_precision", False):
                    return "bf16-mixed"
                return "fp32" if loader.raw(key) == "float32" else "bf16-pure"
            return f"{autocast or 'bf16'}-autocast"
        cast = next((word for word in ("half", "bfloat16", "float") if self._called(word)), "")
        if cast:
            weights = {"half": "fp16", "bfloat16": "bf16", "float": "fp32"}[cast]
            return common.precision(self.arguments, weights, autocast, method)
        default = self.transformers.dtype
        if default == "float32" and (isinstance(self.found.quantization, Made) or method == "qlora"):
            default = "float16"  # transformers 4's bitsandbytes quantizer
        if not loader.has(key):
            taken = "the checkpoint's own, taken to be bf16" if default == "auto" else f"{default} ({self._why()})"
            loader.assume(f"no dtype on from_pretrained: {taken}")
        weights = hf.weight_dtype(loader, key, default, self.model)
        return common.precision(self.arguments, weights, autocast, method)

    def _why(self) -> str:
        """How it is known that an older transformers is used."""
        return f"{self.transformers.why}: transformers 4's default"

    def _trainer_prepares(self, quantization: str) -> bool:
        """Whether TRL prepares the quantized base by itself."""
        peft = self.found.trainer is not None and self.found.trainer.argument("peft_config") is not None
        four_bit = quantization.startswith("nf4")
        bf16 = hf.autocast(self.arguments, bf16_default=self._own_arguments() and self.defaults.bf16) == "bf16"
        return self.trl and not self.unsloth and peft and self.defaults.prepares_kbit(four_bit=four_bit, bf16=bf16)

    def _adapter_row(self) -> Adapter | None:
        """The kind that a configuration class of its own stands for; None for LoRA's and where none is made."""
        made = self.found.adapter
        return common.CONFIGS.get(made.name) if isinstance(made, Made) else None

    def _kind(self) -> str:
        """The kind of adapter: by peft's configuration class, or by LoraConfig's switches."""
        row = self._adapter_row()
        return row.name if row is not None else adapter_kind(self.lora, FORMAT)

    def _size(self) -> int:
        """The adapter's size by its own name."""
        row, lora = self._adapter_row(), self.lora
        if row is None:
            return lora.integer("r", 16 if self.unsloth else 8, at_least=1)
        if row.form == "rows":
            indices = lora.raw("token_indices")
            return len(indices) if isinstance(indices, list) and indices else 1
        keys = {"shared": "r", "rotations": "oft_block_size", "prompt": "num_virtual_tokens"}
        keys |= {"prefix": "num_virtual_tokens", "low-rank": "init_r"}
        return lora.integer(keys[row.form], row.usual_size, at_least=1) if row.size else 0

    def _lora(self, method: str) -> dict[str, Any]:
        lora, unsloth = self.lora, self.unsloth
        names = lora.text_or_names("target_modules")
        if len(names) == 1 and re.fullmatch(r"[\w.]+(\s*,\s*[\w.]+)+", names[0]):
            names = tuple(part.strip() for part in names[0].split(","))
        saved = common.modules_to_save(lora, "modules_to_save", self.arguments)
        if unsloth and UNSLOTH_WHOLE in names:
            names = tuple(name for name in names if name != UNSLOTH_WHOLE)
            saved = tuple(dict.fromkeys((*saved, UNSLOTH_WHOLE)))
            lora.assume(f"{UNSLOTH_WHOLE} as a target: Unsloth trains it whole; counted")
        fields: dict[str, Any] = {
            "lora_rank": self._size(),
            "modules_to_save": saved,
            "lora_dropout": lora.real("lora_dropout", 0.0),
            "lora_targets": common.targets(names or (("all-linear",) if unsloth else ()), self.model, lora),
        }
        row = self._adapter_row()
        if row is not None and not row.adapts_matrices:
            fields["lora_targets"] = "all-linear"  # it adapts none: nothing is said
        elif row is not None and row.form == "scales" and not names and self.model is not None:
            fields["lora_targets"] = scaling_targets(self.model)
            lora.assume(
                "target_modules absent: keys, values and the MLP's last matrix (peft may scale queries for keys)"
            )
        stated = plain(self.program.module.names.get("ADAPTER_DTYPE"))
        if stated in common.DTYPES:
            fields["adapter_dtype"] = common.DTYPES[stated]
        elif unsloth or (method == "qlora" and not self.trl):
            fields["adapter_dtype"] = "fp32"
        return fields

    def _own_arguments(self) -> bool:
        """Whether SFTConfig's own defaults hold: TrainingArguments handed to SFTTrainer become an SFTConfig with every
        value written out, what is off there included.

        Source: TRL 1.16 `SFTTrainer.__init__`, `args.to_dict()`.
        """
        own = CONFIGS.get(self.found.objective, "SFTConfig")
        return self.found.arguments is None or self.found.arguments.name == own

    def _called(self, word: str) -> bool:
        return any(word in model.called for model in self.found.touched)

    def _offloads(self, checkpointing: int) -> bool:
        if not self.unsloth:
            return hf.offloads(self.arguments, checkpointing)
        key = "use_gradient_checkpointing"
        return str((self.lora if self.lora.has(key) else self.loader).raw(key, "unsloth")) == "unsloth"

    def _checkpointing(self) -> int:
        arguments, prepared = self.arguments, self.found.prepared
        if self.unsloth:
            key = "use_gradient_checkpointing"
            settings = self.lora if self.lora.has(key) else self.loader
            value = settings.raw(key, "unsloth")
            return int(bool(value) and value not in ("none", "false"))
        own_default = self._own_arguments() and self.defaults.checkpointing
        old = self.trl and self.defaults.version < versions.TRL_PREPARES_WITH_CHECKPOINTING_UNTIL
        given = self.found.trainer.argument("peft_config") if self.found.trainer is not None else None
        if old and self._quantization() != "none" and given is not None:
            arguments.assume(f"{self.defaults.said} switches gradient checkpointing on for a quantized base")
            return 1
        on = hf.checkpointing(arguments, self.trl and own_default)
        if on:
            return on
        inner = training.settings(prepared, self.name)
        if prepared is not None and inner.flag("use_gradient_checkpointing", True):
            arguments.assume("prepare_model_for_kbit_training switches gradient checkpointing on")
            return 1
        return int(self._called("gradient_checkpointing_enable") and not self._called("gradient_checkpointing_disable"))

    def _reentrant(self) -> bool:
        """Whether checkpointing is of the older form where the arguments do not say it."""
        if self.unsloth or not versions.reentrant(self.transformers, self.defaults if self.trl else None):
            return False
        calls = [model.called.get("gradient_checkpointing_enable") for model in self.found.touched]
        for call in (self.found.prepared, *calls):
            told = training.settings(call, self.name).raw("gradient_checkpointing_kwargs")
            if isinstance(told, dict) and "use_reentrant" in told and not self.arguments.has("gradient_checkpointing"):
                return told["use_reentrant"] is True
        return True

    def _length(self) -> int:
        if self.aim.rolls_out:
            return 0  # `rollout_fields` says it
        for settings in (self.arguments, self.loader):
            key = settings.first("max_length", "max_seq_length")
            if settings.has(key):
                return settings.integer(key, 1024, at_least=1)
        program = self.program
        prepared = self.arguments.raw("dataset_kwargs", {})
        untouched = isinstance(prepared, dict) and prepared.get("skip_prepare_dataset") is True
        if self.trl and not self.unsloth and not self.arguments.more and not untouched:
            longest = max((value.data for value in program.cuts), default=1024)
            self.arguments.assume(f"max_length absent: {min(1024, longest)} tokens (TRL's default is 1024)")
            return min(1024, int(longest))
        here = [value for value in program.lengths if value.where.startswith(f"{self.name}:")]
        named = here or program.lengths
        cut = list(training.lengths(program))
        if not cut and (why := training.open_length(program)):
            self.missing["seq_len_tokens"] = why
            return 1024
        for found in (cut, program.cuts, self._named_lengths(), named):
            distinct = sorted({int(value.data) for value in found})
            if len(distinct) > 1 and found is named:
                places = ", ".join(dict.fromkeys(f"{value.data} ({value.where})" for value in found))
                self.missing["seq_len_tokens"] = f"{self.name} names several lengths: {places[:200]}"
                return distinct[-1]
            whole = [value for value in named if int(value.data) > distinct[-1]] if len(distinct) > 1 else []
            if whole:  # prompt and answer are cut one by one, and their sum has a name
                found, distinct = whole, [max(int(value.data) for value in whole)]
            if distinct:
                longest = max(found, key=lambda value: int(value.data))
                self.arguments.where.setdefault("max_length", longest.where)
                return distinct[-1]
        self.missing["seq_len_tokens"] = self.arguments.more or (
            f"{self.name}: the length of the sequences is decided while the data is prepared"
        )
        return 1024

    def _named_lengths(self) -> list[Known]:
        """Values of the main module's names for a length."""
        names = ((name.lower(), value) for name, value in self.program.module.names.items())
        return [
            value
            for name, value in names
            if name in LENGTH_NAMES and isinstance(value, Known) and type(value.data) is int and value.data >= 16
        ]

    def _spread(self, constants: Mapping[str, Any]) -> dict[str, Any]:
        num_gpus, loader = self.sharding.num_gpus, self.loader
        if loader.raw("device_map") == "auto" and num_gpus > 1:
            return {"num_gpus": num_gpus, "parallel": "device-map"}
        if plain(constants.get("PARALLEL")) == "dp" and num_gpus > 1:
            return {"num_gpus": num_gpus, "parallel": "dp"}
        block = self.found.loader.argument("distributed_config") if self.found.loader is not None else None
        if isinstance(block, Made):
            inner = training.settings(block, self.name)
            loader.values = {**loader.values, "distributed_config": inner.values}
        spread = loaded(self.arguments, loader, num_gpus) or sharded(self.arguments, self.sharding)
        return parallel_of(self.arguments, spread, num_gpus)

    def _note_what_is_unusual(self) -> None:
        lora, arguments = self.lora, self.arguments
        if lora.raw("layers_to_transform") is not None:
            arguments.approximate("adapters on some layers (layers_to_transform) are counted on all of them")
        if lora.has("target_parameters") and lora.raw("target_parameters"):
            arguments.approximate("adapters on stacked expert parameters are not counted")
        if self.found.trainer is not None and self.aim.supervised and own_steps.forwards(self.found.trainer) == 1:
            arguments.approximate(f"the loss of {self.found.trainer.owner} is its own: counted as the stack's")
        if self.lora.values and (line := training.unfreezes_parameters(self.source.text)):
            arguments.approximate(f"parameters that line {line} switches to training by their names are not counted")
        if training.trained_times(self.program) > 1:
            arguments.assume("the program trains more than once: the first training is read")
        for source in dict.fromkeys(self.program.sources):
            arguments.assume(f"{source} beside it was read as well")


def _line(made: Made | None) -> int:
    tail = made.where.rpartition(":")[2] if made is not None else ""
    return int(tail) if tail.isdigit() else 0
