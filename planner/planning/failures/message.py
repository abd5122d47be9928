"""A traceback or log as frames and a message, and in which phase of a step it ended."""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from planner.core.records import dataclass
from planner.core.units import GIB, KIB, MIB

# The figures of an out-of-memory message, and the frames of its traceback, in every form that logs hold them.


_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "KB": KIB, "MB": MIB, "GB": GIB}
_SIZE = r"(\d{1,18}(?:\.\d{1,9})?) (bytes|[KMG]i?B)"
_PREFIX = re.compile(
    r"(?:> ?){0,3}\s{0,40}(?:\[(?:rank)?\d{1,6}\]:?|\(\w{1,60} (?:pid|rank)=[^)\n]{1,80}\)|\[[^\]\n]{1,60}\]:"
    r"|\d{1,3}(?:\.\d{1,3}){3}:|> ?)[ \t]?"
)
"""What torchrun, Ray, pdsh, job logs or a quoting mail put before a line."""
_EDGE = r" {1,120}(?:│ {0,40}\n {0,40}│ {1,4})?"
"""Between two words of a rich box, where its width may end a line."""
_FRAMES = (
    # Python's own; IPython's since 8; rich's boxes; IPython's before 8; pytest's, and chains with arrows, pretty_errors
    re.compile(
        r"(?:File \"|(?m:^)[ \t]{0,60})(?P<file>[^\"\n]{1,400})\", line (?P<line>\d{1,9}), in (?P<name>[^\s(]{1,200})"
        r"(?:(?! File \")[^\n]){0,200}(?:\n(?![ \t]{0,60}File )[ \t]{0,60}(?P<code>[^\n]{1,300}))?"
    ),
    re.compile(r"File (?P<file>[^\"\s][^\n]{0,400}?):(?P<line>\d{1,9}), in (?P<name>[\w.<>]{1,200})"),
    re.compile(rf"│ (?P<file>\S[^\n│]{{0,300}}?):(?P<line>\d{{1,9}}){_EDGE}in{_EDGE}(?P<name>[\w<>]{{1,200}})"),
    re.compile(
        r"^\[?(?P<file>[^\s\]]{1,300}\.py|<ipython-input[^>\n]{1,60}>)(?:\]\([^)\n]{0,200}\))? in "
        r"(?P<name>[\w<>]{1,200})",
        re.MULTILINE,
    ),
    re.compile(
        r"(?<![\w./\\-])(?P<file>[\w./\\-]{1,300}\.py):(?P<line>\d{1,9})(?:: in)? (?P<name>\w{1,200})[ \t]*(?:->|$)",
        re.MULTILINE,
    ),
    re.compile(r"^ ?(?P<file>\w{1,100}\.py) (?P<line>\d{1,9}) (?P<name>[\w<>]{1,200})$", re.MULTILINE),
)
_IN_ENGINE = re.compile(
    r"^ {1,4}(?P<file>/[^\s(]{1,300}\.py)\((?P<line>\d{1,9})\): ?(?P<name>\w{0,200})$", re.MULTILINE
)
"""Python's calls inside autograd's engine, which pybind11 lists after the message, the innermost first."""
_ARROW = re.compile(
    r"^-{1,12}> {0,8}(?P<line>\d{1,9}) (?P<code>[^\n]{1,300})|❱ {0,8}\d{1,9} │(?P<boxed>[^\n]{1,300})", re.MULTILINE
)
"""The line that was run, as IPython and rich mark it."""
_OTHER = re.compile(rf"Process (\d{{1,10}}) has {_SIZE} memory in use")
_FIGURES = {
    "tried_bytes": re.compile(rf"Tried to allocate {_SIZE}"),
    "total_bytes": re.compile(rf"(?:total capac\w{{1,5}} of |GPU \d{{1,4}}; ){_SIZE}"),
    "free_bytes": re.compile(rf"of which {_SIZE} is free|allocated; {_SIZE} free"),
    "process_bytes": re.compile(rf"this process has {_SIZE} memory in use"),
    "allocated_bytes": re.compile(
        rf"allocated memory {_SIZE} is allocated by PyTorch|capacity; {_SIZE} already allocated|MPS allocated: {_SIZE}"
    ),
    "unallocated_bytes": re.compile(rf"and {_SIZE} is reserved by PyTorch but unallocated"),
    "reserved_bytes": re.compile(rf"free; {_SIZE} reserved in total by PyTorch"),
    "cached_bytes": re.compile(rf"free; {_SIZE} cached"),
}
_DEVICE_ERRORS = re.compile(
    r"(?:CUDA|HIP|XPU|GPU)[: ]{1,2}(?:error: )?out[- ]of[- ](?:the )?memory|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED"
    r"|MPS backend out of memory|OutOfMemoryError|(?-i:Tried) to allocate \d|Failed to CUDA calloc"
    r"|^Allocation on device\b|cudaErrorMemoryAllocation|cuda runtime error \(2\)"
    r"|negligible GPU memory available",
    re.IGNORECASE,
)
_CAUGHT = re.compile(r"\bCaught \w{1,60} in (?:replica|\w{1,40} process)")
"""DataParallel raises a replica's error again, and writes its traceback after it."""
_RAISED = re.compile(r"Error|error:|Tried to allocate|^\W{0,8}(?:CUDA|HIP|XPU|MPS|Allocation)")
"""Of a line with such an error: the program's own words, not those of who tells of it."""
_SHARED_ERRORS = re.compile(r"killed by signal: Bus error|out of shared memory|No space left on device.{0,80}/dev/shm")
_HOST_ERRORS = re.compile(
    r"can't allocate memory|Cannot allocate memory|\bMemoryError|\boom[-_ ]?kill|\bSIGKILL\b|OOMKilled"
    r"|killed by signal: Killed|out of memory: Killed process|(?:exit ?|return |run )code {0,4}[:=]? {0,2}-9\b"
    r"|(?m:^(?:zsh: |\[\d{1,4}\] {1,8}\d{1,9} |.{0,80}line \d{1,6}: {1,8}\d{1,9} )?killed(?: {2,40}\S.{0,200})?\r?$)"
    r"|DataLoader worker.{0,20} killed\b(?!.{0,20}: (?:Seg|Bus))"
    r"|crashed after using all available RAM|notebook tried to allocate more memory than is available"
    r"|running low on memory|ray-oom-prevention|\b(?:CPU|RAM|host|node)(?: memory)?[ -]OOM\b"
    r"|(?<!GPU )(?<!video )\bRAM (?:usage )?(?:is |was |gets )?(?:maxed|full\b|exhausted)",
    re.IGNORECASE,
)
_DISPATCHED = re.compile(r"modules are dispatched on the CPU")
_IN_WORDS = re.compile(
    r"out[- _]of[- _](?:(?:GPU|CUDA|video)[- _])?memory|memory overflow"
    r"|(?<![a-z])ooms?(?![a-z])|显存(?:不够|不足|溢出|爆|被?占满)|爆显存"
    r"|占满[显内]存|报错代码|\bmemory crash|\bexceeds? (?:the )?(?:GPU|CUDA) memory"
    r"|\bmemory leak|\b(?:GPU|CUDA) memory error|\bv?ram overflow|overflow\w*\b.{0,15}\b(?:v?ram|memory)\b"
    r"|\binsufficient (?:video |GPU |CUDA |CPU |system )?(?:memory|v?ram)\b",
    re.IGNORECASE,
)
"""As people say it, where no error's own text was pasted."""
_CARD_IN_WORDS = re.compile(r"\b(?:GPUs?|CUDA|VRAM|cards?)\b|显存|显卡", re.IGNORECASE)
_HOST_IN_WORDS = re.compile(
    r"\b(?:system|host|CPU)(?:'s)? (?:memory|RAM)\b|\bRAM\b|\b(?:tokeni[sz]|preprocess)ing\b"
    r"|内存(?:不够|不足|溢出|爆|.{0,20}oom)|爆内存",
    re.IGNORECASE,
)
"""Of whose memory people speak, where no error's own text tells."""
_MEMORY_GROWTH = re.compile(
    r"\bmem(?:ory)?[- ]?leak|(?:显存|内存).{0,30}(?:一直|逐渐|不断|越来越|随着?|持续).{0,20}[涨增升高大多]"
    r"|\b(?:memory|v?ram|usage|consumption|footprint)\b(?!.{0,30}\bnot\b).{0,40}"
    r"(?:\b(?:grow(?:s|n|ing)?|grew|accumulat\w+|climb\w*|(?:gets?|getting) (?:larger|higher))\b"
    r"|\b(?:keeps?|kept|gradual\w*|continu\w+|slowly|steadily|constantly|is|has been)\b.{0,20}"
    r"\b(?:increas|ris[ei]|fill)\w*\b|\bincreas\w+ (?:as|with|every|each|over|after)\b)"
    r"|\bafter(?: [^\s,.]+){1,4} (?:steps|epochs|iterations|iters|batches|hours|minutes)\b|\bafter a while\b"
    r"|\buntil the \w+ (?:\w+ )?epoch\b|(?:训练|运行|跑)[到了].{0,12}(?:%|一半|步|轮|小时)|一段时间",
    re.IGNORECASE,
)
"""Memory that ran out later than in the first steps, as its author tells it."""
_ERROR_SENTENCE = re.compile(
    rf"{_IN_WORDS.pattern}|{_DEVICE_ERRORS.pattern}|{_MEMORY_GROWTH.pattern}|\bcrash|\b(?:dies|fail(?:s|ed))\b|\b(?:solved|fixed|resolved)\b"
    r"|\berror (?:is |was |has )?(?:occur|happen|raised|thrown)|^\W*(?:it )?occurs?\b",
    re.IGNORECASE,
)
_BEFORE = re.compile(
    r"^.{0,100}\b(?:[Rr]unning|[Ss]tarting|[Ss]aving) .{3,100}(?=\n.{0,40}Traceback)"
    r"|C\+\+ engine to run the backward pass",
    re.MULTILINE,
)
"""The line of a log after which a traceback starts; what autograd's own line says, where no mark shows it was run."""
_OTHER_ERRORS = re.compile(r"^\W{0,20}[A-Za-z_][\w.]{0,100}(?:Error|Exception)\b(?!.{0,20}Traceback)")
CONTEXT_BYTES = GIB
"""What CUDA and its libraries take beside PyTorch's own memory, at most: messages before 2.1 do not count it."""
MAX_FRAMES = 400
MAX_SENTENCE = 1000
MAX_LINE = 20_000
"""Of a longer line the end is read."""
MAX_TRACEBACK = 1_000_000
"""Letters before the error in which its traceback stands."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A call of the traceback, with the source line that was run where the text has it."""

    file: str
    line: int
    function: str
    code: str = ""


