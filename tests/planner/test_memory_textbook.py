"""Golden figures of the textbook formulas (listed in the project's findings) and of NF4 / LoRA byte counts."""

import pytest

from planner.memory.optimizer import paged_bytes, state_bytes, step_bytes
from planner.memory.weights import int8_bytes, nf4_bytes
from planner.units import GB, GIB
from tests.planner import textbook

ROUNDED = 0.02  # the sources give two digits


def test_textbook_adam_70b_is_about_1040_gb() -> None:
    """Llama-2-70B (about 65e9 counted in the source): 16 bytes per parameter."""
    assert textbook.adam_states_bytes(65_000_000_000) / GB == pytest.approx(1040, rel=ROUNDED)


def test_textbook_gpt2_xl_states_are_24_gb() -> None:
    """ZeRO paper, section 3.1: GPT-2 with 1.5 B parameters needs at least 24 GB for states."""
    assert textbook.mixed_precision_states_bytes(1_500_000_000) / GB == pytest.approx(24)


def test_textbook_autocast_gradients_add_two_bytes() -> None:
    """2 + 4 + 12 bytes with 4-byte gradients under autocast."""
    assert textbook.mixed_precision_states_bytes(10, gradient_bytes=4) == 180


def test_textbook_llama2_13b_lora_and_qlora() -> None:
    """13 B parameters, 0.4 % trained: about 26.9 GB with LoRA and 7.4 GB with QLoRA."""
    assert textbook.lora_bytes(13_000_000_000, 0.004) / GB == pytest.approx(26.9, rel=ROUNDED)
    assert textbook.qlora_bytes(13_000_000_000, 0.004) / GB == pytest.approx(7.4, rel=ROUNDED)


def test_textbook_llama2_13b_activations() -> None:
    """Llama-2-13B, s 512, b 4: about 21 GiB of activations, about 0.8 GiB with checkpointing."""
    shape = {"num_layers": 40, "seq_len": 512, "batch": 4, "hidden": 5120}
    full = textbook.classic_activations_bytes(**shape, num_heads=40)
    assert full / GIB == pytest.approx(21, rel=ROUNDED)
    assert textbook.checkpointed_activations_bytes(**shape) / GIB == pytest.approx(0.8, rel=0.03)


def test_classic_activations_equal_the_papers_form() -> None:
    """Korthikanti et al. equation 1: s b h L (34 + 5 a s / h)."""
    s, b, h, a, layers = 2048, 3, 4096, 32, 7
    ours = textbook.classic_activations_bytes(num_layers=layers, seq_len=s, batch=b, hidden=h, num_heads=a)
    assert ours == s * b * h * layers * 34 + 5 * a * s * s * b * layers


def test_nf4_bytes_of_a_4096_matrix() -> None:
    """Hand-computed: 2^24 weights, 2^23 packed bytes, 2^18 blocks of 64, 2^10 blocks of 256 scales."""
    weights = 4096 * 4096
    assert nf4_bytes(weights, double=False) == 2**23 + 4 * 2**18 + 512
    assert nf4_bytes(weights, double=True) == 2**23 + 2**18 + 4 * 2**10 + 512 + 1024 + 512


def test_nf4_bits_per_weight_match_the_qlora_paper() -> None:
    """QLoRA section 3: 0.5 bits per parameter of scales without, 0.127 with double quantization."""
    weights = 8192 * 8192
    assert 8 * nf4_bytes(weights, double=False) / weights == pytest.approx(4.5, abs=1e-3)
    assert 8 * nf4_bytes(weights, double=True) / weights == pytest.approx(4.127, abs=1e-3)


def test_int8_bytes_of_a_matrix() -> None:
    """One byte per weight and one fp32 scale per output row."""
    assert int8_bytes(4096 * 1024, 1024) == 4096 * 1024 + 4096


def test_adamw_states_follow_the_parameter_type() -> None:
    """fp32: 8 bytes per parameter; bf16: 4."""
    assert state_bytes(1000, "fp32", "adamw") == 8000
    assert state_bytes(1000, "bf16", "adamw-fused") == 4000


def test_eight_bit_adam_states() -> None:
    """Two uint8 states and two fp32 scales per 256 elements: 2.03125 bytes per parameter."""
    assert state_bytes(256_000, "bf16", "adamw-8bit") == 2 * 256_000 + 2 * 4 * 1000
    assert state_bytes(256_000, "bf16", "paged-adamw-8bit") == 0
    assert paged_bytes(256_000, "paged-adamw-8bit") == 2 * 256_000 + 2 * 4 * 1000


def test_foreach_adamw_makes_a_copy_of_all_trained_parameters() -> None:
    """Weights, gradients, two moments and the temporary: 5 copies, as measured for Mistral-7B in bf16 (67.46 GiB)."""
    num = 7_241_732_096
    copies = 2 * num + 2 * num + state_bytes(num, "bf16", "adamw") + step_bytes(num, "bf16", "adamw", largest_tensor=0)
    measured_bytes = 67.4602 * 1024**3
    assert copies == pytest.approx(measured_bytes, rel=0.002)
    assert step_bytes(num, "bf16", "adamw-fused", largest_tensor=0) == 0
