"""What a probe costs beside the bare training loop of the same steps; how truncated depths agree with full depth.

Part 1: a probe of a tiny model (child process, imports, two depths, check depth) against a plain script that imports
the same libraries and runs as many steps of the full model. Aim: at most 3 times. Wall and CPU seconds, interleaved.

Part 2: truncated against full depth on three families: memory per phase, and step time in CPU seconds (other work on
the machine shows less) with the layout of repeated full-depth probes as the measure of noise.

    python -m benchmarks.bench_probe [--repeats 3] [--json FILE]
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from planner.setup import TrainSetup
from planner.setup.outcome import Measurement
from probes.gpu.request import Limits, ProbeRequest
from probes.gpu.runner import probe_environment, run_probe

MAX_COST_RATIO = 3.0
MAX_MEMORY_MISS = 0.01

_BASE = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_BASE, "model_type": "llama"},
    "qwen3": {**_BASE, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "n_embd": 128, "n_layer": 12, "n_head": 4, "vocab_size": 1024, "n_positions": 512},
}
SETUP = TrainSetup(lora_rank=8, seq_len_tokens=128, micro_batch_seqs=2, precision="fp32", optimizer="adamw-fused")

BARE_LOOP = """
import json, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from peft import LoraConfig, get_peft_model
config, setup, steps = json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
config = AutoConfig.for_model(config.pop("model_type"), **config)
model = AutoModelForCausalLM.from_config(config)
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model = get_peft_model(model, LoraConfig(r=setup["rank"], target_modules="all-linear", task_type="CAUSAL_LM"))
model.enable_input_require_grads()
model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)
ids = torch.randint(0, config.vocab_size, (setup["seqs"], setup["tokens"]))
for _ in range(steps):
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""


def cpu_s() -> float:
    """CPU seconds of all children so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def probe(config: dict[str, Any], depths: tuple[int, ...], limits: Limits) -> Measurement:
    """One probe in its child."""
    outcome = run_probe(
        ProbeRequest(model_id="tiny", config=config, setup=SETUP, device="cpu", depths=depths, limits=limits)
    )
    if not isinstance(outcome, Measurement):
        raise SystemExit(f"probe failed: {outcome.message} ({outcome.log_path})")
    return outcome


def cost(repeats: int) -> dict[str, Any]:
    """Wall and CPU seconds of probe and bare loop, the same number of steps each."""
    config = FAMILIES["llama"]
    # A rule that always runs the same number of steps, so that both sides do the same work.
    limits = Limits(time_s=600, measure_s=600, window_steps=5, max_steps=10, stable_fraction=0.0)
    depths_run = 3
    steps = depths_run * limits.warmup_steps + 2 * (1 + limits.max_steps)
    rounds = []
    for _ in range(repeats):
        before, started = cpu_s(), time.monotonic()
        probe(config, (), limits)
        middle, between = cpu_s(), time.monotonic()
        setup = {"rank": SETUP.lora_rank, "seqs": SETUP.micro_batch_seqs, "tokens": SETUP.seq_len_tokens}
        subprocess.run(
            [sys.executable, "-c", BARE_LOOP, json.dumps(config), json.dumps(setup), str(steps)],
            check=True,
            env=probe_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        after, ended = cpu_s(), time.monotonic()
        rounds.append(
            {
                "probe_wall_s": between - started,
                "probe_cpu_s": middle - before,
                "bare_wall_s": ended - between,
                "bare_cpu_s": after - middle,
            }
        )
    best = {name: min(one[name] for one in rounds) for name in rounds[0]}
    return {
        "steps": steps,
        "rounds": rounds,
        **best,
        "wall_ratio": best["probe_wall_s"] / best["bare_wall_s"],
        "cpu_ratio": best["probe_cpu_s"] / best["bare_cpu_s"],
    }


def agreement(repeats: int) -> list[dict[str, Any]]:
    """Truncated against full depth, family by family."""
    rows = []
    limits = Limits(time_s=600, measure_s=15.0, max_steps=24, window_steps=6, cpu_clock="process")
    for name, config in FAMILIES.items():
        truncated, full = [], []
        for _ in range(repeats):  # interleaved: the machine's other work hits both alike
            truncated.append(probe(config, (), limits))
            full.append(probe(config, (0,), limits))
        times = [one.step_time_s for one in full]
        extended = [one.step_time_s for one in truncated]
        misses = {
            phase: truncated[0].phase_peaks_bytes[phase] / size - 1.0
            for phase, size in full[0].phase_peaks_bytes.items()
        }
        rows.append(
            {
                "family": name,
                "full_layers": full[0].layers_measured[0],
                "layers_measured": truncated[0].layers_measured,
                "peak_allocated_bytes": full[0].peak_allocated_bytes,
                "memory_miss": truncated[0].peak_allocated_bytes / full[0].peak_allocated_bytes - 1.0,
                "worst_phase_miss": max(misses.values(), key=abs),
                "step_s_full": median(times),
                "step_s_truncated": median(extended),
                "time_miss": median(extended) / median(times) - 1.0,
                "noise_full": (max(times) - min(times)) / median(times),
                "noise_truncated": (max(extended) - min(extended)) / median(extended),
            }
        )
    return rows


def main() -> int:
    """Prints both parts; 1 when an aim is missed that does not depend on the machine's other work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-cost", action="store_true", help="part 2 only")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    costs, rows = cost(args.repeats) if not args.no_cost else None, agreement(args.repeats)
    if costs is not None:
        print_cost(costs)
    print_agreement(rows)
    if args.json is not None:
        args.json.write_text(json.dumps({"cost": costs, "agreement": rows}, indent=2) + "\n")
    cheap = costs is None or costs["cpu_ratio"] <= MAX_COST_RATIO
    return 0 if cheap and all(abs(row["memory_miss"]) <= MAX_MEMORY_MISS for row in rows) else 1


def print_cost(costs: dict[str, Any]) -> None:
    """Part 1 for a person."""
    print(
        f"probe of a tiny model: {costs['probe_wall_s']:.1f} s wall, {costs['probe_cpu_s']:.1f} s CPU; "
        f"bare loop of the same {costs['steps']} steps: {costs['bare_wall_s']:.1f} s, {costs['bare_cpu_s']:.1f} s; "
        f"ratio {costs['wall_ratio']:.2f} wall, {costs['cpu_ratio']:.2f} CPU (aim {MAX_COST_RATIO:g})"
    )


def print_agreement(rows: list[dict[str, Any]]) -> None:
    """Part 2 for a person; step times in CPU seconds."""
    print("family  layers  memory miss  worst phase  step full  truncated  time miss  noise of full  of truncated")
    for row in rows:
        print(
            f"{row['family']:7} {row['full_layers']:6d} {row['memory_miss']:12.4%} {row['worst_phase_miss']:12.4%} "
            f"{row['step_s_full'] * 1e3:8.1f} ms {row['step_s_truncated'] * 1e3:7.1f} ms {row['time_miss']:9.1%} "
            f"{row['noise_full']:13.1%} {row['noise_truncated']:13.1%}"
        )


if __name__ == "__main__":
    sys.exit(main())
