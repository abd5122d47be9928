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
from planner.memory.dtypes import dtype_policy_of
from planner.memory.engines import engine_of
from planner.memory.micro_batch import weight_casts
from planner.memory.model import predict_memory
from planner.memory.rank_part import rank_parts
from planner.memory.states import int8_bytes as int8_weight_bytes
from planner.memory.states import nf4_bytes, paged_bytes, state_bytes, step_bytes
from planner.memory.step import allocator_gap_bytes, formula_loss_gap_share, profile_loss_gap
from planner.memory.trained import trained_parameters
from planner.models.catalogue import load
from planner.models.spec import LinearSpec, ModelSpec
from planner.options.losses import LOSSES
from planner.options.optimizers import OPTIMIZERS, Optimizer
from planner.planning.predict import predict
from planner.setup import TrainSetup
from planner.speed.roofline.calibration import load_calibration
from planner.speed.roofline.counts import Mixer, eager_score_bytes, inventory, layer_traffic
from planner.speed.roofline.model import EIGHT_BIT_STATE_S, H100_SMS, SpeedModel, int8_bytes
from planner.speed.roofline.types import CURRENT, Conditions, matmul_s
from tests.planner.helpers import loaded, loss_chain

A100 = find_gpu("a100-80gb")
LAYERS, HIDDEN, VOCAB = 30, 576, 49_152
EDGES = (576 + 576) * 2 + (576 + 192) * 2 + (576 + 1536) * 3
"""Rows and columns of a layer's seven matrices: q and o, k and v, gate, up and down."""
WEIGHTS = 576 * 576 * 2 + 576 * 192 * 2 + 576 * 1536 * 3


def smol() -> ModelSpec:
    return loaded("HuggingFaceTB/SmolLM2-135M")


def speed(conditions: Conditions = CURRENT) -> SpeedModel:
    return SpeedModel(smol(), A100, load_calibration(), conditions)


# Memory


def test_lora_trains_rank_times_the_edges() -> None:
    """A [rank, in] and B [out, rank]; Adafactor keeps a row and a column of each: in + rank and rank + out."""
    trained = trained_parameters(smol(), TrainSetup(lora_rank=8))
    assert trained.num == LAYERS * 8 * EDGES == 2_442_240
    assert trained.edge_sum == LAYERS * (EDGES + 7 * 2 * 8) == 308_640
    assert trained.largest == 8 * 1536


def test_full_fine_tuning_trains_every_matrix_and_table() -> None:
    trained = trained_parameters(smol(), TrainSetup(method="full", lora_rank=0))
    assert trained.num == LAYERS * (WEIGHTS + 2 * HIDDEN) + VOCAB * HIDDEN + HIDDEN == 134_515_008
    assert trained.edge_sum == LAYERS * EDGES + VOCAB + HIDDEN
    assert trained.largest == VOCAB * HIDDEN


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


def test_transformers_trainer_keeps_8_bit_states_of_embeddings_in_32_bits() -> None:
    """`Trainer.create_optimizer` overrides every nn.Embedding; loops of one's own do not."""
    setup = TrainSetup(method="full", lora_rank=0, precision="bf16-pure", optimizer="adamw-8bit")
    states = {
        stack: next(term.size_bytes for term in predict_memory(smol(), A100, setup.replace(stack=stack)).terms
                    if term.name == "states of adamw-8bit")
        for stack in ("trl", "plain-loop", "accelerate-loop-drops-outputs")
    }  # fmt: skip
    table = VOCAB * HIDDEN
    assert states["trl"] - states["plain-loop"] == 2 * (3 * table - 4 * (table // 256))
    assert states["accelerate-loop-drops-outputs"] == states["plain-loop"]
    assert paged_bytes(1024, "paged-adamw-8bit", wide=1024) == 2 * 4 * 1024


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ("paged-adamw-32bit", 8_000_000),
        ("paged-adamw-8bit", 2 * 1_000_000),
        ("adamw", 0),
        ("adafactor", 0),
    ],
)
def test_paged_states_live_outside_pytorchs_count(optimizer: str, expected: int) -> None:
    assert paged_bytes(1_000_000, optimizer) == expected


def test_a_plan_tells_the_paged_states() -> None:
    setup = TrainSetup(method="full", lora_rank=0, precision="bf16-pure", optimizer="paged-adamw-32bit")
    notes = " ".join(predict(smol(), A100, setup).notes)
    assert "1.00 GiB" in notes  # 8 x 134,515,008


