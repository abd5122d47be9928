"""What libraries say of each type of model, in planner/data/model_types.json, read in their source.

    python -m tools.build_types

Needs transformers and peft installed, and pip's network: of what is not installed (`READ`) the release is downloaded
and read, nothing of it is run. `tests/planner/test_model_types.py` compares what is kept with what is installed.
"""

import ast
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig

from planner.core.shipped import MODEL_TYPES
from planner.frameworks.exporters import deepspeed, llamafactory, mlx, torchtitan, unsloth
from planner.models import catalogue
from planner.models.encoders import MAKERS, made
from planner.models.families import llama_like
from planner.models.families.fields import Fields
from planner.models.spec import ModelSpec
from planner.setup.packages import LIGER, TESTED
from probes.module_tree import spec_of_tree
from probes.stack.build import bare_model

Facts = dict[str, Any]
Source = Callable[[str], str]
"""The text of a file of a package, by its path in it."""
EXPORTERS = (deepspeed, llamafactory, mlx, torchtitan, unsloth)
READ = {LIGER: TESTED[LIGER]} | dict(next(iter(exporter.VALIDATED_WITH.items())) for exporter in EXPORTERS)
"""What is read beside transformers and peft, and of which release."""


LAST_4 = "4.57.1"
"""Of transformers 4, beside today's."""


def main() -> None:
    facts: Facts = {**of_transformers(), **of_modeling(), **of_peft(), **of_decoders(listed()), **of_processors()}
    facts |= of_vision(facts["processor"])
    with tempfile.TemporaryDirectory() as folder:
        for package, read in READERS.items():
            facts |= read(downloaded(package, READ[package], Path(folder)))
        facts |= of_transformers_4(downloaded("transformers", LAST_4, Path(folder)))
    versions = {name: version(name) for name in ("peft", "transformers")} | READ
    lines = (f" {json.dumps(name)}: {json.dumps(_plain(fact))}" for name, fact in sorted(facts.items()))
    text = ",\n".join([*lines, f' "versions": {json.dumps(versions, sort_keys=True)}'])
    MODEL_TYPES.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def _plain(fact: Any) -> Any:
    return dict(sorted(fact.items())) if isinstance(fact, Mapping) else sorted(fact)


def downloaded(package: str, release: str, folder: Path) -> Source:
    """Reads a release of PyPI's: its wheel, or the archive of one that has none."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation", "-d", str(folder)]
    subprocess.run([*pip, f"{package}=={release}"], check=True)
    (path,) = folder.glob(f"{package.replace('-', '_')}-{release}*")
    if path.suffix == ".whl":
        return lambda name: zipfile.ZipFile(path).read(name).decode()

    def unpacked(name: str) -> str:
        with tarfile.open(path) as archive:
            member = archive.extractfile(f"{package}-{release}/{name}")
            assert member is not None
            return member.read().decode()

    return unpacked


def listed() -> set[str]:
    """Types of the catalogue."""
    return {entry.model_type for entry in catalogue.entries()}


def of_transformers() -> Facts:
    """Types of which it builds text but no class that scores a sequence; those with a plan that dispatches tokens to
    experts on other GPUs; of these, those whose plan splits dense matrices too; of mixtures whose experts' matrices its
    checkpoints still have one by one, as version 4 had them in modules, the block's name in a layer and those of an
    expert's gate, up and down projection; encoders, which fill masks."""
    from transformers.models.auto import modeling_auto as auto

    text = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *listed()}
    scored = {*auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES}
    plans = {}
    for name in CONFIG_MAPPING:  # a model that sees is asked by the type of the whole
        parts = getattr(CONFIG_MAPPING[name], "sub_configs", {})
        decoder = parts.get("text_config", CONFIG_MAPPING[name])
        plan = getattr(decoder, "base_model_ep_plan", None) or {}
        if "ep_dispatch_experts" in plan.values():
            plans[name] = plan.values()
    modules = {}
    for name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        changes = [(change.source_patterns, change.target_patterns) for change in _conversions(name)]
        blocks = {new[0].strip("."): old[0].strip(".") for old, new in changes if len(old) == len(new) == 1}
        split = [match for old, _ in changes for pattern in old if (match := _ONE_EXPERT.fullmatch(pattern))]
        if len(split) == 3 and len({match["block"] for match in split}) == 1:
            modules[name] = [split[0]["block"] or blocks.get("mlp", "mlp"), *(match["leaf"] for match in split)]
    return {
        "unscored": text - scored,
        "expert_plan": {*plans},
        "dense_expert_plan": {name for name, plan in plans.items() if "rowwise" in plan},
        "expert_modules": modules,
        "reads_both_ways": {*auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES}
        & {*auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES}
        - {*auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES},
    }


