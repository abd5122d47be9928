"""Launch files for several GPUs and nodes, through the parsers of Accelerate, torchrun and bash.

DeepSpeed's own parser and Accelerate's DeepSpeed plugin run in tools/validators/deepspeed.sh.
"""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from planner.core.errors import UsageError
from planner.frameworks.exporters import EXPORTERS, Launch, LaunchFile
from planner.frameworks.exporters.folder import folder_files
from planner.frameworks.exporters.jobs import slurm_file
from planner.frameworks.readers import FileContext, read_text
from planner.models import catalogue
from planner.setup import TrainSetup
from tests.planner.helpers import loaded
from tests.planner.launch_sweep import fewer_setups, request

LAUNCHED = ("hf", "trl", "axolotl", "llamafactory")
MEETING = {"NODE_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29501", "SLURM_NODEID": "1"}
SETUPS = [setup for setup in fewer_setups() if setup.num_gpus > 1]


def launches(target: str, num_nodes: int = 1) -> Iterator[tuple[TrainSetup, Launch]]:
    """Every emitted launch of the sweep's setups on several GPUs."""
    for setup in SETUPS:
        if setup.num_gpus % num_nodes == 0 and (num_nodes == 1 or setup.num_gpus > num_nodes):
            launch = EXPORTERS[target](request(setup, num_nodes=num_nodes))
            if not launch.refused:
                yield setup, launch


def words(command: str) -> list[str]:
    """A command as a shell splits it, with the variables of one node."""
    for name, value in MEETING.items():
        command = command.replace(f"${name}", value)
    return shlex.split(command)


def named(launch: Launch, ending: str) -> LaunchFile:
    return next(file for file in launch.files if file.path.endswith(ending))


@pytest.mark.parametrize(
    ("target", "parallel", "offload", "num_gpus", "threads"),
    [
        ("hf", "fsdp2", "parameters", 1, True),  # Accelerate says one
        ("axolotl", "fsdp2", "parameters", 1, False),  # torchrun nothing
        ("axolotl", "fsdp2", "parameters", 2, True),  # or one of several
        ("hf", "zero2", "optimizer", 1, False),
        ("trl", "zero2", "optimizer", 2, True),
        ("hf", "fsdp2", "none", 2, False),
    ],
)
def test_an_optimizer_on_the_cpu_has_more_than_one_thread(
    target: str, parallel: str, offload: str, num_gpus: int, threads: bool
) -> None:
    """AdamW moves 3.4 GB/s by one thread, and a node's 124 are predicted."""
    setup = TrainSetup(
        method="full", lora_rank=0, precision="bf16-pure", num_gpus=num_gpus, parallel=parallel, offload=offload,
        attention="flash-attention-2",
    )  # fmt: skip
    launch = EXPORTERS[target](request(setup))
    assert not launch.refused
    assert ("OMP_NUM_THREADS=" in launch.command) == threads
    assert any("OMP_NUM_THREADS" in note for note in launch.notes) == threads


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("target", ["hf", "accelerate"])
def test_accelerates_launcher_takes_the_config_and_the_command(
    target: str, num_nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    monkeypatch.chdir(tmp_path)
    accepted, parser = 0, launch_command_parser()
    for setup, launch in launches(target, num_nodes):
        command = re.sub(r"^OMP_NUM_THREADS=\d+ ", "", launch.command)
        if not command.startswith("accelerate"):
            continue
        for file in launch.files:
            if file.path.endswith((".yaml", ".json")):
                (tmp_path / "launch" / file.path).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / "launch" / file.path).write_text(file.text)
        args = parser.parse_args(words(command)[2:])
        args, defaults, _ = _validate_launch_command(args)
        assert defaults is not None
        assert int(args.num_processes) == (1 if setup.parallel == "device-map" else setup.num_gpus)
        assert int(args.num_machines) == num_nodes
        assert args.use_deepspeed == setup.parallel.startswith("zero")
        assert args.use_fsdp == (setup.parallel == "fsdp2" and setup.tensor_degree == 1)
        if num_nodes > 1:
            assert args.rdzv_backend == "c10d"
            assert not args.same_network  # else the rendezvous would be sought on the node itself
            assert (int(args.machine_rank), args.main_process_ip, args.main_process_port) == (1, "node0", 29501)
        if args.use_deepspeed:
            assert (tmp_path / args.deepspeed_config_file).is_file()
            assert num_nodes == 1 or args.deepspeed_multinode_launcher == "standard"
        accepted += 1
    assert accepted >= 30


