"""Every emitted file, read back, gives the setup that runs: the planned one with the declared differences."""

from pathlib import Path
from typing import Any

import pytest

from planner.frameworks.exporters import EXPORTERS, Launch
from planner.frameworks.exporters.install import install_calls
from planner.frameworks.readers import FileContext, ReadConfig, canonical, read_text
from planner.models import catalogue
from planner.options.images import Images
from planner.options.rollouts import Rollout
from planner.setup import AROUND_FIELDS, LAYOUT_FIELDS, OF_OTHERS, TrainSetup
from tests.planner.launch_sweep import fewer_setups, objective_layouts, request
from tests.whole import WHOLE

SETUPS = fewer_setups()
SHARDING = ("shard_degree", "reshard_after_forward", "offload", "context_degree")
BESIDE = ("run.sh", "README.md", ".py")
"""Files that no reader of a configuration looks for."""
TARGETS = ("trl", "hf", "axolotl", "llamafactory", "unsloth", "torchtitan")


def read_back(launch: Launch, setup: TrainSetup, folder: Path, num_gpus: int = 1) -> ReadConfig:
    """The first of a launch's files, beside the others where it names them, as its head starts it: on how many GPUs
    layers lie that one process spreads only the machine knows."""
    for file in launch.files[1:]:
        if not file.path.endswith(BESIDE):
            (folder / "launch" / file.path).parent.mkdir(parents=True, exist_ok=True)
            (folder / "launch" / file.path).write_text(file.text)
    around = FileContext(num_gpus=setup.num_gpus if setup.parallel == "device-map" else num_gpus, roots=(folder,))
    return read_text(launch.files[0].text, launch.files[0].path, around=around)


@pytest.mark.parametrize("target", TARGETS)
def test_reading_back_gives_the_setup_that_runs(target: str, tmp_path: Path) -> None:
    """Of every setup half of the tools' files, of every tool's files half."""
    num_read = 0
    for setup in SETUPS if WHOLE else SETUPS[TARGETS.index(target) % 2 :: 2]:
        model = catalogue.load("Qwen/Qwen3-8B") if target == "torchtitan" else None
        launch = EXPORTERS[target](request(setup, model=model))
        if launch.refused:
            continue
        back = read_back(launch, setup, tmp_path)
        assert canonical(back.setup) == canonical(launch.runs), (target, setup)
        assert back.model_id == "Qwen/Qwen2.5-1.5B"
        assert not back.approximations, back.approximations
        num_read += 1
    assert num_read >= {"unsloth": 5, "torchtitan": 4}.get(target, 22)


@pytest.mark.parametrize("target", ["trl", "axolotl", "llamafactory"])
def test_gpus_that_a_person_names_go_over_those_of_a_plans_own_head(target: str, tmp_path: Path) -> None:
    setup = TrainSetup(parallel="ddp", num_gpus=8, attention="flash-attention-2")
    launch = EXPORTERS[target](request(setup))
    assert [read_back(launch, setup, tmp_path, num).setup.num_gpus for num in (1, 4)] == [8, 4]


@pytest.mark.parametrize(("target", "num"), [("trl", 56), ("hf", 10), ("axolotl", 10), ("llamafactory", 12)])
def test_an_objective_on_several_gpus_reads_back(target: str, num: int, tmp_path: Path) -> None:
    num_read = 0
    for setup in objective_layouts():
        launch = EXPORTERS[target](request(setup))
        if launch.refused:
            continue
        back = read_back(launch, setup, tmp_path)
        assert canonical(back.setup) == canonical(launch.runs), (target, setup)
        num_read += 1
    assert num_read == num


