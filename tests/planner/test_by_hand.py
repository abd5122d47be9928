"""Numbers worked out by hand from the sources that the docstrings name: what no wider test noticed when it changed.

Each stands for a planted fault that the rest of the suite let live (tools/planted_faults.jsonl): states and temporaries
of rarer optimizers, the fused losses, allocator gap, and the bytes and kernels of the speed model's rarer paths.

SmolLM2-135M: 30 layers, hidden 576, MLP 1,536, 9 query and 3 key heads of 64, vocabulary 49,152 (tied).
"""

from dataclasses import fields, replace
from typing import Any

import pytest

from planner.core.units import MIB
from planner.frameworks.readers.common import KNOWN_OPTIMIZERS
from planner.hardware.gpus import find_gpu
from planner.memory.engines import engine_of
from planner.memory.model import predict_memory
from planner.memory.rank_part import rank_parts
from planner.memory.states import paged_bytes, state_bytes, step_bytes
from planner.memory.step import profile_loss_gap
from planner.memory.trained import trained_parameters
from planner.models.catalogue import load
from planner.models.spec import ModelSpec
from planner.options.optimizers import OPTIMIZERS, Optimizer
from planner.planning.predict import predict
from planner.setup import TrainSetup
from planner.speed.roofline.calibration import load_calibration
from planner.speed.roofline.model import SpeedModel
from planner.speed.roofline.types import CURRENT
from tests.planner.helpers import loaded, loss_chain

A100 = find_gpu("a100-80gb")
LAYERS, HIDDEN, VOCAB = 30, 576, 49_152


def smol() -> ModelSpec:
    return loaded("HuggingFaceTB/SmolLM2-135M")


# Memory


@pytest.mark.parametrize(
    ("optimizer", "dtype", "expected"),
    [
        ("adamw", "fp32", 8_000_000),
        ("adamw-fused", "bf16", 4_000_000),
        ("adamw-8bit", "bf16", 2 * (1_000_000 + 4 * 3906)),  # 3,906 whole blocks of 256
        ("lion-8bit", "fp32", 1_000_000 + 4 * 3906),
        ("adafactor", "bf16", 4 * 777),
        ("paged-adamw-8bit", "bf16", 2 * 4 * 3906),  # the scales are never paged
        ("paged-adamw-32bit", "bf16", 0),
        ("sgd", "fp32", 0),
    ],
)
def test_optimizer_states(optimizer: str, dtype: str, expected: int) -> None:
    assert state_bytes(1_000_000, dtype, optimizer, matrix_edge_sum=777) == expected


def test_a_paged_optimizer_pages_no_tensor_below_100_000_elements() -> None:
    """bitsandbytes `get_state_buffer`: of rank 16 all adapters of SmolLM2-135M are smaller, of rank 1,024 none."""
    for rank, share in ((16, 1.0), (1024, 0.0)):
        trained = trained_parameters(smol(), TrainSetup(lora_rank=rank))
        assert trained.small == share * trained.num
        states = state_bytes(trained.num, trained.dtype, "paged-adamw-32bit", small=trained.small)
        assert states == 8 * share * trained.num


def test_a_plan_tells_the_paged_states() -> None:
    setup = TrainSetup(method="full", lora_rank=0, precision="bf16-pure", optimizer="paged-adamw-32bit")
    notes = " ".join(predict(smol(), A100, setup).notes)
    assert "1.00 GiB" in notes  # 8 x 134,515,008


def test_chunked_loss_is_cut_at_4096_tokens_and_32768_words() -> None:
    chain = loss_chain(
        loss="chunked", tokens=10_000, vocab_size=100_000, hidden_size=64, logits_dtype="bf16", hidden_dtype="bf16",
        head_trained=False, softcap=False, head_cast=True,
    )  # fmt: skip
    assert chain.loss_bytes == 2 * 4096 * 32_768 + 2 * 64 * 32_768 + 2 * 10_000 * 64