_ONE_EXPERT = re.compile(r"\.?(?P<block>\w*)\.?experts\.\*\.(?P<leaf>\w+)\.weight")


def _conversions(model_type: str) -> list[Any]:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    return get_checkpoint_conversion_mapping(model_type) or []


def of_transformers_4(read: Source) -> Facts:
    """Types whose router held a bare weight in transformers 4 too, where others have a module of nn.Linear."""
    return {"bare_routers": {name for name in of_transformers()["expert_modules"] if _has_bare_router(read, name)}}


def _has_bare_router(read: Source, name: str) -> bool:
    try:
        source = read(f"transformers/models/{name}/modeling_{name}.py")
    except KeyError:  # came later
        return False
    return (
        re.search(r"self\.weight = nn\.Parameter\(\s*torch\.empty\(\(?(?:self|config)\.\w*experts", source) is not None
    )


def of_modeling() -> Facts:
    """What the source of the causal class's module of each type shows, in the catalogue and beyond: that its mask is
    made without positions, or with those alone that come with three grids' (Qwen2-VL: of packed text none; of the
    others whether flash attention is handed them), that its attention comes from a table of
    its own (which has no kernel of the hub's), that it hands its delta rule to flash-linear-attention, or calls that
    package's other one itself, the kernel that flash attention runs whatever is asked for, that it clamps weights in
    place, that its head for scores has a matrix of that name before its last one, that its loop over the layers holds
    what one gives, its attention's weights with it, while the next one runs, that its eager attention keeps its scores
    beside those that a mask was added to, that each layer has a mask of all positions as a buffer, that
    its mask is made whatever stands in it, that its head for scores has a matrix before its last one, and that its
    layer's classes are BERT's word for word; and the part of a model, by its section of the configuration, that refuses
    SDPA while the rest has it.
    """
    from transformers.models.auto import modeling_auto as auto

    facts: Facts = {
        "masks_without_positions": set(), "own_attention_table": set(), "hands_on_delta_rule": set(),
        "own_delta_rule": set(), "clamps_weights": set(), "flash_kernel": {}, "part_without_sdpa": {},
        "bert_layers": set(), "positions_to_flash": set(), "pre_classifier": set(), "holds_layer_outputs": set(),
        "keeps_unmasked_scores": set(), "mask_buffers": set(), "inner_heads": set(), "always_masked": set(),
    }  # fmt: skip
    of_bert = _layer_classes(bert.read_text()) if (bert := modeling("bert")) is not None else {}
    for name in sorted(
        {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *listed()}
    ):
        if (path := modeling(name)) is None:
            continue
        source = path.read_text()
        of_grids = "text_position_ids = None" in source and "position_ids[None, ...].expand(3," in source
        if of_grids or not _hands_positions_on(path):
            facts["masks_without_positions"].add(name)
            to_flash = not of_grids and all(re.search(word, source) for word in _TO_KERNEL)
            facts["positions_to_flash"] |= {name} if to_flash else set()
        if _layer_classes(source).items() >= of_bert.items():
            facts["bert_layers"].add(name)
        for fact, pattern in _WORDS.items():
            facts[fact] |= {name} if re.search(pattern, source) else set()
        if first := re.search(r'_compatible_flash_implementations = \[\s*"kernels-community/([\w-]+)"', source):
            facts["flash_kernel"][name] = first[1]
        sections = getattr(CONFIG_MAPPING[name], "sub_configs", {})
        refusing = {*re.findall(r"    config: (\w+)\n(?:(?!\n\n).)*?    _supports_sdpa = False", source, re.DOTALL)}
        for section, kind in sections.items():
            if kind.__name__ in refusing and section != "text_config":
                facts["part_without_sdpa"][name] = section
    return facts


