"""A league that nobody here wrote: the memory that Axolotl and ms-swift print beside their examples.

    python -m benchmarks.published_examples --read CHECKOUT   # a clone of one of the two, read anew
    python -m benchmarks.published_examples                   # the league, from the formula of today
    python -m benchmarks.published_examples --dry-run         # the same with `plan check`'s dry run (minutes)

A row is one config with its figure: `device_mem_reserved(gib)` of Axolotl's log, as the gpt-oss README says, or
ms-swift's `memory(GiB)` (`torch.cuda.max_memory_reserved`), rounded by whoever wrote it; "GB" is taken for GiB.
`--read` predicts each config before anything is compared (`first`, never written again). Half of the rows, by the
checksum of the path (`kept_out`), is never looked at to change a model.

A file is read as it stood when its figure was written, with that day's transformers. An ms-swift script counts where
its length is known: packed, or the self-introductions of `swift/self-cognition` alone (SHORT tokens).
"""

import argparse
import json
import re
import statistics
import subprocess
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shared import DATA, rows_so_far, write_rows
from finetune_planner.cli.checking import load
from planner.core.errors import ConfigError, PlannerError
from planner.core.units import GIB
from planner.frameworks.readers import FileContext, read_text
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
from planner.models.earlier import built_by_transformers_4, of_transformers_4
from planner.models.resolve import resolve_model
from planner.models.spec import ModelSpec
from planner.planning.check import left_by_lengths_bytes
from planner.planning.predict import predict
from planner.samples.lengths import micro_batches, stated_lengths
from planner.setup import TrainSetup
from planner.setup.interchange import request_form, setup_from_request
from planner.setup.outcome import Band, Prediction

ROWS = DATA / "published_examples.jsonl"
_FIGURE = r"~?([\d.]+) ?Gi?B"
_RUN = re.compile(r"axolotl train (examples/\S+\.ya?ml)")
_AHEAD = re.compile(rf"#.*?(?:(\d+)x\d+ ?GB @ |~){_FIGURE}")
_LINK = re.compile(r"\]\(\./(\S+\.ya?ml)\)|^\| `(\S+\.ya?ml)`")
_BEHIND = re.compile(rf"(?:configs? uses? about|This uses about|Single GPU @|Dual GPU @|\|) {_FIGURE}", re.IGNORECASE)
CARDS = ((23, "rtx-4090"), (46, "rtx-a6000"), (78, "h100-sxm"), (138, "h200"), (float("inf"), "b200"))
"""The smallest card that holds a figure, where the README says no more than its size."""


class Example(NamedTuple):
    """A config of the checkout, its text, what it is said to take, of how many GPUs each (0: not said), the packages
    that it is run with, fields of its setup that its data say, and whether those only bound its length."""

    path: str
    text: str
    gib: float
    num_gpus: int
    versions: dict[str, str]
    sets: dict[str, int]
    at_most: bool


def examples(checkout: Path) -> Iterator[Example]:
    yield from scripts(checkout) if (checkout / "examples" / "train").is_dir() else readmes(checkout)


REPOSITORIES = ("axolotl-ai-cloud/axolotl", "modelscope/ms-swift")
_ON_GPUS = re.compile(r"^# *(?:[^0-9#\n]*: *)?(?:(\d+) ?\* ?)?([\d.]+) ?Gi?B(?: ?\* ?(\d+))?", re.MULTILINE)
_OTHERWISE_RUN = re.compile(r"megatron|ascend|npu|/ray/|multimodal|omni|_vl|/vlm|ocr")
"""Other hardware and trainers, and what no text model is."""
SHORT = 256
SHORT_LENGTHS = f"110:50:40:{SHORT}"
"""Mean, standard deviation, shortest and longest of such samples with their template: said before any was compared. The
dry run replays an epoch of them on fixed segments, where different lengths leave more cached than the longest takes."""
RELEASES = {
    "2024-10-24": "4.46", "2024-12-05": "4.47", "2025-01-10": "4.48", "2025-02-17": "4.49", "2025-03-21": "4.50",
    "2025-04-05": "4.51", "2025-05-20": "4.52", "2025-06-26": "4.53", "2025-07-25": "4.54", "2025-08-05": "4.55",
    "2025-08-29": "4.56", "2025-10-03": "4.57",
}  # fmt: skip
"""Day -> the transformers of that day (PyPI)."""


