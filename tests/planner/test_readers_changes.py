"""What a program does to its model beside loading it, what it evaluates, and what else lies on the GPU."""

from dataclasses import replace

import pytest

from finetune_planner.cli.check import edits_of
from finetune_planner.cli.checking import predictor
from finetune_planner.improvement import improve
from planner.core.errors import NotPlanned
from planner.core.units import gib
from planner.frameworks.readers import FileContext, read_text
from planner.frameworks.readers.types import ReadConfig, UpperBound, overrides, parse_sets
from planner.hardware.gpus import find_gpu
from planner.memory.around import evaluation_bytes
from planner.memory.attention_kernels import halves_refusal
from planner.models import catalogue
from planner.planning.check import EVALUATION_BAND_FRACTION, Verdict, band_of, check, judge
from planner.planning.predict import predict
from planner.setup import TrainSetup
from tests.planner.helpers import says

HEAD = """
import torch, bitsandbytes as bnb
from functools import partial
from liger_kernel.transformers import apply_liger_kernel_to_llama
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
NAME = "meta-llama/Llama-3.1-8B"
tokenizer = AutoTokenizer.from_pretrained(NAME)
config = AutoConfig.from_pretrained(NAME)
"""
MODEL = "model = AutoModelForCausalLM.from_pretrained(NAME, dtype=torch.bfloat16, config=config)\n"
TRAIN = (
    "SFTTrainer(model, args=SFTConfig(per_device_train_batch_size=2, max_length=512), train_dataset=rows{more}).train()"
)


def read(before: str = "", after: str = "", more: str = "", train: str = TRAIN) -> ReadConfig:
    return read_text(HEAD + before + MODEL + after + train.replace("{more}", more), "train.py", around=FileContext())


