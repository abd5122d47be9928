"""What a launch file names and this machine lacks: a model's folder with random weights, a tokenizer, texts.

    python -m probes.launched.prepare ORDER.json

A process of its own, which ends before the file runs: the run finds the device and the memory as they were. Weights are
written tensor by tensor, so that a model needs no more memory here than its largest one.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

NUM_TEXTS = 8
NUM_WORDS = 1000
SHARD_BYTES = 4 << 30
NOISE_ELEMENTS = (1 << 24) + 1
"""Of the random numbers that all matrices are cut from; odd, so that rows of one matrix differ."""
_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def make_model(config: Mapping[str, Any], folder: Path) -> int:
    """A model's folder as `from_pretrained` reads it, weights random and in 16 bits: memory and speed of a training
    step do not depend on them (but bitsandbytes' int8 products do, whose outliers differ). How many tokens it knows."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from probes.stack.configs import load_config

    folder.mkdir(parents=True, exist_ok=True)
    loaded = load_config(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(loaded, dtype=torch.bfloat16)
    index: dict[str, str] = {}
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in _named(model))
    shards = list(_shards(model))
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _filled(name, shape, dtype) for name, shape, dtype in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    whole = {"metadata": {"total_size": size}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(whole), encoding="utf-8")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return int(model.get_input_embeddings().num_embeddings)


def _named(model: Any) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _shards(model: Any) -> Iterator[list[tuple[str, Any, Any]]]:
    shard: list[tuple[str, Any, Any]] = []
    size = 0
    for name, tensor in _named(model):
        tensor_bytes = tensor.numel() * tensor.element_size()
        if shard and size + tensor_bytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append((name, tensor.shape, tensor.dtype))
        size += tensor_bytes
    yield shard


def _filled(name: str, shape: Any, dtype: Any) -> Any:
    """Small numbers for a matrix, ones for a norm's weight, zeros for a bias."""
    import torch

    if len(shape) < 2 or not dtype.is_floating_point:
        return torch.ones(shape, dtype=dtype) if name.endswith("weight") else torch.zeros(shape, dtype=dtype)
    made = torch.empty(shape, dtype=dtype)
    flat, noise = made.view(-1), _noise()
    for start in range(0, flat.numel(), len(noise)):
        part = flat[start : start + len(noise)]
        part.copy_(noise[: len(part)])
    return made


@cache
def _noise() -> Any:
    import torch

    return 0.02 * torch.randn(NOISE_ELEMENTS, generator=torch.Generator().manual_seed(0))


def make_tokenizer(folder: Path, vocab_size: int | None = None) -> None:
    """A tokenizer that knows the words w0, w1, ..., as far as a model's vocabulary goes; every word is one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<pad>", "<|end|>"]
    names = [*special, *(f"w{index}" for index in range(NUM_WORDS))][:vocab_size]
    words = {word: number for number, word in enumerate(names)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", eos_token="<|end|>"
    )
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)


def make_texts(place: Path, columns: str, num_rows: int, num_tokens: int, splits: Sequence[str] = ("train",)) -> None:
    """JSON lines at a place, a file where its name is one, else a folder with a file for each split: each sample is
    longer than a sequence, so that every batch is the worst one.

    Texts that go on in the next row are few and long, so that few rows are ends of them; one may be held out.
    """
    if columns == "text":
        num_rows, num_tokens = NUM_TEXTS, -(-num_rows // (NUM_TEXTS - 1)) * num_tokens
    files = [place / f"{split}.jsonl" for split in splits]
    if place.suffix in (".json", ".jsonl"):
        files = [place]
    elif set(splits) - {"train", "test"}:  # datasets reads other names of splits off this form alone
        files = [place / "data" / f"{split}-00000-of-00001.jsonl" for split in splits]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "w", encoding="utf-8") as handle:
            for number in range(num_rows):
                handle.write(json.dumps(row_of(columns, number, num_tokens)) + "\n")


def row_of(columns: str, number: int, num_tokens: int) -> dict[str, Any]:
    """One sample with the columns that a trainer wants: "text", "messages", "prompt-completion", "alpaca" or
    "preference"."""
    long, other, short = _words(number, num_tokens + 8), _words(number + 7, num_tokens + 8), _words(number + 3, 8)
    if columns == "text":
        return {"text": long}
    if columns == "messages":
        return {"messages": [{"role": "user", "content": short}, {"role": "assistant", "content": long}]}
    if columns == "prompt-completion":
        return {"prompt": short, "completion": long}
    if columns == "alpaca":
        return {"instruction": short, "input": "", "output": long}
    return {"prompt": short, "chosen": long, "rejected": other}


def _words(start: int, num: int) -> str:
    return " ".join(f"w{(start * 31 + index * 7) % NUM_WORDS}" for index in range(num))


def main(arguments: list[str]) -> int:
    order = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    if order.get("model"):
        vocab_size = make_model(order["config"], Path(order["model"]))
        make_tokenizer(Path(order["model"]), vocab_size)
    for name in order.get("texts", ()):
        make_texts(Path(name), order["columns"], order["num_rows"], order["num_tokens"], order["splits"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