@pytest.mark.parametrize(
    ("model", "fields", "stream_mib", "share"),
    [
        ("meta-llama/llama-3.2-1b", {"precision": "bf16-pure"}, 12, 0.34),
        ("meta-llama/llama-3.2-1b", {"precision": "bf16-pure", "kernels": "liger"}, 12, 0.18),
        ("meta-llama/llama-3.2-1b", {"precision": "bf16-autocast"}, 4, 0.34),
        ("meta-llama/llama-3.2-1b", {"precision": "bf16-autocast"}, 12, 0.18),
        ("meta-llama/llama-3.2-1b", {"method": "qlora", "quantization": "nf4"}, 18, 0.34),
        ("meta-llama/llama-3.2-1b", {"method": "qlora", "quantization": "nf4"}, 32, 0.18),
        ("meta-llama/llama-3.2-1b", {"method": "qlora", "quantization": "nf4", "checkpointing": 2}, 18, 0.18),
        (
            "meta-llama/llama-3.2-1b",
            {"method": "qlora", "quantization": "nf4", "checkpointing": 2, "kernels": "liger"},
            18,
            0.34,
        ),
        ("meta-llama/llama-3.2-1b", {"precision": "bf16-pure", "checkpointing": 2}, 32, 0.26),
        ("google/gemma-2b", {"precision": "bf16-pure"}, 12, 0.18),
        ("openai-community/gpt2-large", {"precision": "bf16-pure"}, 12, 0.18),
        ("ibm-granite/granite-3.1-2b-base", {"precision": "bf16-pure"}, 12, 0.0),
    ],
)
def test_blocks_of_logits_left_open_are_those_of_a_replay(
    model: str, fields: dict[str, Any], stream_mib: int, share: float
) -> None:
    """Dry runs of 29 November 2026 on an A100, whose workspace is 8,320 KiB: two blocks (0.34), one (0.18) or none."""
    setup, spec = TrainSetup(**{"loss": "full", "kernels": "eager", "checkpointing": 1, **fields}), load(model)
    assert spec is not None
    assert profile_loss_gap(spec, setup, 8320 * 1024).at(stream_mib * MIB) == share


# Speed


def test_dora_under_dropout_keeps_every_matrix() -> None:
    """Dry runs on an RTX 4090: 5.50 GiB without dropout, 7.53 with it (peft 0.21 dora.py, `weight.to(x.dtype)`)."""
    model, setup = load("meta-llama/Llama-3.2-1B"), TrainSetup(
        method="lora", adapter="dora", lora_rank=8, precision="bf16-autocast", seq_len_tokens=512, micro_batch_seqs=1,
        checkpointing=0,
    )  # fmt: skip
    for dropout, device_gib in ((0.0, 5.50), (0.05, 7.53)):
        dropped = setup.replace(lora_dropout=dropout)
        predicted = predict(model, find_gpu("rtx-4090"), dropped, None).peak_device_bytes
        assert predicted / 1024**3 == pytest.approx(device_gib, rel=0.04)


