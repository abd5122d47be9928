"""What the phantom GPU refuses by name, and whose failure a failure is."""

import sys
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from planner.core.units import MIB
from probes.phantom.cuda import Refused
from probes.phantom.failures import error_text, status_of
from probes.phantom.mode import Phantom
from probes.phantom.session import EAGER, phantom_gpu
from tests.probes.phantom.conftest import CARD


def test_what_splits_a_model_otherwise_than_fsdp2_is_refused(phantom: Phantom) -> None:
    from torch.distributed import fsdp
    from torch.distributed.tensor import parallel

    distributed.init_process_group("nccl", rank=0, world_size=2)
    layer = nn.Linear(8, 8).cuda()
    with pytest.raises(Refused, match="FullyShardedDataParallel"):
        fsdp.FullyShardedDataParallel(layer)
    with pytest.raises(Refused, match="way to split a model"):
        parallel.parallelize_module(layer, distributed.init_device_mesh("cuda", (2,)), parallel.ColwiseParallel())
    with pytest.raises(Refused, match="communication hook"):
        nn.parallel.DistributedDataParallel(layer, device_ids=[0]).register_comm_hook(None, None)


def test_flex_attention_is_refused(phantom: Phantom) -> None:
    from torch.nn.attention import flex_attention

    heads = torch.randn(1, 2, 128, 64, device="cuda")
    with pytest.raises(Refused, match="would hold the scores"):
        flex_attention.flex_attention(heads, heads, heads)


@pytest.mark.parametrize(
    ("file", "call"),
    [
        ("flash_attn/flash_attn_interface.py", "flash_attn_func"),
        ("flash_attn/flash_attn_interface.py", "flash_attn_varlen_qkvpacked_func"),
        ("flash_attn_interface.py", "flash_attn_varlen_func"),
        ("flash_attn/cute/interface.py", "flash_attn_func"),
        ("xformers/ops/fmha.py", "memory_efficient_attention"),
        ("deepspeed.py", "initialize"),
    ],
)
def test_packages_with_memory_of_their_own_are_refused_when_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, call: str
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    name = file.removesuffix(".py").replace("/", ".")
    path.write_text(f"def {call}(*args):\n    return 'ran'\n\n\ndef other():\n    return 'ran'\n")
    monkeypatch.syspath_prepend(tmp_path)
    import importlib

    try:
        with phantom_gpu(CARD):
            module = importlib.import_module(name)
            assert module.other() == "ran"
            with pytest.raises(Refused, match=f"{name}.{call}"):
                getattr(module, call)(1)
        assert getattr(module, call)(1) == "ran"
    finally:
        for module_name in [
            loaded_name for loaded_name in sys.modules if loaded_name.partition(".")[0] == name.partition(".")[0]
        ]:
            del sys.modules[module_name]


OPERATOR = """
@torch.library.custom_op("finetune_planner_test::{0}", mutates_args=(), device_types="cuda")
def {0}(tensor: torch.Tensor) -> torch.Tensor:
    raise AssertionError("its kernel ran")
"""


def test_an_operator_of_the_programs_own_is_followed_by_its_shapes(phantom: Phantom) -> None:
    scope = {"torch": torch}
    exec(OPERATOR.format("shaped"), scope)
    scope["shaped"].register_fake(torch.empty_like)  # type: ignore[attr-defined]
    for tensor in (torch.randn(1024, 1024, device="cuda"), torch.arange(1 << 20, device="cuda", dtype=torch.int32)):
        before = torch.cuda.memory_allocated()
        made = scope["shaped"](tensor)  # type: ignore[operator]
        assert (made.device.type, torch.cuda.memory_allocated() - before) == ("cuda", 4 * MIB)
        del made


def test_what_is_compiled_runs_eagerly_and_it_is_said(phantom: Phantom) -> None:
    layer = nn.Linear(8, 8).cuda()
    assert torch.compile(layer) is layer
    torch.compile(mode="reduce-overhead")(lambda rows: layer(rows))(torch.ones(2, 8, device="cuda"))
    assert list(phantom.notes) == [EAGER]

    @torch.jit.script
    def of_any_arguments(*rows: torch.Tensor) -> torch.Tensor:  # which TorchScript would refuse
        return torch.tensor(rows[0].sum())

    assert of_any_arguments(torch.ones(2, device="cuda")).device.type == "cuda"


