"""The stacks: what each holds of a full loss, whose adapters are of which type, and how a run says whose it is."""

from statistics import median

import pytest

from benchmarks import gathered
from benchmarks.measured import MeasuredRow, load_rows
from planner.core.errors import SetupError
from planner.core.units import GIB
from planner.hardware.gpus import all_gpus, find_gpu
from planner.memory.model import predict_memory
from planner.memory.step import HOOKED, loss_parts
from planner.models import catalogue
from planner.options.stacks import STACKS
from planner.planning.predict import predict
from planner.setup import TrainSetup
from planner.setup.allowed import STACK_NAMES
from planner.setup.interchange import setup_from_dict, setup_from_request, setup_to_dict
from planner.speed.roofline import step_time
from tests.planner.helpers import loaded

PUBLISHED = 0.02
"""The worst allocated peak of the plain-loop runs that a setup says in full: 1.6 %, with no checkpointing."""
MODEL = loaded("Qwen/Qwen2.5-0.5B")
TOKENS = 1024
LOGITS = TOKENS * MODEL.vocab_size


def by(stack: str, **fields: object) -> TrainSetup:
    values: dict[str, object] = {"precision": "bf16-pure", "seq_len_tokens": TOKENS, "stack": stack}
    return TrainSetup(**(values | fields))  # type: ignore[arg-type]


def test_every_stack_says_where_it_was_read() -> None:
    assert tuple(STACKS) == STACK_NAMES
    assert all(row.source and row.title for row in STACKS.values())


def test_full_fine_tuning_in_pefts_loop_pays_for_its_clipping_and_for_ecc() -> None:
    """3.2 billion parameters on an L40S, three published runs: without either they are said 15 % too fast."""
    rows = [row for row in load_rows() if row.group == "peft_metamathqa" and row.method == "full" and row.setup]
    errors = []
    for row in rows:
        model, setup = catalogue.load(str(row.model)), row.speed_setup
        assert model is not None
        assert setup is not None
        errors.append(step_time(model, find_gpu(str(row.gpu)), setup).tokens_per_s / (row.tokens_per_s or 0.0) - 1)
    assert len(errors) == 3
    assert max(map(abs, errors)) < 0.05


def test_outputs_that_were_cast_are_kept_as_cast() -> None:
    """prime-rl casts the logits to fp32 and holds them in `out`: 31.7 GiB reserved by Qwen3-0.6B, 8,192 tokens, on an
    H100 (prime-rl@c5afcaa2e:benchmarks/baselines); 27.6 were said of a loop that drops them."""
    assert loss_parts(MODEL, by("prime-rl", precision="bf16-autocast")).kept_bytes == 4 * LOGITS
    model = loaded("Qwen/Qwen3-0.6B")
    values = {"method": "full", "precision": "bf16-mixed", "optimizer": "adamw", "seq_len_tokens": 8192}
    setup = setup_from_request(
        {**values, "stack": "prime-rl", "loss": "full", "accumulation_steps": 2, "compile": True}
    )
    assert predict_memory(model, find_gpu("h100-sxm"), setup).peak_reserved_bytes == pytest.approx(31.7 * GIB, rel=0.03)


def test_autocast_computes_every_full_loss_in_fp32() -> None:
    """PyTorch's list of operations in fp32; a Llama of one's own on a T4: 10.65 GiB measured (starbeeva-012)."""
    row = next(row for row in gathered.rows() if row.id == "starbeeva-012")
    model, gpu = row.model_and_gpu()
    assert row.setup is not None
    assert predict_memory(model, gpu, row.setup).peak_allocated_bytes == pytest.approx(row.allocated_bytes, rel=0.02)
    assert loss_parts(MODEL, by("plain-loop-own-model", precision="bf16-autocast")).backward_bytes == 12 * LOGITS


@pytest.mark.parametrize(
    "row", [row for row in gathered.rows() if row.group == "lab21" and row.memory_confidence == "B"]
)
def test_a_head_copied_by_every_piece_of_an_older_trl(row: MeasuredRow) -> None:
    """A course's runs of TRL 1.10 on a T4 and an RTX 4060, each measured by several people, one out of memory."""
    model, gpu = row.model_and_gpu()
    assert row.setup is not None
    memory = predict_memory(model, gpu, row.setup)
    if row.status == "oom":
        assert memory.peak_device_bytes > gpu.memory_bytes
    else:
        assert memory.peak_allocated_bytes == pytest.approx(row.allocated_bytes, rel=0.01)


