"""Shows every emitted file of the sweep to one tool's own parser. Run inside the tool's venv: validate.py TOOL

Prints how many of how many were accepted, and each refusal. Exit 1 when one was refused.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "planner"))

from launch_sweep import request, setups  # noqa: E402

from planner.exporters import EXPORTERS, Launch  # noqa: E402
from planner.setup import TrainSetup  # noqa: E402

Check = Callable[[Launch, TrainSetup, Path], None]


def file_of(launch: Launch, folder: Path, index: int = 0) -> Path:
    return folder / "launch" / launch.files[index].path


def axolotl() -> Check:
    from axolotl.utils.config import merge_input_args, prepare_plugins, validate_config
    from axolotl.utils.dict import DictDefault

    def check(launch: Launch, setup: TrainSetup, folder: Path) -> None:
        values = yaml.safe_load(file_of(launch, folder).read_text())
        config = DictDefault(values)
        prepare_plugins(config)
        known = set(merge_input_args()[1].model_fields)
        unknown = set(values) - known - {"liger_fused_linear_cross_entropy"}
        assert not unknown, f"unknown settings {unknown}"
        capabilities = {
            "bf16": True, "fp8": False, "tf32": True, "n_gpu": setup.num_gpus, "n_node": 1,
            "compute_capability": "sm_90",
        }  # fmt: skip
        read = validate_config(config, capabilities=capabilities, env_capabilities={"torch_version": "2.13.0"})
        assert read.micro_batch_size == setup.micro_batch_seqs
        assert read.gradient_accumulation_steps == setup.accumulation_steps
        assert read.sequence_len == setup.seq_len_tokens
        assert bool(read.sample_packing) == setup.packing
        assert (read.lora_r or 0) == setup.lora_rank
        assert bool(read.load_in_4bit) == setup.quantization.startswith("nf4")

    return check


def llamafactory() -> Check:
    import transformers.training_args as arguments

    arguments.is_torch_bf16_gpu_available = lambda: True
    arguments.is_torch_tf32_available = lambda: True
    import llamafactory.hparams.parser as parser
    from llamafactory.hparams import get_train_args

    parser.is_torch_bf16_gpu_available = lambda: True

    def check(launch: Launch, setup: TrainSetup, folder: Path) -> None:
        values = yaml.safe_load(file_of(launch, folder).read_text())
        values.pop("deepspeed", None)  # needs deepspeed installed; its file has its own validator
        os.environ.pop("FORCE_TORCHRUN", None)
        model, data, training, tuning, _ = get_train_args(values)
        assert training.per_device_train_batch_size == setup.micro_batch_seqs
        assert training.gradient_accumulation_steps == setup.accumulation_steps
        # the parser takes one token off under packing; the packer pads rows back to cutoff_len + 1
        length = data.cutoff_len + 1 if setup.packing else data.cutoff_len
        assert length == setup.seq_len_tokens, (length, setup.seq_len_tokens)
        assert tuning.finetuning_type == ("full" if setup.method == "full" else "lora")
        if setup.method != "full":
            assert tuning.lora_rank == setup.lora_rank
        assert bool(model.quantization_bit) == setup.quantized
        runs = launch.runs_as(setup)
        dtype = str(model.compute_dtype or model.infer_dtype).removeprefix("torch.")
        assert dtype == {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[runs.compute_dtype], dtype

    def guarded(launch: Launch, setup: TrainSetup, folder: Path) -> None:
        here = Path.cwd()
        os.chdir(folder)
        try:
            check(launch, setup, folder)
        finally:
            os.chdir(here)

    return guarded


def deepspeed() -> Check:
    from deepspeed.runtime.config import DeepSpeedConfig

    def check(launch: Launch, setup: TrainSetup, folder: Path) -> None:
        values = json.loads(file_of(launch, folder).read_text())
        os.environ["WORLD_SIZE"] = str(setup.num_gpus)
        whole = dict(values)
        replicas = whole["train_batch_size"] // (setup.micro_batch_seqs * setup.accumulation_steps)
        assert replicas == setup.num_gpus
        whole["train_batch_size"] //= setup.num_gpus  # one process here
        read = DeepSpeedConfig(whole)
        assert read.train_micro_batch_size_per_gpu == setup.micro_batch_seqs
        assert read.zero_optimization_stage == int(setup.parallel[-1])

    return check


def main(tool: str) -> int:
    check = {"axolotl": axolotl, "llamafactory": llamafactory, "deepspeed": deepspeed}[tool]()
    accepted, refused_by_us, failures = 0, 0, []
    for setup in setups():
        launch = EXPORTERS[tool](request(setup))
        if launch.refused:
            refused_by_us += 1
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for file in launch.files:
                (folder / "launch" / file.path).parent.mkdir(parents=True, exist_ok=True)
                (folder / "launch" / file.path).write_text(file.text)
            try:
                check(launch, setup, folder)
                accepted += 1
            except (Exception, SystemExit) as error:
                failures.append((setup, f"{type(error).__name__}: {error}"))
    print(f"{tool}: {accepted} accepted, {len(failures)} refused by the tool, {refused_by_us} not expressible")
    for setup, reason in failures[:20]:
        print(f"  {setup}\n    {reason[:600]}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
