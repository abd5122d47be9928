"""The formula rung's memory model: composes the terms into phases. Peak = resident + the largest phase."""

from dataclasses import dataclass
from functools import lru_cache

from planner.gpu import GpuSpec
from planner.kernels import Kernel, attention_kernel
from planner.memory.activations import LayerContext, layer_saved, norm_saved
from planner.memory.allocator import allocator_gap_bytes
from planner.memory.dtypes import SIZE_BYTES, Flow, flow_of
from planner.memory.loss import loss_chain
from planner.memory.optimizer import state_bytes, step_bytes
from planner.memory.transient import backward_transient, forward_transient
from planner.memory.types import MemoryBreakdown, MemoryTerm, Phase
from planner.memory.weights import linear_bytes, weight_bytes
from planner.memory.workspace import context_bytes, cublas_workspace_bytes, dequantized_bytes
from planner.models.spec import LayerSpec, LinearSpec, ModelSpec
from planner.models.targets import lora_linears
from planner.setup import TrainSetup

DURING_COMPUTE: tuple[Phase, ...] = ("forward", "loss", "backward")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What the optimizer updates: how many parameters, of what type, and the shapes that matter."""

    num: int
    dtype: str
    edge_sum: int
    largest: int
    head: int
    embeddings: int


@lru_cache(maxsize=512)
def trained_parameters(model: ModelSpec, setup_method: str, targets: object, rank: int, dtype: str) -> Trained:
    """The trained parameters of full fine-tuning (all of them) or of LoRA (A [rank, in] and B [out, rank] per matrix).

    Source: Hu et al. 2021, LoRA, section 4.1, https://arxiv.org/abs/2106.09685.
    """
    if setup_method == "full":
        matrices = [(one, num) for layer, num in model.layer_counts for one in layer.linears]
        edges = sum(num * one.num * (one.in_features + one.out_features) for one, num in matrices)
        tables = [table.num_params for table in model.embeddings] + [model.num_head_params]
        largest = max([one.in_features * one.out_features * (one.num if one.module == "parameter" else 1)
                       for one, _ in matrices] + tables)  # fmt: skip
        return Trained(
            num=model.num_params,
            dtype=dtype,
            edge_sum=edges + sum(table.num_rows + table.dim for table in model.embeddings),
            largest=largest,
            head=model.head.num_weights if model.head is not None else 0,
            embeddings=model.num_embedding_params,
        )
    num = edges = largest = 0
    for _, repeats, linears in lora_linears(model, targets):  # type: ignore[arg-type]
        for one in linears:
            width = one.in_features + one.out_features
            num += repeats * one.num * rank * width
            edges += repeats * one.num * (width + 2 * rank)
            largest = max(largest, rank * max(one.in_features, one.out_features))
    return Trained(num=num, dtype=dtype, edge_sum=edges, largest=largest, head=0, embeddings=0)


@lru_cache(maxsize=512)
def _adapted_names(model: ModelSpec, targets: object) -> tuple[frozenset[str], ...]:
    """Names of the adapted matrices for each kind of layer, in the order of `layer_kinds`."""
    names: dict[int, frozenset[str]] = {}
    for layer, _, linears in lora_linears(model, targets):  # type: ignore[arg-type]
        names[id(layer)] = frozenset(one.name for one in linears)
    return tuple(names.get(id(layer), frozenset()) for layer in model.layer_kinds)


@lru_cache(maxsize=4096)
def _weights(model: ModelSpec, weight_dtype: str, quantization: str, cast: bool, setup: TrainSetup) -> dict[str, int]:
    return weight_bytes(model, setup)


def predict_memory(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> MemoryBreakdown:
    """All memory terms of one setup on one GPU, with the phases in which each is alive.

    Source: the terms' own functions; docs/memory-model.md shows how the phases were found (the dry run's event order).
    Not counted: paged optimizer states (managed memory, evictable), the data loader, NCCL.
    """
    return _Composer(model, gpu, setup).breakdown()


class _Composer:
    """One composition, in the order of a training step; a class only to share the derived quantities."""

    def __init__(self, model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> None:
        self.model, self.gpu, self.setup = model, gpu, setup
        self.flow: Flow = flow_of(setup)
        self.tokens = setup.tokens_per_micro_batch
        full = setup.method == "full"
        dtype = setup.weight_dtype if full else setup.resolved_adapter_dtype
        targets = None if full else setup.lora_targets
        self.trained = trained_parameters(model, setup.method, targets, setup.lora_rank, dtype)
        none = tuple(frozenset[str]() for _ in model.layer_kinds)
        self.adapted = none if full else _adapted_names(model, targets)
        self.terms: list[MemoryTerm] = []

    def add(self, category: str, name: str, size_bytes: float, *phases: Phase) -> None:
        """Add a term; no phases means resident."""
        if size_bytes >= 1:
            kwargs = {"phases": phases} if phases else {}
            self.terms.append(
                MemoryTerm(category=category, name=name, size_bytes=int(size_bytes), **kwargs)  # type: ignore[arg-type]
            )

    def breakdown(self) -> MemoryBreakdown:
        """The whole composition."""
        self._resident()
        stored, per_layer = self._activations()
        self._loss_and_backward(stored, per_layer)
        self._gradients_and_step()
        peak_dynamic = max(sum(t.size_bytes for t in self.terms if p in t.phases and not t.resident)
                           for p in ("forward", "loss", "backward", "step"))  # fmt: skip
        resident = sum(term.size_bytes for term in self.terms if term.resident)
        return MemoryBreakdown(
            terms=tuple(self.terms),
            allocator_gap_bytes=allocator_gap_bytes(resident, peak_dynamic),
            context_bytes=context_bytes(self.gpu),
        )

    def _resident(self) -> None:
        setup, trained = self.setup, self.trained
        for part, size in weight_bytes(self.model, setup).items():
            self.add("weights", f"weights of the {part}", size)
        if setup.method != "full":
            self.add("adapters", "LoRA matrices", trained.num * SIZE_BYTES[trained.dtype])
        self.add(
            "optimizer",
            f"states of {setup.optimizer}",
            state_bytes(trained.num, trained.dtype, setup.optimizer, matrix_edge_sum=trained.edge_sum),
        )
        self.add("workspace", "cuBLAS workspaces", cublas_workspace_bytes(self.gpu))

    def _context(self, index: int, kernel: Kernel) -> LayerContext:
        return LayerContext(
            setup=self.setup, flow=self.flow, adapted=self.adapted[index], kernel=kernel, tokens=self.tokens
        )

    def _kernel(self, layer: LayerSpec) -> Kernel:
        attention = layer.attention
        if attention is None:
            return "linear"
        dtype = self.flow.autocast or self.flow.compute
        if self.flow.quantized and not self.flow.autocast:
            dtype = self.flow.residual
        return attention_kernel(self.setup, self.gpu, attention, dtype)

    def _activations(self) -> tuple[float, float]:
        """Adds stored activations; returns (bytes stored over all layers, bytes of the largest recomputed layer)."""
        setup, model = self.setup, self.model
        every = setup.checkpointing
        hidden_bytes = SIZE_BYTES[self.flow.residual] * model.hidden_size * self.tokens
        totals = {"norm": 0.0, "attention": 0.0, "scores": 0.0, "mlp": 0.0, "adapters": 0.0}
        inputs = largest = largest_transient = 0.0
        counts = [0] * len(model.layer_kinds)
        kept = [0] * len(model.layer_kinds)
        for position, kind in enumerate(model.layer_order):
            counts[kind] += 1
            if not (every and position % every == 0):
                kept[kind] += 1
        self.transient = 0.0
        self.forward_temp = 0.0
        for index, layer in enumerate(model.layer_kinds):
            context = self._context(index, self._kernel(layer))
            saved = layer_saved(layer, context)
            for part in totals:
                totals[part] += kept[index] * getattr(saved, part)
            recomputed = counts[index] - kept[index]
            inputs += recomputed * hidden_bytes
            if recomputed:
                largest = max(largest, saved.total)
            largest_transient = max(largest_transient, backward_transient(layer, context))
            self.forward_temp = max(self.forward_temp, forward_transient(layer, context))
        self.transient = largest_transient
        names = {
            "norm": "norm inputs",
            "attention": "attention inputs and outputs",
            "scores": "attention scores (tokens x tokens)",
            "mlp": "MLP activations",
            "adapters": "adapter input copies",
        }
        for part, size in totals.items():
            self.add("activations", names[part], size, *DURING_COMPUTE)
        self.add("activations", "checkpointed layer inputs", inputs, *DURING_COMPUTE)
        stored = sum(totals.values()) + inputs
        return stored, largest

    def _loss_and_backward(self, stored: float, recomputed: float) -> None:
        setup, model, flow = self.setup, self.model, self.flow
        tail_context = self._context(0, "flash")
        final_norm = sum(norm_saved(norm, tail_context, flow.residual) for norm in model.outer_norms[-1:])
        self.add("activations", "final norm", final_norm, "loss", "backward")
        self._cast_copies()
        head_dtype = flow.autocast or (flow.table if model.head is not None else flow.compute)
        chain = loss_chain(
            loss=setup.loss,
            tokens=self.tokens,
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            logits_dtype=head_dtype,
            hidden_dtype=flow.residual,
            head_trained=setup.method == "full",
            softcap=model.logit_softcap,
        )
        self.add("activations", "one layer's forward temporaries", self.forward_temp, "forward")
        self.add("loss", f"loss chain ({setup.loss})", chain.loss_bytes, "loss")
        self._backward_peak(stored, recomputed, chain.backward_bytes)

    def _cast_copies(self) -> None:
        """16-bit copies that autocast makes of fp32 matrices.

        Trained ones are cached until the forward ends (and kept by the graph where nothing is recomputed); frozen ones
        are not cached, but the graph keeps each of them. Source: PyTorch `aten/src/ATen/autocast_mode.cpp`, cached_cast.
        """
        setup, model = self.setup, self.model
        if self.flow.autocast is None:
            return
        matrices = sum(num * one.num_weights for layer, num in model.layer_counts for one in layer.linears)
        head = model.head.num_weights if model.head is not None else 0
        if setup.method == "full" and setup.weight_dtype == "fp32":
            phases = ("forward", "loss") if setup.checkpointing == 1 else DURING_COMPUTE
            self.add("activations", "autocast copies of the weights", 2 * (matrices + head), *phases)
        elif setup.method == "lora" and setup.weight_dtype == "fp32":
            if setup.checkpointing != 1:
                self.add("activations", "autocast copies of the weights", 2 * (matrices + head), *DURING_COMPUTE)
        if setup.method != "full" and self.trained.dtype == "fp32":
            self.add("activations", "autocast copies of the adapters", 2 * self.trained.num, "forward", "loss")

    def _backward_peak(self, stored: float, recomputed: float, loss_bytes: float) -> None:
        """The backward's own peak: at its start (loss chain), in the first layer, or at its end (all gradients).

        With accumulation the gradients of earlier micro-batches are alive all along, so only the start matters.
        """
        setup, trained = self.setup, self.trained
        gradients = trained.num * SIZE_BYTES[trained.dtype]
        head_gradient = trained.head * SIZE_BYTES[trained.dtype]
        dequantized = max((self._dequantized(layer) for layer in self.model.layer_kinds), default=0)
        layer_work = recomputed + self.transient + dequantized
        accumulated = setup.accumulation_steps > 1
        if accumulated:
            self.add("gradients", "accumulated gradients", gradients, *DURING_COMPUTE)
        own_gradients = 0 if accumulated else gradients
        start = loss_bytes + (0 if accumulated else head_gradient)
        first_layer = layer_work + (0 if accumulated else head_gradient)
        one_layer = (stored / max(1, self.model.num_layers)) + recomputed
        end = own_gradients + self.transient + one_layer - stored + (head_gradient if self.model.tied else 0)
        peak = max(start, first_layer, end)
        if peak == start:
            self.add("loss", f"loss gradients ({setup.loss})", loss_bytes, "backward")
            self.add("gradients", "gradient of the head", start - loss_bytes, "backward")
        elif peak == first_layer:
            self.add("activations", "one recomputed layer", recomputed, "backward")
            self.add("workspace", "one layer's gradients of activations", self.transient, "backward")
            self.add("dequantization", "one dequantized matrix", dequantized, "backward")
            self.add("gradients", "gradient of the head", first_layer - layer_work, "backward")
        else:
            self.add("gradients", "gradients when the backward ends", end, "backward")
        self.add("dequantization", "one dequantized matrix (forward)", dequantized, "forward")

    def _dequantized(self, layer: LayerSpec) -> int:
        return max((dequantized_bytes(one, self.setup) for one in layer.linears), default=0)

    def _gradients_and_step(self) -> None:
        setup, trained = self.setup, self.trained
        self.add("gradients", "gradients", trained.num * SIZE_BYTES[trained.dtype], "step")
        self.add(
            "optimizer",
            f"temporaries of {setup.optimizer}",
            step_bytes(trained.num, trained.dtype, setup.optimizer, largest_tensor=trained.largest),
            "step",
        )


def largest_linear(model: ModelSpec) -> LinearSpec | None:
    """The largest single matrix inside the layers, None for a model without any."""
    matrices = [one for layer in model.layer_kinds for one in layer.linears]
    return max(matrices, key=lambda one: one.in_features * one.out_features, default=None)


__all__ = ["Trained", "largest_linear", "linear_bytes", "predict_memory", "trained_parameters"]
