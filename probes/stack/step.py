"""One optimizer step as the setup's stack does it (`planner.options.stacks`), phase by phase;
`transformers.Trainer`'s by default."""

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch

from planner.setup import TrainSetup
from probes.patching import Replacement, nothing, replaced
from probes.stack.autocast import emulated_autocast
from probes.stack.batch import Batch
from probes.stack.configs import layers_of
from probes.stack.dtypes import DTYPES
from probes.stack.heads import backbone_of, checkpointed_loss, head_loss, headless
from probes.stack.images import seeing
from probes.stack.kernels import running as kernels_running
from probes.stack.linear_attention import gated_delta_rule
from probes.stack.losses import InPlaceCrossEntropy
from probes.stack.objectives import LOSSES as OBJECTIVE_LOSSES
from probes.stack.objectives import LossInputs, generate
from probes.stack.optimizers import by_mesh

MAX_GRAD_NORM = 1.0

Mark = Callable[[str, int | None], None]
"""Called as (phase, layer): phase is one of planner.setup.memory_terms.PHASES, layer the decoder layer or None."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """What one step needs. Made once by `make_trainer`; nothing here is per step but `kept`, the outputs that the
    stack's loop holds until the next forward's."""

    model: Any
    inner: Any
    setup: TrainSetup
    optimizer: Any
    forward: Callable[..., Any]
    scaler: Any
    device_type: str
    no_sync: Callable[[], Any] = nullcontext
    """Entered around every micro-batch before the last."""
    reference: Any = None
    """The frozen copy that the objective asks and its forward; None: it asks the model with its adapters off, or none.
    """
    kept: list[Any] = field(default_factory=list)


def inner_model(model: Any) -> Any:
    """The transformers model inside peft's wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def make_trainer(model: Any, setup: TrainSetup, optimizer: Any, layout: Any = None, reference: Any = None) -> Trainer:
    """Wraps the forward as accelerate does: autocast inside, outputs converted to fp32 outside; a stack without
    accelerate leaves them as they are.

    Source: accelerate 1.15 `Accelerator.prepare_model`.
    """
    device_type = next(model.parameters()).device.type

    def called(module: Any) -> Callable[..., Any]:
        plain: Callable[..., Any] = module.__call__
        return _under_autocast(plain, setup, device_type) if layout is None or layout.autocast else plain

    return Trainer(
        model=model,
        inner=inner_model(model),
        setup=setup,
        optimizer=optimizer,
        forward=called(model if layout is None else layout.module),
        scaler=make_scaler(setup, device_type),
        device_type=device_type,
        no_sync=nullcontext if layout is None else layout.no_sync,
        reference=None if reference is None else (reference, called(reference)),
    )


def _under_autocast(plain: Callable[..., Any], setup: TrainSetup, device_type: str) -> Callable[..., Any]:
    """A model's forward as accelerate wraps it."""
    from accelerate.utils.operations import ConvertOutputsToFp32

    if setup.autocast_dtype is None:
        return plain
    dtype = DTYPES[setup.autocast_dtype]

    def under_autocast(**inputs: Any) -> Any:  # real on a GPU, CUDA's lists emulated elsewhere
        with torch.autocast(device_type, dtype=dtype) if device_type == "cuda" else emulated_autocast(dtype):
            return plain(**inputs)

    return ConvertOutputsToFp32(under_autocast) if setup.trainer.widens_outputs else under_autocast


def make_scaler(setup: TrainSetup, device_type: str) -> Any:
    """The loss scaler of fp16 training, None otherwise."""
    if not setup.scales_loss:
        return None
    return torch.amp.GradScaler("cuda") if device_type == "cuda" else EmulatedScaler(device_type)


class EmulatedScaler:
    """`GradScaler` without a GPU: the same tensors, no look at the values (an overflow would skip the step).

    Source: PyTorch 2.13 torch/amp/grad_scaler.py: a scale and a growth tracker of one element, one found-inf scalar per
    device and step, the scaled loss; gradients are unscaled in place.
    """

    def __init__(self, device_type: str) -> None:
        self._scale = torch.full((), 65536.0, device=device_type)
        self._growth = torch.full((), 0, dtype=torch.int32, device=device_type)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self._scale

    def unscale_(self, optimizer: Any) -> None:
        """Divides the gradients in place."""
        inverse = self._scale.double().reciprocal().float()
        self._found_inf = torch.full((), 0.0, device=self._scale.device)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(inverse)

    def step(self, optimizer: Any) -> None:
        optimizer.step()

    update = staticmethod(nothing)