@pytest.mark.parametrize("row", [row for row in load_rows() if row.group == "canifinetune"], ids=lambda row: row.id)
def test_plain_loop_runs_of_an_rtx_4080(row: MeasuredRow) -> None:
    """Published, not fitted on: docs/accuracy/README.md."""
    model = loaded(row.model or "")
    assert row.setup is not None
    memory = predict_memory(model, find_gpu("rtx-4080"), row.setup)
    assert memory.peak_allocated_bytes == pytest.approx(row.allocated_bytes, rel=PUBLISHED)


def test_adapters_follow_the_stack() -> None:
    """TRL casts adapters of a quantized base to bf16; peft's k-bit preparation leaves them fp32."""
    quantized = {"method": "qlora", "quantization": "nf4"}
    assert {name: by(name, **quantized).resolved_adapter_dtype for name in ("trl", "hf", "litgpt", "torchtune")} == {
        "trl": "bf16", "hf": "fp32", "litgpt": "bf16", "torchtune": "bf16",
    }  # fmt: skip
    assert by("trl", kbit_fp32_cast=True, **quantized).resolved_adapter_dtype == "fp32"
    assert (by("trl").resolved_adapter_dtype, by("litgpt").resolved_adapter_dtype) == ("fp32", "bf16")
    assert by("hf", adapter_dtype="bf16").resolved_adapter_dtype == "bf16"
    assert by("litgpt", precision="fp16-autocast").resolved_adapter_dtype == "fp32"


def test_a_line_of_any_run_takes_the_stacks_own_defaults() -> None:
    """Nobody's run has this project's allocator setting unless it, or its stack, says so; a plan's setup has it."""
    assert not setup_from_request({}).expandable_segments
    assert setup_from_request({"stack": "unsloth"}).expandable_segments
    assert setup_from_request({"expandable_segments": True}).expandable_segments
    assert setup_from_request({"stack": "llamafactory"}).reentrant_checkpointing
    for setup in (TrainSetup(), by("litgpt"), by("hf", expandable_segments=False, reentrant_checkpointing=True)):
        assert setup_from_dict(setup_to_dict(setup)) == setup
    assert not {"stack", "expandable_segments", "reentrant_checkpointing"} & set(setup_to_dict(TrainSetup()))


def test_a_launch_file_is_run_by_its_own_stack() -> None:
    planned = TrainSetup(method="qlora", quantization="nf4")
    runs = planned.run_by("hf")
    assert (runs.stack, runs.resolved_adapter_dtype) == ("hf", planned.resolved_adapter_dtype)
    assert planned.run_by("deepspeed") is planned
    assert by("plain-loop", expandable_segments=False).run_by("trl").expandable_segments


FIXED_SEGMENTS = 0.09
"""The worst device peak of the fms runs, as transformers' Trainer and TRL start: 8.6 % (holes of a QLoRA's fp32 copies,
whose allocated peak is 1.0 % off); expandable segments: 19 %."""


def test_device_peak_without_expandable_segments() -> None:
    """26 configurations on an A100, by nvidia-smi: median 2.5 %, every one inside FIXED_SEGMENTS."""
    errors: dict[str, list[float]] = {}
    cards = {card.key: card for card in all_gpus()}
    for row in load_rows():
        if row.group != "fms_acceleration" or row.status != "ok" or not row.comparable("device"):
            continue
        model = loaded(row.model or "")
        assert not row.setup.expandable_segments
        memory = predict_memory(model, cards[row.gpu or ""], row.setup)
        errors.setdefault(row.config_id, []).append(memory.peak_device_bytes / (row.device_bytes or 1) - 1)
    each = sorted(abs(median(row_errors)) for row_errors in errors.values())
    assert len(each) >= 26
    assert each[-1] < FIXED_SEGMENTS
    assert median(each) < 0.03


