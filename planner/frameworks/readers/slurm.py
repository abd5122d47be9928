"""What Slurm sets for a job, by the `#SBATCH` lines of its script."""

import re

_LINE = re.compile(r"^#SBATCH\s+(-\w|--[\w-]+)[=\s]*(\S+)", re.MULTILINE)
_LONG = {"-N": "nodes", "-n": "ntasks", "-c": "cpus-per-task", "-G": "gpus"}
_SETS = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    "gpus": ("SLURM_GPUS",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "gres": ("SLURM_GPUS_ON_NODE",),
}
"""Option of sbatch -> the variables that say it. Source: sbatch(1), OUTPUT ENVIRONMENT VARIABLES."""


def variables(text: str) -> dict[str, str]:
    """Variable -> number, of the options that the script gives; nothing where it is no job of Slurm's."""
    counts: dict[str, str] = {}
    for flag, value in _LINE.findall(text):
        name = _LONG.get(flag, flag.removeprefix("--"))
        if name in _SETS and (found := re.search(r"(?:^|:)(\d+)$", value)):  # gres: gpu:a100:8
            counts[name] = found[1]
    if "nodes" in counts and "ntasks-per-node" in counts:
        counts.setdefault("ntasks", str(int(counts["nodes"]) * int(counts["ntasks-per-node"])))
    return {variable: count for name, count in counts.items() for variable in _SETS[name]}
