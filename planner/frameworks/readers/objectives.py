"""What a file trains, however it says so: by the class of a trainer or model, by settings that only one objective has,
by words.

Objectives that are planned are rows of `planner.options.objectives`; the others are named in a refusal.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from planner.core.errors import NotPlanned
from planner.frameworks.readers.program import embedding
from planner.frameworks.readers.shell import TRL_COMMANDS
from planner.frameworks.readers.values import Settings
from planner.options.objectives import OBJECTIVES
from planner.options.rollouts import COMPLETION_TOKENS, VLLM_FRACTION, Rollout

_OF_TRL = {row.trainer: row.name for row in OBJECTIVES.values() if row.trainer}
PLANNED = {**_OF_TRL, embedding.TRAINER: "embedding"}
"""Trainers of other objectives than supervised training that are planned: TRL's, and sentence-transformers'."""
CONFIGS = {objective: f"{trainer.removesuffix('Trainer')}Config" for trainer, objective in _OF_TRL.items()}
"""Objective -> the class of its trainer's arguments."""
BEHIND_REFERENCE = tuple(row.trainer for row in OBJECTIVES.values() if row.reference or row.rolls_out)
"""Trainers whose second place is the reference model's, or the rewards'."""
OTHER_TRAINERS = {
    "OnlineDPOTrainer": "online DPO", "XPOTrainer": "XPO", "NashMDTrainer": "Nash-MD",
    "BCOTrainer": "BCO", "CPOTrainer": "CPO",
    "AsyncGRPOTrainer": "GRPO", "PPOTrainer": "PPO", "GKDTrainer": "distillation (GKD)",
    "GOLDTrainer": "distillation (GOLD)", "MiniLLMTrainer": "distillation (MiniLLM)",
    "DistillationTrainer": "distillation", "PRMTrainer": "reward modelling",
    "SparseEncoderTrainer": "sparse embedding", "CrossEncoderTrainer": "reranking", "SetFitTrainer": "embedding",
    "AdapterTrainer": "adapters of another library", "Seq2SeqAdapterTrainer": "adapters of another library",
}  # fmt: skip
"""Trainers of other objectives, by name: what they hold beside a supervised step is not modelled."""
TRAINER_PARTS = {
    **{
        short: short if short.isupper() else OBJECTIVES[objective].title
        for trainer, objective in _OF_TRL.items()
        for short in (trainer.removesuffix("Trainer"),)
    },
    "PPO": "PPO", "CPO": "CPO", "SimPO": "SimPO", "RLOO": "RLOO", "Distill": "distillation", "GKD": "distillation",
    "SentenceTransformer": "embedding",
    "Pairwise": "reward modelling", "Diffusion": "diffusion", "Flux": "diffusion", "LLaVA": "vision", "VLM": "vision",
    "Embedding": "embedding", "Contrastive": "embedding", "Classification": "classification",
}  # fmt: skip
"""Parts of the names of programs' own trainers -> what they train."""
VISION = "vision"
"""What is trained with a model of text and pictures; what its samples show is asked for."""
MODEL_PARTS = {
    "SequenceClassification": "classification", "TokenClassification": "token classification",
    "QuestionAnswering": "extractive question answering", "MultipleChoice": "multiple choice", "MaskedLM": "masked LM",
    "Vision2Seq": VISION, "ImageTextToText": VISION, "VisionModel": VISION, "MultimodalLM": VISION,
    "Idefics": VISION, "Llava": VISION, "ImageClassification": "image classification", "CTC": "speech",
    "SpeechSeq2Seq": "speech", "Whisper": "speech", "AudioClassification": "speech", "TextToWaveform": "speech",
    "UNet2D": "diffusion", "Transformer2D": "diffusion", "DiffusionPipeline": "diffusion",
    "StableDiffusion": "diffusion", "Segmentation": "segmentation", "ViTMAE": "masked images",
    "ObjectDetection": "object detection", "SentenceTransformer": "embedding", "ValueHead": "reinforcement learning",
    "AudioFlamingo": "speech", "Csm": "speech", "Seq2SeqSpeech": "speech", "Wav2Vec2": "speech",
}  # fmt: skip
"""Parts of model classes' names -> what is trained with them."""
OF_LANGUAGE = ("CausalLM", "Seq2SeqLM", "PreTraining", "TextEncoding")
"""What transformers' classes of language models are for, as their names end."""
WITH_AUDIO = ("WhisperForConditionalGeneration", "AutoModelForSpeechSeq2Seq")
"""Classes of models that make text of clips, some of which are planned."""
MARKS = {
    "simpo": {"simpo_gamma", "gamma_beta_ratio"},
    "kto": {"desirable_weight", "undesirable_weight"},
    "reward": {"center_rewards_coefficient"},
    "dpo": {"ref_model_mixup_alpha", "ld_alpha", "f_divergence_type", "use_weighting", "discopop_tau"},
    "rloo": {"normalize_advantages", "reward_clip_range"},
    "grpo": {"num_generations", "reward_funcs", "num_iterations", "max_completion_length"},
    "distillation": {"teacher_model_name_or_path", "lmbda"},
}
"""Objective -> settings that, where no earlier one's is there, only TRL's configs of it have."""
LOSS_TYPES = {
    "dpo": (
        "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
        "apo_zero", "apo_down", "discopop", "sigmoid_norm",
    ),
    "kto": ("kto", "apo_zero_unpaired"),
}  # fmt: skip
"""Objective -> values of `loss_type` that only TRL's configs of it take."""
PAIRED = {"precompute_ref_log_probs", "precompute_ref_batch_size", "max_prompt_length", "ref_model"}
"""Settings of preference training, of whichever kind."""
NAMED = re.compile(rf"(?:^|[^a-z])({'|'.join(TRL_COMMANDS)})(?:[^a-z]|$)")
PAIRS = ("dpo", "kto", "orpo")
"""Objectives that are read from the settings of programs that are not known."""
OTHER_WORDS = re.compile(
    rf"(?:^|[^a-z])({'|'.join(_OF_TRL.values())}|rm|simpo|cpo|ipo|ppo|rloo|rlhf|"
    r"distill\w*|classif\w*|embedding\w*|rerank\w*|diffusion|sdxl|stt|asr|tts|whisper|vision|vlm)(?:[^a-z]|$)"
)
"""Words that name another objective than supervised training."""
SAYS_OBJECTIVE = ("method", "task", "objective", "stage", "loss_type", "algorithm", "trainer", "trainer_type", "mode")
"""Settings that name what is trained."""
OF_DIFFUSION = {
    "resolution", "prediction_type", "noise_offset", "snr_gamma", "center_crop", "num_validation_images",
}  # fmt: skip
"""Settings of the training of image models; one alone may stand in others."""
OF_ROLLOUTS = {
    "orchestrator", "rollout", "rollouts", "rollouts_per_example", "rollout_batch_size", "num_rollouts", "reward",
    "rewards", "reward_model", "reward_fn", "reward_weights", "adv_estimator", "advantage", "gae_lambda", "kl_coef",
    "kl_coeff", "kl_loss_coef", "init_kl_coef", "ppo_epochs", "clip_range", "cliprange", "critic", "verifier",
}  # fmt: skip
"""Settings and blocks of reinforcement learning, by whichever program."""
OF_EMBEDDING = {"pooling_mode", "simcse_dropout", "mlm_probability", "mask_token_type"}
"""Settings of the training of embeddings, and of masked words."""
TRACE = "plan trace runs other programs on a phantom GPU"
PROMPT_TOKENS = 512
"""What is counted where nothing says how long prompts are: the default of TRL's former `max_prompt_length`."""