@pytest.mark.parametrize("target", ["axolotl", "llamafactory", "mlx"])
@pytest.mark.parametrize("layers", [4, -4, (0, 4, 8)], ids=str)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_layers_that_train_alone_read_back(target: str, layers: int | tuple[int, ...], method: str) -> None:
    """Axolotl names any; LLaMA-Factory's freeze takes the first or last, without adapters, in fp32 beside 16 bits;
    MLX-LM the last (`model.layers[-max(num_layers, 0):]`)."""
    fields = {"attention": "flash-attention-2" if target == "axolotl" else "sdpa", "loss": "full"}
    fields["precision"] = "bf16-autocast" if method == "lora" else "bf16-mixed"
    if target == "mlx":
        fields |= {"precision": "bf16-pure", "kernels": "eager"}
    setup = TrainSetup(method=method, lora_rank=16 * (method == "lora"), trained_layers=layers, **fields)
    model = catalogue.load("Qwen/Qwen2.5-1.5B")
    assert model is not None
    launch = EXPORTERS[target](request(setup, model=model))
    written = {"axolotl": True, "llamafactory": method == "full" and isinstance(layers, int), "mlx": layers == 4}[
        target
    ]
    assert bool(launch.refused) != written
    if written:
        back = read_text(launch.files[0].text, launch.files[0].path, model=model)
        assert canonical(back.setup) == canonical(launch.runs)
        assert back.setup.trained_layers == layers
        assert not back.approximations


def test_accelerate_and_deepspeed_files_read_back_over_their_base(tmp_path: Path) -> None:
    seen = 0
    for setup in SETUPS:
        for target in ("accelerate", "deepspeed"):
            launch = EXPORTERS[target](request(setup))
            if launch.refused or setup.parallel == "device-map":
                continue
            for file in launch.files:
                (tmp_path / Path(file.path).name).write_text(file.text)
            back = read_text(
                launch.files[0].text,
                Path(launch.files[0].path).name,
                base=TrainSetup(**{**plain(setup), "accumulation_steps": 1}),
                around=FileContext(num_gpus=setup.num_gpus, roots=(tmp_path,)),
            )
            assert (back.setup.num_gpus, back.setup.parallel) == (setup.num_gpus, setup.parallel)
            assert back.setup.layout == setup.layout
            if target == "deepspeed":
                assert back.setup.micro_batch_seqs == setup.micro_batch_seqs
                assert back.setup.accumulation_steps == setup.accumulation_steps
            seen += 1
    assert seen >= 60


def plain(setup: TrainSetup) -> dict[str, Any]:
    """The fields of a setup on one GPU."""
    values = {name: getattr(setup, name) for name in TrainSetup.__dataclass_fields__ if name not in LAYOUT_FIELDS}
    return {**values, "num_gpus": 1, "parallel": "none"}


