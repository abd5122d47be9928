"""The formula's host time (`planner.speed.roofline.rented`) against the calls of dry runs, priced by
`planner.speed.host`.

    python -m benchmarks.host_form [--points 140]        # needs the torch extra; a minute or two

Setups drawn at random over 14 models: full, LoRA and QLoRA, eager and Liger's kernels, with and without checkpointing,
three losses, three attentions. Prints the errors of the host seconds of a micro-batch; the constants were fitted to the
default draw.
"""

import argparse
import random
from collections.abc import Iterator
from statistics import median, quantiles
from typing import Any

from planner.core.errors import PlannerError
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.setup import TrainSetup
from planner.speed.host import issued_s
from planner.speed.operators import ISSUERS, Program
from planner.speed.prices import price
from planner.speed.rates import card_rates
from planner.speed.roofline import CURRENT, throughput_profile
from probes.dryrun import DryRunReport, dry_run_report

GPU = find_gpu("h200")
MODELS = (
    "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-8B", "Qwen/Qwen2.5-0.5B", "mistralai/Mistral-7B-v0.1", "Qwen/Qwen3-0.6B",
    "google/gemma-2-2b", "microsoft/Phi-3-mini-4k-instruct", "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-8B",
    "google/gemma-3-1b-it", "allenai/OLMoE-1B-7B-0924", "openai-community/gpt2", "EleutherAI/pythia-1b",
    "HuggingFaceTB/SmolLM3-3B",
)  # fmt: skip
TOKENS = 512


def drawn(seed: int = 3) -> Iterator[tuple[str, TrainSetup]]:
    """Models and setups without end."""
    rng = random.Random(seed)
    while True:
        name, method = rng.choice(MODELS), rng.choice(["lora", "lora", "qlora", "full"])
        fields: dict[str, Any] = {
            "method": method,
            "kernels": rng.choice(["eager", "eager", "liger"]),
            "checkpointing": rng.choice([0, 1]),
            "loss": rng.choice(["chunked", "full", "liger"]),
            "attention": rng.choice(["sdpa", "sdpa", "eager", "flash-attention-2"]),
            "seq_len_tokens": TOKENS,
            "micro_batch_seqs": 1,
            "lora_rank": 0 if method == "full" else 16,
        }
        if method == "full":
            fields["precision"] = rng.choice(["bf16-mixed", "bf16-pure"])
        if method == "qlora":
            fields["quantization"] = rng.choice(["nf4", "nf4-double"])
        if method != "full":
            fields["lora_targets"] = rng.choice(["all-linear", "all-linear", ("q_proj", "v_proj")])
        try:
            yield name, TrainSetup(**fields)
        except PlannerError:
            continue


def called_s(program: Program, setup: TrainSetup) -> float:
    """Host seconds of the calls of a micro-batch."""
    rates = card_rates(GPU, setup.attention)
    prices = [price(one, rates) for one in program.operators]
    checkpointed = any(call % len(ISSUERS) == 4 for one in program.segments for call in one.calls)
    known: dict[int, float] = {}
    total = 0.0
    for place in program.micro_batch:
        for call in program.segments[place].calls:
            seconds = known.get(call)
            if seconds is None:
                number, issuer = divmod(call, len(ISSUERS))
                seconds = known[call] = issued_s(
                    program.operators[number], issuer, bool(prices[number].kernels), checkpointed=checkpointed
                )
            total += seconds
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=140)
    wanted = parser.parse_args().points
    errors: list[tuple[float, str]] = []
    for name, setup in drawn():
        if len(errors) == wanted:
            break
        model = catalogue.load(name)
        report = dry_run_report(model, GPU, setup) if model is not None else None
        if model is None or not isinstance(report, DryRunReport) or report.program is None:
            continue
        profile = throughput_profile(model, GPU, setup, conditions=CURRENT)
        mine = profile.family.host_s
        what = f"{name} {setup.method} {setup.kernels} {setup.attention} {setup.loss} {setup.checkpointing}"
        errors.append((mine / called_s(report.program, setup) - 1, what))
    sizes = sorted(abs(error) for error, _ in errors)
    print(
        f"{len(errors)} points: median {median(sizes):.1%}, 90th {quantiles(sizes, n=10)[8]:.1%}, worst {sizes[-1]:.1%}"
    )
    for error, what in sorted(errors, key=lambda one: -abs(one[0]))[:10]:
        print(f"  {error:+.1%}  {what}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
