"""Which matrices PEFT adapts: the target sets "attention" and "all-linear", and explicit names.

Source: peft 0.21.2. `_maybe_include_all_linear_layers` takes every nn.Linear and Conv1D but the output head, idle
vision and audio encoders included; a list of names matches by suffix (`check_target_module_exists`). For the
mixture-of-experts types that transformers 5 rebuilt, `convert_peft_config_for_transformers` maps the old names onto the
stacked parameters: expert stacks and router are adapted too, the fused gate_up stack at twice the rank, and every plain
gate_proj, up_proj and down_proj of the model (shared experts, dense first layers) is left out.
Measured: counts equal real PEFT on meta for all 44 types (tests/probes/test_lora_targets.py).
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from planner.core.errors import SetupError
from planner.core.shipped import model_types
from planner.models.spec import LayerSpec, LinearSpec, ModelSpec
from planner.setup import TrainSetup
from planner.setup.allowed import EXPERT_TARGETS, TARGET_SETS

Targets = str | tuple[str, ...]
Adapted = tuple[tuple[LayerSpec, int, tuple[LinearSpec, ...]], ...]

ATTENTION_ROLES = frozenset({"q", "k", "v", "qkv", "o", "mixer"})
_NO_LIST = ("outer", "idle-part", "embedder")
"""Kinds of layers that stand once, outside any list."""
CLIPPED = ".linear"
"""Gemma 4's encoders wrap each nn.Linear in a module that PEFT refuses; the inner one is called `linear`."""


def _converted(model: ModelSpec) -> dict[str, str]:
    """Old module names -> stacked parameters, where the model has stacks."""
    stacked = any(linear.is_stack for layer in model.layer_kinds for linear in layer.linears)
    return dict(model.moved_targets) if stacked else {}


def lora_linears(model: ModelSpec, targets: Targets) -> Adapted:
    """The matrices that get an adapter, as (layer, how often it occurs, its adapted matrices).

    Layers without any are left out. Idle encoders come as layers of their own, matrices outside the layers (and the
    head where it is named) as one layer of kind "outer". A stacked parameter appears as its `LinearSpec` with `num`
    experts; `lora_params` knows its rank.

    Raises:
        SetupError: explicit names that match nothing, or that PEFT refuses; the hint lists what there is.
    """
    key = targets if isinstance(targets, str) else tuple(targets)
    return model.once(("lora linears", key), lambda spec: _lora_linears(spec, targets))


def _lora_linears(model: ModelSpec, targets: Targets) -> Adapted:
    if targets in ("attention", EXPERT_TARGETS):
        experts = targets == EXPERT_TARGETS
        groups = [(layer, num, tuple(_attention(layer, experts=experts))) for layer, num in model.layer_counts]
    elif isinstance(targets, str) and targets == "all-linear":
        groups = _all_linear(model)
    elif isinstance(targets, str):
        raise SetupError(
            f"LoRA targets must be attention, all-linear or a list of names; got {targets!r}",
            hint=f"names of {model.model_id}: {', '.join(available_names(model))}",
        )
    elif _is_pattern(targets):
        groups = _patterned(model, targets[0])
    else:
        groups = _named(model, targets)
    adapted = tuple((layer, num, linears) for layer, num, linears in groups if linears)
    if not adapted:
        raise SetupError(
            f"LoRA targets {_listed(targets)} match no module of {model.model_id}",
            hint=f"available: {', '.join(available_names(model))}; or attention, all-linear",
        )
    return adapted


def _attention(layer: LayerSpec, *, experts: bool) -> Iterator[LinearSpec]:
    """The layer's attention, and with `experts` its stacks, whose fused half-and-half matrix counts as one.

    Source: experts4bit-qlora 0.58.1 `lora.py` ExpertsLoRA.
    """
    for linear in layer.linears:
        if linear.role in ATTENTION_ROLES and not linear.refused:
            yield linear
        elif experts and linear.is_stack:
            yield replace(linear, role="up") if linear.role == "gate_up" else linear