@dataclass(frozen=True, kw_only=True)
class Message:
    """What the text says. Sizes in bytes, None where it does not say them.

    Attributes:
        where: "device", "host", "shared" (the host's /dev/shm), "dispatched" (layers for which the GPU had no
            room), or "" where the text tells of none running out.
        frames: the last traceback's, the innermost last; `code`: the source line before the error, often pasted alone.
        tried_bytes: the allocation that failed.
        other_bytes: what other processes hold on the card, where the message counts them.
        num_neighbours: how many of the others have numbers next to one another, as the ranks of one launch have.
        unallocated_bytes: what PyTorch holds in cached blocks of the wrong size.
    """

    where: str
    frames: tuple[Frame, ...] = ()
    code: str = ""
    tried_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    process_bytes: int | None = None
    allocated_bytes: int | None = None
    unallocated_bytes: int | None = None
    other_bytes: int | None = None
    num_neighbours: int | None = None


def read_message(text: str) -> Message:
    """The last out-of-memory error of a text, with the traceback before it."""
    raw = [line[-MAX_LINE:] for line in text.splitlines()]
    lines = [_PREFIX.sub("", line, count=1) if _PREFIX.match(line) else line for line in raw]
    where, at = _error(lines)
    if at is None:
        return Message(where="", frames=frames_of(lines))
    caught = frames_of(lines[at:]) if _CAUGHT.search(lines[at]) else ()
    of_process: list[str] = []
    if prefix := _PREFIX.match(raw[at]):  # several processes write into one log
        of_process = [line for line, whole in zip(lines[: at + 1], raw, strict=False) if whole.startswith(prefix[0])]
    frames = caught or frames_of(of_process) or frames_of(lines[: at + 1]) or frames_of(lines)
    inner = tuple(_frames(_IN_ENGINE, "\n".join(lines[at + 1 : at + MAX_FRAMES])))[::-1]
    return Message(
        where=where, frames=(*frames, *inner)[-MAX_FRAMES:], code=_code(lines, at), **_figures(lines[at : at + 6])
    )