def test_paged_states_pay_for_what_has_no_room() -> None:
    """Where peak and states fit, the step of adamw-8bit; on a card that ends at the peak, all of them move."""
    setup = TrainSetup(method="full", lora_rank=0, precision="bf16-pure", expandable_segments=False)
    roomy, plain = (predict(smol(), A100, setup.replace(optimizer=name)) for name in ("paged-adamw-8bit", "adamw-8bit"))
    assert roomy.tokens_per_s == pytest.approx(plain.tokens_per_s)
    full = replace(A100, memory_bytes=roomy.peak_device_bytes)
    paged = predict(smol(), full, setup.replace(optimizer="paged-adamw-8bit"))
    states = 2 * (smol().num_params + 4 * (smol().num_params // 256))
    link = SpeedModel(smol(), full, load_calibration(), CURRENT)
    assert link.paging_s("paged-adamw-8bit", smol().num_params, 2) == pytest.approx(2 * states / link.host_rate)
    parts = paged.time_parts_s
    assert 0 < parts["paging"] <= 2 * states / link.host_rate  # the rest hides behind the host's loop over tensors
    assert paged.tokens_per_s == pytest.approx((roomy.tokens_per_s or 0) * (1 - parts["paging"] / sum(parts.values())))
    half = replace(A100, memory_bytes=roomy.peak_device_bytes + states // 4)  # half of them: what is next was evicted
    assert predict(smol(), half, setup.replace(optimizer="paged-adamw-8bit")).tokens_per_s == paged.tokens_per_s


def test_a_host_bound_step_has_a_wide_band() -> None:
    """One short sequence of the 135M: the host sets the pace, and a slower one takes its time; not with eight long."""
    setup = TrainSetup(method="full", lora_rank=0, precision="bf16-pure", checkpointing=0)
    short, long = (
        predict(smol(), A100, setup.replace(seq_len_tokens=128)),
        predict(smol(), A100, setup.replace(seq_len_tokens=2048, micro_batch_seqs=8)),
    )
    assert (short.time_band_fraction or 0) > 0.5 > 0.25 > (long.time_band_fraction or 0)
    assert any("twice as slow" in note for note in short.notes)
    assert not any("twice as slow" in note for note in long.notes)


def test_an_optimizers_row_says_what_it_takes() -> None:
    """Forgotten states or passes are an error at import, an unknown name one where it is asked for, never 0 bytes."""
    row = {field.name: getattr(OPTIMIZERS["adamw"], field.name) for field in fields(Optimizer)}
    for name in ("name", "states", "temporaries", "passes", "kernels_per_tensor", "class_path", "arguments"):
        with pytest.raises(TypeError, match=name):
            Optimizer(**{key: value for key, value in row.items() if key != name})
    for function in (state_bytes, lambda num, _, name: paged_bytes(num, name)):
        with pytest.raises(KeyError):
            function(1000, "bf16", "adamw-4bit")
    with pytest.raises(KeyError):
        step_bytes(1000, "bf16", "adamw-4bit", largest_tensor=0)


def test_no_name_of_an_optimizer_means_two() -> None:
    names = [
        name for row in OPTIMIZERS.values() for name in (row.transformers or row.name, *row.aliases, *row.same_states)
    ]
    assert len(names) == len(set(names))


def test_adapters_that_no_gradient_reaches_have_no_states() -> None:
    """Of an image encoder on text: paged 8-bit states of Gemma-3-4B at rank 64 are 12,640,256 bytes in a dry run
    (30 November 2026; 52 MB with the encoder's). DataParallel's broadcast gives zeros in its backward: all train."""
    model, gpu = loaded("google/gemma-3-4b-it"), find_gpu("a100-80gb")
    setup = TrainSetup(lora_rank=64, seq_len_tokens=256, checkpointing=1, loss="chunked", optimizer="paged-adamw-8bit")
    states = [term.size_bytes for term in predict_memory(model, gpu, setup).terms if term.name.startswith("states of")]
    assert states == [pytest.approx(12_640_256, rel=0.001)]
    trained = trained_parameters(model, setup)
    for layout, num in (({}, trained.reached.num), ({"num_gpus": 2, "parallel": "dp"}, trained.num)):
        spread = setup.replace(optimizer="adamw-fused", **layout)
        assert engine_of(spread).state(rank_parts(model, spread)[0], spread, accumulated=False).local.num == num
    assert trained.reached.num < trained.num


@pytest.mark.parametrize("name", [name for name, row in OPTIMIZERS.items() if not row.paged and name != "adafactor"])
def test_an_optimizers_class_keeps_the_states_that_its_row_says(name: str) -> None:
    """Two steps on CPU, of a matrix in bf16; a paged class differs in where its states lie."""
    torch = pytest.importorskip("torch")
    if OPTIMIZERS[name].bitsandbytes:
        pytest.importorskip("bitsandbytes")
    from probes.stack.optimizers import make_optimizer

    weight = torch.nn.Parameter(torch.randn(128, 256).to(torch.bfloat16))
    optimizer = make_optimizer(name, [weight])
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    kept = [state for key, state in optimizer.state[weight].items() if "qmap" not in key and torch.is_tensor(state)]
    num_bytes = sum(state.nbytes for state in kept if state.numel() > 1)
    assert num_bytes == state_bytes(weight.numel(), "bf16", name)


def test_every_optimizer_of_transformers_has_a_row_or_a_bound() -> None:
    names = pytest.importorskip("transformers.training_args").OptimizerNames
    assert {name.value for name in names} <= KNOWN_OPTIMIZERS