def train_step(
    trainer: Trainer,
    batches: list[Batch],
    mark: Mark | None = None,
    done: Callable[[torch.Tensor | None], torch.Tensor | None] = lambda loss: None,
) -> torch.Tensor:
    """One optimizer step over `batches` (the micro-batches); returns the last loss, detached.

    `done` is asked before each micro-batch, with the loss of the one before, for its loss if it need not run.

    `mark` is told the phases as they begin: "forward" (per micro-batch, and with the layer as each layer's forward
    begins), "loss" (head and loss, with the head's backward), "backward" (from the last hidden state's gradient on, and
    with the layer as each layer's gradient arrives), "step" (clipping, optimizer, gradients released).

    Source: transformers 5.23 `Trainer._inner_training_loop`, `training_step`; TRL 1.16 `SFTTrainer.compute_loss`.
    """
    tell: Mark = mark or (lambda phase, layer: None)
    setup = trainer.setup
    loss = None
    with ExitStack() as stack:
        stack.enter_context(kernels_running(trainer.inner, setup))
        stack.enter_context(gated_delta_rule(trainer.inner, setup))
        stack.enter_context(seeing(trainer.inner, setup))
        if mark is not None:  # hooks cost time: none while timing
            stack.enter_context(_marks(trainer, tell))
        if setup.objective_spec.rolls_out:
            generate(setup, trainer.inner, trainer.forward, tell)
        for index, batch in enumerate(batches):
            if (given := done(loss)) is not None:
                loss = given
                del given
                continue
            tell("forward", None)
            with trainer.no_sync() if index < len(batches) - 1 else nullcontext():
                loss = _micro_batch(trainer, batch, len(batches), tell)
    step_optimizer(trainer, tell)
    assert loss is not None, f"no micro-batch for {setup}"
    return loss


def step_optimizer(trainer: Trainer, tell: Mark) -> None:
    """The end of a step: its phase, clipping, the optimizer, gradients released."""
    tell("step", None)
    clips = trainer.setup.trainer.clips_gradients
    optimizer_phase(trainer.model, trainer.optimizer, trainer.scaler, trainer.device_type, clips=clips)


def _micro_batch(trainer: Trainer, batch: Batch, num_batches: int, tell: Mark) -> torch.Tensor:
    items = batch.labels.ne(-100).sum()
    loss = compute_loss(trainer, batch, items, tell)
    if num_batches > 1 and trainer.setup.loss != "full":
        loss = loss / num_batches
    if trainer.scaler is not None:
        trainer.scaler.scale(loss).backward()
    else:
        loss.backward()
    return loss.detach()


def compute_loss(trainer: Trainer, batch: Batch, items: torch.Tensor, tell: Mark) -> torch.Tensor:
    """The loss of one micro-batch by the setup's `loss`."""
    setup = trainer.setup
    if (own_loss := OBJECTIVE_LOSSES.get(setup.objective)) is not None:
        models = trainer.model, trainer.inner, trainer.forward, trainer.reference
        return own_loss(LossInputs(setup, batch, *models, partial(tell, "forward", None)))
    if setup.loss == "full":
        inputs = {**batch.model_inputs, "labels": batch.labels}
        if not trainer.inner.config.is_encoder_decoder:
            inputs["use_cache"] = False
        if not setup.trainer.transformers_loss:
            return _own_loss(trainer, inputs)
        parameters = inspect.signature(type(trainer.inner).forward).parameters
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            inputs["num_items_in_batch"] = items
        outputs = trainer.forward(**inputs)
        if setup.trainer.keeps_outputs:
            trainer.kept[:] = [outputs]
        loss: torch.Tensor = outputs["loss"]
        return loss
    by_head = partial(head_loss, trainer.inner, setup.loss)
    if setup.checkpointed_loss:
        by_head = partial(checkpointed_loss, trainer.inner, widens_head=setup.widens_head)
    with headless(trainer.inner, by_head):
        outputs = trainer.forward(**batch.model_inputs, labels=batch.labels)
    if "loss" not in outputs:
        total: torch.Tensor = (-outputs["log_probs"]).sum() / items.clamp(min=1)
        return total
    fused: torch.Tensor = outputs["loss"]
    return fused


