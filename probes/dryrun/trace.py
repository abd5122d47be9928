"""One traced run: the model of a setup at one depth, its loading and its training steps, as events with an owner."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from planner.memory.attention_kernels import brings_xformers
from planner.memory.workspace import workspace_bytes
from planner.setup import TrainSetup
from probes.allocator.events import Event, Repetition, flat
from probes.dryrun.kernels import FLASH_NAME, KernelLog, kernels_of
from probes.dryrun.metaops import fused_dropout, meta_operators
from probes.dryrun.operators import OperatorLog
from probes.dryrun.step_replay import Replay
from probes.dryrun.streams import Exchanges
from probes.dryrun.tracker import Origin, Tracker, local
from probes.dryrun.workspaces import cublas_workspaces, temporaries
from probes.stack.autocast import emulation_installed
from probes.stack.batch import make_batch, waiting_inputs
from probes.stack.build import auto_class, build_from_config, build_reference
from probes.stack.configs import layers_of
from probes.stack.optimizers import optimizer_of, wide_parameters, with_later_states
from probes.stack.parallelize import ring_group
from probes.stack.quantize import quantized_tensors
from probes.stack.step import Mark, Trainer, inner_model, make_trainer, older_libraries, step_optimizer, train_step

if TYPE_CHECKING:
    from probes.dryrun.rank import JobWorld

STEPS = 2
"""The optimizer's state appears in the first step; the second shows the peak of every later one."""


Done = Callable[[torch.Tensor | None], torch.Tensor | None]
Owner = tuple[str, str]
"""Category and name of a storage that is known by name."""
Owners = dict[int, Owner]
REFERENCE = "reference model: "
"""Before the names of the weights of the frozen copy."""


@dataclass(frozen=True, kw_only=True)
class Trainable:
    """One trained parameter: its name, its decoder layer (None outside), and whether the step gave it a gradient.

    `shape` is the whole parameter's, `local_shape` that of this rank's part, `mesh` the device mesh over which it is
    distributed (None: it is not); `gradient` is the local shape and the placements of a gradient that is laid out
    otherwise than its parameter (None: alike), `gradient_of` the name of the parameter that its storage is known by;
    `wide` whether its 8-bit optimizer states are kept in 32 bits.
    """

    name: str
    layer: int | None
    shape: torch.Size
    dtype: torch.dtype
    has_gradient: bool
    gradient_of: str = ""
    local_shape: torch.Size
    mesh: Any = None
    placements: Any = None
    gradient: tuple[torch.Size, Any] | None = None
    wide: bool = False


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What one run did to memory.

    Attributes:
        events: what happened, in order; `origins` says of what belongs to no repetition where it came from.
        owners: category and name of storages that are known by name (weights, adapters, gradients, optimizer state).
        num_layers: depth that was run.
        parameter_bytes: bytes of the module tree's parameters (quantized statistics not counted).
        operators: what the first step issued, None of a pipeline's stage.
    """

    events: Sequence[Event | Repetition]
    origins: dict[int, Origin]
    owners: Owners
    num_layers: int
    parameter_bytes: int
    log: KernelLog
    attention: str
    notes: tuple[str, ...] = ()
    trainables: tuple[Trainable, ...] = ()
    parameter_names: frozenset[str] = frozenset()
    layer_prefix: str = ""
    operators: OperatorLog | None = None

    def flat(self) -> "Trace":
        """The same with every event by itself."""
        origins, owners = self.origins.copy(), dict(self.owners)
        for item in self.events:
            if isinstance(item, Repetition):
                origins.update(enumerate(item.pattern.origins, item.first))
                owners.update((item.first + place, owner) for place, owner in item.pattern.owners.items())
        return replace(self, events=[*flat(self.events)], origins=origins, owners=owners)

    def layer_of(self, name: str) -> int | None:
        """The decoder layer that a parameter's name belongs to, None outside the layers."""
        return _layer_in(name.removeprefix(REFERENCE), self.layer_prefix)


