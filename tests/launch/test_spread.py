"""Emitted files for several GPUs train a tiny model on two CPU processes (gloo), step by step like one process does.

The same global batch: two processes with one micro-batch each against one process that accumulates two. The data
order is the seed's. What differs is the order of fp32 sums. Seen: 2e-7 in losses and gradient norms, 8e-6 in weights,
where Adam divides tiny gradients by their own size; the tolerances are 50 and 100 times that.

All are forked from a process that has imported the libraries.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from planner.frameworks.exporters import EXPORTERS, Launch, hf
from planner.frameworks.exporters.folder import folder_files
from planner.frameworks.exporters.jobs import SLURM_NAME
from planner.setup import TrainSetup
from tests.launch.conftest import Run, export_request, furnish, run_launch, write_launch
from tests.launch.test_hf import said
from tests.ports import own_port
from tests.whole import WHOLE

pytestmark = pytest.mark.processes

TOLERANCE = 1e-5
"""Relative, of every step's loss and gradient norm."""
WEIGHT_TOLERANCE = 1e-3
"""Of the largest element of each saved tensor."""
STEPS = 4
SHIM = Path(__file__).parent / "shard_on_cpu"
FULL = TrainSetup(
    method="full", lora_rank=0, precision="fp32", micro_batch_seqs=2, accumulation_steps=2, seq_len_tokens=64,
    optimizer="adamw", loss="full",
)  # fmt: skip
LORA = FULL.replace(method="lora", lora_rank=4, loss="chunked", checkpointing=0)
TWO = {"num_gpus": 2, "accumulation_steps": 1}


def emitted(target: str, setup: TrainSetup, num_nodes: int = 1) -> Launch:
    launch = EXPORTERS[target](export_request(setup, steps=STEPS, rate=0.01, num_nodes=num_nodes))
    assert not launch.unsupported
    return launch


@pytest.fixture(scope="module")
def alone(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, warm_programs: Path
) -> Callable[[str, TrainSetup], tuple[Run, Path]]:
    """A setup trained by one process, once for all tests of this file."""
    done: dict[tuple[str, TrainSetup], tuple[Run, Path]] = {}

    def train(target: str, setup: TrainSetup) -> tuple[Run, Path]:
        if (target, setup) not in done:
            folder = furnish(tmp_path_factory.mktemp(f"alone-{target}"), tiny_model)
            launch = emitted(target, setup)
            write_launch(folder, launch)
            done[target, setup] = run_launch(folder, warm_programs, launch.command, env=THREADS), folder / "outputs"
        return done[target, setup]

    return train


THREADS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def layout(launch: Callable[..., Run], place: Path, command: str) -> Run:
    """A command's run on two CPU processes, where it is Accelerate's on a port that nobody else gets."""
    on_cpu = {"PYTHONPATH": str(SHIM), "SHARDS_FILE": str(place / "shards")}
    with own_port() as port:
        if "accelerate launch" in command:
            command = command.replace("accelerate launch", f"accelerate launch --main_process_port {port}")
        elif " trl " in f" {command}":
            command = f"{command} --main_process_port {port}"
        return launch(command, env=THREADS | on_cpu)


def same_steps(run: Run, reference: Run) -> None:
    assert len(run.losses) == len(reference.losses) == STEPS
    assert run.losses == pytest.approx(reference.losses, rel=TOLERANCE)
    norms = [
        [entry["grad_norm"] for entry in training.history if "grad_norm" in entry] for training in (run, reference)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=TOLERANCE)
    assert run.losses[-1] < run.losses[0]


def same_weights(folder: Path, reference: Path) -> None:
    from safetensors.torch import load_file

    (name,) = {path.name for path in reference.glob("*.safetensors")}
    weights, expected = load_file(folder / name), load_file(reference / name)
    assert set(weights) == set(expected)
    for key, tensor in expected.items():
        assert (weights[key] - tensor).abs().max() <= WEIGHT_TOLERANCE * tensor.abs().max(), key


def check_alike(run: Run, place: Path, reference: tuple[Run, Path]) -> None:
    """The same steps, and the same weights after them."""
    same_steps(run, reference[0])
    same_weights(place / "outputs", reference[1])


