"""The processor and the clips of a model that hears, where neither is on this machine."""

from collections.abc import Callable
from typing import Any
from unittest import mock

from planner.options.sound import TEXT_TOKENS
from probes.phantom.imports import Patch
from probes.phantom.mode import Phantom

RATE = 16_000
WORDS = ("common_voice", "fleurs", "librispeech", "voxpopuli", "gigaspeech", "speech", "asr")
"""Words in the name of a data set of clips."""


def clip(num_tokens: int) -> dict[str, Any]:
    """One row: a second of silence (the processor pads it to 30) and its text under the usual names, in bytes."""
    text = "a" * min(num_tokens, TEXT_TOKENS)
    sound = {"array": [0.0] * RATE, "sampling_rate": RATE}
    return {"audio": sound, **dict.fromkeys(("text", "sentence", "transcription"), text)}


def parts_for(config: Any, tokenizer: Callable[[], Any]) -> tuple[Any, Any]:
    """(feature extractor, tokenizer) of Whisper; the stand-in tokenizer knows languages by no name."""
    from transformers import WhisperFeatureExtractor

    made = tokenizer()
    made.set_prefix_tokens = lambda **_: None
    return WhisperFeatureExtractor(feature_size=config.num_mel_bins), made


def processor_for(config: Any, tokenizer: Callable[[], Any]) -> Any:
    """Whisper's processor."""
    from transformers import WhisperProcessor

    with mock.patch.object(WhisperProcessor, "check_argument_for_proper_class", return_value=None):
        return WhisperProcessor(*parts_for(config, tokenizer))


def whispers_parts_stand_in(
    tokenizer: Callable[[str], Any], which: str, phantom: Phantom, module: Any, patch: Patch
) -> None:
    """Makes `from_pretrained` of one of Whisper's own classes answer where there are no files to read.

    Args:
        tokenizer: makes one of bytes for a model; which: "processor", "feature_extractor" or "tokenizer".
    """
    cls = next(getattr(module, name) for name in dir(module) if name in _OWN)
    true = cls.from_pretrained.__func__

    def from_pretrained(owner: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return true(owner, name, *args, **kwargs)
        except (OSError, ValueError, TypeError, AttributeError):
            from transformers import AutoConfig

            phantom.has_audio = True
            phantom.note(f"{name}: its {which} is not on this machine; one made from config.json stands in")
            config = AutoConfig.from_pretrained(name)
            if which == "processor":
                return processor_for(config, lambda: tokenizer(str(name)))
            extractor, words = parts_for(config, lambda: tokenizer(str(name)))
            return extractor if which == "feature_extractor" else words

    patch(cls, "from_pretrained", classmethod(from_pretrained))


_OWN = ("WhisperProcessor", "WhisperFeatureExtractor", "WhisperTokenizer")
