"""The kinds of adapters: what a setup says of them, and what they cost."""

import pytest

from planner.core.errors import SetupError
from planner.frameworks.exporters import EXPORTERS
from planner.frameworks.readers.read import read_text
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.options.adapters import ADAPTERS
from planner.planning.predict import predict
from planner.setup import TrainSetup
from planner.setup.interchange import setup_from_dict, setup_to_dict
from tests.planner.helpers import loaded
from tests.planner.launch_sweep import request


def a_setup(kind: str, **changes: object) -> TrainSetup:
    """A setup with this kind of adapter, on a base that it takes."""
    row = ADAPTERS[kind]
    base = {} if "none" in row.quantizations else {"method": "qlora"}
    return setup_from_dict({"adapter": kind, "checkpointing": row.checkpointing, **base, **changes})


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapter_goes_through_the_interchange_form(kind: str) -> None:
    setup = a_setup(kind)
    assert setup.adapter == kind
    assert kind == "lora" or setup.lora_rank == ADAPTERS[kind].usual_size
    assert setup_to_dict(setup).get("adapter", "lora") == kind
    assert setup_from_dict(setup_to_dict(setup)) == setup


def test_lora_is_the_default_and_is_not_written() -> None:
    assert TrainSetup().adapter == "lora"
    assert "adapter" not in setup_to_dict(TrainSetup())


def test_an_unknown_adapter_and_a_full_one_are_refused() -> None:
    for name in ([], {"a": 1}):
        with pytest.raises(SetupError, match="adapter must be text"):
            setup_from_dict({"adapter": name})
    with pytest.raises(SetupError, match="must be a list of module names"):
        setup_from_dict({"modules_to_save": 3})
    with pytest.raises(SetupError, match="adapter must be one of"):
        setup_from_dict({"adapter": "hourglass"})
    with pytest.raises(SetupError, match="belongs to method"):
        setup_from_dict({"method": "full", "adapter": "rslora"})


READ_BACK = {
    "hf": set(ADAPTERS) - {"adalora"},
    "trl": {"lora", "rslora", "dora"},
    "axolotl": {"lora", "rslora", "pissa", "dora"},
    "llamafactory": {"lora", "rslora", "pissa", "dora", "oft"},
    "unsloth": {"lora"},
}
"""Target -> kinds that its file can ask for; of the others it says why it cannot."""


@pytest.mark.parametrize("target", READ_BACK)
def test_every_kind_is_written_and_read_back_or_refused(target: str) -> None:
    """LoftQ starts otherwise than LoRA after the model is made: its script reads back as the LoRA that it trains."""
    model = catalogue.load("Qwen/Qwen2.5-1.5B")
    written = set()
    for kind in ADAPTERS:
        setup = a_setup(kind, loss="chunked", **({"lora_targets": ["k_proj", "down_proj"]} if kind == "ia3" else {}))
        launch = EXPORTERS[target](request(setup, model=model))
        if launch.refused:
            assert kind == "lora" or kind not in READ_BACK[target], launch.refused
            continue
        written.add(kind)
        back = read_text(launch.files[0].text, launch.files[0].path, model=model)
        assert back.setup.adapter == ("lora" if kind == "loftq" else kind)
        assert back.setup.lora_rank == setup.lora_rank
        assert not back.approximations
    assert written == READ_BACK[target]


@pytest.mark.parametrize(
    "values",
    [
        {"adapter": "ia3", "lora_rank": 4}, {"adapter": "vera", "lora_rank": 0},
        {"adapter": "pissa", "method": "qlora"}, {"adapter": "prefix"},
        {"adapter": "prompt", "lora_targets": "attention"}, {"adapter": "vera", "lora_dropout": 0.1},
        {"adapter": "dora", "num_gpus": 2, "parallel": "zero3"}, {"adapter": "dora", "kernels": "fused"},
        {"adapter": "ln-tuning", "precision": "bf16-pure"}, {"adapter": "boft"}, {"adapter": "bottleneck"},
    ],
    ids=lambda values: " ".join(map(str, values.values())),
)  # fmt: skip
def test_what_peft_does_not_take_is_refused_with_the_kinds_name(values: dict[str, object]) -> None:
    with pytest.raises(SetupError, match=str(values["adapter"])):
        setup_from_dict(values)


def test_a_scripts_partial_layers_and_its_own_ia3_targets_are_taken() -> None:
    """What peft fills in is an assumption."""
    head = "from peft import IA3Config, LoraConfig\nfrom trl import SFTConfig, SFTTrainer\n"
    train = "SFTTrainer('Qwen/Qwen2.5-1.5B', args=SFTConfig(max_length=512), peft_config=adapter).train()\n"
    model = catalogue.load("Qwen/Qwen2.5-1.5B")
    partial = read_text(
        f"{head}adapter = LoraConfig(r=8, target_modules='all-linear', layers_to_transform=[0, 1])\n{train}",
        "train.py",
        model=model,
    )
    assert partial.setup.trained_layers == -2
    assert "layers_to_transform" not in " ".join(partial.approximations)
    scaled = read_text(f"{head}adapter = IA3Config()\n{train}", "train.py", model=model)
    assert (scaled.setup.adapter, scaled.setup.lora_rank) == ("ia3", 0)
    assert scaled.setup.lora_targets == ("self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj")
    assert any("target_modules absent" in assumption for assumption in scaled.assumptions)
    load = "from transformers import AutoModelForCausalLM\nmodel = AutoModelForCausalLM.from_pretrained('NAME')\n"
    stages = f"{head}{load}from trl import RewardTrainer, RewardConfig\nfrom peft import get_peft_model\n"
    end = "RewardTrainer(model=get_peft_model(model, IA3Config()), args=RewardConfig(max_length=512)).train()\n"
    reward = read_text(stages + end, "train.py", model=model)
    assert (reward.setup.adapter, reward.setup.lora_rank) == ("ia3", 0)
    score = "from transformers import AutoModelForSequenceClassification as A, Trainer, TrainingArguments\n"
    score += "from peft import PrefixTuningConfig, get_peft_model\nmodel = A.from_pretrained('bert-base-uncased')\n"
    score += (
        "Trainer(get_peft_model(model, PrefixTuningConfig(num_virtual_tokens=9)), TrainingArguments('o')).train()\n"
    )
    prefix = read_text(score, "train.py", model=catalogue.load("bert-base-uncased"), base=TrainSetup())
    assert (prefix.setup.adapter, prefix.setup.lora_rank, prefix.approximations) == ("prefix", 9, ())


def test_norms_without_weights_cannot_be_tuned() -> None:
    model = loaded("allenai/OLMo-1B-hf")
    with pytest.raises(SetupError, match="no weights"):
        predict(model, find_gpu("rtx-4090"), a_setup("ln-tuning"))
