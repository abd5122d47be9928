"""The files of `--target acme`: the setup as JSON, which Acme's trainer reads."""

import json

from finetune_planner.plugins import (
    PLACEHOLDER_DATASET,
    Difference,
    Draft,
    ExportRequest,
    LaunchFile,
    ModelSpec,
    TrainSetup,
    setup_to_dict,
)

VALIDATED_WITH = {"acme-train": "1.0"}


def refusal(setup: TrainSetup, model: ModelSpec | None = None) -> str:
    """Why the trainer cannot run a setup, "" when it can."""
    return "" if setup.num_gpus == 1 else "Acme's trainer runs on one GPU"


def differences(setup: TrainSetup) -> tuple[Difference, ...]:
    """What it runs otherwise than a setup says: it compiles nothing."""
    if not setup.compile:
        return ()
    return (Difference(field="compile", planned=True, runs_as=False, reason="Acme's trainer compiles nothing"),)


def export(request: ExportRequest, found: tuple[Difference, ...]) -> Draft:
    """One JSON file."""
    job = {
        "model": request.model_id,
        "dataset": request.dataset.path if request.dataset is not None else PLACEHOLDER_DATASET,
        "output_dir": request.output_dir,
        "learning_rate": request.hyper.learning_rate,
        "setup": setup_to_dict(request.setup),
    }
    file = LaunchFile(path="acme/job.json", text=json.dumps(job, indent=2) + "\n")
    return Draft(title="Acme's trainer", files=(file,), command="acme-train launch/acme/job.json")
