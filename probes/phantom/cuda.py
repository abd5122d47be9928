"""`torch.cuda` and `torch.accelerator` as a program on the card finds them."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from probes.allocator.caching import CachingAllocator
from probes.dryrun import streams
from probes.patching import Replacement, nothing, replaced
from probes.phantom.card import Card
from probes.phantom.claims import CPU, CUDA
from probes.phantom.mode import Phantom

CUDA_VERSION = "13.0"
CUDNN_VERSION = 91300
NCCL_VERSION = (2, 28, 9)


class Refused(NotImplementedError):
    """The program asks for something that the phantom GPU cannot follow.

    Attributes:
        messages: everything that was refused in this process: a program that catches it has left its true path.
    """

    messages: ClassVar[list[str]] = []

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.messages.append(what)


class Properties(SimpleNamespace):
    """What `torch.cuda.get_device_properties` gives, of a class of ours: what it lacks is our lack."""


def properties(card: Card) -> Properties:
    major, minor = card.capability
    return Properties(
        name=card.name,
        major=major,
        minor=minor,
        total_memory=card.memory_bytes,
        multi_processor_count=card.num_sms,
        max_threads_per_multi_processor=card.threads_per_sm,
        max_threads_per_block=1024,
        warp_size=32,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448 if major in (9, 10) else 101376,
        shared_memory_per_multiprocessor=233472 if major in (9, 10) else 102400,
        L2_cache_size=card.l2_bytes,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
        uuid="00000000-0000-0000-0000-000000000000",
        pci_bus_id=1,
        pci_device_id=0,
        pci_domain_id=0,
    )


class Stream(streams.Stream):
    """A stream on which everything has happened."""

    cuda_stream = stream_id = device_index = priority = 0
    device_type = 1

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        super().__init__()
        self.device = CUDA

    def record_event(self, event: Any = None) -> Any:
        return super().record_event(event or Event())

    def is_capturing(self) -> bool:
        return False


class Event(streams.Event):
    """An event that has happened; between two of them no time passes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.device = CUDA


class Device(nullcontext[None]):
    """`torch.cuda.device`."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self.idx = 0


streams.Stream.main = streams.Stream.current = _main = Stream()


def refusing(message: str) -> Callable[..., Any]:
    """What raises `Refused` when it is called."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise Refused(message)

    return refuse


def _refused_class(message: str) -> type:
    """A class, as annotations name it, that cannot be made."""
    return type("Refused", (), {"__init__": refusing(message)})


_NO_GRAPH = "a CUDA graph cannot be followed without a GPU"
_NO_POOL = "a private memory pool cannot be followed without a GPU"


