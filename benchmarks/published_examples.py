"""A league that nobody here wrote: the memory that Axolotl and ms-swift print beside their examples.

    python -m benchmarks.published_examples               # the league, from the formula of today
    python -m benchmarks.published_examples --dry-run     # the same with `plan check`'s dry run (minutes)
    python -m benchmarks.published_examples --rivals PYTHON   # canifinetune, fitcheck-llm and fitscout on the same

A row is one config with its figure: `device_mem_reserved(gib)` of Axolotl's log, as the gpt-oss README says (before
294c7fe7a of 31 July 2025 its log summed what nvidia-smi shows: `figure` "device"), or ms-swift's `memory(GiB)`
(`torch.cuda.max_memory_reserved`), rounded by whoever wrote it; "GB" is taken for GiB.
Read from their checkouts by `git show 1c4d607b:benchmarks/published_examples.py` (`--read`), each config predicted
before anything was compared (`first`). Half of the rows, by the checksum of the path (`kept_out`), is never looked at
to change a model.

A file was read as it stood when its figure was written, with that day's transformers. An ms-swift script counts where
its length is known: packed, or the self-introductions of `swift/self-cognition` alone (SHORT tokens).
"""

import argparse
import json
import math
import statistics
import subprocess
import tempfile
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.shared import DATA, rows_of
from planner.core.units import GIB
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
from planner.models.earlier import of_transformers_4
from planner.models.resolve import resolve_model
from planner.models.spec import ModelSpec
from planner.planning.check import left_by_lengths_bytes
from planner.planning.predict import predict
from planner.samples.lengths import micro_batches, stated_lengths
from planner.setup import TrainSetup
from planner.setup.interchange import request_form, setup_from_request, setup_to_dict
from planner.setup.outcome import Band, Prediction

REPOSITORIES = ("axolotl-ai-cloud/axolotl", "modelscope/ms-swift")
SHORT = 256
SHORT_LENGTHS = f"110:50:40:{SHORT}"
"""Mean, standard deviation, shortest and longest of such samples with their template: said before any was compared. The
dry run replays an epoch of them on fixed segments, where different lengths leave more cached than the longest takes."""