FIELDS = {
    "cast in place": ("", "model.to(torch.float32)\n", "", "precision", "bf16-mixed"),
    "cast on the way": ("", 'model = model.to("cuda", dtype=torch.float32)\n', "", "precision", "bf16-mixed"),
    "another half": ("", "model.half()\n", "", "precision", "fp16-bf16-autocast"),
    "moved alone": ("", 'model.to("cuda")\n', "", "precision", "bf16-autocast"),
    "compiled": ("", "model = torch.compile(model)\n", "", "compile", True),
    "32-bit states": ("", "", ", optimizers=(bnb.optim.AdamW([]), None)", "optimizer", "adamw-32bit"),
    "a momentum": ("", "", ", optimizers=(torch.optim.SGD([], momentum=0.9), None)", "optimizer", "sgd-momentum"),
    "an optimizer's object": ("", "", ", optimizers=(bnb.optim.AdamW8bit([]), None)", "optimizer", "adamw-8bit"),
    "an optimizer's class": ("", "", ", optimizer_cls_and_kwargs=(torch.optim.SGD, {})", "optimizer", "sgd"),
    "no optimizer": ("", "", ", optimizers=(None, None)", "optimizer", "adamw-fused"),
    "attention of the configuration": ('config._attn_implementation = "eager"\n', "", "", "attention", "eager"),
    "attention of a handed configuration": (
        'config = AutoConfig.from_pretrained(NAME, attn_implementation="eager")\n', "", "", "attention", "eager",
    ),
    "attention set later": ("", 'model.set_attn_implementation("eager")\n', "", "attention", "eager"),
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_what_is_done_to_the_model_or_trainer_counts(name: str) -> None:
    before, after, more, field, value = FIELDS[name]
    config = read(before, after, more)
    assert (getattr(config.setup, field), config.missing) == (value, ())


def test_fp16_asked_of_a_bf16_base_keeps_both_types() -> None:
    train = TRAIN.replace("max_length=512", "max_length=512, fp16=True, bf16=False")
    assert read(more=", peft_config=LoraConfig()", train=train).setup.precision == "bf16-fp16-autocast"
    assert read(train=train).setup.precision == "fp16-mixed"


def test_liger_put_in_by_the_program_counts() -> None:
    train = "Trainer(model, TrainingArguments(bf16=True)).train()\nblock_size = 512"
    assert [read(before, train=train).setup.loss for before in ("", "apply_liger_kernel_to_llama()\n")] == [
        "full",
        "liger",
    ]


EACH = "for n, p in model.named_parameters():\n    p.requires_grad = "
TEACHER = 'teacher = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-70B").to("cuda")\n'


@pytest.mark.parametrize(
    "arguments", ["label_smoothing_factor=0.1), train_dataset=(rows", "bf16=True), compute_loss_func=(mine"]
)
def test_a_loss_that_trl_computes_on_all_logits_is_no_chunked_one(arguments: str) -> None:
    assert read().setup.loss == "chunked"
    assert read(train=TRAIN.replace("512), train_dataset=rows", f"512, {arguments})")).setup.loss == "full"


OPEN = {
    "fewer layers": ("config.num_hidden_layers = 4\n", "", "model"),
    "layers cut off": ("", "model.model.layers = model.model.layers[:4]\n", "model"),
    "a teacher": ("", TEACHER, "beside"),
    "a copy to go back to": ("", "import copy\nbase = copy.deepcopy(model.cuda())\n", "beside"),
    "a copy that trains": ("", "from copy import deepcopy\nold = model.to('cuda')\nmodel = deepcopy(old)\n", "beside"),
    "a copy of its weights": ("", "import copy\nkept = copy.deepcopy(model.to('cuda').state_dict())\n", "beside"),
    "Unsloth's, loaded twice": ("", 'other, tok = FastLanguageModel.from_pretrained("Qwen/Qwen3-0.6B")\n', "beside"),
}  # fmt: skip


KNOWN = {
    "all on": f"{EACH}True\n",
    "a reference frozen": "for p in ref_model.parameters():\n    p.requires_grad = False\n",
    "a model of the host": 'other = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-70B")\n',
    "a copy on the host": "import copy\nbase = copy.deepcopy(model)\n",
    "a copy of its configuration": "import copy\nkept = copy.deepcopy(model.cuda().config)\n",
    "a copy of the data": "import copy\nkept = copy.deepcopy(load_dataset('x'))\n",
    "a model that is deleted": 'old = AutoModelForCausalLM.from_pretrained("b", device_map="auto")\ndel old\n',
}


@pytest.mark.parametrize("name", [*OPEN, *KNOWN])
def test_what_makes_another_run_is_asked_for(name: str) -> None:
    before, after, *fields = OPEN[name] if name in OPEN else ("", KNOWN[name])
    assert [missing.field for missing in read(before, after).missing] == fields


@pytest.mark.parametrize(
    ("frozen", "bounded"),
    [
        (f"{EACH}'head' in n\n", True),
        ("model.get_input_embeddings().requires_grad_(False)\n", True),
        ("if False:\n    model.get_input_embeddings().requires_grad_(False)\n", False),
        ("if NAME == 'x':\n    pass\nelse:\n    model.requires_grad_(False)\n", True),
    ],
)
def test_frozen_parts_make_an_upper_bound_where_they_are_frozen(frozen: str, bounded: bool) -> None:
    config = read(after=frozen)
    assert config.missing == ()
    bounds = [text for text in config.approximations if isinstance(text, UpperBound)]
    assert [bound.categories for bound in bounds] == [("gradients", "optimizer", "activations")] * bounded


def test_a_person_says_what_lies_beside() -> None:
    config = read(after=TEACHER)
    overridden = overrides(config, parse_sets(["beside=16"]))
    assert (overridden.missing, overridden.beside_bytes) == ((), 16 << 30)
    card, model = find_gpu("a100-80gb"), catalogue.load("Llama-3.1-8B")
    assert model is not None
    alone, both = (
        check(variant, model, card, card.memory_bytes, predictor(model, card)).prediction.peak_device_bytes
        for variant in (replace(overridden, beside_bytes=0), overridden)
    )
    assert both - alone == 16 << 30


def test_reward_models_and_other_references_are_asked_for() -> None:
    judged = 'GRPOTrainer(model, reward_funcs="org/reward", args=GRPOConfig(max_completion_length=64)).train()'
    assert "beside" in {missing.field for missing in read(train=judged).missing}
    preferred = "DPOTrainer(model, ref, args=DPOConfig(per_device_train_batch_size=2, max_length=512)).train()"
    other = 'ref = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-70B", dtype=torch.bfloat16)\n'
    assert [missing.field for missing in read(after=other, train=preferred).missing] == ["beside"]
    says(read(after=other.replace('"meta-llama/Llama-3.1-70B"', "NAME"), train=preferred), "approximations", ())


def test_a_length_of_none_is_asked_for() -> None:
    assert [missing.field for missing in read(train=TRAIN.replace("512", "None")).missing] == ["seq_len_tokens"]


OWN = """
class Mine(SFTTrainer):
    def create_optimizer(self):
        if self.optimizer is None:
            {made}
        return self.optimizer
"""


@pytest.mark.parametrize(
    ("made", "optimizer"),
    [
        ("self.optimizer = bnb.optim.PagedLion8bit([{'params': self.model.parameters()}], lr=1e-5)", "paged-lion-8bit"),
        ("self.optimizer = torch.optim.AdamW(self.model.parameters(), amsgrad=True)", "adamw-amsgrad"),
        (
            "cls, words = Trainer.get_optimizer_cls_and_kwargs(self.args); self.optimizer = cls(ps(), **words)",
            "adamw-fused",
        ),
        ("self.optimizer = Sharded(self.model.parameters())", None),
    ],
)
def test_the_optimizer_of_a_trainers_own_method_counts(made: str, optimizer: str | None) -> None:
    """And where it is not known, it is asked for."""
    config = read(OWN.format(made=made), train=TRAIN.replace("SFTTrainer", "Mine"))
    assert [missing.field for missing in config.missing] == ([] if optimizer else ["optimizer"])
    assert optimizer in (None, config.setup.optimizer)


def test_an_optimizer_set_on_the_trainer_counts() -> None:
    train = "t = " + TRAIN.replace(".train()", "\nt.optimizer = torch.optim.SGD(model.parameters())\nt.train()")
    assert read(train=train).setup.optimizer == "sgd"


def test_a_length_handed_on_by_partial_or_map_is_read() -> None:
    cut = "def cut(row, limit):\n    return {'input_ids': tokenizer(row, truncation=True, max_length=limit)}\n"
    train = "Trainer(model, TrainingArguments(bf16=True), train_dataset=rows).train()"
    for handed in ("rows.map(partial(cut, limit=640))\n", "rows.map(cut, fn_kwargs={'limit': 640})\n"):
        assert read(after=f"rows = load()\n{cut}rows = {handed}", train=train).setup.seq_len_tokens == 640


def test_settings_handed_on_from_an_unknown_file_replace_every_default() -> None:
    made = (
        "import json, sys\nfrom dataclasses import dataclass\n@dataclass\nclass Wishes:\n    batch: int = 4\n"
        "wishes = Wishes(**json.load(open(sys.argv[1])))\ndef batch(size=4):\n    return size\n"
    )
    for value in ("wishes.batch", "batch(**json.load(open(sys.argv[1])))"):
        train = TRAIN.replace("per_device_train_batch_size=2", f"per_device_train_batch_size={value}")
        assert [missing.field for missing in read(after=made, train=train).missing] == ["micro_batch_seqs"]


EVALUATED = {
    "none": ("", 0),
    "no data": (', eval_strategy="steps"', 0),
    "the default": (', eval_strategy="steps"), eval_dataset=(rows', 8),
    "so many": (', eval_strategy="epoch", per_device_eval_batch_size=3), eval_dataset=(rows', 3),
    "never": (', eval_strategy="no"), eval_dataset=(rows', 0),
}


@pytest.mark.parametrize("name", EVALUATED)
def test_what_is_evaluated_at_once_is_read(name: str) -> None:
    arguments, seqs = EVALUATED[name]
    assert read(train=TRAIN.replace("512)", f"512{arguments})")).eval_seqs == seqs


LLAMAFACTORY = "do_train: true\nstage: sft\nfinetuning_type: lora\ncutoff_len: 512\neval_strategy: steps\n"
AXOLOTL = "adapter: lora\nsequence_len: 512\nmicro_batch_size: 1\nval_set_size: 0.1\n"
FILES = {
    "trl.yaml": ("model_name_or_path: NAME\nmax_length: 512\nlearning_rate: 1e-4\neval_strategy: steps\n", 8),
    "no_data.yaml": (f"model_name_or_path: NAME\n{LLAMAFACTORY}", 0),
    "so_many.yaml": (f"model_name_or_path: NAME\n{LLAMAFACTORY}val_size: 0.1\nper_device_eval_batch_size: 2\n", 2),
    "as_many.yml": (f"base_model: NAME\n{AXOLOTL}", 0),
    "more.yml": (f"base_model: NAME\n{AXOLOTL}eval_batch_size: 4\n", 4),
}


@pytest.mark.parametrize("name", FILES)
def test_tools_files_say_what_they_evaluate(name: str) -> None:
    text, seqs = FILES[name]
    config = read_text(text.replace("NAME", "meta-llama/Llama-3.1-8B"), name, around=FileContext())
    assert config.eval_seqs == seqs


def test_an_evaluation_that_decides_is_judged_said_and_fixed() -> None:
    train = TRAIN.replace("512)", '1024, eval_strategy="steps", gradient_checkpointing=True), eval_dataset=(rows)')
    versions = FileContext(versions={"trl": "0.19.1", "transformers": "4.53.0"})
    config = read_text(HEAD + MODEL + train.replace("{more}", ", peft_config=LoraConfig(r=8)"), "t.py", around=versions)
    card, model = find_gpu("rtx-4090"), catalogue.load("Llama-3.1-8B")
    assert model is not None
    predict, budget = predictor(model, card), round(card.memory_bytes * 0.94)
    judged = check(config, model, card, budget, predict)
    assert judged.verdict is Verdict.DOES_NOT_FIT
    assert judged.evaluation_bytes == judged.prediction.peak_device_bytes > predict(config.setup).peak_device_bytes
    bound = evaluation_bytes(model, card, config.setup, 8)
    step_below = band_of(predict(config.setup), config).below
    assert (bound, judged.band) == (judged.evaluation_bytes, (max(step_below, EVALUATION_BAND_FRACTION), 0))
    assert "per_device_eval_batch_size 2 keeps it below" in judged.notes[0]
    fewer = next(change for change in judged.changes if change.label == "evaluation of 2 at once")
    assert (fewer.verdict, fewer.setup, fewer.in_place) == (Verdict.FITS, config.setup, True)
    mended = improve(judged, model, predict)
    assert (mended.verdict, mended.labels[0]) == (Verdict.FITS, "evaluation of 2 at once")
    assert edits_of(config, mended)["per_device_eval_batch_size"] == 2
    small = check(replace(config, eval_seqs=2), model, card, budget, predict)
    assert (small.verdict, small.evaluation_bytes) == (Verdict.FITS, 0)


def test_a_program_of_pictures_asks_what_a_sample_shows() -> None:
    vision = MODEL.replace("AutoModelForCausalLM", "AutoModelForImageTextToText")
    program = f"{HEAD}from transformers import AutoModelForImageTextToText\n{vision}{TRAIN.replace('{more}', '')}"
    config = read_text(program, "train.py", around=FileContext())
    assert [missing.field for missing in config.missing] == ["images"]
    assert overrides(config, parse_sets(["images=none"])).missing == ()
    assert overrides(config, parse_sets(["images=2x448x448"])).setup.images is not None
    blind = read_text(program, "train.py", model=catalogue.load("Llama-3.1-8B"), around=FileContext())
    assert ([gap.field for gap in blind.missing], "not planned" in blind.missing[0].reason) == (["images"], True)


@pytest.mark.parametrize(
    ("trainer", "model", "words"),
    [
        ("SFTTrainer", "google/gemma-3-4b-it", "how many a sample shows"),
        ("DPOTrainer", "google/gemma-3-4b-it", "with objective dpo they are not planned"),
        ("SFTTrainer", "voxtral", "what voxtral makes of that is not planned"),
    ],
)
def test_a_class_of_a_model_of_pictures_or_sound_is_asked_what_samples_show(
    trainer: str, model: str, words: str
) -> None:
    """TRL's sft_ministral3_vl.ipynb and whatever loads Gemma3ForConditionalGeneration: no part of the name says it."""
    spec = catalogue.load("google/gemma-3-4b-it")
    assert spec is not None
    if model == "voxtral":
        config = {key: value for key, value in spec.config.items() if key != "vision_config"}
        spec = replace(spec, config={**config, "audio_config": {}}, model_type=model)
    loaded = MODEL.replace("AutoModelForCausalLM", "Gemma3ForConditionalGeneration")
    program = (
        f"{HEAD}from transformers import Gemma3ForConditionalGeneration\n{loaded}{trainer}(model, args=None).train()"
    )
    gaps = {gap.field: gap.reason for gap in read_text(program, "train.py", model=spec, around=FileContext()).missing}
    assert words in gaps["images"]
    text = program.replace(loaded, MODEL)
    assert "images" not in {gap.field for gap in read_text(text, "train.py", model=spec, around=FileContext()).missing}


SOUND = (
    HEAD
    + """
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, WhisperForConditionalGeneration
model = WhisperForConditionalGeneration.from_pretrained("NAME")
{more}
args = Seq2SeqTrainingArguments(
    output_dir="o", per_device_train_batch_size=16, gradient_checkpointing=True, fp16=True, eval_strategy="steps",
    per_device_eval_batch_size=8, predict_with_generate=True, generation_max_length=225,
)
Seq2SeqTrainer(args=args, model=model, train_dataset=rows, eval_dataset=rows, compute_metrics=wer).train()
"""
)


def test_a_program_of_sound_is_read_as_the_course_has_it() -> None:
    whisper = catalogue.load("openai/whisper-small")
    config = read_text(SOUND.format(more=""), "train.py", model=whisper, around=FileContext())
    setup = config.setup
    assert (setup.method, setup.precision, setup.seq_len_tokens, setup.loss) == ("full", "fp16-mixed", 225, "full")
    assert (setup.micro_batch_seqs, setup.frozen_encoder, config.missing) == (16, False, ())
    assert any("225 tokens" in assumption for assumption in config.assumptions)
    assert not config.eval_logits  # an evaluation that generates keeps tokens
    frozen = read_text(SOUND.format(more="model.freeze_encoder()"), "train.py", model=whisper, around=FileContext())
    assert frozen.setup.frozen_encoder
    unsloths = SOUND.format(more="").replace(
        "model = Whisper",
        "from unsloth import FastModel\nmodel, _ = FastModel.from_pretrained('NAME')\nmodel2 = Whisper",
    )
    offloaded = read_text(unsloths, "train.py", model=whisper, around=FileContext())
    assert whisper is not None
    assert (offloaded.setup.stack, halves_refusal(whisper, offloaded.setup)) == ("unsloth", "")
    with pytest.raises(NotPlanned, match="speech"):
        read_text(SOUND.format(more=""), "train.py", model=catalogue.load("google-t5/t5-base"), around=FileContext())


LEFT_OUT = {
    "axolotl.yml": (f"base_model: NAME\n{AXOLOTL}lisa_n_layers: 4\n", "LISA"),
    "lf.yaml": (f"model_name_or_path: NAME\n{LLAMAFACTORY}use_eaft_loss: true\n", "EAFT"),
}
ASKED = {
    "axolotl.yml": (f"base_model: NAME\n{AXOLOTL}overrides_of_model_config: {{num_hidden_layers: 4}}\n", "model"),
    "lf.yaml": (f"model_name_or_path: NAME\n{LLAMAFACTORY}adapter_name_or_path: mine\n", "lora_rank"),
    "trl.yaml": ("model_name_or_path: NAME\nmax_length: null\nlearning_rate: 1e-4\n", "seq_len_tokens"),
    "inherits.yaml": (
        "peft: {r: 16}\ntraining: {per_device_batch_size: 1, gradient_accumulation_steps: 16}\n",
        "model",
    ),
}


def test_settings_that_no_model_follows_are_said_and_those_that_make_another_run_are_asked_for() -> None:
    for name, (text, word) in LEFT_OUT.items():
        config = read_text(text.replace("NAME", "meta-llama/Llama-3.1-8B"), name, around=FileContext())
        assert any(word in note for note in config.approximations), name
    for name, (text, field) in ASKED.items():
        config = read_text(text.replace("NAME", "meta-llama/Llama-3.1-8B"), name, around=FileContext())
        assert field in {missing.field for missing in config.missing}, name
    halved = read_text(
        "model_name_or_path: a\nmax_length: 9\nauto_find_batch_size: true\n", "t.yaml", around=FileContext()
    )
    assert any("halved" in assumption for assumption in halved.assumptions)


KEPT = (
    "args = SFTConfig(per_device_train_batch_size=2, max_length=512)\n"
    "trainer = SFTTrainer(model, args=args, peft_config=LoraConfig(r=8))\ntrainer.train()\n"
)
AGAIN = {
    "the base, to merge": 'base = AutoModelForCausalLM.from_pretrained(NAME, dtype="float16", device_map="auto")\n',
    "moved": "merged = AutoModelForCausalLM.from_pretrained(NAME, torch_dtype=torch.float16).to('cuda')\n",
    "by its adapters": "done = AutoPeftModelForCausalLM.from_pretrained('o', dtype='float16', device_map={'': 0})\n",
}
INSIDE = "def main():\n" + "".join(f"    {line}\n" for line in (KEPT + AGAIN["moved"]).splitlines()) + "main()\n"
AGAIN["within a function"] = INSIDE
ALONE = {
    "after its function": INSIDE.replace("    merged", "def merge():\n    merged") + "merge()\n",
    "on the host": AGAIN["the base, to merge"].replace("auto", "cpu"),
    "where it is": "base = AutoModelForCausalLM.from_pretrained(NAME, dtype=torch.float16)\n",
    "after the first is gone": "del trainer, model\n" + AGAIN["moved"],
    "another model": AGAIN["the base, to merge"].replace("NAME", "'org/judge'"),
    "nothing": "trainer.save_model('o')\n",
}


@pytest.mark.parametrize("name", [*AGAIN, *ALONE])
def test_a_model_that_is_loaded_again_after_the_training_is_told(name: str) -> None:
    body = (AGAIN | ALONE)[name]
    config = read(train=body if "main()" in body else KEPT + body)
    assert config.missing == ()
    assert (config.loaded_again[1], bool(config.loaded_again[0])) == (("fp16", True) if name in AGAIN else ("", False))
    card, model = find_gpu("a100-80gb"), catalogue.load("Llama-3.1-8B")
    assert model is not None
    answer = check(config, model, card, 25 << 30, predictor(model, card))
    warned = any("loads the model once more" in note for note in answer.notes)
    assert (warned, answer.verdict) == (name in AGAIN, Verdict.UNCERTAIN if name in AGAIN else Verdict.FITS)


@pytest.mark.parametrize("parallel", ["ddp", "zero2", "fsdp2", "zero3"])
@pytest.mark.parametrize("quantized", [False, True])
def test_what_loading_takes_of_the_host_is_said(parallel: str, quantized: bool) -> None:
    card, model = find_gpu("h100-sxm"), catalogue.load("Llama-3.1-8B")
    assert model is not None
    setup = TrainSetup(method="full", precision="bf16-mixed", lora_rank=0, seq_len_tokens=512)
    if quantized:
        setup = TrainSetup(method="qlora", quantization="nf4", seq_len_tokens=512)
    config = replace(read(), setup=setup.replace(num_gpus=4, parallel=parallel))
    notes = " ".join(check(config, model, card, 80 << 30, predictor(model, card)).notes)
    read_whole = parallel != "zero3" and not quantized
    assert (f"host's memory: {gib(4 * 4 * model.num_params)}" in notes) is read_whole
    assert ("one state dict" in notes) is (parallel in ("fsdp2", "zero3") and not quantized)


@pytest.mark.parametrize(("stack", "told"), [("trl", True), ("torchtitan", False)])
def test_nothing_is_said_of_the_host_where_a_model_is_read_and_saved_in_shards(stack: str, told: bool) -> None:
    card, model = find_gpu("h100-sxm"), catalogue.load("Llama-3.1-8B")
    assert model is not None
    full = TrainSetup(method="full", precision="bf16-mixed", lora_rank=0, num_gpus=4, parallel="fsdp2", stack=stack)
    notes = " ".join(check(replace(read(), setup=full), model, card, 80 << 30, predictor(model, card)).notes)
    assert ("one state dict" in notes) is ("in the host's memory" in notes) is told


def test_labels_that_are_cut_shorter_make_an_upper_bound() -> None:
    """flan-t5-large on billsum: 101.6 GiB of 76 with labels as long as the inputs; a trace of the program says 58."""
    text = """from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, Seq2SeqTrainer, Seq2SeqTrainingArguments
tok = AutoTokenizer.from_pretrained("google-t5/t5-base")
def rows(example):
    row = tok(example["text"], max_length=1024, truncation=True)
    row["labels"] = tok(text_target=example["summary"], max_length=LABELS, truncation=True)["input_ids"]
    return row
model = AutoModelForSeq2SeqLM.from_pretrained("google-t5/t5-base")
args = Seq2SeqTrainingArguments(output_dir="x", per_device_train_batch_size=16, bf16=True)
Seq2SeqTrainer(model=model, args=args, train_dataset=data.map(rows)).train()
"""
    model, card = catalogue.load("google-t5/t5-base"), find_gpu("a100-80gb")
    verdicts = []
    for labels in (1024, 128):
        config = read_text(text.replace("LABELS", str(labels)), "t.py", model=model)
        prediction = predict(model, card, config.setup)
        assert config.label_tokens == labels % 1024
        assert any("upper bounds" in words for words in config.approximations) == (labels < 1024)
        verdicts.append(judge(prediction, prediction.peak_device_bytes // 2, band_of(prediction, config)))
    assert verdicts == [Verdict.DOES_NOT_FIT, Verdict.UNCERTAIN]