@pytest.mark.parametrize(
    ("optimizer", "dtype", "expected"),
    [
        ("adamw", "fp32", 4 * 1000),
        ("adamw", "bf16", 2 * 1000),
        ("adafactor", "fp32", 2 * 4 * 50),  # the gradient's square and the update, in fp32
        ("adafactor", "bf16", 4 * 4 * 50),  # and fp32 copies of gradient and parameter
        ("adamw-fused", "fp32", 0),
        ("adamw-8bit", "bf16", 0),
        ("sgd", "bf16", 0),
        ("adagrad", "bf16", 4 * 1000),  # the root of the sums, and the gradient times the rate
    ],
)
def test_temporaries_of_an_optimizer_step(optimizer: str, dtype: str, expected: int) -> None:
    assert step_bytes(1000, dtype, optimizer, largest_tensor=50) == expected


def test_adafactors_temporaries_are_a_term_of_the_step() -> None:
    setup = TrainSetup(method="full", lora_rank=0, precision="bf16-pure", optimizer="adafactor")
    (term,) = [term for term in predict_memory(smol(), A100, setup).terms if term.name == "temporaries of adafactor"]
    assert (term.size_bytes, term.phases) == (4 * 4 * VOCAB * HIDDEN, ("step",))
    (states,) = [term for term in predict_memory(smol(), A100, setup).terms if term.name == "states of adafactor"]
    assert states.size_bytes == 4 * (LAYERS * EDGES + VOCAB + HIDDEN)


@pytest.mark.parametrize(
    ("trained", "in_forward", "in_backward"),
    [
        (False, 200_000 + 2 * 6_400, 200_000 + 4 * 6_400 + 2 * 2 * 6_400),
        # trained, the head's fp32 gradient and its cast to bf16 (128,000), beside the last tile
        (True, 200_000 + 2 * 6_400, 200_000 + 128_000 + 4 * 6_400 + 4 * 64_000 + 2 * 2 * 6_400),
    ],
)
def test_chunked_loss(trained: bool, in_forward: int, in_backward: int) -> None:
    """100 tokens, vocabulary 1,000, hidden 64, bf16: one tile, rows with labels, fp32 gradients, those cast."""
    chain = loss_chain(
        loss="chunked", tokens=100, vocab_size=1000, hidden_size=64, logits_dtype="bf16", hidden_dtype="bf16",
        head_trained=trained, softcap=False,
    )  # fmt: skip
    assert (chain.loss_bytes, chain.backward_bytes) == (in_forward, in_backward)


def test_chunked_loss_is_cut_at_4096_tokens_and_32768_words() -> None:
    chain = loss_chain(
        loss="chunked", tokens=10_000, vocab_size=100_000, hidden_size=64, logits_dtype="bf16", hidden_dtype="bf16",
        head_trained=False, softcap=False, head_cast=True,
    )  # fmt: skip
    assert chain.loss_bytes == 2 * 4096 * 32_768 + 2 * 64 * 32_768 + 2 * 10_000 * 64


def test_liger_loss() -> None:
    """Vocabulary 1,000 of hidden 100 is 10 times as wide: chunks of 512 / 10 = 52 tokens, rounded up to 64."""
    chain = loss_chain(
        loss="liger", tokens=512, vocab_size=1000, hidden_size=100, logits_dtype="bf16", hidden_dtype="bf16",
        head_trained=True, softcap=False,
    )  # fmt: skip
    gradient_bytes = 2 * 512 * 100 + 2 * 1000 * 100
    assert (chain.loss_bytes, chain.backward_bytes) == (64 * 1000 * 2 + gradient_bytes, gradient_bytes + 2 * 512 * 100)


def test_liger_loss_under_autocast_keeps_a_cast_head_and_makes_another() -> None:
    """fp32 weights: gradients in fp32, the cast of the trained head kept, that of its transpose beside it."""
    chain = loss_chain(
        loss="liger", tokens=512, vocab_size=1000, hidden_size=100, logits_dtype="bf16", hidden_dtype="fp32",
        head_trained=True, softcap=False, head_cast=True,
    )  # fmt: skip
    gradient_bytes = 4 * 512 * 100 + 4 * 1000 * 100
    casts = 2 * 1000 * 100 + 2 * 1000 * 100 + 2 * 64 * 100
    assert chain.loss_bytes == 64 * 1000 * 2 + gradient_bytes + casts
    assert chain.backward_bytes == gradient_bytes + 4 * 512 * 100


