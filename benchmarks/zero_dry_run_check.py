"""The dry run's model of ZeRO-1, ZeRO-2 and ZeRO-3 against DeepSpeed itself, on two CPU ranks of a tiny Llama.

    python benchmarks/zero_dry_run_check.py --deepspeed .cache/validators/deepspeed/lib/python3.11/site-packages

Prints, per setup and phase, the highest allocated bytes: DeepSpeed's, followed with the dry run's accounting on real
tensors, and the dry run's. ZeRO-3's thresholds are lowered where its gathers are to show on so small a model. On a CPU
the host's memory is the device's, so that what is offloaded is told apart by hand and copies from one to the other do
not exist. Not a test: the launch files' validator, which brings DeepSpeed, need not be set up.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TINY: dict[str, Any] = {
    "num_gpus": 2,
    "seq_len_tokens": 48,
    "micro_batch_seqs": 2,
    "attention": "eager",
    "optimizer": "sgd",
}
FULL: dict[str, Any] = {"method": "full", "lora_rank": 0}
NUM_LAYERS = 5
NEAR: dict[str, int] = {"prefetch": 9_000, "reuse": 30_000, "live": 45_000, "persistent": 500, "sub_group": 40_000}
"""ZeRO-3's elements: gathered ahead, kept for reuse, live, staying gathered, stepped at once."""
LEAST: dict[str, int] = {**NEAR, "prefetch": 0, "reuse": 0}
WIDE: dict[str, int] = {**NEAR, "prefetch": 20_000, "reuse": 200_000, "live": 1_000_000}
DEEPSPEEDS: dict[str, int] = {
    "prefetch": 50_000_000,
    "reuse": 1_000_000_000,
    "live": 1_000_000_000,
    "persistent": 100_000,
    "sub_group": 1_000_000_000,
}
WIDER = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 2048,
    "tie_word_embeddings": False,
}
LARGE: dict[str, Any] = {
    **FULL,
    "parallel": "zero3",
    "checkpointing": 0,
    "optimizer": "adamw-fused",
    "seq_len_tokens": 8,
    "micro_batch_seqs": 1,
    "config": WIDER,
}
CASES: dict[str, dict[str, Any]] = {
    "ZeRO-2, full": {**FULL, "parallel": "zero2"},
    "ZeRO-1, full, 2 micro-batches": {
        **FULL,
        "parallel": "zero1",
        "accumulation_steps": 2,
        "optimizer": "adamw-fused",
    },
    "ZeRO-2, full, 2 micro-batches": {**FULL, "parallel": "zero2", "accumulation_steps": 2, "checkpointing": 0},
    "ZeRO-2, LoRA": {"parallel": "zero2", "lora_rank": 4},
    "ZeRO-3, full": {**FULL, "parallel": "zero3", "limits": NEAR},
    "ZeRO-3, full, DeepSpeed's limits": {**FULL, "parallel": "zero3", "optimizer": "adamw"},
    "ZeRO-3, full, nothing ahead": {**FULL, "parallel": "zero3", "limits": LEAST},
    "ZeRO-3, full, no checkpointing": {**FULL, "parallel": "zero3", "checkpointing": 0, "limits": NEAR},
    "ZeRO-3, full, no checkpointing, 2 micro-batches": {
        **FULL,
        "parallel": "zero3",
        "checkpointing": 0,
        "accumulation_steps": 2,
        "optimizer": "adamw-fused",
        "limits": WIDE,
    },
    "ZeRO-3, LoRA": {"parallel": "zero3", "lora_rank": 4, "limits": NEAR},
    "ZeRO-3, LoRA, no checkpointing": {"parallel": "zero3", "lora_rank": 4, "checkpointing": 0, "limits": NEAR},
    "ZeRO-3, LoRA of attention, wide": {
        "parallel": "zero3",
        "lora_rank": 4,
        "lora_targets": "attention",
        "limits": WIDE,
    },
    "ZeRO-3, full, small bucket": {**FULL, "parallel": "zero3", "limits": {**NEAR, "bucket": 25_000}},
    "ZeRO-3, full, tied head": {
        **FULL,
        "parallel": "zero3",
        "limits": NEAR,
        "config": {"tie_word_embeddings": True},
    },
    "ZeRO-3, full, 21 M parameters": LARGE,
    "ZeRO-3, full, 21 M parameters, small bucket": {
        **LARGE,
        "limits": {**DEEPSPEEDS, "bucket": 4_000_000},
    },
    "ZeRO-3, QLoRA": {
        "parallel": "zero3",
        "method": "qlora",
        "quantization": "nf4-double",
        "lora_rank": 4,
        "limits": NEAR,
    },
    "ZeRO-3, full, fused head loss": {**FULL, "parallel": "zero3", "loss": "chunked", "limits": NEAR},
    "ZeRO-3, mixture of experts": {
        **FULL,
        "parallel": "zero3",
        "checkpointing": 0,
        "limits": NEAR,
        "family": "mixtral",
    },
    "ZeRO-2, full, offloaded": {**FULL, "parallel": "zero2", "offload": "optimizer", "optimizer": "adamw"},
    "ZeRO-1, full, offloaded": {**FULL, "parallel": "zero1", "offload": "optimizer", "optimizer": "adamw"},
    "ZeRO-3, full, optimizer offloaded": {
        **FULL,
        "parallel": "zero3",
        "offload": "optimizer",
        "optimizer": "adamw",
        "limits": NEAR,
    },
    "ZeRO-3, full, parameters offloaded": {
        **FULL,
        "parallel": "zero3",
        "offload": "parameters",
        "optimizer": "adamw",
        "limits": NEAR,
    },
}
PHASES = ("forward", "loss", "backward", "step")


