"""Why a run ran out of memory, and the smallest change, from what its text says."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from planner.core.records import dataclass
from planner.core.units import GIB, gib
from planner.hardware.gpus import all_gpus, windows_memory_bytes
from planner.planning.failures.message import (
    EIGHT_BIT,
    EXPANDABLE,
    FUSED_ATTENTION,
    FUSED_LOSS,
    GRADIENT_CHECKPOINTING,
    LORA,
    MICRO_BATCH,
    SHORTER,
    Message,
    Phase,
    phase_of,
    read_message,
    sentences_of,
)

OWN_CARD = "each rank on its card before anything loads: torch.cuda.set_device(LOCAL_RANK), device_map={'': LOCAL_RANK}"
MANY_BYTES = GIB // 2
"""What other processes may hold before they are a cause: a desktop takes some hundred MiB."""
LARGE_FRACTION = 0.1
"""Of the card, before others or pieces are the cause and not beside it: full cards hold a few percent of pieces."""
CARD_TOLERANCE = 0.0125
"""A message rounds the total to two digits, and drivers differ: a T4 has 14.56 or 14.74 GiB, a 3060 11.65 or 11.76."""


TRAINERS = re.compile(r"transformers/trainer\.py|\b(?:trl|axolotl|llamafactory|swift)/|unsloth", re.IGNORECASE)
"""Files of programs that have the Trainer's arguments."""
INSTALLED = re.compile(r"(?:site|dist)-packages/|/lib/python")
IN_CODE = {
    MICRO_BATCH: "a smaller micro-batch, gradients accumulated over as many more: the same training",
    GRADIENT_CHECKPOINTING: "model.gradient_checkpointing_enable(): activations of one layer, about a quarter slower",
    FUSED_LOSS: "liger-kernel's AutoLigerKernelForCausalLM: the logits never exist as a whole",
    EIGHT_BIT: "bitsandbytes' PagedAdamW8bit (or AdamW8bit): a quarter of the states",
}
"""Changes by the Trainer's arguments -> the same in a loop of somebody's own."""
ADAPTERS = re.compile(
    r"trainable param(?:eter)?s ?[:=] ?([\d,]{1,20}) ?(?:/|\|\| all params: ?)([\d,]{1,20})", re.IGNORECASE
)
"""What trains, and of how much, as peft and Unsloth print it."""
OF_ADAPTERS = {
    LORA: "embed_tokens and lm_head left out of target_modules and modules_to_save, where they train; a smaller rank"
}
OF_UNSLOTH = {
    GRADIENT_CHECKPOINTING: "use_gradient_checkpointing='unsloth' in get_peft_model, where it is off or True",
    FUSED_LOSS: "UNSLOTH_RETURN_LOGITS=1 left out, where it is set: the logits come in pieces without it",
}
OF_PAIRS = re.compile(r"trl/.*/(?:dpo|kto|cpo|orpo|grpo|rloo|online_dpo|nash_md|xpo|gkd)_trainer\.py")
"""Trainers whose `loss_type` says another thing than supervised training's."""
WITHOUT_LOSS_TYPE = {FUSED_LOSS: "use_liger_kernel=True: the logits never exist as a whole"}
PAGED = {EIGHT_BIT: "optim='paged_adamw_8bit', where it is not paged yet: states move to the host as the card fills"}
"""Where bitsandbytes' optimizer runs: large embeddings have 32-bit states in its 8-bit ones too."""


REFUSED = (
    "a larger page file, on Windows and WSL: the driver wants room there for what it gives of the card's memory",
    "torch.cuda.set_per_process_memory_fraction, ulimit -v or a container's limit, where one is set",
    "the run again with nvidia-smi beside it: another process may have let the card go since",
)
"""What may refuse memory of a card that is not full. Source: ollama/ollama issue 8825 (page file); PyTorch 2.13
`c10/cuda/CUDACachingAllocator.cpp` (allowed_memory_maximum)."""


@dataclass(frozen=True)
class Cause:
    """Something that took the memory, and what to do about it, the smallest change first."""

    name: str
    words: str
    changes: tuple[str, ...]


HOST = {
    "host": Cause(
        "host memory",
        "the machine's own memory ran out, not the GPU's: the system ended the process",
        (
            "several processes each load the whole model: low_cpu_mem_usage, or FSDP's cpu_ram_efficient_loading",
            "fewer data loader workers, a data set that is streamed or memory-mapped rather than a list",
            "offload less to the host, or rent a machine with more memory",
        ),
    ),
    "shared": Cause(
        "shared memory",
        "/dev/shm ran out, through which the data loader's workers hand over their batches",
        ("docker run --shm-size=16g (or --ipc=host)", "dataloader_num_workers=0"),
    ),
    "dispatched": Cause(
        "no room for the model",
        "the model was larger than what the GPU had free as it loaded: device_map left layers to the CPU, where "
        "bitsandbytes' 4 and 8 bits do not run",
        (
            "restart the runtime: an earlier cell's model may still lie on the GPU (nvidia-smi)",
            "device_map={'': 0}: if it fits after all it loads; else the error says by how much it does not",
            "a smaller model, or 4 bits where it was 8: plan MODEL --gpu GPU says what fits",
        ),
    ),
}
"""Where memory ran out, other than in the run on the card -> the cause."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What is known of a failure: the cause that weighs most first, keys of the GPUs whose memory is the message's, and
    what would have to be known for more."""

    message: Message
    phase: Phase | None
    causes: tuple[Cause, ...]
    cards: tuple[str, ...]
    unknown: tuple[str, ...]


