"""Small programs of ours that do what others' do: generation, inference mode, paged states, TRL's trainer."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.trace_published import RUNS, traced
from finetune_planner.cli.app import run
from planner.core.units import GIB, MIB
from probes.allocator.events import Alloc, Event, Free
from probes.phantom.card import TraceOptions
from probes.phantom.cuda import Refused
from probes.phantom.failures import error_text, status_of
from probes.phantom.images import processor_for
from probes.phantom.loading import _all_on_the_gpu, _mirrored
from probes.phantom.mode import Phantom
from probes.phantom.runner import TraceOrder, _with_scripts
from probes.phantom.session import phantom_gpu
from probes.phantom.texts import clip, columns_of, whispers_processor
from tests.probes.phantom.conftest import CARD
from tests.whole import WHOLE, some

WORKSPACE = 8320 * 1024  # of cuBLAS, one for the forward's thread and one for the backward's


def test_inference_mode_counts_what_composite_operators_allocate(phantom: Phantom) -> None:
    """There they arrive whole: a product of two batches, and a move to the GPU."""
    rows = torch.arange(8)
    hidden = torch.zeros(4, 256, 256, device="cuda")
    with torch.inference_mode():
        assert rows.to("cuda").tolist() == list(range(8))
        before = torch.cuda.memory_allocated()
        product = torch.matmul(hidden, hidden[0])
    assert product.device.type == "cuda"
    assert torch.cuda.memory_allocated() - before == MIB + 8320 * 1024


class _Layers(nn.Module):
    def __init__(self, *, checkpointing: bool) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpointing else block(hidden)
        return hidden


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_backward_knows_its_modules(phantom: Phantom, checkpointing: bool) -> None:
    model = _Layers(checkpointing=checkpointing).cuda()
    model(torch.randn(512, 64, device="cuda")).sum().backward()
    origins = [origin for origin in phantom.origins.by_allocation.values() if origin.phase == "backward"]
    named = {origin.module for origin in origins}
    assert {f"blocks.{block}.{layer}" for block in range(3) for layer in range(3)} <= named
    assert all(origin.module or "workspace" in origin.op or origin.size_bytes <= 512 * 64 * 4 for origin in origins)
    by_weight = {origin.module for origin in origins if origin.size_bytes == 64 * 64 * 4}
    assert by_weight == {f"blocks.{block}.{layer}" for block in range(3) for layer in (0, 2)}


def test_paged_states_take_no_memory_of_pytorchs(phantom: Phantom) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    layer = nn.Linear(1024, 1024, bias=False, device="cuda")
    peaks = []
    for optimizer in (bnb.optim.AdamW8bit(layer.parameters()), bnb.optim.PagedAdamW8bit(layer.parameters())):
        layer(torch.ones(2, 1024, device="cuda")).sum().backward()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        peaks.append(torch.cuda.memory_allocated() - before)
        optimizer.zero_grad()
        del optimizer
    assert peaks[0] - peaks[1] == 2 * MIB
    assert any("unified memory" in note for note in phantom.notes)


def test_states_made_in_a_backward_are_paged_too(phantom: Phantom) -> None:
    """Before: an optimizer that steps as its gradient comes (torchtune's optimizer_in_bwd) was counted unpaged."""
    bnb = pytest.importorskip("bitsandbytes")
    layer = nn.Linear(1024, 1024, bias=False, device="cuda")
    layer(torch.ones(2, 1024, device="cuda")).sum().backward()  # makes the workspaces
    layer.zero_grad()
    added_bytes = []
    for kind in (bnb.optim.AdamW8bit, bnb.optim.PagedAdamW8bit):
        optimizer = kind(layer.parameters())

        def step(_: torch.Tensor, bound_optimizer: Any = optimizer) -> None:
            bound_optimizer.step()
            bound_optimizer.zero_grad()

        hook = layer.weight.register_post_accumulate_grad_hook(step)
        before = torch.cuda.memory_allocated()
        layer(torch.ones(2, 1024, device="cuda")).sum().backward()
        added_bytes.append(torch.cuda.memory_allocated() - before)
        assert layer.weight.grad is None
        hook.remove()
        del optimizer, hook, step
    assert added_bytes[0] - added_bytes[1] == 2 * MIB


def test_what_one_program_told_bitsandbytes_does_not_reach_the_next() -> None:
    """Its manager is one per process and knows a parameter by its place in the optimizer."""
    bnb = pytest.importorskip("bitsandbytes")
    sizes = []
    for wide in (False, True, False):
        with phantom_gpu(CARD):
            layer = nn.Linear(1024, 1024, bias=False, device="cuda")
            if wide:
                manager = bnb.optim.GlobalOptimManager.get_instance()
                manager.register_module_override(layer, "weight", {"optim_bits": 32})
            optimizer = bnb.optim.AdamW8bit(layer.parameters())
            layer(torch.ones(2, 1024, device="cuda")).sum().backward()
            before = torch.cuda.memory_allocated()
            optimizer.step()
            sizes.append(torch.cuda.memory_allocated() - before)
    assert (sizes[1], sizes[2]) == (8 * MIB, sizes[0])


@pytest.mark.parametrize(("num_pictures", "num_tokens"), [(1, 576), (2, 1152)])
def test_a_vision_language_model_sees_pictures_as_transformers_would(
    phantom: Phantom, tmp_path: Path, num_pictures: int, num_tokens: int
) -> None:
    """LLaVA: 336 pixels in patches of 14 are 24 x 24 tokens, whatever the picture's own size."""
    from transformers import AutoModelForImageTextToText, AutoProcessor, CLIPVisionConfig, LlamaConfig, LlavaConfig

    vision = CLIPVisionConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    text = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    vision.image_size, vision.patch_size, text.vocab_size = 336, 14, 32064
    architectures = ["LlavaForConditionalGeneration"]
    LlavaConfig(vision_config=vision, text_config=text, architectures=architectures).save_pretrained(tmp_path)
    row = columns_of("llava-instruct-mix-vsft", 4, image_size=(640, 480))
    row["messages"][0]["content"] = row["messages"][0]["content"][:1] * num_pictures
    processor = AutoProcessor.from_pretrained(tmp_path)
    prompt = processor.apply_chat_template(row["messages"])
    batch = processor(images=row["images"] * num_pictures, text=[prompt], return_tensors="pt").to("cuda")
    assert batch["pixel_values"].shape == (num_pictures, 3, 336, 336)
    assert int((batch["input_ids"] == 32000).sum()) == num_tokens
    model = AutoModelForImageTextToText.from_pretrained(tmp_path).cuda()
    model(**batch, labels=batch["input_ids"]).loss.backward()
    assert all(parameter.grad is not None for parameter in model.model.multi_modal_projector.parameters())
    assert any("one made from config.json stands in" in note for note in phantom.notes)


_QWEN_TEXT = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
}  # fmt: skip
_QWEN_VISION = {"depth": 2, "num_heads": 2, "hidden_size": 64, "intermediate_size": 64, "out_hidden_size": 64}


