"""Gemma 3n: what its encoder of convolutions keeps is what timm's keeps, a picture becomes what its processor makes of
it, and the formula agrees with the dry run."""

import weakref
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import frozen
from benchmarks.image_models import METHODS, configs, setup_of, spec_of
from planner.core.errors import SetupError
from planner.hardware.gpus import find_gpu
from planner.memory.dtypes import SIZE_BYTES
from planner.memory.model import predict_memory
from planner.memory.trained import trained_parameters
from planner.models.encoders import encoder_of, image_tokens
from planner.models.families import spec_from_config
from planner.models.stored import stored_refusal
from planner.models.vision_encoders import mobilenet
from planner.options.images import Images
from planner.planning.predict import predict
from planner.setup import TrainSetup
from probes.dryrun.api import report_for_config
from probes.dryrun.kernels import Attention, KernelLog, choose_sdpa_kernel, sdpa_of
from probes.dryrun.report import DryRunReport
from probes.stack import build
from probes.stack.autocast import emulated_autocast
from probes.stack.configs import load_config
from tests.probes.dryrun_small import reported
from tests.whole import some

TOLERANCE = 0.03
"""The worst Gemma 3n of the frozen dry runs is 1.9 %."""
SMALL, LARGE = "gemma-3n-E2B-it", "gemma-3n-E4B-it"
SMALL_TOLERANCE = 0.15
"""Of a quarter of the width, where what stands around the layers, which is not counted, is more of the whole: the worst
is 13.6 %."""
TIMM = Path(__file__).parents[2] / ".venv" / "timm"
WITH_TIMM = pytest.mark.skipif(
    not TIMM.is_dir() and find_spec("timm") is None, reason="timm is not installed (setup.sh does)"
)
CARD = find_gpu("h100-sxm")
RECORDED = [row for row in frozen.rows("pictures") if row["model"] in (SMALL, LARGE)]
PARAMS = {SMALL: 5_418_464_192, LARGE: 7_818_517_072}
"""The published checkpoints hold as many more as keys and values of the layers that share another's: 20,974,080 and
31,461,120, which transformers 5.23 does not build."""


@pytest.fixture(autouse=True)
def _timm_in_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only here: Accelerate's commands do not start beside a timm without torchvision."""
    monkeypatch.syspath_prepend(TIMM)


def raw(name: str = SMALL) -> dict[str, Any]:
    """The published configuration."""
    return dict(configs()[name])


@pytest.mark.parametrize("name", PARAMS)
def test_what_ships_counts_what_transformers_builds_with_timms_tower(name: str) -> None:
    """Golden: counted on the module tree with timm 1.0.31, whose encoder alone has 294,126,912."""
    assert spec_of(name, raw(name)).num_params == PARAMS[name]
    assert mobilenet.NUM_PARAMS == 294_126_912


def test_formula_agrees_with_the_recorded_dry_runs() -> None:
    assert len(RECORDED) == 16
    for point in map(frozen.point_of, RECORDED):
        peak_bytes = predict_memory(point.model, CARD, point.setup).peak_allocated_bytes
        assert peak_bytes == pytest.approx(point.measured["allocated"], rel=TOLERANCE), point.setup


def test_a_picture_becomes_what_its_processor_makes_of_it(tmp_path: Path) -> None:
    from probes.phantom.images import KINDS, processor_for
    from probes.phantom.texts import stand_in_tokenizer

    config = load_config(raw())
    config.get_text_config().vocab_size = 2048
    config.image_token_id = 1000
    config.save_pretrained(tmp_path)
    processor = processor_for(SMALL, config, lambda tokens: stand_in_tokenizer(str(tmp_path), tokens))
    model = spec_of(SMALL, raw())
    for width, height in ((1024, 1024), (300, 900), (40, 40)):
        picture = torch.zeros(3, height, width, dtype=torch.uint8).numpy()
        made = processor(images=[[picture]], text=[KINDS[type(processor).__name__].picture], return_tensors="pt")
        encoder = encoder_of(model, Images(width=width, height=height))
        assert int((made["input_ids"] == 1000).sum()) == encoder.tokens == 256
        assert encoder.frames * encoder.input_bytes == 4 * made["pixel_values"].numel()
    assert image_tokens(model, Images(num=2, width=64, height=64)) == 520


def test_lora_reaches_no_convolution_and_checkpointing_no_tower() -> None:
    """PEFT's "all-linear" takes nn.Linear alone: of what sees, the matrix behind the tower."""
    model = spec_of(SMALL, raw())
    image = Images(width=512, height=512)
    tower_bytes = {}
    for method in ("lora", "full"):
        for checkpointing in (0, 1):
            setup = setup_of(model, METHODS[method], (1, 512, 1, 1)).replace(checkpointing=checkpointing)
            terms = predict_memory(model, CARD, setup).terms
            tower_bytes[method, checkpointing] = max(
                (term.size_bytes for term in terms if term.name == "the encoder's activations"), default=0
            )
    assert tower_bytes["lora", 0] == tower_bytes["lora", 1] == 0
    assert tower_bytes["full", 0] == tower_bytes["full", 1] > 4 * 1024**3
    setup = setup_of(model, {}, (1, 512, 1, 1))
    assert any("the vision encoder is frozen" in note for note in predict(model, CARD, setup).notes)
    attention = trained_parameters(model, setup.replace(lora_targets="attention"))
    named = trained_parameters(model, setup.replace(lora_targets=("q_proj", "k_proj", "v_proj", "o_proj")))
    assert attention.num < named.num  # names reach into what hears too
    assert encoder_of(model, image).num_other_params == mobilenet.NUM_PARAMS