def scripts(checkout: Path) -> Iterator[Example]:
    """ms-swift's shell scripts of supervised training whose first comments say what they take. A card's whole 80 GiB
    says which card."""
    for script in sorted(checkout.glob("examples/**/*.sh")):
        path, now = str(script.relative_to(checkout)), script.read_text(encoding="utf-8")
        match = _ON_GPUS.search(now)
        if _OTHERWISE_RUN.search(path) or match is None or float(match[2]) == 80 or "\nswift sft" not in now:
            continue
        day, commit = _git(checkout, "log", "--format=%as %h", f"-S{match[0]}", "--", path).split()[-2:]
        text = _of_commit(checkout, commit, path)
        of_day = [version for since, version in RELEASES.items() if since <= day]
        data = re.findall(r"[\w-]+/[\w-]+(?:#\d+)?", text.partition("--dataset")[2].partition("--")[0])
        short = all("self-cognition" in dataset for dataset in data)
        yield Example(
            path,
            text,
            float(match[2]),
            int(match[1] or match[3] or 1),
            {"transformers": of_day[-1]} if day < "2026" else {},
            {"seq_len_tokens": SHORT} if short else {},
            not short and "--packing true" not in text,
        )


def _git(checkout: Path, *words: str) -> str:
    return subprocess.run(("git", "-C", str(checkout), *words), capture_output=True, text=True, check=True).stdout


def readmes(checkout: Path) -> Iterator[Example]:
    """Axolotl's configs with a figure: in a comment before their command or behind it, in a sentence after it, in a
    table, or under a link. Each as it stood when its figure was written, with that day's pins."""
    for readme in sorted(checkout.glob("examples/**/README.md")):
        ahead: tuple[re.Match[str], float, int] | None = None
        before: list[str] = []
        text = readme.read_text(encoding="utf-8")
        installs = {name: "0" for name in ("flash-linear-attention",) if name in text}
        name = str(readme.relative_to(checkout))
        for line in map(str.strip, text.splitlines()):
            command, link = _RUN.search(line), _LINK.search(line)
            if command:
                inline = re.search(rf"#.*?{_FIGURE}", line[command.end() :])
                figure = (inline, float(inline[1]), 0) if inline else ahead
                before = [] if figure else [*before, command[1]]
                if figure:
                    yield _of_day(checkout, name, command[1], *figure, installs)
                ahead = None
                continue
            if link:
                before = [str((readme.parent / (link[1] or link[2])).relative_to(checkout))]
            if (match := _BEHIND.search(line)) and before:
                gpus = 2 if "Dual" in line else int("Single" in line)
                yield from (_of_day(checkout, name, path, match, float(match[1]), gpus, installs) for path in before)
                before = []
            elif ahead is None and (match := _AHEAD.search(line)):
                ahead = match, float(match[2]), int(match[1] or 0)


def _of_day(
    checkout: Path, readme: str, path: str, match: re.Match[str], gib: float, gpus: int, installs: dict[str, str]
) -> Example:
    """A config as it was in the commit that wrote its figure, with what that commit pins."""
    words = re.search(f"{_FIGURE}$", match[0])  # the last: a card's size stands before it
    assert words is not None
    commit = _git(checkout, "log", "--format=%h", f"-S{words[0]}", "--", readme).split()[-1]
    text = _of_commit(checkout, commit, path)
    now = (checkout / path).read_text(encoding="utf-8") if (checkout / path).is_file() else ""
    if not text or (_SHARDED.search(now) and not _SHARDED.search(text)):
        text = now  # a file of its day that says less of its GPUs than today's
    pinned = re.findall(r"^(transformers|bitsandbytes)==([\d.]+)", _of_commit(checkout, commit, _PINS), re.MULTILINE)
    return Example(path, text, gib, gpus, {**dict(pinned), **installs}, {}, False)


def _of_commit(checkout: Path, commit: str, path: str) -> str:
    """A file as a commit has it; "" where it has none."""
    words = ("git", "-C", str(checkout), "show", f"{commit}:{path}")
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


_SHARDED = re.compile(r"^(fsdp_config|fsdp|deepspeed):\s*[^\s#]*$", re.MULTILINE)
_PINS = "requirements.txt"


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


def card_of(example: Example) -> str:
    """Key of the card that the figure is held against."""
    return next(key for most, key in CARDS if example.gib < most)


def kept_out(path: str) -> bool:
    """Whether no model is changed for this row."""
    return zlib.crc32(path.encode()) % 2 == 1