@pytest.mark.parametrize(
    ("kind", "built", "vision_encoders", "num_patches"),
    some(
        [
            ("qwen2_5_vl", "Qwen2_5_VL", {"fullatt_block_indexes": [1]}, 74 * 74),  # 1024 pixels become 1036 of 14 each
            ("qwen3_vl", "Qwen3VL", {"deepstack_visual_indexes": [0]}, 64 * 64),
            ("qwen3_vl_moe", "Qwen3VLMoe", {"deepstack_visual_indexes": [0]}, 64 * 64),
        ],
        3,
    ),
)
def test_qwens_pictures_have_as_many_tokens_as_their_size_makes(
    phantom: Phantom, tmp_path: Path, kind: str, built: str, vision_encoders: dict[str, Any], num_patches: int
) -> None:
    """Also without torchvision, which transformers wants for videos."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    document = {
        "model_type": kind,
        "architectures": [f"{built}ForConditionalGeneration"],
        "text_config": _QWEN_TEXT | {"vocab_size": 151936},
        "vision_config": _QWEN_VISION | vision_encoders,
    }
    (tmp_path / "config.json").write_text(json.dumps(document))
    row = columns_of("llava-instruct-mix-vsft", 4, image_size=(1024, 1024))
    processor = AutoProcessor.from_pretrained(tmp_path)
    prompt = processor.apply_chat_template(row["messages"])
    batch = processor(images=row["images"], text=[prompt], return_tensors="pt").to("cuda")
    assert batch["pixel_values"].shape[0] == num_patches
    assert int((batch["input_ids"] == processor.image_token_id).sum()) == num_patches // 4
    model = AutoModelForImageTextToText.from_pretrained(tmp_path).cuda()
    model(**batch, labels=batch["input_ids"]).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("objective", "columns"),
    [
        ("sft", {"text"}),
        ("dpo", {"chosen", "rejected", "score_chosen", "score_rejected"}),
        ("kto", {"prompt", "completion", "label"}),
        ("orpo", {"chosen", "rejected", "score_chosen", "score_rejected"}),
        ("reward", {"chosen", "rejected"}),
    ],
)
def test_stand_in_rows_are_of_the_objective_that_is_known(objective: str, columns: set[str]) -> None:
    """The placeholder of a launch file says nothing of what its rows hold."""
    row = columns_of("YOUR_DATASET", 65, objective=objective)
    assert set(row) == columns
    if objective == "reward":
        assert len(row["chosen"]) + 1 == 64  # and the token that ends it: its trainer drops what is longer


def test_rows_of_a_program_that_classifies_have_a_label(phantom: Phantom, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(sys.modules["__main__"], "AutoModelForSequenceClassification", object, raising=False)
    assert datasets.load_dataset("nobody/knows-this", split="train").column_names == ["text", "label"]


@pytest.mark.parametrize("drop_last", [True, False])
def test_stand_in_rows_fill_every_batch_of_the_size_that_the_program_gives(
    drop_last: bool, phantom: Phantom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 rows are no batch of 100, and none of alike rows to a sampler that wants them all different."""
    import datasets
    from sentence_transformers.base.sampler import NoDuplicatesBatchSampler
    from torch.utils.data import DataLoader

    own = datasets.Dataset.from_dict({"text": ["a"] * 3})
    assert [len(batch["text"]) for batch in DataLoader(own, batch_size=100)] == [3]
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    rows = datasets.load_dataset("nobody/knows-this", split="train")
    assert len(rows.train_test_split(test_size=10_000)["train"]) == len(rows) // 2
    different = NoDuplicatesBatchSampler(rows, batch_size=100, drop_last=drop_last)
    streamed = datasets.load_dataset("nobody/knows-this", split="train", streaming=True)
    for loader in (
        DataLoader(rows, batch_size=100, shuffle=True, drop_last=drop_last),
        DataLoader(rows, batch_sampler=different),
        DataLoader(streamed, batch_size=100, drop_last=True),
    ):
        sizes = [len(batch["text"]) for batch in loader]
        assert sizes[:2] == [100, 100]


