"""Which settings each tool knows, and what its defaults were in other versions: published files run with the version
that they were written for.

Where no version is named, what a program hands over says which it cannot be: it would stop with a `TypeError`.

Source: the tags of huggingface/trl v0.9.3 to v1.9.0 (`sft_config.py`, `base_config.py`, `sft_trainer.py`), the packages
0.4.7 to 1.0 on PyPI and the installed 1.16; transformers 5.23 (`TrainingArguments`), read in November 2026.
"""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from planner.core.records import dataclass
from planner.options.objectives import OBJECTIVES

NEWEST_TRL = (1, 16)
NEWEST_TRANSFORMERS = (5, 23)
TRL_ONLY_CHUNKED_SINCE = (1, 15)
"""From here on "nll" never makes the full logits, nor has Liger's switch a loss of its own (1.14.2 has both): all goes
through kernels of TRL's own (`TrainSetup.checkpointed_loss`)."""
TRL_OF_OBJECTIVES_SINCE = {
    "dpo": (0, 9, 6),
    "kto": (0, 12),
    "grpo": (0, 15),
    "reward": (0, 29),
    "orpo": (0, 29),
    "rloo": (1, 15),
}
"""Objective -> the oldest TRL whose step is modelled (`TrainSetup.log_probs`; GRPO's batch counted prompts before)."""
TRL_CUTS_PAIRS = {"dpo": (((0, 12), 512), ((0, 13), 0)), "kto": (((0, 14), 512),)}
"""Objective -> (the version before which, to how many tokens it cuts that is not told; 0: to none); later 1,024."""
TRL_TRAINER_KEYS = {
    **dict.fromkeys(
        ("dataset_text_field", "packing", "max_seq_length", "dataset_num_proc", "dataset_batch_size", "eval_packing",
         "neftune_noise_alpha", "model_init_kwargs", "dataset_kwargs", "num_of_sequences", "chars_per_token"),
        "0.12",
    ),
    "tokenizer": "0.15",
}  # fmt: skip
"""Keywords of `SFTTrainer` -> the newest TRL that takes them there."""
TRL_CONFIG_KEYS = {"max_seq_length": "0.19", "use_liger": "0.17", "evaluation_strategy": "0.11"}
"""Fields of `SFTConfig` -> the newest TRL that has them."""
TRL_CONFIG_SINCE = {
    "max_length": (0, 16), "padding_free": (0, 16), "completion_only_loss": (0, 17), "activation_offloading": (0, 18),
    "assistant_only_loss": (0, 19), "packing_strategy": (0, 19), "loss_type": (0, 24),
}  # fmt: skip
"""Fields of `SFTConfig` that are read -> the first TRL that has them (the wheels of 0.12 to 1.3)."""
TRL_PREFERENCE_TRAINER_KEYS = {
    **dict.fromkeys(("beta", "loss_type", "max_length", "max_prompt_length", "label_pad_token_id"), "0.12"),
    "tokenizer": "0.15",
}
"""Keywords of the trainers of preferences -> the newest TRL that takes them there."""
TRL_PREFERENCE_CONFIG_KEYS = {
    **dict.fromkeys(
        ("max_prompt_length", "max_target_length", "label_pad_token_id", "rpo_alpha", "use_logits_to_keep",
         "reference_free", "force_use_ref_model", "model_adapter_name", "ref_adapter_name"),
        "0.28",
    ),
    "use_liger_loss": "0.27",
    "evaluation_strategy": "0.11",
}  # fmt: skip
"""Fields of their configurations -> the newest TRL that has them (DPOConfig; KTO's and GRPO's lost most before)."""
TRL_NAMES = {"DataCollatorForCompletionOnlyLM": "0.19", "ConstantLengthDataset": "0.19", "setup_chat_format": "0.25"}
"""What programs import from `trl` -> the newest TRL that has it (the wheels of 0.18.2 to 1.12)."""
NOT_IN_TRANSFORMERS_5 = frozenset({
    "evaluation_strategy", "tokenizer", "overwrite_output_dir", "group_by_length", "save_safetensors", "logging_dir",
    "no_cuda", "per_gpu_train_batch_size", "warmup_ratio", "push_to_hub_model_id", "fp16_backend",
    "half_precision_backend", "tpu_num_cores", "use_mps_device", "dispatch_batches", "split_batches", "torchdynamo",
    "ray_scope", "jit_mode_eval", "fp16_opt_level", "past_index", "include_inputs_for_metrics", "fsdp_min_num_params",
    "fsdp_transformer_layer_cls_to_wrap", "include_tokens_per_second",
})  # fmt: skip
"""Arguments of `TrainingArguments`, and the Trainer's `tokenizer`, that version 5 does not take any more."""
NEWEST_WITH = {"evaluation_strategy": (4, 45)}
"""Of them those that went earlier -> the newest version that takes them; the others: LAST_OF_4."""
LAST_OF_4 = (4, 57)
SINCE = {"liger_kernel_config": (4, 53), "use_liger_kernel": (4, 45), "gradient_checkpointing_kwargs": (4, 35)}
"""Arguments that `--fix` writes -> the first version that takes them."""