def of_case(name: str) -> tuple[Any, Any, dict[str, int], str]:
    """(setup, transformers' configuration, ZeRO-3's limits where they are not DeepSpeed's own, family) of a case."""
    from planner.setup import TrainSetup
    from probes.stack import load_config
    from tests.probes.dryrun_small import small_config

    fields = {**TINY, **CASES[name]}
    limits = fields.pop("limits", {})
    family = fields.pop("family", "llama")
    config = load_config(small_config(family, **{"num_hidden_layers": NUM_LAYERS, **fields.pop("config", {})}))
    return TrainSetup(**fields), config, limits, family


def rank_peaks(case: str, rank: int, store: str) -> dict[str, int]:
    """Peaks by phase of one real rank: DeepSpeed's engine around the model, gloo, CPU tensors."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777"}
    import torch
    import torch.distributed as dist

    from tests.probes.settled_group import register

    torch.set_num_threads(1)
    dist.init_process_group(register(), init_method=f"file://{store}", rank=rank, world_size=2)
    import deepspeed

    from probes.dryrun.kernels import KernelLog, kernels_of
    from probes.dryrun.metaops import fused_dropout
    from probes.dryrun.trace import load
    from probes.dryrun.tracker import Tracker
    from probes.stack import build_from_config, inner_model, make_batch, make_optimizer
    from probes.stack.autocast import emulation_installed
    from probes.stack.step import make_trainer
    from probes.stack.zero import ZeroTrainer, zero_config, zero_step
    from tests.probes.dryrun_small import peaks
    from tests.probes.spread_rank import NO_FLASH

    setup, config, limits, _ = of_case(case)
    deepspeed.init_distributed(dist_backend="gloo")

    class Followed(Tracker):
        """Without what lies in the host's memory where there are two memories."""

        aside = False
        host: frozenset[int] = frozenset()

        def track(self, tensor: Any, op: str) -> int | None:
            if self.aside or tensor.untyped_storage()._cdata in self.host:
                return None
            return super().track(tensor, op)

    tracker = Followed("cpu")
    with emulation_installed(), kernels_of(KernelLog(capability=NO_FLASH), config), fused_dropout("cpu"):
        model = build_from_config(config, setup, device="cpu", attention="eager")
        trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
        told = zero_config(setup, trained) | {"zero_force_ds_cpu_optimizer": False}
        told["zero_optimization"] |= {key: limits[name] for name, key in KEYS.items() if name in limits}
        optimizer = make_optimizer(setup.optimizer, model.parameters(), device_type="cpu")
        plain = make_trainer(model, setup, optimizer)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=told)
        job = ZeroTrainer(engine=engine, trainer=replace(plain, forward=engine.__call__, scaler=None))

        def mark(phase: str, layer: int | None) -> None:
            tracker.mark(phase, layer)
            tracker.aside = setup.offload != "none" and phase == "step"

        tracker.host = frozenset(
            one.untyped_storage()._cdata for one in on_host(engine.optimizer, engine.module, setup)
        )
        load(tracker, engine.module)
        for tensor in states(engine.optimizer, engine.module, setup):
            tracker.track(tensor, "load")
        with tracker:
            text = inner_model(model).config
            batches = [make_batch(setup, text, device="cpu") for _ in range(setup.accumulation_steps)]
            for _ in range(2):
                zero_step(job, batches, mark)
        tracker.close()
    return peaks(tracker.events)