UNCOUNTED = ("cast_lm_head_to_fp32", "use_transformers_continuous_batching", "cache_implementation")
"""TRL's settings of online objectives that are not counted."""


def refusal(subject: str, hint: str = TRACE) -> NotPlanned:
    """What an objective that is not modelled is answered with."""
    return NotPlanned(f"{subject}: not planned, its memory is not modelled", hint=hint)


def of_other_trainer(classes: Iterable[str]) -> tuple[str, str]:
    """(what it trains, the class that says so) of trainers' classes that are not planned; "" twice where none says."""
    for name in classes:
        parts = (trained for part, trained in TRAINER_PARTS.items() if part in name and name.endswith("Trainer"))
        if objective := OTHER_TRAINERS.get(name) or next(parts, ""):
            return objective, name
    return "", ""


def of_model(classes: Iterable[str]) -> tuple[str, str]:
    """(what is trained with them, the class that says so) of models' classes; "" twice: a language model's."""
    matches = ((trained, name) for part, trained in MODEL_PARTS.items() for name in classes if part in name)
    automatic = [name for name in classes if name.startswith("AutoModelFor") and not name.endswith(OF_LANGUAGE)]
    others = (
        (re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name.removeprefix("AutoModelFor")).lower(), name) for name in automatic
    )
    return next(matches, None) or next(others, ("", ""))


