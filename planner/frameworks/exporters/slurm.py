"""A Slurm batch script for a target: `launch/run.sh TARGET` on every node by srun, its data prepared once."""

from planner.frameworks.exporters.text import comments, header
from planner.frameworks.exporters.types import ExportRequest, Launch, LaunchFile

SCHEDULER = "slurm"
NAME = "slurm.sbatch"
CPUS_PER_GPU = 7
"""Cores asked for beside each GPU: data loading and the process itself; a request, for people to change. LUMI-G gives a
job 56 of its nodes' 64."""


def job_file(launch: Launch, request: ExportRequest) -> LaunchFile:
    """`sbatch FILE` from the directory that holds `launch/`.

    A job that is preempted, or whose node fails, is queued again (--requeue) and goes on from its last checkpoint, as
    run.sh does; its log is continued.
    """
    path, environment = f"{launch.target}/{NAME}", f".venv-{launch.target}"
    prepare = [
        f'if [ -d {environment} ]; then export PATH="$PWD/{environment}/bin:$PATH"; fi  # of run.sh install',
        launch.prepare,
    ]
    head = header(
        request,
        f"Slurm job for the {launch.target} target",
        f"sbatch launch/{path}",
        dict(launch.validated_with),
        notes=(
            "your cluster may want more: add #SBATCH lines for partition, account, time and memory.",
            f"for nodes without internet: bash launch/run.sh fetch {launch.target} on the login node, with HF_HOME "
            "where all nodes see it; then HF_HUB_OFFLINE=1 in front of sbatch.",
        ),
    )
    lines = [
        f"#SBATCH --job-name=finetune-{launch.target}",
        f"#SBATCH --nodes={request.num_nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={request.job_gpus_per_node}",
        f"#SBATCH --cpus-per-task={CPUS_PER_GPU * request.gpus_per_node}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=%x-%j.log",
        "",
        "set -euo pipefail",
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
        "MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))  # jobs that share a node do not meet",
        "export MASTER_ADDR MASTER_PORT",
        'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # srun no longer takes it over from sbatch',
        *(prepare if launch.prepare else []),
        "export PREPARED=1  # for run.sh, on every node",
        f"srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID bash launch/run.sh {launch.target}'",
    ]
    return LaunchFile(path=path, text="#!/bin/bash\n" + comments(head) + "\n" + "\n".join(lines) + "\n")
