"""Prices of operators against an H100's own readings, and what a step's two timelines make of them."""

import json
import math
from pathlib import Path
from statistics import median

import pytest

from planner.hardware.gpus import find_gpu
from planner.setup import TrainSetup
from planner.speed.host import Host
from planner.speed.operators import ISSUERS, WAIT, Layout, Operator, Program, Segment, program_of
from planner.speed.prices import ROWS, price
from planner.speed.rates import card_rates, setup_rates
from planner.speed.roofline import load_calibration
from planner.speed.timeline import Loop, run_time
from tests.planner.helpers import loaded

H100 = Path(__file__).parents[2] / "benchmarks" / "data" / "h100"
RATES = card_rates(find_gpu("h100-sxm"))
FORWARD, ENGINE = ISSUERS.index("forward"), ISSUERS.index("engine")
BARE = Loop(accumulation=1, tokens=0, waits=False, trainer=False)


def layout(*shape: int, dtype: str = "bfloat16") -> Layout:
    strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    return Layout(shape, tuple(strides), dtype)


def readings(op: str) -> list[dict[str, object]]:
    lines = (H100 / "prices.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [reading for reading in records if reading["op"] == op and "us" in reading]


def product(reading: dict[str, object]) -> Operator:
    tokens, out, into = (int(str(reading[name])) for name in ("tokens", "out", "in"))
    dtype = str(reading["dtype"])
    m, k, n = {
        "mm_forward": (tokens, into, out),
        "mm_input_grad": (tokens, out, into),
        "mm_weight_grad": (out, tokens, into),
    }[str(reading["op"])]
    return Operator(
        "aten.mm.default", (layout(m, k, dtype=dtype), layout(k, n, dtype=dtype)), (layout(m, n, dtype=dtype),)
    )


def test_products_cost_what_they_took() -> None:
    errors = []
    for op in ("mm_forward", "mm_input_grad", "mm_weight_grad"):
        for reading in readings(op):
            errors.append(1e6 * price(product(reading), RATES).seconds / float(str(reading["us"])) - 1)
    assert len(errors) > 400
    assert median(map(abs, errors)) < 0.08
    assert abs(median(errors)) < 0.05


def test_unsloths_attention_has_no_mask_where_a_dry_run_hands_sdpa_one() -> None:
    """Two samples of 2,048 tokens in a row: a quarter of the row's pairs are theirs, half of these the causal ones."""
    gpu, model = find_gpu("rtx-5090"), loaded("Qwen/Qwen3-0.6B")
    query, mask = layout(1, 16, 4096, 128), layout(1, 1, 4096, 4096)
    name = "aten._scaled_dot_product_efficient_attention.default"
    call = Operator(name, (query, query, query, mask), (query,), (1.0, 0.0, 0.0))
    packed = TrainSetup(packing=True, seq_len_tokens=2048, micro_batch_seqs=2, kernels="fused")
    trl, unsloth = (setup_rates(model, gpu, packed.replace(stack=stack)) for stack in ("trl", "unsloth"))
    assert price(call, trl).seconds > 6 * price(call, unsloth).seconds


@pytest.mark.parametrize(("op", "name", "inputs"), [("add", "aten.add.Tensor", 2), ("silu", "aten.silu.default", 1)])
def test_elementwise_kernels_cost_what_they_took(op: str, name: str, inputs: int) -> None:
    errors = []
    for reading in readings(op):
        numel, dtype = int(str(reading["numel"])), str(reading["dtype"])
        flat = layout(numel, dtype=dtype)
        if numel >= 1 << 22:
            errors.append(
                1e6 * price(Operator(name, (flat,) * inputs, (flat,)), RATES).seconds / float(str(reading["us"])) - 1
            )
    assert errors
    assert max(map(abs, errors)) < 0.4  # what fits into the L2 is read from there: the readings rotate their inputs
    assert median(map(abs, errors)) < 0.12


def test_attention_costs_what_it_took() -> None:
    errors = []
    for reading in readings("sdpa_forward"):
        if reading.get("backend") != "cudnn" or int(str(reading["tokens"])) < 2048:
            continue
        seqs, heads, tokens, size = (int(str(reading[name])) for name in ("seqs", "heads", "tokens", "head_size"))
        query = layout(seqs, heads, tokens, size)
        call = Operator("aten._scaled_dot_product_flash_attention.default", (query,) * 3, (query,), (0.0, 1.0, 0.0))
        errors.append(1e6 * price(call, RATES).seconds / float(str(reading["us"])) - 1)
    assert len(errors) >= 8
    assert median(map(abs, errors)) < 0.06
    assert max(map(abs, errors)) < 0.25


def test_attention_with_a_mask_costs_what_it_took() -> None:
    """Every reading with a mask, forward alone and with its backward, at heads of 64 and 128."""
    met = set()
    for reading in readings("sdpa_forward") + readings("sdpa_both"):
        if reading.get("backend") == "masked":
            seqs, heads, tokens, size = (int(str(reading[name])) for name in ("seqs", "heads", "tokens", "head_size"))
            met.add(size)
            query, mask = layout(seqs, heads, tokens, size), layout(seqs, heads, tokens, tokens)
            name = "aten._scaled_dot_product_efficient_attention"
            seconds = price(Operator(f"{name}.default", (query, query, query, mask), (query,)), RATES).seconds
            if reading["op"] == "sdpa_both":
                inputs = (query, query, query, query, mask)
                seconds += price(Operator(f"{name}_backward.default", inputs, (query,) * 3), RATES).seconds
            assert 1e6 * seconds == pytest.approx(float(str(reading["us"])), rel=0.1)
    assert met == {64, 128}


@pytest.mark.parametrize(
    ("shape", "backward", "us"),
    [
        ((16, 16, 1024, 64), False, 763), ((16, 16, 1024, 128), False, 1346), ((16, 16, 1024, 128), False, 1434),
        ((256, 16, 4096, 64), True, 689_013), ((2, 8, 4096, 128), True, 4332), ((1, 8, 8192, 128), True, 8479),
    ],
)  # fmt: skip
def test_the_efficient_kernel_costs_what_xformers_took_on_an_a100(
    shape: tuple[int, int, int, int], backward: bool, us: float
) -> None:
    """Sources: `planner.speed.rates` EFFICIENT_ELSEWHERE; by themselves they are 1 / 0.9 times as fast as in a step."""
    gpu = find_gpu("a100-80gb")
    seqs, heads, tokens, _ = shape
    query, mask = layout(*shape, dtype="float16"), layout(seqs, heads, tokens, tokens)
    name = f"aten._scaled_dot_product_efficient_attention{'_backward' * backward}.default"
    call = Operator(name, (query,) * (4 if backward else 3) + (mask,), (query,))
    alone = price(call, card_rates(gpu)).seconds * load_calibration().constants_for(gpu).training_share
    assert 1e6 * alone == pytest.approx(us, rel=0.12)


T4_SCORES, T4_ROWS, T4_LOGITS = (2, 12, 1024, 1024), (2, 12, 1024, 1), (2048, 50304)


@pytest.mark.parametrize(
    ("name", "inputs", "output", "us"),
    [
        ("sub.Tensor", ((T4_SCORES, "float16"), (T4_ROWS, "float16")), (T4_SCORES, "float16"), 489.5),
        ("eq.Tensor", ((T4_ROWS, "float16"), (T4_SCORES, "float16")), (T4_SCORES, "bool"), 473.9),
        ("div.Tensor", ((T4_SCORES, "float32"), (T4_ROWS, "float32")), (T4_SCORES, "float32"), 841.3),
        ("_to_copy.default", ((T4_SCORES, "float16"),), (T4_SCORES, "float32"), 696.8),
        ("sum.dim_IntList", ((T4_SCORES, "bool"),), (T4_ROWS, "int64"), 1144.0 + 738.7),
        ("nll_loss_backward.default", (((), "float32"), (T4_LOGITS, "float32")), (T4_LOGITS, "float32"), 1765.9),
        ("_log_softmax_backward_data.default", ((T4_LOGITS, "float16"),) * 2, (T4_LOGITS, "float16"), 3297.1),
        ("mm.default", (((2048, 768), "float16"), ((768, 50304), "float16")), (T4_LOGITS, "float16"), 4263.9),
        (
            "bmm.default",
            (((24, 1024, 64), "float16"), ((24, 64, 1024), "float16")),
            ((24, 1024, 1024), "float16"),
            324.8,
        ),
        ("_amp_foreach_non_finite_check_and_unscale_.default", (((162_220_800,), "float32"),), None, 5638.8),
    ],
)
def test_kernels_of_a_t4_cost_what_they_took(
    name: str, inputs: tuple[tuple[tuple[int, ...], str], ...], output: tuple[tuple[int, ...], str] | None, us: float
) -> None:
    """The trace of `planner.speed.rates` COPY_SHARE; of multi-tensor ones both launches, of a sum its cast."""
    outputs = (layout(*output[0], dtype=output[1]),) if output else ()
    call = Operator(f"aten.{name}", tuple(layout(*shape, dtype=dtype) for shape, dtype in inputs), outputs, (), 99)
    assert 1e6 * price(call, card_rates(find_gpu("t4"))).seconds == pytest.approx(us, rel=0.3)


def test_every_row_is_an_operator_with_a_price() -> None:
    matrix = layout(256, 256)
    for name in ROWS:
        shape = (layout(1, 4, 256, 64),) * 4 if "attention" in name else (matrix, matrix, matrix)
        cost = price(Operator(f"{name}.default", shape, shape[:1], (0.0, 1.0, 0.0, 0.0, 0.0, 1.0)), RATES)
        assert 0 < cost.seconds < 1e-3, name


def program(num: int, shape: int, *, waits: int = 0) -> Program:
    """So many products forward and back."""
    matrix = layout(shape, shape)
    calls = [5 + FORWARD] * num + [10 + FORWARD] * waits
    return Program(
        operators=[Operator("module call"), Operator("aten.mm.default", (matrix, matrix), (matrix,)), Operator(WAIT)],
        segments=[Segment(phase="forward", calls=calls), Segment(phase="backward", calls=[5 + ENGINE] * num)],
        micro_batch=[0, 1],
        step=[],
        added={},
        num_modules=100,
    )


def test_the_slower_of_host_and_device_sets_the_pace() -> None:
    small, large = run_time(program(1000, 64), RATES, BARE), run_time(program(100, 8192), RATES, BARE)
    assert small.host_bound
    assert not large.host_bound
    assert small.parts_s["host"] > 0.5 * small.step_s
    assert large.parts_s["host"] < 0.02 * large.step_s
    assert small.slower_host_s == pytest.approx(2 * small.step_s, rel=0.02)
    assert large.slower_host_s == pytest.approx(large.step_s, rel=0.02)
    assert small.step_s == pytest.approx(sum(small.parts_s.values()))
    fast = run_time(program(1000, 64), RATES, BARE, Host(scale=0.5))
    assert fast.step_s == pytest.approx(0.5 * small.step_s, rel=0.02)


def test_what_waits_joins_host_and_device() -> None:
    """A host that waits after every forward issues the backward while the device stands still."""
    apart = run_time(program(300, 2048), RATES, BARE).step_s
    joined = run_time(program(300, 2048, waits=1), RATES, BARE).step_s
    assert apart < joined < apart + 300 * 100e-6


@pytest.mark.parametrize("size", [64, 4096])
def test_further_micro_batches_cost_what_the_last_did(size: int) -> None:
    seconds = [
        run_time(program(50, size), RATES, Loop(accumulation=steps, tokens=0, waits=True)).step_s for steps in (3, 4, 9)
    ]
    assert seconds[2] - seconds[1] == pytest.approx(5 * (seconds[1] - seconds[0]))


def test_a_program_survives_a_file() -> None:
    made = program(3, 64)
    assert program_of(json.loads(json.dumps(made.rows()))) == made


def test_a_product_is_slow_where_a_row_does_not_begin_on_16_bytes() -> None:
    """How many rows there are does not matter: 4,092 tokens of a last tile are as fast each as 4,096."""
    rates = card_rates(find_gpu("h100-sxm"))

    def seconds(m: int, n: int, k: int, *, transposed: bool = False) -> float:
        left = Layout((m, k), (1, m) if transposed else (k, 1), "bfloat16")
        right, out = Layout((k, n), (n, 1), "bfloat16"), Layout((m, n), (n, 1), "bfloat16")
        return price(Operator("aten.mm.default", (left, right), (out,)), rates).seconds

    assert seconds(4096, 4096, 4092, transposed=True) == pytest.approx(seconds(4096, 4096, 4096), rel=0.01)
    assert seconds(4092, 4096, 4096) == pytest.approx(seconds(4096, 4096, 4096), rel=0.01)
    assert seconds(4096, 50257, 768) > 2 * seconds(4096, 50264, 768)
    assert seconds(4096, 768, 50257) > 2 * seconds(4096, 768, 50264)