def read(checkout: Path, commit: str, folder: Path) -> list[dict[str, Any]]:
    """The rows of a checkout, each with its first prediction or why there is none."""
    from finetune_planner.cli.checking import CheckRequest

    rows = []
    for published in {example.path: example for example in examples(checkout)}.values():
        row: dict[str, Any] = {
            "path": published.path,
            "source": f"{REPOSITORIES[published.path.endswith('.sh')]}@{commit}:{published.path}",
            "gib": published.gib,
            "gpu": card_of(published),
        }
        row |= {"at_most": True} if published.at_most else {}
        try:
            text = published.text
            if not published.num_gpus and _SHARDED.search(text):
                raise ConfigError("sharded, over how many GPUs is not said")
            gpus = published.num_gpus or 1
            named = read_text(text, published.path, around=FileContext(num_gpus=gpus)).model_id or ""
            said = {"versions": published.versions, "sets": published.sets, "model": known_as(named, folder)}
            request = CheckRequest(num_gpus=gpus, says_gpus=True, **said)
            place = folder / published.path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
            config, spec, card = load(place, row["gpu"], request)
            row |= {"model": named, "setup": request_form(config.setup)}
            row |= {"transformers": published.versions["transformers"]} if built_by_transformers_4(spec) else {}
            row |= {"approximations": len(config.approximations)} if config.approximations else {}
            row["first"] = round(predict(spec, card, config.setup).peak_reserved_bytes / GIB / published.gib, 4)
        except (PlannerError, OSError) as problem:
            row["refused"] = str(problem)[:160]
        rows.append(row)
    return rows


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
        if setup.seq_len_tokens == SHORT and setup.num_gpus == 1 and not setup.expandable_segments:
            more = _lengths_bytes(model, card, setup.replace(transformers_version=""))
            prediction, left = replace(prediction, peak_reserved_bytes=prediction.peak_reserved_bytes + more), 0
    below, above = prediction.bands["device"]
    more = 0.1 * row.get("approximations", 0)
    return prediction, Band(below + more, above + more + left / prediction.peak_reserved_bytes)


def _lengths_bytes(model: ModelSpec, card: GpuSpec, setup: TrainSetup) -> int:
    """What an epoch of SHORT_LENGTHS reserves beyond micro-batches that are all as long as the longest."""
    from probes.dryrun.varying import over_lengths

    lengths = stated_lengths(SHORT_LENGTHS)
    batches = micro_batches(lengths, micro_batch_seqs=setup.micro_batch_seqs, seq_len_tokens=SHORT, num=128, seed=0)
    over = over_lengths(model, card, setup, batches, source=SHORT_LENGTHS, seed=0)
    return over.peak_reserved_bytes - over.constant_reserved_bytes


def league(repository: str, rows: list[dict[str, Any]], folder: Path, *, dry: bool) -> None:
    """Prints every row of a repository, then the errors of all and of the kept-out half, and what is not counted."""
    began, ratios = time.perf_counter(), {}
    print(repository)
    for row in (row for row in rows if "setup" in row):
        answer, (below, above) = judged(row, folder, dry=dry)
        ratio = answer.peak_reserved_bytes / GIB / row["gib"]
        miss = "too low" if 1 / ratio > 1 + above else "too high" if 1 / ratio < 1 - below else ""
        apart = OTHERWISE.get(row["path"], "its data decide how long" if row.get("at_most") else "")
        if not apart:
            ratios[row["path"]] = ratio, miss
        print(
            f"{row['path'].removeprefix('examples/'):52} {'kept out' if kept_out(row['path']) else '':8} "
            f"{answer.peak_reserved_bytes / GIB:6.2f} GiB (-{below:.0%} to +{above:.0%}), published {row['gib']:6.2f}: "
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
    return f" (without cut cross-entropy {whole.peak_reserved_bytes / GIB / row['gib'] - 1:+.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--read", type=Path, metavar="CHECKOUT", help="read a checkout anew; first looks stay as they are"
    )
    parser.add_argument("--commit", default="", help="of the checkout")
    parser.add_argument("--dry-run", action="store_true", help="by the dry run, where it follows the setup")
    args = parser.parse_args()
    rows = rows_so_far(ROWS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.read:
            first = {row["path"]: row["first"] for row in rows if "first" in row}
            read_rows = read(args.read, args.commit, folder)
            for row in read_rows:
                row |= {"first": first[row["path"]]} if row["path"] in first and "first" in row else {}
            repositories = {row["source"].partition("@")[0] for row in read_rows}
            others = [row for row in rows if row["source"].partition("@")[0] not in repositories]
            rows = sorted((*others, *read_rows), key=lambda row: str(row["source"]))
            write_rows(ROWS, rows)
        for repository in REPOSITORIES:
            of_it = [row for row in rows if row["source"].startswith(repository)]
            league(repository, of_it, folder, dry=args.dry_run)


if __name__ == "__main__":
    main()
