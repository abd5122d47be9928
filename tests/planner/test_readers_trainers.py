"""What a program's own trainer, its filtered settings, its subcommands and sentence-transformers' programs train."""

from dataclasses import fields

import pytest

from planner.core.errors import NotPlanned
from planner.frameworks.readers import FileContext, read_text
from planner.frameworks.readers.common import stored_dtype
from planner.frameworks.readers.types import ReadConfig
from planner.frameworks.readers.versions import taken_by
from planner.models import catalogue
from planner.models.resolve import resolve_model
from tests.planner.helpers import loaded, says

HEAD = """
import argparse, dataclasses, inspect
from dataclasses import fields
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import PPOTrainer, SFTConfig, SFTTrainer
from sentence_transformers import (
    InputExample, SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments, losses, models,
)
from torch.utils.data import DataLoader
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B", dtype=torch.bfloat16)
"""


def read(body: str, arguments: tuple[str, ...] | None = None, **versions: str) -> ReadConfig:
    return read_text(HEAD + body, "train.py", around=FileContext(arguments=arguments, versions=versions))


WISHES = 'wishes = {"per_device_train_batch_size": 4, "max_seq_length": 256, "max_length": 512, "gone_long_ago": 1}\n'
RUN = "SFTTrainer(model, args=SFTConfig(**kept)).train()\n"
FILTERS = {
    "the names of a signature": "allowed = set(inspect.signature(SFTConfig.__init__).parameters)\n"
    "kept = {name: value for name, value in wishes.items() if name in allowed}\n",
    "a signature's keys": "allowed = inspect.signature(SFTConfig).parameters.keys()\n"
    "kept = {}\nfor name, value in wishes.items():\n    if name in allowed:\n        kept[name] = value\n",
    "fields of a dataclass": "allowed = {one.name for one in fields(SFTConfig)}\n"
    "kept = {name: value for name, value in wishes.items() if name in allowed}\n",
    "a class that is looked at from all sides": "def accepted(kind):\n    names: set[str] = set()\n"
    "    if dataclasses.is_dataclass(kind):\n        names |= {one.name for one in fields(kind)}\n"
    "    names |= {one for one in inspect.signature(kind.__init__).parameters if one != 'self'}\n    return names\n"
    "allowed = accepted(SFTConfig) - {'args'}\n"
    "kept = {name: value for name, value in wishes.items() if name in allowed}\n",
    "one name or the other": "kept = {'per_device_train_batch_size': 4}\n"
    "kept['max_seq_length' if 'max_seq_length' in inspect.signature(SFTConfig).parameters else 'max_length'] = 512\n",
}


@pytest.mark.parametrize("name", FILTERS)
def test_settings_that_a_class_does_not_take_are_left_out(name: str) -> None:
    setup = read(WISHES + FILTERS[name] + RUN).setup
    assert (setup.micro_batch_seqs, setup.seq_len_tokens) == (4, 512)


@pytest.mark.parametrize(("trl", "tokens"), [("0.12.0", 256), ("1.3.0", 512)])
def test_what_a_pinned_versions_class_takes_is_handed_on(trl: str, tokens: int) -> None:
    config = read(WISHES + FILTERS["the names of a signature"] + RUN, trl=trl)
    says(config, "micro_batch_seqs seq_len_tokens", (4, tokens))


