"""Single moments of a step, by hand: score matrices, adapters' copies, tied gradients, casts, position biases."""

import pytest

from planner.hardware.gpus import find_gpu
from planner.memory.dtypes import DtypePolicy, dtype_policy_of
from planner.memory.layer_terms import eager_scores, math_scores
from planner.memory.micro_batch import activation_parts
from planner.memory.model import predict_memory
from planner.memory.states import backward_gradients, halves_stay_apart
from planner.memory.step import computing, loss_parts
from planner.memory.trained import trained_parameters
from planner.setup import TrainSetup
from tests.planner.helpers import loaded

A100 = find_gpu("a100-80gb")
FULL = {"method": "full", "lora_rank": 0}


def dtypes(**fields: object) -> DtypePolicy:
    return dtype_policy_of(TrainSetup(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "fields", "kept_bytes", "backward"),
    [
        # fp32 softmax and its bf16 copy; at the softmax's backward output, gradient, their product and result in fp32
        ("meta-llama/llama-3.1-8b", {"method": "lora"}, 4 + 2, 16 - 6),
        # fp32 throughout: the softmax alone
        ("meta-llama/llama-3.1-8b", {"method": "lora", "precision": "fp32"}, 4, 16 - 4),
        # Llama 4 leaves the softmax in bf16, autocast makes it fp32
        ("meta-llama/llama-4-scout-17b-16e", {"method": "lora", "precision": "bf16-pure"}, 2, 8 - 2),
        ("meta-llama/llama-4-scout-17b-16e", {"method": "lora"}, 4 + 2, 16 - 6),
        # GPT-2's own dropout keeps the dropped copy and a mask of one byte
        ("openai-community/gpt2", {"method": "lora", "precision": "bf16-pure"}, 2 + 2 + 1, 8 - 5),
        ("openai-community/gpt2", {"method": "lora", "precision": "fp32"}, 4 + 4 + 1, 16 - 9),
    ],
)
def test_eager_scores_by_hand(name: str, fields: dict[str, object], kept_bytes: int, backward: int) -> None:
    types = dtypes(**fields)
    scores = eager_scores(types, loaded(name).traits, types.attention_input)
    assert (scores.kept, scores.backward) == (kept_bytes, backward)


def test_math_kernel_keeps_one_fp32_matrix() -> None:
    scores = math_scores(loaded("meta-llama/llama-3.1-8b").traits)
    assert (scores.kept, scores.backward) == (4, 12)


def test_the_cast_head_is_counted_once_whatever_the_loss() -> None:
    """Gemma-2B with the k-bit cast: one bf16 copy of 256000 x 2048; Liger adds its chunk and two hidden gradients."""
    model = loaded("google/gemma-2b")
    head = 2 * 256000 * 2048
    assert model.head is not None
    assert model.head.num_weights == 256000 * 2048
    for loss in ("full", "liger"):
        common = {"method": "qlora", "quantization": "nf4", "loss": loss, "seq_len_tokens": 512}
        with_cast = loss_parts(model, TrainSetup(**common, kbit_fp32_cast=True))  # type: ignore[arg-type]
        without = loss_parts(model, TrainSetup(**common))  # type: ignore[arg-type]
        # the hidden states' gradient is fp32 with the cast
        assert with_cast.loss_bytes - without.loss_bytes == pytest.approx(head, rel=0.01)


def test_int8_inputs_of_a_parallel_block_are_kept_once() -> None:
    """Phi's attention and MLP read the same normed input: h = 2048, i = 8192, fp32 stream, per token and layer."""
    model = loaded("microsoft/phi-1_5")
    setup = TrainSetup(method="qlora", quantization="int8", seq_len_tokens=1000)
    pinned = activation_parts(model, A100, setup).stored["pinned"] / 1000 / model.num_layers
    # the shared input (fp32), the attention's output (bf16), the activated MLP (fp32)
    assert pinned == 4 * 2048 + 2 * 2048 + 4 * 8192


