"""From a configuration and a setup to the model that the trainer would hold: weights, quantization, adapters."""

import copy
import importlib
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn

from planner.memory.attention_kernels import left_unnamed
from planner.options.objectives import Head
from planner.setup import TrainSetup
from probes.patching import errors_only, replaced
from probes.stack.adapters import add_adapters, freeze_others
from probes.stack.configs import has_audio, load_config, truncated_config
from probes.stack.dtypes import DTYPES
from probes.stack.kernels import apply_kernels
from probes.stack.quantize import expert_stacks, materialize_quantized, quantize_experts, quantize_modules

ATTENTION_NAMES = {"eager": "eager", "sdpa": "sdpa", "flash-attention-2": "flash_attention_2"}


def build_model(
    spec_config: Mapping[str, Any],
    setup: TrainSetup,
    *,
    device: str | torch.device,
    num_layers: int | None = None,
    attention: str | None = None,
) -> Any:
    """The model of `spec_config` as `setup` trains it, on `device`, with random weights.

    Args:
        spec_config: the raw `config.json`.
        device: "meta" (no memory), "cpu" or "cuda".
        num_layers: depth to truncate to, None for all.
        attention: transformers' name of the attention implementation, None for the setup's.

    The weights are made module by module on the device, so that a quantized model's 16-bit form never exists.
    """
    config = load_config(spec_config)
    if num_layers is not None:
        config = truncated_config(config, num_layers)
    return build_from_config(config, setup, device=device, attention=attention)


def _quantize(model: Any, setup: TrainSetup) -> None:
    dtype = DTYPES[setup.weight_dtype]
    packed = dtype if setup.parallel in ("fsdp2", "zero3") else torch.uint8  # shardable like the rest
    quantize_modules(model, setup.quantization, setup.compute_dtype, dtype, packed_dtype=packed)
    if setup.quantize_experts:
        quantize_experts(model, nested=setup.quantization == "nf4-double")
    elif setup.wide_stacks:
        for module, name in expert_stacks(model):
            getattr(module, name).data = getattr(module, name).data.float()