def test_accelerates_plugins_read_the_sharding_that_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.utils.launch import prepare_multi_gpu_env
    from torch.distributed.fsdp import CPUOffloadPolicy

    monkeypatch.setattr("accelerate.utils.launch.is_port_in_use", lambda port: False)
    path = tmp_path / "accelerate.yaml"
    accepted, parser = 0, launch_command_parser()
    for setup, launch in launches("accelerate"):
        if setup.parallel != "fsdp2":
            continue
        path.write_text(launch.files[0].text)
        args = parser.parse_args(["--config_file", str(path), "script.py"])
        args, _, _ = _validate_launch_command(args)
        with monkeypatch.context() as patch:
            for name, value in prepare_multi_gpu_env(args).items():
                if name.startswith(("FSDP_", "ACCELERATE_", "PARALLELISM_")):
                    patch.setenv(name, value)
            plugin = FullyShardedDataParallelPlugin()
            assert plugin.fsdp_version == 2
            assert plugin.reshard_after_forward == setup.reshard_after_forward
            assert isinstance(plugin.cpu_offload, CPUOffloadPolicy) == (setup.offload == "parameters")
            assert plugin.activation_checkpointing == (setup.checkpointing == 1 and not setup.activation_offload)
            assert plugin.state_dict_type.name == "FULL_STATE_DICT"
            hybrid = setup.shard_degree not in (0, setup.shardable_ranks) or setup.context_degree > 1
            assert os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG") == ("true" if hybrid else None)
            if hybrid:
                mesh = ParallelismConfig()
                assert (mesh.dp_replicate_size, mesh.cp_size) == (setup.num_gpus // setup.shards, setup.context_degree)
                assert mesh.dp_shard_size * mesh.cp_size == setup.shards
                assert mesh.total_size == setup.num_gpus
        accepted += 1
    assert accepted >= 7


@pytest.mark.parametrize("target", ["trl", "hf"])
def test_accelerate_hands_deepspeed_the_sequences_that_are_cut(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed 0.19 `_batch_assertion`: train_batch_size is micro-batch x accumulation x copies; Accelerate takes the
    copies from its data-parallel sizes, transformers all GPUs for them. DeepSpeed 0.19.8 under TRL 1.16 on CPU, 30
    November 2026: two processes with half a sequence each step like one (losses 4.4387, 4.5084, 3.9752, 3.4197); four
    start so, until gloo's all-to-all of two groups, which PyTorch 2.13 sends to ranks of the whole."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import ParallelismConfig
    from accelerate.utils.launch import prepare_extend_env_parallelism_config

    monkeypatch.setattr("accelerate.utils.launch.is_port_in_use", lambda port: False)
    setup = TrainSetup(
        method="full", lora_rank=0, precision="bf16-mixed", loss="full", num_gpus=8, parallel="zero3", context_degree=4
    )
    path = tmp_path / "accelerate.yaml"
    for attention in ("sdpa", "flash-attention-2"):
        launch = EXPORTERS[target](request(setup.replace(attention=attention)))
        assert json.loads(named(launch, "deepspeed.json").text)["train_batch_size"] == "auto"
        path.write_text(named(launch, "accelerate.yaml").text)
        args = launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
        args = _validate_launch_command(args)[0]
        assert args.use_deepspeed
        assert args.use_parallelism_config
        with monkeypatch.context() as patch:
            for name, value in prepare_extend_env_parallelism_config(args, {}).items():
                patch.setenv(name, value)
            mesh = ParallelismConfig()
        assert (mesh.sp_size, mesh.data_parallel_size) == (setup.context_degree, setup.data_degree)
        assert mesh.sp_handler.sp_attn_implementation in launch.files[0].text


def test_torchrun_takes_every_command_that_names_it() -> None:
    from torch.distributed.run import config_from_args, get_args_parser

    accepted, parser = 0, get_args_parser()
    for target in ("hf", "axolotl"):
        for setup, launch in launches(target, num_nodes=2):
            commands = re.findall(r"torchrun(?: --)? (--nnodes .*)", "\n".join((launch.command, *launch.notes)))
            for command in commands:
                script = ["script.py"] * (target == "axolotl")
                config, _, _ = config_from_args(parser.parse_args([*words(command), *script]))
                assert config.min_nodes == config.max_nodes == 2
                assert config.nproc_per_node * 2 == setup.num_gpus
                assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", "node0:29501")
                accepted += 1
    assert accepted >= 45


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("target", LAUNCHED)
def test_slurm_scripts_are_bash_and_ask_for_every_gpu(target: str, num_nodes: int, tmp_path: Path) -> None:
    scripts = set()
    for setup, launch in launches(target, num_nodes):
        job = slurm_file(launch, request(setup, num_nodes=num_nodes))
        assert job.text.startswith("#!/bin/bash\n")
        directives = dict(
            line.removeprefix("#SBATCH --").split("=", 1)
            for line in job.text.splitlines()
            if line.startswith("#SBATCH") and "=" in line
        )
        assert int(directives["nodes"]) == num_nodes
        assert int(directives["nodes"]) * int(directives["gpus-per-node"]) == setup.num_gpus
        assert directives["ntasks-per-node"] == "1"
        body = [line for line in job.text.splitlines() if line and not line.startswith("#")]
        assert job.text.index("#SBATCH") < job.text.index(body[0])  # sbatch stops reading at the first command
        assert "/home" not in job.text
        scripts.add("\n".join(body))
    assert scripts
    path = tmp_path / "all.sh"
    path.write_text("\n".join(f"job{index}() {{\n{text}\n}}" for index, text in enumerate(sorted(scripts))))
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", ["trl", "hf"])
def test_a_slurm_job_prepares_once_starts_run_sh_on_every_node_and_goes_on_when_it_is_queued_again(
    target: str, tmp_path: Path
) -> None:
    """Run with stand-ins for Slurm's commands and the tool, which is found where `run.sh install` put it."""
    export_request = request(TrainSetup(num_gpus=16, parallel="ddp"), num_nodes=2)
    launch = EXPORTERS[target](export_request)
    for file in (*launch.files, *folder_files([launch], export_request)):
        path = tmp_path / "launch" / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text)
    tool = f".venv-{target}/bin/{'trl' if target == 'trl' else 'accelerate'}"
    for name, body in {
        f".venv-{target}/bin/python": 'echo "prepares $@"',
        f".venv-{target}/bin/python3": "true",  # what it asks of the hub
        "scontrol": 'printf "first\\nsecond\\n"',
        "srun": 'shift; for node in 0 1; do SLURM_NODEID=$node "$@"; done',
        tool: 'echo "node $NODE_RANK of $MASTER_ADDR:$MASTER_PORT, ${RESUME_FROM_CHECKPOINT:-} $@"',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "10042",
        "SLURM_CPUS_PER_TASK": "64",
    }  # fmt: skip
    (job,) = tmp_path.glob("launch/*/slurm.sbatch")

    def lines() -> list[str]:
        words = ["bash", str(job)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=600, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    prepares, *nodes = lines()
    assert prepares == "prepares launch/prepare_data.py tokens"
    assert [node[:23] for node in nodes] == ["node 0 of first:20042, ", "node 1 of first:20042, "]
    assert not any("checkpoint-20" in node for node in nodes)
    state = tmp_path / "outputs" / "checkpoint-20" / "trainer_state.json"
    state.parent.mkdir(parents=True)
    state.write_text("{}")
    assert all("outputs/checkpoint-20" in node for node in lines()[1:])


def test_gpus_that_do_not_divide_over_the_nodes_are_refused() -> None:
    with pytest.raises(UsageError, match="evenly"):
        request(TrainSetup(num_gpus=8, parallel="ddp"), num_nodes=3)


def test_deepspeeds_bucket_is_the_plans() -> None:
    import json

    model = loaded("Qwen/Qwen2.5-1.5B")
    full = TrainSetup(method="full", lora_rank=0, num_gpus=4, parallel="zero2")
    lora = TrainSetup(lora_rank=8, lora_targets=("q_proj",), num_gpus=4, parallel="zero2")
    buckets = {}
    for name, setup in (("full", full), ("lora", lora)):
        text = named(EXPORTERS["deepspeed"](request(setup, model=model)), ".json").text
        buckets[name] = json.loads(text)["zero_optimization"]["reduce_bucket_size"]
    # one q_proj of 1536 x 1536 in each of 28 layers
    assert buckets == {"full": 500_000_000, "lora": 28 * 8 * (1536 + 1536)}


@pytest.mark.parametrize("target", ["trl", "axolotl", "hf"])
def test_ddp_looks_for_what_text_gives_no_gradient(target: str) -> None:
    """Without it the second step stops: "Expected to have finished reduction in the prior iteration"."""
    lora, full = (
        {"method": "lora"},
        {"method": "full", "lora_rank": 0, "precision": "bf16-pure", "attention": "flash-attention-2"},
    )
    searches = []
    for fields in (lora, {**lora, "lora_targets": "attention"}, full):
        setup = TrainSetup(**fields, num_gpus=2, parallel="ddp")
        files = EXPORTERS[target](request(setup, model=loaded("google/gemma-3-4b-it"))).files
        searches += re.findall(r"ddp_find_unused_parameters\W+(\w+)", "".join(file.text for file in files))
    assert [word.lower() for word in searches] == ["true", "false", "true"]


def test_what_no_engine_runs_is_refused_with_its_reason() -> None:
    model = catalogue.load("Qwen/Qwen2.5-1.5B")
    pipeline = TrainSetup(method="full", lora_rank=0, num_gpus=4, pipeline_degree=4)
    for target, launch in ((name, EXPORTERS[name](request(pipeline, model=model))) for name in LAUNCHED):
        assert "pipeline" in launch.refused, target
    lora = TrainSetup(num_gpus=2, tensor_degree=2)
    assert "adapters" in EXPORTERS["trl"](request(lora)).refused
    eight = TrainSetup(num_gpus=2, parallel="fsdp2", optimizer="adamw-8bit")
    assert "DTensor" in EXPORTERS["hf"](request(eight)).refused


def test_tensor_parallelism_is_named_in_each_tools_words() -> None:
    setup = TrainSetup(
        method="full", lora_rank=0, precision="bf16-mixed", num_gpus=16, parallel="fsdp2", tensor_degree=2,
        shard_degree=4, loss="chunked",
    )  # fmt: skip
    trl = yaml.safe_load(EXPORTERS["trl"](request(setup)).files[0].text)
    assert trl["model_init_kwargs"]["distributed_config"] == {
        "tp_size": 2, "fsdp_size": 4, "dp_replicate_size": 2, "fsdp_mixed_precision": True,
    }  # fmt: skip
    assert trl["save_only_model"] is True
    axolotl = yaml.safe_load(EXPORTERS["axolotl"](request(setup.replace(loss="full"))).files[0].text)
    assert (axolotl["tensor_parallel_size"], axolotl["dp_shard_size"], axolotl["dp_replicate_size"]) == (2, 4, 2)


def test_torchtitan_takes_only_the_models_it_has_and_marks_what_is_missing() -> None:
    import tomllib

    setup = TrainSetup(
        method="full", lora_rank=0, precision="bf16-pure", num_gpus=8, pipeline_degree=4, parallel="fsdp2",
        micro_batch_seqs=2, accumulation_steps=16, loss="full",
    )  # fmt: skip
    qwen = catalogue.load("Qwen/Qwen3-8B")
    launch = EXPORTERS["torchtitan"](request(setup, model=qwen, model_id="/data/someone/Qwen3-8B", dataset=None))
    text = launch.files[0].text
    assert "/data/someone" not in text
    values = tomllib.loads(text)
    assert values["model"] == {"name": "qwen3", "flavor": "8B", "hf_assets_path": "./Qwen3-8B"}
    reading = read_text(text, "torchtitan.toml", around=FileContext(num_gpus=8))
    assert reading.model_id == "Qwen/Qwen3-8B"  # the folder is not here: name and flavor say it
    assert values["parallelism"]["pipeline_parallel_microbatch_size"] == 2
    assert values["training"]["local_batch_size"] == 2 * 16  # what is in flight in one step
    assert values["training"]["global_batch_size"] == setup.global_batch_seqs == 2 * 16 * 2
    for name, taken in {
        "meta-llama/Llama-3.1-8B": True,
        "meta-llama/Meta-Llama-3-8B": False,  # its rotary frequencies are not scaled, torchtitan's are
        "Qwen/Qwen2.5-7B": False,
    }.items():
        model = loaded(name)
        assert (not EXPORTERS["torchtitan"](request(setup, model=model)).refused) == taken, name