_TO_KERNEL = (
    r"self\.\w*att\w*\([^()]*position_ids=position_ids",
    r"attention_interface\([^()]*(\([^()]*\)[^()]*)*\*\*kwargs",
)
"""A layer's call of its attention, and that one's of the kernel."""
_WORDS = {
    "own_attention_table": r"_ATTENTION_CLASSES = \{[^}]*\"flash_attention_2\"",
    "hands_on_delta_rule": r"use_kernel_func_from_hub\w*\([^)]*chunk_gated_delta_rule",
    "own_delta_rule": r"\bchunk_kda\b",
    "clamps_weights": r"\.weight\.data\.clamp_\(",
    "pre_classifier": r"(?s)\nclass \w+ForSequenceClassification\((?:(?!\nclass ).)*self\.pre_classifier = nn",
    "inner_heads": r"(?s)\nclass \w+ForSequenceClassification\((?:(?!\nclass ).)*(ClassificationHead|ContextPooler)\(",
    "always_masked": r"allow_is_causal_skip=False",
    "mask_buffers": r"torch\.tril\(torch\.ones\(\(max_positions, max_positions\), dtype=bool",
    "keeps_unmasked_scores": r"softmax\(\w+ \+ \w+|attn_weights = attention_scores\.",
    "holds_layer_outputs": r"(\w*outputs) = (?:block|\w*layer)\((?:[^()]|\([^()]*\))*\)\s+hidden_states = \1\[0\]",
}


def _layer_classes(source: str) -> dict[str, str]:
    """Part of a layer -> its class, with no name of the model's; of BERT's layer and its like."""
    model = re.search(r"^class (\w+)SelfOutput\(", source, re.MULTILINE)
    if model is None:
        return {}
    parts = [f"{model[1]}{part}" for part in _LAYER]
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name in parts)
    return {node.name.removeprefix(model[1]): ast.unparse(node).replace(model[1], "") for node in classes}


_LAYER = ("SelfAttention", "SelfOutput", "Attention", "Intermediate", "Output", "Layer")


def modeling(model_type: str) -> Path | None:
    """The file of a type's classes in the installed transformers, None where it has none."""
    package = find_spec("transformers")
    if model_type not in CONFIG_MAPPING or package is None or package.origin is None:
        return None
    *folder, module = CONFIG_MAPPING[model_type].__module__.split(".")[1:]
    path = Path(package.origin).parent.joinpath(*folder, module.replace("configuration_", "modeling_") + ".py")
    return path if path.exists() else None


@cache
def _hands_positions_on(path: Path) -> bool:
    """Whether a module's causal masks, where it makes any, are made with positions."""
    source = path.read_text()
    shared = re.search(r"mask_kwargs = \{[^}]*position_ids", source) is not None
    inner = r"[^()]*(?:\((?:[^()]|\([^()]*\))*\)[^()]*)*"  # the calls alone: to parse every module takes seconds
    masks = re.findall(rf"(?<![\w.])create_causal_mask\({inner}\)", source)
    calls = _calls("\n".join(masks), "create_causal_mask")
    return all("position_ids" in words or ("**" in words and shared) for words in calls)