TAKEN = {
    ("SFTConfig", "max_seq_length", "trl", "0.19.1"): True,
    ("SFTConfig", "max_seq_length", "trl", "1.3.0"): False,
    ("SFTConfig", "max_length", "trl", "0.15.2"): False,
    ("SFTTrainer", "tokenizer", "trl", "0.15.2"): True,
    ("SFTTrainer", "tokenizer", "trl", "1.3.0"): False,
    ("TrainingArguments", "evaluation_strategy", "transformers", "4.45.0"): True,
    ("TrainingArguments", "evaluation_strategy", "transformers", "4.56.0"): False,
    ("TrainingArguments", "warmup_ratio", "transformers", "4.56.0"): True,
    ("TrainingArguments", "use_liger_kernel", "transformers", "4.44.0"): False,
    ("TrainingArguments", "max_length", "transformers", "4.56.0"): False,
    ("DPOConfig", "max_prompt_length", "trl", "0.24.0"): True,
    ("GRPOConfig", "num_generations", "trl", "1.3.0"): True,
    ("DPOTrainer", "tokenizer", "trl", "1.3.0"): False,
    ("Trainer", "tokenizer", "transformers", "4.56.0"): True,
    ("Trainer", "tokenizer", "transformers", "5.0.0"): False,
}


@pytest.mark.parametrize("case", TAKEN, ids="-".join)
def test_what_a_class_takes_is_that_of_its_version(case: tuple[str, str, str, str]) -> None:
    name, parameter, package, version = case
    assert (parameter in taken_by(name, {package: version})) == TAKEN[case]


def test_what_lora_takes_is_what_peft_has() -> None:
    peft = pytest.importorskip("peft")
    assert taken_by("LoraConfig", {}) == {field.name for field in fields(peft.LoraConfig)}