def build_from_config(
    config: Any, setup: TrainSetup, *, device: str | torch.device, attention: str | None = None
) -> Any:
    """`build_model` from transformers' own configuration object (which is changed: attention, dtype)."""
    device = torch.device(device)
    with errors_only("transformers"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = bare_model(
            config,
            DTYPES[setup.weight_dtype],
            attention or ATTENTION_NAMES[setup.attention],
            setup.objective_spec.head,
            seeing=setup.builds_encoders,
        )
        if setup.quantized:
            _quantize(model, setup)
        if device.type != "meta":
            materialize(model, device)
        if setup.kbit_fp32_cast:
            from peft import prepare_model_for_kbit_training

            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        if setup.checkpointing:
            enable_checkpointing(model, setup)
        if setup.method != "full":
            # on meta new modules are not initialised, which takes as long as making them
            initialisers = _INITIALISERS if device.type == "meta" else ()
            uninitialised = replaced((torch.nn.init, name, lambda tensor, *_, **__: tensor) for name in initialisers)
            with torch.device(device), uninitialised:
                model = add_adapters(model, setup)
            if setup.checkpointing:
                model.enable_input_require_grads()
        elif setup.trained_layers:
            freeze_others(model, setup)
        elif setup.frozen_encoder:
            model.freeze_encoder()
    apply_kernels(model, setup)
    model.train()
    return model


_INITIALISERS = ("kaiming_uniform_", "normal_", "uniform_", "zeros_")


def build_reference(config: Any, setup: TrainSetup, *, device: str | torch.device, attention: str | None = None) -> Any:
    """The frozen copy of the weights that an objective compares with, None where it needs none (`Objective.reference`).

    Args:
        config: transformers' configuration at the depth of the model (it is not changed).

    Source: TRL 1.16 `DPOTrainer.__init__`: loaded in the policy's type, its parameters not frozen, in eval mode.
    """
    if not setup.copies_reference:
        return None
    plain = setup.replace(checkpointing=0, selective_checkpointing=False, activation_offload=False, kernels="eager")
    return build_from_config(copy.deepcopy(config), plain, device=device, attention=attention).eval()


def auto_class(config: Any, head: Head = "vocabulary", *, seeing: bool = False) -> Any:
    """The class of transformers that builds this configuration with such a head. Over the vocabulary: what answers
    about images where pictures are `seeing`, else causal where there is one, else what sees or hears beside text, else
    what fills masks.

    Raises:
        ValueError: there is none.
    """
    import transformers

    if head == "none":
        return transformers.AutoModel
    if head == "score":
        return transformers.AutoModelForSequenceClassification
    causal, vision_encoders = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
    halves = transformers.AutoModelForSpeechSeq2Seq if has_audio(config) else transformers.AutoModelForSeq2SeqLM
    others = (vision_encoders, transformers.AutoModelForMultimodalLM)
    order: tuple[Any, ...] = (causal, *others, transformers.AutoModelForMaskedLM, halves)  # those of halves: some hear
    if seeing or config.is_encoder_decoder:
        order = (vision_encoders, causal) if seeing else (halves, *others)
    if auto := next((auto for auto in order if type(config) in auto._model_mapping), None):
        return auto
    raise ValueError(f"transformers has no class of {config.model_type} that answers in text")


def bare_model(
    config: Any, dtype: torch.dtype, attention: str, head: Head = "vocabulary", *, seeing: bool = False
) -> Any:
    """The transformers model on meta, tied weights tied, modules that must stay fp32 in fp32."""
    auto = auto_class(config, head, seeing=seeing)
    if head == "score":
        config.num_labels = 1
        text = config.get_text_config()  # as TRL's trainer sets it
        text.pad_token_id = text.pad_token_id or 0  # the last token that is none gets the score
    named = None if left_unnamed(config.to_dict(), attention) else attention
    with timm_encoders(config), torch.device("meta"):
        model = auto.from_config(config, dtype=dtype, attn_implementation=named)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.device.type != "meta":  # old classes ask for the host (`torch.FloatTensor(...)` in XLNet)
                made = torch.empty_like(parameter, dtype=dtype, device="meta")
                setattr(module, name, nn.Parameter(made, requires_grad=parameter.requires_grad))
    keep = list(getattr(model, "_keep_in_fp32_modules_strict", None) or [])
    if dtype is torch.float16:
        keep += list(getattr(model, "_keep_in_fp32_modules", None) or [])
    if keep and dtype is not torch.float32:
        for name, parameter in model.named_parameters():
            if any(part in name.split(".") for part in keep):
                parameter.data = parameter.data.to(torch.float32)
    return model


def materialize(model: Any, device: torch.device) -> None:
    """Random weights on `device` in place of meta ones, module by module; buffers are computed by the model itself."""
    generator = torch.Generator(device=device).manual_seed(0)
    done: dict[int, nn.Parameter] = {}
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    for module in model.modules():
        quantized = materialize_quantized(module, device, dtype, generator)
        for name, parameter in list(module.named_parameters(recurse=False)):
            if quantized and name == "weight":
                parameter._is_hf_initialized = True
                continue
            if id(parameter) not in done:
                done[id(parameter)] = random_parameter(parameter, parameter.dtype, name, module, generator)
            setattr(module, name, done[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.device.type == "meta":
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
    compute_buffers(model)


def random_parameter(
    like: torch.Tensor, dtype: torch.dtype, name: str, module: Any, generator: torch.Generator
) -> nn.Parameter:
    """A parameter called `name` of a module, of a shape like another's, with random values where the generator is."""
    real = torch.empty(like.shape, dtype=dtype, device=generator.device)
    fill_random(real, name, type(module).__name__, generator)
    made = nn.Parameter(real, requires_grad=like.requires_grad)
    made._is_hf_initialized = True
    return made


def compute_buffers(model: Any) -> None:
    """Lets a transformers model compute its buffers; parameters marked as initialised stay as they are."""
    with torch.no_grad():
        for module in model.modules():
            module._is_hf_initialized = False
        model.initialize_weights()


def fill_random(tensor: torch.Tensor, name: str, class_name: str, generator: torch.Generator) -> None:
    """Random values of a parameter, by its name and its module's class."""
    if not tensor.is_floating_point():
        tensor.zero_()
    elif "Norm" in class_name and name == "weight":
        tensor.fill_(1.0)
    elif name == "bias":
        tensor.zero_()
    else:
        tensor.normal_(0.0, 0.02, generator=generator)


def _offloaded(function: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' checkpoint under `save_on_cpu`, for meta tensors: the host keeps their shape and type alone."""
    from torch.utils.checkpoint import checkpoint

    def to_host(tensor: torch.Tensor) -> Any:
        return partial(torch.empty_strided, tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")

    with torch.autograd.graph.saved_tensors_hooks(to_host, lambda saved: saved()):
        return checkpoint(function, *args, use_reentrant=False, **kwargs)


def _keeping(products: bool) -> Any:
    """The context that keeps what fused attention gave and recomputes the rest, as TRL 1.16
    `enable_selective_activation_checkpointing` makes it; of a layer's `products` of matrices the first, the third and
    so on too, as torchtitan 0.2 `_apply_op_sac` does."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def contexts() -> Any:
        counts = {True: 0, False: 0}  # of the recomputation, and of the forward

        def policy(context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> Any:
            must_save = "_scaled_dot_product_" in str(operator) or "flash_attn" in str(operator)
            if products and operator is torch.ops.aten.mm.default:
                counts[context.is_recompute] += 1
                must_save = counts[context.is_recompute] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if must_save else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return contexts


def enable_checkpointing(model: Any, setup: TrainSetup) -> None:
    """A setup's checkpointing through transformers, under whichever name it has there.

    Source: transformers 5.23 `activation_checkpointing_enable(every_n_layers=)`; 5.17 has only
    `gradient_checkpointing_enable`, and layers are then switched off one by one.
    """
    every, offload = setup.checkpointing, setup.activation_offload
    kwargs: dict[str, Any] = {"use_reentrant": setup.reentrant_checkpointing}
    if setup.selective_checkpointing:
        kwargs["context_fn"] = _keeping(setup.trainer.selects_products)
    if hasattr(model, "activation_checkpointing_enable"):
        real = offload and next(model.parameters()).device.type != "meta"
        host = {"offload": True} if real else {}
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs, every_n_layers=every, **host)
        if offload and not real:
            for module in model.modules():
                if getattr(module, "_gradient_checkpointing_func", None) is not None:
                    module._gradient_checkpointing_func = _offloaded
        return
    if offload:
        raise ValueError("transformers before 5.23 keeps checkpoints on the GPU")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    if every > 1:
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = [submodule for submodule in model.modules() if isinstance(submodule, GradientCheckpointingLayer)]
        for index, layer in enumerate(layers):
            layer.gradient_checkpointing = index % every == 0


WRAPPER = "transformers.models.timm_wrapper.modeling_timm_wrapper"


class _Finder(MetaPathFinder, Loader):
    """Finds every module of torchvision, with whatever name is asked of it."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return mock.MagicMock()

    def exec_module(self, module: ModuleType) -> None:
        pass


def _timm() -> ModuleType:
    """timm, imported beside an empty torchvision that is gone afterwards."""
    if find_spec("timm") is None:
        raise ImportError("its encoder is built by timm, which is not installed (pip install timm)")
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module("timm")
    finally:
        sys.meta_path.remove(finder)
        for name in [module_name for module_name in sys.modules if module_name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]


def timm_encoders(config: Any) -> Any:
    """Within it transformers builds an encoder of timm's, which is named by its architecture there (Gemma 3n's
    MobileNet-V5), also without torchvision: timm binds names of it while it is imported, its encoders call none, and
    transformers takes timm for absent without it.

    Raises:
        ImportError: timm is not installed.
    """
    from transformers.utils import is_timm_available

    of_timm = hasattr(getattr(config, "vision_config", None), "architecture")
    return nullcontext() if not of_timm or is_timm_available() else _without_torchvision()


@contextmanager
def _without_torchvision() -> Iterator[None]:
    timm, wrapper = _timm(), importlib.import_module(WRAPPER)
    with mock.patch.multiple(wrapper, create=True, timm=timm, requires_backends=lambda *_: None):
        yield
