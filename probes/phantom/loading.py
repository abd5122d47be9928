"""Models without weights: transformers' own `from_pretrained` runs, and what it would have read is on the phantom GPU.

Only reading the files is replaced. Configuration, dtype, quantizer, device map, the allocator's warm-up, tying and
initialisation are transformers' own.

Source: transformers 5.23 modeling_utils.py `from_pretrained`, `_load_pretrained_model`. transformers 4 reads files
within `from_pretrained` itself, so that there all of it is replaced.
"""

import contextlib
import re
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch

from planner.core.units import MIB, gib
from planner.models import catalogue, copies
from probes.phantom.cuda import Refused
from probes.phantom.imports import Patch
from probes.phantom.mode import Phantom
from probes.stack.quantize import meta_params4bit

HELD_BYTES = 64 * MIB
"""What a training that was let go of may leave: cuBLAS's workspaces, and little else."""
_EMPTY: dict[str, Callable[[], Any]] = {
    "missing_keys": set,
    "unexpected_keys": set,
    "mismatched_keys": set,
    "error_msgs": list,
    "conversion_errors": dict,
    "skipped_pp_keys": set,  # not in transformers 5.5
}
"""What transformers tells of a checkpoint that had everything."""


def load_without_weights(phantom: Phantom, modeling: Any, patch: Patch) -> None:
    """Makes `from_pretrained` of every model class build on the phantom GPU."""
    if not hasattr(modeling, "LoadStateDictInfo"):
        patch(modeling.PreTrainedModel, "from_pretrained", classmethod(partial(_older, phantom)))
        return

    def no_files(*args: Any, pretrained_model_name_or_path: Any = None, **kwargs: Any) -> tuple[None, None]:
        return None, None

    true_dtype = modeling._get_dtype

    def get_dtype(dtype: Any, files: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        if dtype == "auto" and files is None and getattr(config, "dtype", None) is None:
            phantom.note(f"{config.model_type}: config.json names no dtype; fp32 weights were assumed")
            dtype = torch.float32
        return true_dtype(dtype, files, config, *args, **kwargs)

    true_get_device = modeling.get_device

    def get_device(device_map: Any, name: str, valid_torch_device: bool = False) -> Any:
        """As transformers', with numbers as the GPUs they mean."""
        device = true_get_device(device_map, name, valid_torch_device=valid_torch_device)
        if not valid_torch_device:
            return device
        return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)

    def load(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, expected_keys: Any = None
    ) -> tuple[Any, Any]:
        in_use = phantom.memory.allocator.allocated_bytes
        if phantom.num_steps and in_use > HELD_BYTES:
            phantom.note(
                f"{type(model).__name__} is loaded while {gib(in_use)} of the training still lie on the card: deleting "
                "the trainer and its model first gives them back"
            )
        with phantom.origins.loads():
            _load(modeling, get_device, model, load_config, expected_keys)
        phantom.note(f"{type(model).__name__}: built from its configuration; no weights were read")
        empty = {field.name: _EMPTY[field.name]() for field in fields(modeling.LoadStateDictInfo)}
        return modeling.LoadStateDictInfo(**empty), None

    patch(modeling, "_get_resolved_checkpoint_files", no_files)
    patch(modeling, "get_device", get_device)
    patch(modeling, "_get_dtype", get_dtype)
    patch(modeling.PreTrainedModel, "_load_pretrained_model", staticmethod(load))


def _load(modeling: Any, get_device: Callable[..., Any], model: Any, load_config: Any, expected_keys: Any) -> None:
    keys = list(model.state_dict().keys()) if expected_keys is None else expected_keys
    device_map = load_config.device_map
    if device_map is not None:
        _all_on_the_gpu(type(model).__name__, device_map)
        expanded = modeling.expand_device_map(device_map, keys)
        modeling.caching_allocator_warmup(model, expanded, load_config.hf_quantizer)
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    for key in keys:
        if key not in tied:
            _fill(model, key, get_device(device_map, key, valid_torch_device=True), load_config)