def shards(place: Path) -> list[dict[str, int]]:
    """What each of the two processes held after Accelerate's FSDP2."""
    return [json.loads((place / f"shards{rank}").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_fsdp2_steps_like_one_process_and_holds_half(
    place: Path, launch: Callable[..., Run], alone: Callable[[str, TrainSetup], tuple[Run, Path]]
) -> None:
    files = emitted("hf", FULL.replace(**TWO, parallel="fsdp2"))
    write_launch(place, files)
    run = layout(launch, place, files.command)
    assert run.output.count("RUN {") == 1  # rank 0 speaks for all
    assert said(run)["global_batch_seqs"] == FULL.global_batch_seqs
    ranks = shards(place)
    whole = said(run)["trained_parameters"]
    assert [rank["sharded"] for rank in ranks] == [whole, whole]
    assert sum(rank["here"] for rank in ranks) == whole
    assert max(rank["here"] for rank in ranks) < 0.51 * whole
    check_alike(run, place, alone("hf", FULL))


@pytest.mark.slow
def test_one_process_whose_weights_lie_on_the_host_steps_like_one_that_holds_them(
    place: Path, launch: Callable[..., Run], alone: Callable[[str, TrainSetup], tuple[Run, Path]]
) -> None:
    """FSDP2 of one rank with CPU offload, which `--offload parameters` plans for one GPU."""
    files = emitted("hf", FULL.replace(num_gpus=1, parallel="fsdp2", offload="parameters"))
    write_launch(place, files)
    run = layout(launch, place, files.command)
    (counts,) = [json.loads(path.read_text()) for path in place.glob("shards*")]
    assert counts["sharded"] == said(run)["trained_parameters"] == counts["here"]
    check_alike(run, place, alone("hf", FULL))


@pytest.mark.slow
@pytest.mark.skipif(not WHOLE, reason="2 CPU seconds; torchrun deals experts out below (TESTS_WHOLE=1)")
def test_tensor_parallelism_by_torchrun_steps_like_one_process(
    place: Path, launch: Callable[..., Run], alone: Callable[[str, TrainSetup], tuple[Run, Path]]
) -> None:
    setup = FULL.replace(num_gpus=2, tensor_degree=2)
    files = emitted("hf", setup)
    write_launch(place, files)
    (note,) = [note for note in files.notes if "torchrun" in note]
    run = layout(launch, place, note[note.index("torchrun") :])
    assert said(run)["global_batch_seqs"] == setup.global_batch_seqs == FULL.global_batch_seqs
    check_alike(run, place, alone("hf", FULL))


@pytest.fixture(scope="module")
def tiny_mixture(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A random two-layer mixture of four experts with the tiny model's tokenizer."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("mixture") / "tiny"
    shutil.copytree(tiny_model, folder)
    torch.manual_seed(0)
    vocab = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
    config = Qwen3MoeConfig(
        vocab_size=vocab, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, pad_token_id=1,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_experts_dealt_out_by_torchrun_step_like_one_process(
    tmp_path: Path, tiny_mixture: Path, launch: Callable[..., Run], warm_programs: Path
) -> None:
    (tmp_path / "alone").mkdir()
    both, single = furnish(tmp_path, tiny_mixture), furnish(tmp_path / "alone", tiny_mixture)
    setup = FULL.replace(**TWO, parallel="fsdp2", expert_degree=2)
    files, reference = emitted("hf", setup), emitted("hf", FULL)
    write_launch(both, files)
    write_launch(single, reference)
    (note,) = [note for note in files.notes if "torchrun" in note]
    run = layout(launch, both, note[note.index("torchrun") :])
    assert said(run)["global_batch_seqs"] == setup.global_batch_seqs == FULL.global_batch_seqs
    same_steps(run, run_launch(single, warm_programs, reference.command, env=THREADS))
    same_weights(both / "outputs", single / "outputs")


SRUN = """#!/bin/bash
shift
SLURM_NODEID=0 "$@" & first=$!
while kill -0 $first && ! (: <>/dev/tcp/$MASTER_ADDR/$MASTER_PORT) 2>/dev/null; do sleep 0.2; done
SLURM_NODEID=1 "$@" & second=$!
wait $first && wait $second
"""
"""Stands in for Slurm's: starts the task of both nodes, here on one machine, whose port the second
would take."""


@pytest.mark.slow
def test_a_slurm_job_of_two_nodes_steps_like_one_process(
    place: Path, launch: Callable[..., Run], alone: Callable[[str, TrainSetup], tuple[Run, Path]]
) -> None:
    """The emitted script by bash, with stand-ins for scontrol and srun: torchrun's nodes meet and train."""
    lora = LORA.replace(loss="full")
    files = emitted("hf", lora.replace(**TWO, parallel="ddp"), num_nodes=2)
    write_launch(place, files)
    for file in folder_files([files], export_request(files.runs, steps=STEPS, rate=0.01, num_nodes=2)):
        path = place / "launch" / file.path
        path.write_text(file.text)
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/bash\necho localhost\n"}.items():
        path = place / "slurm" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    command = f'PATH="$PWD/slurm:$PATH" bash launch/{hf.TARGET}/{SLURM_NAME}'
    with own_port(range(20000 + os.getpid() % 9000, 30000)) as port:  # the script takes 20000 + job id % 10000
        environment = {
            "ACCELERATE_USE_CPU": "true",
            "SLURM_JOB_NODELIST": "both",
            "SLURM_JOB_ID": str(port - 20000),
            "SLURM_CPUS_PER_TASK": "8",
        }
        run = launch(command, env=THREADS | environment)
    assert said(run)["global_batch_seqs"] == 4
    check_alike(run, place, alone("hf", lora))