def lora_params(linear: LinearSpec, rank: int) -> int:
    """Elements of the adapter of one `LinearSpec`, all its experts together: rank x (in + out) each.

    Source: Hu et al., 2021, LoRA, section 4.1, arXiv 2106.09685; PEFT's fused gate_up stacks take twice the rank.
    """
    return linear.num * lora_rank(linear, rank) * (linear.in_features + linear.out_features)


def lora_rank(linear: LinearSpec, rank: int) -> int:
    """The rank PEFT really gives this matrix: twice the asked one for a stacked gate_up parameter (two halves)."""
    return 2 * rank if linear.module == "parameter" and linear.role == "gate_up" else rank


def num_lora_params(model: ModelSpec, targets: Targets, rank: int) -> int:
    """Trainable parameters of the whole adapter.

    Raises:
        SetupError: the targets match nothing.
    """
    return sum(
        num * sum(lora_params(linear, rank) for linear in linears) for _, num, linears in lora_linears(model, targets)
    )


def adapts_expert_stacks(model: ModelSpec, targets: Targets) -> bool:
    """Whether stacked expert parameters get adapters: PEFT then refuses dropout, and materialises the whole
    delta of every expert in each forward."""
    return any(linear.is_stack for _, _, linears in lora_linears(model, targets) for linear in linears)


def dropout_refusal(model: ModelSpec, setup: TrainSetup) -> str:
    """Why PEFT stops before the first step of adapters with a dropout, "" where it does not.

    Source: peft 0.21 `tuners/lora/layer.py` ParamWrapper.
    """
    if setup.method == "full" or not setup.lora_dropout or setup.trainer.grouped_experts:
        return ""
    stacked = setup.kind.adapts_matrices and adapts_expert_stacks(model, setup.lora_targets)
    return "peft has no LoRA dropout on stacked experts: lora_dropout 0, or --targets attention" if stacked else ""


INNER_HEADS = model_types("inner_heads")
"""Encoders whose head has a matrix before its last one, which bitsandbytes quantizes and PEFT trains whole."""


PRE_CLASSIFIED = model_types("pre_classifier")
"""Types whose head for scores has a matrix whose name ends in that of the head."""


def head_refusal(model: ModelSpec, setup: TrainSetup) -> str:
    """Why adapters and the head do not go together, "" where they do: TRL multiplies with the weight of an output head
    itself; of an encoder's head that scores PEFT copies and trains what ends with "classifier", as DistilBERT's
    pre_classifier does.

    Source: trl 1.16 `SFTTrainer.__init__`, as in its trainers of preferences and GRPO; peft 0.21
    `PeftModelForSequenceClassification`, `utils/other.py` ModulesToSaveWrapper; transformers 5.23 `quantizers/base.py`
    get_keys_to_not_convert (the last module alone). Seen in dry runs of PEFT's own code.
    """
    if setup.method == "full":
        return ""
    fused = setup.stack == "trl" and setup.loss == "chunked" and isinstance(setup.lora_targets, tuple)
    if fused and any(model.head in linears for _, _, linears in lora_linears(model, setup.lora_targets)):
        return "TRL stops where the output head has an adapter, which its loss would not train: leave it out"
    if setup.objective_spec.head != "score":
        return ""
    if setup.quantized and model.model_type in INNER_HEADS:
        return f"PEFT cannot train {model.model_type}'s quantized head: its base must stay in 16 bits"
    if model.model_type in PRE_CLASSIFIED and setup.kind.adapts_matrices and setup.lora_targets == "all-linear":
        return f"PEFT adapts {model.model_type}'s pre_classifier and would train it whole: --targets attention"
    return ""


def attention_target_names(model: ModelSpec) -> tuple[str, ...]:
    """The names that make up "attention", as short as stays unambiguous among the layers that see text
    ("q_proj"; "attn.c_proj" for GPT-2, whose MLP has a c_proj too)."""
    wanted: dict[str, None] = {}
    others = set()
    for layer in model.layer_kinds:
        for linear in layer.linears:
            if linear.role in ATTENTION_ROLES and not linear.refused:
                wanted[linear.name] = None
            else:
                others.add(linear.leaf)
    short = (name.rpartition(".")[2] for name in wanted)
    pairs = (leaf if leaf not in others else name for leaf, name in zip(short, wanted, strict=True))
    return tuple(dict.fromkeys(pairs))


