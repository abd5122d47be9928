"""The table of dimensions covers every field of a setup."""

from dataclasses import fields

from planner.setup import TrainSetup
from search.dimensions import DIMENSIONS, FIXED, NAMES, RECIPE, key_of, value_of
from search.study import SPACE, params_of


def test_every_field_of_a_setup_is_a_dimension_or_fixed_with_a_reason() -> None:
    names = {field.name for field in fields(TrainSetup)}
    assert set(NAMES) | set(FIXED) == names
    assert not set(NAMES) & set(FIXED)
    assert all(len(reason) > 10 for reason in FIXED.values())
    assert set(SPACE) == set(NAMES)  # what a study of several values is stored with


def test_dimensions_are_unique_and_have_positive_deviations() -> None:
    assert len(NAMES) == len(set(NAMES))
    assert set(RECIPE) <= set(NAMES)
    for dimension in DIMENSIONS:
        assert dimension.speed_sd > 0, dimension.name
        assert dimension.memory_sd > 0, dimension.name
        assert 0 < dimension.alike < 1, dimension.name


def test_numbers_are_log2_and_words_are_categories() -> None:
    setup = TrainSetup()
    for dimension in DIMENSIONS:
        value = getattr(setup, dimension.name)
        counted = isinstance(value, int) and not isinstance(value, bool) and dimension.name != "checkpointing"
        assert (dimension.kind == "log2") == counted, dimension.name


def test_key_of_tells_setups_apart_in_every_field() -> None:
    setup = TrainSetup(num_gpus=2, parallel="ddp")
    others = [
        setup.replace(lora_rank=32),
        setup.replace(micro_batch_seqs=2),
        setup.replace(accumulation_steps=2),
        setup.replace(seq_len_tokens=4096),
        setup.replace(lora_targets=("q_proj", "v_proj")),
        setup.replace(parallel="zero3"),
        setup.replace(parallel="zero3", offload="optimizer"),
    ]
    assert len({key_of(each) for each in (setup, *others)}) == 1 + len(others)
    assert key_of(setup) == key_of(TrainSetup(num_gpus=2, parallel="ddp"))


def test_one_gpus_key_is_that_of_every_version() -> None:
    """Studies and corrections of before there were spreads are found again."""
    assert key_of(TrainSetup(micro_batch_seqs=2, accumulation_steps=8)) == (
        "method=lora|precision=bf16-autocast|quantization=none|kbit_fp32_cast=False|lora_rank=16|"
        "lora_targets=all-linear|lora_dropout=0.0|adapter_dtype=auto|optimizer=adamw-fused|attention=sdpa|"
        "checkpointing=1|loss=full|micro_batch_seqs=2|packing=False|compile=False|num_gpus=1|parallel=none|"
        "accumulation_steps=8|seq_len_tokens=2048"
    )


def test_params_of_names_every_dimension_and_listed_targets() -> None:
    params = params_of(TrainSetup(lora_targets=("q_proj",)))
    assert set(params) == set(NAMES)
    assert params["lora_targets"] == "listed"
    assert value_of(TrainSetup(lora_targets=("q_proj", "k_proj")), "lora_targets") == "q_proj,k_proj"
