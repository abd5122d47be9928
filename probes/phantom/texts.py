"""Tokenizers, sound and data sets that this machine lacks: stand-ins that give the longest sequences, said aloud.

A stand-in tokenizer makes a token of every byte and has as many entries as the model's embedding. A stand-in data set
has the columns of the data set that was asked for, where its name is known, and long texts: the program's own maximum
length cuts them.
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

from planner.options.sound import TEXT_TOKENS
from probes.patching import nothing
from probes.phantom.images import PICTURE, processor_for
from probes.phantom.imports import Patch
from probes.phantom.mode import Phantom

NUM_ROWS = 64
NUM_BATCHES = 16
"""At least so many are made of the rows, whatever their size: a step accumulates over several."""
IMAGE_SIZE = (1024, 1024)
_PROMPT_TOKENS = 32
"""Of what comes before an answer: where a maximum cuts the end, something of the answer must be left."""
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json", "spiece.model")
_TEMPLATE = (
    "{% macro said(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content or [] %}"
    f"{{{{ '{PICTURE}' if part['type'] == 'image' else part['text'] or '' }}}}"
    "{% endfor %}{% endif %}{% endmacro %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ said(message['content']) }}{% endgeneration %}{% else %}{{ said(message['content']) }}"
    "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokenizer_stands_in(phantom: Phantom, auto: Any, patch: Patch) -> None:
    """Makes `AutoTokenizer.from_pretrained` answer where there are no files to read."""
    cls = auto.AutoTokenizer
    true = cls.from_pretrained.__func__

    def from_pretrained(owner: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        if _present(str(name)):
            return true(owner, name, *args, **kwargs)
        phantom.note(
            f"{name}: its tokenizer is not on this machine; a stand-in makes a token of every byte, so sequences are "
            "as long as the program's maximum allows"
        )
        made = stand_in_tokenizer(str(name))
        if made.pad_token is None and "sentence_transformers" in sys.modules:
            made.pad_token = made.eos_token  # it pads every batch, so the true one has one
        for key in ("padding_side", "truncation_side", "model_max_length"):
            if kwargs.get(key) is not None:
                setattr(made, key, kwargs[key])
        tokens = ("bos_token", "eos_token", "pad_token", "unk_token", "additional_special_tokens")
        made.add_special_tokens({key: kwargs[key] for key in tokens if kwargs.get(key)})
        return made

    patch(cls, "from_pretrained", classmethod(from_pretrained))


def _present(name: str) -> bool:
    """Whether any file of a tokenizer can be read, here or (where the network is allowed) on the hub."""
    if os.path.isdir(name):
        return any(Path(name, file).exists() for file in _FILES)
    from transformers.utils import cached_file

    def read(file: str) -> bool:
        try:
            return cached_file(name, file) is not None
        except OSError:
            return False

    return any(map(read, _FILES))


def processor_stands_in(phantom: Phantom, auto: Any, patch: Patch) -> None:
    """Makes `AutoProcessor.from_pretrained` answer where there are no files to read."""
    cls = auto.AutoProcessor
    true = cls.from_pretrained.__func__

    def from_pretrained(owner: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return true(owner, name, *args, **kwargs)
        except (OSError, ValueError, TypeError, AttributeError, KeyError, ImportError):  # the last: torchvision
            from transformers import AutoConfig, AutoTokenizer

            config = AutoConfig.from_pretrained(name)
            if not hasattr(config, "num_mel_bins") and not hasattr(config, "vision_config"):
                given = {key: value for key, value in kwargs.items() if key == "trust_remote_code"}
                return AutoTokenizer.from_pretrained(name, **given)
            phantom.note(f"{name}: its processor is not on this machine; one made from config.json stands in")
            if hasattr(config, "num_mel_bins"):
                phantom.has_audio = True
                return whispers_processor(config, stand_in_tokenizer(str(name)))
            return processor_for(str(name), config, lambda tokens: stand_in_tokenizer(str(name), tokens))

    patch(cls, "from_pretrained", classmethod(from_pretrained))


def stand_in_tokenizer(name: str, more: Mapping[int, str] = MappingProxyType({})) -> Any:
    """A tokenizer of bytes with as many entries as the vocabulary of the model `name`, of which `more` are special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, PreTrainedTokenizerFast
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    config = AutoConfig.from_pretrained(name)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = int(getattr(text, "vocab_size", 0) or 512)
    specials = {_first(getattr(text, f"{kind}_token_id", None)): f"<|{kind}|>" for kind in ("bos", "eos", "pad")}
    specials.pop(None, None)
    specials |= more
    names: list[str] = []
    byte_names = sorted(pre_tokenizers.ByteLevel.alphabet())
    for index in range(size):
        if index in specials:
            names.append(specials[index])
        elif byte_names:
            names.append(byte_names.pop(0))
        else:
            names.append(f"<|unused_{index}|>")
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special_names = set(specials.values())
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>" if "<|bos|>" in special_names else None,
        eos_token="<|eos|>" if "<|eos|>" in special_names else names[-1],
        pad_token="<|pad|>" if "<|pad|>" in special_names else None,
        unk_token=names[0],
        model_max_length=int(getattr(text, "max_position_embeddings", 0) or 1 << 20),
    )
    if made.pad_token is None and _pads(config):
        made.pad_token = made.eos_token
    made.add_special_tokens({"additional_special_tokens": list(more.values())})
    if getattr(config, "model_type", "") in MODEL_FOR_MASKED_LM_MAPPING_NAMES and size > _MARKS_AT:
        for index, kind in enumerate(("mask_token", "cls_token", "sep_token")):
            setattr(made, kind, names[_MARKS_AT + index])
    made.chat_template = _TEMPLATE
    made.name_or_path = name
    return made


