"""Job files of `--job` put to the schedulers' own parsers: `jobs.py write DIR` (this project's venv), then
`jobs.py skypilot|dstack|kubernetes DIR` in a venv that has the tool (`jobs.sh`)."""

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import yaml

MODELS = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-30B-A3B")
CARDS = ("h100-sxm", "a100-80gb", "a100-40gb", "l4", "l40s", "rtx-4090", "v100-32gb", "t4", "mi300x")
GPUS = (1, 4, 16)


def write(folder: Path) -> None:
    """Every model x card x number of GPUs that a scheduler has; what does not fit writes nothing."""
    from finetune_planner.cli.app import run
    from planner.frameworks.exporters.jobs import SCHEDULERS, Scheduler
    from planner.hardware.gpus import find_gpu

    def has(scheduler: Scheduler, card: str, gpus: int) -> bool:
        return bool(scheduler.card(find_gpu(card), min(gpus, 8))) and (scheduler.several_nodes or gpus <= 8)

    for model, card, gpus in product(MODELS, CARDS, GPUS):
        words = [model, "--gpu", card, "--gpus", str(gpus), "--no-dry-run", "--target", "trl"]
        words += ["--out", str(folder / f"{model.split('/')[1]}-{card}-{gpus}")]
        for scheduler in SCHEDULERS.values():
            words += ["--job", scheduler.name] * has(scheduler, card, gpus)
        run(words)


def skypilot(text: str) -> None:
    import sky

    task = sky.Task.from_yaml_config(yaml.safe_load(text), secrets_overrides={"HF_TOKEN": "x"})
    assert task.num_nodes >= 1
    assert task.run
    assert task.setup
    assert next(iter(task.resources)).accelerators


def dstack(text: str) -> None:
    import gpuhunt
    from dstack._internal.core.models.configurations import parse_apply_configuration

    task = parse_apply_configuration(yaml.safe_load(text))
    names = {gpu.name for gpu in (*gpuhunt.KNOWN_NVIDIA_GPUS, *gpuhunt.KNOWN_AMD_GPUS)}
    assert task.type == "task"
    assert set(task.resources.gpu.name) <= names


def kubernetes(text: str) -> None:
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

    document = yaml.safe_load(text)
    job = TrainerV1alpha1TrainJob.from_dict(document)
    assert job is not None
    assert job.to_dict() == document, "a field is unknown"


def main(action: str, folder: Path) -> None:
    if action == "write":
        write(folder)
        return
    parse: Callable[[str], None] = {"skypilot": skypilot, "dstack": dstack, "kubernetes": kubernetes}[action]
    files = sorted(folder.glob(f"*/launch/{action}.yaml"))
    for file in files:
        parse(file.read_text())
    print(f"{action}: {len(files)} files accepted")
    assert files


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
