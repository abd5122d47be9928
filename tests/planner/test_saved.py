"""Modules trained whole beside adapters: their bytes by hand, and their place in `plan check`'s verdict."""

import math

import pytest

from planner.check import CheckResult, check
from planner.gpus import find_gpu
from planner.models.resolve import resolve_model
from planner.predict import predict
from planner.readers import read_text
from planner.readers.types import ReadConfig
from planner.saved import saved_bytes, saved_params, table_bytes
from planner.setup import TrainSetup

TABLE = 128_256 * 4096
"""Llama 3.1 8B: vocabulary x hidden size."""


def test_saved_modules_are_tables_heads_and_matrices() -> None:
    model = resolve_model("meta-llama/Llama-3.1-8B")
    assert saved_params(model, ("embed_tokens", "lm_head")) == 2 * TABLE
    assert saved_params(model, ("model.layers.0.mlp.down_proj", "norm")) == 32 * 4096 * 14_336


@pytest.mark.parametrize(
    ("setup", "fp32", "bytes_per_param"),
    [
        (TrainSetup(method="lora", precision="bf16-autocast"), False, 2 + 2 + 2 + 2),
        (TrainSetup(method="lora", precision="bf16-autocast"), True, 4 + 4 + 4 + 4),
        (TrainSetup(method="lora", precision="bf16-autocast", optimizer="paged-adamw-32bit"), False, 2 + 2),
        (TrainSetup(method="full", lora_rank=0, precision="bf16-mixed"), False, 0),
    ],
)
def test_saved_bytes_are_copy_gradient_and_states(setup: TrainSetup, fp32: bool, bytes_per_param: int) -> None:
    model = resolve_model("meta-llama/Llama-3.1-8B")
    assert saved_bytes(model, setup, ("lm_head",), fp32=fp32) == bytes_per_param * TABLE


CONFIG = """
base_model: meta-llama/Llama-3.1-8B
adapter: lora
lora_r: 16
lora_target_linear: true
micro_batch_size: 1
gradient_accumulation_steps: 4
sequence_len: 1024
bf16: true
gradient_checkpointing: true
optimizer: adamw_torch_fused
{}
"""


def test_modules_to_save_change_the_verdict_of_check() -> None:
    model, card = resolve_model("meta-llama/Llama-3.1-8B"), find_gpu("rtx-4090")
    configs = [
        read_text(CONFIG.format(more), "axolotl.yaml", model=model)
        for more in ("", "lora_modules_to_save: [embed_tokens, lm_head]")
    ]

    def judged(config: ReadConfig, budget_bytes: int) -> CheckResult:
        return check(config, model, card, budget_bytes, lambda setup: predict(model, card, setup, None))

    plain = judged(configs[0], 1)
    budget = math.ceil(plain.prediction.peak_device_bytes * (1 + plain.band_fraction))
    plain, saved = (judged(config, budget) for config in configs)
    assert saved.prediction.peak_device_bytes - plain.prediction.peak_device_bytes == 8 * 2 * TABLE
    assert (plain.exit_code, saved.exit_code) in ((0, 1), (0, 3))
    assert any("embed_tokens, lm_head trained whole" in one for one in saved.config.assumptions)
    assert saved.config.approximations == plain.config.approximations


def test_adapters_on_a_table_are_counted_beside_those_on_matrices() -> None:
    model = resolve_model("meta-llama/Llama-3.1-8B")
    setup = TrainSetup(method="lora", precision="bf16-autocast", lora_rank=16)
    assert table_bytes(model, setup, ("embed_tokens",)) == 16 * (128_256 + 4096) * 4 * 4
    text = CONFIG.replace("lora_target_linear: true", "lora_target_modules: [q_proj, embed_tokens]")
    config = read_text(text.format(""), "axolotl.yaml", model=model)
    assert (config.setup.lora_targets, config.adapted_tables) == (("q_proj",), ("embed_tokens",))
