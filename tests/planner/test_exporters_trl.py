"""TRL files: accepted by TRL's own parser, read back to the same setup, and nothing dropped without a word."""

from pathlib import Path

import pytest
import yaml
from transformers.distributed import DistributedConfig
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

from planner.frameworks.exporters import EXPORTERS, Launch, trl
from planner.frameworks.readers import read_text
from planner.memory.dtypes import dtype_policy_of
from planner.setup import TrainSetup
from tests.planner.launch_sweep import fewer_setups, request

SETUPS = fewer_setups()


@pytest.fixture(autouse=True)
def target_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser asks for bf16 hardware; the files are for a GPU that has it."""
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")


def text_of(launch: Launch) -> str:
    return next(file.text for file in launch.files if file.path == trl.file_of(TrainSetup()))


TAKEN_OUT = "env"
"""Of the file, by TRL's parser: the process's environment."""


def test_trls_own_parser_takes_every_line_of_every_file_as_it_stands(tmp_path: Path) -> None:
    """What the lines say is stated in test_written; here that TRL reads just that, and drops none."""
    path = tmp_path / "trl-sft.yaml"
    seen: dict[str, int] = {}
    for setup in SETUPS:
        launch = EXPORTERS["trl"](request(setup, output_dir="outputs"))
        if launch.refused:
            continue
        path.write_text(text_of(launch))
        parser = TrlParser(
            (ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig)
        )  # keeps defaults of the last file
        parsed = parser.parse_args_and_config(["--config", str(path)], fail_with_unknown_args=True)
        for key, value in yaml.safe_load(path.read_text()).items():
            if key == TAKEN_OUT:
                continue
            (parsed_value,) = {
                repr(getattr(arguments, key)): getattr(arguments, key)
                for arguments in parsed
                if hasattr(arguments, key)
            }.values()
            if (key, value) == ("report_to", "none"):
                value = []  # its name for nowhere
            if isinstance(value, list) and len(value) == 1 and isinstance(parsed_value, str):
                (value,) = value  # a list of one module is its name
            if isinstance(value, dict) and not isinstance(parsed_value, dict):
                parsed_value = {name: getattr(parsed_value, name) for name in value}
            assert parsed_value == value, (key, setup)
            seen[key] = seen.get(key, 0) + 1
        mesh = (parsed[1].model_init_kwargs or {}).get("distributed_config")
        if setup.tensor_degree > 1:
            assert DistributedConfig.from_dict(mesh).tp_size == setup.tensor_degree
    assert seen["per_device_train_batch_size"] >= 60


def test_every_difference_is_said_in_the_file() -> None:
    for setup in SETUPS:
        launch = EXPORTERS["trl"](request(setup))
        for difference in launch.differences:
            assert difference.planned != difference.runs_as
            words = " ".join(text_of(launch).replace("\n#", " ").split())
            assert " ".join(difference.reason.split()) in words


@pytest.mark.parametrize("name", sorted(EXPORTERS))
def test_the_same_request_gives_the_same_text(name: str) -> None:
    for setup in SETUPS[:40]:
        assert EXPORTERS[name](request(setup)) == EXPORTERS[name](request(setup))


def test_machine_paths_and_line_breaks_stay_out() -> None:
    export_request = request(SETUPS[0], model_id="/home/someone/secret\nbf16: false/model", output_dir="/root/out")
    launch = EXPORTERS["trl"](export_request)
    text = text_of(launch)
    assert "/home" not in text
    assert "/root" not in text
    assert yaml.safe_load(text)["model_name_or_path"] == "./model"


@pytest.mark.parametrize("quantization", ["nf4-double", "int8"])
@pytest.mark.parametrize("precision", ["fp16-autocast", "fp16-mixed"])
def test_a_card_without_bf16_gets_adapters_that_its_loss_scaler_can_unscale(quantization: str, precision: str) -> None:
    """PyTorch's GradScaler refuses fp16 gradients and has no bf16 kernel: one rule for memory and every file."""
    setup = TrainSetup(method="qlora", quantization=quantization, precision=precision, loss="full")
    assert setup.resolved_adapter_dtype == "fp32"
    assert dtype_policy_of(setup).adapter == "fp32"
    script = EXPORTERS["hf"](request(setup))
    assert "ADAPTER_DTYPE = torch.float32" in script.files[0].text
    assert "fp16=True" in script.files[0].text
    for target in ("hf", "axolotl", "llamafactory"):
        launch = EXPORTERS[target](request(setup))
        assert not launch.refused
        assert launch.runs.scaler_refusal == ""
    refused = EXPORTERS["trl"](request(setup)).refused
    assert "cannot unscale" in refused
    assert "hf target" in refused
    for dtype in ("bf16", "fp16"):  # asked for by hand
        assert "cannot unscale" in EXPORTERS["hf"](request(setup.replace(adapter_dtype=dtype))).refused


def test_a_trl_file_that_the_loss_scaler_stops_is_said_to_stop() -> None:
    text = EXPORTERS["trl"](request(TrainSetup(method="qlora", quantization="nf4", loss="chunked"))).files[0].text
    text = text.replace("bf16: true", "bf16: false").replace("fp16: false", "fp16: true")
    config = read_text(text.replace("dtype: bfloat16", "dtype: float16"), "trl.yaml")
    assert any("cannot unscale" in approximation for approximation in config.approximations)