@pytest.mark.parametrize("target", sorted(EXPORTERS))
def test_every_field_is_written_or_declared(target: str) -> None:
    """Changing any field changes the files, or the target declares the difference or refuses."""
    base = TrainSetup(method="qlora", quantization="nf4-double", loss="chunked")
    full = base.replace(method="full", quantization="none", lora_rank=0, loss="full")
    contrastive = base.replace(objective="embedding", loss="full", micro_batch_seqs=2)
    changes = {
        "method": base.replace(method="lora", quantization="none"),
        "precision": base.replace(precision="bf16-pure"),
        "quantization": base.replace(quantization="int8"),
        "kbit_fp32_cast": base.replace(kbit_fp32_cast=True),
        "modules_to_save": base.replace(modules_to_save=("lm_head",)),
        "trained_layers": base.replace(trained_layers=2),
        "adapter": base.replace(adapter="rslora"),
        "lora_rank": base.replace(lora_rank=32),
        "lora_targets": base.replace(lora_targets="attention"),
        "lora_dropout": base.replace(lora_dropout=0.1),
        "adapter_dtype": base.replace(adapter_dtype="fp32"),
        "optimizer": base.replace(optimizer="paged-adamw-8bit"),
        "attention": base.replace(attention="eager"),
        "checkpointing": base.replace(checkpointing=0),
        "loss": base.replace(loss="full"),
        "objective": base.replace(objective="dpo"),
        "rollout": base.replace(objective="grpo", accumulation_steps=8, rollout=Rollout(completion_tokens=64)),
        "precomputed_reference": base.replace(objective="dpo", precomputed_reference=True),
        "hard_negatives": contrastive.replace(hard_negatives=1),
        "cached_seqs": contrastive.replace(cached_seqs=1),
        "micro_batch_seqs": base.replace(micro_batch_seqs=2),
        "accumulation_steps": base.replace(accumulation_steps=2),
        "seq_len_tokens": base.replace(seq_len_tokens=512),
        "packing": base.replace(packing=True),
        "frozen_encoder": base.replace(method="full", quantization="none", lora_rank=0, frozen_encoder=True),
        "images": base.replace(images=Images(width=336, height=336)),
        "compile": base.replace(compile=True),
        "kernels": base.replace(kernels="liger"),
        "activation_offload": base.replace(activation_offload=True),
        "selective_checkpointing": base.replace(selective_checkpointing=True),
        "quantize_experts": base.replace(quantize_experts=True),
        "num_gpus": base.replace(num_gpus=2, parallel="ddp"),
        "parallel": base.replace(num_gpus=2, parallel="zero2"),
        "tensor_degree": base.replace(num_gpus=2, tensor_degree=2),
        "context_degree": base.replace(num_gpus=4, parallel="fsdp2", context_degree=2),
        "expert_degree": full.replace(num_gpus=4, parallel="fsdp2", expert_degree=2),
        "pipeline_degree": base.replace(num_gpus=2, pipeline_degree=2),
        "pipeline_schedule": base.replace(num_gpus=2, pipeline_degree=2, pipeline_schedule="gpipe"),
        "shard_degree": base.replace(num_gpus=4, parallel="fsdp2", shard_degree=2),
        "reshard_after_forward": base.replace(num_gpus=4, parallel="fsdp2", reshard_after_forward=False),
        "offload": base.replace(num_gpus=4, parallel="fsdp2", offload="parameters"),
    }
    # what a field is compared with: the same job without it
    layout = {
        "pipeline_schedule": base.replace(num_gpus=2, pipeline_degree=2),
        "expert_degree": full.replace(num_gpus=4, parallel="fsdp2"),
        "rollout": base.replace(objective="grpo", accumulation_steps=8),
        "precomputed_reference": base.replace(objective="dpo"),
        "frozen_encoder": base.replace(method="full", quantization="none", lora_rank=0),
        **dict.fromkeys(("hard_negatives", "cached_seqs"), contrastive),
        **dict.fromkeys(SHARDING, base.replace(num_gpus=4, parallel="fsdp2")),
    }
    # a file is run by its target's own stack, started as every launch file here is, FSDP2: `TrainSetup.run_by`; which
    # linear attention runs is decided by what run.sh installs; how long samples are, by the data
    exempt = {
        *AROUND_FIELDS,
        "fsdp_version",
        "sync_each_batch",
        "zero_buffers",
        "linear_attention",
        "uneven",
        *OF_OTHERS,
    }
    assert set(changes) == set(TrainSetup.__dataclass_fields__) - exempt
    launcher_only = {"num_gpus", "parallel", "precision", "micro_batch_seqs", "accumulation_steps", *LAYOUT_FIELDS}
    for field, setup in changes.items():
        before = EXPORTERS[target](request(layout.get(field, base), hyper=request(base).hyper))
        if target in ("accelerate", "deepspeed") and field not in launcher_only:
            continue  # these files hold no method or model, and say so
        launch = EXPORTERS[target](request(setup, hyper=request(base).hyper))
        declared = launch.refused or field in {difference.field for difference in launch.differences}
        previously = field in {difference.field for difference in before.differences}
        same = _settings_only(launch) == _settings_only(before)
        if target == "accelerate" and field in ("micro_batch_seqs", "accumulation_steps"):
            continue
        assert declared or previously or not same or before.refused, field


def test_which_linear_attention_runs_is_what_is_installed() -> None:
    model = catalogue.load("Qwen/Qwen3.5-4B")
    for path in ("torch", "fla"):
        export_request = request(TrainSetup(linear_attention=path, loss="full"), model=model)
        words = [word for call in install_calls(EXPORTERS["hf"](export_request), export_request) for word in call]
        assert any(word.startswith("flash-linear-attention") for word in words) == (path == "fla")


def _settings_only(launch: Launch) -> list[str]:
    """The command and the files without their comment lines."""
    lines = [line for file in launch.files for line in file.text.splitlines() if not line.startswith("#")]
    return [launch.command, *lines]
