"""How many processes a launch starts by its launcher's own words, on how many nodes, with which configuration."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

LAUNCHERS = {
    "accelerate": ("--num_processes", "--num-processes"),
    "torchrun": ("--nproc_per_node", "--nproc-per-node"),
    "deepspeed": ("--num_gpus",),
}
"""Launcher -> its flags for the number of processes, of a node but for Accelerate's."""
NODES = ("--nnodes", "--num_nodes", "--num_machines")
OF_MACHINE = ("gpu", "auto")
"""As many processes as the machine has GPUs."""
CONFIGS = ("--config_file", "--config-file", "--accelerate_config")
"""What names Accelerate's configuration, to itself and to `trl`."""
OF_TRL, OF_TRL_GPUS = ("multi_gpu", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"), 8
"""Configurations that TRL ships by name, and their processes. Source: TRL 1.16 accelerate_configs/."""
FLAGS_WITHOUT_VALUE = {"-m", "--module", "-q", "-u"}


class LauncherArguments(NamedTuple):
    """What the words say: processes of the job (None: nothing), nodes, Accelerate's file, the words behind; `open`: the
    word for the processes or nodes that only the machine or the shell knows; `accelerate`: what Accelerate's own words
    say of the layout, as its file would."""

    num_gpus: int | None
    num_nodes: int = 1
    config: str = ""
    rest: Sequence[str] = ()
    open: str = ""
    accelerate: Mapping[str, Any] = MappingProxyType({})


def parse_launcher(launcher: str, words: Sequence[str], shown: int | None) -> LauncherArguments:
    """Of a launcher's words, up to the program; `shown`: GPUs that the environment shows it."""
    num_gpus, num_nodes, config, open_ = shown, 1, "", ""
    flags: dict[str, str] = {}
    index = 0
    while index < len(words) and words[index].startswith(("-", "$(")):
        flag, equals, value = words[index].partition("=")
        following = words[index + 1] if index + 1 < len(words) else ""
        takes = not equals and flag not in FLAGS_WITHOUT_VALUE and not following.endswith(".py")
        takes = takes and not following.startswith("-")
        value = value if equals else following if takes else ""
        if flag in LAUNCHERS[launcher] and value.isdigit():
            num_gpus = int(value) or shown
        elif flag in (*LAUNCHERS[launcher], *NODES) and value and not re.fullmatch(r"[\d:]+", value):
            open_ = "" if shown and value in OF_MACHINE else f"{flag} {value}"
        if flag in NODES and value.isdigit():
            num_nodes = int(value) or 1
        if flag == "--include" and value.count(":") == 1:
            num_gpus = value.count(",") + 1
        if flag in CONFIGS:
            config = value
        if launcher == "accelerate" and flag.startswith("--"):
            flags[flag[2:].replace("-", "_")] = value or "true"
        if flag in ("-m", "--module"):
            break
        index += 2 if takes else 1
    layout = _as_file(flags)
    if not config:
        layout = {**layout, "num_processes": num_gpus or 0} if "distributed_type" in layout else {}
    gpus = num_gpus * (1 if launcher == "accelerate" else num_nodes) if num_gpus else None
    return LauncherArguments(gpus, num_nodes if num_gpus else 1, config, words[index:], open_, layout)


OF_DEEPSPEED = {"zero_stage", "offload_optimizer_device", "offload_param_device", "gradient_accumulation_steps"}


def _as_file(words: Mapping[str, str]) -> dict[str, Any]:
    """What `accelerate launch --use_deepspeed --zero_stage 3` says, as a file of Accelerate's would.

    Source: accelerate 1.15 `commands/launch.py`.
    """
    file, processes = words.get("deepspeed_config_file"), words.get("num_processes", "")
    deepspeed = {key: words[key] for key in OF_DEEPSPEED & words.keys()}
    if not deepspeed.get("gradient_accumulation_steps", "1").isdigit():  # grepped from the trainer's own file, say
        del deepspeed["gradient_accumulation_steps"]
    says = {
        "distributed_type": "DEEPSPEED" if "use_deepspeed" in words or file else "FSDP" * ("use_fsdp" in words),
        "deepspeed_config": {"deepspeed_config_file": file} if file else deepspeed,
        "fsdp_config": {key: value for key, value in words.items() if key.startswith("fsdp_")},
        "mixed_precision": words.get("mixed_precision"),
        "num_processes": int(processes) if processes.isdigit() else 0,
    }
    return {key: value for key, value in says.items() if value}


def parse_tool_launcher(tool: str, words: Sequence[str], shown: int | None) -> LauncherArguments:
    """Of the words behind a tool's verb, where it hands some on: `axolotl` those behind "--" to the launcher that it
    names, `tune run` its first to torchrun, `trl` Accelerate's own wherever they stand.

    Source: Axolotl 0.21 `cli/main.py`, torchtune 0.6 `_cli/run.py`, TRL 1.16 `cli/accelerate.py`.
    """
    if tool == "tune":
        return parse_launcher("torchrun", words, shown)
    if tool == "axolotl" and "--" in words:
        launcher_words, handed = words[: words.index("--")], words[words.index("--") + 1 :]
        named = [launcher_words[at + 1] for at in range(len(launcher_words) - 1) if launcher_words[at] == "--launcher"]
        launcher = next(iter(named), "accelerate")
        return parse_launcher(launcher, handed, shown) if launcher in LAUNCHERS else LauncherArguments(shown)
    if tool == "trl":
        flags = ("--num_processes", "--accelerate_config")
        starts = [at for at, word in enumerate(words) if word.partition("=")[0] in flags]
        launcher_words = [
            part for at in starts for part in (words[at : at + 1] if "=" in words[at] else words[at : at + 2])
        ]
        parsed = parse_launcher("accelerate", launcher_words, shown)
        if parsed.config in OF_TRL:
            return parsed._replace(num_gpus=parsed.num_gpus or OF_TRL_GPUS, config="", accelerate={})
        return parsed
    return LauncherArguments(shown)


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
        if name in _SETS and (match := re.search(r"(?:^|:)(\d+)$", value)):  # gres: gpu:a100:8
            counts[name] = match[1]
    if "nodes" in counts and "ntasks-per-node" in counts:
        counts.setdefault("ntasks", str(int(counts["nodes"]) * int(counts["ntasks-per-node"])))
    given = {variable: count for name, count in counts.items() for variable in _SETS[name]}
    if len(on_node := given.get("SLURM_GPUS_ON_NODE", "")) in (1, 2):  # no node has a hundred
        given["SLURM_JOB_GPUS"] = ",".join(map(str, range(int(on_node))))  # their numbers, which scripts count
    return given