def sentences_of(text: str) -> Iterator[str]:
    """Sentences in which people speak of the error, or of what ended it; what a log says of the moment before it."""
    yield from (match[0] for match in _BEFORE.finditer(text))
    for line in text.splitlines():
        if len(line) <= MAX_SENTENCE and not line.startswith(("    ", "  File", "│")):
            yield from filter(_ERROR_SENTENCE.search, re.split(r"(?<=[.!?;])\s|(?<=[。！？])", line))


def _error(lines: Sequence[str]) -> tuple[str, int | None]:
    device = _last(lines, _DEVICE_ERRORS)
    if device is not None and _RAISED.search(lines[device]):
        return "device", device
    for where, pattern in (("dispatched", _DISPATCHED), ("shared", _SHARED_ERRORS), ("host", _HOST_ERRORS)):
        at = _last(lines, pattern)
        if at is not None:
            return where, at
    if device is not None:
        return "device", device
    if any(_OTHER_ERRORS.match(line) for line in lines):
        return "", None
    at = _last(lines, _IN_WORDS)
    if at is None:
        return "", None
    hosts = (
        any(map(_HOST_IN_WORDS.search, passage)) and not any(map(_CARD_IN_WORDS.search, passage))
        for passage in (lines[at : at + 1], lines)
    )
    return ("host" if any(hosts) else "device"), at


