"""`--job NAME`: the launch folder as a job of SkyPilot, dstack, Kubernetes (Kubeflow's TrainJob) or Hugging Face Jobs;
Slurm's batch script of a target: `launch/run.sh TARGET` on every node by srun, its data prepared once.

Each file asks for the plan's cards, nodes and host memory, installs with `launch/run.sh install TARGET` and starts
`launch/run.sh TARGET` on every node. A card is called what the scheduler's own catalogue calls it; one that it does not
name is refused.

Sources: skypilot 0.14.1 `Task.from_yaml`, its catalogue v8 `common/accelerators.csv`; dstack 0.22.5
`TaskConfiguration`, gpuhunt 0.1.34 `KNOWN_NVIDIA_GPUS`, `KNOWN_AMD_GPUS`; kubeflow/trainer 2.3
`manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml`, `pkg/runtime/framework/plugins/torch/torch.go` (PET_*);
NVIDIA k8s-device-plugin `docs/gpu-feature-discovery` (`nvidia.com/gpu.product`); huggingface_hub 2.4 `JobHardware`,
`hf jobs run`. `tools/validators/jobs.sh` puts the files to their parsers; none was run on a cluster.
"""

import csv
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from planner.core.errors import UsageError
from planner.core.records import dataclass
from planner.core.shipped import DATA
from planner.core.units import GIB
from planner.frameworks.exporters.install import gate_of, on_hub
from planner.frameworks.exporters.text import comments, header
from planner.frameworks.exporters.types import ExportRequest, Launch, LaunchFile
from planner.hardware.gpu import GpuSpec
from planner.memory.engines.host import host_bytes_per_node

SLURM, SLURM_NAME = "slurm", "slurm.sbatch"
CPUS_PER_GPU = 7
"""Cores asked for beside each GPU: data loading and the process itself; a request, for people to change. LUMI-G gives a
job 56 of its nodes' 64."""
PORT = 29500
HOST_GIB_PER_GPU = 16
"""Host memory asked for beside each GPU, for loading and the process itself; what is offloaded comes on top. A request,
for people to change."""
DISK_GB = 256
"""Of packages, caches and the run: SkyPilot's own default. Twice the weights in 16 bits (downloaded, saved) come on
top."""
IMAGE = "python:3.12"
"""Has a C compiler, which Triton needs; CUDA comes with torch's wheels."""
WORK = "/tmp/plan"
MOUNT = "/plan"


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """One kind of job file.

    Attributes:
        name: as `--job` takes it.
        file: below `launch/`; command: submits it from the directory that holds `launch/`.
        card: what it calls so many of a card on one node, "" where its catalogue has no such name.
        text: the file without its head.
        several_nodes: whether one job may have them.
        notes: what a reader must know before submitting.
    """

    name: str
    file: str
    command: str
    card: Callable[[GpuSpec, int], str]
    text: Callable[[str, str, ExportRequest], str]
    several_nodes: bool = True
    notes: tuple[str, ...] = ()


@cache
def scheduler_names() -> dict[str, dict[str, str]]:
    """GPU key -> scheduler's column -> its name of the card."""
    with (DATA / "scheduler_gpus.csv").open(newline="", encoding="utf-8") as file:
        return {row.pop("gpu_key"): row for row in csv.DictReader(file)}


def _listed(column: str) -> Callable[[GpuSpec, int], str]:
    return lambda gpu, _: scheduler_names().get(gpu.key, {}).get(column, "")


def _flavors(gpu: GpuSpec) -> dict[int, str]:
    """GPUs of a machine -> its name, of one card."""
    flavors = _listed("hf_jobs")(gpu, 1).split()
    return {int(match[1]) if (match := re.search(r"x(\d+)$", flavor)) else 1: flavor for flavor in flavors}


