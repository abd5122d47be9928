"""The parts of the plain script that train on clips of sound: constants, data, and what Whisper's class wants."""

from planner.frameworks.exporters import common
from planner.frameworks.exporters.text import Code, Line, constant
from planner.frameworks.exporters.types import ExportRequest
from planner.frameworks.tools.transformers import DTYPES

AUTO_CLASS = "AutoModelForSpeechSeq2Seq"
WORKERS = 2
"""Processes that make frames of sound beside the training; judgement."""


def constants(request: ExportRequest) -> str:
    """What a person changes first: model, data, columns, language, length of the text."""
    setup = request.setup
    narrow = setup.autocast_dtype is None and not setup.kbit_fp32_cast
    kind = DTYPES[setup.weight_dtype if narrow else "fp32"]
    return (
        common.data_constants(request)
        + constant("AUDIO_FIELD", "audio", "clips of at most 30 s: what is longer is cut, so split it before")
        + constant("TEXT_FIELD", "text", "what is said in them")
        + constant("LANGUAGE", None, 'of the texts, like "hindi"; None for English-only models')
        + constant("TASK", None, '"transcribe" or "translate"; None for English-only models')
        + constant("MAX_LENGTH", setup.seq_len_tokens, "tokens of text; clips with longer ones are left out")
        + constant("FEATURES_DTYPE", Code(f"torch.{kind}"), "of the sound; autocast casts it itself")
    )


PROCESSOR = """
processor = AutoProcessor.from_pretrained(MODEL)
if LANGUAGE or TASK:
    processor.tokenizer.set_prefix_tokens(language=LANGUAGE, task=TASK)
"""


def after_loading(request: ExportRequest) -> str:
    """What is set on the loaded model."""
    frozen = "model.freeze_encoder()  # with its convolutions\n" if request.setup.frozen_encoder else ""
    return (
        "model.config.use_cache = False\n"
        "if LANGUAGE or TASK:\n"
        "    model.generation_config.update(language=LANGUAGE, task=TASK, forced_decoder_ids=None)\n" + frozen
    )


DATA = '''
def tokenize(row):
    return {"labels": processor.tokenizer(row[TEXT_FIELD]).input_ids}


def collate(samples):
    """Frames of sound, always of 30 s, and texts padded to the longest; the model puts the start token before them."""
    extractor, start = processor.feature_extractor, START
    sounds = [sample[AUDIO_FIELD] for sample in samples]
    rate = sounds[0]["sampling_rate"]
    features = extractor([one["array"] for one in sounds], sampling_rate=rate, return_tensors="pt").input_features
    texts = [sample["labels"][1:] if sample["labels"][0] == start else sample["labels"] for sample in samples]
    longest = max(map(len, texts))
    labels = [text + [-100] * (longest - len(text)) for text in texts]
    return {"input_features": features.to(FEATURES_DTYPE), "labels": torch.tensor(labels)}


rows = load_rows()
if isinstance(rows.features[AUDIO_FIELD], Audio):  # decoded by torchcodec; else {"array": [...], "sampling_rate": ...}
    rows = rows.cast_column(AUDIO_FIELD, Audio(sampling_rate=processor.feature_extractor.sampling_rate))
rows = rows.select_columns([AUDIO_FIELD, TEXT_FIELD])
rows = rows.map(tokenize, remove_columns=[TEXT_FIELD])
rows = rows.filter(lambda labels: len(labels) <= MAX_LENGTH + 1, input_columns="labels")
START = model.config.decoder_start_token_id
'''


def argument_lines() -> list[Line | None]:
    """What `Seq2SeqTrainingArguments` are told beside the usual."""
    return [
        Line("label_names", ["labels"]),
        Line("dataloader_num_workers", WORKERS, "make frames of sound on the host"),
    ]


DIVIDES = "trainer.model_accepts_loss_kwargs = False  # Whisper's class does not divide by the step's tokens\n"
