"""Shows every emitted file of the sweep to one tool's own parser. Run inside the tool's venv: validate.py TOOL
[objectives: those other than supervised training alone]

Prints how many of how many were accepted, and each refusal. Exit 1 when one was refused.
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import chdir, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "planner"))

sys.path.insert(0, str(ROOT))

import stand_ins  # noqa: E402
from launch_sweep import objective_layouts, request, setups  # noqa: E402

from planner.frameworks.exporters import EXPORTERS, DatasetChoice, Launch, prepare  # noqa: E402
from planner.models import catalogue  # noqa: E402
from planner.options.objectives import OBJECTIVES  # noqa: E402
from planner.samples.dataset import measure  # noqa: E402
from planner.setup import TrainSetup  # noqa: E402
from planner.setup.interchange import setup_from_dict  # noqa: E402
from tests.launch import data_formats, tiny_models  # noqa: E402

Check = Callable[[Launch, TrainSetup, Path], None]


def file_of(launch: Launch, folder: Path) -> Path:
    return folder / "launch" / launch.files[0].path


def axolotl() -> Check:
    axolotl_reads_the_data()
    from axolotl.utils.config import merge_input_args, prepare_plugins, validate_config
    from axolotl.utils.dict import DictDefault

    def check(launch: Launch, setup: TrainSetup, folder: Path) -> None:
        values = yaml.safe_load(file_of(launch, folder).read_text())
        config = DictDefault(values)
        prepare_plugins(config)
        fields = set(merge_input_args()[1].model_fields)
        unknown = set(values) - fields - {"liger_fused_linear_cross_entropy"}
        assert not unknown, f"unknown settings {unknown}"
        capabilities = stand_ins.CAPABILITIES | {"n_gpu": setup.num_gpus}
        read = validate_config(config, **{**stand_ins.AXOLOTL, "capabilities": capabilities})
        assert read.micro_batch_size == setup.micro_batch_seqs
        assert read.gradient_accumulation_steps == setup.accumulation_steps
        assert read.sequence_len == setup.seq_len_tokens
        assert (read.tensor_parallel_size or 1) == setup.tensor_degree
        if setup.parallel == "fsdp2":
            assert read.fsdp_version == 2
            assert read.fsdp_config.reshard_after_forward == setup.reshard_after_forward
            assert bool(read.fsdp_config.offload_params) == (setup.offload == "parameters")
            if setup.shard_degree not in (0, setup.data_degree):
                assert (read.dp_shard_size, read.dp_replicate_size) == (
                    setup.shard_degree, setup.data_degree // setup.shard_degree,
                )  # fmt: skip
        assert bool(read.sample_packing) == setup.packing
        assert (read.lora_r or 0) == setup.lora_rank
        assert bool(read.load_in_4bit) == setup.quantization.startswith("nf4")

    return check


@contextmanager
def data_of(name: str, target: str, loss_on: str = "answers") -> Iterator[tuple[Launch, Path]]:
    """A target's files for one form of data, in the folder where they are launched, with the rows that
    `prepare_data.py` makes and a tiny model whose tokens are bytes."""
    with tempfile.TemporaryDirectory() as where:
        data_formats.FORMATS[name](Path(where) / name)
        dataset = DatasetChoice(path=name, columns=measure(Path(where) / name).columns, local=True)
    setup = TrainSetup(seq_len_tokens=256, loss="full")
    export_request = request(setup, model_id="./model", dataset=dataset, loss_on=loss_on)
    launch = EXPORTERS[target](export_request)
    with folder_with((*launch.files, prepare.file(export_request))) as folder:
        data_formats.FORMATS[name](folder / name)
        tiny_models.tokenizer().save_pretrained(folder / "model")
        (folder / "model" / "config.json").write_text(json.dumps(tiny_models.tiny_config(tiny_models.TYPES["llama"])))
        subprocess.run([sys.executable, *launch.prepare.split()[1:]], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        yield launch, folder


LOCAL = [name for name in data_formats.FORMATS if name != "who/what"]
LOADED = LOCAL if os.environ.get("TESTS_WHOLE") else LOCAL[::6]
"""Forms that a tool's own loader reads, a minute each in Axolotl's on a busy machine; all with TESTS_WHOLE=1."""


def learned(rows: Any) -> list[str]:
    tokenizer = tiny_models.tokenizer()
    return sorted(tokenizer.decode([token for token in row["labels"] if token != -100]) for row in rows)


def shown(tool: str, name: str, loss_on: str, rows: Any) -> None:
    """Holds what a tool made of one form of data against what it says."""
    answers, texts = data_formats.answers_of(name), learned(rows)
    assert len(texts) >= len(answers) - 2, (name, len(texts))  # some are held out
    if loss_on == "answers" and name not in data_formats.TEXTS:
        wanted = {re.sub(r"\s|<\|end\|>", "", "".join(answer)) for answer in answers}
        assert {re.sub(r"\s|<\|end\|>", "", text) for text in texts} <= wanted, (tool, name, texts[:3])
        assert all(text.rstrip().endswith("<|end|>") for text in texts), (tool, name, texts[:3])
    else:
        assert all(row["labels"][1:] == row["input_ids"][1:] for row in rows), (tool, name)
    print(f"{tool}: {name}, loss on {loss_on}: {len(texts)} rows, the first teaches {texts[0]!r:.60}")


def llamafactory_reads_the_data(get_train_args: Callable[[Any], Any]) -> None:
    """LLaMA-Factory's own loader and template, from the emitted files, on every form of data and with either loss."""
    from llamafactory.data import get_dataset
    from llamafactory.data.template import get_template_and_fix_tokenizer
    from llamafactory.model import load_tokenizer

    for name, loss_on in product(LOADED, ("answers", "all")):
        with data_of(name, "llamafactory", loss_on) as (launch, folder):
            model, data, training, tuning, _ = get_train_args(yaml.safe_load(file_of(launch, folder).read_text()))
            module = load_tokenizer(model)
            template = get_template_and_fix_tokenizer(module["tokenizer"], data)
            datasets = get_dataset(template, model, data, training, stage=tuning.stage, **module)
            assert ("eval_dataset" in datasets) == (training.eval_strategy != "no")
            if tuning.stage == "pt":  # one row of many tokens, which are their own labels
                assert len(datasets["train_dataset"])
                print(f"llamafactory: {name}: texts are read by its stage pt")
            else:
                shown("llamafactory", name, loss_on, datasets["train_dataset"])


