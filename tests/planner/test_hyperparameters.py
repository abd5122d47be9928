"""Learning-rate rules: their published anchors, their scaling, and the notes from the scaling literature."""

from math import sqrt

import pytest

from planner.frameworks.hyperparameters import PUBLISHED_BATCH_SEQS, batch_factor, choose
from planner.setup import TrainSetup
from planner.setup.allowed import OPTIMIZERS

FULL = TrainSetup(method="full", precision="bf16-pure", lora_rank=0, accumulation_steps=32)
LORA = TrainSetup(accumulation_steps=32)
ROUNDING = 0.005  # rates are written with three digits


def rate(setup: TrainSetup, **more: int) -> float:
    return choose(setup, **more).learning_rate


def test_lora_takes_ten_times_the_rate_of_full_fine_tuning() -> None:
    """Source: Schulman et al. 2025, LoRA Without Regret."""
    assert rate(LORA) == pytest.approx(10 * rate(FULL), rel=ROUNDING)
    assert rate(FULL) == 2e-5


def test_adam_scales_with_the_root_of_the_batch_and_sgd_linearly() -> None:
    """Sources: Malladi et al. 2022; Goyal et al. 2017."""
    large = LORA.replace(accumulation_steps=4 * PUBLISHED_BATCH_SEQS[1])
    assert rate(large) == pytest.approx(2 * rate(LORA), rel=ROUNDING)
    assert rate(large.replace(optimizer="sgd")) == pytest.approx(4 * rate(LORA.replace(optimizer="sgd")), rel=ROUNDING)
    assert batch_factor("adamw", PUBLISHED_BATCH_SEQS[0] // 2) == pytest.approx(1 / sqrt(2))


@pytest.mark.parametrize(
    ("fields", "batch", "num_params", "published"),
    [
        ({"method": "full"}, 128, 7e9, 2e-5),  # Alpaca
        ({}, 16, 7e9, 2e-4),  # QLoRA, appendix B.2
        ({}, 16, 65e9, 1e-4),
        ({"method": "full", "objective": "dpo"}, 128, 8e9, 1e-6),  # TRL's DPOConfig
        ({"method": "full", "objective": "reward"}, 32, 1e9, 1e-5),  # TRL's examples/scripts/reward_modeling.py
        ({"objective": "reward"}, 32, 1e9, 1e-4),
        ({"objective": "kto"}, 32, 1e9, 1e-6),  # TRL's KTOConfig, and the same rate for both in its script
    ],
)
def test_the_published_rates_are_given_back(
    fields: dict[str, str], batch: int, num_params: float, published: float
) -> None:
    loss = {"dpo": "chunked", "kto": "chunked"}.get(fields.get("objective", ""), "full")
    ranks = {"lora_rank": 0, "precision": "bf16-pure"} if fields.get("method") == "full" else {}
    setup = TrainSetup(**fields, **ranks, loss=loss, micro_batch_seqs=2, accumulation_steps=batch // 2)
    assert rate(setup, num_params=int(num_params)) == pytest.approx(published, rel=ROUNDING)


def test_pretraining_decays_and_forgets_faster() -> None:
    """Sources: Brown et al. 2020, appendix B; Touvron et al. 2023, section 2.3."""
    chosen = [choose(FULL.replace(objective=name)) for name in ("pretrain", "sft")]
    assert [(hyper.weight_decay, hyper.adam_beta2) for hyper in chosen] == [(0.1, 0.95), (0.0, 0.999)]
    assert choose(LORA.replace(objective="pretrain")).weight_decay == 0.0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_gets_a_rate_that_grows_with_the_batch(optimizer: str) -> None:
    setup = LORA.replace(optimizer=optimizer)
    rates = [rate(setup.replace(accumulation_steps=steps)) for steps in (1, 8, 64, 512)]
    assert rates == sorted(rates)
    assert rates[0] > 0
    reasons = choose(setup).reasons
    assert {"learning_rate", "warmup_fraction", "lr_schedule"} <= set(reasons)


def test_only_the_effective_batch_counts_not_how_it_is_split() -> None:
    assert rate(LORA.replace(micro_batch_seqs=8, accumulation_steps=4)) == rate(LORA)


def test_notes_say_when_data_exceeds_what_the_adapter_can_store() -> None:
    """2 bits per parameter, 1 bit per token: 1 M parameters hold about 2 M tokens."""
    assert not choose(LORA, num_trained_params=1_000_000, dataset_tokens=1_900_000).notes
    (note,) = choose(LORA, num_trained_params=1_000_000, dataset_tokens=4_000_000).notes
    assert "rank 32" in note


def test_notes_say_when_tokens_per_parameter_are_far_from_the_literature() -> None:
    assert choose(FULL, num_params=1_000_000, dataset_tokens=50_000_000).notes
    assert choose(FULL, num_params=10**10, dataset_tokens=100_000).notes
    assert not choose(FULL, num_params=10**9, dataset_tokens=10**9).notes
    assert any("epochs" in note for note in choose(LORA, dataset_tokens=1000, num_epochs=9).notes)