def diagnose(text: str) -> Diagnosis:
    """What a log, a traceback or a message says."""
    adapters = any(match[1] != match[2] for match in ADAPTERS.finditer(text))
    return diagnose_message(read_message(text), sentences_of(text), adapters=adapters)


def diagnose_message(message: Message, sentences: Iterable[str] = (), *, adapters: bool = False) -> Diagnosis:
    """What an error's figures and calls say, else its author; `adapters`: its log says that they train."""
    phase = phase_of(message.frames, message.code, sentences) if message.where else None
    if phase is not None:
        phase = replace(phase, changes=tuple(_applying(phase.changes, message, adapters=adapters)))
    causes = (HOST[message.where],) if message.where in HOST else tuple(_causes(message, phase))
    unknown = []
    if message.where == "device" and not message.frames and (phase is None or phase.name == "growth"):
        unknown.append("the traceback: paste it from 'Traceback (most recent call last)' on")
    elif message.where == "device" and phase is None:
        unknown.append("which part of the run it was: none of these calls is known")
    cards = _cards(message.total_bytes)
    return Diagnosis(message=message, phase=phase, causes=causes, cards=cards, unknown=tuple(unknown))


def _applying(changes: Iterable[str], message: Message, *, adapters: bool) -> Iterator[str]:
    """The changes in the words of the program that the calls are of."""
    files = [frame.file.replace(chr(92), "/") for frame in message.frames]
    own_loop = bool(files) and not INSTALLED.search(files[0]) and not any(map(TRAINERS.search, files))
    words = {
        **(IN_CODE if own_loop else {}),
        **(OF_UNSLOTH if any("unsloth" in file for file in files) else {}),
        **(WITHOUT_LOSS_TYPE if any(map(OF_PAIRS.search, files)) else {}),
        **(PAGED if any("bitsandbytes/optim/" in file for file in files) else {}),
        **(OF_ADAPTERS if adapters else {}),
    }
    return (words.get(change, change) for change in changes)


def _causes(message: Message, phase: Phase | None) -> Iterator[Cause]:
    """First what alone would have been enough (others gone, the pieces joined), then the part of the run."""
    enough: list[Cause] = []
    also: list[Cause] = []
    for cause, gained in (_others(message), _scattered(message)):
        if cause is not None:
            wanted = message.tried_bytes or 0
            large = gained >= LARGE_FRACTION * (message.total_bytes or 0)
            (enough if large and wanted <= (message.free_bytes or 0) + gained else also).append(cause)
    yield from enough
    total, tried, free = message.total_bytes, message.tried_bytes, message.free_bytes
    if tried and free and free > max(2 * tried, GIB):
        yield Cause("room on the card", f"{gib(tried)} were refused while the card had {gib(free)} free", REFUSED)
    if total and tried and tried > total:
        what = phase.words if phase else "one operation"
        words = f"{what} asked for {gib(tried)} at once, more than the whole card has"
        yield Cause("one allocation", words, () if phase else (FUSED_ATTENTION, MICRO_BATCH, SHORTER))
    if phase is not None:
        yield Cause(phase.name, f"{phase.words}: {phase.why}", phase.changes)
        yield from also


def _others(message: Message) -> tuple[Cause | None, int]:
    others, total = message.other_bytes or 0, message.total_bytes or 0
    if not MANY_BYTES < others <= total:
        return None, 0
    changes: tuple[str, ...] = (
        "nvidia-smi shows them: an earlier run that did not end, a notebook's kernel, vLLM, the desktop",
        "CUDA_VISIBLE_DEVICES for a card that is free",
    )
    words = f"other processes hold {gib(others)} of the card's {gib(total)}"
    if message.num_neighbours:
        words += f"; {message.num_neighbours} have numbers next to one another, as the ranks of one launch have"
        changes = (OWN_CARD, *changes)
    return Cause("other processes", words, changes), others


def _scattered(message: Message) -> tuple[Cause | None, int]:
    pieces, tried = message.unallocated_bytes or 0, message.tried_bytes or 0
    if not tried or pieces < max(tried, (message.total_bytes or 0) // 50):
        return None, 0
    words = f"PyTorch holds {gib(pieces)} that is free, in pieces too small for the {gib(tried)} asked for"
    changes = (EXPANDABLE, "batches of like lengths (group_by_length, packing): pieces of one size are used again")
    return Cause("fragmentation", words, changes), pieces


def _cards(total_bytes: int | None) -> tuple[str, ...]:
    if not total_bytes:
        return ()
    off = {
        gpu.key: min(abs(size / total_bytes - 1) for size in (gpu.memory_bytes, windows_memory_bytes(gpu)))
        for gpu in all_gpus()
        if gpu.vendor != "Apple"  # whose messages tell no total
    }
    return tuple(sorted((key for key, share in off.items() if share < CARD_TOLERANCE), key=off.__getitem__))