def test_a_tied_embeddings_halves_stay_apart_without_a_cast() -> None:
    tied, untied = loaded("qwen/qwen2.5-0.5b"), loaded("qwen/qwen2.5-7b")
    pure = TrainSetup(**FULL, precision="bf16-pure")  # type: ignore[arg-type]
    assert halves_stay_apart(tied, pure)
    assert halves_stay_apart(
        tied, pure.replace(precision="bf16-autocast")
    )  # autocast to the weights' own type casts none
    assert not halves_stay_apart(untied, pure)
    assert not halves_stay_apart(tied, TrainSetup(**FULL, precision="bf16-mixed"))  # type: ignore[arg-type]
    assert not halves_stay_apart(tied, pure.replace(loss="liger"))


@pytest.mark.parametrize(("name", "copies"), [("qwen/qwen2.5-0.5b", 1), ("qwen/qwen2.5-7b", 0)])
@pytest.mark.parametrize("accumulated", [False, True])
def test_the_embeddings_gradient_comes_last_and_alone(name: str, copies: int, accumulated: bool) -> None:
    model = loaded(name)
    setup = TrainSetup(**FULL, precision="bf16-pure", seq_len_tokens=512, loss="chunked")  # type: ignore[arg-type]
    trained = trained_parameters(model, setup)
    assert computing(model, activation_parts(model, A100, setup))[-1].size_bytes == 0  # all activations are gone
    end = backward_gradients(model, setup, trained, accumulated=accumulated)["end"]
    embedding = 2 * trained.embeddings
    assert end == (0 if accumulated else trained.size_bytes) + (copies + int(accumulated)) * embedding
    apart = backward_gradients(model, setup.replace(loss="full"), trained, accumulated=accumulated)["end"]
    assert apart == end + copies * embedding  # only a tied one has halves


def test_a_dequantized_matrix_and_the_mlps_gradients_are_two_moments() -> None:
    model, setup = (
        loaded("meta-llama/llama-3.1-8b"),
        TrainSetup(method="qlora", quantization="nf4", seq_len_tokens=2048),
    )
    parts = activation_parts(model, A100, setup)
    backward = [moment for moment in computing(model, parts) if moment.name in ("first", "last")]
    copies = {size for moment in backward for category, _, size in moment.terms if category == "dequantization"}
    assert copies == {0, 2 * 4096 * 14336}
    plain, copying = (
        [moment for moment in parts.layer_moments if (moment.dequantized > 0) is copies] for copies in (False, True)
    )
    assert max(moment.temporary for moment in copying) < max(moment.temporary for moment in plain)


def test_an_encoder_decoders_backward_begins_with_all_its_activations() -> None:
    """Seldom its largest moment; without it the phase would be said to need less than it starts with."""
    setup = TrainSetup(seq_len_tokens=512, checkpointing=2, micro_batch_seqs=3, loss="chunked")
    model = loaded("google-t5/t5-base")
    stored_bytes = sum(activation_parts(model, A100, setup).stored.values())
    breakdown = predict_memory(model, A100, setup)
    resident = sum(term.size_bytes for term in breakdown.terms if "step" in term.phases and "backward" in term.phases)
    assert breakdown.phase_bytes["backward"] >= stored_bytes + resident


def test_the_waiting_half_is_the_tied_tables_not_the_largest_ones() -> None:
    model = loaded("google/gemma-4-e2b-it")  # its inputs of each layer are a larger table than the tied one
    setup = TrainSetup(**FULL, precision="bf16-pure", seq_len_tokens=512, loss="chunked")  # type: ignore[arg-type]
    trained = trained_parameters(model, setup)
    assert trained.embeddings > trained.head
    whole = backward_gradients(model, setup, trained, accumulated=False)
    assert whole["end"] == trained.size_bytes + 2 * trained.head
    added = backward_gradients(model, setup, trained, accumulated=True)
    assert added["end"] == 2 * (trained.head + trained.embeddings)
    assert added["last"] == 2 * trained.head


def test_a_single_head_of_keys_is_repeated_by_a_view() -> None:
    model = loaded("google/gemma-3-270m")
    setup = TrainSetup(checkpointing=0, seq_len_tokens=1000)
    attention = model.layer_kinds[0].attention
    assert attention is not None
    assert attention.num_kv_heads == 1
    flash = activation_parts(model, A100, setup.replace(attention="flash-attention-2"))
    masked = activation_parts(model, A100, setup)
    assert masked.stored["scores"] > 0  # the window's mask: the memory-efficient kernel
    assert masked.stored["attention"] == flash.stored["attention"]


