"""A program on sentence-transformers' own Trainer, for pairs of texts. sentence-transformers 6.2, transformers 5.23."""

import json

from planner.frameworks.exporters import hf
from planner.frameworks.exporters.common import family_refusal, model_refusal
from planner.frameworks.exporters.text import call, program
from planner.frameworks.exporters.types import Difference, Draft, ExportRequest, LaunchFile
from planner.frameworks.tools.transformers import DTYPES
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup

TARGET = "sentence-transformers"
LOSS = "MultipleNegativesRankingLoss"
FILE = "sentence-transformers/train_embedding.py"
VALIDATED_WITH = {"sentence-transformers": "6.2.0", **hf.VALIDATED_WITH}
MIXED_IN = ("low-rank", "scales", "rotations")
"""Forms of adapters that transformers' `add_adapter` puts into a model, which prompts do not go into."""


def differences(setup: TrainSetup) -> tuple[Difference, ...]:
    return tuple(difference for difference in hf.differences(setup) if difference.field == "selective_checkpointing")


def refusal(setup: TrainSetup, model: ModelSpec | None = None) -> str:
    if setup.method != "full" and setup.kind.form not in MIXED_IN:
        return f"{setup.kind.title} ({setup.kind.what}) is no adapter that add_adapter puts into a model"
    if setup.kbit_fp32_cast:
        return "peft's k-bit preparation is for language models"
    return family_refusal(setup, TARGET) or setup.scaler_refusal or model_refusal(setup, model, "hf")


def export(request: ExportRequest, differences: tuple[Difference, ...]) -> Draft:
    """`train_embedding.py`: the other pairs of a micro-batch are the negatives."""
    setup, command = request.setup, f"python launch/{FILE}"
    notes = (
        "Negatives come from the micro-batch: accumulation adds none, a larger micro-batch does.",
        "Where the tokenizer has a chat template, sentence-transformers 6.2 puts it around every text: tokens that the "
        "plan's lengths do not count.",
    )
    runs = setup.replace(**{difference.field: difference.runs_as for difference in differences})
    main = LaunchFile(path=FILE, text=_script(request, runs))
    return Draft(title=f"sentence-transformers: {setup.objective_spec.title}", main=main, command=command, notes=notes)


def _script(request: ExportRequest, runs: TrainSetup) -> str:
    setup, num = request.setup, request.setup.hard_negatives
    negatives = ["negative"] if num == 1 else [f"negative_{number}" for number in range(1, num + 1)]
    parts = hf.opening(request)
    if setup.method != "full":
        parts.append(f"from peft import {setup.kind.config}\n")
    parts += [
        program("EMBEDDING_IMPORTS").replace("LOSS", f"Cached{LOSS}" if setup.cached_seqs else LOSS),
        hf.imported(request),
        "\n",
        hf.constants(request),
        program("ROWS"),
        "\n\n",
        f"rows = load_rows().select_columns({json.dumps(['anchor', 'positive', *negatives])})\n\n",
    ]
    before, lines = hf.loading(request)
    parts += [*before, call("loading", "dict", lines), program("EMBEDDING_MODEL")]
    if setup.method != "full":
        dtype = f"torch.{DTYPES[setup.resolved_adapter_dtype]}"
        parts += [
            "\n" + call("adapter", setup.kind.config, hf.adapter_lines(request)),
            f"set_seed({request.hyper.seed})  # adapters start alike in every run\n",
            "model.add_adapter(adapter)\nfor parameter in model.parameters():\n    if parameter.requires_grad:\n",
            f"        parameter.data = parameter.data.to({dtype})  # add_adapter leaves them in the weights' type\n",
            "model.transformers_model.enable_input_require_grads()\n" * (setup.checkpointing > 0),
        ]
    loss = f"Cached{LOSS}(model, mini_batch_size={setup.cached_seqs})" if setup.cached_seqs else f"{LOSS}(model)"
    arguments = call("arguments", "SentenceTransformerTrainingArguments", hf.argument_lines(request, runs))
    return "".join([*parts, "\n", arguments, program("EMBEDDING_RUN").replace("LOSS", loss)])