def _pads(config: Any) -> bool:
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    name = TOKENIZER_MAPPING_NAMES.get(config.model_type)
    of = tokenizer_class_from_name(name) if isinstance(name, str) else None
    parameter = inspect.signature(of.__init__).parameters.get("pad_token") if of is not None else None
    return parameter is not None and isinstance(parameter.default, str)


_MARKS_AT = 300
"""Where an encoder's own tokens stand: past the bytes."""


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value


def _whispers_parts(config: Any, tokenizer: Any) -> tuple[Any, Any]:
    """(feature extractor, tokenizer) of Whisper; the stand-in tokenizer knows languages by no name."""
    from transformers import WhisperFeatureExtractor

    tokenizer.set_prefix_tokens = lambda **_: None
    return WhisperFeatureExtractor(feature_size=config.num_mel_bins), tokenizer


def whispers_processor(config: Any, tokenizer: Any) -> Any:
    """Whisper's processor."""
    from transformers import WhisperProcessor

    with mock.patch.object(WhisperProcessor, "check_argument_for_proper_class", return_value=None):
        return WhisperProcessor(*_whispers_parts(config, tokenizer))


def whispers_parts_stand_in(which: str, phantom: Phantom, module: Any, patch: Patch) -> None:
    """Makes `from_pretrained` of one of Whisper's own classes ("processor", "feature_extractor" or "tokenizer") answer
    where there are no files to read."""
    classes = ("WhisperProcessor", "WhisperFeatureExtractor", "WhisperTokenizer")
    cls = next(getattr(module, name) for name in dir(module) if name in classes)
    true = cls.from_pretrained.__func__

    def from_pretrained(owner: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return true(owner, name, *args, **kwargs)
        except (OSError, ValueError, TypeError, AttributeError):
            from transformers import AutoConfig

            phantom.has_audio = True
            phantom.note(f"{name}: its {which} is not on this machine; one made from config.json stands in")
            config, tokenizer = AutoConfig.from_pretrained(name), stand_in_tokenizer(str(name))
            if which == "processor":
                return whispers_processor(config, tokenizer)
            return _whispers_parts(config, tokenizer)[which == "tokenizer"]

    patch(cls, "from_pretrained", classmethod(from_pretrained))


def encoding_stands_in(phantom: Phantom, tiktoken: Any, patch: Patch) -> None:
    """Makes `tiktoken.get_encoding` answer where its tables cannot be read."""
    true = tiktoken.get_encoding

    def get_encoding(name: str) -> Any:
        try:
            return true(name)
        except (OSError, ValueError):
            phantom.note(f"tiktoken's {name} is not on this machine; a stand-in makes a token of every byte")
            ranks = {bytes([byte]): byte for byte in range(256)}
            ranks |= {b"unused %d" % rank: rank for rank in range(256, _GPT2_ENTRIES - 1)}
            special = {"<|endoftext|>": _GPT2_ENTRIES - 1}
            return tiktoken.Encoding(name, pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens=special)

    patch(tiktoken, "get_encoding", get_encoding)


_GPT2_ENTRIES = 50257

# Data sets


@dataclass(frozen=True, kw_only=True)
class _Texts:
    """What rows are made of."""

    long: str
    short: str
    image_size: tuple[int, int]

    @property
    def talk(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.short}, {"role": "assistant", "content": self.long}]

    def picture(self) -> dict[str, Any]:
        from PIL import Image

        parts = [{"type": "image", "text": None}, {"type": "text", "text": self.short}]
        answer = [{"type": "text", "text": self.long}]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
        return {"images": [Image.new("RGB", self.image_size)], "messages": messages}


