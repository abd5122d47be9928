"""The product: (what is typed for a model) x (what is typed for a card) x (form of data) x (target), every pair of
values of two of them at least once; and an emitted file as a CPU runs it.

The validators of other tools (tools/validators/) take their target's cases from here.
"""

import re
from pathlib import Path
from typing import NamedTuple

from planner.models import catalogue
from planner.options.stacks import TARGET_ROWS
from tests.launch.data_formats import FORMATS
from tests.launch.tiny_models import kind_of
from tests.planner.spoken_names import CARDS, SPOKEN


class Case(NamedTuple):
    """One way through the product."""

    typed: str
    card: str
    data: str
    target: str

    @property
    def words(self) -> list[str]:
        """What is typed. Two targets are for another request than the usual."""
        more = {
            "torchtitan": ["--loss-on", "all"],
            "sentence-transformers": ["--objective", "embedding", *PAIRED.get(self.data, [])],
        }
        words = [self.typed, "--gpu", self.card, "--dataset", self.data, "--target", self.target, "--no-dry-run"]
        return [*words, *more.get(self.target, [])]

    @property
    def kind(self) -> str:
        """The kind of tiny model that stands for it."""
        entry = catalogue.find(SPOKEN[self.typed].removeprefix("someone/").removeprefix("unsloth/"))
        assert entry is not None
        return kind_of(entry)


PAIRED = {
    name: ["--columns", f"anchor={question},positive={answer}"]
    for name, question, answer in (
        ("alpaca.json", "instruction", "output"), ("context.jsonl", "question", "answer"),
        ("faq.csv", "Question", "Answer"), ("io.tsv", "input", "output"), ("query.csv.gz", "query", "response"),
        ("prompt.parquet", "prompt", "response"), ("completion.ndjson", "prompt", "completion"),
        ("shards", "instruction", "response"), ("who/what", "question", "answer"),
    )
}  # fmt: skip
"""Form of data -> what says which of its columns are an embedding's pairs; the others are chats and texts."""


def cases() -> list[Case]:
    """A form of data and a target for every model on every card; MLX-LM, which takes one vendor's, beside them
    (Loggetta takes mixtures alone: test_streamed_experts.py)."""
    data, models = list(FORMATS), list(SPOKEN)
    targets = [name for name in TARGET_ROWS if name not in ("mlx", "loggetta")]
    combinations = [
        Case(typed, card, data[(at + by) % len(data)], targets[(at + 2 * by) % len(targets)])
        for at, typed in enumerate(models)
        for by, card in enumerate(CARDS)
    ]
    cards = list(CARDS)
    for at in range(max(len(models), len(cards))):
        combinations.append(Case(models[at % len(models)], cards[at % len(cards)], data[at % len(data)], "mlx"))
    return combinations


# An emitted file on a CPU

SWAPS = {
    "fp16": (r"[Tt]rue", "False"),  # a GPU's loss scaler
    "attn_implementation": (r'"?[\w./-]*flash[\w./-]*"?', '"eager"'),
    "(?:use|enable)_liger_kernel": (r"[Tt]rue", "False"),  # Triton
    "deepspeed": (r"\S+\.json", "null"),
    "liger_kernel_config": (r"\{.*\}", "{}"),
    "optim": (r"\"?\w*(?:8bit|32bit|paged)\w*\"?", '"adamw_torch"'),
}
"""Setting -> what of its values a CPU does not have, and what it has instead."""


def on_cpu(text: str, model: Path | str) -> str:
    """An emitted file (YAML or Python) with the weights of `model` and the precision, quantization and kernels of a
    CPU, stopped after one step; every other line is as it was."""
    for names, (old, new) in {
        **SWAPS,
        "model_name_or_path|base_model|model(?=: )|MODEL": (r"\S+", f'"{model}"'),
    }.items():
        text = re.sub(rf"(?m)^( *(?:{names})(?:: |=| = )){old}(?=,?(?:  #.*)?$)", rf"\g<1>{new}", text)
    # tiny weights are stored in 16 bits
    text = re.sub(r"(?s)^(.*\nquantization = )(?:Mxfp4|FineGrainedFP8)Config\(.*?\)\n", r"\1None\n", text)
    text = text.replace("float16", "float32").replace("bfloat32", "bfloat16")
    return re.sub(r"(?m)^( *)(?:num_train_epochs|num_epochs)(: |=)[\d.]+", r"\1max_steps\g<2>1", text)