def of_processors() -> Facts:
    """Of types whose pictures are planned the class of their processor: those of whose encoder that class's other types
    have every matrix in the same place, which a model of a layer of text shows."""
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    processors = {name: PROCESSOR_MAPPING_NAMES.get(name) for name in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    known = {name: processor for name, processor in processors.items() if processor in MAKERS}
    return {"processor": {name: processor for name, processor in known.items() if sees_as(name, processor)}}


def sees_as(name: str, processor: str) -> bool:
    """Whether a type has, in the same place, the matrices of the encoder behind a processor."""
    with suppress(Exception):  # whatever else it is, it is none that is known
        config = CONFIG_MAPPING[name]()
        config.vision_config = _vision(name)[0]
        text = config.get_text_config()
        text.num_hidden_layers = min(text.num_hidden_layers, 1)
        trunk = replace(catalogue.load("gpt2"), hidden_size=text.hidden_size, config=config.to_dict())
        encoder = made(processor, trunk, config.vision_config.to_dict(), 448, 448)
        if encoder.convolves:  # timm's, which is told by its name
            return True
        model = bare_model(config, torch.bfloat16, "eager", seeing=True)
        shapes = {key.removesuffix(".weight"): {*weight.shape} for key, weight in model.named_parameters()}
        parts = [(f"{layer.path}.0", layer) for layer in encoder.model.layer_kinds]
        for projector in encoder.projectors:
            parts.append((projector.layer.path + ".0" * (projector.num > 1), projector.layer))
        matrices = [(f"{path}.{matrix.name}", matrix) for path, layer in parts for matrix in layer.linears]
        return all(shapes.get(key) == {matrix.in_features, matrix.out_features} for key, matrix in matrices)
    return False


def _vision(name: str) -> tuple[Any, type, Any]:
    """The section of the encoder as a type's class makes it, its class, and the section where the whole has one of its
    own."""
    from transformers import AutoConfig

    whole, kind = (
        getattr(CONFIG_MAPPING[name](), "vision_config", None),
        CONFIG_MAPPING[name].sub_configs["vision_config"],
    )
    kind = type(whole) if kind is AutoConfig else kind
    return (kind() if whole is None else whole), kind, whole


def of_vision(names: Iterable[str]) -> Facts:
    """Of types whose pictures are planned the fields of their encoder's configuration, and what a configuration without
    one has beyond; the class that sees, where the causal one does not; the token type that a mask shows both ways."""
    from transformers.models.auto import modeling_auto as auto

    facts: Facts = {"vision_config": {}, "whole_vision_config": {}, "seeing_class": {}, "seen_both_ways": {}}
    for name in names:
        _, kind, whole = _vision(name)
        declared = {field.name for field in fields(kind)} - {field.name for field in fields(PreTrainedConfig)}
        own = {field: value for field, value in kind().to_dict().items() if field in declared | {"model_type"}}
        facts["vision_config"][name] = {field: value for field, value in own.items() if _is_plain(value)}
        if whole is not None and (more := {field for field in own if getattr(whole, field) != getattr(kind(), field)}):
            facts["whole_vision_config"][name] = {field: getattr(whole, field) for field in sorted(more)}
        path = modeling(name)
        if path is not None and (shown := re.search(r"(?<!mm_)token_type_ids == (\d)", path.read_text())):
            facts["seen_both_ways"][name] = int(shown[1])
        seeing = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[name]
        if auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name, seeing) != seeing:
            facts["seeing_class"][name] = seeing
    return facts


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str | list | tuple)