def axolotl_reads_the_data() -> None:
    """Axolotl's own loader, from the emitted file, on every form of data and with either loss."""
    import axolotl.utils.data.sft as reading
    from axolotl.loaders import load_tokenizer
    from axolotl.utils.config import normalize_config, validate_config
    from axolotl.utils.dict import DictDefault

    reading.save_preprocessed_dataset = lambda *_: None  # processes started for a copy that nothing here reads: 10 s
    for name, loss_on in product(LOADED, ("answers", "all")):
        with data_of(name, "axolotl", loss_on) as (launch, folder):
            values = yaml.safe_load(file_of(launch, folder).read_text())
            config = validate_config(DictDefault(values | {"base_model": "model"}), **stand_ins.AXOLOTL)
            normalize_config(config)
            rows, held_out, _, _ = reading.prepare_datasets(config, load_tokenizer(config))
            assert len(held_out) >= 1
            shown("axolotl", name, loss_on, rows)


def llamafactory() -> Check:
    get_train_args = stand_ins.llamafactory()
    llamafactory_reads_the_data(get_train_args)

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
        whole = "freeze" if setup.trained_layers else "full"
        assert tuning.finetuning_type == (whole if setup.method == "full" else "lora")
        assert setup.trained_layers in (0, tuning.freeze_trainable_layers)
        if setup.method != "full":
            assert tuning.lora_rank == setup.lora_rank
        assert bool(model.quantization_bit) == setup.quantized
        runs = launch.runs
        dtype = str(model.compute_dtype or "float32").removeprefix("torch.")  # what trains is cast to it
        assert dtype == {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[runs.compute_dtype], dtype

    return check


BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def starts(values: dict[str, object]) -> None:
    """`deepspeed.initialize` on a tiny model in one process on the CPU."""
    import deepspeed
    import torch

    os.environ["WORLD_SIZE"] = "1"
    if not deepspeed.comm.is_initialized():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "LOCAL_RANK": "0"}
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # for ranks on one CPU, and compiled
        deepspeed.init_distributed(dist_backend="gloo")
    model = torch.nn.Linear(8, 8)
    # Accelerate hands over DeepSpeed's own Adam where states are offloaded, which is compiled for the machine
    overrides = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config={**values, **overrides}
    )
    stage = values["zero_optimization"]["stage"]  # type: ignore[index]
    assert (engine.zero_optimization_stage(), type(optimizer).__name__[:13]) == (stage, "DeepSpeedZero")


