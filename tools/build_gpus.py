"""Writes planner/data/gpus.csv from a sourced table; rows of other GPUs stay. (prices.csv is written by hand.)

    python tools/build_gpus.py DIRECTORY_WITH_gpus.csv planner/data

Units: MiB for memory, TFLOP/s dense with fp32 accumulation, GB/s (decimal), MiB of L2, W. One device is one row: a card
with two dies that torch shows as two devices is written as one of them.
"""

import argparse
import csv
from pathlib import Path

COLUMNS = (
    *("key", "name", "driver_name", "aliases", "vendor", "arch", "compute_capability"),
    *("torch_mib", "driver_mib", "marketing_gib"),
    *("bf16_tflops", "fp16_tflops", "fp32_tflops", "tf32_tflops"),
    *("bandwidth_gb_per_s", "nvlink_gb_per_s", "pcie", "sm_count", "l2_mib", "tdp_w", "flash_attention_2"),
    *("source", "memory_source", "unsourced", "note"),
)
# What drivers also call the same device, beyond name and driver name.
ALIASES = {
    "p100": "P100",
    "t4": "NVIDIA T4",
    "a16": "NVIDIA A16",
    "a100-40gb": "NVIDIA A100-SXM4-40GB|A100 SXM 40GB|A100-SXM-40GB",
    "a100-pcie-40gb": "A100 PCIe 40GB",
    "a100-80gb": "A100 SXM 80GB|A100-SXM-80GB|A100 SXM4 80GB",
    "a100-80gb-pcie": "A100 PCIe 80GB|NVIDIA A100-PCIE-80GB",
    "v100-16gb": "V100-SXM2-16GB|V100 SXM2 16GB",
    "v100-32gb": "V100-SXM2-32GB|V100 SXM2 32GB|Tesla V100-SXM3-32GB",
    "h100-sxm": "H100 SXM5|H100 SXM5 80GB|H100 SXM 80GB",
    "h100-pcie": "H100 PCIe 80GB",
    "h100-nvl": "H100 NVL 94GB",
    "h200": "H200 SXM|H200 141GB",
    "gh200": "GH200",
    "gb200": "NVIDIA GB200",
    "b300": "B300|NVIDIA B300 SXM6 AC",
    "rtx-4060-ti-16gb": "RTX 4060 Ti 16GB",
    "rtx-5060-ti-16gb": "RTX 5060 Ti 16GB",
    "rtx-6000-ada": "RTX 6000 Ada",
    "rtx-pro-6000-blackwell": "RTX PRO 6000|RTX PRO 6000 Blackwell|NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "mi250x": "AMD Instinct MI250X|AMD Instinct MI250X / MI250|MI250",
    "rx-7900-xtx": "AMD Radeon RX 7900 XTX",
}
PLAIN_NAMES = {
    "rtx-5060-ti-16gb": ("GeForce RTX 5060 Ti 16GB", "NVIDIA GeForce RTX 5060 Ti"),  # drivers call 8 and 16 GB alike
    "a16": ("A16 (one of the board's four GPUs)", "NVIDIA A16"),
    "mi250x": ("AMD Instinct MI250X (one of its two dies)", "AMD Instinct MI250X"),
}


def convert(row: dict[str, str]) -> dict[str, str]:
    """One GPU in our columns."""
    key = row["key"]
    name, driver_name = PLAIN_NAMES.get(key, (row["name"], row["torch_name"]))
    if driver_name == "mps":  # every Apple GPU reports the same word; the chip's name tells them apart
        driver_name = name
    seen = [int(one) for one in row["memory_MiB_torch_observed"].split("|") if one]
    if len(seen) == 1 and "(Windows)" in row["memory_evidence"]:
        seen = []  # Windows shows torch the whole card; Linux keeps some back
    if key == "mi250x":  # the source has one die's memory and the whole card's rates
        for column in ("bf16_dense_tflops", "fp16_dense_tflops", "fp32_tflops", "mem_bandwidth_GBps"):
            row[column] = f"{float(row[column]) / 2:g}"
        row["sm_count"] = str(int(row["sm_count"]) // 2)
        row["l2_MB"] = f"{float(row['l2_MB']) / 2:g}"
        row["tdp_W"] = f"{float(row['tdp_W']) / 2:g}"
        row["note"] = "torch shows each of the card's two dies as a device; every figure here is one die's"
    return {
        "key": key,
        "name": name,
        "driver_name": driver_name,
        "aliases": ALIASES.get(key, ""),
        "vendor": row["vendor"],
        "arch": row["arch"],
        "compute_capability": row["compute_capability"],
        "torch_mib": str(min(seen)) if seen else "",
        "driver_mib": row["memory_MiB_nvidia_smi"],
        "marketing_gib": row["memory_GiB_marketing"],
        "bf16_tflops": row["bf16_dense_tflops"],
        "fp16_tflops": row["fp16_dense_tflops"],
        "fp32_tflops": row["fp32_tflops"],
        "tf32_tflops": row["tf32_dense_tflops"],
        "bandwidth_gb_per_s": row["mem_bandwidth_GBps"],
        "nvlink_gb_per_s": row["nvlink_GBps"],
        "pcie": row["pcie"],
        "sm_count": row["sm_count"],
        "l2_mib": row["l2_MB"],
        "tdp_w": row["tdp_W"],
        "flash_attention_2": row["flash_attention_2_supported"],
        "source": row["source"],
        "memory_source": row["memory_evidence"],
        "unsourced": row["unsourced_fields"],
        "note": row["note"],
    }


def main() -> None:
    """Read, convert, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    with (arguments.source / "gpus.csv").open(newline="") as file:
        rows = [convert(row) for row in csv.DictReader(file)]
    with (arguments.target / "gpus.csv").open(newline="") as file:
        sourced = {row["key"] for row in rows}
        rows += [row for row in csv.DictReader(file) if row["key"] not in sourced]  # written by hand, with their source
    with (arguments.target / "gpus.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{len(rows)} GPUs")


if __name__ == "__main__":
    main()