def scaling_targets(model: ModelSpec) -> tuple[str, ...]:
    """What IA3 scales: keys, values and the MLP's last matrix, by their names.

    Source: Liu et al. 2022, section 3.3, https://arxiv.org/abs/2205.05638.
    """
    linears = [linear for layer in model.layer_kinds for linear in layer.linears if linear.module != "parameter"]
    return tuple(dict.fromkeys(linear.name for linear in linears if linear.role in ("k", "v", "qkv", "down")))


def peft_target_modules(model: ModelSpec, targets: Targets) -> str | list[str]:
    """What to hand to PEFT's `target_modules` (or write into a launch file) so that it adapts what `lora_linears` says.

    A list of names; "all-linear"; or, where names would reach into an idle encoder, one regular expression over full
    module names (TRL takes it as a list of one).
    """
    if isinstance(targets, tuple):
        return targets[0] if _is_pattern(targets) else list(targets)
    if targets == "all-linear" and any(unadaptable(linear) for layer in model.layer_kinds for linear in layer.linears):
        linears = [linear for _, _, group in _modules(model) for linear in group]
        return list(dict.fromkeys(linear.leaf for linear in linears if not unadaptable(linear)))
    if targets != "attention":
        return targets
    names = attention_target_names(model)
    idle = [linear for layer, _ in model.idle_layers for linear in layer.linears]
    if not any(_matches(_module_name(linear), name) for linear in idle for name in names):
        return list(names)
    return target_pattern(model, targets)


def target_pattern(model: ModelSpec, targets: Targets) -> str:
    """One regular expression over full module names that adapts what `lora_linears` says; of modules alone, no stacked
    experts."""
    by_place: dict[str, dict[str, None]] = {}
    for layer, _, linears in lora_linears(model, targets):
        place = re.escape(f"{layer.path}.") + ("" if layer.kind in _NO_LIST else r"\d+\.")
        by_place.setdefault(place if layer.path else r"(.*\.)?", {}).update(
            dict.fromkeys(linear.name for linear in linears)
        )
    groups: dict[tuple[str, ...], list[str]] = {}
    for place, names in by_place.items():
        groups.setdefault(tuple(names), []).append(place)
    return "|".join(f"({'|'.join(places)})({'|'.join(map(re.escape, names))})" for names, places in groups.items())


def same_targets(model: ModelSpec, names: tuple[str, ...]) -> str:
    """The target set that adapts just what these names (or this one pattern) adapt, "" where none does, or where some
    name matches nothing."""
    if unmatched_targets(model, names):
        return ""
    for word in TARGET_SETS:
        try:
            if lora_linears(model, names) == lora_linears(model, word):
                return word
        except SetupError:
            continue
    return ""


def adapted_set(model: ModelSpec, targets: Targets) -> str:
    """A word for what targets adapt, however they say it: a target set, else the full names of the matrices where the
    same are adapted in every layer, else the targets themselves."""
    return (
        targets if isinstance(targets, str) else model.once(("adapted set", targets), lambda _: _set_of(model, targets))
    )


def _set_of(model: ModelSpec, targets: tuple[str, ...]) -> str:
    with suppress(SetupError):
        adapted = lora_linears(model, targets)
        names = tuple(sorted({linear.name for _, _, linears in adapted for linear in linears}))
        sets: dict[str, Targets] = {**{word: word for word in TARGET_SETS}, "+".join(names): names}
        for word, same in sets.items():
            if lora_linears(model, same) == adapted:
                return word
    return str(targets)


def available_names(model: ModelSpec) -> tuple[str, ...]:
    """The names that explicit targets can use, shortest form, each once."""
    linears = [linear for _, _, group in _modules(model, with_head=True) for linear in group]
    names = dict.fromkeys(linear.leaf for linear in linears if not linear.name.endswith(CLIPPED))
    return tuple(names) + tuple(name for name in _converted(model) if name not in names)