_SMALL = {
    "hidden_size": 96, "intermediate_size": 224, "num_hidden_layers": 12, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 1024, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_SLIDING = {"use_sliding_window": True, "max_window_layers": 5, "sliding_window": 512}


def of_decoders(names: Iterable[str]) -> Facts:
    """Of types that are Llama but for options their options (`planner.models.families.llama_like`), without those that
    are as Llama's."""
    rows: Facts = {}
    for name in names:
        with suppress(Exception):  # of whatever it is, it is not Llama's
            options = _options(name)
            if all(_is_built(name, options, config) for config in _variants(name)):
                pairs = ((each, getattr(options, each.name)) for each in fields(options))
                rows[name] = {each.name: _listed(value) for each, value in pairs if value != each.default}
    return {"decoders": rows}


def _listed(value: Any) -> Any:
    return [*map(_listed, value)] if isinstance(value, tuple) else value


def _declared(name: str) -> dict[str, Any]:
    """Fields of a type's configuration with the class's defaults."""
    return {each.name: each.default for each in fields(CONFIG_MAPPING[name])}


def _variants(name: str) -> Iterator[Facts]:
    """A small configuration, and all that differ in a flag, in windows, or in heads without groups."""
    declared = _declared(name)
    small = {"model_type": name, **{key: value for key, value in _SMALL.items() if key in declared}}
    yield small
    flags = [key for key, value in declared.items() if isinstance(value, bool) and not hasattr(PreTrainedConfig, key)]
    others = [{key: not declared[key]} for key in flags if "bidirectional" not in key]  # which is no causal model
    others.append({key: value for key, value in _SLIDING.items() if key in declared})
    others.append({"num_key_value_heads": small["num_attention_heads"]})
    for other in others:
        with suppress(StrictDataclassError):  # two flags that its class wants alike
            CONFIG_MAPPING[name](**{**small, **other})
            yield {**small, **other}


def _tree(config: Facts) -> ModelSpec:
    return spec_of_tree(config, model_id="", source="")


def _is_built(name: str, options: llama_like.ArchitectureOptions, config: Facts) -> bool:
    """Whether transformers builds what the options say of a configuration."""
    tree = _tree(config)
    read = llama_like.built(Fields(CONFIG_MAPPING[name](**config).to_dict(), name), options)
    own = {key: getattr(tree, key) for key in ("model_type", "config", "config_source", "from_tree", "moved_targets")}
    return replace(read, **own) == tree


def _options(name: str) -> llama_like.ArchitectureOptions:
    """The options that a small model of a type shows."""
    kind, declared, (small, *_) = CONFIG_MAPPING[name], _declared(name), _variants(name)
    tree = _tree(small)
    layer, config = tree.layer_kinds[0], kind(**small)
    biased = {linear.role: linear.bias for linear in _tree({**small, **_BIASES}).layer_kinds[0].linears}

    def bias(role: str, flag: str) -> bool | str:
        (own,) = (linear.bias for linear in layer.linears if linear.role == role)
        return own if own == biased[role] else flag

    fused = any(linear.role == "qkv" for linear in layer.linears)
    into, out = bias("qkv" if fused else "q", "attention_bias"), bias("o", "attention_bias")
    activation = next(key for key in ("hidden_activation", "hidden_act") if key in declared)
    meant = getattr(kind(**{**small, activation: "gelu"}), activation)
    types, slides, period = getattr(config, "layer_types", None), "", 0
    if "max_window_layers" in declared:
        slides, period = "last", declared["max_window_layers"]
    elif "sliding_window" in declared:
        slides, period = ("some", types.index("full_attention") + 1) if types else ("all", 0)
    return llama_like.ArchitectureOptions(
        built=tree.built_class,
        tied=declared["tie_word_embeddings"],
        kv_heads=declared["num_key_value_heads"],
        head_dim=declared.get("head_dim"),
        bias=into,
        o_bias=None if out == into else bool(out),
        mlp_bias=bias("down", "mlp_bias"),
        norms=tuple(norm.name for norm in layer.norms if "." not in norm.name),
        qk_norm=any("." in norm.name for norm in layer.norms),
        fused=fused,
        slides=slides,
        window=declared.get("sliding_window"),
        period=period,
        activation=activation,
        activation_default=declared[activation],
        renamed=(("gelu", meant),) if meant != "gelu" else (),
        attentions=tree.attentions,
        norm_style=tree.traits.norm,
        scales_logits=tree.traits.scales_logits,
    )


_BIASES = {"attention_bias": True, "mlp_bias": True}


def of_peft() -> Facts:
    """The targets of types whose adapters are given none; the names in a pattern (Gemma 4's, of its text)."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as MAPPING

    return {"peft_targets": {name: targets if isinstance(targets, list) else re.findall(r"\w+_proj", targets)
                             for name, targets in MAPPING.items()}}  # fmt: skip


def of_liger(read: Source) -> Facts:
    """Types whose loss its switch fuses with the head (of its table the functions that do unless they are told not
    to); the switches of layers' kernels that it has for a type, and whether they are on by themselves; of the
    catalogue's types the parts of a layer that it replaces in a built model, those whose norms' backward writes a
    tensor of its own, and of these those whose last norm does not.

    Left out are functions that tell several kinds of layers apart: latent attention, shared experts, experts that are
    looked up, eyes without a function of their text's own. "gated": an MLP, experts are none.
    """
    tree = ast.parse(read("liger_kernel/transformers/monkey_patch.py"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    (table,) = (node.value for node in tree.body if isinstance(node, ast.Assign)
                and ast.unparse(node.targets[0]) == "MODEL_TYPE_TO_APPLY_LIGER_FN")  # fmt: skip
    assert isinstance(table, ast.Dict)
    of_type = {ast.literal_eval(key): functions[ast.unparse(value)]
               for key, value in zip(table.keys, table.values, strict=True) if key}  # fmt: skip
    options = {name: {word: on for word, on in _defaults(function).items() if word in _OF_LAYERS}
               for name, function in of_type.items()}  # fmt: skip
    parts: dict[str, list[str]] = {}
    apart, last = set(), set()
    for name in sorted(listed() & {*of_type} | {name for name in of_type if name.removesuffix("_text") in listed()}):
        function, text = of_type[name], of_type.get(f"{name}_text")
        patched = dict(_patches(text if text is not None and text is not function else function))
        if "decoder_layer.post_attention_layernorm" not in patched or any(map(_TELLS_APART.search, patched)):
            continue
        on = {switch for switch, there in _defaults(function).items() if there}
        gated = "decoder_layer.mlp" in patched and bool(on & {"swiglu", "geglu"})
        path = modeling(name)
        source = path.read_text() if path is not None else ""
        if not gated and "Experts" not in source:
            continue
        heads = "self_attn.q_norm" not in source and "self.q_norm" not in source
        heads |= "decoder_layer.self_attn.q_norm" in patched
        present = {"norm": "rms_norm" in on, "head-norm": heads, "rotary": "rope" in on, "gated": gated}
        parts[name] = [part for part, there in present.items() if there]
        if not patched["decoder_layer.post_attention_layernorm"]:
            apart.add(name)
            last |= {name} if patched.get("base_model.norm", patched.get("text_model.norm")) else set()
    return {
        "liger_loss": {
            name for name, function in of_type.items() if _defaults(function).get("fused_linear_cross_entropy")
        },
        "liger_options": options,
        "liger_parts": parts,
        "liger_norms_apart": apart,
        "liger_last_norm_in_place": last,
    }


_TELLS_APART = re.compile(r"kv_a_layernorm|shared_expert|^experts$|feed_forward|vision")


_OF_LAYERS = ("rope", "rms_norm", "swiglu", "geglu")


def _defaults(function: ast.FunctionDef) -> dict[str, bool]:
    """The switches of a function and whether they are on by themselves."""
    names = [argument.arg for argument in function.args.args][-len(function.args.defaults) or 1 :]
    return {name: ast.unparse(value) == "True" for name, value in zip(names, function.args.defaults, strict=False)}


def _patches(function: ast.FunctionDef) -> Iterator[tuple[str, bool]]:
    """(what a function patches in a built model, whether its backward overwrites the gradient that comes)."""
    partials = {
        ast.unparse(node.targets[0]): _in_place(node.value)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and "partial" in ast.unparse(node.value.func)
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func)).startswith("_patch_"):
            yield ast.unparse(node.args[0]), _in_place(node) and partials.get(name, True)


def _in_place(call: ast.Call) -> bool:
    return not any(word.arg == "in_place" and ast.unparse(word.value) == "False" for word in call.keywords)


def of_deepspeed(read: Source) -> Facts:
    """Types whose block of experts ZeRO-3 gathers as one."""
    names = re.findall(r'"transformers\.models\.(\w+)\.', read("deepspeed/runtime/zero/leaf_module_config.py"))
    return {"zero3_leaves": {*names}}


def of_llamafactory(read: Source) -> Facts:
    """Types that its Liger switch takes; of types that see the template of the type's own name that asks for no
    thinking, or the type's own, or that of most of the catalogue's models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    taken = set()
    for node in ast.walk(ast.parse(read("llamafactory/model/model_utils/liger_kernel.py"))):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "model_type":
            taken |= {*re.findall(r"'(\w+)'", ast.unparse(node.comparators[0]))}
    templates = _calls(read("llamafactory/data/template.py"), "register_template")
    registered = {words["name"].strip("'") for words in templates if "mm_plugin" in words}
    groups: dict[str, str] = {}
    for words in _calls(read("llamafactory/extras/constants.py"), "register_model_group"):
        if "multimodal" in words and "template" in words:
            names = re.findall(r"'([\w.-]+/[\w.-]+)'", words["models"])
            groups |= dict.fromkeys(map(str.lower, names), words["template"].strip("'"))
    by_type: dict[str, Counter[str]] = {}
    for entry in catalogue.entries():
        if template := groups.get(entry.model_id.lower()):
            by_type.setdefault(entry.model_type, Counter())[template] += 1
    chosen = {name: counts.most_common(1)[0][0] for name, counts in by_type.items()}
    for name in {*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *by_type, "ministral3"}:
        plain = name.removesuffix("_moe")
        if of_name := [template for template in (f"{plain}_nothink", plain) if template in registered]:
            chosen[name] = of_name[0]
    return {"llamafactory_liger": taken, "llamafactory_templates": chosen}


def _calls(source: str, function: str) -> Iterator[dict[str, str]]:
    """The named arguments of a function's calls, as they are written."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function:
            yield {word.arg or "**": ast.unparse(word.value) for word in node.keywords}


def of_mlx(read: Source) -> Facts:
    """Types of which it has every matrix of a layer under transformers' name, by the catalogue or the source;
    mixtures, convolutions and models that see left out."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    (remapped,) = (ast.literal_eval(node.value) for node in ast.parse(read("mlx_lm/utils.py")).body
                   if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_REMAPPING")  # fmt: skip
    named, by_type = set(), {entry.model_type: entry.model_id for entry in catalogue.entries()}
    for name in {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} | listed():
        path, sections = (
            modeling(name),
            (getattr(CONFIG_MAPPING[name], "sub_configs", {}) if name in CONFIG_MAPPING else {}),
        )
        source = path.read_text() if path is not None else ""
        if "vision_config" in sections or re.search(r"Experts|nn\.Conv1d", source):
            continue
        model = catalogue.load(by_type[name]) if name in by_type else None
        if model is not None:
            wanted = {linear.leaf for layer in model.layer_kinds for linear in layer.linears}
        else:
            layers = "\n".join(text for text in source.split("\nclass ") if not _NO_LAYER.match(text))
            wanted = {*re.findall(r"self\.(\w+) = nn\.Linear\(", layers)}
        named |= {name} if wanted and wanted <= set(_linears(read, remapped.get(name, name))) else set()
    return {"mlx": named}


_NO_LAYER = re.compile(r"\w*(For[A-Z]|Head|Pooler|Projector)")


def _linears(read: Source, module: str) -> Iterator[str]:
    """Names of the matrices of a module of MLX-LM's, with those of the module that it builds on."""
    try:
        source = read(f"mlx_lm/models/{module}.py")
    except KeyError:
        return
    yield from re.findall(r"self\.(\w+) = nn\.Linear\(", source)
    for other in re.findall(r"^from \. import (\w+)$", source, re.MULTILINE):
        yield from _linears(read, other)


def of_torchtitan(read: Source) -> Facts:
    """Hidden size and layers of its Llamas and Qwens -> its name for them."""
    flavors: dict[str, dict[str, str]] = {}
    for family in ("llama3", "qwen3"):
        tree = ast.parse(read(f"torchtitan/models/{family}/__init__.py"))
        for table in (node for node in ast.walk(tree) if isinstance(node, ast.Dict)):
            for key, value in zip(table.keys, table.values, strict=True):
                if isinstance(value, ast.Call) and key is not None and re.fullmatch(r"'[\dA.B-]+'", ast.unparse(key)):
                    sizes = {word.arg: ast.unparse(word.value) for word in value.keywords}
                    flavors.setdefault(family, {})[f"{sizes['dim']} x {sizes['n_layers']}"] = ast.literal_eval(key)
    return {"torchtitan": flavors}


def of_unsloth(read: Source) -> Facts:
    """Types that it runs by classes of its own, whose attention and MLP are fused LoRA functions; those that it keeps
    from fp16 -> whether for gradients without a number, by its own remark."""
    source, own = read("unsloth/models/loader.py"), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If) and (match := re.fullmatch(r"model_type == '(\w+)'", ast.unparse(node.test))):
            assigned = [ast.unparse(line.targets[0]) for line in node.body if isinstance(line, ast.Assign)]
            own |= {match[1]} if "dispatch_model" in assigned else set()
    (listing,) = re.findall(r"^_FORCE_FLOAT32_FALLBACK = \[\n(.*?)^\]", source, re.MULTILINE | re.DOTALL)
    from_fp16 = {}
    for word, remark in re.findall(r'"([\w,]+)",(.*)', listing):
        names = (name for name in CONFIG_MAPPING if word in f"{name}," or word == name.replace("_", ""))
        from_fp16 |= dict.fromkeys(names, "NaN" in remark)
    return {"unsloth": own, "unsloth_no_fp16": from_fp16}


READERS: dict[str, Callable[[Source], Facts]] = {
    LIGER: of_liger,
    "deepspeed": of_deepspeed,
    "llamafactory": of_llamafactory,
    "mlx-lm": of_mlx,
    "torchtitan": of_torchtitan,
    "unsloth": of_unsloth,
}


if __name__ == "__main__":
    main()