_ROWS: tuple[tuple[tuple[str, ...], Callable[[_Texts], dict[str, Any]]], ...] = (
    (("vsft", "llava", "vqa", "vision", "image", "ocr"), _Texts.picture),
    (("guanaco",), lambda of: {"text": of.long}),
    (("kto",), lambda of: {"prompt": of.talk[:1], "completion": of.talk[1:], "label": True}),
    (
        ("ultrafeedback", "preference", "dpo", "rlhf", "orpo", "stack-exchange-paired"),
        lambda of: {"chosen": of.talk, "rejected": of.talk, "score_chosen": 1.0, "score_rejected": 0.0},
    ),
    (  # with every name that such data sets give to an answer
        ("alpaca", "dolly", "code_instructions", "instruct"),
        lambda of: {"instruction": of.short, "input": "", **dict.fromkeys(("output", "response", "text"), of.long)},
    ),
    (("deepmath",), lambda of: {"prompt": of.talk[:1], "solution": "1"}),
    (
        ("tldr", "gsm8k", "rlaif", "prompt"),
        lambda of: {
            "prompt": of.short,
            "completion": of.long,
            "question": of.short,
            "answer": of.long,
            "solution": "1",
        },
    ),
    (
        ("capybara", "ultrachat", "openassistant", "oasst", "chat", "tulu", "hermes", "no_robots"),
        lambda of: {"messages": of.talk},
    ),
    (("stsb", "all-nli", "pair"), lambda of: {"sentence1": of.long, "sentence2": of.long, "score": 0.5}),
    # one text of a pair is long: tokenizers keeps every pair of the pieces that are cut off, gigabytes of two
    (("glue", "mrpc"), lambda of: {"sentence1": of.long, "sentence2": of.short, "label": 1, "idx": 0}),
    (("imdb", "sentiment", "emotion", "review"), lambda of: {"text": of.long, "label": 1}),
)
"""Words in the name of a data set, the first that is found decides -> its row."""


def columns_of(
    name: str, num_tokens: int, image_size: tuple[int, int] = IMAGE_SIZE, objective: str = ""
) -> dict[str, Any]:
    """One row of a data set that looks like `name`'s.

    Args:
        objective: what is trained for, where it is known: "dpo", "kto", "orpo", "reward", "embedding".
        image_size: width and height of its picture, if it has one, in pixels.
    """
    of = _Texts(long="a " * num_tokens, short="a " * _PROMPT_TOKENS, image_size=image_size)
    if objective == "reward":  # TRL leaves out what is too long instead of cutting it; a token ends each
        return {"chosen": "b" * (num_tokens - 2), "rejected": "c" * (num_tokens - 2)}
    if objective == "embedding":
        return {"anchor": of.long, "positive": of.long}
    if name.strip().endswith(PREPARED):
        ids = [1] * num_tokens
        return {"input_ids": ids, "labels": ids, "attention_mask": ids}
    low = f"{name} {objective}".lower()
    make = next((make for words, make in _ROWS if any(word in low for word in words)), None)
    return {"text": of.long} if make is None else make(of)


PREPARED = "launch/data/tokens"
"""Where our own launch files read rows that `launch/prepare_data.py` makes."""
_STAND_IN = "stand-in rows"
_SOUNDS = ("common_voice", "fleurs", "librispeech", "voxpopuli", "gigaspeech", "speech", "asr")
"""Words in the name of a data set of clips."""
_RATE = 16_000
_ASKS = ("instruction", "question", "query", "prompt", "input", "context", "system")
"""Columns that stand before an answer."""


def clip(num_tokens: int) -> dict[str, Any]:
    """One row: a second of silence (the processor pads it to 30) and its text under the usual names, in bytes."""
    text = "a" * min(num_tokens, TEXT_TOKENS)
    sound = {"array": [0.0] * _RATE, "sampling_rate": _RATE}
    return {"audio": sound, **dict.fromkeys(("text", "sentence", "transcription"), text)}