def unmatched_targets(model: ModelSpec, targets: Targets) -> tuple[str, ...]:
    """The explicit names that match nothing. PEFT skips them silently as long as another name matches."""
    if isinstance(targets, str) or _is_pattern(targets):
        return ()
    converted = _converted(model)
    linears = [linear for _, _, group in _modules(model, with_head=True) for linear in group]
    return tuple(
        name
        for name in targets
        if name.rpartition(".")[2] not in converted
        and not any(_matches(_module_name(linear), name) for linear in linears)
    )


def _modules(model: ModelSpec, *, with_head: bool = False) -> Iterator[tuple[LayerSpec, int, tuple[LinearSpec, ...]]]:
    """Every nn.Linear and Conv1D, by layer; the outer ones as a layer of their own."""
    for layer, num in (*model.layer_counts, *model.idle_layers):
        yield layer, num, tuple(linear for linear in layer.linears if linear.module != "parameter")
    outer = model.outer_linears + ((model.head,) if with_head and model.head is not None else ())
    if outer:
        yield _outer(outer), 1, outer


def repeated_leaves(model: ModelSpec) -> list[str]:
    """The last parts of names that several matrices share."""
    leaves = Counter[str]()
    for _, num, linears in _modules(model, with_head=True):
        leaves.update({linear.name.rpartition(".")[2]: num for linear in linears})
    return [leaf for leaf, num in leaves.items() if num > 1]


def _outer(linears: tuple[LinearSpec, ...]) -> LayerSpec:
    return LayerSpec(kind="outer", linears=linears, norms=(), attention=None, mlp=None, path="")


def unadaptable(linear: LinearSpec) -> bool:
    """Whether PEFT's layer cannot take a matrix's place: a router class that returns the experts it chose beside its
    product (Llama 4, Phi-MoE), where it stops at the first forward, or one that the module tree shows to be refused.

    Measured: tests/launch/test_every_model.py.
    """
    return linear.refused or (linear.role == "router" and linear.module == "linear" and linear.leaf == "router")


def _all_linear(model: ModelSpec) -> list[tuple[LayerSpec, int, tuple[LinearSpec, ...]]]:
    converted = _converted(model)
    if not converted:
        return [
            (layer, num, tuple(linear for linear in linears if not unadaptable(linear)))
            for layer, num, linears in _modules(model)
        ]
    # The shorthand becomes the set of leaf names plus every old name of the mapping.
    leaves = {linear.leaf for _, _, group in _modules(model) for linear in group if not unadaptable(linear)}
    return _named(model, tuple(sorted(leaves | converted.keys())))


def _named(model: ModelSpec, names: tuple[str, ...]) -> list[tuple[LayerSpec, int, tuple[LinearSpec, ...]]]:
    """Matches by suffix, after the old expert names have been moved onto the stacked parameters."""
    roles, rest = _convert(model, names)
    groups = []
    for layer, num, linears in _modules(model, with_head=True):
        chosen = [linear for linear in linears if any(_matches(linear.name, name) for name in rest)]
        stacks = [linear for linear in layer.linears if linear.module == "parameter"]
        chosen += [stack for stack in stacks if stack.role in roles]
        _refuse(model, rest, (*linears, *stacks))
        groups.append((layer if layer.path else _outer(tuple(chosen)), num, tuple(chosen)))
    if any(re.search(r"(^|\.)\d+\.", name) for name in rest):
        raise SetupError(
            f"LoRA targets {_listed(names)} name single layers, which is not supported",
            hint=f"name modules as in: {', '.join(available_names(model))}",
        )
    if any(_matches(table.name, name) for table in model.embeddings for name in rest):
        raise SetupError(
            f"LoRA targets {_listed(names)} name an embedding, which is not supported",
            hint=f"choose from: {', '.join(available_names(model))}",
        )
    return groups


def _is_pattern(targets: tuple[str, ...]) -> bool:
    """Whether the targets are one regular expression (PEFT: a string instead of a list) and not a name."""
    return len(targets) == 1 and re.search(r"[^\w.-]", targets[0]) is not None


def _patterned(model: ModelSpec, pattern: str) -> list[tuple[LayerSpec, int, tuple[LinearSpec, ...]]]:
    """Matches by PEFT's rule for a string: the whole module name, every layer alike."""
    groups = []
    modules = [(*group, _places(group[0])) for group in _modules(model, with_head=True)]
    named = (
        (place + name).lstrip(".")
        for _, _, linears, places in modules
        for place in places
        for linear in linears
        for name in (linear.name, _module_name(linear))
    )
    from planner.models.matching import full_matches  # late: most name their matrices

    matching = full_matches(pattern, tuple(dict.fromkeys(named)))
    for layer, num, linears, places in modules:
        hits = [
            [linear for linear in linears if (place + _module_name(linear)).lstrip(".") in matching] for place in places
        ]
        inner = [[linear for linear in linears if (place + linear.name).lstrip(".") in matching] for place in places]
        if hits[0] != hits[-1] or inner[0] != inner[-1]:
            raise SetupError(
                f"LoRA targets {_listed((pattern,))} pick single layers, which is not supported",
                hint="match every layer: \\d+ where the layer's number stands",
            )
        if refused := [linear for linear in hits[0] if linear not in inner[0]]:
            raise SetupError(
                f"LoRA targets {_listed((pattern,))} reach {_module_name(refused[0])} of {model.model_id}, which PEFT "
                "cannot adapt",
                hint="use attention or all-linear",
            )
        chosen = tuple(inner[0])
        groups.append((layer if layer.path else _outer(chosen), num, chosen))
    return groups


def _places(layer: LayerSpec) -> list[str]:
    return [f"{layer.path}.{index}." for index in (0, 1)] if layer.kind not in _NO_LIST else [f"{layer.path}."]


def _convert(model: ModelSpec, names: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Which stacked parameters the names stand for, by role, and the names that stay module names."""
    converted = _converted(model)
    if not converted:
        return frozenset(), names
    hits = {name: name.rpartition(".")[2] for name in names if name.rpartition(".")[2] in converted}
    halves = {leaf for leaf in hits.values() if converted[leaf] == "gate_up"}
    if len(halves) == 1:
        both = " and ".join(leaf for leaf, role in converted.items() if role == "gate_up")
        raise SetupError(
            f"LoRA targets {_listed(names)} name one half of the fused expert stack; PEFT adapts both or none",
            hint=f"name {both} together",
        )
    return frozenset(converted[leaf] for leaf in hits.values()), tuple(name for name in names if name not in hits)


def _refuse(model: ModelSpec, rest: tuple[str, ...], linears: Iterable[LinearSpec]) -> None:
    """Modules that a name reaches and PEFT cannot adapt: wrapped linears, routers that hold a bare weight."""
    for spec in linears:
        is_module = spec.name.endswith(CLIPPED) or (spec.module == "parameter" and spec.role == "router")
        if unadaptable(spec) and any(_matches(spec.name, name) for name in rest):
            raise SetupError(
                f"LoRA targets {_listed(rest)} reach {spec.name} of {model.model_id}, which gives more than a product: "
                "PEFT cannot stand in for it",
                hint="use attention or all-linear",
            )
        if is_module and any(_matches(_module_name(spec), name) and not _matches(spec.name, name) for name in rest):
            raise SetupError(
                f"LoRA targets {_listed(rest)} reach {_module_name(spec)} of {model.model_id}, which PEFT cannot adapt",
                hint="use attention or all-linear",
            )
        if spec.module == "parameter" and spec.role == "router" and any(_matches(spec.name, name) for name in rest):
            raise SetupError(
                f"LoRA targets {_listed(rest)} reach the router {spec.name} of {model.model_id}, a bare weight that "
                f"PEFT cannot adapt",
                hint="use attention or all-linear",
            )


def _module_name(linear: LinearSpec) -> str:
    """The name a target would meet first: the wrapper's where there is one."""
    return linear.name.removesuffix(CLIPPED)


def _matches(name: str, target: str) -> bool:
    """PEFT's rule for a list of names."""
    return name == target or name.endswith(f".{target}")


def _listed(targets: Targets) -> str:
    text = targets if isinstance(targets, str) else ", ".join(targets)
    return text if len(text) <= 80 else text[:77] + "..."
