"""Small real models for end-to-end training: one made on the spot, one from PyPI (SmolLM2-135M)."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest

from planner.frameworks.exporters import DatasetChoice, ExportRequest, Launch, prepare
from planner.frameworks.hyperparameters import choose
from planner.setup import TrainSetup
from tests.launch.tiny_models import CHAT_TEMPLATE
from tests.whole import WHOLE

FACTS = (("capital of France", "Paris"), ("capital of Japan", "Tokyo"), ("largest planet", "Jupiter"))


def chats(num: int) -> list[dict[str, object]]:
    """`num` short conversations, few facts: a model that learns at all learns these."""
    rows = []
    for index in range(num):
        question, answer = FACTS[index % len(FACTS)]
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": f"What is the {question}?"},
                    {"role": "assistant", "content": f"The {question} is {answer}."},
                ]
            }
        )
    return rows


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_launch(folder: Path, emitted: Launch) -> None:
    """The launch files where the command expects them."""
    for file in emitted.files:
        path = folder / "launch" / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text)


def prepared(folder: Path, request: ExportRequest, form: str = "tokens") -> None:
    """`launch/prepare_data.py` of a request, run in this process."""
    path = folder / "launch" / prepare.NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(prepare.file(request).text)
    make_data(folder, form)


def export_request(
    setup: TrainSetup, *, steps: int = 2, rate: float | None = None, path: str = "./chats", **more: Any
) -> Any:
    """A request of `steps` optimizer steps over a local data set, each logged, nothing held out.

    Args:
        rate: a learning rate in place of the chosen one: a random model of two layers needs a far larger one than a
            trained one to move within some steps.
    """
    hyper = choose(setup, max_steps=steps)
    values = {
        "model_id": "./tiny-llama",
        "hyper": hyper if rate is None else replace(hyper, learning_rate=rate),
        "dataset": DatasetChoice(path=path, local=True),
        "logging_steps": 1,
        "held_out": 0,
    }
    return ExportRequest(setup=setup, **{**values, **more})


def make_data(folder: Path, form: str) -> None:
    """The written `launch/prepare_data.py`, run in this process."""
    path = folder / "launch" / prepare.NAME
    scope: dict[str, Any] = {"__name__": "prepared", "__file__": str(path)}
    exec(compile(path.read_text("utf-8"), str(path), "exec"), scope)
    scope["main"](form)


def run_trl(text: str, folder: Path) -> Any:
    """`trl sft --config FILE` without a process of its own; the trainer."""
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser
    from trl.scripts import sft

    path = folder / "trl-sft.yaml"
    path.write_text(text)
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
    parsed = parser.parse_args_and_config(["--config", str(path)], fail_with_unknown_args=True)
    trainers = []
    train = SFTTrainer.train

    def keep(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        trainers.append(trainer)
        return train(trainer, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SFTTrainer, "train", keep)
        sft.main(*parsed[:4])
    return trainers[0]


def run_script(text: str, folder: Path) -> Any:
    """`python train_hf.py` without a process of its own; the trainer."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "train_hf.py", "exec"), scope)
    return scope["trainer"]


def num_saved(folder: Path) -> int:
    """Elements of all tensors in a saved adapter: what the run really trained."""
    from safetensors import safe_open

    with safe_open(folder / "adapter_model.safetensors", "pt") as weights:
        return sum(prod(weights.get_slice(key).get_shape()) for key in list(weights.keys()))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a tokenizer trained on the test's own text, as a model folder."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("launch") / "tiny-llama"
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<unk>", "<pad>", "<|end|>", "<|user|>", "<|assistant|>"]
    text = [message["content"] for row in chats(6) for message in row["messages"]]  # type: ignore[union-attr, index]
    tokenizer.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<|end|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Run:
    """A finished training process: its log lines as the trainer wrote them, and the state it saved."""

    output: str
    history: list[dict[str, float]]
    state: dict[str, object]

    @property
    def losses(self) -> list[float]:
        return [entry["loss"] for entry in self.history if "loss" in entry]


def two_steps(launch: Callable[..., Run], place: Path, emitted: Launch, setup: TrainSetup) -> Run:
    """The emitted files launched in `place`: two optimizer steps of the planned micro-batch, each with its loss."""
    write_launch(place, emitted)
    run = launch(emitted.command)
    assert run.state["global_step"] == 2
    assert run.state["train_batch_size"] == setup.micro_batch_seqs
    assert len(run.losses) == 2
    return run


@pytest.fixture
def launch_cold(tmp_path: Path, warm_programs: Path) -> Callable[..., Run]:
    """Runs a launch command in the temporary directory on CPU, offline, and reads the trainer's own state back; with
    TESTS_WHOLE=1 by programs that start as a user starts them."""
    return partial(run_launch, tmp_path, Path(sys.executable).parent if WHOLE else warm_programs)


@pytest.fixture
def launch(tmp_path: Path, warm_programs: Path) -> Callable[..., Run]:
    """As `launch_cold`, with `python` and the launchers forked from a process that has imported the libraries."""
    return partial(run_launch, tmp_path, warm_programs)


def run_launch(
    folder: Path,
    bin_dir: Path,
    command: str,
    *,
    timeout_s: float = 900,
    output_dir: str = "outputs",
    ok: bool = True,
    env: Mapping[str, str] | None = None,
) -> Run:
    """Runs a launch command in `folder`, programs from `bin_dir`; nothing that it started outlives it."""
    environment = {
        **os.environ,
        "PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
        "PYTHONWARNINGS": "ignore",
        **(env or {}),
    }
    with subprocess.Popen(
        command, shell=True, cwd=folder, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            output = "".join(process.communicate(timeout=timeout_s))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # torchrun's workers too
    assert process.returncode == 0 or not ok, output[-4000:]
    states = sorted((folder / output_dir).glob("checkpoint-*/trainer_state.json"))
    state = json.loads(states[-1].read_text()) if states else {}
    return Run(output=output, history=state.get("log_history", []), state=state)


@pytest.fixture
def place(tmp_path: Path, tiny_model: Path) -> Path:
    """A working directory with the tiny model linked in and a chat dataset of 24 conversations."""
    return furnish(tmp_path, tiny_model)


def furnish(folder: Path, tiny_model: Path) -> Path:
    """`folder` with the tiny model linked in, the chat dataset, and the rows made of it."""
    (folder / "tiny-llama").symlink_to(tiny_model, target_is_directory=True)
    write_jsonl(folder / "chats" / "train.jsonl", chats(24))
    setup = TrainSetup(seq_len_tokens=64)
    prepared(folder, export_request(setup))
    return folder