def data_sets_stand_in(phantom: Phantom, datasets: Any, patch: Patch) -> None:
    """Makes `datasets.load_dataset` answer where the data set cannot be read."""
    true = datasets.load_dataset

    def load_dataset(path: Any, name: Any = None, *args: Any, split: Any = None, **kwargs: Any) -> Any:
        try:
            return true(path, name, *args, split=split, **kwargs)
        except (ConnectionError, FileNotFoundError, OSError) as error:
            if os.path.exists(str(path)) or kwargs.get("data_files"):
                raise
            made = _stand_in_rows(phantom, datasets, str(path), str(name or ""), type(error).__name__)
            if kwargs.get("streaming"):
                made = made.to_iterable_dataset().repeat(NUM_BATCHES)
            if split is not None:
                return made
            parts = {"train": made, "test": made, "validation": made}
            return datasets.IterableDatasetDict(parts) if kwargs.get("streaming") else datasets.DatasetDict(parts)

    select = datasets.Dataset.select

    def select_present(self: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
        return select(self, [index for index in indices if index < len(self)], *args, **kwargs)

    split = datasets.Dataset.train_test_split

    def split_present(self: Any, test_size: Any = None, train_size: Any = None, **kwargs: Any) -> Any:
        sizes = [test_size, train_size]
        if self.info.description == _STAND_IN:
            sizes = [size if size is None or size < len(self) else 0.5 for size in sizes]
        return split(self, *sizes, **kwargs)

    patch(datasets, "load_dataset", load_dataset)
    patch(datasets.Dataset, "train_test_split", split_present)
    patch(datasets.load, "load_dataset", load_dataset)
    patch(datasets.Dataset, "select", select_present)
    patch(datasets.Dataset, "map", _mapping(phantom, datasets, datasets.Dataset.map))
    each = datasets.Dataset.__iter__

    def rows_present(self: Any) -> Iterator[Any]:
        ours = self.info.description == _STAND_IN
        return (_Row(phantom, row) if ours and isinstance(row, dict) else row for row in each(self))

    patch(datasets.Dataset, "__iter__", rows_present)


def _stand_in_rows(phantom: Phantom, datasets: Any, path: str, name: str, why: str) -> Any:
    options = phantom.options
    tokens = options.num_tokens
    row = columns_of(f"{path} {name}", tokens, options.image_size, options.objective)
    if phantom.has_audio or any(word in f"{path} {name}".lower() for word in _SOUNDS):
        row, tokens = clip(tokens), min(tokens, TEXT_TOKENS)
    if set(row) == {"text"} and any(
        name.endswith("ForSequenceClassification") for name in vars(sys.modules["__main__"])
    ):
        row |= {"label": 1}
    pictures = " and a picture of {} x {} pixels".format(*options.image_size) if "images" in row else ""
    phantom.note(
        f"{path}: this data set is not on this machine ({why}); {NUM_ROWS} stand-in rows with {', '.join(row)} of "
        f"{tokens:,} tokens and more{pictures} were used, which the program cuts to its own maximum length; "
        "batches are filled by repeating them"
    )
    phantom.stand_in_rows = path
    made = datasets.Dataset.from_dict({key: [value] * NUM_ROWS for key, value in row.items()})
    made.info.description = _STAND_IN
    if type(row.get("label")) is int:
        made = made.cast_column("label", datasets.ClassLabel(num_classes=2))
    return made


class _Row(dict[str, Any]):
    """A stand-in row as a loop over the data set gets it: it has every column that the program reads."""

    def __init__(self, phantom: Phantom, row: Mapping[str, Any]) -> None:
        super().__init__(row)
        self._phantom = phantom

    def __missing__(self, column: str) -> Any:
        self[column] = _column(self._phantom, column)
        return self[column]


def _column(phantom: Phantom, column: str) -> Any:
    """What a row has under a name that its data set was not known to have: a picture or a text."""
    phantom.note(f"the stand-in rows got a column {column!r}, which the program reads")
    if column in ("image", "img", "picture"):
        from PIL import Image

        return Image.new("RGB", phantom.options.image_size)
    return "a " * (_PROMPT_TOKENS if column in _ASKS else phantom.options.num_tokens)


def _mapping(phantom: Phantom, datasets: Any, true: Callable[..., Any]) -> Callable[..., Any]:
    """`Dataset.map`: a column that the program reads and a stand-in lacks is added; it knows which the data set has."""

    def map_present(self: Any, function: Any = None, *args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                return true(self, function, *args, **kwargs)
            except KeyError as error:
                column = error.args[0] if error.args else None
                if self.info.description != _STAND_IN or not isinstance(column, str) or column in self.column_names:
                    raise
                added = datasets.Dataset.from_dict({column: [_column(phantom, column)] * len(self)})
                if set(kwargs.get("remove_columns") or ()) == set(self.column_names):
                    kwargs["remove_columns"] = [*self.column_names, column]
                self = datasets.concatenate_datasets([self, added], axis=1)

    return map_present


class _Metric:
    """A metric of the library `evaluate` whose script is not here: it takes everything and answers nothing."""

    add = add_batch = nothing

    def compute(self, **kwargs: Any) -> dict[str, float]:
        return {}


def metrics_stand_in(phantom: Phantom, evaluate: Any, patch: Patch) -> None:
    """Makes `evaluate.load` answer where the metric's script cannot be read."""
    true = evaluate.load

    def load(path: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return true(path, *args, **kwargs)
        except (ConnectionError, FileNotFoundError):
            phantom.note(f"{path}: this metric is not on this machine; one without figures stands in")
            return _Metric()

    patch(evaluate, "load", load)
