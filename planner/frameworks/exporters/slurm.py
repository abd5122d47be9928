"""A Slurm batch script beside a target's files: one launcher per node by srun, which starts a process for every GPU."""

import shlex

from planner.frameworks.exporters import deepspeed, prepare
from planner.frameworks.exporters.text import comments, header
from planner.frameworks.exporters.types import ExportRequest, LaunchFile

NAME = "slurm.sbatch"
CPUS_PER_GPU = 8
"""Cores asked for beside each GPU: data loading and the process itself; a request, for people to change."""


def is_job(file: LaunchFile) -> bool:
    """Whether a file is such a script."""
    return file.path.endswith(f"/{NAME}")


def files(request: ExportRequest, target: str, command: str, validated_with: dict[str, str]) -> list[LaunchFile]:
    """What stands beside the file of a tool that takes DeepSpeed's JSON: that, and a job of several processes."""
    configs = [deepspeed.config_file(request, target)] if request.setup.parallel in deepspeed.STAGES else []
    job = request.setup.num_processes > 1
    return [*configs, job_file(request, target, command, validated_with)] if job else configs


def job_file(
    request: ExportRequest, target: str, command: str, validated_with: dict[str, str], server: str = ""
) -> LaunchFile:
    """`sbatch FILE` from the directory that holds `launch/`.

    Args:
        command: starts the processes of one node; may use $NODE_RANK, $MASTER_ADDR and $MASTER_PORT.
        server: starts what runs beside them.
    """
    path = f"{target}/{NAME}"
    head = header(
        request,
        f"Slurm job for the {target} target",
        f"sbatch launch/{path}",
        validated_with,
        notes=("your cluster may want more: add #SBATCH lines for partition, account and time.",),
    )
    lines = [
        f"#SBATCH --job-name=finetune-{target}",
        f"#SBATCH --nodes={request.num_nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={request.job_gpus_per_node}",
        f"#SBATCH --cpus-per-task={CPUS_PER_GPU * request.gpus_per_node}",
        "#SBATCH --output=%x-%j.log",
        "",
        "set -euo pipefail",
        f'if [ -d .venv-{target} ]; then export PATH="$PWD/.venv-{target}/bin:$PATH"; fi  # of run.sh install',
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
        "MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))  # jobs that share a node do not meet",
        "export MASTER_ADDR MASTER_PORT",
        'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # srun no longer takes it over from sbatch',
        *([made] if (made := prepare.command(request, target)) else []),
        *([f"{server} &", "trap 'kill $! || true' EXIT"] if server else []),
        f"srun --kill-on-bad-exit=1 bash -c {shlex.quote('export NODE_RANK=$SLURM_NODEID; ' + command)}",
    ]
    return LaunchFile(path=path, text="#!/bin/bash\n" + comments(head) + "\n" + "\n".join(lines) + "\n")