def of_settings(values: Mapping[str, Any], name: str, command: str = "") -> tuple[str, bool]:
    """The objective of TRL's settings, and whether it is certain: by the command that they are for, by settings that
    only one has, else by the file's name; "sft" where nothing says another.

    Args:
        command: the word behind `trl` where a launch names one.
    """
    if command in TRL_COMMANDS:
        return command, True
    given = values.get("loss_type")
    losses = given if isinstance(given, list) else [given]
    by_loss = (objective for objective, types in LOSS_TYPES.items() if any(loss in types for loss in losses))
    if implied := next(by_loss, ""):
        return implied, True
    if implied := next((objective for objective, marks in MARKS.items() if marks & set(values)), ""):
        return implied, True
    if len(named := set(NAMED.findall(name.lower()))) == 1:
        return named.pop(), True
    paired = bool(PAIRED & set(values)) or {"beta", "max_length"} <= set(values)
    return "sft", not paired


def of_own(values: Mapping[str, Any], name: str, texts: Iterable[str]) -> tuple[str, bool]:
    """The objective of a program's own settings, and whether it is certain.

    Args:
        texts: the file's name and what its settings say of the objective, in lower case.
    """
    if len(OF_DIFFUSION & set(values)) > 1:
        raise refusal(f"{name}: settings of diffusion")
    if OF_EMBEDDING & set(values):
        raise refusal(f"{name}: settings of embedding")
    objective, certain = of_settings(values, name)
    if objective not in ("sft", *PAIRS):
        raise refusal(f"{name}: preferences or rewards in a program's own settings")
    named = dict.fromkeys(match[1] for match in map(OTHER_WORDS.search, texts) if match)
    if objective == "sft" and named and next(iter(named)) in PAIRS:
        objective, certain = next(iter(named)), True
    if other := next((word for word in named if word != objective), ""):
        raise refusal(f"{name}: {other} by its name")
    return objective, certain


def of_trainer(
    settings: Settings, fields: Mapping[str, Any], objective: str, *, version: str = "", counted: str = ""
) -> dict[str, Any]:
    """The fields of a step of whole logits that a tool runs with TRL's trainer of an objective, or with one made after
    it: unpacked, and where it scores answers without dropout.

    Args:
        version: TRL's, whose parts of whole logits are counted; counted: how that differs from the tool's, for people.
    """
    if counted:
        settings.approximate(counted)
    dropped = fields["method"] != "full" and not OBJECTIVES[objective].rolls_out and objective != "classification"
    return {
        "objective": objective, "loss": "full", "packing": False, "trl_version": version,
        **({"lora_dropout": 0.0} if dropped else {}),
    }  # fmt: skip


def estimated(name: str, what: str, tool: str, objective: str = "") -> NotPlanned:
    """A refusal of what a tool trains with a step of its own; the way on where another tool's is planned.

    Args:
        objective: the row of OBJECTIVES that is nearest.
    """
    row = OBJECTIVES.get(objective)
    runs = "" if row is None else "TRL runs it" if row.trainer else "another library runs it"
    hint = f"plan estimate MODEL --objective {objective} plans it as {runs}" if runs else TRACE
    return NotPlanned(f"{name} trains {what} with a step of {tool}'s own: not planned", hint=hint)