def _as_own_object(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function object of its own: PyTorch's compiler keeps rules by object and refuses one with two names."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def _num_local() -> int:
    """One GPU for each process that a launcher started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def _functions(phantom: Phantom) -> dict[str, Any]:
    card, described = phantom.card, properties(phantom.card)
    return {
        **dict.fromkeys(("is_available", "is_initialized", "_is_compiled"), lambda: True),
        **dict.fromkeys(("_is_in_bad_fork", "can_device_access_peer"), lambda *args: False),
        **dict.fromkeys(("init", "_lazy_init", "set_device"), nothing),
        **dict.fromkeys(("current_device", "_exchange_device", "_maybe_exchange_device", "utilization"), _zero),
        **dict.fromkeys(("device", "device_of"), Device),
        "device_count": _num_local,
        "get_device_name": lambda device=None: card.name,
        "get_device_capability": lambda device=None: card.capability,
        "get_device_properties": lambda device=None: described,
        "get_arch_list": lambda: [f"sm_{card.capability[0]}{card.capability[1]}"],
        "get_gencode_flags": lambda: "",
        "is_bf16_supported": lambda including_emulation=True: including_emulation or card.capability >= (8, 0),
        "is_tf32_supported": lambda: card.capability >= (8, 0),
        **_of_memory(phantom),
        **_of_streams(phantom),
        **dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all"), nothing),
        **dict.fromkeys(("set_rng_state", "set_rng_state_all"), nothing),
        "initial_seed": _zero,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)],
        "CUDAGraph": _refused_class(_NO_GRAPH),
        "graph": _refused_class(_NO_GRAPH),
        "make_graphed_callables": refusing(_NO_GRAPH),
        "MemPool": _refused_class(_NO_POOL),
        "use_mem_pool": refusing(_NO_POOL),
    }


def _of_memory(phantom: Phantom) -> dict[str, Any]:
    card, memory, allocator = phantom.card, phantom.memory, phantom.memory.allocator

    def memory_info(device: Any = None) -> tuple[int, int]:
        return memory.free_bytes, card.memory_bytes

    def reset_peaks(device: Any = None) -> None:
        phantom.note(
            "the program reset PyTorch's peak statistics: what it prints itself is the peak since then, the trace's "
            "figures are of the whole run"
        )
        memory.keep_peaks()
        allocator.reset_peaks()

    return {
        "mem_get_info": memory_info,
        "cudart": lambda: SimpleNamespace(
            cudaMemGetInfo=memory_info, cudaProfilerStart=nothing, cudaProfilerStop=nothing
        ),
        "memory_allocated": lambda device=None: allocator.allocated_bytes,
        "max_memory_allocated": lambda device=None: allocator.peak_allocated_bytes,
        **dict.fromkeys(("memory_reserved", "memory_cached"), lambda device=None: allocator.reserved_bytes),
        **dict.fromkeys(
            ("max_memory_reserved", "max_memory_cached"), lambda device=None: allocator.peak_reserved_bytes
        ),
        "memory_stats": lambda device=None: _statistics(allocator),
        "memory_summary": lambda device=None, abbreviated=False: "(phantom GPU)",
        "memory_snapshot": lambda *args, **kwargs: [],
        **dict.fromkeys(
            ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"), reset_peaks
        ),
        **dict.fromkeys(("reset_accumulated_memory_stats", "ipc_collect"), nothing),
        "set_per_process_memory_fraction": refusing(
            "torch.cuda.set_per_process_memory_fraction cannot be followed without a GPU"
        ),
        "empty_cache": memory.empty_cache,
    }


def _statistics(allocator: CachingAllocator) -> dict[str, int]:
    stats = {
        "num_alloc_retries": allocator.num_retries,
        "num_ooms": 0,
        "num_sync_all_streams": 0,
        "num_device_alloc": allocator.num_driver_calls,
        "num_device_free": 0,
    }
    allocated = allocator.allocated_bytes, allocator.peak_allocated_bytes
    for name, (now, peak) in {
        "allocated_bytes": allocated,
        "active_bytes": allocated,
        "requested_bytes": allocated,
        "reserved_bytes": (allocator.reserved_bytes, allocator.peak_reserved_bytes),
        "inactive_split_bytes": (0, 0),
        "allocation": (0, 0),
        "segment": (0, 0),
    }.items():
        for pool in ("all", "small_pool", "large_pool"):
            for kind, value in (("current", now), ("peak", peak), ("allocated", peak), ("freed", peak - now)):
                stats[f"{name}.{pool}.{kind}"] = value
    return stats


def _of_streams(phantom: Phantom) -> dict[str, Any]:
    def set_to(stream: Any) -> None:
        if stream not in (None, _main):
            phantom.note(
                "a stream of its own was used: on the card its blocks are kept apart from the others, and PyTorch "
                "reserves more than was found here"
            )

    def entered(stream: Any = None) -> Any:
        set_to(stream)
        return nullcontext() if stream is None else stream

    def synchronized(device: Any = None) -> None:
        phantom.issued.waited()

    return {
        "_sleep": nothing,
        "synchronize": synchronized,
        "current_stream": lambda device=None: streams.Stream.current,
        "default_stream": lambda device=None: _main,
        **dict.fromkeys(("stream", "StreamContext"), entered),
        "set_stream": set_to,
        "Stream": Stream,
        "Event": Event,
        "is_current_stream_capturing": lambda: False,
    }


class _AnyDevice(type):
    """Makes the class below the same as `torch.device` wherever a class is compared, looked up or asked about."""

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        if (args and type(args[0]) is int) or type(kwargs.get("device")) is int:
            return _device("cuda", args[0] if args else kwargs["device"])
        return _device(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _device)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return subclass is cls or issubclass(subclass, _device)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is _device

    def __hash__(cls) -> int:
        return hash(_device)


_device = torch.device


class device(metaclass=_AnyDevice):
    """`torch.device`, which knows that a number means a GPU although this build has none."""


class Generator(torch._C.Generator):  # type: ignore[misc]
    """A generator that may say it is on the GPU."""

    def __new__(cls, device: Any = "cpu") -> "Generator":
        made: Generator = super().__new__(cls, device=CPU)
        made.claimed = torch.device(device)
        return made

    def __init__(self, device: Any = "cpu") -> None:
        super().__init__()

    @property
    def device(self) -> torch.device:
        return self.claimed


def _of_accelerator(functions: dict[str, Any]) -> dict[str, Any]:
    same = (
        "empty_cache", "memory_stats", "memory_allocated", "memory_reserved", "max_memory_allocated",
        "max_memory_reserved", "reset_peak_memory_stats", "is_available", "device_count", "current_stream",
    )  # fmt: skip
    return {
        **{name: functions[name] for name in same},
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        **dict.fromkeys(("current_device_index", "current_device_idx"), _zero),
        **dict.fromkeys(("set_device_index", "set_device_idx", "set_stream", "synchronize"), nothing),
        "get_memory_info": functions["mem_get_info"],
        "device_index": Device,
    }


_RANGES = ("rangePushA", "rangePop", "rangeStartA", "rangeEnd", "markA", "deviceRangeStart", "deviceRangeEnd")
_C_ZERO = (
    "_cuda_isCurrentStreamCapturing", "_cuda_getDevice", "_cuda_setDevice", "_cuda_emptyCache", "_cuda_synchronize",
    "_cuda_clearCublasWorkspaces", "_cuda_getCurrentRawStream",
)  # fmt: skip


def _awaited(phantom: Phantom, followed: Callable[[Any], None]) -> Callable[[Any], None]:
    """The host waits for an event or a stream: for all that was issued."""

    def synchronize(waiting: Any) -> None:
        followed(waiting)
        phantom.issued.waited()

    return synchronize


def _answers(phantom: Phantom) -> Iterator[Replacement]:
    functions = _functions(phantom)
    for waiting in (Stream, Event):
        yield waiting, "synchronize", _awaited(phantom, waiting.synchronize)
    for name, value in functions.items():
        yield torch.cuda, name, value
        for module in (torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.graphs):
            if hasattr(module, name):
                yield module, name, value
    yield torch.cuda, "default_generators", (torch.default_generator,)
    yield torch.cuda.memory, "_record_memory_history", nothing
    yield torch.cuda.memory, "_dump_snapshot", nothing
    yield torch.cuda.nccl, "version", lambda: NCCL_VERSION
    yield torch.cuda.nvtx, "_nvtx", SimpleNamespace(**dict.fromkeys(_RANGES, _zero))
    yield torch.version, "cuda", CUDA_VERSION
    yield torch.backends.cuda, "is_built", lambda: True
    yield torch.backends.cudnn, "is_available", lambda: True
    yield torch.backends.cudnn, "version", lambda: CUDNN_VERSION
    yield torch, "Generator", Generator
    yield torch, "device", device
    for name, value in _of_accelerator(functions).items():
        if hasattr(torch.accelerator, name):
            yield torch.accelerator, name, value
    for name in _C_ZERO:
        yield torch._C, name, _zero
    yield torch._C, "_cuda_getDeviceCount", _num_local
    for name in ("_accelerator_getAccelerator", "_get_accelerator"):
        yield torch._C, name, lambda check=None: torch.device("cuda")


def answered(phantom: Phantom) -> AbstractContextManager[None]:
    return replaced(
        (
            (owner, name, _as_own_object(value) if callable(value) and not isinstance(value, type) else value)
            for owner, name, value in _answers(phantom)
        ),
        create=True,
    )