def _older(phantom: Phantom, cls: Any, name: Any, *args: Any, config: Any = None, **given: Any) -> Any:
    """`from_pretrained` of transformers 4: configuration, quantizer and classes are its own.

    Source: transformers 4.46 and 4.57 modeling_utils.py `from_pretrained`.
    """
    from transformers import BitsAndBytesConfig

    bits = {option: given.pop(option) for option in ("load_in_4bit", "load_in_8bit") if option in given}
    switched = BitsAndBytesConfig(**bits) if any(bits.values()) else None
    quantization = given.pop("quantization_config", None) or switched
    device_map, kind = given.pop("device_map", None), given.pop("torch_dtype", given.pop("dtype", None))
    attention = given.pop("attn_implementation", None)
    if given.pop("use_flash_attention_2", False):
        attention = "flash_attention_2"
    for key in _LOADING:
        given.pop(key, None)
    if config is None or isinstance(config, str):
        config, given = cls.config_class.from_pretrained(config or name, return_unused_kwargs=True, **given)
    quantizer = _quantizer(quantization) if quantization is not None else None
    if kind == "auto":
        kind = getattr(config, "torch_dtype", None)
    kind = getattr(torch, kind) if isinstance(kind, str) else kind
    if quantizer is not None:
        kind = kind or torch.float16
        device_map = device_map or {"": torch.device("cuda", torch.cuda.current_device())}
        config.quantization_config = quantization
    attention_options = {} if attention is None else {"attn_implementation": attention}
    with phantom.origins.loads(), torch.device("meta"):
        model = cls._from_config(config, torch_dtype=kind or torch.float32, **attention_options)
        if quantizer is not None:
            quantizer.preprocess_model(model=model, device_map=device_map, keep_in_fp32_modules=[])
            model.hf_quantizer = quantizer
    with phantom.origins.loads():
        _place(model, torch.device("cpu" if device_map in (None, "cpu") else "cuda"), kind)
        model.tie_weights()
        if quantizer is not None:
            quantizer.postprocess_model(model)
    phantom.note(f"{type(model).__name__}: built from its configuration; no weights were read")
    return model.eval()


def _quantizer(quantization: Any) -> Any:
    """What replaces a model's linear layers: transformers' own."""
    try:
        from transformers.quantizers import AutoHfQuantizer
    except ImportError:
        return _QuantizerBefore438(quantization)
    return AutoHfQuantizer.from_config(quantization)


class _QuantizerBefore438:
    """As `from_pretrained` itself did it: bitsandbytes alone.

    Source: transformers 4.35 modeling_utils.py `from_pretrained`.
    """

    def __init__(self, quantization: Any) -> None:
        self.quantization_config = quantization

    def preprocess_model(self, *, model: Any, device_map: Any, keep_in_fp32_modules: Any) -> None:
        from transformers import integrations

        skipped_modules = integrations.get_keys_to_not_convert(model)
        integrations.replace_with_bnb_linear(
            model, modules_to_not_convert=skipped_modules, quantization_config=self.quantization_config
        )

    def postprocess_model(self, model: Any) -> None:
        model.is_loaded_in_4bit = getattr(self.quantization_config, "load_in_4bit", False)
        model.is_loaded_in_8bit = self.quantization_config.load_in_8bit
        model.is_quantized = model._is_quantized_training_enabled = True
        model.quantization_method = "bitsandbytes"


_LOADING = (
    "low_cpu_mem_usage", "max_memory", "offload_folder", "offload_state_dict", "use_safetensors", "variant", "mirror",
    "adapter_kwargs", "ignore_mismatched_sizes", "output_loading_info", "use_auth_token", "resume_download",
    "weights_only", "state_dict", "from_tf", "from_flax", "tp_plan", "key_mapping",
)  # fmt: skip
"""Arguments of transformers 4's `from_pretrained` that say how files are read."""


def _place(model: Any, device: torch.device, kind: torch.dtype | None) -> None:
    placed: dict[int, Any] = {}  # what several modules share stays shared
    for module in model.modules():
        if hasattr(module, "quant_state") or type(module).__name__ == "Linear8bitLt":
            _fill_quantized(module, module.weight, device, kind)
        for tensors in (module._parameters, module._buffers):
            for name, value in tensors.items():
                if value is None or value.device.type != "meta" or type(value).__name__ in ("Params4bit", "Int8Params"):
                    continue
                if id(value) not in placed:
                    made = torch.empty_like(value, device=device)
                    trained = isinstance(value, torch.nn.Parameter)
                    placed[id(value)] = torch.nn.Parameter(made, requires_grad=value.requires_grad) if trained else made
                tensors[name] = placed[id(value)]


def _all_on_the_gpu(name: str, device_map: Any) -> None:
    """That no layer was left to the host: Accelerate would fetch it for every pass.

    Raises:
        Refused: one was.
    """
    offloaded = [part for part, device in device_map.items() if str(device) in ("cpu", "disk")]
    if 0 < len(offloaded) < len(device_map):
        raise Refused(
            f"{name}: its weights have no room on the card, so device_map leaves {len(offloaded)} of its "
            f"{len(device_map)} parts to the host; a model in such parts is not followed (fewer bits, or a larger card)"
        )


