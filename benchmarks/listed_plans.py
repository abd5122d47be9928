"""Forty plans with the sentence that explains each: the table of docs/choices.md.

    python -m benchmarks.listed_plans            # print
    python -m benchmarks.listed_plans --write    # write it into docs/choices.md

Formula level, 2,048 tokens (or what the model takes), no request but the one named. `test_listed_plans.py`
holds the page to it.
"""

import argparse
from typing import Any

from benchmarks.shared import DOCS, marked
from planner.hardware.gpus import find_gpu
from planner.memory.workload import Data
from planner.models.resolve import resolve_model
from planner.planning.answer import plan_workload
from planner.planning.plan import Plan
from planner.planning.plan_request import PlanRequest

PAGE = DOCS / "choices.md"
FULL, QLORA, INT8, LORA = ({"fixed": fixed} for fixed in (
    {"method": ("full",)}, {"method": ("qlora",)}, {"method": ("qlora",), "quantization": ("int8",)},
    {"method": ("lora",)},
))  # fmt: skip
PLANS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("HuggingFaceTB/SmolLM2-135M", "rtx-3050-4gb", "", {}),
    ("HuggingFaceTB/SmolLM2-135M", "rtx-4090", "", {}),
    ("Qwen/Qwen2.5-0.5B", "t4", "", {}),
    ("Qwen/Qwen2.5-0.5B", "rtx-4060", "", {}),
    ("Qwen/Qwen2.5-0.5B", "rtx-4090", "", {}),
    ("Qwen/Qwen2.5-0.5B", "rtx-4090", "--dataset-tokens 40000", {"data": Data(epoch_tokens=40_000)}),
    ("meta-llama/Llama-3.2-1B", "rtx-3050-4gb", "", {}),
    ("meta-llama/Llama-3.2-1B", "rtx-4060-ti-16gb", "", {}),
    ("meta-llama/Llama-3.2-1B", "rtx-5090", "", {}),
    ("meta-llama/Llama-3.2-1B", "h200", "", {}),
    ("meta-llama/Llama-3.2-1B", "apple-m2-ultra", "", {}),
    ("Qwen/Qwen2.5-1.5B", "rtx-3060", "", {}),
    ("Qwen/Qwen2.5-1.5B", "rtx-4070-super", "--method full", FULL),
    ("meta-llama/Llama-3.2-3B", "rtx-3070", "", {}),
    ("meta-llama/Llama-3.2-3B", "rtx-4070-super", "", {}),
    ("meta-llama/Llama-3.2-3B", "l4", "", {}),
    ("Qwen/Qwen3-4B", "t4", "", {}),
    ("Qwen/Qwen3-4B", "rtx-5070", "", {}),
    ("Qwen/Qwen2.5-7B", "rtx-3060", "", {}),
    ("Qwen/Qwen2.5-7B", "rtx-4090", "", {}),
    ("Qwen/Qwen2.5-7B", "gb10", "", {}),
    ("meta-llama/Llama-3.1-8B", "rtx-4070-ti-super", "", {}),
    ("meta-llama/Llama-3.1-8B", "rtx-3090", "", {}),
    ("meta-llama/Llama-3.1-8B", "rtx-4090", "", {}),
    ("meta-llama/Llama-3.1-8B", "rtx-4090", "--prefer speed", {"prefer": "speed"}),
    ("meta-llama/Llama-3.1-8B", "rtx-4090", "--method qlora", QLORA),
    ("meta-llama/Llama-3.1-8B", "rtx-4090", "--method qlora --quantization int8", INT8),
    ("meta-llama/Llama-3.1-8B", "h20", "", {}),
    ("meta-llama/Llama-3.1-8B", "h100-sxm", "--method full", FULL),
    ("meta-llama/Llama-3.1-8B", "h200", "", {}),
    ("meta-llama/Llama-3.1-8B", "h200", "--dataset-tokens 20000000000", {"data": Data(epoch_tokens=20_000_000_000)}),
    ("meta-llama/Llama-3.1-8B", "mi300x", "", {}),
    ("google/gemma-3-12b-it", "rtx-4090", "", {}),
    ("google/gemma-3-12b-it", "a800-80gb", "", {}),
    ("Qwen/Qwen2.5-14B", "rtx-4090", "", {}),
    ("Qwen/Qwen2.5-14B", "l40s", "", {}),
    ("Qwen/Qwen2.5-32B", "rtx-4090", "", {}),
    ("Qwen/Qwen2.5-32B", "h100-sxm", "", {}),
    ("meta-llama/Llama-3.3-70B-Instruct", "h200", "", {}),
    ("meta-llama/Llama-3.3-70B-Instruct", "gb300", "", {}),
)


def row(model: str, gpu: str, words: str, options: dict[str, Any]) -> str:
    plan = plan_workload(PlanRequest(**options).workload(resolve_model(model), find_gpu(gpu)))
    named = f"{model.rpartition('/')[2]} / {gpu}" + (f" `{words}`" if words else "")
    if not isinstance(plan, Plan):
        return f"| {named} | nothing fits | | {plan.missing_bytes / 2**30:.2f} GiB are missing |"
    setup, formula = plan.chosen.setup, plan.chosen.formula
    chosen = f"{setup.method} {setup.quantization}".removesuffix(" none") + f", {setup.micro_batch_seqs} at once"
    chosen += {0: "", 1: ", checkpointing"}.get(setup.checkpointing, f", checkpointing every {setup.checkpointing}")
    figures = f"{plan.chosen.tokens_per_s:,.0f} tokens/s, {formula.peak_device_bytes / 2**30:.1f} GiB"
    answer = next(node for node in plan.tree if node.question == "Which class?")
    return f"| {named} | {chosen} | {figures} | {answer.reason} |"


def table() -> str:
    head = "| model / card, option | taken | speed, memory | because |\n|---|---|---|---|\n"
    return head + "".join(f"{row(*arguments)}\n" for arguments in PLANS)


def listed(text: str | None = None) -> str:
    """The table of the page; one given is written there."""
    return marked(PAGE, "listed_plans", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    print(listed(table()) if parser.parse_args().write else table(), end="")


if __name__ == "__main__":
    main()