def test_a_column_that_stand_in_rows_lack_is_added(phantom: Phantom, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program reads the columns that its data set has; its name does not always tell them."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    rows = datasets.load_dataset("nobody/knows-this", split="train")
    made = rows.map(lambda row: {"joined": row["query"] + row["response"]}, remove_columns=rows.column_names)
    assert (made.column_names, len(made[0]["joined"])) == (["joined"], 2 * (32 + phantom.options.num_tokens))
    first = next(iter(rows))
    assert (first["image"].size, len(first["query"])) == (phantom.options.image_size, 2 * 32)
    pictured = rows.select([0]).map(lambda row: {"width": row["image"].width})
    assert pictured[0]["width"] == phantom.options.image_size[0]
    own = datasets.Dataset.from_dict({"text": ["a"]})
    with pytest.raises(KeyError):
        own.map(lambda row: row["query"])
    with pytest.raises(KeyError):
        next(iter(own))["query"]
    error = ValueError("no prompt left")
    assert status_of(error, None) == "failed"
    assert status_of(error, None, phantom.stand_in_rows) == "untraceable"
    assert "nobody/knows-this is not on this machine" in error_text(error, phantom.stand_in_rows)


@pytest.mark.parametrize(("name", "pads"), [("google-t5/t5-small", True), ("gpt2", False)])
def test_a_stand_in_tokenizer_pads_where_the_class_of_the_true_one_does(
    name: str, pads: bool, phantom: Phantom, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    monkeypatch.delitem(sys.modules, "sentence_transformers", raising=False)  # beside which every one pads
    tokenizer = AutoTokenizer.from_pretrained(name)
    assert (tokenizer.pad_token is not None) == pads
    if not pads:
        with pytest.raises(ValueError, match="Asking to pad") as raised:
            tokenizer(["a", "aa"], padding=True)
        assert "stand-in for a tokenizer" in error_text(raised.value, "a data set")


@pytest.mark.parametrize("kind", ["florence2", "vipllava", "pixtral"])
def test_a_processor_of_a_family_that_is_not_known_is_refused(kind: str) -> None:
    """Nor one of another type's class that the type's configuration does not serve."""
    with pytest.raises(Refused, match=f"what {kind} makes of a picture is not known here"):
        processor_for("someone/model", SimpleNamespace(model_type=kind), lambda tokens: None)


def _highest(events: Sequence[Event]) -> int:
    """Bytes alive at the highest moment, of what came to life within."""
    alive: dict[int, int] = {}
    highest = 0
    for event in events:
        if isinstance(event, Alloc):
            alive[event.id] = event.size_bytes
            highest = max(highest, sum(alive.values()))
        elif isinstance(event, Free):
            alive.pop(event.id, None)
    return highest


def test_generation_is_as_long_as_allowed_and_holds_what_every_token_would(
    phantom: Phantom, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from probes.phantom import generation

    config = LlamaConfig(
        hidden_size=512, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
    )
    model = LlamaForCausalLM(config).cuda().eval()
    prompt = torch.arange(100).view(20, 5).cuda()
    model.generation_config.eos_token_id = 40
    peaks = []
    for followed in (4, 4, 1000):  # once more, as cuBLAS's workspace and the positions stay
        monkeypatch.setattr(generation, "_FOLLOWED", followed)
        begin = len(phantom.memory.events)
        ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=True)
        assert ids.shape == (20, 45)
        assert ids[:, :5].tolist() == prompt.tolist()
        assert not bool((ids[:, 5:] == 40).any())
        peaks.append(_highest(phantom.memory.events[begin:]))
    assert peaks[1] == pytest.approx(peaks[2], rel=0.001)  # the token ids
    assert peaks[1] > 2 * 2 * 20 * 44 * 512 * 4  # keys and values, layers
    assert any(note.startswith("generation: ") for note in phantom.notes)


def test_saving_writes_no_weights(phantom: Phantom, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weight = torch.ones(4, device="cuda")
    save_file({"weight": weight}, tmp_path / "empty.safetensors")
    assert (tmp_path / "empty.safetensors").stat().st_size < 4096
    torch.save({"weight": weight}, tmp_path / "model.pt")
    assert (tmp_path / "model.pt").stat().st_size < 4096
    addresses = [tensor.untyped_storage().data_ptr() for tensor in (weight, weight[1:], torch.ones(4, device="cuda"))]
    assert addresses[0] == addresses[1] != addresses[2]  # how transformers finds shared weights


def test_ddp_holds_its_buckets_beside_the_gradients(phantom: Phantom, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    distributed.init_process_group("nccl")
    assert (torch.cuda.device_count(), distributed.get_world_size(), distributed.get_rank()) == (4, 4, 0)
    answers: list[Any] = [None] * 4
    distributed.all_gather_object(answers, "same")
    assert answers == ["same"] * 4
    layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8))).cuda()
    allocated_bytes = []
    for wrapped in (False, True):
        model = nn.parallel.DistributedDataParallel(layers, device_ids=[0]) if wrapped else layers
        for _ in range(2):
            model(torch.ones(8, 1024, device="cuda")).sum().backward()
        allocated_bytes.append(torch.cuda.memory_allocated())
        model.zero_grad()
    assert allocated_bytes[1] - allocated_bytes[0] == 32 * MIB
    assert phantom.memory.group_bytes > 0
    assert any(note.startswith("rank 0 of 4 processes") for note in phantom.notes)


def test_fsdp2_holds_its_part_and_gathers_a_layer_at_a_time(phantom: Phantom) -> None:
    """By hand, over 4 ranks: a weight of 4 MiB is 1 MiB here, its gradient too; gathered it is whole."""
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("nccl", rank=0, world_size=4)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(3)))
    for module in (*model, model):
        fully_shard(module)
    assert torch.cuda.memory_allocated() == 0
    model.to_empty(device="cuda")
    for layer in model:
        layer.reset_parameters()
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    assert torch.cuda.memory_allocated() == 3 * MIB
    rows = torch.ones(8, 1024, device="cuda")
    model(rows).sum().backward()
    after = torch.cuda.memory_allocated() - rows.numel() * 4 - 2 * WORKSPACE
    assert after == 6 * MIB
    # two layers gathered at once (the next one is fetched ahead): their buffers and whole weights, beside the parts
    assert 15 * MIB < torch.cuda.max_memory_allocated() - 2 * WORKSPACE < 27 * MIB
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    assert torch.cuda.memory_allocated() - rows.numel() * 4 - 2 * WORKSPACE - 6 * MIB in range(6 * MIB, 6 * MIB + 8192)


