"""What engines refuse, and that each refusal names where it was read."""

import pytest

from planner.hardware.gpus import find_gpu
from planner.memory.engines import ENGINES, engine_named, why_not
from planner.options.optimizers import OPTIMIZERS as ROWS
from planner.planning.predict import cannot_run
from planner.setup import TrainSetup
from planner.setup.allowed import OPTIMIZERS, PARALLELS, SHARDED
from tests.planner.helpers import loaded

FULL = {"method": "full", "precision": "bf16-mixed", "lora_rank": 0}
INT8 = {"method": "qlora", "quantization": "int8"}
NF4 = {"method": "qlora", "quantization": "nf4-double"}


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({**NF4, "parallel": "dp"}, "_wrap_model"),
        ({**INT8, "parallel": "fsdp2"}, "2833"),
        ({**INT8, "parallel": "zero3"}, "Int8Params"),
        ({**NF4, "kbit_fp32_cast": True, "parallel": "fsdp2"}, "no effect"),
        ({**NF4, "kbit_fp32_cast": True, "parallel": "zero2"}, "no effect"),
        ({"parallel": "fsdp2", "optimizer": "adamw-8bit"}, "1633"),
        ({"parallel": "fsdp2", "optimizer": "paged-adamw-8bit"}, "1633"),
        ({"parallel": "fsdp2", "optimizer": "adafactor"}, "Adafactor"),
        ({"parallel": "fsdp2", "loss": "liger"}, "mixed torch.Tensor and DTensor"),
        ({"parallel": "zero2", "offload": "optimizer", "optimizer": "adamw-8bit"}, "DeepSpeedCPUAdam"),
        ({**NF4, "tensor_degree": 8}, "packed"),
        ({"tensor_degree": 4, "parallel": "ddp"}, "ParallelismConfig"),
        ({"tensor_degree": 4, "parallel": "zero2"}, "ParallelismConfig"),
        ({"tensor_degree": 8}, "split by rows"),
        ({"pipeline_degree": 8}, "peft"),
        ({**FULL, "pipeline_degree": 4, "parallel": "zero2"}, "pipe/engine.py"),
        ({**FULL, "pipeline_degree": 8, "loss": "liger"}, "liger"),
        ({**FULL, "pipeline_degree": 8}, "only inside FSDP2"),
        ({**FULL, "pipeline_degree": 4, "parallel": "ddp"}, "DDP does not combine"),
    ],
)
def test_refusals_name_their_source(fields: dict[str, object], word: str) -> None:
    reason = why_not(loaded(), TrainSetup(num_gpus=8, **fields))  # type: ignore[arg-type]
    assert word in reason


@pytest.mark.parametrize(
    "fields",
    [
        {"parallel": "ddp"},
        {**FULL, "parallel": "ddp"},
        {**NF4, "parallel": "ddp", "optimizer": "paged-adamw-8bit"},
        {**INT8, "parallel": "ddp"},
        {**INT8, "parallel": "zero2"},
        {**NF4, "parallel": "zero3"},
        {**NF4, "parallel": "fsdp2"},
        {**FULL, "parallel": "fsdp2", "loss": "liger"},
        {**FULL, "parallel": "fsdp2", "offload": "parameters"},
        {**FULL, "parallel": "zero3", "offload": "parameters"},
        {**FULL, "parallel": "zero1", "optimizer": "adamw-8bit"},
        {**FULL, "parallel": "fsdp2", "tensor_degree": 2},
        {**FULL, "tensor_degree": 8},
        {**FULL, "pipeline_degree": 8, "precision": "bf16-pure"},
        {**FULL, "pipeline_degree": 2, "parallel": "fsdp2"},
        {**NF4, "parallel": "device-map"},
    ],
)
def test_what_the_engines_run(fields: dict[str, object]) -> None:
    assert why_not(loaded(), TrainSetup(num_gpus=8, **fields)) == ""  # type: ignore[arg-type]


@pytest.mark.parametrize(("optimizer", "runs"), [("adafactor", False), ("adamw-8bit", False), ("adamw", True)])
def test_a_job_whose_optimizer_mixes_tensors_cannot_run(optimizer: str, runs: bool) -> None:
    """What `plan check` asks of a job that exists, as `plan` asks it of one that it chooses."""
    setup = TrainSetup(num_gpus=4, parallel="fsdp2", optimizer=optimizer, **FULL)  # type: ignore[arg-type]
    assert (cannot_run(loaded(), find_gpu("l40s"), setup) == ()) is runs is (why_not(loaded(), setup) == "")


def test_one_gpu_is_never_refused() -> None:
    assert why_not(loaded(), TrainSetup(method="qlora", quantization="int8")) == ""


@pytest.mark.parametrize(
    ("name", "fields", "word"),
    [
        ("qwen/qwen2.5-1.5b", {"pipeline_degree": 2}, "ties its head"),
        ("microsoft/phi-3.5-mini-instruct", {"tensor_degree": 2}, "qkv_proj"),
        ("qwen/qwen2.5-1.5b", {"tensor_degree": 8, "num_gpus": 8}, "heads"),
        ("google-t5/t5-base", {"pipeline_degree": 2}, "encoder-decoder"),
        ("google-t5/t5-base", {"tensor_degree": 2}, "t5"),
    ],
)
def test_models_that_cannot_be_split(name: str, fields: dict[str, object], word: str) -> None:
    model = loaded(name)
    reason = why_not(model, TrainSetup(**{"num_gpus": 2, **FULL, **fields}))  # type: ignore[arg-type]
    if model.is_encoder_decoder and "pipeline_degree" in fields:
        assert reason
    else:
        assert word in reason


def test_dtensor_optimizers_step_and_the_others_raise() -> None:
    """The claim of `steps_dtensors`: plain AdamW and SGD step a DTensor, Adafactor and bitsandbytes do not."""
    torch = pytest.importorskip("torch")
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    optimization = pytest.importorskip("transformers.optimization")
    bitsandbytes = pytest.importorskip("bitsandbytes")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        module = torch.nn.Linear(64, 128)
        fully_shard(module)
        makers = {
            "adamw": lambda p: torch.optim.AdamW(p, foreach=True),
            "adamw-fused": lambda p: torch.optim.AdamW(p, fused=True),
            "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
            "adafactor": lambda p: optimization.Adafactor(p, scale_parameter=False, relative_step=False, lr=1e-3),
            "adamw-8bit": lambda p: bitsandbytes.optim.AdamW8bit(p),
            "lion-8bit": lambda p: bitsandbytes.optim.Lion8bit(p),
        }
        assert set(makers) <= set(OPTIMIZERS)
        for name, make in makers.items():
            optimizer = make(module.parameters())
            module(torch.randn(4, 64)).sum().backward()
            if ROWS[name].steps_dtensors:
                optimizer.step()
            else:
                with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
                    optimizer.step()
            optimizer.zero_grad()
    finally:
        dist.destroy_process_group()


def test_every_way_of_working_together_has_an_engine() -> None:
    """And its words; what is cut says so."""
    assert tuple(ENGINES) == tuple(sorted(PARALLELS, key=list(ENGINES).index))
    engines = {name: engine_named(name) for name in PARALLELS}
    assert (
        len({engine.tie_break for engine in engines.values()})
        == len({type(engine) for engine in engines.values()})
        == 8
    )
    assert {name for name, engine in engines.items() if engine.shares} == set(SHARDED)
    assert all(engine.name for name, engine in engines.items() if name != "none")