SAME_SHAPES = {
    "axolotl-ai-co/gpt-oss-120b-dequantized": "openai/gpt-oss-120b",
    "casperhansen/llama-3-70b-fp16": "meta-llama/Meta-Llama-3-70B",
    "mistralai/Devstral-Small-2507": "mistralai/Mistral-Small-24B-Base-2501",
    "mistralai/Magistral-Small-2507": "mistralai/Mistral-Small-24B-Base-2501",
    "allenai/Olmo-3-7B-Instruct-SFT": "allenai/Olmo-3-1025-7B",
    "katanemo/Plano-Orchestrator-4B": "Qwen/Qwen3-4B",
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": "Qwen/Qwen3-8B",
}
"""Models of the examples -> those of the catalogue that they were trained from, as their names or model cards say."""
CONFIGS: dict[str, dict[str, Any]] = {
    "ByteDance-Seed/Seed-OSS-36B-Instruct": {
        "model_type": "seed_oss", "hidden_size": 5120, "num_hidden_layers": 64, "intermediate_size": 27648,
        "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 155136,
        "attention_bias": True, "attention_out_bias": False, "tie_word_embeddings": False,
    },
    "zai-org/GLM-4.7-Flash": {"model_type": "glm4_moe_lite", "tie_word_embeddings": False},
    "swiss-ai/Apertus-8B-Instruct-2509": {
        "model_type": "apertus", "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 21504,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 131072, "tie_word_embeddings": False,
    },
    "XiaomiMiMo/MiMo-7B-RL": {
        "model_type": "qwen2", "hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 11008,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151680, "tie_word_embeddings": False,
    },
    "LiquidAI/LFM2-350M": {
        "model_type": "lfm2", "hidden_size": 1024, "num_hidden_layers": 16, "intermediate_size": 6656,
        "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 65536,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
    "LiquidAI/LFM2-8B-A1B": {
        "model_type": "lfm2_moe", "num_hidden_layers": 24,
        "layer_types": ["full_attention" if n in {2, 6, 10, 14, 18, 21} else "conv" for n in range(24)],
    },
    "arcee-ai/Trinity-Nano-Preview": {
        "model_type": "afmoe", "hidden_size": 1024, "num_hidden_layers": 56, "intermediate_size": 3072,
        "moe_intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
        "vocab_size": 200192, "num_dense_layers": 2, "num_experts": 128, "num_experts_per_tok": 8,
        "num_shared_experts": 1, "sliding_window": 2048, "mup_enabled": True, "tie_word_embeddings": False,
    },
    "mistralai/Ministral-3-3B-Reasoning-2512": {
        "model_type": "mistral3", "tie_word_embeddings": True,
        "text_config": {
            "model_type": "ministral3", "hidden_size": 3072, "num_hidden_layers": 26, "intermediate_size": 9216,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
        },
        "vision_config": {"model_type": "pixtral", "image_size": 1540, "patch_size": 14},
    },
}  # fmt: skip
"""Configurations of others: Seed-OSS and Apertus as MLX ports have them (mlx-swift-lm's ApertusConfiguration);
GLM-4.7-Flash is transformers 5.23's default of its type (vLLM's own tests name the same sizes); MiMo-7B as a test of
Megatron-Bridge has it, whose class is Qwen2's but for a layer that predicts further tokens."""


CARD_SAID = (
    "its README of April 2024 says what a GPU must have (48, 11, 2 x 21 GB VRAM), no log; its LoRA file was Llama-2's"
)
OTHERWISE = {
    "examples/train/tuners/lisa/train.sh": "LISA trains two layers at a time, which no setup says: counted as all",
    "examples/train/multi-gpu/ddp/train.sh": "of December 2024: before PyTorch 2.8 buffers of DDP's first broadcast "
    "were kept apart until it ended (pytorch 150398; torchtune 843 saw 78 GB for 23), up to a copy of the weights",
    "examples/train/multi-gpu/ddp_device_map/train.sh": "two copies over two GPUs each, which no setup says: "
    "counted as two whole ones",
    "examples/train/tuners/galore/train_galore.sh": "GaLore's states are of projected gradients: counted as AdamW's",
    **dict.fromkeys(
        (f"examples/llama-3/{name}" for name in ("fft-8b.yaml", "lora-8b.yml", "qlora-fsdp-70b.yaml")), CARD_SAID
    ),
    "examples/qwen3.5/27b-qlora.yaml": "loading: transformers 5.0 to 5.3 read 16-bit weights onto the GPU faster than "
    "they are quantized (issue 43032), and the figure is of the whole run",
    "examples/qwen3-next/qwen3-next-80b-a3b-qlora.yaml": "peft 0.21 moves the names of the shared expert's matrices "
    "onto all experts (utils/transformers_weight_conversion.py): with adapters there the README says ~71 GiB",
}
"""Figures of something else than what today's versions make of the config: printed, not counted."""


def known_as(name: str, folder: Path) -> str:
    """What a model of the examples is looked up by: its own name, the same shapes, or its configuration in a folder."""
    if name not in CONFIGS:
        return SAME_SHAPES.get(name, name)
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
    return str(place)


def kept_out(path: str) -> bool:
    """Whether no model is changed for this row."""
    return zlib.crc32(path.encode()) % 2 == 1


def judged(row: dict[str, Any], folder: Path, *, dry: bool) -> tuple[Prediction, Band]:
    """The prediction of a row and the band of what a device held, as what the READMEs print is reserved memory."""
    card, setup = find_gpu(row["gpu"]), setup_from_request(row["setup"])
    model = resolve_model(known_as(row["model"], folder))
    model = of_transformers_4(model) if "transformers" in row else model
    prediction = predict(model, card, setup)
    left = left_by_lengths_bytes(prediction, setup)[1]
    if dry:
        from probes.dryrun import dry_run

        ran = dry_run(model, card, setup)
        prediction = ran if isinstance(ran, Prediction) else prediction
        if setup.seq_len_tokens == SHORT and setup.parallel != "device-map" and not setup.expandable_segments:
            more = _lengths_bytes(model, card, setup.replace(transformers_version="", num_gpus=1, parallel="none"))
            prediction, left = replace(prediction, peak_reserved_bytes=prediction.peak_reserved_bytes + more), 0
    below, above = prediction.bands["device"]
    more = 0.1 * row.get("approximations", 0)
    return prediction, Band(below + more, above + more + left / prediction.peak_reserved_bytes)


def _lengths_bytes(model: ModelSpec, card: GpuSpec, setup: TrainSetup) -> int:
    """What an epoch of SHORT_LENGTHS reserves beyond micro-batches that are all as long as the longest: of one GPU, as
    each rank computes its own (what an engine gathers lies in another stream's pool)."""
    from probes.dryrun.varying import over_lengths

    lengths = stated_lengths(SHORT_LENGTHS)
    batches = micro_batches(lengths, micro_batch_seqs=setup.micro_batch_seqs, seq_len_tokens=SHORT, num=128, seed=0)
    over = over_lengths(model, card, setup, batches, source=SHORT_LENGTHS, seed=0)
    return over.peak_reserved_bytes - over.constant_reserved_bytes


def figure(row: dict[str, Any], answer: Prediction) -> float:
    """GiB of an answer that a row's figure is held against."""
    peak: int = getattr(answer, f"peak_{row.get('figure', 'reserved')}_bytes")
    return peak / GIB


def league(repository: str, rows: list[dict[str, Any]], folder: Path, *, dry: bool) -> None:
    """Prints every row of a repository, then the errors of all and of the kept-out half, and what is not counted."""
    began, ratios = time.perf_counter(), {}
    print(repository)
    for row in (row for row in rows if "setup" in row):
        answer, (below, above) = judged(row, folder, dry=dry)
        ratio = figure(row, answer) / row["gib"]
        miss = "too low" if 1 / ratio > 1 + above else "too high" if 1 / ratio < 1 - below else ""
        apart = OTHERWISE.get(row["path"], "its data decide how long" if row.get("at_most") else "")
        if not apart:
            ratios[row["path"]] = ratio, miss
        print(
            f"{row['path'].removeprefix('examples/'):52} {'kept out' if kept_out(row['path']) else '':8} "
            f"{figure(row, answer):6.2f} GiB (-{below:.0%} to +{above:.0%}), published {row['gib']:6.2f}: "
            f"{ratio - 1:+.1%} {apart or miss + _whole_loss(row, folder) * (miss == 'too low')}"
        )
    seconds = time.perf_counter() - began
    read_rows = [row for row in rows if "setup" in row]
    alone = {row["path"] for row in read_rows if setup_from_request(row["setup"]).single_gpu}
    halves = {
        "all": list(ratios),
        "kept out": [path for path in ratios if kept_out(path)],
        "one GPU": [path for path in ratios if path in alone],
        "one GPU, kept out": [path for path in ratios if path in alone and kept_out(path)],
        "several GPUs": [path for path in ratios if path not in alone],
    }
    for name, paths in halves.items():
        if not paths:
            continue
        errors = [abs(ratios[path][0] - 1) for path in paths]
        misses = [ratios[path][1] for path in paths if ratios[path][1]]
        low = sum(ratios[path][0] < 1 for path in paths)
        print(
            f"{name}: {len(paths)} configs, median {statistics.median(errors):.1%}, worst {max(errors):.1%}, too low "
            f"{low / len(paths):.0%}; inside the band {1 - len(misses) / len(paths):.0%} "
            f"({misses.count('too low')} of {len(misses)} misses too low)"
        )
    print(f"{seconds:.1f} s; {len(rows) - len(read_rows)} configs are not read:")
    for row in rows:
        if "setup" not in row:
            print(f"  {row['path']}: {row['refused']}")


def _whole_loss(row: dict[str, Any], folder: Path) -> str:
    """What a run without the plugin that cuts the loss would take: the READMEs leave open whether theirs had it."""
    setup = setup_from_request(row["setup"])
    if setup.loss == "full":
        return ""
    whole, _ = judged({**row, "setup": request_form(setup.replace(loss="full"))}, folder, dry=False)
    return f" (without cut cross-entropy {figure(row, whole) / row['gib'] - 1:+.1%})"


def against_rivals(rows: list[dict[str, Any]], folder: Path, python: Path) -> None:
    """Prints the errors and seconds of every estimator that a Python has, beside the formula's, on one GPU."""
    counted = [row for row in rows if "setup" in row and row["path"] not in OTHERWISE and not row.get("at_most")]
    counted = [row for row in counted if setup_from_request(row["setup"]).single_gpu]
    lines = []
    for row in counted:
        model, card = resolve_model(known_as(row["model"], folder)), find_gpu(row["gpu"])
        setup = setup_to_dict(setup_from_request(row["setup"]))
        lines.append(json.dumps({"shape": _shape(model, card), "setup": setup}))
    began = time.perf_counter()
    ours = [figure(row, judged(row, folder, dry=False)[0]) for row in counted]
    here = {"name": "formula", "seconds": time.perf_counter() - began, "answers": ours}
    code = Path(__file__).with_name("rival_child.py").read_text(encoding="utf-8")
    done = subprocess.run(
        [python, "-I", "-c", code], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    print("| estimator | configs | not answered | median | worst | too low | seconds |\n|---|--:|--:|--:|--:|--:|--:|")
    for rival in (here, *map(json.loads, done.stdout.splitlines())):
        pairs = [
            (gib, row["gib"]) for row, gib in zip(counted, rival["answers"], strict=True) if isinstance(gib, float)
        ]
        errors = [gib / published - 1 for gib, published in pairs] or [math.nan]
        sizes, low = [*map(abs, errors)], sum(error < 0 for error in errors) / len(errors)
        print(
            f"| {rival['name']} | {len(pairs)} | {len(counted) - len(pairs)} | {statistics.median(sizes):.1%} "
            f"| {max(sizes):.1%} | {low:.0%} | {rival['seconds']:.2f} |"
        )


def _shape(model: ModelSpec, card: GpuSpec) -> dict[str, Any]:
    """A decoder in the words that every estimator has."""
    layer = next(kind for kind in model.layer_kinds if kind.attention is not None)
    assert layer.attention is not None
    return {
        "memory_gib": card.memory_bytes / GIB,
        "num_params": model.num_params,
        "hidden_size": model.hidden_size,
        "num_layers": model.num_layers,
        "num_attention_heads": layer.attention.num_heads,
        "num_kv_heads": layer.attention.num_kv_heads,
        "head_dim": layer.attention.head_dim,
        "intermediate_size": layer.mlp.intermediate_size if layer.mlp is not None else 0,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="by the dry run, where it follows the setup")
    parser.add_argument("--rivals", type=Path, help="a Python that has other estimators (benchmarks/rival_child.py)")
    args = parser.parse_args()
    rows = rows_of(DATA / "published_examples.jsonl")
    with tempfile.TemporaryDirectory() as name:
        if args.rivals:
            against_rivals(rows, Path(name), args.rivals)
            return
        for repository in REPOSITORIES:
            of_it = [row for row in rows if row["source"].startswith(repository)]
            league(repository, of_it, Path(name), dry=args.dry_run)


if __name__ == "__main__":
    main()
