"""The worst batch of a setup: every sequence at full length, random tokens."""

from dataclasses import dataclass
from typing import Any

import torch

from planner.setup import TrainSetup
from probes.stack.configs import has_audio
from probes.stack.dtypes import DTYPES
from probes.stack.images import encoder_for, image_inputs, pixels

SAMPLES_PER_SEQUENCE = 4
"""A packed sequence is filled with this many samples of equal length."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch: what the model's forward takes, next-token labels (not shifted), and tensors that the trainer
    holds although the forward does not need them on this device."""

    model_inputs: dict[str, Any]
    labels: torch.Tensor
    held: tuple[torch.Tensor, ...] = ()


def make_batch(setup: TrainSetup, config: Any, *, device: torch.device | str) -> Batch:
    """Random ids [seqs, tokens] with labels; packed: [1, seqs * tokens] with position ids that restart, or rows, each
    with its mask of samples that do not see each other (`Stack.packs_rows`).

    Padded: where all sequences have the same length the attention mask holds only ones and transformers drops it
    (`masking_utils`). It cannot look into a meta tensor, so on meta such a mask is held but not passed; of `pads` it is
    passed, and the tracker answers what is asked about it.

    Source: TRL 1.16 `DataCollatorForLanguageModeling` (padding_free follows packing).
    """
    device = torch.device(device)
    seqs, tokens = setup.micro_batch_seqs * setup.seqs_per_sample, setup.seq_len_tokens // setup.context_degree
    vocab = int(config.get_text_config().vocab_size)
    flat = setup.packing and not setup.trainer.packs_rows
    shape = (1, seqs * tokens) if flat else (seqs, tokens)
    ids = torch.randint(0, vocab, shape, device=device, dtype=torch.int64)
    labels = ids.clone()
    if has_audio(config):
        return Batch(model_inputs={"input_features": clips(setup, config, device)}, labels=labels)
    if setup.packing and setup.trainer.masks_samples and not config.is_encoder_decoder:
        sample = max(1, tokens // SAMPLES_PER_SEQUENCE)
        positions = (torch.arange(tokens, device=device) % sample).repeat(seqs).reshape(shape)
        if not flat:
            apart = torch.ones((seqs, 1, tokens, tokens), dtype=torch.bool, device=device)
            return Batch(model_inputs={"input_ids": ids, "attention_mask": apart}, labels=labels)
        return Batch(model_inputs={"input_ids": ids, "position_ids": positions}, labels=labels)
    mask = torch.ones(shape, dtype=torch.int64, device=device)
    inputs: dict[str, Any] = {"input_ids": ids}
    if setup.images is not None and not config.is_encoder_decoder:
        inputs |= image_inputs(setup, config, ids)
    if setup.pads:
        mask[-1, -1] = 0
    if setup.pads or device.type != "meta":
        inputs["attention_mask"] = mask
    return Batch(model_inputs=inputs, labels=labels, held=(mask,))


def clips(setup: TrainSetup, config: Any, device: torch.device | str) -> torch.Tensor:
    """The sound of a micro-batch, [seqs, mel bins, frames] in fp32; without autocast in the type that the first
    convolution multiplies.

    Source: transformers 5.23 `WhisperFeatureExtractor` (clips are padded to 30 s), `WhisperEncoder.forward`.
    """
    shape = (setup.micro_batch_seqs, int(config.num_mel_bins), 2 * int(config.max_source_positions))
    narrow = setup.autocast_dtype is None and not setup.kbit_fp32_cast
    return torch.ones(shape, dtype=DTYPES[setup.weight_dtype if narrow else "fp32"], device=device)


def waiting_inputs(setup: TrainSetup, config: Any, device: torch.device | str, *, num_made: int) -> list[torch.Tensor]:
    """The pixels or the sound of a step's further micro-batches, which lie on the device from its beginning on.

    Source: transformers 5.23 `Trainer.get_batch_samples`, which takes the batches of all micro-batches at once.
    """
    more = range(setup.accumulation_steps - num_made)
    if has_audio(config):
        return [clips(setup, config, device) for _ in more]
    if setup.images is None:
        return []
    encoder = encoder_for(setup, config)
    return [tensor for _ in more for tensor in pixels(setup, encoder, device).values()]