def _figures(lines: Sequence[str]) -> dict[str, int]:
    """The sizes of a message, which a terminal may have cut between any two letters."""
    spaced, joined = " ".join(lines), "".join(lines)
    sizes = {name: _size(pattern, spaced) or _size(pattern, joined) for name, pattern in _FIGURES.items()}
    zero = {name for name, pattern in _FIGURES.items() if sizes[name] is None and _size(pattern, spaced) == 0}
    figures = {name: size for name, size in sizes.items() if size is not None} | dict.fromkeys(zero, 0)
    allocated = figures.get("allocated_bytes", 0)
    reserved, cached = figures.pop("reserved_bytes", None), figures.pop("cached_bytes", None)
    if cached is not None:
        reserved = allocated + cached
    if reserved is not None and allocated:
        figures.setdefault("unallocated_bytes", max(0, reserved - allocated))
    if not figures.get("process_bytes"):  # a container hides the process's own number: "0 bytes"
        figures.pop("process_bytes", None)
    total, free = figures.get("total_bytes"), figures.get("free_bytes")
    if reserved is None and allocated and "unallocated_bytes" in figures:
        reserved = allocated + figures["unallocated_bytes"]
    others = _OTHER.findall(spaced)
    numbers = sorted({int(number) for number, *_ in others})
    if len(numbers) > 1 and numbers[-1] - numbers[0] <= len(numbers):  # the process itself may lie between them
        figures["num_neighbours"] = len(numbers)
    processes = [size for size in (_bytes(*groups) for _, *groups in others) if size]
    if processes and ("process_bytes" in figures or reserved is not None):
        mine = min((size for size in processes if size >= (reserved or 0)), default=0)
        # in a container the message counts the process itself with the others
        figures["other_bytes"] = sum(processes) - (0 if "process_bytes" in figures else mine)
    elif total is not None and free is not None and "process_bytes" in figures:
        figures["other_bytes"] = max(0, total - free - figures["process_bytes"])
    elif total is not None and free is not None and reserved is not None:
        figures["other_bytes"] = max(0, total - free - reserved - CONTEXT_BYTES)
    return figures


def _code(lines: Sequence[str], at: int) -> str:
    """The source line before the error, and what stands before the error on its own line."""
    before = _DEVICE_ERRORS.split(lines[at], maxsplit=1)[0][-1000:]
    for line in reversed(lines[max(0, at - 12) : at]):
        marked = _ARROW.search(line)
        if marked:
            return f"{marked['code'] or marked['boxed']} {before}"
        of_pytest = lines[at].startswith("E  ")
        if "│" not in line and line.strip(" \t^~╯╰─-") and (of_pytest or not line.startswith(" " * 5)):
            return f"{line.strip()[:300]} {before}"
    return before


def frames_of(lines: Sequence[str]) -> tuple[Frame, ...]:
    """The frames of the last traceback of these lines."""
    starts = [index for index, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    text = "\n".join(lines[starts[-1] :] if starts else lines)[-MAX_TRACEBACK:]
    return next((frames for pattern in _FRAMES if (frames := tuple(_frames(pattern, text)))), ())


def _frames(pattern: re.Pattern[str], text: str) -> Iterator[Frame]:
    for match in deque(pattern.finditer(text), maxlen=MAX_FRAMES):
        parts = match.groupdict()
        line, code = parts.get("line"), parts.get("code") or ""
        if "code" not in parts:
            marked = _ARROW.search(text, match.end(), match.end() + 4000)
            if marked:
                line, code = line or marked["line"], marked["code"] or marked["boxed"]
        name = parts["name"].rpartition(".")[2]
        yield Frame(file=parts["file"].strip(), line=int(line or 0), function=name, code=code.strip())


def _last(lines: Sequence[str], pattern: re.Pattern[str]) -> int | None:
    """The last line that says so, with figures where any line has them."""
    indices = [index for index, line in enumerate(lines) if pattern.search(line)]
    sized = [index for index in indices if "Tried to allocate" in lines[index]]
    return max(sized or indices, default=None)


def _size(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    if match is None:
        return None
    number, unit = (group for group in match.groups() if group is not None)
    return _bytes(number, unit)


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])


# Which part of a run asked for the memory that was not there, by the calls of the traceback.


@dataclass(frozen=True)
class Phase:
    """A part of a run: what was being done, what holds or asks for memory there, and what makes less of it, the
    smallest change first; each "setting: what it does"."""

    name: str
    words: str
    why: str
    changes: tuple[str, ...]


GRADIENT_CHECKPOINTING = "gradient_checkpointing=True: activations of one layer at a time, about a quarter slower"
MICRO_BATCH = "per_device_train_batch_size down, gradient_accumulation_steps up by as much: the same training"
SHORTER = "a shorter maximum length: changes what is learned, last"
FUSED_LOSS = "use_liger_kernel=True (or TRL's loss_type='chunked_nll'): the logits never exist as a whole"
FUSED_ATTENTION = "attn_implementation='sdpa' (or 'flash_attention_2'): scores in pieces, same result"
QUANTIZED = "a 4-bit base (QLoRA): a quarter of the weights"
EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True (before torch 2.9 PYTORCH_CUDA_ALLOC_CONF)"
EIGHT_BIT = "optim='paged_adamw_8bit' (or adamw_8bit): a quarter of the states"
LORA = "LoRA instead of full fine-tuning: no gradients and optimizer states of the base"