def resolve_attention(config: Any, setup: TrainSetup) -> tuple[str, tuple[str, ...]]:
    """transformers' implementation name for a model class, with a note where the one asked for does not exist.

    Raises:
        ValueError: the model class has no flash-attention 2 path.
    """
    model_class = auto_class(config, setup.objective_spec.head)._model_mapping[type(config)]
    if setup.attention == "flash-attention-2":
        if not getattr(model_class, "_supports_flash_attn", False):
            raise ValueError(f"transformers has no flash-attention 2 path for {config.model_type}")
        return FLASH_NAME, ()
    if setup.attention == "sdpa" and not getattr(model_class, "_supports_sdpa", False):
        return "eager", (f"transformers has no SDPA path for {config.model_type}: eager attention runs instead",)
    return setup.attention, ()


def trace_run(
    config: Any,
    setup: TrainSetup,
    *,
    capability: tuple[int, int],
    device: str = "meta",
    steps: int = STEPS,
    workspaces: bool = True,
    num_layers: int = 0,
    world: "JobWorld | None" = None,
    tracker_class: type[Tracker] = Tracker,
) -> Trace:
    """Runs loading and `steps` optimizer steps of `setup` on the model of `config` and records every allocation.

    Args:
        config: transformers' configuration, already at the depth to run (it is changed).
        device: "meta", or "cpu" for the comparison with real tensors.
        workspaces: whether kernels' own memory is counted (off for the comparison).
        world: the job that this process is a rank of, None for one GPU.
        tracker_class: what follows one GPU (a job brings its own).
    """
    ring = ring_group(setup) if setup.uses_ring_attention else None
    log = KernelLog(capability=capability, ring=ring, xformers=brings_xformers(config.model_type, setup))
    attention, notes = resolve_attention(config, setup)
    with ExitStack() as stack:
        stack.enter_context(_emulated(log, config, device))
        reference = build_reference(config, setup, device=device, attention=attention)
        model = build_from_config(config, setup, device=device, attention=attention)
        stack.enter_context(older_libraries(model, setup))
        tracker = (tracker_class if world is None else world.tracker)(
            device,
            temporaries=temporaries() if device == "meta" and workspaces else None,
            answer=not (setup.packing or setup.pads),
        )
        if world is None:
            layout, owners = None, load_all(tracker, model, reference)
        else:
            layout, owners = stack.enter_context(world.prepared(tracker, model, reference))
        tracker.log = OperatorLog() if device == "meta" and setup.pipeline_degree == 1 else None
        if tracker.log is not None and world is not None:
            tracker.log.exchanges = Exchanges(tracker.log)
        fields: dict[str, Any] = {"attention": attention, "notes": notes, "operators": tracker.log}
        job = model, reference, setup, layout, owners
        trace = _trained(tracker, log, *job, steps, workspaces, num_layers=num_layers, **fields)
    if trace.operators is not None:
        trace.operators.modules = Counter(_layer_in(name, trace.layer_prefix) for name, _ in model.named_modules())
    return trace


def trace_samples(
    config: Any, setups: Sequence[TrainSetup], *, capability: tuple[int, int], num_layers: int
) -> list[Trace]:
    """`trace_run` of one step on one GPU for setups that differ in their samples alone: the model is built once."""
    first, traces = setups[0], []
    log = KernelLog(capability=capability, xformers=brings_xformers(config.model_type, first))
    attention, notes = resolve_attention(config, first)
    with _emulated(log, config, "meta"):
        reference = build_reference(config, first, device="meta", attention=attention)
        model = build_from_config(config, first, device="meta", attention=attention)
        for setup in setups:
            tracker = Tracker("meta", temporaries=temporaries(), answer=not (setup.packing or setup.pads))
            job = model, reference, setup, None, load_all(tracker, model, reference)
            fields: dict[str, Any] = {"attention": attention, "notes": notes, "num_layers": num_layers}
            traces.append(_trained(tracker, log, *job, 1, True, **fields))
    return traces