def test_allocator_gap_is_a_floor_and_a_share_of_what_comes_and_goes() -> None:
    """18 % of the loss or 12 % of a layer, whichever is more; activations that are kept leave no holes."""
    assert allocator_gap_bytes(loss=0, layer=0) == allocator_gap_bytes(loss=-5, layer=0) == 24 * MIB
    assert allocator_gap_bytes(loss=100 * MIB, layer=100 * MIB) == 42 * MIB
    assert allocator_gap_bytes(loss=10 * MIB, layer=100 * MIB) == 36 * MIB
    spaced = [
        formula_loss_gap_share(loss, every) for loss, every in (("full", 0), ("full", 1), ("full", 2), ("chunked", 2))
    ]
    assert spaced == [0.18, 0.18, 0.34, 0.18]
    assert allocator_gap_bytes(loss=100 * MIB, layer=100 * MIB, of_loss=spaced[2]) == 58 * MIB
    breakdown = predict_memory(smol(), A100, TrainSetup(checkpointing=0))
    activation_names = ("attention inputs and outputs", "adapter input copies", "MLP activations", "norm inputs")
    stored = sum(term.size_bytes for term in breakdown.terms if term.name in activation_names)
    resident = sum(term.size_bytes for term in breakdown.terms if len(term.phases) >= 4)
    alone = breakdown.peak_allocated_bytes - resident - stored
    assert breakdown.peak_phase == "loss"
    assert breakdown.allocator_gap_bytes == 24 * MIB + int(0.18 * alone)


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


def test_quantized_weights() -> None:
    """1,000 x 640: 320,000 packed bytes, 10,000 blocks of 64; doubly quantized 40 blocks of 256 scales."""
    assert nf4_bytes(640_000, double=False) == 320_000 + 4 * 10_000 + 512
    assert nf4_bytes(640_000, double=True) == 320_000 + 10_000 + 4 * 40 + 512 + 1024 + 512
    assert int8_weight_bytes(640_000, 1_000) == 640_000 + 4_000


# Speed


def test_chunked_loss_multiplies_the_head_twice_forward_and_once_backward() -> None:
    """TRL's fused head computes a tile's logits again in its backward; one chunk of 2,048 tokens."""
    model = speed()
    rate = model.rates.matmul["bf16"]
    forward = matmul_s(2048, VOCAB, HIDDEN, rate, 2, model.rates, model.constants)
    backward = matmul_s(2048, HIDDEN, VOCAB, rate, 2, model.rates, model.constants)
    chain = 4 * 2 * 2048 * VOCAB / (A100.memory_bandwidth_bytes_per_s * model.constants.loss_bandwidth_share)
    assert model.loss_s("chunked", "bf16", 2048, False) == pytest.approx(2 * forward + backward + chain)
    full = model.loss_s("full", "bf16", 2048, False) - model.loss_chain_s("full", "bf16", 2048, VOCAB)
    assert full == pytest.approx(forward + backward)


def test_trained_head_of_a_chunked_loss_adds_its_gradients_up() -> None:
    """10,000 tokens are three chunks; each adds a [vocabulary, hidden] gradient: 8 bytes an element."""
    model = speed()
    rate = model.rates.matmul["bf16"]
    gradient = matmul_s(VOCAB, HIDDEN, 4096, rate, 2, model.rates, model.constants)
    added = 8 * VOCAB * HIDDEN / model.bandwidth
    difference = model.loss_s("chunked", "bf16", 10_000, True) - model.loss_s("chunked", "bf16", 10_000, False)
    assert difference == pytest.approx(3 * (gradient + added))


@pytest.mark.parametrize(
    ("loss", "logit", "options", "expected"),
    [
        ("full", 2, {"drag": 1.0}, 49 + 12),
        ("full", 4, {"drag": 0.0}, 24),
        ("full", 2, {"drag": 0.0, "softcap": True}, 24 + 12 + 26),
        ("full", 2, {"fused": True}, 8),
        ("chunked", 2, {}, 8),
        ("liger", 2, {"drag": 1.0}, 10),
        ("liger", 2, {"drag": 0.0}, 6),
    ],
)
def test_bytes_per_logit(loss: str, logit: int, options: dict[str, float], expected: float) -> None:
    assert LOSSES[loss].moved_per_logit(logit, **{"fused": False, "softcap": False, "drag": 1.0, **options}) == expected  # type: ignore[arg-type]


