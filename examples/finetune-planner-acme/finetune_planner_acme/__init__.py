"""A house's additions. The card, its price and the trainer are invented: write yours in their place.

Nothing of the planner is imported here: it reads this while it builds its own tables.
"""


def gpus() -> list[dict[str, object]]:
    """Rows by the columns of planner/data/gpus.csv; what is left out is unknown."""
    return [
        {
            "key": "acme-a1",
            "name": "Acme A1",
            "driver_name": "NVIDIA ACME A1",
            "aliases": "acme a1 24gb",
            "vendor": "NVIDIA",
            "arch": "Ada",
            "compute_capability": "8.9",
            "marketing_gib": 24,
            "bf16_tflops": 90,
            "fp16_tflops": 90,
            "fp32_tflops": 45,
            "bandwidth_gb_per_s": 600,
            "pcie": "gen4 x16",
            "flash_attention_2": "yes",
            "source": "invented for the example",
        }
    ]


def prices() -> list[dict[str, object]]:
    """Rows by the columns of planner/data/prices.csv."""
    return [
        {
            "gpu_key": "acme-a1",
            "provider": "Acme's cluster",
            "kind": "on-demand",
            "low_usd_per_h": 0.4,
            "high_usd_per_h": 0.4,
            "as_of": "2026-11-28",
            "confidence": "low",
            "source": "invented for the example",
        }
    ]


TARGET = {
    "title": "Acme's trainer",
    "objectives": {"sft": "sft"},
    "program": "acme-train",
    "module": "finetune_planner_acme.target",
}
