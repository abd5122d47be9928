"""The dry run's model of ZeRO-1 and ZeRO-2 against DeepSpeed itself, on two CPU ranks of a tiny Llama.

    python benchmarks/zero_dry_run_check.py --deepspeed .cache/validators/deepspeed/lib/python3.11/site-packages

Prints, per setup, the highest allocated bytes of forward and backward and those of the step: DeepSpeed's, followed
with the dry run's accounting on real tensors, and the dry run's. Not a test: the launch files' validator, which brings
DeepSpeed, need not be set up.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
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
}


def rank_peaks(fields: dict[str, Any], rank: int, store: str) -> dict[str, int]:
    """Peaks by phase of one real rank: DeepSpeed's engine around the model, gloo, CPU tensors."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777"}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    import deepspeed

    from planner.parallel.zero import zero_bucket_elements
    from planner.setup import TrainSetup
    from probes.dryrun.kernels import KernelLog, kernels_of
    from probes.dryrun.metaops import fused_dropout
    from probes.dryrun.trace import load
    from probes.dryrun.tracker import Tracker
    from probes.stack import build_from_config, inner_model, load_config, make_batch, make_optimizer
    from probes.stack.autocast import emulation_installed
    from tests.probes.dryrun_small import small_config
    from tests.probes.spread_rank import NO_FLASH, peaks

    setup = TrainSetup(**fields)
    config = load_config(small_config("llama"))
    deepspeed.init_distributed(dist_backend="gloo")
    tracker = Tracker("cpu")
    with emulation_installed(), kernels_of(KernelLog(capability=NO_FLASH), config), fused_dropout("cpu"):
        model = build_from_config(config, setup, device="cpu", attention="eager")
        bucket = zero_bucket_elements(sum(one.numel() for one in model.parameters() if one.requires_grad))
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=make_optimizer(setup.optimizer, model.parameters(), device_type="cpu"),
            config={
                "train_micro_batch_size_per_gpu": setup.micro_batch_seqs,
                "gradient_accumulation_steps": setup.accumulation_steps,
                "gradient_clipping": 1.0,
                "bf16": {"enabled": True},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "zero_optimization": {
                    "stage": int(setup.parallel[-1]),
                    "overlap_comm": False,
                    "contiguous_gradients": True,
                    "reduce_bucket_size": bucket,
                    "allgather_bucket_size": bucket,
                },
            },
        )
        load(tracker, engine.module)
        for masters in engine.optimizer.single_partition_of_fp32_groups:
            tracker.track(masters.data, "load")
        with tracker:
            text = inner_model(model).config
            batches = [make_batch(setup, text, device="cpu") for _ in range(setup.accumulation_steps)]
            for _ in range(2):
                for batch in batches:
                    tracker.mark("forward", None)
                    loss = engine(**batch.model_inputs, labels=batch.labels, use_cache=False)["loss"]
                    tracker.mark("backward", None)
                    engine.backward(loss)
                    del loss
                    tracker.mark("step", None)
                    engine.step()
        tracker.close()
    return peaks(tracker.events)


def dry_peaks(fields: dict[str, Any]) -> dict[str, int]:
    """Peaks by phase of the dry run's rank."""
    from planner.setup import TrainSetup
    from probes.dryrun.spread import fake_job
    from probes.dryrun.trace import trace_run
    from probes.stack import load_config
    from tests.probes.dryrun_small import small_config
    from tests.probes.spread_rank import NO_FLASH, peaks

    setup = TrainSetup(**fields)
    config = load_config(small_config("llama"))
    with fake_job(setup) as world:
        trace = trace_run(config, setup, capability=NO_FLASH, workspaces=False, num_layers=3, world=world)
        return peaks(world.finish(trace, None).events)


def compute_and_step(found: dict[str, int]) -> tuple[int, int]:
    """(highest of everything before the step, highest of the step) in bytes."""
    phases = {name: size for name, size in found.items() if name.partition("/")[0] not in ("load", "step")}
    return max(phases.values()), found["step"]


def main() -> int:
    """Spawns the ranks of every case, or is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", type=Path, required=True, help="site-packages that hold DeepSpeed")
    parser.add_argument("--case", default="", help="only this one")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    sys.path.append(str(args.deepspeed))  # behind our own: PyTorch must be this environment's
    if args.rank is not None:
        print("PEAKS", json.dumps(rank_peaks({**TINY, **CASES[args.case]}, args.rank, args.store)))
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
        dry = dry_peaks({**TINY, **CASES[name]})
        print(f"{name}: DeepSpeed {compute_and_step(real)}, dry run {compute_and_step(dry)}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