def test_quantized_matrices_are_unpacked_by_bytes_and_kernels() -> None:
    """Double quantization takes two more kernels for each of 210 matrices, and no bytes worth counting."""
    model = speed()
    setups = {name: replace(TrainSetup(), method="qlora", quantization=name) for name in ("nf4", "nf4-double", "int8")}
    from planner.memory.dtypes import dtype_policy_of

    bandwidth = A100.memory_bandwidth_bytes_per_s * model.constants.dequantize_share
    gap = 210 * model.constants.kernel_gap_s
    for name, each, kernels in (("nf4", 2.53, 1), ("nf4-double", 2.53, 3), ("int8", 7.0, 1)):
        seconds, modules = model.dequantization_s(dtype_policy_of(setups[name]), name)
        assert modules == 210
        assert seconds == pytest.approx(LAYERS * WEIGHTS * each / bandwidth + kernels * gap), name


def test_int8_multiplications_search_outliers_and_cast() -> None:
    linear = LinearSpec(name="q", role="q", in_features=1000, out_features=100)
    assert int8_bytes(linear, "fp16") == 17 * 1000 + 14 * 100
    assert int8_bytes(linear, "bf16") == 21 * 1000 + 18 * 100


def test_int8_layers_pay_for_that_traffic() -> None:
    """Plain and int8 matmuls of the layers: each forward at int8's rate, and 21 in + 18 out bytes a token."""
    model = speed()
    plain, int8 = (model.matmuls("bf16", "bf16", 2048, quantized) for quantized in (False, True))
    around = 2048 * LAYERS * (21 * (576 * 6 + 1536) + 18 * (576 * 3 + 192 * 2 + 1536 * 2)) / model.bandwidth
    assert int8.forward == pytest.approx(plain.forward / model.constants.int8_rate + around)
    assert int8.input_gradient == plain.input_gradient


def test_two_16_bit_types_make_an_fp32_residual_stream() -> None:
    """fp16 embeddings + a bf16 result of autocast's matrices: PyTorch promotes the sum."""
    policies = {name: dtype_policy_of(TrainSetup(precision=name)) for name in ("bf16-autocast", "fp16-bf16-autocast")}
    assert {name: policy.residual for name, policy in policies.items()} == {
        "bf16-autocast": "bf16",
        "fp16-bf16-autocast": "fp32",
    }


@pytest.mark.parametrize("precision", ["fp16-bf16-autocast", "bf16-fp16-autocast", "bf16-autocast"])
def test_autocast_copies_every_matrix_of_another_16_bit_type(precision: str) -> None:
    """Two bytes an element, which the graph keeps and no cache (autocast_mode.cpp: fp32 alone), the head's apart.

    Traced: PEFT's dora_finetuning.py on Llama-3.2-1B with fp16=True, 9.01 GiB (6.72 without the copies).
    """
    model = load("meta-llama/Llama-3.2-1B")
    setup = TrainSetup(method="lora", lora_rank=8, precision=precision)
    matrices = sum(linear.num_weights for kind in model.layer_order for linear in model.layer_kinds[kind].linears)
    copied = 0 if precision == "bf16-autocast" else 2 * matrices
    assert weight_casts(model, setup, dtype_policy_of(setup)).at(1, 1) == (copied, copied)


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


def test_clipping_reads_twice_and_writes_once() -> None:
    with_clip, without = speed(), speed(replace(CURRENT, gradient_clipping=False))
    bandwidth = A100.memory_bandwidth_bytes_per_s * with_clip.constants.optimizer_share
    for num, size in ((1e6, 2), (1e9, 4)):
        clipped, plain = (model.optimizer_s("adamw-fused", num, size, 10)[0] for model in (with_clip, without))
        assert clipped - plain == pytest.approx(3 * size * num / bandwidth)


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_bf16_parameter", "kernels", "paged_bytes"),
    [
        ("adamw", 40.0, 0.3, 0),
        ("adamw-fused", 14.0, 0.05, 0),
        ("adamw-8bit", 6 + 4.2, 1, 0),
        ("paged-adamw-8bit", 6 + 4.2, 1, 2 * (1 + 4 / 256)),  # two states, an fp32 maximum for each block of 256
        ("paged-adamw-32bit", 6 + 16, 1, 2 * 4),
        ("adafactor", 32 + 16, 18, 0),
        ("lion-8bit", 6 + 2.1, 1, 0),
        ("ademamix-32bit", 6 + 24, 1, 0),
        ("paged-ademamix-8bit", 6 + 6.3, 1, 3 * (1 + 4 / 256)),
        ("sgd", 6, 0.05, 0),
    ],
)
def test_optimizer_steps_move_what_their_form_says(
    optimizer: str, bytes_per_bf16_parameter: float, kernels: float, paged_bytes: float
) -> None:
    model = speed(replace(CURRENT, gradient_clipping=False))
    bandwidth = A100.memory_bandwidth_bytes_per_s * model.constants.optimizer_share
    gpu, host = model.optimizer_s(optimizer, 1e8, 2, 300)
    gap = 300 * kernels * model.constants.kernel_gap_s
    there_and_back = 2 * 1e8 * paged_bytes / model.host_rate
    coded = 1e8 * OPTIMIZERS[optimizer].states.eight_bit * EIGHT_BIT_STATE_S * H100_SMS / model.rates.sms
    update = max(1e8 * bytes_per_bf16_parameter / bandwidth, coded)
    assert gpu == pytest.approx(update + gap + there_and_back)
    looped = optimizer not in ("adamw", "adamw-fused", "sgd")
    assert host == pytest.approx(300 * (60e-6 if looped else 4e-6) + 300 * kernels * 7.6e-6)


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