def test_a_model_partly_on_the_host_is_refused() -> None:
    _all_on_the_gpu("LlamaForCausalLM", {"model": 0, "lm_head": 0})
    _all_on_the_gpu("LlamaForCausalLM", {"": "cpu"})
    with pytest.raises(Refused, match="leaves 1 of its 2 parts to the host"):
        _all_on_the_gpu("LlamaForCausalLM", {"model": 0, "lm_head": "cpu"})


def test_devices_by_number_and_default_devices(phantom: Phantom) -> None:
    assert torch.empty(2, device=0).device == torch.device("cuda", 0)
    with torch.device("meta"):
        assert nn.Linear(2, 2).weight.device.type == torch.zeros_like(torch.empty(2)).device.type == "meta"
    with torch.device("cuda"):
        assert torch.empty(2).device.type == torch.tensor([1]).device.type == "cuda"
    assert torch.empty(2).device.type == "cpu"


def test_copies_that_unsloth_publishes_are_quantized_as_their_name_says() -> None:
    entry, extra = _mirrored("unsloth/Meta-Llama-3.1-8B-bnb-4bit")
    assert entry.names[0] == "meta-llama/llama-3.1-8b"
    assert extra["quantization_config"]["load_in_4bit"]
    assert _mirrored("unsloth/Llama-3.1-8B") == _mirrored("NousResearch/Meta-Llama-3.1-8B") == (entry, {})
    assert _mirrored("someone/Llama-3.1-8B") == _mirrored("unsloth/no-such") == (None, {})
    with pytest.raises(Refused, match="4 bits"):
        _mirrored("unsloth/Llama-3.1-8B-unsloth-bnb-4bit")