def test_fsdp_1_holds_the_inputs_of_frozen_layers() -> None:
    """Beside FSDP2's peak one more hidden state of each layer; not in full fine-tuning, nor without checkpointing.

    Llama-2-70B in QLoRA on 2 x 80 GB, 4 x 4,096 tokens, reentrant: 67 to 68 GiB allocated by version
    (foundation-model-stack/fms-acceleration, docs/accuracy/multi-gpu.md)."""
    recipe = TrainSetup(
        method="qlora", quantization="nf4", num_gpus=2, parallel="fsdp2", micro_batch_seqs=4, seq_len_tokens=4096
    )
    model, card = loaded("meta-llama/Llama-2-70b-hf"), find_gpu("a100-80gb")
    assert model is not None
    fsdp1, two = (
        predict_memory(model, card, recipe.replace(fsdp_version=version, reentrant_checkpointing=True))
        for version in (1, 2)
    )
    assert fsdp1.peak_allocated_bytes == pytest.approx(67.5 * GIB, rel=0.06)
    assert any(term.name == HOOKED for term in fsdp1.at_peak())
    hidden_states = 80 * 4 * 4096 * 8192 * 2
    assert fsdp1.peak_allocated_bytes - two.peak_allocated_bytes == pytest.approx(hidden_states, rel=0.06)
    for other in (
        recipe.replace(checkpointing=0),
        TrainSetup(method="full", lora_rank=0, num_gpus=2, parallel="fsdp2"),
    ):
        peaks = {predict_memory(MODEL, card, other.replace(fsdp_version=version)) for version in (1, 2)}
        assert len({peak.peak_allocated_bytes for peak in peaks}) == 1
    with pytest.raises(SetupError, match="fsdp_version"):
        TrainSetup(num_gpus=2, parallel="ddp", fsdp_version=1)


def test_reentrant_checkpointing_keeps_no_gathered_weight() -> None:
    """PEFT's published recipe fits its two cards (36.6 GB each, huggingface/peft docs/source/accelerate/deepspeed.md:
    "Use PEFT QLoRA and DeepSpeed with ZeRO3"); without the older checkpointing a view of every gathered 4-bit weight
    stays alive, and it does not."""
    model, card = loaded("meta-llama/Llama-2-70b-hf"), find_gpu("a100-40gb")
    assert model is not None
    recipe = {
        "method": "qlora", "quantization": "nf4-double", "lora_rank": 8, "lora_dropout": 0.1, "optimizer": "adamw",
        "attention": "flash-attention-2", "micro_batch_seqs": 2, "accumulation_steps": 2, "num_gpus": 2,
        "parallel": "zero3",
    }  # fmt: skip
    reentrant = predict_memory(model, card, setup_from_request({**recipe, "reentrant_checkpointing": True}))
    graph = predict_memory(model, card, setup_from_request(recipe))
    assert reentrant.peak_device_bytes == pytest.approx(36.6e9, rel=0.06)
    assert reentrant.peak_device_bytes < card.memory_bytes < graph.peak_device_bytes


def test_a_compiled_step_of_torchtune_needs_what_was_published() -> None:
    """Llama 3.1 8B QLoRA, 2 x 2,048, compiled: 7.4 GiB active (torchtune@9bafd16fc:README.md); counted eager 9.7."""
    model, card = loaded("meta-llama/Llama-3.1-8B"), find_gpu("rtx-4090")
    assert model is not None
    values = {"precision": "bf16-pure", "micro_batch_seqs": 2, "method": "qlora", "quantization": "nf4-double"}
    setup = setup_from_request({**values, "stack": "torchtune", "loss": "full", "lora_rank": 8, "packing": True})
    compiled, eager = (
        predict_memory(model, card, setup.replace(compile=on)).peak_allocated_bytes for on in (True, False)
    )
    assert compiled == pytest.approx(7.4 * GIB, rel=0.03)
    assert eager > 1.25 * compiled