def test_t5s_own_loss_stays_in_16_bit_without_autocast() -> None:
    model = loaded("google-t5/t5-base")
    elements = 1024 * model.vocab_size
    pure = TrainSetup(**FULL, precision="bf16-pure", seq_len_tokens=1024)  # type: ignore[arg-type]
    assert loss_parts(model, pure).backward_bytes == 6 * elements
    assert loss_parts(model, pure.replace(precision="bf16-mixed")).backward_bytes >= 12 * elements


def test_a_gelu_of_products_keeps_every_factor() -> None:
    model = loaded("eleutherai/gpt-neox-20b")
    setup = TrainSetup(precision="fp32", checkpointing=0, lora_targets="attention", seq_len_tokens=1000)
    bytes_per_token = activation_parts(model, A100, setup).stored["mlp"] / model.num_layers / 1000
    assert bytes_per_token == 7 * 4 * 4 * model.hidden_size


@pytest.mark.parametrize(
    ("fields", "kept_bytes", "forward", "backward"),
    [
        # 16 bit throughout, the softmax too: the sum with the mask, the same less its maximum, and the softmax
        ({"method": "qlora", "quantization": "nf4-double"}, 2, 3 * 2, 4 * 2),
        ({"precision": "bf16-pure"}, 2, 3 * 2, 4 * 2),
        ({"precision": "fp32"}, 4, 3 * 4, 4 * 4),
        # an fp32 mask widens all three; values are fp32 in a quantized model, so the 16-bit copy comes later
        ({"method": "qlora", "quantization": "nf4", "kbit_fp32_cast": True}, 4 + 2, 3 * 4, 4 * 4),
        ({**FULL, "precision": "bf16-mixed"}, 4 + 2, 3 * 4, 4 * 4),
    ],
)
def test_attention_sinks_softmax_names_its_own_type(
    fields: dict[str, object], kept_bytes: int, forward: int, backward: int
) -> None:
    types, model = dtypes(**fields), loaded("openai/gpt-oss-20b")
    attention = model.layer_kinds[0].attention
    assert attention is not None
    assert attention.sinks
    scores = eager_scores(types, model.traits, types.linear_out(types.residual), sinks=True)
    assert (scores.kept, scores.forward, scores.kept + scores.backward) == (kept_bytes, forward, backward)


def test_batched_experts_multiply_in_16_bit_whatever_the_k_bit_cast_made_of_them() -> None:
    """Llama 4 Scout, 48 layers, 16 experts of 5120 x 8192 and a shared one: fp32 stacks leave bf16 copies."""
    model = loaded("meta-llama/llama-4-scout-17b-16e")
    cast = TrainSetup(
        method="qlora", quantization="nf4", kbit_fp32_cast=True, lora_targets="attention", checkpointing=0
    )

    def kept(setup: TrainSetup) -> tuple[int, int]:
        """(bytes per layer and token, bytes per layer that do not grow with the tokens) of the MLPs."""
        short, long = (
            activation_parts(model, A100, setup.replace(seq_len_tokens=tokens)).stored["mlp"] // 48
            for tokens in (1000, 2000)
        )
        return (long - short) // 1000, 2 * short - long

    copies = 2 * 16 * 3 * 5120 * 8192
    # every token in each expert: fp32 repeat, gate, up and activated gate in bf16; the router's; the shared one in fp32
    routed = 16 * (4 * 5120 + 3 * 2 * 8192 + 40) + 4 * 16
    assert kept(cast) == (routed + 3 * 4 * 8192, copies)
    assert kept(cast.replace(kbit_fp32_cast=False))[1] == 0
    checkpointed = activation_parts(model, A100, cast.replace(checkpointing=1, seq_len_tokens=1000))
    assert checkpointed.recomputed > copies  # a recomputed layer makes them anew
    # adapted experts: the copy of the merged stack, as large
    assert kept(cast.replace(lora_targets="all-linear"))[1] == copies
