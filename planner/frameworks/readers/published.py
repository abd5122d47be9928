"""The defaults that other projects publish: an example of each with what it leaves to the tool, read as any file is."""

from planner.core.errors import UsageError
from planner.core.records import dataclass

_TRL = "model_name_or_path: {model}\nuse_peft: true\n"
_AXOLOTL = (
    "base_model: {{model}}\nadapter: {}\nlora_r: {}\nlora_alpha: 32\nlora_dropout: 0.05\n"
    "lora_target_modules: [gate_proj, down_proj, up_proj, q_proj, v_proj, k_proj, o_proj]\n"
    "datasets:\n  - path: YOUR_DATASET\n    type: alpaca\nsequence_len: {{seq_len}}\n"
    "sample_packing: true\nmicro_batch_size: 2\ngradient_accumulation_steps: {}\noptimizer: adamw_8bit\n"
    "bf16: auto\ngradient_checkpointing: true\nattn_implementation: flash_attention_2\n"
)
_LLAMAFACTORY = (
    "model_name_or_path: {model}\nstage: sft\ndo_train: true\nfinetuning_type: lora\nlora_rank: 8\nlora_target: all\n"
    "dataset: YOUR_DATASET\ncutoff_len: {seq_len}\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 8\n"
    "bf16: true\n"
)
_UNSLOTH = (
    "model: {model}\ntraining:\n  load_in_4bit: true\n  max_seq_length: {seq_len}\n  batch_size: 2\n"
    "  gradient_accumulation_steps: 4\n  gradient_checkpointing: unsloth\nlora:\n  lora_r: 16\n  lora_dropout: 0\n"
)


@dataclass(frozen=True, kw_only=True)
class Published:
    """One project's published defaults.

    Attributes:
        title: for people; `file`: its name, by which its reader knows it.
        source: repository, commit and files.
    """

    title: str
    file: str
    form: str
    source: str

    def text(self, model: str, seq_len_tokens: int) -> str:
        """The file for a model and a length."""
        return self.form.format(model=model, seq_len=seq_len_tokens)


def _trl(title: str, more: str = "") -> Published:
    data = "max_length: {seq_len}\ndataset_name: YOUR_DATASET\n"
    source = "huggingface/trl@f2cd577 trl/scripts/sft.py, trainer/sft_config.py, trainer/model_config.py"
    return Published(title=title, file="trl-sft.yaml", form=_TRL + data + more, source=source)


def _axolotl(title: str, example: str, *values: object) -> Published:
    source = f"axolotl-ai-cloud/axolotl@067b021 examples/llama-3/{example}"  # a dropout: its LoRA kernels stay off
    return Published(title=title, file="axolotl.yaml", form=_AXOLOTL.format(*values), source=source)


def _llamafactory(title: str, example: str, more: str = "") -> Published:
    source = f"hiyouga/LLaMA-Factory@ff6d4d1 examples/{example}"
    return Published(title=title, file="llamafactory.yaml", form=_LLAMAFACTORY + more, source=source)


PUBLISHED = {
    # `--use_peft` and the library's defaults: micro-batch 8, checkpointing, autocast, loss in chunks, float32 weights
    # unless a type is named; 4 bits: its `--load_in_4bit` (nf4, not nested)
    "trl": _trl("TRL", "dtype: bfloat16\n"),
    "trl-4bit": _trl("TRL, 4-bit", "dtype: bfloat16\nload_in_4bit: true\n"),
    "trl-fp32": _trl("TRL, float32"),
    "trl-fp32-4bit": _trl("TRL, float32, 4-bit", "load_in_4bit: true\n"),
    "axolotl": _axolotl("Axolotl", "lora-1b.yml", "lora", 16, 2),
    "axolotl-4bit": _axolotl("Axolotl, 4-bit", "qlora-1b.yml", "qlora\nload_in_4bit: true", 32, 4),
    "llamafactory": _llamafactory("LLaMA-Factory", "train_lora/qwen3_lora_sft.yaml"),
    "llamafactory-4bit": _llamafactory(
        "LLaMA-Factory, 4-bit", "train_qlora/qwen3_lora_sft_otfq.yaml", "quantization_bit: 4\n"
    ),
    "unsloth": Published(
        title="Unsloth",
        file="unsloth.yaml",
        form=_UNSLOTH,
        source="unslothai/notebooks@bdda2ef nb/Llama3.1_(8B)-Alpaca.ipynb",
    ),
}
"""Name -> what a project publishes."""


def published(name: str) -> Published:
    """A project's published defaults.

    Raises:
        UsageError: a name that is not known.
    """
    if name not in PUBLISHED:
        raise UsageError(f"--defaults {name}: no such published defaults", hint=f"one of {', '.join(PUBLISHED)}")
    return PUBLISHED[name]