def _fill(model: Any, key: str, device: torch.device, load_config: Any) -> None:
    parent_name, _, name = key.rpartition(".")
    parent = model.get_submodule(parent_name) if parent_name else model
    value = getattr(parent, name, None)
    if not isinstance(value, torch.Tensor):
        return
    quantizer = load_config.hf_quantizer
    if quantizer is not None and quantizer.param_needs_quantization(model, key):
        _fill_quantized(parent, value, device, load_config.dtype)
        parent._is_hf_initialized = True
        return
    dtype = _dtype(key, value, load_config)
    made = torch.empty_like(value, dtype=dtype, device=device)
    if isinstance(value, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=value.requires_grad)
        parent._parameters[name] = made
    else:
        parent._buffers[name] = made
    made._is_hf_initialized = True


def _dtype(key: str, value: torch.Tensor, load_config: Any) -> torch.dtype:
    if not value.dtype.is_floating_point:
        return value.dtype
    for pattern, dtype in (load_config.dtype_plan or {}).items():
        if re.search(pattern, key):
            planned: torch.dtype = dtype
            return planned
    return load_config.dtype if load_config.dtype is not None else value.dtype


def _fill_quantized(module: Any, value: torch.Tensor, device: torch.device, kind: torch.dtype | None) -> None:
    """A bitsandbytes weight: its 16-bit form lies on the device while it is quantized."""
    import bitsandbytes as bnb

    dtype = kind or torch.float16
    whole = torch.empty((module.out_features, module.in_features), dtype=dtype, device=device)
    four_bits: Any = getattr(bnb.nn, "Linear4bit", ())  # from bitsandbytes 0.39 on
    if isinstance(module, four_bits):
        weight = module.weight
        module.weight = meta_params4bit(
            module.out_features,
            module.in_features,
            nested=weight.compress_statistics,
            dtype=dtype,
            module=module,
            packed_dtype=module.quant_storage,
            device=device,
            quant_type=weight.quant_type,
        )
    elif isinstance(module, bnb.nn.Linear8bitLt):
        codes = torch.empty(whole.shape, dtype=torch.int8, device=device)
        scales = torch.empty(whole.shape[0], dtype=torch.float32, device=device)
        module.weight = bnb.nn.Int8Params(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales)
        module.weight.CB, module.weight.SCB = codes, scales  # before 0.39 its constructor leaves them out
    module.weight._is_hf_initialized = True


def generation_without_files(phantom: Phantom, generation: Any, patch: Patch) -> None:
    """Makes a model whose `generation_config.json` cannot be read keep the defaults that it was built with."""
    cls = generation.GenerationMixin
    true = getattr(cls, "adjust_generation_fn", None)
    if true is None:  # transformers 4
        return

    def adjust(self: Any, *args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(OSError):
            true(self, *args, **kwargs)

    patch(cls, "adjust_generation_fn", adjust)


_DOWNLOAD = (
    "cache_dir", "force_download", "proxies", "token", "local_files_only", "revision", "trust_remote_code",
    "subfolder", "_from_pipeline", "_from_auto", "_commit_hash", "gguf_file",
)  # fmt: skip
"""What transformers' own reader takes from the arguments."""


def _mirrored(name: str) -> tuple[catalogue.CatalogueEntry | None, dict[str, Any]]:
    """The catalogue's model of which `unsloth/...` or `NousResearch/...` is a copy, and what its config.json has more.

    Raises:
        Refused: a copy of which some layers alone are quantized.
    """
    if name.lower().startswith("unsloth/") and name.lower().endswith(copies.DYNAMIC):
        raise Refused(
            f"{name}: which of its layers are in 4 bits is known to its config.json alone, which is not on this machine"
        )
    return copies.mirrored(name)


def config_of_catalogue(phantom: Phantom, configuration: Any, patch: Patch) -> None:
    """Makes configurations of catalogue models readable without a network."""
    cls = getattr(configuration, "PreTrainedConfig", None) or configuration.PretrainedConfig  # the name in version 4
    true = cls._get_config_dict.__func__

    def get(owner: Any, name: Any, /, **kwargs: Any) -> Any:
        try:
            return true(owner, name, **kwargs)
        except OSError:
            extra: dict[str, Any] = {}
            entry = catalogue.find(str(name))
            if entry is None:
                entry, extra = _mirrored(str(name))
            if entry is None:
                raise
            phantom.note(f"{name}: configuration of {entry.names[0]} in the built-in catalogue ({entry.config_source})")
            for option in _DOWNLOAD:
                kwargs.pop(option, None)
            return {"architectures": [entry.built_class], **entry.config, **extra, "_name_or_path": str(name)}, kwargs

    patch(cls, "_get_config_dict", classmethod(get))