@pytest.mark.parametrize(("dtype", "upcast", "dropout", "drag", "compiled", "expected"), [
    ("bf16", False, False, 0.0, False, (12 + 4, 12 + 6)),  # two reads and writes of the product, three of each step
    ("bf16", False, True, 1.0, False, (12 + 8 + 10, 12 + 12 + 10)),
    ("fp16", True, False, 0.0, False, (12 + 6 + 6, 12 + 10 + 6)),  # softmax from 16 bit to 32 and the cast back
    ("bf16", True, False, 1.0, False, (12 + 6 + 16 + 6, 12 + 6 + 24 + 6)),  # the cast to 32 is a kernel of its own
    ("bf16", True, False, 1.0, True, (8, 14)),  # one kernel between the products
])  # fmt: skip
def test_eager_attention_moves_its_scores(
    dtype: str, upcast: bool, dropout: bool, drag: float, compiled: bool, expected: tuple[float, float]
) -> None:
    score_bytes = eager_score_bytes(dtype, upcast=upcast, dropout=dropout, drag=drag, compiled=compiled)
    assert score_bytes == expected


def test_gpt2_pays_for_its_composed_gelu_and_its_dropouts() -> None:
    """GPT-2 as transformers builds it, beside the same with one kernel and no dropout: 12 layers, 25 dropouts."""
    model = loaded("gpt2")
    (layer,) = model.layer_kinds
    assert layer.mlp is not None
    dtypes = dtype_policy_of(TrainSetup(method="full", lora_rank=0, precision="bf16-pure"))
    composed, plain, dropless = (
        layer_traffic(
            inventory(
                replace(
                    model,
                    layer_kinds=(replace(layer, mlp=replace(layer.mlp, activation=activation)),),
                    traits=replace(model.traits, residual_dropout=dropout > 0),
                )
            ),
            dtypes,
            CURRENT,
            trained=True,
            mixer=Mixer(),
        )
        for activation, dropout in (("gelu_new", 0.1), ("gelu_pytorch_tanh", 0.1), ("gelu_pytorch_tanh", 0.0))
    )
    inner, hidden = 12 * 4 * 768, 25 * 768
    assert composed.forward_bytes - plain.forward_bytes == 16 * 2 * inner
    assert composed.backward_bytes - plain.backward_bytes == 25 * 2 * inner
    assert composed.forward_kernels - plain.forward_kernels == 12 * 7
    assert plain.forward_bytes - dropless.forward_bytes == (2 * 2 + 1) * hidden
    assert plain.backward_kernels - dropless.backward_kernels == 25


def test_a_host_bound_step_has_a_wide_band() -> None:
    """One short sequence of the 135M: the host sets the pace, and a slower one takes its time; not with eight long."""
    setup = TrainSetup(method="full", lora_rank=0, precision="bf16-pure", checkpointing=0)
    short, long = (
        predict(smol(), A100, setup.replace(seq_len_tokens=128)),
        predict(smol(), A100, setup.replace(seq_len_tokens=2048, micro_batch_seqs=8)),
    )
    assert (short.time_band_fraction or 0) > 0.5 > 0.2 > (long.time_band_fraction or 0)
    assert any("30 % slower" in note for note in short.notes)
    assert not any("30 % slower" in note for note in long.notes)


def test_an_optimizers_row_leaves_nothing_out() -> None:
    """A forgotten field is an error at import, an unknown name one where it is asked for, never 0 bytes."""
    rows = [{field.name: getattr(row, field.name) for field in fields(row)} for row in OPTIMIZERS.values()]
    for row in rows:
        for name in row:
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
