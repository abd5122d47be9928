"""Every causal language model type that the installed transformers builds, planned end to end on its first day.

    python -m benchmarks.any_model --out today.jsonl                  # all types, transformers' default sizes
    python -m benchmarks.any_model --types mamba,bamba --layers 4     # some of them, no more than four layers
    python -m benchmarks.any_model --show today.jsonl                 # the table again
    python -m benchmarks.any_model --depths 20                        # families that no code names: a run of few layers
                                                                      # against one of all

A type passes where its config.json, as transformers writes it, is read, planned, proven by a dry run and written as
launch files. Where the default sizes fit no card the same model is planned with four layers (two experts of a kind).
"""

import argparse
import hashlib
import json
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

GPU = "h100-sxm"
SEQ_LEN, GLOBAL_BATCH = 256, 8
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


def written(model_type: str, folder: Path, layers: int | None = None) -> Path:
    """A folder with the config.json that transformers writes."""
    config = default_config(model_type, layers)
    config.save_pretrained(folder)
    return folder


def trees_here() -> Any:
    """Trees are read in this process: a child for each costs five seconds of imports and says the same."""
    from planner.models import module_tree

    def ask(config: dict[str, Any]) -> dict[str, Any]:
        import io
        from contextlib import redirect_stdout

        from probes.module_tree import main

        out = io.StringIO()
        with mock.patch.object(sys, "stdin", io.StringIO(json.dumps(config))), redirect_stdout(out):
            main()
        answer = json.loads(out.getvalue().splitlines()[-1])

        if "spec" not in answer:
            raise module_tree.NoTree(answer["failure"])
        spec: dict[str, Any] = answer["spec"]
        return spec

    return mock.patch.object(module_tree, "_ask", ask)


def planned(model_type: str, *, layers: int | None = None) -> dict[str, Any]:
    """One type end to end: what came out, as plain data; `failed` names the stop where it went wrong."""
    from finetune_planner import plan
    from planner.errors import PlannerError
    from planner.outcome import Prediction

    line: dict[str, Any] = {"type": model_type, "layers": layers}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            stop = "config"
            folder = written(model_type, Path(scratch) / model_type, layers)
            stop = "plan"
            longest = default_config(model_type, layers).get_text_config().to_dict().get("max_position_embeddings")
            line["seq_len"] = min(SEQ_LEN, longest or SEQ_LEN)
            answer = plan(
                folder,
                GPU,
                **({} if model_type == "whisper" else {"seq_len": line["seq_len"]}),
                global_batch=GLOBAL_BATCH,
            )
            line["fits"] = answer.fits
            line["params"] = answer.answer.workload.model.num_params
            found = answer.chosen.dry_run
            line["peak_gib"] = round(answer.peak_device_bytes / 2**30, 2)
            formula = answer.chosen.formula
            if isinstance(found, Prediction):
                line["formula_error"] = round(formula.peak_allocated_bytes / found.peak_allocated_bytes - 1, 4)
            elif answer.fits:
                line |= {"failed": "dry run", "why": "" if found is None else found.message[:300]}
            stop = "launch"
            if answer.fits:
                launches = answer.write(Path(scratch) / "out")
                line["written"] = [one.target for one in launches if not one.refused]
                if not line["written"]:
                    line.setdefault("failed", "launch")
                    line.setdefault("why", launches[0].refused)
        except PlannerError as error:
            line |= {"failed": stop, "why": str(error)[:400]}
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            line |= {
                "failed": stop,
                "why": f"CRASH {type(error).__name__}: {error} ({where.filename}:{where.lineno})"[:400],
            }
    line["seconds"] = round(time.perf_counter() - started, 2)
    return line


DEPTH_SETUPS: Mapping[str, Mapping[str, Any]] = {
    "lora, checkpointing": {"checkpointing": 1},
    "lora": {"checkpointing": 0},
    "full": {"checkpointing": 0, "method": "full", "lora_rank": 0, "precision": "bf16-mixed", "optimizer": "adamw"},
}


def unnamed_types() -> list[str]:
    """Types whose name stands nowhere in the packages, in an order that has no meaning."""
    root = Path(__file__).parent.parent
    code = "".join(
        path.read_text()
        for package in ("planner", "probes", "search", "reports")
        for path in (root / package).rglob("*.py")
    )
    named = set(re.findall(r"[\"']([\w-]+)[\"']", code))
    return sorted(set(causal_types()) - named, key=lambda one: hashlib.sha256(one.encode()).hexdigest())


def depth_errors(model_type: str) -> dict[str, Any]:
    """The dry run of a few layers, repeated, against that of all layers: by how much it is off, by setup."""
    from planner.outcome import ProbeFailure
    from planner.setup import TrainSetup
    from probes.dryrun.api import report_for_config

    raw = json.loads(default_config(model_type).to_json_string(use_diff=False))
    line: dict[str, Any] = {"type": model_type}
    for name, fields in DEPTH_SETUPS.items():
        setup = TrainSetup(seq_len_tokens=128, micro_batch_seqs=2, **fields)
        started = time.perf_counter()
        few = report_for_config(raw, (9, 0), setup)
        between = time.perf_counter()
        every = report_for_config(raw, (9, 0), setup, full_depth=True)
        failed = [one.message for one in (few, every) if isinstance(one, ProbeFailure)]
        if isinstance(few, ProbeFailure) or isinstance(every, ProbeFailure):
            line[name] = failed[0][:200]
            continue
        parts = ("peak_allocated_bytes", "peak_reserved_bytes")
        errors = [getattr(few.prediction, one) / getattr(every.prediction, one) - 1 for one in parts]
        seconds = [round(between - started, 2), round(time.perf_counter() - between, 2)]
        line[name] = {"layers": [few.depth, few.num_layers], "errors": errors, "seconds": seconds}
    return line


def _depths(num: int, out: Path | None) -> None:
    worst = 0.0
    done = 0
    for model_type in unnamed_types():
        if done == num:
            break
        line = depth_errors(model_type)
        print(json.dumps(line), file=sys.stderr)
        if out:
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
        found = [
            value for value in line.values() if isinstance(value, dict) and value["layers"][0] < value["layers"][1]
        ]
        if found:
            done += 1
            worst = max(worst, *(abs(error) for value in found for error in value["errors"]))
    print(f"{done} families that no code names: worst {worst:.4%}")


def _all(types: Iterable[str], layers: int | None) -> Iterator[dict[str, Any]]:
    for one in types:
        line = planned(one, layers=layers)
        if "failed" not in line and not line["fits"]:
            line = planned(one, layers=4) | {"default_fits": False}
        yield line


def table(lines: list[dict[str, Any]]) -> str:
    """What passed, and why the others did not."""
    failed = [line for line in lines if "failed" in line]
    rows = [f"{len(lines) - len(failed)} of {len(lines)} types pass"]
    rows += [f"  {kind}: {num}" for kind, num in Counter(line["failed"] for line in failed).items()]
    rows += [f"{line['type']:28} {line['failed']:8} {line['why'][:160]}" for line in failed]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=Path)
    parser.add_argument("--depths", type=int)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.depths:
        _depths(args.depths, args.out)
        return
    if args.show:
        print(table([json.loads(line) for line in args.show.read_text().splitlines()]))
        return
    types = args.types.split(",") if args.types else causal_types()
    lines = []
    with trees_here():
        for line in _all(types, args.layers):
            lines.append(line)
            print(json.dumps(line), file=sys.stderr)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    print(table(lines))


if __name__ == "__main__":
    main()