KEYS = {
    "prefetch": "stage3_prefetch_bucket_size",
    "reuse": "stage3_max_reuse_distance",
    "live": "stage3_max_live_parameters",
    "persistent": "stage3_param_persistence_threshold",
    "sub_group": "sub_group_size",
    "bucket": "reduce_bucket_size",
}


def states(optimizer: Any, module: Any, setup: Any) -> list[Any]:
    """What DeepSpeed's optimizer keeps on the device from the beginning."""
    if setup.parallel != "zero3":
        if setup.offload == "none":
            return [one.data for one in optimizer.single_partition_of_fp32_groups]
        return [optimizer.temp_grad_buffer_for_gpu_offload]
    found = [bucket.buffer for bucket in optimizer.ipg_buckets.values()]
    if setup.offload != "parameters":
        found += [one.ds_tensor.data for one in module.parameters()]
    if setup.offload == "none":
        found += [one.data for one in optimizer.fp32_partitioned_groups_flat]
        found.append(optimizer.grad_partitions_flat_buffer)
    return found


def on_host(optimizer: Any, module: Any, setup: Any) -> list[Any]:
    """What it keeps in the host's memory."""
    if setup.offload == "none":
        return []
    if setup.parallel != "zero3":
        masters = optimizer.single_partition_of_fp32_groups
        found = [optimizer.temp_grad_buffer_for_cpu_offload, *optimizer.param_buffer_of_bit16_for_cpu_offload_groups]
    else:
        masters = optimizer.fp32_partitioned_groups_flat
        found = [optimizer.grad_partitions_flat_buffer]
    if setup.offload == "parameters":
        found += [one.ds_tensor.data for one in module.parameters()]
    return [*found, *(one.data for one in masters), *(one.grad for one in masters)]


def dry_peaks(case: str) -> dict[str, int]:
    """Peaks by phase of the dry run's rank."""
    from unittest import mock

    from probes.dryrun import zero3_engine, zero3_modules
    from probes.dryrun.spread import fake_job
    from probes.dryrun.trace import trace_run
    from probes.dryrun.zero_gather import Limits
    from tests.probes.dryrun_small import peaks
    from tests.probes.spread_rank import NO_FLASH

    setup, config, limits, _ = of_case(case)
    with ExitStack() as stack:
        if limits:
            near = Limits(prefetch=limits["prefetch"], reuse=limits["reuse"], live=limits["live"])
            patched = {"LIMITS": near, "ZERO3_SUB_GROUP_ELEMENTS": limits["sub_group"]}
            stack.enter_context(mock.patch.multiple(zero3_engine, **patched))
            stack.enter_context(mock.patch.object(zero3_modules, "ZERO3_PERSISTENT_ELEMENTS", limits["persistent"]))
        if "bucket" in limits:
            bucket = mock.patch.object(zero3_engine, "zero_bucket_elements", return_value=limits["bucket"])
            stack.enter_context(bucket)
        world = stack.enter_context(fake_job(setup))
        trace = trace_run(config, setup, capability=NO_FLASH, workspaces=False, num_layers=NUM_LAYERS, world=world)
        return peaks(world.finish(trace, None).events)


def by_phase(found: dict[str, int]) -> dict[str, int]:
    """The highest of every phase's segments."""
    highest = dict.fromkeys(PHASES, 0)
    for name, size in found.items():
        phase = name.partition("/")[0]
        if phase in highest:
            highest[phase] = max(highest[phase], size)
    return highest


def main() -> int:
    """Spawns the ranks of every case, or is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", type=Path, required=True, help="site-packages that hold DeepSpeed")
    parser.add_argument("--case", default="", help="only this one")
    parser.add_argument("--segments", action="store_true", help="the peaks of every layer's segments too")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    sys.path.append(str(args.deepspeed))  # behind our own: PyTorch must be this environment's
    if args.rank is not None:
        print("PEAKS", json.dumps(rank_peaks(args.case, args.rank, args.store)))
        return 0
    for name in [args.case] if args.case else CASES:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--deepspeed", str(args.deepspeed), "--case", name]
            command += ["--store", f"{folder}/store", "--rank"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            ranks = [
                subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
                for rank in (0, 1)
            ]
            output, _ = [rank.communicate(timeout=900)[0] for rank in ranks]
        real = json.loads(next(line for line in output.splitlines() if line.startswith("PEAKS"))[6:])
        all_dry = dry_peaks(name)
        if args.segments:
            for segment, size in real.items():
                print(f"{segment:12} {size:12,} {all_dry.get(segment, 0):12,}")
        real, dry = by_phase(real), by_phase(all_dry)
        cells = " | ".join(f"{real[phase]:,} | {dry[phase]:,}" for phase in PHASES)
        print(f"| {name} | {cells} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