def _own_loss(trainer: Trainer, inputs: dict[str, Any]) -> torch.Tensor:
    """The full loss of a stack that takes the logits and computes it itself, whole or in pieces."""
    by, labels = trainer.setup.trainer, inputs.pop("labels")
    if trainer.inner.config.is_encoder_decoder:
        raise ValueError(f"{by.title} trains decoders")
    outputs = trainer.forward(**inputs)
    logits = outputs["logits"]
    if by.keeps_outputs:
        trainer.kept[:] = [outputs]
    targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    if by.shifted_loss:
        narrow = trainer.setup.autocast_dtype or trainer.setup.weight_dtype
        early = trainer.setup.before_transformers(4, 46)
        narrow_logits = None if early else logits.to(DTYPES[narrow])  # by the model's own forward
        logits = logits.float()
        copied = logits[:, :-1].contiguous().flatten(0, 1)
        shifted: torch.Tensor = InPlaceCrossEntropy.apply(copied, labels[:, 1:].flatten())
        del narrow_logits
        return shifted
    rows = logits.flatten(0, 1)
    del outputs, logits
    if by.in_place_loss:
        loss: torch.Tensor = InPlaceCrossEntropy.apply(rows, targets)
        return loss
    num = by.num_chunks(trainer.setup.tokens_per_micro_batch)
    parts = []
    for piece, wanted in zip(rows.chunk(num), targets.chunk(num), strict=True):
        wide = piece.float() if trainer.setup.upcasts_logits else piece
        parts.append(torch.nn.functional.cross_entropy(wide, wanted, reduction="sum"))
        del wide, piece
    del rows
    return torch.stack(parts).sum() / targets.ne(-100).sum()


@contextmanager
def _marks(trainer: Trainer, tell: Mark) -> Iterator[None]:
    """Hooks on the layers and the backbone that report the phases."""
    in_backward = False
    followed: Callable[[], torch.Tensor | None] = nothing

    def before(layer: int, module: Any, inputs: Any) -> None:
        if not in_backward:  # in the backward it is a recomputation
            tell("forward", layer)

    def after(layer: int, module: Any, inputs: Any, output: Any) -> None:
        if not in_backward:
            follow(output[0] if isinstance(output, tuple) else output, layer)

    def backbone_starts(module: Any, inputs: Any) -> None:
        nonlocal in_backward
        in_backward = False

    def backbone_ends(module: Any, inputs: Any, output: Any) -> None:
        follow(next(iter(output.values())) if type(output) is dict else output[0], None)  # `heads.pooled` gives a dict
        tell("loss", None)

    def follow(hidden: Any, layer: int | None) -> None:
        """The backward of what comes before `hidden` begins with its gradient: where no norm stands behind the layers,
        the last one's."""
        nonlocal followed
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad and followed() is not hidden:
            hidden.register_hook(partial(on_gradient, layer))
            followed = weakref.ref(hidden)

    def on_gradient(layer: int | None, gradient: torch.Tensor) -> None:
        nonlocal in_backward
        in_backward = True
        tell("backward", layer)

    with ExitStack() as stack:
        for inner in (trainer.inner,) if trainer.reference is None else (trainer.inner, trainer.reference[0]):
            for index, layer in enumerate(layers_of(inner)):
                # first of all hooks, so that what FSDP2's hooks allocate for a layer is told as that layer's
                stack.enter_context(layer.register_forward_pre_hook(partial(before, index), prepend=True))
                stack.enter_context(layer.register_forward_hook(partial(after, index), prepend=True))
            backbone = backbone_of(inner)
            first = inner.get_encoder() if inner.config.is_encoder_decoder else backbone
            stack.enter_context(first.register_forward_pre_hook(backbone_starts))
            stack.enter_context(backbone.register_forward_hook(backbone_ends))
        yield


def optimizer_phase(model: Any, optimizer: Any, scaler: Any, device_type: str, *, clips: bool = True) -> None:
    """Unscaling, clipping, the optimizer's step, and the release of the gradients of `model`."""
    with multi_tensor_on_meta() if device_type == "meta" else nullcontext():
        if scaler is not None:
            scaler.unscale_(optimizer)
        if clips:
            clip_gradients([parameter for parameter in model.parameters() if parameter.grad is not None])
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    model.zero_grad(set_to_none=True)


def clip_gradients(parameters: list[Any]) -> None:
    """Clips to MAX_GRAD_NORM; parameters of several device meshes mesh by mesh.

    Source: transformers 5.23 `Trainer._clip_grad_norm`, `_mixed_mesh_grad_norm`.
    """
    meshes = by_mesh(parameters)
    if len(meshes) < 2:
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM, foreach=True)
        return
    total = torch.linalg.vector_norm(torch.stack([norm_of(members) for members in meshes]))
    for members in meshes:
        torch.nn.utils.clip_grads_with_norm_(members, MAX_GRAD_NORM, total, foreach=True)


