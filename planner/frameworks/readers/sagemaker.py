"""Programs that submit a training to SageMaker, as the commands of its containers.

Source: sagemaker 2.2 `estimator.py` (Framework: `hyperparameters` become `--name value`), sagemaker 3 `modules/train`.
"""

import shlex
from collections.abc import Iterator, Mapping

from planner.core.errors import NotPlanned
from planner.frameworks.readers.program.interpret import run
from planner.frameworks.readers.program.source import Source
from planner.frameworks.readers.program.values import CallResult, Unknown, Value, as_table, plain
from planner.frameworks.readers.values import FileContext
from planner.hardware.instances import cards_of


def submitted(source: Source, name: str, around: FileContext) -> tuple[str, dict[str, str]]:
    """(the commands of the job that a program submits, the version of transformers that it says); "" where it submits
    none.

    Raises:
        NotPlanned: SageMaker's own engine trains.
    """
    if "sagemaker" not in source.text:
        return "", {}
    for job in run(source.text, name, around.of_program()).calls:
        source_code = job.keywords.get("source_code")  # of sagemaker 3
        code = source_code.keywords if isinstance(source_code, CallResult) else job.keywords
        entry = plain(code.get("entry_script") if code is not job.keywords else code.get("entry_point"))
        if job.package != "sagemaker" or not isinstance(entry, str):
            continue
        folder = plain(code.get("source_dir"))
        launcher = _launcher(job, name) if entry.endswith(".py") else "bash"
        words = " ".join(_words(job.argument("hyperparameters")))
        version = plain(job.keywords.get("transformers_version"))
        lines = [f"cd {shlex.quote(folder)}"] if isinstance(folder, str) else []
        commands = "\n".join([*lines, f"{launcher} {shlex.quote(entry)} {words}"])
        return commands, {"transformers": version} if isinstance(version, str) else {}
    return "", {}


def _words(given: Value | None) -> Iterator[str]:
    table = as_table(given) if given is not None else None
    for name, value in table.entries.items() if table is not None else ():
        data = plain(value)
        variable = f"${name.upper().replace('-', '_')}"
        yield f"--{name} {variable if isinstance(data, Unknown) else shlex.quote(str(data))}"


def _launcher(job: CallResult, name: str) -> str:
    """What starts the program: one process, or torchrun on every card of the instances."""
    spread = job.keywords.get("distribution")
    table = as_table(spread) if spread is not None else None
    by: Mapping[str, Value] = table.entries if table is not None else {}
    if "smdistributed" in by:
        raise NotPlanned(f"{name} trains with SageMaker's own engine (smdistributed): not planned", hint="")
    by_torchrun = isinstance(job.keywords.get("distributed"), CallResult) or {"torch_distributed", "pytorchddp"} & {*by}
    compute = job.argument("compute")
    machine = compute.keywords if isinstance(compute, CallResult) else job.keywords
    cards = cards_of(str(plain(machine.get("instance_type"))))
    nodes = plain(machine.get("instance_count"))
    nodes = "$SM_HOST_COUNT" if isinstance(nodes, Unknown) else nodes or 1
    each = cards[0] if cards is not None else "$SM_NUM_GPUS"
    return f"torchrun --nnodes {nodes} --nproc_per_node {each}" if by_torchrun else "python"