@dataclass(frozen=True, kw_only=True)
class TransformersDefaults:
    """Defaults of one transformers version; `why` says how it is known that it is not the newest, "" where it is."""

    version: tuple[int, ...]
    why: str = ""

    @property
    def older(self) -> str:
        """How it is known that a version before 5 runs; "" where it does not."""
        return self.why if self.version < (5,) else ""

    @property
    def lacks(self) -> tuple[str, ...]:
        """Arguments that this version does not take, of those that `--fix` writes."""
        return tuple(name for name, since in SINCE.items() if self.version < since)

    @property
    def keys(self) -> dict[str, str]:
        """Field of a setup -> what the arguments call it, where that is not today's name (5.22 does not know it)."""
        return {"checkpointing": "gradient_checkpointing"} if self.version < (5, 23) else {}

    @property
    def only(self) -> dict[str, tuple[int, ...]]:
        """Field of a setup -> the values that this version can run: from 5.17 on some layers alone are checkpointed."""
        return {"checkpointing": (0, 1)} if self.version < (5, 17) else {}

    @property
    def optimizer(self) -> str:
        """The default of `optim` (with torch 2.8 and newer)."""
        return "adamw_torch_fused" if self.version >= (4, 54) else "adamw_torch"


def reentrant(of_transformers: TransformersDefaults, trl: "TrlDefaults | None") -> bool:
    """Whether checkpointing is of the older form unless told.

    Source: transformers 4.57 `gradient_checkpointing_enable` (`use_reentrant` True; 5.23: False); TRL 0.27's
    configurations say False themselves (0.26's do not).
    """
    return bool(of_transformers.older) and (trl is None or trl.version < (0, 27))


def transformers(version: str | None, arguments: Iterable[str], trl: "TrlDefaults | None") -> TransformersDefaults:
    """The defaults of the named version, else of the newest that takes these arguments and goes with this TRL."""
    if version is not None:
        return TransformersDefaults(version=parsed(version), why=f"transformers {version}")
    bounds = [(NEWEST_TRANSFORMERS, "")]
    if trl is not None and trl.version < (0, 13):
        bounds.append(((4, 46), f"{trl.label} needs transformers 4.46 or older"))
    elif trl is not None and trl.version < (0, 26):  # transformers 5.0 is younger
        bounds.append((LAST_OF_4, f"{trl.label} goes with transformers 4"))
    for name in sorted(NOT_IN_TRANSFORMERS_5 & set(arguments)):
        newest = NEWEST_WITH.get(name, LAST_OF_4)
        since = "5" if newest == LAST_OF_4 else f"{newest[0]}.{newest[1] + 1}"
        bounds.append((newest, f"{name} is not in transformers {since}"))
    limit, why = min(bounds, key=lambda bound: bound[0])
    return TransformersDefaults(version=limit, why=why)


def taking(
    trainer: Iterable[str], config: Iterable[str], imports: Iterable[str] = (), *, objective: str = "sft"
) -> tuple[str, str] | None:
    """(version, why): the newest TRL that takes these keywords of its trainer and that one's configuration, and has
    these names; None: any.

    Args:
        objective: what the trainer is of, supervised training or another.
    """
    supervised = OBJECTIVES[objective].supervised
    of_trainer = TRL_TRAINER_KEYS if supervised else TRL_PREFERENCE_TRAINER_KEYS
    of_config = TRL_CONFIG_KEYS if supervised else TRL_PREFERENCE_CONFIG_KEYS
    if objective == "grpo":
        of_config = {**of_config, "max_prompt_length": "0.27"}
    bounds = [(of_trainer[key], f"takes {key} there") for key in trainer if key in of_trainer]
    bounds += [(of_config[key], f"takes {key} there") for key in config if key in of_config]
    bounds += [(TRL_NAMES[name], f"has {name}") for name in imports if name in TRL_NAMES]
    return min(bounds, key=lambda bound: parsed(bound[0]), default=None)