def norm_of(parameters: list[Any]) -> torch.Tensor:
    """The norm of the gradients of parameters of one mesh, over all its ranks."""
    norm: Any = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters], foreach=True)
    whole: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole


def multi_tensor_on_meta() -> AbstractContextManager[None]:
    """Lets multi-tensor and fused kernels run on meta, where PyTorch lists no support for them, as they do on CUDA;
    paged optimizer states are made outside any tracking, as they live in unified memory that PyTorch does not count.
    """
    import bitsandbytes.functional as bnb_functional
    import torch.optim.optimizer as base
    import torch.utils._foreach_utils as foreach_utils
    from torch.utils._python_dispatch import _disable_current_modes

    def supported() -> list[str]:
        return ["cuda", "cpu", "meta"]

    def paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        with _disable_current_modes():
            buffer = torch.empty(shape, dtype=dtype, device="meta")
        buffer.is_paged = True
        return buffer

    replacements: list[Replacement] = [
        (module, name, supported)
        for module in (base, foreach_utils)
        for name in ("_get_fused_kernels_supported_devices", "_get_foreach_kernels_supported_devices")
    ]
    replacements += [
        (bnb_functional, "get_paged", paged),
        (bnb_functional, "fill", nothing),
        (bnb_functional, "prefetch_tensor", nothing),
        (bnb_functional, "is_on_gpu", nothing),
    ]
    return replaced(replacement for replacement in replacements if hasattr(replacement[0], replacement[1]))


@contextmanager
def older_libraries(model: Any, setup: TrainSetup) -> Iterator[None]:
    """Within it the model's step is that of the packages that the setup names, where those are older than today's.

    Source: transformers 4.41 `MistralRotaryEmbedding` (a table of all positions in every layer), 4.45
    `LlamaForCausalLM.forward` (fp32 logits), 4.48 `loss/loss_utils.py` (a shifted copy of them), 4.53
    `integrations/sdpa_attention.py` (repeat_kv); bitsandbytes 0.43.1 `MatMul4Bit` (ctx.tensors = (A, B)).
    """
    inner = inner_model(model)
    if setup.before_transformers(4, 43):
        text, dtype = inner.config.get_text_config(), DTYPES[setup.weight_dtype]
        fraction = (text.rope_parameters or {}).get("partial_rotary_factor", 1.0)
        width = int((getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads) * fraction)
        for layer in layers_of(inner):
            table = torch.empty(2, text.max_position_embeddings, width, dtype=dtype, device=inner.device)
            layer.register_buffer("positions_table", table, persistent=False)
    if setup.trainer.one_kernel_gelu:  # another's own model code, not an older one
        for module in inner.modules():
            if type(module).__name__ == "NewGELUActivation":
                module.forward = partial(torch.nn.functional.gelu, approximate="tanh")
    with ExitStack() as stack:
        if setup.saves_four_bit_inputs:
            from bitsandbytes.autograd._functions import MatMul4Bit

            forward = staticmethod(_keeping_input(MatMul4Bit.forward))
            stack.enter_context(mock.patch.object(MatMul4Bit, "forward", forward))
        if setup.repeats_keys:
            place = "transformers.integrations.sdpa_attention.use_gqa_in_sdpa"
            stack.enter_context(mock.patch(place, lambda *_: False))  # noqa: PT008 - a Mock would keep its calls
        if setup.copies_logits:
            inner.loss_function = _shifting_loss
            if setup.before_transformers(4, 46):
                head = inner.get_output_embeddings()
                stack.callback(head.register_forward_hook(lambda _head, _inputs, logits: logits.float()).remove)
        yield


def _keeping_input(forward: Callable[..., Any]) -> Callable[..., Any]:
    def keeping(ctx: Any, rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = forward(ctx, rows, *args, **kwargs)
        if not ctx.is_empty and ctx.tensors[1] is not None:
            ctx.tensors = (rows, ctx.tensors[1])
        return output

    return keeping


def _shifting_loss(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, num_items_in_batch: Any = None, **_kwargs: Any
) -> torch.Tensor:
    logits = logits.float()
    shifted = logits[..., :-1, :].contiguous()
    targets = labels[..., 1:].contiguous().view(-1)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = torch.nn.functional.cross_entropy(shifted.view(-1, vocab_size), targets, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch
