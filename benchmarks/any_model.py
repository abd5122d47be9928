"""Every causal language model type that the installed transformers builds, planned end to end on its first day.

    python -m benchmarks.any_model                      # all types at their default sizes; goes on where it stopped
    python -m benchmarks.any_model --types mamba,bamba --out some.jsonl
    python -m benchmarks.any_model --markdown           # docs/accuracy/any-model.md of what was counted

A type passes where `plan FOLDER --gpu h100 --seq-len 512 --out DIR`, with nothing cached, reads its config.json as
transformers writes it, plans it, proves the plan by a dry run and writes launch files. What stands beside the plan,
each with a dry run of its own, is left out here. Where the default sizes do not fit the card the same model is planned
with fewer layers.
"""

import argparse
import gc
import io
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import shared
from benchmarks.shared import rows_so_far
from planner.models.families import model_types
from planner.planning.evidence.bands import MIXER_BAND, TREE_BAND, TREE_MIXTURE_BAND
from probes.dryrun.startup import load_libraries

GPU = "h100"
SEQ_LEN = 512
LIMIT_S = 120.0
FEWER = (4, 2, 1)
"""Layers of models whose default sizes fit no card."""
OWN_LENGTH = ("whisper",)
"""Types whose sequences have the length that the model says."""
LONGEST = {"prophetnet": 510}
"""Whose table of positions has two rows fewer than it says."""
DATA = shared.DATA / "any_model.jsonl"
KINDS: Mapping[str, tuple[str, float]] = {
    "adapter": ("with an adapter", 0.0),
    "dense": ("without: dense", TREE_BAND),
    "mixture": ("without: mixtures", TREE_MIXTURE_BAND),
    "mixers": ("without: other mixers of tokens than softmax", MIXER_BAND),
}
"""What is known of a type -> words, the band of its formula (0: by setup)."""
LATER = shared.DATA / "any_model_later.jsonl"
"""Types of releases that came after the tested one, run with those (`--out`), each once and before anything was mended
for it."""
PAGE = shared.DOCS / "accuracy" / "any-model.md"
_INDEXER = {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048,
            "indexer_compress_ratio": 4}  # fmt: skip
SIZES: Mapping[str, Mapping[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000}, "d_model": 6144, "n_heads": 48,
             "n_layers": 40, "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}},
    "deepseek_v2": {"num_experts_per_tok": 6, "n_routed_experts": 64},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
                                         "num_kv_shared_layers": 30}},
    "hunyuan_v1_dense": {"head_dim": 128, "num_key_value_heads": 8},
    "hunyuan_v1_moe": {"head_dim": 128, "num_key_value_heads": 8, "num_experts": 16, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"is_decoder": True, "axial_pos_shape": [16, 32], "vocab_size": 32000},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip
"""What transformers' defaults lack: with these alone it builds no model of the type that computes anything."""


def causal_types() -> list[str]:
    """Every `model_type` that `AutoModelForCausalLM` builds."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def default_config(model_type: str, layers: int | None = None) -> Any:
    """transformers' own configuration of a type, cut to so many layers where a field tells how many there are."""
    from transformers import CONFIG_MAPPING

    from probes.stack.configs import config_of_layers, num_layers

    config = CONFIG_MAPPING[model_type](**SIZES.get(model_type, {}))
    with suppress(ValueError):
        if layers is not None and not config.is_encoder_decoder and num_layers(config) > layers:
            return config_of_layers(config, range(layers))
    return config


def written(model_type: str, folder: Path, layers: int | None = None) -> int | None:
    """Writes config.json into a folder as transformers writes it; the longest sequence that it names."""
    config = default_config(model_type, layers)
    config.save_pretrained(folder)
    with suppress(ValueError):  # several configurations of text
        longest: int | None = config.get_text_config().to_dict().get("max_position_embeddings")
        return longest
    return None


def planned(model_type: str, *, layers: int | None = None, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """One type through the command, with nothing cached, in a child that has the libraries loaded: what came out, as
    plain data; `failed` names the stop where it went wrong, `fits` whether the card takes the model."""
    line: dict[str, Any] = {"type": model_type, "layers": layers}
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "answer.json"
        child = multiprocessing.get_context("fork").Process(target=_plan_one, args=(model_type, layers, answer))
        started, spent = time.perf_counter(), sum(os.times()[2:4])
        child.start()
        child.join(limit_s)
        if child.exitcode is None:
            child.kill()
            child.join()
        line |= {"seconds": round(time.perf_counter() - started, 1), "cpu_s": round(sum(os.times()[2:4]) - spent, 1)}
        if answer.exists():
            return line | json.loads(answer.read_text())
    return line | {"failed": "plan", "why": f"no answer within {limit_s:g} s (exit code {child.exitcode})"}


def _plan_one(model_type: str, layers: int | None, answer: Path) -> None:
    """In the child: the command, and what it wrote, as JSON."""
    import torch

    from finetune_planner.cli.app import run

    torch.set_num_threads(1)  # a fork has none of the threads that its parent's OpenMP pool counts on, and would wait
    folder, out = answer.parent / model_type, answer.parent / "out"
    os.environ["XDG_CACHE_HOME"] = str(answer.parent / "cache")
    stderr = io.StringIO()
    alone = mock.patch("planner.planning.refine._that_ran", return_value=())
    with redirect_stdout(io.StringIO()), redirect_stderr(stderr), alone:
        try:
            longest = written(model_type, folder, layers)
            tokens = min(SEQ_LEN, LONGEST.get(model_type, longest or SEQ_LEN))
            length = [] if model_type in OWN_LENGTH else ["--seq-len", str(tokens)]
            code = run([str(folder), "--gpu", GPU, *length, "--out", str(out)])
        except Exception as error:  # whatever a configuration's class makes of its own defaults
            code, line = -1, {"failed": "config", "why": f"{type(error).__name__}: {error}"[:300]}
    document = out / "plan.json"
    if document.exists():
        plan = json.loads(document.read_text())
        line = _told(plan) | _first(folder, plan)
    elif code != -1:
        line = {"failed": "plan", "why": stderr.getvalue().strip()[-400:]}
    answer.write_text(json.dumps(line | {"exit": code}))


def _first(folder: Path, plan: Mapping[str, Any]) -> dict[str, Any]:
    """How far the first answer, of a type without an adapter by its sizes alone, is from the dry run of the choice."""
    from planner.core.errors import PlannerError
    from planner.hardware.gpus import find_gpu
    from planner.models.config_file import CONFIG_NAME, read_config
    from planner.models.families import spec_from_sizes
    from planner.planning.predict import predict
    from planner.setup.interchange import setup_from_dict

    try:
        spec = spec_from_sizes(read_config(folder / CONFIG_NAME))
    except PlannerError:
        spec = None
    tried = plan["kind"] == "plan" and plan["chosen"]["dry_run"]
    if spec is None or not tried or tried["failure"]:
        return {}
    stored = {name: value for name, value in plan["chosen"]["setup"].items() if name not in ("model", "gpu")}
    first = predict(spec, find_gpu(GPU), setup_from_dict(stored))
    errors = [getattr(first, name) / tried[name] - 1 for name in ("peak_allocated_bytes", "tokens_per_s")]
    return {"first": {"errors": [round(error, 3) for error in errors], "band": first.memory_band_fraction}}


def _kind(model: Mapping[str, Any]) -> str:
    """Which of `KINDS` a model is."""
    if not model["from_tree"]:
        return "adapter"
    layers = model["layer_kinds"]
    if any(layer["attention"] and layer["attention"]["kind"] == "linear" for layer in layers):
        return "mixers"
    return "mixture" if any(layer["mlp"] and layer["mlp"]["kind"] == "moe" for layer in layers) else "dense"


def _told(plan: Mapping[str, Any]) -> dict[str, Any]:
    fits = plan["kind"] == "plan"
    model = plan["workload"]["model"]
    line: dict[str, Any] = {"fits": fits, "params": model["num_params"], "kind": _kind(model)}
    if not fits:
        tried = plan["nearest"]["dry_run"]
        return line | ({"nearest_bytes": tried["peak_device_bytes"]} if tried and not tried["failure"] else {})
    chosen, tried = plan["chosen"], plan["chosen"]["dry_run"]
    formula = chosen["formula"]
    setup = {name: chosen["setup"][name] for name in ("method", "checkpointing", "micro_batch_seqs")}
    line |= {"setup": setup, "formula_band": formula["memory_band_fraction"], "level": formula["level"]}
    line |= {"kind": "mixers"} if line["kind"] == "dense" and line["formula_band"] >= MIXER_BAND else {}
    line["written"] = [
        launch["target"] for launch in plan["launch"] if launch["files"] and launch["target"] != "accelerate"
    ]
    if tried and not tried["failure"]:
        errors = {name: formula[name] / tried[name] - 1 for name in ("peak_allocated_bytes", "tokens_per_s")}
        line |= {"peak_bytes": tried["peak_device_bytes"], "formula_error": round(errors["peak_allocated_bytes"], 4)}
        line |= {"formula_speed_error": round(errors["tokens_per_s"], 4)}
    elif not chosen["setup"]["compile"]:  # which no dry run follows
        why = str(plan["notes"]) if tried is None else tried["failure"]["message"]
        return line | {"failed": "dry run", "why": why[:300]}
    return line if line["written"] else line | {"failed": "launch", "why": plan["launch"][0]["notes"][0][:300]}


def load_all() -> None:
    """Loads what every child needs, once: a plan's own seconds are some of the imports'."""
    import_module("finetune_planner.cli.make")
    load_libraries()
    for name in ("peft", "probes.dryrun.engine", "probes.module_tree", "finetune_planner.cli.writing"):
        import_module(name)
    gc.freeze()


def planned_to_fit(model_type: str, limit_s: float) -> dict[str, Any]:
    """One type at its default sizes, and with fewer layers where those fit no card: that is no failure to read it."""
    line = planned(model_type, limit_s=limit_s)
    for layers in FEWER:
        if line.get("fits", True):
            break
        line = planned(model_type, layers=layers, limit_s=limit_s) | {"default_params": line["params"]}
    return line


def passes(line: Mapping[str, Any]) -> bool:
    return "failed" not in line and line["fits"]


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """What passed, and why the others did not."""
    failed = [line for line in lines if not passes(line)]
    rows = [f"{len(lines) - len(failed)} of {len(lines)} types pass"]
    rows += [f"{line['type']:28} {line.get('failed', 'no fit'):8} {_why(line)[:160]}" for line in failed]
    return "\n".join(rows)


def _why(line: Mapping[str, Any]) -> str:
    if "failed" not in line:
        near = (
            f"; with {line['layers']} layer {line['nearest_bytes'] / 2**30:,.0f} GiB" if "nearest_bytes" in line else ""
        )
        return f"read and proven, does not fit the card at any depth{near}"
    words = " ".join(line["why"].split())
    return words.partition("builds of it: ")[2].partition(" hint: ")[0] or words


def page(lines: Sequence[Mapping[str, Any]]) -> str:
    passing, strangers = [line for line in lines if passes(line)], {*causal_types()} - {*model_types()}
    short = [line for line in passing if line.get("shortened")]
    passing_strangers = [line for line in passing if line["type"] in strangers]
    slow = [line for line in lines if line["cpu_s"] > LIMIT_S]
    return _PAGE.format(
        transformers=version("transformers"),
        torch=version("torch"),
        gpu=GPU,
        seq_len=SEQ_LEN,
        types=len(causal_types()),
        counted=len(lines),
        passing=len(passing),
        own=len(passing_strangers),
        strangers=len(strangers),
        cut=sum(bool(line["layers"]) for line in passing) - len(short),
        short=len(short),
        limit_s=LIMIT_S,
        slow=len(slow),
        median_s=statistics.median(line["cpu_s"] for line in lines),
        worst_s=max(line["cpu_s"] for line in lines),
        slow_types=", ".join(line["type"] for line in slow) or "none",
        failing="\n".join(
            f"| {line['type']} | {line.get('failed', 'the card')} | {_why(line)} |"
            for line in lines
            if not passes(line)
        ),
        formula="\n".join(_formula_rows(passing)),
        first=_first_row(passing_strangers),
        later="\n".join(_later_rows(rows_so_far(LATER))),
    )


_PAGE = """# Any model on its first day

Written by `python -m benchmarks.any_model --markdown` from `benchmarks/data/any_model.jsonl`; transformers
{transformers}, torch {torch}, on a CPU. Of each type config.json as transformers writes its defaults,
`plan FOLDER --gpu {gpu} --seq-len {seq_len} --out DIR`, nothing cached; a type passes where plan, dry run (none follows
torch.compile) and launch files came out.

| | types |
|---|--:|
| that `AutoModelForCausalLM` builds | {types} |
| counted here | {counted} |
| **pass** | **{passing}** |
| of them without an adapter, read off their module trees | {own} of {strangers} |
| of them with fewer layers, because the default sizes do not fit the card | {cut} |
| of them with four layers to save this machine's time (token mixers in plain PyTorch) | {short} |
| took more than {limit_s:.0f} CPU seconds | {slow} |

CPU seconds of a type, the libraries loaded and what stands beside the plan left out: median {median_s:.1f}, worst
{worst_s:.0f}; over the limit: {slow_types}.

## What does not pass

| type | stops at | why |
|---|---|---|
{failing}

## Types of releases that nobody here had seen

Run once, with that release beside the tested versions of all else, before anything was mended for it.

| transformers | types that it brought | pass | dry run against the formula: median, worst | outside the band |
|---|--:|--:|--:|---|
{later}

## The dry run of the chosen setup against the formula, allocated peak

The formula chooses what is run first; the plan then stands on the dry run (±2 %). The bands are those of a plan without
one (`--no-dry-run`).

| | types | median | 90th | worst | band | outside |
|---|--:|--:|--:|--:|--:|---|
{formula}

## The first answer, by the sizes of config.json alone

Said before the layers of a type without an adapter are read: what `--like` would take it for.

| types that have one | median | 90th | worst | outside the band |
|--:|--:|--:|--:|---|
{first}

Of twenty families that no code names a dry run of few layers, repeated, peaks as one of all layers does, to 0.0001 %
(`git show 1c4d607b:docs/accuracy/any-model.md`).
"""


def _layout(errors: Sequence[float], share: float) -> str:
    """Median, a high percentile and the worst of absolute errors, as cells."""
    ordered = sorted(errors, key=abs)
    high = abs(ordered[min(len(ordered) - 1, round(share * len(ordered)))])
    return f"{statistics.median(map(abs, ordered)):.2%} | {high:.1%} | {ordered[-1]:+.1%}"


def _formula_rows(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """By kind: how much more or less than the formula's the dry run's peak is, which is what a band means."""
    for kind, (words, band) in KINDS.items():
        part = [line for line in lines if line["kind"] == kind and "formula_error" in line]
        errors = [1 / (1 + line["formula_error"]) - 1 for line in part]
        bands = [band or line["formula_band"] for line in part]
        out = [line["type"] for line, error, most in zip(part, errors, bands, strict=True) if abs(error) > most]
        shown = f"±{band:.0%}" if band else "±4 to ±10 %"
        yield f"| {words} | {len(part)} | {_layout(errors, 0.9)} | {shown} | {len(out)}: {', '.join(out)} |"


def _later_rows(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for release in sorted({line["transformers"] for line in lines}):
        part = [line for line in lines if line["transformers"] == release]
        errors = {line["type"]: 1 / (1 + line["formula_error"]) - 1 for line in part if passes(line)}
        out = [line["type"] for line in part if abs(errors.get(line["type"], 0.0)) > line["formula_band"]]
        median, worst = statistics.median(map(abs, errors.values())), max(errors.values(), key=abs)
        names = ", ".join(line["type"] for line in part)
        yield f"| {release} | {names} | {len(errors)} of {len(part)} | {median:.1%}, {worst:+.1%} | {', '.join(out)} |"


def _first_row(lines: Sequence[Mapping[str, Any]]) -> str:
    answered = [line for line in lines if "first" in line]
    out = [line["type"] for line in answered if abs(line["first"]["errors"][0]) > line["first"]["band"]]
    errors = _layout([line["first"]["errors"][0] for line in answered], 0.9)
    return f"| {len(answered)} | {errors} | {len(out)}: {', '.join(out)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="", help="some of them, comma-separated")
    parser.add_argument("--out", type=Path, default=DATA, help="lines of JSON; types that it holds are not run again")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds of one type's plan")
    parser.add_argument("--markdown", action="store_true", help="write the page of what was counted, run nothing")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    lines = rows_so_far(args.out)
    if args.markdown:
        PAGE.write_text(page(lines))
        return
    done = {line["type"] for line in lines}
    types = [name for name in args.types.split(",") if name] or causal_types()
    missing = sorted((name for name in types if name not in done), key=lambda name: name in model_types())
    load_all()
    for place, model_type in enumerate(missing, 1):
        line = planned_to_fit(model_type, args.limit_s)
        lines.append(line)
        print(f"{place} of {len(missing)}: {json.dumps(line)}", file=sys.stderr, flush=True)
        with args.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
    print(table(lines))


if __name__ == "__main__":
    main()
