"""Python training programs as setups: scripts and notebooks, read up to the trainer that trains. Nothing is executed.

The program is followed by `planner.frameworks.readers.program`; what it hands to the trainer is read here, with the
libraries' own defaults for what it leaves out. A setting that only running it would tell is `Missing`, never a default.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from planner.core.errors import ConfigError, NotATraining, NotPlanned, SetupError
from planner.core.inputs import reason
from planner.frameworks.readers import common, evaluating, open_conditions, program_changes, training, unsloth, versions
from planner.frameworks.readers.common import config, settings_fields
from planner.frameworks.readers.objectives import CONFIGS, refuse, rollout_fields
from planner.frameworks.readers.program.embedding import PAIRS
from planner.frameworks.readers.program.interpret import run
from planner.frameworks.readers.program.reading import LENGTH_NAMES, Program
from planner.frameworks.readers.program.source import Source, environment_word, imported, of_script, tree_of
from planner.frameworks.readers.program.values import CallResult, Constant, Undecided, Unknown, Value, plain
from planner.frameworks.readers.sharding import cut_sequences, device_map, loaded, parallel_of
from planner.frameworks.readers.training import Training, heard, measures, quantization, shows_pictures
from planner.frameworks.readers.trl import loss_of, pairs_length, sharded
from planner.frameworks.readers.types import TRAINED, ReadConfig, UpperBound
from planner.frameworks.readers.values import FileContext, Settings
from planner.frameworks.tools import ASKED, FIELD_OF, TOOLS
from planner.frameworks.tools.transformers import HANDED, SCRIPT
from planner.frameworks.tools.unsloth import OWN_DEFAULTS, converted, own_kernels
from planner.memory.around import DEFAULT_EVAL_SEQS
from planner.models.stored import stored_method
from planner.models.targets import scaling_targets
from planner.options.adapters import Adapter
from planner.options.objectives import OBJECTIVES, Objective
from planner.options.optimizers import OPTIMIZERS as ROWS

FORMAT = "hf-script"
HALVES = ("bf16-pure", "bf16-autocast", "fp16-pure", "fp16-bf16-autocast")
UNSLOTH = "unsloth-script"
UNSLOTH_WHOLE = ("embed_tokens", "lm_head")
OF_PAIRS = ("max_length", "max_prompt_length", "precompute_ref_log_probs")
"""What trainers of preferences took themselves before TRL 0.13."""
OF_UNSLOTHS_CACHE = re.compile(
    r"\A\s*\"\"\"\s*(?:[\w.+-]+\s+){0,6}?__UNSLOTH_VERSIONING__|^class Unsloth(\w+)Config\(\1Config\):", re.MULTILINE
)
"""What Unsloth writes: the versions that it is of, and an argument class around TRL's. Source: unsloth_zoo
`create_new_function`, unsloth `models/rl_replacements.py`."""
ARGUMENTS = (
    *("TrainingArguments", "SFTConfig", "Seq2SeqTrainingArguments", "UnslothTrainingArguments"),
    *CONFIGS.values(),
)


def read(text: str, name: str, context: FileContext, source: Source | None = None) -> ReadConfig:
    """The setup of a training program; `source` is its text where it does not stand in a .py file."""
    if OF_UNSLOTHS_CACHE.search(text):
        raise NotATraining(
            f"{name} is a trainer that Unsloth has written into its cache (unsloth_compiled_cache): it trains nothing",
            hint="give the script that makes the trainer",
        )
    source = source or of_script(text)
    around = replace(context.of_program(), versions={**dict(source.pins), **context.versions})

    def taken(
        decided: Mapping[str, bool], *, trains: bool = False, uncalled: bool = True
    ) -> tuple[Program, ReadConfig]:
        program = run(source.text, name, replace(around, decided=decided, uncalled=uncalled), source.label)
        if trains and not program.trained:
            raise NotATraining(f"{name} trains nothing on this way", hint="")
        return program, _Script(program, training.find(program, name), source, name, context).config()

    try:
        program, reading = taken({})
        workers = plain(program.workers)
        if context.num_gpus == 1 and isinstance(workers, int) and workers > 1:
            return read(text, name, replace(context, num_gpus=workers), source)
    except SetupError as error:  # a ValueError too, of settings that were read
        raise ConfigError(f"{name}: {error.message}", hint=error.hint) from error
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise ConfigError(
            f"{name} is not Python that can be read: {reason(error)}", hint="give a script that Python itself accepts"
        ) from error
    as_it_is = {"trains": bool(program.trained), "uncalled": not program.starts}
    return open_conditions.settle(reading, program.open_conditions, lambda way: taken(way, **as_it_is)[1])


_UNSLOTH_OR_TRL = re.compile(r"^[ \t]*(?:from|import)\s+(unsloth|trl)\b", re.MULTILINE)


def _has_trainer(objective: Objective) -> bool:
    return not objective.supervised and "trl" in objective.targets


class _Script:
    def __init__(
        self, program: Program, training_run: Training, source: Source, name: str, context: FileContext
    ) -> None:
        self.program, self.training_run, self.source, self.name = program, training_run, source, name
        self.model, self.outside = context.model, context
        self.pictures = shows_pictures(training_run, context.model)
        owner = training_run.loader.owner if training_run.loader is not None else ""
        self.unsloth = owner.startswith("Fast")
        kind = training_run.trainer.name if training_run.trainer is not None else ""
        self.objective_spec = OBJECTIVES[training_run.objective]
        self.beside_bytes = 0
        self.trl = (
            self.unsloth
            or kind == "SFTTrainer"
            or any(call.name == "SFTConfig" for call in program.calls)
            or _has_trainer(self.objective_spec)
        )
        self.arguments = self.settings(training_run.arguments)
        if self.unsloth:
            self._take_unsloths_defaults()
        self.missing = self.arguments.missing
        # Old TRL took some settings on the trainer itself.
        outer = self.settings(self.training_run.trainer)
        for key in ("max_seq_length", "packing", *(() if self.objective_spec.supervised else OF_PAIRS)):
            if outer.values.get(key) is not None:
                self.arguments.values = {**self.arguments.values, key: outer.values[key]}
                self.arguments.where[key] = outer.where.get(key, "")
            elif key in outer.unknown:
                self.arguments.unknown[key] = outer.unknown[key]
        self.loader = self.settings(training_run.loader if training_run.handed is None else training_run.handed)
        self.bnb = self.settings(training_run.quantization)
        self.lora = self.settings(training_run.adapter)
        self.arguments.blocks |= {"loader": self.loader, "quantization": self.bnb, "adapter": self.lora}
        self._settle_versions()

    def _take_unsloths_defaults(self) -> None:
        """Puts the values in that Unsloth's copy of TRL's configuration has where nothing says others; a name that a
        program imports from TRL before Unsloth is TRL's own."""
        made, arguments = self.training_run.arguments, self.arguments
        imported_first = _UNSLOTH_OR_TRL.search(self.source.text)
        of_trl = imported_first is not None and imported_first[1] == "trl"
        if arguments.more or (made is not None and (of_trl or not made.name.endswith("Config"))):
            return
        absent = {key: value for key, value in OWN_DEFAULTS.items() if not arguments.has(key)}
        for key, value in absent.items():
            if FIELD_OF.get(key):
                arguments.assume(f"{key} absent: {value}, Unsloth's default")
        arguments.values = {**arguments.values, **absent}

    def settings(self, made: Value | None) -> Settings:
        return training.settings(made, self.name, self.outside)

    def _settle_versions(self) -> None:
        source, training_run = self.source, self.training_run
        named = {**dict(source.pins), **self.outside.versions}
        trainer = training_run.trainer.keywords if training_run.trainer is not None else {}
        imports = imported(source.text, "trl") if self.trl else ()
        used = {*self.arguments.values, *self.arguments.unknown}
        # The settings of the configuration class that TRL has for the objective.
        made = self.training_run.arguments
        trl_config = made is not None and made.name == CONFIGS.get(self.objective_spec.name, "SFTConfig")
        configured = (
            *((*self.arguments.values, *self.arguments.unknown) if trl_config else ()),
            *({"evaluation_strategy"} & used if self.objective_spec.supervised else ()),
        )
        bound = versions.taking(trainer if self.trl else (), configured, imports, objective=self.objective_spec.name)
        self.defaults = versions.trl(named.get("trl"), bound)
        older = {"tokenizer"} if "tokenizer" in trainer and not self.trl else set()
        self.transformers = versions.transformers(
            named.get("transformers"), used | older, self.defaults if self.trl and not self.unsloth else None
        )
        newest = ".".join(map(str, self.transformers.version))  # that takes what the program hands over
        packages = {"transformers": newest, **named} if self.transformers.older else named
        self.computing = {} if self.unsloth else versions.computing(packages)
        for key in training.ON_HOST:
            if key in self.arguments.unknown:
                self.arguments.assume(f"trains on the GPU: {key} is not known ({self.arguments.unknown[key]})")
        if self.trl and not self.unsloth and self.defaults.assumed:
            self.arguments.assume(self.defaults.taken)

    def config(self) -> ReadConfig:
        arguments = self.arguments
        fields = self._fields()
        program_changes.note(
            self.training_run, self.program, self.source.text, loader=self.loader, lora=self.lora, arguments=arguments
        )
        if other := program_changes.second_model(self.program, self.training_run):
            self.missing["beside"] = other
        parts = (arguments, self.loader, self.bnb, self.lora)
        # Notes settings that were asked for and that only running the program would tell.
        alone = ("parallel",) if self.outside.num_gpus == 1 else ()
        for part in parts:
            for key, why in part.undetermined.items():
                if FIELD_OF.get(key) in ASKED and FIELD_OF[key] not in ("model", *alone):
                    self.missing.setdefault(FIELD_OF[key], why)
        if self.training_run.loads:
            self.missing.setdefault("precision", self.training_run.loads)
        if "precision" in self.missing and fields["precision"] == "fp32":
            fields["precision"] = "bf16-mixed"  # stands in until it is said: not every kernel computes in fp32
        model_id = self._model_id()
        label_tokens = self._label_tokens(fields["seq_len_tokens"])
        loop, trainer = self.training_run.loop, self.training_run.trainer
        if loop is None:
            measured = measures(self.program, trainer)
            eval_seqs = evaluating.of_program(trainer, arguments, measured=measured)
            if self.unsloth and self.trl and not measured and eval_seqs == DEFAULT_EVAL_SEQS:
                eval_seqs = min(eval_seqs, fields["micro_batch_seqs"])  # unsloth 2026.10.9 `models/rl.py` eval_changes
        else:
            eval_seqs = loop.eval_seqs or 0
            if loop.eval_seqs is None:
                self.missing["eval_seqs"] = f"{self.name}: the size of what it evaluates at once"
        dataset = plain(self.program.module.names.get("DATASET"))
        origins: dict[str, str] = {}
        for key, where in (entry for part in parts for entry in part.where.items()):
            if key in FIELD_OF and where:
                origins.setdefault(FIELD_OF[key], where)
        made = self.training_run.arguments  # they say the model's type, where they say nothing of its loading yet
        of_trl = isinstance(made, CallResult) and made.name.endswith("Config") and not self.unsloth
        says_type = of_trl and self.training_run.handed is None and self._by_name()
        return config(
            TOOLS[UNSLOTH if self.unsloth else FORMAT],
            arguments,
            fields,
            model_id=model_id,
            origins=origins,
            dataset=dataset if isinstance(dataset, str) else None,
            keys={**self.transformers.keys, **({"precision": HANDED} if says_type else {})},
            only=self.transformers.only,
            older=self.transformers.older,
            lacks=self.transformers.lacks,
            reentrant=self._reentrant(),
            call_line=self.source.line(made.where) if made is not None else 0,
            eval_seqs=eval_seqs,
            label_tokens=label_tokens,
            eval_logits=evaluating.keeps_logits(self.training_run.trainer, arguments),
            beside_bytes=self.beside_bytes,
            sources=tuple(dict.fromkeys(self.program.sources)),
            loaded_again=program_changes.loaded_again(self.program, self.training_run, self.source.text),
        )

    @property
    def two_halves(self) -> bool:
        return self.model is not None and self.model.is_encoder_decoder

    def _fields(self) -> dict[str, Any]:
        arguments = self.arguments
        fields = settings_fields(arguments, TOOLS[FORMAT], "micro_batch_seqs", "accumulation_steps", "compile")
        fields |= self._method() | self.computing
        fields["checkpointing"] = self._checkpointing()
        if self.unsloth:
            offloads = str(self._of_unsloth()) == "unsloth"
            fields["activation_offload"] = offloads and not self.two_halves and not self.pictures
            if offloads and not fields["activation_offload"]:
                arguments.approximate(common.OFFLOADED)
        else:
            fields["activation_offload"] = common.offloads(arguments, fields["checkpointing"])
        fields["seq_len_tokens"] = self._length()
        constants = self.program.module.names
        packed = plain(constants.get("PACKING")) is True
        fields["packing"] = arguments.flag("packing", packed) if self.trl else packed
        compiled = any((call.owner, call.name) == ("torch", "compile") for call in self.training_run.model_calls)
        fields["compile"] = fields.get("compile", False) or compiled
        handed = program_changes.optimizer(self.training_run.trainer)
        if isinstance(handed, Unknown):
            self.missing["optimizer"] = handed.reason
        elif isinstance(handed, Constant):
            arguments.values = {**arguments.values, "optim": handed.data}
            arguments.where["optim"] = handed.where
        fields["optimizer"] = common.optimizer(arguments, "optim", self.transformers.optimizer)
        eight_bit = ROWS[fields["optimizer"]].states.eight_bit and fields["method"] == "full"
        if handed is not None and eight_bit and self.training_run.loop is None:
            arguments.approximate(UpperBound("8-bit states of embeddings are counted in 32 bits", "optimizer"))
        loader, changes = self.loader, (self.training_run, self.source.text, self.program)
        if word := "" if self.unsloth else program_changes.attention(*changes):
            loader.values = {**loader.values, "attn_implementation": word}
        if self.unsloth:
            fields["attention"] = unsloth.attention(loader)
        elif not loader.has("attn_implementation") and loader.flag("use_flash_attention_2", False):
            fields["attention"] = "flash-attention-2"  # transformers 4's older switch
        else:
            fields["attention"] = common.attention(loader, "attn_implementation")
        switch = arguments.first("use_liger_kernel", "use_liger")
        liger = arguments.flag(switch, False) or program_changes.liger(self.training_run, self.program)
        fields |= self._kernels_and_loss(fields, liger=liger)
        if _has_trainer(self.objective_spec):
            fields |= self._objective(fields, liger)
        elif not self.objective_spec.supervised:
            fields |= {"objective": self.objective_spec.name, "loss": self.objective_spec.losses[0]}
        if isinstance(workers := plain(self.program.workers), Unknown):
            self.missing["num_gpus"] = workers.reason
        if self.training_run.open_objective:
            self.missing["objective"] = self.training_run.open_objective
        fields["stack"] = "trl" if self.trl else "hf"  # Unsloth's is known by the format
        if self.training_run.loop is not None:
            fields["stack"] = self.training_run.loop.stack
            if not self.training_run.loop.scales:
                arguments.refusals = [reason for reason in arguments.refusals if reason != common.NOT_UNSCALED]
        if self.objective_spec.whole_batch:
            arguments.assume(PAIRS)
            fields["stack"] = "sentence-transformers"
            fields |= training.contrast(self.training_run, arguments)
        fields |= heard(self.training_run, arguments, fields)
        fields |= self._layout(constants, fields)
        common.pictures(arguments, fields, {self.pictures: True})
        row = self._adapter_row()
        fields = common.adapter(arguments, fields, row.name if row else common.adapter_kind(self.lora, SCRIPT.name))
        return fields | common.adapted_layers(self.lora, "layers_to_transform", fields)

    def _method(self) -> dict[str, Any]:
        adapted = self._adapted()
        base = self._quantization()
        method = "full" if not adapted else "lora" if base == "none" else "qlora"
        if not adapted and self.training_run.built:
            self.missing["method"] = self.missing["lora_rank"] = self.training_run.built
        if not adapted and (line := program_changes.freezes_parameters(self.source.text, self.program)):
            counted = "freezes parameters: counted as if all were trained (plan trace counts what is)"
            bound = UpperBound(f"{self.name}:{line} {counted}", *TRAINED, "activations")
            self.arguments.approximate(bound)
        # whether TRL prepares the quantized base by itself
        peft = self.training_run.trainer is not None and self.training_run.trainer.argument("peft_config") is not None
        bf16 = common.autocast(self.arguments, bf16_default=self._own_arguments() and self.defaults.bf16) == "bf16"
        prepares = self.trl and not self.unsloth and peft
        prepares = prepares and self.defaults.prepares_kbit(four_bit=base in common.FOUR_BIT, bf16=bf16)
        fields: dict[str, Any] = {
            "method": method,
            "quantization": base if adapted else "none",
            "precision": self._precision(method),
            "kbit_fp32_cast": method == "qlora" and (self.training_run.prepared is not None or prepares),
        }
        if not adapted:
            return fields | {"lora_rank": 0}
        fields |= self._adapter_fields(method)
        fields, conversion = converted(fields, self.model if self.unsloth else None)
        if conversion:
            self.arguments.assume(conversion)
        return fields

    def _adapted(self) -> bool:
        """Whether there are adapters, with what of them has to be asked for."""
        adapter, continued = self.training_run.adapter, self.training_run.continued
        if adapter is not None and self.unsloth and self.loader.flag("full_finetuning", False):
            self.arguments.assume("full_finetuning: get_peft_model adds no adapters to such a model")
            return False  # unsloth 2026.8 `models/vision.py`, `models/llama.py` get_peft_model
        if isinstance(adapter, Unknown):
            self.missing["method"] = adapter.reason
            return True
        if continued is not None and adapter is None:
            self.missing["lora_rank"] = f"{continued.where}: adapters that stand in another file are trained"
            return True
        if isinstance(adapter, CallResult) and not adapter.owner.startswith("Fast"):
            if adapter.name == "from_pretrained" and adapter.owner in ("LoraConfig", "PeftConfig"):
                self.missing["lora_rank"] = f"{adapter.where}: the adapter's settings stand in another file"
                self.missing["lora_targets"] = self.missing["lora_rank"]
            elif adapter.name == "get_peft_config":
                self.missing["method"] = f"{adapter.where}: the adapter's settings come from the command line"
            elif adapter.name.endswith("Config") and adapter.name not in ("LoraConfig", "PeftConfig", *common.CONFIGS):
                why = f"{self.name}: adapters of {adapter.name} are not planned, only LoRA's"
                raise NotPlanned(why, hint=training.RUN_IT)
            elif adapter.name != "LoraConfig" and adapter.name not in common.CONFIGS:
                self.missing["method"] = f"{adapter.where}: what {adapter.name}() returns"
        return adapter is not None

    def _adapter_row(self) -> Adapter | None:
        """The kind that a configuration class of its own stands for; None for LoRA's and where none is made."""
        made = self.training_run.adapter
        return common.CONFIGS.get(made.name) if isinstance(made, CallResult) else None

    def _adapter_fields(self, method: str) -> dict[str, Any]:
        """Size, by the adapter's own name for it, targets and types."""
        row, lora = self._adapter_row(), self.lora
        names = lora.text_or_names("target_modules")
        if len(names) == 1 and re.fullmatch(r"[\w.]+(\s*,\s*[\w.]+)+", names[0]):
            names = tuple(part.strip() for part in names[0].split(","))
        saved = common.modules_to_save(lora, "modules_to_save", self.arguments)
        if self.unsloth and (whole := tuple(name for name in UNSLOTH_WHOLE if name in names)):
            names = tuple(name for name in names if name not in whole)
            saved = tuple(dict.fromkeys((*saved, *whole)))
            lora.assume(f"{', '.join(whole)} as targets: Unsloth trains them whole; counted")
        if row is None:
            size = lora.integer("r", 16 if self.unsloth else 8, at_least=1)
        elif row.form == "rows":
            indices = lora.raw("token_indices")
            size = len(indices) if isinstance(indices, list) and indices else 1
        else:
            keys = {"shared": "r", "rotations": "oft_block_size", "prompt": "num_virtual_tokens"}
            keys |= {"prefix": "num_virtual_tokens", "low-rank": "init_r"}
            size = lora.integer(keys[row.form], row.usual_size, at_least=1) if row.size else 0
        dropout = lora.real("lora_dropout", 0.0)
        if row is not None and not row.adapts_matrices:
            targets: str | tuple[str, ...] = "all-linear"  # it adapts none: nothing is said
        else:
            made = self.training_run.adapter
            owner = made.owner if isinstance(made, CallResult) else ""
            pattern = unsloth.pattern(lora, names, owner) if self.unsloth else ""
            names = names or (("all-linear",) if self.unsloth else ())
            targets = (pattern,) if pattern else common.targets(lora, names, by_lora=row is None)
        if row is not None and row.form == "scales" and not names and lora.model is not None:
            targets = scaling_targets(lora.model)
            lora.assume(
                "target_modules absent: keys, values and the MLP's last matrix (peft may scale queries for keys)"
            )
        fields = {"lora_rank": size, "modules_to_save": saved, "lora_dropout": dropout, "lora_targets": targets}
        dtype = plain(self.program.module.names.get("ADAPTER_DTYPE"))
        if dtype in common.DTYPES:
            return {**fields, "adapter_dtype": common.DTYPES[dtype]}
        return fields | ({"adapter_dtype": "fp32"} if self.unsloth or (method == "qlora" and not self.trl) else {})

    def _called(self, word: str) -> bool:
        return any(word in model.called for model in self.training_run.model_calls)

    def _kernels_and_loss(self, fields: Mapping[str, Any], *, liger: bool) -> dict[str, str]:
        arguments = self.arguments
        if self.unsloth:
            if self.pictures:  # as the runs compared took it (`benchmarks.published_objectives`)
                return {"loss": "full", "kernels": "eager"}
            whole = environment_word(self.source.text, self.outside.environment, "UNSLOTH_RETURN_LOGITS") == "1"
            return {
                "loss": "full" if whole or self.two_halves else "chunked",
                "kernels": own_kernels(fields, arguments.model),
            }
        whole = evaluating.given(self.training_run.trainer, "compute_loss_func")
        whole = whole or arguments.real("label_smoothing_factor", 0.0) > 0
        if self.trl and self.defaults.loss(None, liger=True, whole=whole) == "chunked":
            return common.liger(arguments, liger, "chunked")
        kind = arguments.optional_text("loss_type") if self.objective_spec.supervised else None
        loss = self.defaults.loss(kind, liger=False, whole=whole) if self.trl else "full"
        fields = common.liger(arguments, liger, "full" if liger else loss, apart=whole and not self.trl)
        return fields | (self.defaults.program(fields["loss"]) if self.trl else {})

    def _objective(self, base: Mapping[str, Any], liger: bool) -> dict[str, Any]:
        arguments, trainer, method = self.arguments, self.training_run.trainer, base["method"]
        if self.unsloth or not self._own_arguments():
            why = "Unsloth" if self.unsloth else "an older TRL (TrainingArguments)"
            raise NotPlanned(
                f"{self.name} trains {self.objective_spec.name} with {why}, whose step is another: not modelled",
                hint=training.RUN_IT,
            )
        fields: dict[str, Any] = {"objective": self.objective_spec.name, "packing": False}
        of_version = loss_of(self.objective_spec, self.defaults, arguments)
        fields |= of_version | common.liger(arguments, liger, of_version["loss"])
        if method != "full" and arguments.flag("disable_dropout", not self.objective_spec.rolls_out):
            fields["lora_dropout"] = 0.0
        if self.objective_spec.rolls_out:
            fields |= rollout_fields(arguments, base, self.objective_spec.name, self.defaults.version)
        wrapped = trainer is not None and trainer.argument("peft_config") is None
        needs_reference = self.objective_spec.reference or ("rollout" in fields and fields["rollout"].reference)
        if method != "full" and wrapped and needs_reference:
            arguments.approximate("a model that comes with adapters gets a frozen copy of them as its reference")
        if method == "qlora" and self.objective_spec.name == "orpo":
            arguments.approximate("TRL's ORPO prepares a quantized base by itself (norms in fp32)")
        if (
            self.objective_spec.reference
            and "method" not in self.missing
            and (extra_reference := program_changes.reference(self.training_run, method, arguments))
        ):
            self.missing["beside"] = extra_reference
        if self.objective_spec.reference and arguments.flag("precompute_ref_log_probs", False):
            fields["precomputed_reference"] = True
        # read in 1.14; 1.16 takes the policy's type
        anew = self.objective_spec.name == "dpo" and method == "full" and (0, 29) <= self.defaults.version < (1, 15)
        implicit_reference = trainer is None or trainer.argument("ref_model", 1) is None
        if anew and implicit_reference and "precomputed_reference" not in fields and base["precision"] in HALVES:
            more = f"{self.defaults.label} loads DPO's reference in float32: 2 bytes a weight more than its policy"
            if self.model is None:
                arguments.approximate(more)
            else:
                arguments.assume(more)
                self.beside_bytes = 2 * self.model.num_params
        refuse(arguments, {**base, **fields}, self.defaults.version)
        return fields

    def _model_id(self) -> str | None:
        named = self.training_run.model
        if named is None and self.training_run.loader is not None:
            named = training.named_model(self.training_run.loader)
        if isinstance(named, Constant) and isinstance(named.data, str) and named.data:
            other = program_changes.resized(self.training_run, self.source.text, self.name)
            if not other:
                return named.data
            self.missing["model"] = other
            return None
        data = plain(named)
        if isinstance(data, Unknown):
            reason = data.reason
        elif isinstance(named, Constant):
            reason = f"{named.where}: nothing is named until the program runs"
        else:
            reason = self.training_run.unknown_model or f"{self.name}: no call that loads a model was found"
        self.missing["model"] = reason
        return None

    def _quantization(self) -> str:
        return quantization(self.training_run, self.arguments, unsloth=self.unsloth)

    def _precision(self, method: str) -> str:
        own_default = not self.unsloth and self._own_arguments() and self.defaults.bf16
        autocast = common.autocast(self.arguments, bf16_default=self.trl and own_default)
        loader = self.loader
        key = loader.first("dtype", "torch_dtype")
        if self.training_run.prepared is not None and method != "qlora" and self._quantization() == "none":
            loader.assume("prepare_model_for_kbit_training on a model that is not quantized casts all of it to float32")
            return common.precision(self.arguments, "fp32", autocast, method)
        if self.unsloth:
            wide, weights = loader.flag("float32_mixed_precision", False), common.weight_dtype(loader, key, "bfloat16")
            return unsloth.precision(loader, full=method == "full", weights=weights, autocast=autocast, wide=wide)
        if cast := program_changes.cast(self.training_run):
            return common.precision(self.arguments, cast, autocast, method)
        default = self.defaults.dtype if self._by_name() else "float32" if self.transformers.older else "auto"
        if self._by_name():
            if not loader.has(key):
                loader.assume(f"no dtype in model_init_kwargs: {default}, the default of {self.defaults.label}")
            return common.precision(self.arguments, common.weight_dtype(loader, key, default), autocast, method)
        if default == "float32" and (isinstance(self.training_run.quantization, CallResult) or method == "qlora"):
            default = "float16"  # transformers 4's bitsandbytes quantizer
        if not loader.has(key):
            stored = f"the checkpoint's own, {common.stored_dtype(self.model) or 'taken to be bf16'}"
            taken = stored if default == "auto" else f"{default} ({self.transformers.why}: transformers 4's default)"
            loader.assume(f"no dtype on from_pretrained: {taken}")
        weights = common.weight_dtype(loader, key, default)
        return common.precision(self.arguments, weights, autocast, method)

    def _by_name(self) -> bool:
        """Whether TRL's trainer is named the model, and loads it in a type of its own."""
        named = self.training_run.loader is None and self.training_run.model is not None
        return bool(self.trl and named and self.objective_spec.name != "orpo" and self.defaults.dtype)

    def _own_arguments(self) -> bool:
        """Whether SFTConfig's own defaults hold: TrainingArguments handed to SFTTrainer become an SFTConfig with every
        value written out, what is off there included.

        Source: TRL 1.16 `SFTTrainer.__init__`, `args.to_dict()`.
        """
        config_name = CONFIGS.get(self.training_run.objective, "SFTConfig")
        return self.training_run.arguments is None or self.training_run.arguments.name == config_name

    def _of_unsloth(self) -> Any:
        key = "use_gradient_checkpointing"
        return (self.lora if self.lora.has(key) else self.loader).raw(key, "unsloth")

    def _checkpointing(self) -> int:
        arguments = self.arguments
        if self.unsloth:
            return int(bool(self._of_unsloth()) and self._of_unsloth() not in ("none", "false"))
        own_default = self._own_arguments() and self.defaults.checkpointing
        old = self.trl and self.defaults.version < (0, 7, 2)  # 0.7.1 does, 0.7.4 not
        given = self.training_run.trainer.argument("peft_config") if self.training_run.trainer is not None else None
        if old and self._quantization() != "none" and given is not None:
            arguments.assume(f"{self.defaults.label} switches gradient checkpointing on for a quantized base")
            return 1
        default = self.trl and own_default
        switched_on = self._prepares() or self._switched_on()
        if switched_on and not default and not any(map(arguments.has, common.CHECKPOINTING)):
            return 1
        return common.checkpointing(arguments, default) or int(switched_on)

    def _prepares(self) -> bool:
        """Whether peft switches checkpointing on, of bitsandbytes' bases, GPTQ's and others', not of AWQ's.

        Source: peft 0.21 `prepare_model_for_kbit_training`.
        """
        prepared = self.training_run.prepared
        if prepared is None or self._quantization() == "none" or stored_method(self.model) == "awq":
            return False
        switched = self.settings(prepared).flag("use_gradient_checkpointing", True)
        if switched:
            self.arguments.assume("prepare_model_for_kbit_training switches gradient checkpointing on")
        return switched

    def _switched_on(self) -> bool:
        arguments = self.arguments
        enabled = self._called("gradient_checkpointing_enable") and not self._called("gradient_checkpointing_disable")
        if enabled and self.training_run.loop is not None and not self._called("train"):
            arguments.assume(
                "the model is loaded in evaluation mode and never switched to training: nothing is checkpointed"
            )
            return False
        return enabled

    def _reentrant(self) -> bool:
        """The form of checkpointing, where the trainer's arguments do not say it: the trainer's own where that switches
        it on, else the program's. peft hands on no form where it is told none, which is torch's default: reentrant.

        Source: transformers 5.23 `activation_checkpointing_enable`; torch 2.13 `checkpoint` (`use_reentrant` None).
        """
        if self.unsloth or common.fsdp_checkpoints(common.fsdp_block(self.arguments)):
            return False
        default = versions.reentrant(self.transformers, self.defaults if self.trl else None)
        arguments = self.arguments
        by_trainer = self.trl and self._own_arguments() and self.defaults.checkpointing
        if arguments.flag(arguments.first(*common.CHECKPOINTING), by_trainer):
            return default
        calls = [model.called.get("gradient_checkpointing_enable") for model in self.training_run.model_calls]
        for call in (self.training_run.prepared, *calls):
            kwargs = self.settings(call).raw("gradient_checkpointing_kwargs")
            if isinstance(kwargs, dict) and "use_reentrant" in kwargs:
                return kwargs["use_reentrant"] is True
        return default or self._prepares()

    def _length(self) -> int:
        if self.objective_spec.rolls_out:
            return 0  # `rollout_fields` says it
        cuts_itself = self.trl and not self.unsloth
        default = pairs_length(self.objective_spec, self.defaults)
        if cuts_itself and not default and not self.arguments.has("max_length"):
            self.missing["seq_len_tokens"] = f"{self.name}: {self.defaults.label} cuts no pair unless told"
        tokens, why = length_of(
            self.program,
            self.name,
            self.arguments,
            self.loader,
            by_trainer=(default or TRL_LENGTH) if cuts_itself else 0,
            source=self.source,
        )
        if why:
            self.missing["seq_len_tokens"] = why
        return tokens

    def _label_tokens(self, seq_len_tokens: int) -> int:
        """To how many tokens an encoder-decoder's labels are cut, where inputs are cut to more; else 0."""
        if self.model is None or not self.model.is_encoder_decoder or self.model.front_end is not None:
            return 0
        cuts = [int(value.data) for value in cut_lengths(self.program)]
        tokens = min((cut for cut in cuts if 0 < cut < seq_len_tokens), default=0)
        if tokens:
            self.arguments.approximate(
                f"labels are cut to {tokens:,} tokens and counted with the inputs' {seq_len_tokens:,}: memory and time "
                "are upper bounds (plan trace -- python FILE counts both)"
            )
        return tokens

    def _one_process(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """What a notebook, one process, makes of several GPUs.

        Source: transformers 5.23 `TrainingArguments.train_batch_size`, `Trainer._wrap_model`; TRL 1.15 `SFTTrainer`;
        unsloth 2026.10.9 `models/_utils.py` _mark_unsloth_disable_data_parallel.
        """
        arguments, num_gpus = self.arguments, self.outside.num_gpus
        alone: dict[str, Any] = {"num_gpus": 1, "parallel": "none"}
        several = f"a notebook is one process, which sees {num_gpus} GPUs"
        shown = environment_word(self.source.text, self.outside.environment, "CUDA_VISIBLE_DEVICES")
        if self.unsloth or self.training_run.loop is not None or (shown and "," not in shown):
            arguments.assume(f"{several}: it trains on one of them")
            return alone
        if self.trl and self.defaults.version >= (1, 15):  # 1.14.1 does not
            way = "make one visible (CUDA_VISIBLE_DEVICES=0) or use accelerate's notebook_launcher"
            arguments.refusals.append(f"{several}: {self.defaults.label} refuses that; {way}")
            return alone
        if fields["quantization"] == "none":
            arguments.assume(f"{several}: the Trainer wraps the model in nn.DataParallel")
            return {"num_gpus": num_gpus, "parallel": "dp"}
        arguments.assume(f"{several}: the Trainer counts its batch for all, and a quantized model trains it on one")
        return {**alone, "micro_batch_seqs": num_gpus * fields["micro_batch_seqs"]}

    def _layout(self, constants: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        num_gpus, loader = self.outside.num_gpus, self.loader
        if over_layers := device_map(self.arguments, loader):
            return over_layers
        if num_gpus > 1 and self.name.endswith(".ipynb") and "notebook_launcher" not in self.source.text:
            return self._one_process(fields)
        if plain(constants.get("PARALLEL")) == "dp" and num_gpus > 1:
            return {"num_gpus": num_gpus, "parallel": "dp"}
        call = self.training_run.loader
        block = call.argument("distributed_config") if call is not None else None
        if isinstance(block, CallResult):
            loader.values = {**loader.values, "distributed_config": self.settings(block).values}
        layout = loaded(self.arguments, loader) or sharded(self.arguments)
        made = self.training_run.arguments
        mesh = made.argument("parallelism_config") if made is not None else None
        if isinstance(mesh, CallResult) and num_gpus > 1:
            layout = layout | cut_sequences(self.arguments, self.settings(mesh), layout)
        return parallel_of(self.arguments, layout)


TRL_LENGTH = 1024
"""Where TRL's trainer cuts unless told."""


def length_of(
    program: Program, name: str, arguments: Settings, loader: Settings, *, by_trainer: int, source: Source
) -> tuple[int, str]:
    """(tokens, why they are open, "" where they are known).

    Args:
        by_trainer: to how many tokens the trainer cuts by itself, as TRL's does, 0: it does not;
            source: the program's text.
    """
    for settings in (arguments, loader):
        key = settings.first("max_length", "max_seq_length")
        if settings.has(key):
            return settings.integer(key, TRL_LENGTH, at_least=1), ""
    if by_trainer and "max_length" in arguments.values:  # None: since it has that name, TRL cuts nothing then
        return TRL_LENGTH, f"{arguments.where.get('max_length', name)}: max_length None: nothing is cut"
    prepared = arguments.raw("dataset_kwargs", {})
    untouched = isinstance(prepared, dict) and prepared.get("skip_prepare_dataset") is True
    if by_trainer and not arguments.more and not untouched:
        cuts = [*program.cuts, *_prepared(program, name, source)]
        longest = min(by_trainer, max((int(value.data) for value in cuts), default=by_trainer))
        arguments.assume(f"max_length absent: {longest} tokens (TRL's default is {by_trainer})")
        return longest, ""
    cut = list(cut_lengths(program))
    if not cut and (why := open_length(program)):
        return TRL_LENGTH, why
    here = [value for value in program.lengths if value.where.startswith(f"{name}:")]
    return _one_of(cut, program, here or program.lengths, name, arguments)


def _one_of(
    cut: list[Constant], program: Program, named: list[Constant], name: str, arguments: Settings
) -> tuple[int, str]:
    """The length by the surest of what the program shows: what a tokenizer is told, slices, names."""
    for lengths in (cut, program.cuts, _named(program), named):
        distinct = sorted({int(value.data) for value in lengths})
        if len(distinct) > 1 and lengths is named:
            places = ", ".join(dict.fromkeys(f"{value.data} ({value.where})" for value in lengths))
            return distinct[-1], f"{name} names several lengths: {places[:200]}"
        whole = [value for value in named if int(value.data) > distinct[-1]] if len(distinct) > 1 else []
        if whole:  # prompt and answer are cut one by one, and their sum has a name
            lengths, distinct = whole, [max(int(value.data) for value in whole)]
        if distinct:
            longest = max(lengths, key=lambda value: int(value.data))
            arguments.where.setdefault("max_length", longest.where)
            return distinct[-1], ""
    prepared = f"{name}: the length of the sequences is decided while the data is prepared"
    return TRL_LENGTH, arguments.more or open_length(program, Unknown) or prepared


def _named(program: Program) -> list[Constant]:
    names = ((name.lower(), value) for name, value in program.module.names.items())
    return [
        value
        for name, value in names
        if name in LENGTH_NAMES and isinstance(value, Constant) and type(value.data) is int and value.data >= 16
    ]


def _prepared(program: Program, name: str, source: Source) -> Iterator[Constant]:
    """The lengths to which functions of the main file cut what they give back: rows that are tokenized before the
    trainer gets them, which leaves them as they are."""
    label = source.label or str
    lines = {f"{name}:{label(line)}" for line in _returned_lines(source.text)}
    for made in program.calls:
        value = made.keywords.get("max_length")
        cuts = made.where in lines and "truncation" in made.keywords
        if cuts and isinstance(value, Constant) and type(value.data) is int:
            yield value


def _returned_lines(text: str) -> Iterator[int]:
    for function in ast.walk(tree_of(text)):
        if isinstance(function, ast.Lambda) and isinstance(function.body, ast.Call):
            yield function.body.lineno
        if not isinstance(function, ast.FunctionDef):
            continue
        inside = list(ast.walk(function))
        returned = [statement.value for statement in inside if isinstance(statement, ast.Return)]
        names = {value.id for value in returned if isinstance(value, ast.Name)}
        made = [
            statement
            for statement in inside
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
        ]
        values = [*returned, *(statement.value for statement in made if statement.targets[0].id in names)]  # type: ignore[attr-defined]
        yield from (value.lineno for value in values if isinstance(value, ast.Call))


def cut_lengths(program: Program) -> Iterator[Constant]:
    """The lengths to which a tokenizer was told to cut, in order."""
    for made in program.calls:
        value = made.keywords.get("max_length")
        if value is None or made.name in ("generate", "pipeline"):
            continue
        truncates = "truncation" in made.keywords or "padding" in made.keywords
        if truncates and isinstance(value, Constant) and isinstance(value.data, int):
            yield value
    for made in program.calls:
        value = made.keywords.get("model_max_length")
        if made.name == "from_pretrained" and isinstance(value, Constant) and isinstance(value.data, int):
            yield value


def open_length(program: Program, kind: type[Unknown] = Undecided) -> str:
    """Why it is not known to what a tokenizer cuts, where a condition (`kind`: anything of that kind) decides it; ""
    where none does."""
    for made in program.calls:
        value = made.keywords.get("max_length")
        cuts = "truncation" in made.keywords and made.name not in ("generate", "pipeline")
        if cuts and isinstance(value, kind):
            return value.reason
    return ""