def _product(gpu: GpuSpec, _: int = 1) -> str:
    """The driver's name of a card as GPU feature discovery writes it into a node's label, of NVIDIA's cards only."""
    return re.sub(r"\s+", "-", gpu.driver_name) if gpu.vendor == "NVIDIA" and not gpu.is_built_in else ""


def check(names: Sequence[str], gpu: GpuSpec, num_gpus: int, num_nodes: int) -> None:
    """Refuses what no job file can be written for, before anything is planned.

    Raises:
        UsageError: an unknown scheduler, or a card or a number of nodes that it does not have.
    """
    for name in names:
        if name == SLURM:  # the cluster's own people call its cards as they like
            continue
        if name not in SCHEDULERS:
            choices = ", ".join((SLURM, *SCHEDULERS))
            raise UsageError(f"--job must be one of {choices}; got {name!r}", hint="--job skypilot")
        scheduler = SCHEDULERS[name]
        if num_nodes > 1 and not scheduler.several_nodes:
            raise UsageError(f"a job of {name} has one machine, got {num_nodes} nodes", hint="use --nodes 1")
        if scheduler.card(gpu, num_gpus // num_nodes):
            continue
        if name == "hf-jobs" and (sizes := _flavors(gpu)):
            counts = ", ".join(map(str, sizes))
            raise UsageError(
                f"Hugging Face Jobs has no machine with {num_gpus} x {gpu.name}, but with {counts}",
                hint=f"plan with --gpus {max(sizes)}",
            )
        others = [other for other in SCHEDULERS if SCHEDULERS[other].card(gpu, 1)]
        hint = f"{' and '.join(others)} {'has' if len(others) == 1 else 'have'} it" if others else ""
        raise UsageError(
            f"{name} has no name for {gpu.name} in its catalogue", hint=hint or "launch/run.sh starts on any machine"
        )


def slurm_file(launch: Launch, request: ExportRequest) -> LaunchFile:
    """`sbatch FILE` from the directory that holds `launch/`.

    A job that is preempted, or whose node fails, is queued again (--requeue) and goes on from its last checkpoint, as
    run.sh does; its log is continued.
    """
    path, environment = f"{launch.target}/{SLURM_NAME}", f".venv-{launch.target}"
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


def job_files(names: Sequence[str], launch: Launch, request: ExportRequest) -> dict[str, LaunchFile]:
    """The job files that start one target, by the commands that submit them.

    Raises:
        UsageError: `check`'s.
    """
    if request.gpu is None:
        raise UsageError("a job file needs a GPU", hint="plan with --gpu")
    check(names, request.gpu, request.job_gpus_per_node * request.num_nodes, request.num_nodes)
    by_command = {}
    for scheduler in [SCHEDULERS[name] for name in dict.fromkeys(names) if name != SLURM]:
        card = scheduler.card(request.gpu, request.job_gpus_per_node)
        # What lies on this machine's disk and does not travel with the job.
        local = [request.dataset.path] if request.dataset is not None and request.dataset.local else []
        local += [] if on_hub(request.model_id) else [request.model_id]
        if scheduler.name == "skypilot":  # takes the whole directory along
            local = [path for path in local if path.startswith(("..", "/", "~"))]
        notes = (
            *scheduler.notes,
            *[f"{path} lies on this machine: put it where the job finds it, and name that place" for path in local],
        )
        title = f"{scheduler.name} job that starts the {launch.target} target"
        head = comments(header(request, title, scheduler.command, dict(launch.validated_with), notes=notes))
        shell = scheduler.file.endswith(".sh")
        text = ("#!/usr/bin/env bash\n" if shell else "") + head + scheduler.text(card, launch.target, request)
        by_command[scheduler.command] = LaunchFile(path=scheduler.file, text=text, executable=shell)
    return by_command


def _host_gib(request: ExportRequest) -> int:
    offloaded = 0
    if request.model is not None:
        offloaded = host_bytes_per_node(request.model, request.setup, request.num_nodes)
    return HOST_GIB_PER_GPU * request.job_gpus_per_node + -(-offloaded // GIB)


def _disk_gb(request: ExportRequest) -> int:
    """Disk to ask for on each node, GB."""
    weights = 0 if request.model is None else 2 * request.model.num_params
    return DISK_GB + -(-2 * weights // 10**9)


def _yaml(document: Mapping[str, Any]) -> str:
    """YAML with scripts as blocks, as people write them."""
    import yaml  # late: who writes no job pays nothing

    class Blocks(yaml.SafeDumper):
        pass

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Blocks.add_representer(str, text)
    return "\n" + yaml.dump(document, Dumper=Blocks, sort_keys=False, allow_unicode=True, width=100)


def _rendezvous(request: ExportRequest, rank: str, address: str) -> list[str]:
    """What `launch/run.sh` must be told on each of several nodes."""
    if request.num_nodes == 1:
        return []
    return [f"export MASTER_ADDR={address} MASTER_PORT={PORT} NODE_RANK={rank}"]


def _gated(request: ExportRequest) -> bool:
    return on_hub(request.model_id) and gate_of(request.model_id) is not None


def _skypilot(card: str, target: str, request: ExportRequest) -> str:
    run = [
        *_rendezvous(request, "$SKYPILOT_NODE_RANK", '$(echo "$SKYPILOT_NODE_IPS" | head -n1)'),
        f"bash launch/run.sh {target}",
    ]
    return _yaml(
        {
            "name": f"finetune-{target}",
            "num_nodes": request.num_nodes,
            "workdir": ".",
            "resources": {
                "accelerators": f"{card}:{request.job_gpus_per_node}",
                "cpus": f"{CPUS_PER_GPU * request.job_gpus_per_node}+",
                "memory": f"{_host_gib(request)}+",
                "disk_size": _disk_gb(request),
            },
            **({"secrets": {"HF_TOKEN": None}} if _gated(request) else {}),
            "setup": f"bash launch/run.sh install {target}\n",
            "run": "\n".join(run) + "\n",
        }
    )


def _dstack(card: str, target: str, request: ExportRequest) -> str:
    name, _, size = card.partition(":")
    return _yaml(
        {
            "type": "task",
            "name": f"finetune-{target}",
            "nodes": request.num_nodes,
            "python": "3.12",
            "files": [".:launch"],
            **({"env": ["HF_TOKEN"]} if _gated(request) else {}),
            "commands": [
                f"bash launch/run.sh install {target}",
                *_rendezvous(request, "$DSTACK_NODE_RANK", "$DSTACK_MASTER_NODE_IP"),
                f"bash launch/run.sh {target}",
            ],
            "resources": {
                "gpu": {"name": name, **({"memory": size} if size else {}), "count": request.job_gpus_per_node},
                "cpu": f"{CPUS_PER_GPU * request.job_gpus_per_node}..",
                "memory": f"{_host_gib(request)}GB..",
                "shm_size": f"{HOST_GIB_PER_GPU * request.job_gpus_per_node // 2}GB",
                "disk": f"{_disk_gb(request)}GB..",
            },
        }
    )


def _in_container(target: str, request: ExportRequest, rendezvous: Sequence[str]) -> str:
    """A container's script: works on a disk of its own and writes what the run leaves to the mounted place."""
    out = shlex.quote(request.output_dir)
    lines = [
        "set -eu",
        f"mkdir -p {WORK} {MOUNT}/{out}",
        f"cp -r {MOUNT}/launch {WORK}/",
        f"ln -s {MOUNT}/{out} {WORK}/{out}",
        f"cd {WORK}",
        f"bash launch/run.sh install {target}",
        *rendezvous,
        f"bash launch/run.sh {target}",
    ]
    return "".join(f"{line}\n" for line in lines)


def _kubernetes(card: str, target: str, request: ExportRequest) -> str:
    # torchrun reads PET_* where a flag is left out; the launch files say all of it themselves
    rendezvous = [*_rendezvous(request, "$PET_NODE_RANK", "$PET_MASTER_ADDR"), "unset ${!PET_@}"]
    gpus = {"nvidia.com/gpu": str(request.job_gpus_per_node)}
    mounts = [{"name": "plan", "mountPath": MOUNT}, {"name": "shm", "mountPath": "/dev/shm"}]
    pod = {
        "nodeSelector": {"nvidia.com/gpu.product": card},
        "containers": [{"name": "node", "volumeMounts": mounts}],
        "volumes": [
            {"name": "plan", "persistentVolumeClaim": {"claimName": "finetune"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    patch = {
        "template": {"spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]}}
    }
    requests = {
        "cpu": str(CPUS_PER_GPU * request.job_gpus_per_node),
        "memory": f"{_host_gib(request)}Gi",
        "ephemeral-storage": f"{_disk_gb(request)}G",
        **gpus,
    }
    token = {"secretKeyRef": {"name": "hf-token", "key": "token", "optional": True}}
    trainer = {
        "image": IMAGE,
        "numNodes": request.num_nodes,
        "command": ["bash", "-c", _in_container(target, request, rendezvous)],
        "env": [{"name": "HF_TOKEN", "valueFrom": token}],
        "resourcesPerNode": {"requests": requests, "limits": gpus},
    }
    patches = [{"manager": "finetune-planner/plan", "trainingRuntimeSpec": patch}]
    spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer, "runtimePatches": patches}
    head = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob"}
    return _yaml({**head, "metadata": {"name": f"finetune-{target}"}, "spec": spec})


def _hf_jobs(card: str, target: str, request: ExportRequest) -> str:
    script = _in_container(target, request, [])
    lines = (
        "set -euo pipefail",
        'cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."',
        f'hf jobs run --flavor {card} --timeout "${{TIMEOUT:-24h}}" --secrets HF_TOKEN \\',
        f"  --volume .:{MOUNT}:rw {IMAGE} bash -c {shlex.quote(script)}",
    )
    return "".join(f"{line}\n" for line in lines)


_GONE = "what the run writes is gone with the machine: copy it away before it ends, or mount a volume"
SCHEDULERS: Mapping[str, Scheduler] = {
    scheduler.name: scheduler
    for scheduler in (
        Scheduler(
            name="skypilot",
            file="skypilot.yaml",
            command="sky launch launch/skypilot.yaml",
            card=_listed("skypilot"),
            text=_skypilot,
            notes=("a gated model: --secret HF_TOKEN", _GONE),
        ),
        Scheduler(
            name="dstack",
            file="dstack.yaml",
            command="dstack apply -f launch/dstack.yaml",
            card=_listed("dstack"),
            text=_dstack,
            notes=(_GONE,),
        ),
        Scheduler(
            name="kubernetes",
            file="kubernetes.yaml",
            command="kubectl apply -f launch/kubernetes.yaml",
            card=_product,
            text=_kubernetes,
            notes=(
                "Kubeflow Trainer 2.2 or newer with its torch-distributed runtime, NVIDIA's device plugin with GPU "
                "feature discovery; a claim `finetune` (ReadWriteMany for several nodes) that holds launch/ and takes "
                "outputs; for a gated model a secret: kubectl create secret generic hf-token --from-literal=token=...",
            ),
        ),
        Scheduler(
            name="hf-jobs",
            file="hf-jobs.sh",
            command="bash launch/hf-jobs.sh",
            card=lambda gpu, num_gpus: _flavors(gpu).get(num_gpus, ""),
            text=_hf_jobs,
            several_nodes=False,
            notes=(
                "hf auth login first; the directory that holds launch/ is synced to a bucket of yours, where the run "
                "writes; TIMEOUT=36h in front of the command allows more than a day",
            ),
        ),
    )
}
"""`--job` name -> its file."""