def has(names: Iterable[str], named: Mapping[str, str]) -> bool:
    """Whether TRL, of the version that is named or the newest, has these names."""
    return all(trl(named.get("trl")).version[:2] <= parsed(TRL_NAMES[name]) for name in names if name in TRL_NAMES)


@dataclass(frozen=True, kw_only=True)
class TrlDefaults:
    """Defaults of one TRL version's SFT.

    Attributes:
        label: the version in words; assumed: whether nobody named one, so that the newest is taken.
    """

    version: tuple[int, ...]
    label: str
    assumed: bool

    @property
    def taken(self) -> str:
        """What is said where nobody named a version."""
        return f"no TRL version named: the defaults of {self.label} (--assume trl==VERSION for another)"

    @property
    def checkpointing(self) -> bool:
        """Whether SFTConfig switches gradient checkpointing on."""
        return self.version >= (0, 22)

    @property
    def bf16(self) -> bool:
        """Whether SFTConfig trains under bf16 autocast unless told otherwise."""
        return self.version >= (0, 19)

    @property
    def dtype(self) -> str:
        """The data type in which a trainer loads a model that it is handed by name; "": `from_pretrained`'s own.

        Source: TRL 0.25 to 0.27 `create_model_from_path`.
        """
        return "float32" if self.version >= (0, 27) else "auto" if self.version >= (0, 26) else ""

    def prepares_kbit(self, *, four_bit: bool, bf16: bool) -> bool:
        """Whether the trainer leaves what is not quantized in float32, by peft's `prepare_model_for_kbit_training`
        (0.26 does, 0.28 not): under bf16 it casts a 4-bit base's back."""
        return self.version < (0, 27) and not (four_bit and bf16)

    def loss(self, loss_type: str | None, *, liger: bool, whole: bool = False) -> str:
        """The setup's loss for SFTConfig's `loss_type` (None: not given); `whole`: with a loss of the program's own, or
        smoothed labels, which TRL computes on all logits."""
        if whole:
            return "full"
        if self.version >= TRL_ONLY_CHUNKED_SINCE:
            return "chunked"
        if liger:
            return "liger"
        chunked = loss_type is None and self.version >= (1, 7)
        return "chunked" if chunked or loss_type == "chunked_nll" else "full"

    def program(self, loss: str) -> dict[str, str]:
        """The version, where its step of supervised fine-tuning with this loss is another than today's."""
        older = loss == "chunked" and self.version < TRL_ONLY_CHUNKED_SINCE
        return {"trl_version": ".".join(map(str, self.version))} if older else {}


COMPUTES_OTHERWISE = {"transformers": (4, 54), "bitsandbytes": (0, 43, 2)}
"""Packages -> the first version that computes a step as today's does (`planner.setup.TrainSetup`)."""


def computing(named: Mapping[str, str]) -> dict[str, str]:
    """Fields of a setup for the versions of these packages that compute its step otherwise than today's."""
    versions = {name: parsed(named[name]) for name in COMPUTES_OTHERWISE if name in named}
    older = {name: version for name, version in versions.items() if version < COMPUTES_OTHERWISE[name]}
    return {f"{name}_version": ".".join(map(str, version)) for name, version in older.items() if len(version) > 1}


def trl(version: str | None, bound: tuple[str, str] | None = None) -> TrlDefaults:
    """The defaults of a TRL version ("0.22.2"); where it is None of the newest, or of the one that `taking` allows."""
    if version is None and bound is not None:
        label = f"TRL {bound[0]} (the newest that {bound[1]})"
        return TrlDefaults(version=parsed(bound[0]), label=label, assumed=True)
    if version is None:
        newest = ".".join(map(str, NEWEST_TRL))
        return TrlDefaults(version=NEWEST_TRL, label=f"TRL {newest}", assumed=True)
    return TrlDefaults(version=parsed(version), label=f"TRL {version}", assumed=False)


def parsed(version: str) -> tuple[int, ...]:
    """ "0.22.2" as (0, 22, 2); what follows the numbers is left out."""
    numbers = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers) or NEWEST_TRL