PHASES = {
    name: Phase(name, words, why, tuple(changes))
    for name, words, why, *changes in (
        (
            "load",
            "loading the weights",
            "the weights alone do not fit beside what is there (a merge or a cast to 32 bits holds them twice)",
            "dtype=torch.bfloat16 in from_pretrained: 32 bits are the default of transformers before 5 and of TRL",
            QUANTIZED,
            "torch.load(..., map_location='cpu') of a checkpoint, deleted once it is in the model",
            "device_map={'': local_rank} with several processes, so that each loads on its own card",
        ),
        (
            "kbit-cast",
            "casting the unquantized rest to 32 bits (prepare_model_for_kbit_training)",
            "embeddings, norms and head of a quantized base are copied into 32 bits; an unquantized base whole",
            "without prepare_model_for_kbit_training: TRL and transformers need only enable_input_require_grads",
        ),
        (
            "wrap",
            "spreading the model over the GPUs (DDP, FSDP, DeepSpeed)",
            "each process holds the whole model, and its buckets or flat parameters beside it, while it is cut up",
            "FSDP: cpu_ram_efficient_loading and sync_module_states, the model loaded on the CPU",
            "DeepSpeed: ZeRO-3 with the model made under HfDeepSpeedConfig, so that it is never whole",
            LORA,
        ),
        (
            "attention",
            "attention in the forward pass",
            "the scores of every pair of tokens exist at once: eager attention, or a mask that SDPA refuses",
            FUSED_ATTENTION,
            GRADIENT_CHECKPOINTING,
            MICRO_BATCH,
            SHORTER,
        ),
        (
            "forward",
            "the forward pass",
            "what each layer keeps for the backward pass adds up: it grows with micro-batch x length",
            *(GRADIENT_CHECKPOINTING, MICRO_BATCH, QUANTIZED, SHORTER),
        ),
        (
            "loss",
            "the loss over the vocabulary",
            "logits are tokens x vocabulary numbers, in 16 and in 32 bits, and their gradient once more",
            *(FUSED_LOSS, MICRO_BATCH, SHORTER),
        ),
        (
            "unsloth-loss",
            "Unsloth's loss, whose pieces are sized by what the card has free",
            "nothing was free: what PyTorch only caches is taken there too (unsloth_zoo, fused_losses)",
            "UNSLOTH_CE_LOSS_TARGET_GB=1, set before unsloth is imported: pieces of that size",
            *(EXPANDABLE, MICRO_BATCH, SHORTER),
        ),
        (
            "gather",
            "gathering a layer's weights from the other GPUs",
            "the card was full as they came: of activations, gradients and layers gathered ahead",
            *(GRADIENT_CHECKPOINTING, MICRO_BATCH),
            "DeepSpeed ZeRO-3: stage3_max_live_parameters and stage3_prefetch_bucket_size down, slower",
            SHORTER,
        ),
        (
            "recompute",
            "the backward pass, running a checkpointed layer again",
            "one layer's activations and gradients exist beside the kept ones",
            *(FUSED_LOSS, MICRO_BATCH, "checkpointing of every layer, not every n-th", QUANTIZED, SHORTER),
        ),
        (
            "backward",
            "the backward pass",
            "gradients grow while activations are still there",
            *(GRADIENT_CHECKPOINTING, FUSED_LOSS, MICRO_BATCH, LORA, SHORTER),
        ),
        (
            "optimizer",
            "the optimizer's step",
            "AdamW makes two states of each trained parameter in its first step: 8 bytes each in 32 bits",
            EIGHT_BIT,
            LORA,
            "FSDP or ZeRO over more GPUs",
        ),
        (
            "zero-states",
            "making ZeRO's optimizer states",
            "each process holds fp32 weights and two fp32 states of its share of what trains: 12 bytes a parameter",
            "offload_optimizer: device cpu, the states in the host's memory",
            "ZeRO-3: weights and gradients are shared out too",
            "more GPUs: each holds a smaller share",
            LORA,
        ),
        (
            "evaluation-gather",
            "an evaluation that keeps every batch's logits",
            "with compute_metrics the logits of the whole evaluation set stay on the GPU until it ends",
            "eval_accumulation_steps=1: each batch's logits go to the host",
            "preprocess_logits_for_metrics: keep what the metric needs (argmax), not the logits",
            "prediction_loss_only=True: no logits at all",
        ),
        (
            "evaluation",
            "an evaluation",
            "nothing is checkpointed and the whole logits exist, at per_device_eval_batch_size (8 unless set)",
            "per_device_eval_batch_size=1",
            "prediction_loss_only=True",
            "eval_accumulation_steps=1",
        ),
        (
            "generation",
            "generating completions",
            "keys and values of every token are cached, for all completions made at once",
            "fewer completions at once (num_generations, generation_batch_size, steps_per_generation)",
            "vllm_gpu_memory_utilization down, or vllm_enable_sleep_mode=True",
            "ds3_gather_for_generation=False (DeepSpeed ZeRO-3): the weights stay spread, slower",
            "a shorter max_completion_length",
        ),
        (
            "vllm-start",
            "starting vLLM",
            "it takes vllm_gpu_memory_utilization of the whole card, beside the model that trains",
            "vllm_gpu_memory_utilization down (0.3 is TRL's default), or vllm_enable_sleep_mode=True",
            "vllm_max_model_length: the prompt and the completion, not all that the model can read",
            "vllm_mode='server': vLLM on a GPU of its own",
        ),
        (
            "reference",
            "the reference model's pass",
            "a second whole model, or a pass with the adapters off, beside the one that is trained",
            "precompute_ref_log_probs=True: the reference runs once, before training",
            "LoRA: the reference is the base with its adapters off, no second copy",
            MICRO_BATCH,
        ),
        (
            "growth",
            "a later step, after steps that fitted",
            "memory grew: a longer batch than those before, tensors that are kept, or a cache in pieces",
            "loss.item(), .detach() or .cpu() for what is collected: a loss that is kept keeps its whole graph",
            "the longest samples first, once: it shows at once whether they fit, or whether memory grows",
            EXPANDABLE,
            SHORTER,
        ),
        (
            "save",
            "saving, merging or loading a checkpoint",
            "the weights are gathered or copied whole beside what training holds",
            "FSDP: state_dict_type SHARDED_STATE_DICT; DeepSpeed: stage3_gather_16bit_weights_on_model_save off",
            "merge adapters in a process of its own, on the CPU",
            "load_best_model_at_end=False",
        ),
    )
}