def _trained(
    tracker: Tracker, log: KernelLog, model: Any, reference: Any, setup: TrainSetup, layout: Any, owners: Owners,
    steps: int, workspaces: bool, **fields: Any,
) -> Trace:  # fmt: skip
    """The trace of a loaded model's optimizer steps, with where the gradients of what is trained were found."""
    storages = {part.untyped_storage()._cdata: part for part in map(local, model.parameters())}
    parameter_bytes = sum(
        part.untyped_storage().nbytes() for part in storages.values() if tracker.identity(part) is not None
    )
    trainer = make_trainer(model, setup, with_later_states(optimizer_of(model, setup)), layout, reference)
    if workspaces:
        tracker.on_op = cublas_workspaces(workspace_bytes(log.capability), tracker.allocate)
    gradients = _train(tracker, trainer, layout, owners, log, steps)
    tracker.close()
    wide = {id(parameter) for parameter in wide_parameters(model, setup)}
    prefix = _layer_prefix(model)
    trainables = tuple(
        Trainable(
            name=name,
            layer=_layer_in(name, prefix),
            shape=parameter.shape,
            dtype=parameter.dtype,
            has_gradient=name in gradients.shared,
            gradient_of=gradients.shared.get(name, ""),
            local_shape=local(parameter).shape,
            mesh=getattr(parameter, "device_mesh", None),
            placements=getattr(parameter, "placements", None),
            gradient=gradients.otherwise.get(name),
            wide=id(parameter) in wide,
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    )
    names = frozenset(name for name, _ in model.named_parameters(remove_duplicate=False))
    return Trace(
        events=tracker.events,
        origins=tracker.origins,
        owners=owners,
        log=log,
        parameter_bytes=parameter_bytes,
        parameter_names=names,
        layer_prefix=prefix,
        trainables=trainables,
        **fields,
    )


@contextmanager
def _emulated(log: KernelLog, config: Any, device: str) -> Iterator[None]:
    """What stands in for a GPU's kernels while a step runs without one."""
    operators = meta_operators() if device == "meta" else nullcontext()
    with emulation_installed(), kernels_of(log, config), fused_dropout(device), operators:
        yield


@dataclass
class _Gradients:
    """Where each parameter's gradient was found: `shared` the parameter by whose name its storage is known (FSDP2: one
    storage for a layer), `otherwise` its layout where it is not its parameter's."""

    shared: dict[str, str] = field(default_factory=dict)
    otherwise: dict[str, tuple[torch.Size, Any]] = field(default_factory=dict)


def _train(tracker: Tracker, trainer: Trainer, layout: Any, owners: Owners, log: KernelLog, steps: int) -> _Gradients:
    """The optimizer steps, followed; on one GPU what only repeats is copied (`Replay`)."""
    model, setup, device = trainer.model, trainer.setup, trainer.device_type
    gradients = _Gradients()
    # more than two change nothing: gradients are alive from the second on; a pipeline has several in flight
    num_batches = setup.accumulation_steps if setup.pipeline_degree > 1 else min(setup.accumulation_steps, 2)
    with tracker:
        batches = [make_batch(setup, trainer.inner.config, device=device) for _ in range(num_batches)]
        waiting = waiting_inputs(setup, trainer.inner.config, device, num_made=len(batches))
        replay = Replay(tracker, model, log) if device == "meta" and layout is None else None
        operators = tracker.log
        for number in range(steps):
            mark = _marker(tracker, model, owners, gradients)
            if operators is not None and 0 < number == steps - 1:  # the first step also makes the optimizer's states
                mark = operators.replacing_step(tracker, mark)
            if layout is not None and layout.run is not None:  # the layout's own way through the model, as pipelines do
                layout.run(batches, mark)
                step_optimizer(trainer, mark)
            elif replay is None:
                with first_operators(tracker) as noting:
                    train_step(trainer, batches, mark, noting(lambda loss: None))
            elif not replay.step(trainer, mark):
                with replay.watching_gradients(), first_operators(tracker) as noting:
                    train_step(trainer, batches, replay.watching(mark), noting(replay.micro_batch))
            claim_optimizer_state(tracker, trainer.optimizer, owners)
            tracker.log = None
        del batches, waiting, replay
    return gradients


@contextmanager
def first_operators(tracker: Tracker) -> Iterator[Callable[[Done], Done]]:
    """Within it `tracker` notes the operators of its first step, and what is yielded notes where micro-batches
    begin."""
    log = tracker.log
    if log is None:
        yield lambda done: done
        return

    def noting(done: Done) -> Done:
        def begins(loss: torch.Tensor | None) -> torch.Tensor | None:
            copied_loss = done(loss)
            if copied_loss is None:
                log.micro_batches.append(len(log.calls))
            return copied_loss

        return begins

    with log.following():
        yield noting
    tracker.log = None


def _layer_prefix(model: Any) -> str:
    """What comes before a decoder layer's number in parameter names, "" for an encoder-decoder."""
    inner = inner_model(model)
    if inner.config.is_encoder_decoder:
        return ""
    first = layers_of(inner)[0]
    path = next(name for name, module in model.named_modules() if module is first)
    return f"{path.rpartition('.')[0]}."


def _layer_in(name: str, prefix: str) -> int | None:
    """The decoder layer that a parameter's or module's name belongs to, None outside the layers."""
    return int(name[len(prefix) :].partition(".")[0]) if prefix and name.startswith(prefix) else None


def load(tracker: Tracker, model: Any, prefix: str = "") -> Owners:
    """Counts parameters, buffers and quantization statistics in module order; their owners, named after `prefix`."""
    owners: Owners = {}
    tracker.mark("load", None)

    def claim(tensor: torch.Tensor, category: str, name: str) -> None:
        if (number := tracker.track(local(tensor), "load")) is not None:
            owners.setdefault(number, (category, name))

    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{prefix}{path}.{name}"
            claim(parameter, "adapters" if "lora_" in full or "modules_to_save" in full else "weights", full)
        for name, buffer in module.named_buffers(recurse=False):
            claim(buffer, "weights", f"{prefix}{path}.{name}")
        for name, tensor in quantized_tensors(module):
            claim(tensor, "weights", f"{prefix}{path}.{name}")
    return owners


def load_all(tracker: Tracker, model: Any, reference: Any) -> Owners:
    """`load` of the model and of the frozen copy beside it."""
    owners = load(tracker, model)
    return owners if reference is None else owners | load(tracker, reference, REFERENCE)


def _marker(tracker: Tracker, model: Any, owners: Owners, gradients: _Gradients) -> Mark:
    """What tells the tracker the phases; as a step begins it owns the gradients and notes where they are."""
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]

    def mark(phase: str, layer: int | None) -> None:
        if phase == "step":
            for name, parameter in trainable:
                if parameter.grad is not None:
                    if (number := tracker.identity(local(parameter.grad))) is not None:
                        gradients.shared[name] = owners.setdefault(number, ("gradients", name))[1]
                    if getattr(parameter.grad, "placements", None) != getattr(parameter, "placements", None):
                        gradients.otherwise[name] = (local(parameter.grad).shape, parameter.grad.placements)
        tracker.mark(phase, layer)

    return mark


def claim_optimizer_state(tracker: Tracker, optimizer: Any, owners: Owners) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            followed = isinstance(value, torch.Tensor) and value.device.type == tracker.device_type
            if followed and (number := tracker.identity(local(value))) is not None:
                owners.setdefault(number, ("optimizer", str(key)))