def test_streams_events_and_pinned_memory_are_taken_as_they_are(phantom: Phantom) -> None:
    """Everything has happened already; blocks of another stream are PyTorch's own pool, which is said."""
    side, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(torch.cuda.current_stream()):
        assert not phantom.notes
    with torch.cuda.stream(side):
        rows = torch.empty(MIB, pin_memory=True).to("cuda", non_blocking=True)
        event.record()
    torch.cuda.current_stream().wait_stream(side)
    assert (event.query(), rows.device.type) == (True, "cuda")
    assert any("a stream of its own" in note for note in phantom.notes)
    ids = torch.arange(3)
    assert [tensor.is_pinned() for tensor in (ids, ids.pin_memory(), torch.ones(2, pin_memory=True))] == [
        False,
        True,
        True,
    ]
    assert ids.pin_memory().tolist() == [0, 1, 2]


@pytest.mark.parametrize("version", [2, 3, 4])
def test_flash_attention_that_is_not_installed_is_no_fault_of_the_program(phantom: Phantom, version: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    with pytest.raises(ImportError) as raised:
        LlamaForCausalLM._from_config(config, attn_implementation=f"flash_attention_{version}")
    assert status_of(raised.value, raised.tb) == "untraceable"
    assert "flash-attention is not installed in this environment" in error_text(raised.value)


def _failure_of(program: str) -> str:
    with phantom_gpu(CARD):
        try:
            exec(compile(program, "train.py", "exec"), {"torch": torch, "nn": nn})
        except Exception as error:
            return status_of(error, error.__traceback__)
    return "ran"


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("torch.cuda.get_device_properties(0).no_such_field", "untraceable"),
        ("torch.cuda.current_stream().no_such_method()", "untraceable"),
        ("torch.histogram(torch.randn(64, 64, device='cuda'), 5)", "untraceable"),
        ("raise RuntimeError('incompatible tensor type in set_data')", "untraceable"),
        ("import flash_attn", "untraceable"),
        ("import kernels", "untraceable"),
        ("raise RuntimeError(\"Error building extension 'mine': nvcc\")", "untraceable"),
        (OPERATOR.format("unshaped") + "unshaped(torch.zeros(8, device='cuda'))", "untraceable"),
        ("torch.zeros(8, device='cuda').record_stream(torch.cuda.Stream())", "ran"),
        ("torch.cuda.nvtx.range_push(str(torch.cuda.nccl.version())); torch.cuda.nvtx.range_pop()", "ran"),
        ("raise RuntimeError('not available in CPU-only version of bitsandbytes')", "untraceable"),
        ("raise OSError(\"We couldn't connect to 'https://huggingface.co' to load the files\")", "untraceable"),
        ("torch.cuda.CUDAGraph()", "refused"),
        ("torch.zeros(3, 4, device='cuda') @ torch.zeros(5, 6, device='cuda')", "failed"),
        ("nn.Linear(4, 4).cuda()(torch.zeros(2, 8, device='cuda'))", "failed"),
        ("import no_such_package", "failed"),
        ("raise ValueError('mine')", "failed"),
        ("nn.Linear(4, 4).no_such_layer", "failed"),
    ],
)
def test_whose_failure_it_is(program: str, status: str) -> None:
    assert _failure_of(program) == status


def test_a_library_that_looks_for_a_missing_gpu_package_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phantom: Phantom
) -> None:
    phantom.notes.clear()  # of libraries that other tests of this process imported
    for library in ("some_library", "bitsandbytes"):
        folder = tmp_path / "site-packages" / library
        folder.mkdir(parents=True)
        folder.joinpath("look.py").write_text("import importlib.util\nfound = importlib.util.find_spec('mamba_ssm')\n")
        exec(compile(folder.joinpath("look.py").read_text(), str(folder / "look.py"), "exec"), {})
    (note,) = phantom.notes
    assert note.startswith("some_library looked for mamba_ssm, which is not installed here")
    phantom.notes.clear()
    (tmp_path / "mamba_ssm.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    exec(compile("import importlib.util; assert importlib.util.find_spec('mamba_ssm')", "train.py", "exec"), {})
    assert not phantom.notes