_TRAINER_EVALUATES = (
    "evaluate|evaluation_loop|prediction_loop|prediction_step|predict|_evaluate|eval_loop|validate"
    "|val(?:id\\w*)?_(?:one_)?(?:epoch|loop|step)"
)
_SAVES = (
    "_?(?:[a-z]+_)?save_(?!evaluate)\\w+|merge_and_\\w+|_merge_lora|unsloth_\\w*save\\w*|_load_best_model|_save|_load_from_checkpoint"
    "|full_tensor|get_model_state_dict|push_to_hub\\w*|_\\w*state_dict_hook"
)
_REFERENCE = "compute_reference_log_probs|compute_ref_log_probs|_get_per_token_logps_ref|compute_ref_logprobs"
_LOSSES = (
    "cross_entropy|\\w*log_softmax|ForCausalLMLoss|compute_log_probs|get_batch_logps|entropy_from_logits|log_?sum_?exp"
)
_LOADS = (
    "from_pretrained|_load_pretrained_model|_load_state_dict_into_meta_model|_load_from_state_dict|load_shard_files?"
    "|_move_model_to_device|create_quantized_param|load_model|prepare_model"
)
_RULES = (
    # phase, pattern of "file:function": the first rule that any frame meets
    (
        "evaluation-gather",
        r":(?:pad_across_processes|\w*pad_and_concatenate|nested_concat|nested_numpify|_?gather_for_metrics)$",
    ),
    ("save", rf":(?:{_SAVES}|consolidate\w*|merge)$"),
    (
        "vllm-start",
        r"vllm/.*:(?:from_engine_args|_initialize_kv_caches|determine_(?:num_available_blocks|available_memory)"
        r"|profile_run|capture_model|initialize_from_config)$",
    ),
    (
        "generation",
        r"generation/utils\.py:|(?::_?generate(?!_and_score)\w*|:unwrap_model_for_generation)$|vllm/|:_sample$|:_prefill$",
    ),
    ("evaluation", rf":(?:{_TRAINER_EVALUATES})$"),
    ("save", r"torch/optim/optimizer\.py:load_state_dict$"),
    (
        "optimizer",
        r"torch/optim/(?!lr_scheduler)\w+\.py:|bitsandbytes/optim/|:(?:init_state|_init_group|_take_model_step|get_paged)$",
    ),
    ("optimizer", r"accelerate/optimizer\.py:step$|grad_scaler\.py:(?:step|_maybe_opt_step)$"),
    ("optimizer", r"(?:low_level_optim|hybrid_adam|stage_1_and_2|stage3|cpu_adam|fused_adam)\.py:step$"),
    ("kbit-cast", r":prepare_model_for_kbit_training$"),
    ("reference", rf":(?:{_REFERENCE})$"),
    ("recompute", r":(?:unpack_hook|inner_unpack|recompute_fn\w*)$|checkpoint(?:ing)?\.py:(?:backward)?$"),
    ("unsloth-loss", r"unsloth_zoo/fused_losses/.*:_?get_chunk_\w+$"),
    ("loss", r"accelerate/utils/operations\.py:_?convert_to_fp32$"),
    (
        "loss",
        rf"loss/loss_\w+\.py:|(?:loss|cross_entropy)\.py:forward$|:(?:{_LOSSES}|fixed_cross_entropy|fused_linear\w*)$",
    ),
    ("backward", r":(?:backward|_engine_run_backward|apply_backward|clip_grad_norm_?|clip_grads_with_norm_?)$"),
    ("gather", r":(?:fetch_sub_module|_{0,2}all_gather_(?:params|coalesced)_?|_?unshard)$"),
    (
        "attention",
        r":(?:\w*attention_forward|scaled_dot_product_attention|_flash_attention_forward|softmax|repeat_kv)$",
    ),
    (
        "attention",
        r"attention\.py:|flash_attn_interface\.py:|xformers/ops/|:_?(?:attn|attention)\w*$"
        r"|:_make_causal_mask$|:_expand_mask$|:_update_causal_mask$",
    ),
    ("zero-states", r":initialize_optimizer_states$"),
    (
        "wrap",
        r"(?:parallel/distributed|fully_sharded_data_parallel|_init_utils|_?flat_param|fsdp2?_utils)\.py:_{0,2}init",
    ),
    (
        "wrap",
        r":(?:_setup_for_real_optimizer|fully_shard|fsdp2_prepare_model|_sync_module_states|_verify_param_shape_across_processes)$",
    ),
    ("wrap", r"deepspeed/(?:__init__\.py:initialize|runtime/(?:engine|zero/\w+)\.py:(?:__init__|_configure\w*))"),
    (
        "load",
        rf":(?:{_LOADS}|set_module_tensor_to_device|load_checkpoint\w*|load_state_dict)$|torch/serialization\.py:",
    ),
    ("forward", r":_get_per_token_logps\w*$"),
    ("generation", r":_generate_and_score_completions$"),
    ("forward", r":(?:training_step|compute_loss|_inner_training_loop|\w*forward|train_step|forward_pass)$"),
    ("load", r":(?:cuda|to|_quantize|half|bfloat16)$|nn/modules/module\.py:(?:_apply|convert)$"),
    ("forward", r"nn/modules/module\.py:(?:(?:_wrapped)?_call_impl|__call__)$"),
    ("load", r":_?(?:setup|load|get|build|create|init|initialize)_(?:[a-z]+_)?model\w*$"),
)
_CODE_RULES = (
    # phase, pattern of a source line
    ("evaluation-gather", r"\bpreds\w* = .{0,80}(?:torch\.cat|nested_concat)"),
    ("save", r"state_dict\(\)|save_pretrained\w*\(|torch\.save\(|merge_and_unload\("),
    ("generation", r"\.generate(?:_(?:sequences|completions|samples|responses))?\("),
    ("optimizer", r"optim\w*['\"\]]{0,2}\.step\(|\bexp_avg"),
    ("loss", r"lm_head\(|cross_entropy|log_softmax|logsumexp|logits\.float\("),
    ("backward", r"\.backward\(|run_backward"),
    (
        "attention",
        r"einsum\(.{0,60}\bq\w*, ?k|(?:att(?:entio)?n\w*|\binput)\.softmax|\w*attention\(|scores\.masked_fill"
        r"|\b(?:att\w*|scores|probs) @ |attn_(?:weights|scores|probs) = |scaled_dot_product|matmul\(q|softmax\(att",
    ),
    (
        "load",
        r"\btorch\.load\(|load_state_dict\(|\.to\((?:self\.)?(?:args\.)?\w*device|\.cuda\(\)|from_pretrained\(|prepare_model\(",
    ),
    ("forward", r"\bF\.\w+\(|\b_?(?:model|unet|transformer)\(|(?:loss|train|training|forward)_step\(|compute_loss\("),
)
_WHEN = r"\b(?:during|while|when|in|on|at|calling|doing)\s+(?:the\s|a\s|my\s|each\s|first\s|model\s){0,2}"
_PHASE_SENTENCES = (
    # phase, pattern of a sentence that tells of the error
    (
        "save",
        r"\bmodel checkpointing\b|\b(?:checkpoint|ckpt|model|weights?)[ -]sav(?:e|ing)\b"
        r"|(?<!after )\bsav(?:es?|ing)\b.{0,40}\b(?:model|checkpoint|ckpt|weights?|states?|adapter)|保存(?!.{0,8}后)"
        r"|\bmerg(?:e|ing)\b.{0,40}\b(?:lora|models?|weights?|adapters?)|\b(?:lora|models?|weights?) merging"
        r"|合并(?!的|.{0,8}后)",
    ),
    ("optimizer", r"\boptim(?:i[sz]er)?(?:'s |\.|[ _])(?:step|states?)\b"),
    ("reference", _WHEN + r".{0,20}\bref(?:erence)?[ _](?:model|policy|log)"),
    ("loss", r"cross[- _]?entropy|\blog_?softmax\b|\b(?:comput|calculat)\w{1,5} (?:the )?(?:loss|log[- _]?p)"),
    ("backward", r"\bbackward(?:\(|[ -]pass|\b.{0,20}propagat)|" + _WHEN + r"`?(?:loss\.)?back(?:ward|-?prop)"),
    (
        "evaluation",
        r"(?<![a-z])(?<!after )(?<!after a )(?<!after the )(?<!after each )(?:eval(?!\w*_batch)|validation|validating)"
        r"|\bsanity[- ]check|评估|验证",
    ),
    (
        "wrap",
        r"\binit\w{0,8} .{0,10}\b(?:ddp|fsdp|deepspeed|distributed)|\b(?:ddp|fsdp) (?:init|wrap)"
        r"|deepspeed\.initialize|accelerator\.prepare",
    ),
    (
        "generation",
        r"cumem_allocator|\bsampl(?:e|ing) (?:images?|frames?|videos?)|"
        + _WHEN
        + r"(?:generat|rollouts?\b|rolling out|sampling|inference|decoding)|推理",
    ),
    (
        "load",
        _WHEN + r"(?:load|initiali[sz])|\bresum(?:e|ing)\b.{0,40}\b(?:checkpoints?|ckpt|training)\b"
        r"|\bloading\b.{0,30}\b(?:model|checkpoint|weights?)|\bloaded (?:always )?(?:gets?|got|goes) oom\b"
        r"|加载(?!完|.{0,4}数据)",
    ),
    ("forward", _WHEN + "`?(?:forward|train(?:ing)?[ _](?:pass|step))"),
    ("attention", _WHEN + r"`?(?:self[- _]?)?atten|forward_attention"),
    ("attention", r"\b(?:solved|fixed|resolved)\b.{0,60}\bflash[- _]?att|\bflash[- _]?att.{0,60}\b(?:solves|fixes)\b"),
)
"""Where neither calls nor source lines are known: what its author says of the moment."""
_NO_MOMENT = re.compile(
    r"\boffload|\b(?:does|did)(?:n't| not) help\b|\bno success\b|n[o']t (?:been )?solved|\bother error", re.IGNORECASE
)
"""A sentence that tells of what was tried, or of another error."""
_WORKS = re.compile(
    r"\b(?:works?|worked|runs?|ran|goes|is|was) (?:totally |just )?(?:fine|well|ok(?:ay)?|normal(?:ly)?)\b[^,.;]*",
    re.IGNORECASE,
)
_NAMED = re.compile(r"\b([a-z_]\w{5,60})\(|`([a-z_]\w{5,60})`")
"""A function that a sentence names."""
_REFINED = {
    None: {name for name, _ in _CODE_RULES},
    "forward": {"loss", "attention"},
    "evaluation": {"evaluation-gather"},
}
"""Phase by the calls -> what the source lines may make of it."""