def test_what_cannot_train_is_said() -> None:
    model = spec_of(SMALL, raw())
    four_bits = TrainSetup(method="qlora", quantization="nf4-double")
    assert "clamps weights in place" in stored_refusal(four_bits, model)
    assert "flash-attention-2" not in model.attentions
    other = replace(model, config={**model.config, "vision_config": {"architecture": "resnet50"}})
    with pytest.raises(SetupError, match="its encoder resnet50 is not known here"):
        encoder_of(other, Images(width=512, height=512))


def test_a_key_for_all_heads_takes_the_math_kernel_where_nothing_says_so() -> None:
    """PyTorch 2.13 `check_batch_size_and_num_heads_dense`."""
    query = torch.empty(1, 12, 64, 64, dtype=torch.bfloat16, device="meta")
    key = query[:, :1]
    assert choose_sdpa_kernel(Attention(query, key, key, enable_gqa=True), (9, 0))[0] == "flash"
    kernel, reason = choose_sdpa_kernel(Attention(query, key, key), (9, 0))
    assert kernel == "math"
    assert "12 heads of queries, 1 of keys" in reason


def test_without_timm_the_dry_run_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    monkeypatch.setattr("transformers.utils.is_timm_available", lambda: False)
    outcome = report_for_config(raw(), (9, 0), TrainSetup(seq_len_tokens=512))
    assert not isinstance(outcome, DryRunReport)
    assert "timm, which is not installed (pip install timm)" in outcome.message


class _Live(TorchDispatchMode):
    """Bytes of the tensors that live, and their peak."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if (
                isinstance(tensor, torch.Tensor)
                and (key := (storage := tensor.untyped_storage())._cdata) not in self._seen
            ):
                self._seen.add(key)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._gone, key, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out

    def _gone(self, key: int, size: int) -> None:
        self.live -= size
        self._seen.discard(key)


@WITH_TIMM
@pytest.mark.parametrize(
    ("precision", "trained"), some([("bf16-autocast", True), ("bf16-pure", True), ("fp32", False)], 3)
)
def test_tower_keeps_what_timms_own_keeps(precision: str, trained: bool) -> None:
    setup = TrainSetup(precision=precision, method="full", lora_rank=0)
    narrow = {"fp32": torch.float32, "bf16": torch.bfloat16}[setup.weight_dtype]
    with torch.device("meta"):
        encoder = build._timm().create_model(mobilenet.ARCHITECTURE, num_classes=0).to(narrow)
    assert sum(parameter.numel() for parameter in encoder.parameters()) == mobilenet.NUM_PARAMS
    encoder.requires_grad_(trained)
    pixels = torch.empty(2, 3, mobilenet.SIDE, mobilenet.SIDE, dtype=narrow, device="meta")
    live = _Live(pixels, *encoder.parameters())
    with ExitStack() as stack:
        attend = sdpa_of(KernelLog(capability=(9, 0)))
        stack.enter_context(mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attend))
        stack.enter_context(live)
        if setup.autocast_dtype:
            stack.enter_context(emulated_autocast(torch.bfloat16))
        out = encoder.forward_features(pixels)
    assert tuple(out.shape) == (2, mobilenet.FUSED, mobilenet.OUT_SIDE, mobilenet.OUT_SIDE)
    narrow_bytes = SIZE_BYTES[setup.autocast_dtype or setup.weight_dtype]
    sizes = mobilenet.PICTURE_BYTES[narrow_bytes, 4 if setup.autocast_dtype else narrow_bytes]
    expected, real = (sizes.kept, live.live - out.nbytes) if trained else (sizes.idle, live.peak)
    assert 2 * expected == pytest.approx(real, rel=0.001)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", some([{**METHODS["full"], "checkpointing": 0}, {}, {"checkpointing": 0}], 3), ids=str
)
def test_streams_and_shared_keys_are_counted(fields: dict[str, Any]) -> None:
    """Per-layer embeddings, AltUp, LAuReL, keys and values of another layer, sparse activations."""
    config = {
        "model_type": "gemma3n_text", "vocab_size": 8000, "hidden_size": 512, "num_attention_heads": 8,
        "num_hidden_layers": 10, "intermediate_size": 1536, "num_key_value_heads": 2, "head_dim": 64,
        "vocab_size_per_layer_input": 8000, "hidden_size_per_layer_input": 64, "num_kv_shared_layers": 5,
        "activation_sparsity_pattern": [0.95] * 5 + [0.0] * 5,
    }  # fmt: skip
    model = spec_from_config(config, model_id="small", source="test")
    setup = TrainSetup(seq_len_tokens=512, micro_batch_seqs=2, **fields)
    report = reported(config, (9, 0), setup)
    prediction = predict(model, CARD, setup)
    assert prediction.peak_allocated_bytes == pytest.approx(report.prediction.peak_allocated_bytes, rel=SMALL_TOLERANCE)
    assert any("upper bound" in note for note in prediction.notes)