def test_a_compiled_model_that_hands_its_logits_out_has_their_gradient_and_zeros_beside_them() -> None:
    """AOTAutograd's backward of one graph gets zeros for the logits' gradient and may not write over them: nanoGPT's
    64 x 1,024 on a B200 47.05 GiB by nvidia-smi (gpt2_cards-000), 31.5 said before. GPT-2's class of transformers ends
    its graph before the loss, and its composed GELU is one kernel: 2.88 GiB allocated (cyber_3060-003), 3.67 before."""
    for name in ("gpt2_cards-000", "cyber_3060-003"):
        row = next(row for row in gathered.rows() if row.id == name)
        ratios, _ = gathered.look(row)
        assert [ratio for what, ratio in ratios.items() if what != "tokens_per_s"] == [pytest.approx(1, abs=0.04)]


def test_a_cache_that_fills_while_training_is_there_twice() -> None:
    """dlrover's loop (allocated, 8 A100, full and LoRA): its outputs hold the keys and values of all layers, and those
    of the step before until the next forward ends; the logits in fp32, as transformers had them before 4.46."""
    model, card = loaded("meta-llama/Llama-2-7b-hf"), find_gpu("a100-80gb")
    assert model is not None
    full = TrainSetup(
        method="full", lora_rank=0, precision="bf16-mixed", optimizer="adamw", attention="flash-attention-2",
        micro_batch_seqs=4, seq_len_tokens=4096, num_gpus=8, parallel="fsdp2", fsdp_version=1, stack="plain-loop",
        transformers_version="4.33", use_cache=True, expandable_segments=False,
    )  # fmt: skip
    adapted = full.replace(method="lora", lora_rank=16, lora_targets="attention", lora_dropout=0.05)
    for setup, measured_gib in ((full, 38.668), (adapted, 32.572)):
        assert predict_memory(model, card, setup).peak_allocated_bytes == pytest.approx(measured_gib * GIB, rel=0.03)
    keys = 2 * 32 * 4 * 4096 * 4096 * 2
    without = predict_memory(model, card, full.replace(use_cache=False)).peak_allocated_bytes
    assert predict_memory(model, card, full).peak_allocated_bytes - without == 2 * keys


def test_torchtune_packs_rows_and_flash_attention_casts_what_the_kbit_preparation_widened() -> None:
    """ODISSEI's torchtune 0.6.1 (6 x 2,048, packed, A100 40 GB) took 31.9 GiB, 36.4 as one flattened row; transformers
    hands flash-attention-2 16-bit queries after peft's fp32 cast (`_flash_attention_forward`)."""
    model = loaded("meta-llama/Llama-3.2-1B")
    targets = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    packed = setup_from_request({
        "stack": "torchtune", "method": "lora", "precision": "bf16-pure", "lora_rank": 64, "lora_targets": targets,
        "micro_batch_seqs": 6, "packing": True, "checkpointing": False,
    })  # fmt: skip
    assert predict_memory(model, find_gpu("a100-40gb"), packed).peak_allocated_bytes == pytest.approx(
        31.9 * GIB, rel=0.03
    )
    plain = by("hf", method="qlora", quantization="nf4", attention="flash-attention-2", seq_len_tokens=4096)
    took = [
        step_time(MODEL, find_gpu("a100-80gb"), setup).parts_s["attention"]
        for setup in (plain, plain.replace(kbit_fp32_cast=True))
    ]
    assert took[0] == took[1]


@pytest.mark.parametrize("stack", ["axolotl", "ms-swift", "llamafactory"])
def test_trainers_that_go_by_the_type_build_the_encoder_for_text_too(stack: str) -> None:
    """Qwen3.5-27B has 26,895,998,464 parameters as the class for text and 27,356,728,560 as the one that sees
    (keras-hub's presets): 0.86 GiB in 16 bits. Whether a config names a processor_type changes nothing."""
    model = loaded("Qwen/Qwen3.5-27B")
    setup = by(stack, loss="chunked")
    seen, text = (predict(model, find_gpu("h100-sxm"), setup.replace(stack=name)) for name in (stack, "trl"))
    assert any("its vision encoder is weights" in note for note in seen.notes)
    assert any("Qwen3_5ForCausalLM has no vision encoder" in note for note in text.notes)
    weights = [sum(term.size_bytes for term in each.terms if term.category == "weights") for each in (seen, text)]
    assert weights[0] - weights[1] == 2 * (27_356_728_560 - 26_895_998_464)