TRAINER_PARAMETERS = (
    "model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class", "compute_loss_func",
    "compute_metrics", "callbacks", "optimizers", "optimizer_cls_and_kwargs", "preprocess_logits_for_metrics",
    "peft_config", "formatting_func", "quantization_config",
)  # fmt: skip
"""What `SFTTrainer` takes. Source: TRL 1.16 `trainer/sft_trainer.py`."""
OF_PREFERENCES = ("DPO", "KTO", "ORPO", "GRPO", "RLOO", "Reward")
PREFERENCE_PARAMETERS = ("ref_model", "reward_funcs", "reward_processing_classes")
"""What trainers of preferences and rewards take beside that."""
MORE_ARGUMENTS = {
    "Seq2SeqTrainingArguments": (
        "predict_with_generate", "generation_max_length", "generation_num_beams", "generation_config",
    ),
    "SentenceTransformerTrainingArguments": ("batch_sampler", "multi_dataset_batch_sampler", "prompts"),
}  # fmt: skip
"""What classes of arguments take beside those of transformers' own."""


def taken_by(name: str, named: Mapping[str, str]) -> frozenset[str]:
    """The names that a class of TRL, transformers or peft takes in these versions (where a package is not named: the
    newest), as far as they are known and read; none of another class."""
    of_trl = trl(named.get("trl"))
    of_transformers = transformers(named.get("transformers"), (), of_trl if "trl" in named else None)

    def still(keys: Mapping[str, str]) -> set[str]:
        return {key for key, newest in keys.items() if of_trl.version[:2] <= parsed(newest)}

    if name == "LoraConfig":
        return frozenset(snapshot()["peft"]["fields"])
    older = {key for key in NOT_IN_TRANSFORMERS_5 if of_transformers.version[:2] <= NEWEST_WITH.get(key, LAST_OF_4)}
    if name in ("Trainer", "Seq2SeqTrainer"):
        return frozenset({*TRAINER_PARAMETERS, "model_init"} | older & {"tokenizer"})
    if name == "SFTTrainer":
        return frozenset({*TRAINER_PARAMETERS} | still(TRL_TRAINER_KEYS))
    if name.removesuffix("Trainer") in OF_PREFERENCES:
        return frozenset({*TRAINER_PARAMETERS, *PREFERENCE_PARAMETERS} | still(TRL_PREFERENCE_TRAINER_KEYS))
    if name.endswith("TrainingArguments"):
        arguments = {*snapshot()["transformers"]["fields"], *MORE_ARGUMENTS.get(name, ())}
        return frozenset(arguments - {*of_transformers.lacks} | older)
    fields = {*snapshot()["trl"]["fields"]} - {*of_transformers.lacks} | older
    if name == "SFTConfig":
        lacks = {key for key, since in TRL_CONFIG_SINCE.items() if of_trl.version < since}
        return frozenset(fields - lacks | still(TRL_CONFIG_KEYS))
    of_preferences = name.removesuffix("Config") in OF_PREFERENCES
    return frozenset(fields | still(TRL_PREFERENCE_CONFIG_KEYS)) if of_preferences else frozenset()


@cache
def snapshot() -> dict[str, Any]:
    """tool -> {"version": ..., "fields": [...]} as committed."""
    data: dict[str, Any] = json.loads(files("planner").joinpath("data/launch_fields.json").read_text("utf-8"))
    return data


def known_settings(tool: str) -> frozenset[str]:
    """Top-level settings a tool's parser knows, legacy names included."""
    entry = snapshot()[tool]
    return frozenset((*entry["fields"], *entry.get("legacy", ())))


def accepted(tool: str) -> frozenset[str]:
    """What its files may hold beside that: the launch's settings, who rewards, other versions', whole blocks'; of tools
    that take transformers' arguments, names that published configs still carry and its parser has dropped (none changes
    memory or speed unless a reader looks at it)."""
    of_transformers = snapshot()["transformers"]["legacy"] if tool in ("trl", "llamafactory") else ()
    return known_settings(tool).union(snapshot()[tool].get("beside", ()), of_transformers)


def of_words(given: Mapping[str, Any], tool: str) -> dict[str, Any]:
    """A tool's settings of the words of its command line: `--no_name` switches off what is on by itself.

    Source: transformers 5.23 `hf_argparser.py` _parse_dataclass_field; Axolotl 0.21 `cli/utils/args.py`.
    """
    accepted_names = accepted(tool if tool in snapshot() else "transformers")
    settings: dict[str, Any] = {}
    for key, value in given.items():
        off = value is True and key not in accepted_names and key.removeprefix("no_") in accepted_names
        settings[key.removeprefix("no_") if off else key] = False if off else value
    return settings


def blocks(tool: str) -> dict[str, list[str]]:
    """Block of a tool's file ("": the file itself) -> its settings."""
    by_block: dict[str, list[str]] = snapshot()[tool]["blocks"]
    return by_block
