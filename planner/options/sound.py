"""What goes with models of two halves, and with one that hears."""

from collections.abc import Mapping

from planner.options.layouts import SPLIT_DEGREES

TEXT_TOKENS = 225
"""Tokens of a clip's text where nobody says: what the field generates of one (`generation_max_length=225` in
huggingface.co/blog/fine-tune-whisper and transformers' run_speech_recognition_seq2seq.py), as the original decodes at
most half of its 448 positions (github.com/openai/whisper decoding.py, `sample_len`). A clip of 30 s of fast speech is
about 100 words."""
HALVES_STACK = "hf"
"""Whose step an encoder-decoder's is: TRL trains decoders."""
WITH_TWO_HALVES: Mapping[str, tuple[object, ...]] = {
    "loss": ("full",),
    "kernels": ("eager",),
    "activation_offload": (False,),
    "selective_checkpointing": (False,),
    "frozen_encoder": (False,),
}
"""What goes with an encoder-decoder, by the fields of a setup: TRL trains decoders."""
WITH_SOUND: Mapping[str, tuple[object, ...]] = {
    **WITH_TWO_HALVES,
    "frozen_encoder": (False, True),
    "objective": ("sft",),
    "packing": (False,),
    "parallel": ("none", "ddp"),
    **dict.fromkeys(SPLIT_DEGREES, (1,)),
    "images": (None,),
}
"""What goes with clips: each is one sample, which no trainer packs; how FSDP2 and ZeRO gather convolutions and an
encoder whose output all layers share is not modelled."""