@pytest.mark.slow
@pytest.mark.skipif(not WHOLE, reason="2 CPU seconds; test_launch_files.py traces trainers (TESTS_WHOLE=1)")
@pytest.mark.parametrize("index", range(len(RUNS)))
def test_a_public_program_holds_what_its_author_measured(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """DaoyuanLi2816/can-i-finetune-this@053ce9e benchmarks/results: an RTX 4080 (benchmarks/trace_published.py)."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("bitsandbytes")
    run = RUNS[index]
    trace = traced(run._replace(num_steps=2))  # the highest moment is the second step's
    assert trace.peak_allocated_bytes / GIB == pytest.approx(run.allocated_gib, rel=0.002)
    assert trace.peak_reserved_bytes / GIB == pytest.approx(run.reserved_gib, rel=0.03)


SFT = """
import sys
from pathlib import Path
from datasets import Dataset
from trl import get_peft_config  # of a module that looks for Triton, before anything of transformers
from transformers import LlamaConfig
from trl import SFTConfig, SFTTrainer

model = Path(sys.argv[1], "model")
LlamaConfig(
    hidden_size=256, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
    vocab_size=32000, architectures=["LlamaForCausalLM"], dtype="bfloat16",
).save_pretrained(model)
arguments = SFTConfig(output_dir=str(model / "out"), max_length=512, per_device_train_batch_size=2, report_to="none")
SFTTrainer(model=str(model), args=arguments, train_dataset=Dataset.from_dict({"text": ["a" * 600] * 8})).train()
"""
WITH_TRITON_BYTES = 362_493_952
"""Of this program with triton 3.9 installed (torch 2.13.0, transformers 5.23.0, TRL 1.16.0)."""


@pytest.mark.skipif(not WHOLE, reason="tests/probes/phantom/test_launch_files.py traces TRL's trainer (TESTS_WHOLE=1)")
def test_trls_trainer_holds_the_same_whether_triton_is_installed_or_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SFT)
    code = run(
        ["trace", "--gpu", "a100-80gb", "--yes", "--json=full", "--", sys.executable, str(script), str(tmp_path)]
    )
    captured = capfd.readouterr()
    assert code == 0, captured.err[-2000:]
    answer: dict[str, Any] = json.loads(captured.out)
    assert (answer["num_steps"], answer["kernels"]["_forward_kernel"]) == (2, 2)
    assert answer["peak_allocated_bytes"] == WITH_TRITON_BYTES
    assert {"name": "(backward)"}.items() not in [row.items() for row in answer["by_module"]]
    assert not any("triton" in note for note in answer["notes"])


def test_a_processor_of_sound_is_made_of_the_configuration() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.WhisperConfig(num_mel_bins=128)
    processor = whispers_processor(config, transformers.PreTrainedTokenizerFast(tokenizer_object=_bytes()))
    row = clip(8192)
    made = processor.feature_extractor([row["audio"]["array"]], sampling_rate=16_000, return_tensors="pt")
    assert tuple(made.input_features.shape) == (1, 128, 3000)
    assert len(row["text"]) == 225
    processor.tokenizer.set_prefix_tokens(language="hindi", task="transcribe")


def _bytes() -> Any:
    from tokenizers import Tokenizer, models

    return Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))


def test_a_notebooks_cells_run_in_its_place(tmp_path: Path) -> None:
    """Imports look in the folder, as a kernel's do, and a cell's lines keep their numbers; `find_spec` works."""
    cells = ["!pip install x\nimport trl_beside\n", "%%bash\nls\n"]
    cells.append("from importlib.util import find_spec\nfind_spec('google.colab').name\n")
    cells.append("from google.colab import userdata\nfrom huggingface_hub import login\nlogin(userdata.get('HF'))\n")
    cells.append("def f():\n    return 1 / 0\nprint(trl_beside.A)\n\nf()\n")
    codes = [{"cell_type": "code", "source": code} for code in cells]
    (tmp_path / "my trl.ipynb").write_text(json.dumps({"cells": codes}))
    (tmp_path / "trl_beside.py").write_text("A = 'beside'\n")
    order = TraceOrder(command=("my trl.ipynb",), card=CARD, options=TraceOptions(), folder=tmp_path)
    (word,), scripts = _with_scripts(order, tmp_path)
    (place,) = scripts
    assert word == str(tmp_path / place)
    Path(word).parent.mkdir(parents=True)
    Path(word).write_text(scripts[place])
    for before, by_us in (("python3", True), ("papermill", False)):
        words, scripts = _with_scripts(replace(order, command=(before, "my trl.ipynb")), tmp_path)
        assert (words[1] != "my trl.ipynb", bool(scripts)) == (by_us, by_us)
    ran = subprocess.run([sys.executable, word], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.stdout == "beside\n"
    assert 'File "my trl.ipynb:cell 5", line 2, in f' in ran.stderr