OWN = """
class Mine(Trainer):
{body}
args = TrainingArguments(per_device_train_batch_size=4, bf16=True)
block_size = 512
Mine(model=model, args=args).train()
"""
STEPS = {
    "a teacher": (
        "    def compute_loss(self, model, inputs):\n        with_teacher = self.teacher(**inputs)\n",
        "distill",
    ),
    "rewards": ("    def training_step(self, model, inputs):\n        r = self.reward_fn(inputs)\n", "reinforcement"),
    "a held trainer": ("    def start(self):\n        self.inner = PPOTrainer(self.args)\n", "PPO"),
    "preferences": ("    def compute_loss(self, model, inputs):\n        x = inputs.chosen_ids\n", "preferences"),
    "a step that is another method's": (
        "    def compute_loss(self, model, inputs):\n        return self.metrics(model, inputs)[0]\n"
        "    def metrics(self, model, inputs):\n        return [self.ref_model(**inputs).loss]\n",
        "preferences",
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_trainer_that_hides_another_objective_is_refused_by_name(name: str) -> None:
    body, message = STEPS[name]
    with pytest.raises(NotPlanned, match=message):
        read(OWN.format(body=body))


def test_a_step_with_two_forwards_leaves_the_objective_open_and_one_widens_the_band() -> None:
    twice = "    def compute_loss(self, model, inputs):\n        return model(**inputs).loss + model(**inputs).loss\n"
    once = "    def compute_loss(self, model, inputs):\n        return weighted(model(**inputs).logits)\n"
    assert "objective" in {gap.field for gap in read(OWN.format(body=twice)).missing}
    config = read(OWN.format(body=once))
    assert not config.missing
    assert any("Mine" in approximation for approximation in config.approximations)


COMMANDS = """
parser = argparse.ArgumentParser()
parser.add_argument("--batches", type=int, default=1)
commands = parser.add_subparsers(dest="command")
shared = argparse.ArgumentParser(add_help=False)
shared.add_argument("--length", type=int, default=512)
train = commands.add_parser("train", parents=[shared])
train.add_argument("--batch", type=int, default=4)
{other} = commands.add_parser("{other}", parents=[shared])
{other}.add_argument("--batch", type=int, default=64)
args = parser.parse_args()
if args.command == "train":
    SFTTrainer(model, args=SFTConfig(per_device_train_batch_size=args.batch, max_length=args.length)).train()
"""


@pytest.mark.parametrize(("words", "batch"), [(None, 4), (("train",), 4), (("train", "--batch", "6"), 6)])
def test_a_subcommands_options_are_its_own(words: tuple[str, ...] | None, batch: int) -> None:
    says(read(COMMANDS.format(other="evaluate"), words), "micro_batch_seqs seq_len_tokens", (batch, 512))


def test_options_of_subcommands_of_which_several_may_train_are_asked_for() -> None:
    config = read(COMMANDS.format(other="finetune"))
    assert {gap.field for gap in config.missing} == {"micro_batch_seqs"}


ENCODER = 'encoder = SentenceTransformer("Qwen/Qwen3-0.6B", model_kwargs={"torch_dtype": torch.bfloat16})\n'
BY_TRAINER = (
    ENCODER
    + "encoder.max_seq_length = 256\n"
    + "args = SentenceTransformerTrainingArguments(per_device_train_batch_size=16, bf16=True)\n"
    + "SentenceTransformerTrainer(model=encoder, args=args, train_dataset=rows, loss=losses.LOSS(encoder)).train()\n"
)
BY_FIT = """
word = models.Transformer("Qwen/Qwen3-0.6B", max_seq_length=256)
encoder = SentenceTransformer(modules=[word, models.Pooling(8)])
rows = [InputExample(texts=[one, other]) for one, other in pairs]
loader = DataLoader(rows, shuffle=True, batch_size=16)
encoder.fit(train_objectives=[(loader, losses.LOSS(encoder))], use_amp=True)
"""


@pytest.mark.parametrize("body", [BY_TRAINER, BY_FIT])
def test_contrastive_training_is_read_from_its_trainer(body: str) -> None:
    config = read(body.replace("LOSS", "MultipleNegativesRankingLoss"))
    setup = config.setup
    assert (config.model_id, setup.objective, setup.stack) == ("Qwen/Qwen3-0.6B", "embedding", "sentence-transformers")
    assert (setup.micro_batch_seqs, setup.seq_len_tokens, config.missing) == (16, 256, ())
    assert setup.precision == ("bf16-autocast" if body == BY_TRAINER else "fp16-mixed")
    assert any("hard negatives" in assumption for assumption in config.assumptions)


@pytest.mark.parametrize("loss", ["CachedGISTEmbedLoss", "MatryoshkaLoss", "CoSENTLoss"])
@pytest.mark.parametrize("body", [BY_TRAINER, BY_FIT])
def test_other_losses_are_refused_by_name(body: str, loss: str) -> None:
    with pytest.raises(NotPlanned, match=loss):
        read(body.replace("LOSS", loss))


HARD = {
    "texts of three": BY_FIT.replace("[one, other]", "[one, other, third]"),
    "columns": BY_TRAINER + 'rows = rows.select_columns(["anchor", "positive", "negative"])\n',
    "mined": BY_TRAINER + "rows = mine_hard_negatives(rows, encoder)\n",
}


@pytest.mark.parametrize("name", HARD)
def test_hard_negatives_are_counted(name: str) -> None:
    assert read(HARD[name].replace("LOSS", "MultipleNegativesRankingLoss")).setup.hard_negatives == 1


@pytest.mark.parametrize(
    ("words", "cached"), [("", 16), (", mini_batch_size=4", 4), (", mini_batch_size=args[0]", None)]
)
def test_a_cached_losss_pieces_are_read(words: str, cached: int | None) -> None:
    """Its default of 32 sequences at once is more than the 16 pairs of the batch."""
    body = BY_TRAINER.replace("losses.LOSS(encoder", f"losses.CachedMultipleNegativesRankingLoss(encoder{words}")
    config = read(body)
    if cached is None:
        assert "cached_seqs" in {gap.field for gap in config.missing}
    else:
        assert config.setup.cached_seqs == cached


def test_a_loss_that_only_running_tells_leaves_the_objective_open() -> None:
    body = BY_TRAINER.replace("losses.LOSS(encoder)", "{}[name]")
    assert "objective" in {gap.field for gap in read(body).missing}


HANDED = """
from transformers import BitsAndBytesConfig, HfArgumentParser
from dataclasses import dataclass
from peft import LoraConfig
@dataclass
class Words:
    four: bool = True
class H4ArgumentParser(HfArgumentParser):
    def parse(self):
        return self.parse_args_into_dataclasses()
(words,) = H4ArgumentParser(Words).parse()
quantization = BitsAndBytesConfig(load_in_4bit=True) if words.four else None
handed = dict(torch_dtype=torch.bfloat16, quantization_config=quantization)
args = TrainingArguments(per_device_train_batch_size=4, bf16=True)
SFTTrainer("meta-llama/Llama-3.1-8B", args=args, model_init_kwargs=handed, max_seq_length=512,
           peft_config=LoraConfig(r=8)).train()
"""


def test_what_an_older_trainer_hands_to_the_loading_counts() -> None:
    config = read(HANDED)
    setup = config.setup
    assert (config.model_id, setup.method, setup.quantization) == ("meta-llama/Llama-3.1-8B", "qlora", "nf4")
    assert read(HANDED, ("--four", "False")).setup.method == "lora"


def test_a_length_that_a_condition_decides_is_asked_for() -> None:
    body = """
length = getattr(tokenizer, "model_max_length", None)
if length is None:
    length = 2048
block_size = 2048
def cut(rows):
    return tokenizer(rows, truncation=True, max_length=length)
data = data.map(cut)
Trainer(model=model, args=TrainingArguments(per_device_train_batch_size=4), train_dataset=data).train()
"""
    assert "seq_len_tokens" in {gap.field for gap in read(body).missing}


def test_what_is_imported_from_trl_says_which_it_can_be() -> None:
    """`DataCollatorForCompletionOnlyLM` is in TRL 0.19's wheel and not in 0.20's; a `try` binds to none."""
    head = "from trl import DataCollatorForCompletionOnlyLM\n"
    config = read(head + "SFTTrainer(model, args=SFTConfig(max_length=64)).train()\n")
    assert any(
        "TRL 0.19 (the newest that has DataCollatorForCompletionOnlyLM)" in assumption
        for assumption in config.assumptions
    )
    assert (config.setup.loss, config.setup.checkpointing) == ("full", 0)
    tried = f"try:\n    {head}except ImportError:\n    pass\n"
    assert any(
        "TRL 1.16" in assumption
        for assumption in read(tried + "SFTTrainer(model, args=SFTConfig()).train()\n").assumptions
    )


def test_a_wrapper_that_takes_the_adapters_settings_puts_them_on() -> None:
    """As ms-swift's `Swift.prepare_model`; how its own loader loads is asked for."""
    config = read(
        "from swift import Swift, get_model_tokenizer\nfrom peft import LoraConfig\n"
        "model, tokenizer = get_model_tokenizer('meta-llama/Llama-3.1-8B')\n"
        "model = Swift.prepare_model(model, LoraConfig(r=4, target_modules=['q_proj']))\nmax_length = 64\n"
        "Trainer(model, TrainingArguments(per_device_train_batch_size=2)).train()\n"
    )
    assert (config.setup.lora_rank, config.model_id) == (4, "meta-llama/Llama-3.1-8B")
    assert [gap.field for gap in config.missing] == ["precision"]


def test_a_trainer_of_another_package_is_no_trainer_of_transformers() -> None:
    with pytest.raises(NotPlanned, match="tytorch's Trainer"):
        read("from tytorch.trainer import Trainer\nTrainer(model=model).train()\n")


def test_the_older_switch_of_flash_attention_counts() -> None:
    body = 'model = AutoModelForCausalLM.from_pretrained("m", use_flash_attention_2=True)\n'
    assert read(body + "SFTTrainer(model, args=SFTConfig()).train()\n").setup.attention == "flash-attention-2"


@pytest.mark.parametrize(
    ("body", "versions", "older_form"),
    [
        ("Trainer(model, TrainingArguments(gradient_checkpointing=True))", {}, False),
        ("Trainer(model, TrainingArguments(gradient_checkpointing=True))", {"transformers": "4.57.1"}, True),
        (
            "Trainer(model, TrainingArguments(gradient_checkpointing=True, "
            "gradient_checkpointing_kwargs={'use_reentrant': False}))",
            {"transformers": "4.57.1"},
            False,
        ),
        (
            "model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})\n"
            "Trainer(model, TrainingArguments())",
            {"transformers": "4.57.1"},
            False,
        ),
        ("SFTTrainer(model, args=SFTConfig(gradient_checkpointing=True))", {"trl": "0.24.0"}, True),
        ("SFTTrainer(model, args=SFTConfig(gradient_checkpointing=True))", {"trl": "0.28.0"}, False),
    ],
)
def test_transformers_4_checkpoints_in_the_older_form_unless_told(
    body: str, versions: dict[str, str], older_form: bool
) -> None:
    """transformers 4.57 `gradient_checkpointing_enable`; TRL tells it since 0.27."""
    setup = read(f"max_length = 64\n{body}.train()\n", **versions).setup
    assert (setup.checkpointing, setup.reentrant_checkpointing) == (1, older_form)


def test_layers_that_train_alone_are_read() -> None:
    """LLaMA-Factory's freeze: trained layers fp32 beside 16 bits; Axolotl's lists and patterns of names."""
    model = catalogue.load("meta-llama/Llama-3.1-8B")
    head = "stage: sft\nmodel_name_or_path: meta-llama/Llama-3.1-8B\ntemplate: llama3\nbf16: true\n"
    head += "do_train: true\nfinetuning_type: freeze\n"
    last = read_text(head + "freeze_trainable_layers: 4\n", "freeze.yaml", model=model)
    assert (last.setup.trained_layers, last.setup.precision, last.approximations) == (4, "bf16-autocast", ())
    assert last.setup.widens_trained
    first = read_text(head + "freeze_trainable_layers: -4\n", "freeze.yaml", model=model)
    assert (first.setup.trained_layers, first.setup.precision, first.approximations) == (-4, "bf16-autocast", ())
    parts = read_text(head + "freeze_trainable_modules: mlp\n", "freeze.yaml", model=model)
    assert parts.setup.trained_layers == 2
    norms = read_text(head + "freeze_extra_modules: norm\n", "freeze.yaml", model=model)
    assert (norms.setup.trained_layers, norms.setup.precision) == (0, "bf16-mixed")
    for partly_trained in (parts, norms):
        assert "upper bound" in " ".join(partly_trained.approximations)
    adapters = "base_model: meta-llama/Llama-3.1-8B\nadapter: lora\nlora_target_linear: true\nsequence_len: 512\n"
    for numbers, layers in (("[30, 31]", 2), ("[0, 1]", -2), ("[4, 0, 8]", (0, 4, 8)), ("[40]", 0)):
        config = read_text(f"{adapters}peft_layers_to_transform: {numbers}\n", "axolotl.yaml", model=model)
        assert config.setup.trained_layers == layers
        assert ("peft_layers_to_transform" in " ".join(config.approximations)) == (layers == 0)
    full = "base_model: meta-llama/Llama-3.1-8B\nsequence_len: 512\nunfrozen_parameters:\n"
    for pattern, layers, warning in (
        ("model.layers.3[01].", 2, ""),
        ("model.layers.[0-3]..*", -4, ""),
        ("model.layers.(4|8).", (4, 8), ""),
        ("model.layers.(4|8).mlp.down_proj", 0, "counted as full"),
        ("model.layers.31.", 1, ""),
        ("^lm_head.weight$", 0, "counted as full"),
        ("layers.31.", 0, "counted as full"),  # matched from the name's beginning
    ):
        config = read_text(f"{full}  - '{pattern}'\n", "axolotl.yaml", model=model)
        assert config.setup.trained_layers == layers, pattern
        approximations = " ".join(config.approximations)
        assert warning in approximations
        assert bool(warning) == ("unfrozen" in approximations)
    beside = read_text(f"{adapters}unfrozen_parameters: ['model.layers.31.']\n", "axolotl.yaml", model=model)
    assert "counted as the adapter alone" in " ".join(beside.approximations)


@pytest.mark.parametrize(
    ("lines", "older"),
    [
        ("", True),
        ("rl: dpo\n", False),
        ("selective_checkpointing: true\n", False),
        ("activation_offloading: true\n", False),
        ("gradient_checkpointing_kwargs: {use_reentrant: false}\n", False),
        ("gradient_checkpointing_kwargs: {every_n_layers: 2}\n", False),
    ],
)
def test_axolotl_checkpoints_in_the_older_form_where_nothing_else_is_said(lines: str, older: bool) -> None:
    """`normalize_config`: under it 8-bit layers do not hold all their inputs, of Llama-2-7B at 2 x 4,096 11 GiB."""
    head = "base_model: meta-llama/Llama-3.1-8B\nadapter: lora\nsequence_len: 512\ngradient_checkpointing: true\n"
    assert read_text(head + lines, "axolotl.yaml").setup.reentrant_checkpointing is older


@pytest.mark.parametrize(
    ("argument", "version", "precision"),
    [
        ("", "1.16.0", "bf16-mixed"),
        ("", "0.27.2", "bf16-mixed"),
        ("", "0.26.2", "bf16-autocast"),
        ("", "0.25.1", "bf16-mixed"),  # left to transformers 4
        ("model_init_kwargs={'dtype': 'bfloat16'}", "1.16.0", "bf16-autocast"),
        ("model_init_kwargs={'dtype': torch.bfloat16}", "1.16.0", "bf16-autocast"),
        ("model_init_kwargs={'attn_implementation': 'sdpa'}", "1.16.0", "bf16-mixed"),
    ],
)
def test_a_model_that_is_handed_by_name_has_the_types_of_the_trainer(
    argument: str, version: str, precision: str
) -> None:
    """TRL's quickstart. Source: `create_model_from_path` of the wheels 0.24 to 1.0 and of the installed 1.16."""
    body = f'SFTTrainer("meta-llama/Llama-3.2-1B", args=SFTConfig(bf16=True, max_length=512, {argument})).train()\n'
    config = read(body, trl=version)
    assert config.setup.precision == precision
    assert any(f"float32, the default of TRL {version}" in assumption for assumption in config.assumptions) == (
        precision == "bf16-mixed" and version != "0.25.1"
    )
    loaded = (
        "SFTTrainer(AutoModelForCausalLM.from_pretrained('gpt2'), args=SFTConfig(bf16=True, max_length=64)).train()\n"
    )
    assert read(loaded, trl="1.16.0").setup.precision == "bf16-autocast"  # transformers 5: the checkpoint's own


@pytest.mark.parametrize(("model", "more", "stops"), [
    ("microsoft/Phi-3-mini-4k-instruct", "", True), ("Qwen/Qwen3-8B", "", False),
    ("Qwen/Qwen3-30B-A3B", ", target_parameters=['mlp.experts.down_proj']", False),
    ("Qwen/Qwen3-30B-A3B", ", target_modules=chosen_by(somebody)", False), ("Qwen/Qwen3-30B-A3B", ", **chosen", False),
])  # fmt: skip
def test_adapters_without_targets_stop_where_peft_has_none_of_its_own(model: str, more: str, stops: bool) -> None:
    """Not where parameters are named, or modules that are not known."""
    run = f"SFTTrainer({model!r}, args=SFTConfig(max_length=64), peft_config=LoraConfig(r=8{more})).train()\n"
    config = read_text(f"{HEAD}from peft import LoraConfig\n{run}", "train.py", model=loaded(model))
    assert any("PEFT stops" in refusal for refusal in config.refusals) is stops
    assert config.setup.lora_targets == (("q_proj", "v_proj") if model == "Qwen/Qwen3-8B" else "attention")


def test_of_the_catalogues_bert_likes_the_checkpoints_type_is_known() -> None:
    encoders = [model for entry in catalogue.entries() if (model := loaded(entry.model_id)).reads_both_ways]
    assert {model.model_type for model in encoders} >= {"modernbert", "bert", "roberta", "deberta-v2"}
    assert {stored_dtype(model) for model in encoders} == {"fp32"}


@pytest.mark.parametrize(
    ("name", "quantization"), [("unsloth/Meta-Llama-3.1-8B-bnb-4bit", "nf4-double"), ("gpt2", "none")]
)
def test_a_checkpoint_in_4_bits_loads_as_that(name: str, quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes the checkpoint's own `quantization_config` where the program names none."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    body = f"model = AutoModelForCausalLM.from_pretrained('{name}')\n"
    body += "SFTTrainer(model, args=SFTConfig(max_length=64), peft_config=LoraConfig(r=8)).train()\n"
    model = resolve_model(name)
    config = read_text(HEAD + "from peft import LoraConfig\n" + body, "train.py", model=model)
    assert config.setup.quantization == quantization
    assert config.setup.method == ("lora" if quantization == "none" else "qlora")
    assert any("loads as that" in assumption for assumption in config.assumptions) == (quantization != "none")
    whole = read_text(HEAD + body.replace(", peft_config=LoraConfig(r=8)", ""), "train.py", model=model)
    assert (whole.setup.method, whole.setup.quantization) == ("full", "none")


@pytest.mark.parametrize(
    ("config", "quantization", "over"),
    [
        ("TorchAoConfig(quant_type=Int8WeightOnlyConfig())", "int8", ("activations",)),
        ("TorchAoConfig(Int8DynamicActivationInt4WeightConfig())", "nf4", None),
        ("TorchAoConfig('int4_weight_only', group_size=128)", "nf4", None),
        ("TorchAoConfig(Int4WeightOnlyConfig(128))", "nf4", None),
        ("TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4, scale_dtype=torch.float32))", "nf4", None),
        ("FineGrainedFP8Config()", "int8", ("activations",)),
        ("FineGrainedFP8Config(dequantize=True)", "none", None),
        ("HqqConfig(nbits=2)", "nf4", ("weights",)),
        ("HqqConfig(nbits=8, group_size=64)", "int8", ("activations",)),
        ("QuantoConfig(weights='float8')", "int8", ("activations",)),
        ("GPTQConfig(bits=3, dataset='c4')", "nf4", ("weights",)),
    ],
)
def test_a_base_quantized_by_another_class_is_counted_by_its_bits(
    config: str, quantization: str, over: tuple[str, ...] | None
) -> None:
    body = f"model = AutoModelForCausalLM.from_pretrained('gpt2', quantization_config={config})\n"
    body += "SFTTrainer(model, args=SFTConfig(max_length=64), peft_config=LoraConfig(r=8)).train()\n"
    reading = read_text(HEAD + "from peft import LoraConfig\nfrom torchao.quantization import *\n" + body, "train.py")
    assert reading.setup.quantization == quantization
    words = [text for text in reading.approximations if "bits are counted" in text]
    assert len(words) == (quantization != "none")
    assert over is None or [getattr(text, "categories", None) for text in words] == [over]


def test_bits_that_nothing_says_are_asked_for() -> None:
    body = "model = AutoModelForCausalLM.from_pretrained('gpt2', quantization_config=TorchAoConfig(made()))\n"
    body += "SFTTrainer(model, args=SFTConfig(max_length=64), peft_config=LoraConfig(r=8)).train()\n"
    reading = read_text(HEAD + "from peft import LoraConfig\nfrom mine import made\n" + body, "train.py")
    assert "to how many bits TorchAoConfig" in " ".join(gap.reason for gap in reading.missing)