def phase_of(frames: Iterable[Frame], code: str = "", words: Iterable[str] = ()) -> Phase | None:
    """The part of the run that these calls, and the line before the error, belong to, else that the words tell; None
    where no rule knows them.

    A rule counts wherever it is met: an evaluation's forward pass is evaluation, a checkpointed layer's is recompute.
    """
    frames = list(frames)
    inside = max((at + 1 for at, frame in enumerate(frames) if frame.function == "closure"), default=0)
    frames = frames[inside:] or frames  # Lightning's optimizer.step() runs the forward and backward pass
    calls = (f"{frame.file.replace(chr(92), '/')}:{frame.function}" for frame in frames)
    first = min(map(_rule_of, calls), default=len(_RULES))
    phase_name = _RULES[first][0] if first < len(_RULES) else None
    lines = [*(frame.code for frame in frames if frame.code and "torch/_" not in frame.file), code]
    allowed = _REFINED.get(phase_name, set())
    refined = (
        name for name, pattern in _CODE_RULES if name in allowed and any(re.search(pattern, line) for line in lines)
    )
    name = next(refined, phase_name) or _in_words(words)
    return PHASES[name] if name else None


def _in_words(sentences: Iterable[str]) -> str | None:
    """The part of the run that the first sentence names which names any, or whose code it quotes."""
    moments = [_WORKS.sub("", sentence) for sentence in sentences if not _NO_MOMENT.search(sentence)]
    for moment in moments:
        matched = (
            name for name, pattern in (*_PHASE_SENTENCES, *_CODE_RULES) if re.search(pattern, moment, re.IGNORECASE)
        )
        called = (
            _RULES[at][0] for names in _NAMED.findall(moment) if (at := _rule_of(f":{''.join(names)}")) < len(_RULES)
        )
        if phase_name := next(matched, None) or next(called, None):
            return phase_name
    return "growth" if any(map(_MEMORY_GROWTH.search, moments)) else None


@lru_cache(maxsize=20_000)
def _rule_of(call: str) -> int:
    """The first rule that a call meets; a snapshot has each call thousands of times."""
    return next((number for number, (_, called) in enumerate(_RULES) if re.search(called, call)), len(_RULES))