def refuse(settings: Settings, fields: Mapping[str, Any], version: tuple[int, ...]) -> None:
    """Adds why TRL's trainer of an objective ends before its first step, the fields being all that the file says.

    Source: trl 1.16 trainer/dpo_trainer.py, kto_trainer.py, grpo_trainer.py `__init__`, grpo_config.py.
    """
    objective, rollout = OBJECTIVES[fields["objective"]], fields.get("rollout")
    switches = {key: settings.values.get(key) is not None and settings.flag(key, False) for key in _SWITCHES}
    sync, adapted = switches["sync_ref_model"], fields["method"] != "full"
    without = "no reference (beta 0)" if rollout is not None and not rollout.reference else ""
    without = without or "precomputed ones" * bool(fields.get("precomputed_reference"))
    without = without or "adapters, whose reference is the base" * adapted
    pairs_neighbours = objective.name == "kto" and settings.values.get("loss_type") != "apo_zero_unpaired"
    several = settings.has("generation_batch_size") and settings.has("steps_per_generation")
    rows = (
        (sync and bool(without) and not objective.supervised, f"sync_ref_model has nothing to follow with {without}"),
        (
            pairs_neighbours and fields["micro_batch_seqs"] < objective.least_samples,
            "the KL term of KTO pairs the samples of a micro-batch, which has one",
        ),
        (objective.rolls_out and several, "generation_batch_size and steps_per_generation are given both"),
        (
            objective.rolls_out and switches["auto_find_batch_size"] and version >= (1, 9),
            "auto_find_batch_size would cut groups of completions",  # huggingface/trl@44d7ef9b
        ),
    )
    settings.refusals += [f"TRL stops: {reason}" for holds, reason in rows if holds]


_SWITCHES = ("sync_ref_model", "auto_find_batch_size")


def rollout_fields(
    settings: Settings, fields: Mapping[str, Any], objective: str, version: tuple[int, ...]
) -> dict[str, Any]:
    """The rollout of an objective and the length of a sequence, which is asked for where nothing says it.

    Args:
        version: TRL's.

    Source: trl 1.16 trainer/grpo_config.py, trainer/rloo_config.py; the tags of older ones.
    """
    usual_group, usual_beta = (2, 0.05) if objective == "rloo" else (8, 0.0)
    if objective == "grpo" and version < (0, 19):
        usual_beta = 0.04
    completion = settings.integer("max_completion_length", COMPLETION_TOKENS, at_least=1)
    micro, steps = fields["micro_batch_seqs"] * settings.outside.num_gpus, fields["accumulation_steps"]
    batch = settings.integer("generation_batch_size", 0) or micro * settings.integer("steps_per_generation", 0)
    if version < (0, 17):
        batch = micro  # each generates by itself
    if settings.integer("num_iterations", 1) > 1:
        settings.approximate("each generation trains several times (num_iterations): its speed is counted as if once")
    for key in UNCOUNTED:
        if settings.raw(key) not in (None, False, ""):
            settings.approximate(f"{key} is not counted")
    if judge := settings.raw("reward_model_name_or_path"):
        settings.ask("beside", f": the reward model {judge}")
    generator = "transformers"
    if settings.flag("use_vllm", False):
        sleeps = settings.flag("vllm_enable_sleep_mode", False)
        usual = "colocate" if version >= (1, 0) else "server"  # before 0.18 on another GPU in any case
        server = settings.text("vllm_mode", usual) == "server"
        generator = "vllm-server" if server else "vllm-sleep" if sleeps else "vllm"
    rollout = Rollout(
        num_generations=settings.integer("num_generations", usual_group),
        completion_tokens=completion,
        generation_batch_seqs=0 if batch == micro * steps else batch,
        generator=generator,
        vllm_fraction=settings.real("vllm_gpu_memory_utilization", VLLM_FRACTION),
        reference=settings.real("beta", usual_beta) != 0.0,
    )
    cut = settings.values.get("max_prompt_length", PROMPT_TOKENS) is not None
    if version < (0, 28) and cut and "max_prompt_length" not in settings.unknown:
        prompt = settings.integer("max_prompt_length", PROMPT_TOKENS, at_least=1)
        return {"seq_len_tokens": prompt + completion, "rollout": rollout}
    length = settings.integer("vllm_max_model_length", 0)
    if length <= completion:
        length = completion + PROMPT_TOKENS
        taken = f"({PROMPT_TOKENS} tokens taken, then {completion} generated)"
        settings.ask("seq_len_tokens", f" does not say how long prompts are {taken}")
    return {"seq_len_tokens": length, "rollout": rollout}