def deepspeed() -> Check:
    from deepspeed.runtime.config import DeepSpeedConfig

    started: set[str] = set()

    def check(launch: Launch, setup: TrainSetup, folder: Path) -> None:
        values = json.loads(file_of(launch, folder).read_text())
        os.environ["WORLD_SIZE"] = str(setup.num_gpus)
        replicas = values["train_batch_size"] // (setup.micro_batch_seqs * setup.accumulation_steps)
        assert replicas == setup.num_gpus
        alone = {**values, "train_batch_size": values["train_batch_size"] // replicas}  # one process
        read = DeepSpeedConfig(alone)
        settings = json.dumps({name: value for name, value in values.items() if name not in BATCH}, sort_keys=True)
        if settings not in started and setup.compute_dtype != "fp16":  # which DeepSpeed has on GPUs alone
            starts(alone)
            started.add(settings)
        assert read.train_micro_batch_size_per_gpu == setup.micro_batch_seqs
        assert read.gradient_accumulation_steps == setup.accumulation_steps
        zero = read.zero_config
        assert zero.stage == int(setup.parallel[-1])
        assert read.bfloat16_config.enabled == (setup.compute_dtype == "bf16")
        assert read.float16_config.enabled == (setup.compute_dtype == "fp16")
        assert zero.overlap_comm == (zero.stage == 3)
        assert zero.reduce_bucket_size == 500_000_000
        blocks = (zero.offload_optimizer, zero.offload_param)
        offloads = [block is not None and block.device == "cpu" for block in blocks]
        assert offloads == [setup.offload != "none", setup.offload == "parameters"]

    return check


def accelerate() -> Check:
    """Accelerate's launcher and its DeepSpeed plugin on the emitted pair of files, then the Trainer's comparison of
    DeepSpeed's settings with its own."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import DeepSpeedPlugin
    from accelerate.utils.launch import prepare_deepspeed_cmd_env
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    stand_ins.half_precision()

    def check(launch: Launch, setup: TrainSetup, folder: Path) -> None:
        if not setup.parallel.startswith("zero"):
            raise NotForThis
        args = launch_command_parser().parse_args(["--config_file", f"launch/{launch.files[0].path}", "script.py"])
        args, defaults, from_config = _validate_launch_command(args)
        assert args.use_deepspeed
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if from_config else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        args.main_process_port = 0
        before = dict(os.environ)
        try:
            os.environ.update(prepare_deepspeed_cmd_env(args)[1])
            plugin = DeepSpeedPlugin()
        finally:
            os.environ.clear()
            os.environ.update(before)
        assert plugin.zero_stage == int(setup.parallel[-1])
        assert plugin.gradient_accumulation_steps == setup.accumulation_steps
        assert plugin.offload_optimizer_device == ("none" if setup.offload == "none" else "cpu")
        assert plugin.offload_param_device == ("cpu" if setup.offload == "parameters" else "none")
        autocast = launch.runs.autocast_dtype
        trainer = TrainingArguments(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=setup.micro_batch_seqs,
            gradient_accumulation_steps=setup.accumulation_steps,
            bf16=autocast == "bf16",
            fp16=autocast == "fp16",
        )
        config = dict(plugin.hf_ds_config.config)
        config["train_batch_size"] //= setup.num_gpus  # one process here
        compared = HfTrainerDeepSpeedConfig(config)
        compared.trainer_config_process(trainer)
        assert not compared.mismatches, compared.mismatches

    return check


def same_models() -> None:
    """torchtitan's registry builds the planned parameters for every model of the catalogue that a file names."""
    import torch
    from torchtitan.config import ConfigManager
    from torchtitan.protocols.train_spec import get_train_spec

    setup = TrainSetup(method="full", lora_rank=0, precision="bf16-mixed", loss="full", num_gpus=8, parallel="fsdp2")
    for entry in catalogue.entries():
        model = catalogue.load(entry.model_id)
        assert model is not None
        launch = EXPORTERS["torchtitan"](request(setup, model=model))
        if launch.refused:
            continue
        mixture = any(linear.is_stack for layer in model.layer_kinds for linear in layer.linears)
        if mixture:
            launch = EXPORTERS["torchtitan"](request(setup.replace(expert_degree=8), model=model))
        with tempfile.TemporaryDirectory() as name:
            file = Path(name, "torchtitan.toml")
            file.write_text(launch.files[0].text)
            read = ConfigManager().parse_args(["--job.config_file", str(file)])
        assert read.parallelism.expert_parallel_degree == (8 if mixture else 1)
        spec = get_train_spec(read.model.name)
        arguments = spec.model_args[read.model.flavor]
        arguments.update_from_config(read)
        with torch.device("meta"):
            built = spec.model_cls(arguments)
        num = sum(parameter.numel() for parameter in built.parameters())
        assert num == model.num_params, f"{entry.model_id}: {num}, not {model.num_params}"
        print(f"torchtitan {read.model.name} {read.model.flavor}: {num:,} parameters, as planned")


def torchtitan() -> Check:
    """torchtitan's registry, its parser, its check of the degrees against the number of GPUs, its cut into stages."""
    stand_ins.torchtitan()
    same_models()
    from torchtitan.config import ConfigManager
    from torchtitan.distributed.parallel_dims import ParallelDims
    from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part
    from torchtitan.models.qwen3 import qwen3_args

    def check(launch: Launch, setup: TrainSetup, folder: Path) -> None:
        read = ConfigManager().parse_args(["--job.config_file", str(file_of(launch, folder))])
        way = read.parallelism
        dims = ParallelDims(
            dp_replicate=way.data_parallel_replicate_degree,
            dp_shard=way.data_parallel_shard_degree,
            cp=way.context_parallel_degree,
            tp=way.tensor_parallel_degree,
            pp=way.pipeline_parallel_degree,
            ep=way.expert_parallel_degree,
            etp=way.expert_tensor_parallel_degree,
            world_size=setup.num_gpus,
        )
        assert (dims.tp, dims.cp, dims.pp) == (setup.tensor_degree, setup.context_degree, setup.pipeline_degree)
        assert dims.ep == setup.expert_degree
        assert dims.dp_replicate * dims.dp_shard == setup.data_degree
        assert dims.dp_shard * dims.cp == setup.shards
        steps = read.training.global_batch_size / (read.training.local_batch_size * setup.data_degree)
        if setup.pipeline_degree > 1:
            assert steps == 1
            in_flight = read.training.local_batch_size / way.pipeline_parallel_microbatch_size
            assert in_flight == setup.accumulation_steps
            model = qwen3_args[read.model.flavor]
            stages = generate_llm_fqn_per_model_part(
                dims.pp,
                model.n_layers,
                way.pipeline_parallel_first_stage_less_layers,
                way.pipeline_parallel_last_stage_less_layers,
            )
            layers = [sum(name.startswith("layers.") for name in stage) for stage in stages]
            assert max(layers) - min(layers) <= 1, layers
        else:
            assert steps == setup.accumulation_steps
            assert read.training.local_batch_size == setup.micro_batch_seqs
        assert read.training.seq_len == setup.seq_len_tokens
        assert read.training.enable_cpu_offload == (setup.offload == "parameters")
        assert read.compile.enable == setup.compile

    return check


TOOLS = {tool.__name__: tool for tool in (axolotl, llamafactory, deepspeed, accelerate, torchtitan)}


class NotForThis(Exception):
    """A file that this tool has nothing to say about."""


@contextmanager
def folder_with(files: Iterable[Any]) -> Iterator[Path]:
    """A folder from which a launch command runs, current meanwhile."""
    with tempfile.TemporaryDirectory() as name, chdir(name):
        for file in files:
            path = Path(name, "launch", file.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.text)
        yield Path(name)


def of_objectives() -> list[TrainSetup]:
    """Every other objective than supervised training, by every method, and those of several GPUs under every engine."""
    methods = ({"method": "full", "precision": "bf16-pure"}, {"method": "lora"}, {"method": "qlora"})
    names = [name for name, row in OBJECTIVES.items() if not row.supervised]
    alone = [
        setup_from_dict({"objective": name, "micro_batch_seqs": 2, **method}) for name in names for method in methods
    ]
    return [*alone, *objective_layouts()]


def main(tool: str, *only: str) -> int:
    check = TOOLS[tool]()
    qwen = catalogue.load("Qwen/Qwen3-8B")
    accepted, refused_by_us, failures = 0, 0, []
    for setup in [*(() if "objectives" in only else setups()), *of_objectives()]:
        # torchtitan has its own copies of few models, layers have a model's names; nothing else depends on which it is
        launch = EXPORTERS[tool](request(setup, model=qwen if tool == "torchtitan" or setup.trained_layers else None))
        if launch.refused:
            refused_by_us += 1
            continue
        with folder_with(launch.files) as folder:
            try:
                check(launch, setup, folder)
                accepted += 1
            except NotForThis:
                continue
            except (Exception, SystemExit) as error:
                failures.append((setup, f"{type(error).__name__}: {error}"))
    print(f"{tool}: {accepted} accepted, {len(failures)} refused by the tool, {refused_by_us} not expressible")
    for setup, reason in failures[:20]:
        print(f"  {setup}\n    {reason[:600]}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
