"""What a file leaves open stays open, in spellings of many programs; what it says is still not asked for."""

from dataclasses import replace
from pathlib import Path

import pytest

from planner.core.errors import ConfigError, NotATraining, NotPlanned, Undetermined
from planner.frameworks.readers import read_config, read_text
from planner.frameworks.readers.types import ReadConfig, overrides, parse_sets
from planner.models.resolve import resolve_model
from planner.models.spec import ModelSpec
from tests.planner.helpers import open_fields, says

HEAD = """
import os, sys, json, yaml, argparse, torch
from datasets import load_dataset
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer
NAME = "Qwen/Qwen3-0.6B"
ds = load_dataset("x")
cfg = yaml.safe_load(open(sys.argv[1]))
"""
LOAD = "model = AutoModelForCausalLM.from_pretrained(NAME, dtype=torch.bfloat16)\n"
ARGUMENTS = "per_device_train_batch_size=1, max_length=512"


def read(body: str, model: ModelSpec | None = None) -> ReadConfig:
    return read_text(HEAD + body, "train.py", model=model)


def trained(arguments: str = "", trainer: str = "", *, load: str = LOAD, before: str = "") -> str:
    return (
        f"{load}{before}args = SFTConfig({ARGUMENTS}, {arguments})\n"
        f"SFTTrainer(model=model, args=args, train_dataset=ds['train'], {trainer}).train()\n"
    )


HF_TRAINER = (
    "block_size = 512\nmodel = AutoModelForCausalLM.from_pretrained(NAME, {loading})\n"
    "model = prepare_model_for_kbit_training(model)\n"
    "model = get_peft_model(model, LoraConfig(r=8, target_modules='all-linear'))\n"
    "Trainer(model=model, args=TrainingArguments('o', per_device_train_batch_size=1, bf16=True)).train()\n"
)
EVALUATES = {
    "a value or none": "ev = ds.get('validation')\n"
    + trained("eval_strategy='steps' if ev is not None else 'no'", "eval_dataset=ev"),
    "turned round": "ev = ds.get('test')\n"
    + trained("eval_strategy='no' if ev is None else 'epoch'", "eval_dataset=ev"),
    "keywords of the arguments": "kw = {}\nif 'test' in ds:\n    kw['eval_strategy'] = 'steps'\n"
    + trained("**kw", "eval_dataset=ds['test'] if 'test' in ds else None"),
    "keywords of the trainer": LOAD + f"args = SFTConfig({ARGUMENTS})\nkw = dict(model=model, args=args)\n"
    "if os.path.exists('dev.json'):\n    args.eval_strategy = 'epoch'\n    kw['eval_dataset'] = ds['dev']\n"
    "SFTTrainer(**kw).train()\n",
    "a name for the condition": "has = len(ds) > 1\n"
    + trained("eval_strategy='steps' if has else 'no'", "eval_dataset=ds['test'] if has else None"),
    "updated": "more = dict()\nif len(ds['test']):\n    more.update(eval_strategy='steps', do_eval=True)\n"
    + trained("**more", "eval_dataset=ds['test']"),
    "two trainers": LOAD + f"if ds.get('test'):\n    t = SFTTrainer(model, args=SFTConfig({ARGUMENTS}, "
    f"eval_strategy='steps'), eval_dataset=ds['test'])\nelse:\n    t = SFTTrainer(model, args=SFTConfig({ARGUMENTS}))\n"
    "t.train()\n",
}


NOT_EVALUATED = {
    "never": "ev = None\n" + trained("eval_strategy='steps' if ev is not None else 'no'", "eval_dataset=ev"),
    "switched off": "EVAL = False\n" + trained("eval_strategy='steps' if EVAL else 'no'", "eval_dataset=ds['test']"),
    "no data": "kw = {}\nif kw:\n    kw['eval_strategy'] = 'steps'\n" + trained("**kw"),
    "said no": trained("eval_strategy='no', per_device_eval_batch_size=cfg['eval_batch']", "eval_dataset=ds['test']"),
}


@pytest.mark.parametrize("name", [*EVALUATES, *NOT_EVALUATED])
def test_an_evaluation_that_may_run_is_counted(name: str) -> None:
    says(read((EVALUATES | NOT_EVALUATED)[name]), "eval_seqs", 8 if name in EVALUATES else 0)


@pytest.mark.parametrize(
    "arguments",
    [
        "eval_strategy=cfg['when']",
        "eval_strategy='steps', per_device_eval_batch_size=cfg['eval_batch']",
        "evaluation_strategy=os.environ['EVAL']",
        "do_eval=cfg.get('eval')",
    ],
)
def test_an_evaluation_that_another_file_decides_is_asked_for(arguments: str) -> None:
    config = read(trained(arguments, "eval_dataset=ds['test']"))
    assert open_fields(config) == {"eval_seqs"}
    answered = overrides(config, parse_sets(["eval_batch=4"]))
    assert (answered.eval_seqs, answered.missing) == (4, ())


UNKNOWN_MODELS = {
    "a parameter": "def train(model):\n    " + trained(load="").replace("\n", "\n    ") + "\n",
    "an unknown builder": "from mylib import build\nmodel, tok = build(NAME)\n" + trained(load=""),
    "a builder with settings": "from mylib import make\nmodel = make({'name': NAME})\n" + trained(load=""),
    "a wrapper": "from mylib import wrap\n" + trained(before="model = wrap(model, rank=8)\n"),
    "an attribute": "class Run:\n    def __init__(self, model):\n        self.model = model\n"
    + "    def fit(self):\n        "
    + trained(load="").replace("model=model", "model=self.model").replace("\n", "\n        ")
    + "\n",
    "another loads for the merge": "from mylib import build\nmodel = build(cfg)\n"
    + trained(load="")
    + "base = AutoModelForCausalLM.from_pretrained(NAME)\nPeftModel.from_pretrained(base, 'out').merge_and_unload()\n",
}


@pytest.mark.parametrize("name", UNKNOWN_MODELS)
def test_whether_a_model_of_unknown_make_has_adapters_is_asked_for(name: str) -> None:
    config = read(UNKNOWN_MODELS[name])
    assert {"method", "lora_rank"} <= open_fields(config)
    assert ("model" in open_fields(config)) == (config.model_id is None)
    answered = overrides(config, parse_sets(["method=full", "precision=bf16-mixed"]))
    assert open_fields(answered) <= {"model"}


KNOWN_MODELS = {
    "prepared": "from accelerate import Accelerator\n" + trained(before="model = Accelerator().prepare(model)\n"),
    "compiled": trained(before="model = torch.compile(model)\n"),
    "a function of the program": "def build(name):\n    return AutoModelForCausalLM.from_pretrained(name, "
    "dtype=torch.bfloat16)\nmodel = build(NAME)\n" + trained(load=""),
    "methods": trained(before="model = model.to('cuda').train()\nmodel.enable_input_require_grads()\n"),
}


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_a_model_whose_make_is_known_is_not_asked_for(name: str) -> None:
    says(read(KNOWN_MODELS[name]), "model_id method", ("Qwen/Qwen3-0.6B", "full"))


FOUR = "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)"
PEFT = "model = get_peft_model(model, LoraConfig(r=8))\n"
OPEN_BRANCHES = {
    "a switch": (f"q = None\nif cfg['use_4bit']:\n    q = {FOUR}\n", "quantization_config=q", PEFT, "method"),
    "a number": (
        f"q = None\nif cfg['bits'] == 4:\n    q = {FOUR}\nelif cfg['bits'] == 8:\n"
        "    q = BitsAndBytesConfig(load_in_8bit=True)\n",
        "quantization_config=q",
        PEFT,
        "method",
    ),
    "in place": ("", f"quantization_config={FOUR} if cfg.get('qlora') else None", PEFT, "method"),
    "double": (
        "",
        "quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=cfg['double'])",
        PEFT,
        "quantization",
    ),
    "adapters": ("", "", "if cfg['lora']['enabled']:\n    " + PEFT, "method"),
    "adapters unless": ("", "", "if not cfg.get('full_finetune', False):\n    " + PEFT, "method"),
    "checkpointing": ("", "", "if cfg['save_memory']:\n    model.gradient_checkpointing_enable()\n", "checkpointing"),
    "checkpointing in its words": ("", "", "gc = True if cfg['gc'] == 'yes' else False\n", "checkpointing"),
    "rank by a case": (
        "",
        "",
        "r = 8\nif 'big' in cfg['size']:\n    r = 64\nmodel = get_peft_model(model, LoraConfig(r=r))\n",
        "lora_rank",
    ),
}


@pytest.mark.parametrize("name", OPEN_BRANCHES)
def test_what_a_branch_of_an_unknown_file_decides_is_asked_for(name: str) -> None:
    before, loading, after, field = OPEN_BRANCHES[name]
    switch = "gradient_checkpointing=gc" if "gc =" in after else "gradient_checkpointing=False"
    body = f"{before}model = AutoModelForCausalLM.from_pretrained(NAME, dtype=torch.bfloat16, {loading})\n{after}"
    config = read(body + trained(switch, load=""))
    assert field in open_fields(config)
    # the same where the program says it: nothing is asked
    settings = "cfg = {'use_4bit': True, 'bits': 4, 'qlora': True, 'double': True, 'lora': {'enabled': True}, "
    settings += "'full_finetune': False, 'save_memory': True, 'gc': 'yes', 'size': 'big'}\n"
    complete = read(settings + body + trained(switch, load=""))
    assert complete.missing == ()


def test_one_condition_decides_everywhere_where_it_stands() -> None:
    body = "lora = cfg.get('lora')\nc = LoraConfig(r=4) if lora else None\n" + trained(
        before="if lora:\n    model = get_peft_model(model, c)\n"
    )
    config = read(body)
    assert open_fields(config) == {"method"}
    assert overrides(config, parse_sets(["method=lora"])).setup.lora_rank == 4


LAUNCHES = {
    "accelerate launch --config_file conf/zero3.yaml train.py": {"parallel", "num_gpus"},
    "accelerate launch --config-file=$HOME/fsdp.yaml --num_processes 8 train.py": {"parallel"},
    "torchrun --nproc_per_node $NGPU train.py": {"num_gpus"},
    "torchrun --nproc-per-node=gpu train.py": {"num_gpus"},
    "deepspeed --num_gpus ${GPUS} train.py": {"num_gpus"},
    "torchrun --nnodes $NUM_NODES --nproc_per_node 8 train.py": {"num_gpus"},
    "python -m torch.distributed.run --nproc_per_node=$(wc -l < hosts) train.py": {"num_gpus"},
    "torchrun --nproc_per_node 4 train.py": set(),
    "NGPU=4\ntorchrun --nproc_per_node $NGPU train.py": set(),
    "torchrun --nproc_per_node ${NGPU:-2} train.py": set(),
    "accelerate launch --config_file here.yaml train.py": set(),
    "python train.py": set(),
}


@pytest.mark.parametrize("command", LAUNCHES)
def test_what_a_launcher_leaves_open_is_asked_for(command: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEAD + trained())
    (tmp_path / "here.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    (tmp_path / "run.sh").write_text(command + "\n")
    assert open_fields(read_config(tmp_path / "run.sh")) == LAUNCHES[command]


WORKERS = (
    "from ray.train import ScalingConfig\nfrom ray.train.torch import TorchTrainer\n"
    "def loop(config):\n    BODY\nTorchTrainer(loop, train_loop_config={'batch': 2}, "
    "scaling_config=ScalingConfig(num_workers=NUM, use_gpu=True)).fit()\n"
).replace("BODY", trained().replace("batch_size=1", "batch_size=config['batch']").replace("\n", "\n    "))


@pytest.mark.parametrize(("num", "gpus", "expected"), [("4", 4, set()), ("1", 1, set()), ("cfg['n']", 1, {"num_gpus"})])
def test_workers_that_ray_starts_are_the_runs_gpus(num: str, gpus: int, expected: set[str]) -> None:
    says(read(WORKERS.replace("NUM", num)), "num_gpus micro_batch_seqs missing", (gpus, 2, expected))


SETTINGS = "from dataclasses import dataclass\n@dataclass\nclass C:\n    batch: int = 1\n    length: int = 512\n"
FOLLOWED = {
    "a class method": SETTINGS
    + "    @classmethod\n    def load(cls, path):\n        return cls(**yaml.safe_load(open(path)))"
    "\nc = C.load('c.yaml')\nBATCH = c.batch\n",
    "a class method of an object": SETTINGS + "    @classmethod\n    def of(cls, n):\n        return cls(batch=n)\n"
    "BATCH = C().of(3).batch\n",
    "a static method": "class S:\n    @staticmethod\n    def size(n):\n        return n\nBATCH = S.size(3)\n",
    "super": "class A:\n    def __init__(self, cfg):\n        self.cfg = cfg\nclass B(A):\n"
    "    def __init__(self, cfg):\n        super().__init__(cfg)\nBATCH = B({'n': 3}).cfg['n']\n",
    "super of super": "class A:\n    def __init__(self, n):\n        self.n = n\nclass B(A):\n    pass\nclass D(B):\n"
    "    def __init__(self, n):\n        super().__init__(n + 1)\nBATCH = D(2).n\n",
    "a method of super": "class A:\n    def size(self):\n        return 2\nclass B(A):\n    def size(self):\n"
    "        return super().size() + 1\nBATCH = B().size()\n",
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_classes_of_a_program_are_followed(name: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("batch: 3\n")
    (tmp_path / "t.py").write_text(HEAD + FOLLOWED[name] + trained().replace("size=1", "size=BATCH"))
    says(read_config(tmp_path / "t.py"), "micro_batch_seqs", 3)


@pytest.mark.parametrize(
    "end", ["raise SystemExit(main())", "sys.exit(main())", "exit(main())", "raise SystemExit(int(main()))"]
)
def test_a_program_may_start_where_it_ends(end: str) -> None:
    body = "def main():\n    " + trained().replace("\n", "\n    ") + f"\nif __name__ == '__main__':\n    {end}\n"
    assert read(body).missing == ()


@pytest.mark.parametrize(
    "text",
    [
        "cd repo/sub && python src/train.py",
        "cd /home/me/repo/sub\npython src/train.py",
        'srun bash -c "\n  export A=1\n  cd sub\n  python \\\n    src/train.py\n"',
        "srun -N 1 bash -euo pipefail -c 'cd sub && python src/train.py'",
        "srun --label bash -l -c 'cd sub\npython src/train.py\n'",
    ],
)
def test_a_script_is_found_from_inside_its_repository(text: str, tmp_path: Path) -> None:
    (tmp_path / "sub" / "src").mkdir(parents=True)
    (tmp_path / "sub" / "src" / "train.py").write_text(HEAD + trained())
    (tmp_path / "run.sh").write_text(text + "\n")
    assert read_config(tmp_path / "run.sh").setup.micro_batch_seqs == 1


@pytest.mark.parametrize(
    ("kind", "stored", "precision"),
    [("bert", None, "fp32"), ("roberta", None, "fp32"), ("distilbert", None, "fp32"), ("bert", "bfloat16", "bf16-pure"),
     ("llama", None, "bf16-pure")],
)  # fmt: skip
def test_encoders_are_published_in_float32(kind: str, stored: str | None, precision: str) -> None:
    config = {"model_type": kind} | ({"dtype": stored} if stored else {})
    model = replace(resolve_model("Qwen/Qwen3-0.6B"), model_type=kind, config=config)
    body = "tok = AutoTokenizer.from_pretrained(NAME)\ntok('a', truncation=True, max_length=128)\n"
    body += "model = AutoModelForCausalLM.from_pretrained(NAME)\nTrainer(model=model, args=TrainingArguments("
    body += "per_device_train_batch_size=1)).train()\n"
    assert read(body, model=model).setup.precision == precision


@pytest.mark.parametrize(
    ("loading", "precision"),
    [("dtype=torch.bfloat16", "bf16-mixed"), ("torch_dtype='auto'", "bf16-mixed"),
     ("dtype=torch.float16", "bf16-mixed"),
     ("quantization_config=BitsAndBytesConfig(load_in_4bit=True)", "bf16-autocast")],
)  # fmt: skip
def test_a_base_that_is_not_quantized_is_cast_whole_by_its_preparation(loading: str, precision: str) -> None:
    load = f"model = AutoModelForCausalLM.from_pretrained(NAME, {loading})\n"
    config = read(trained("bf16=True", load=load, before="model = prepare_model_for_kbit_training(model)\n" + PEFT))
    assert config.setup.precision == precision
    plain = read(HF_TRAINER.format(loading=loading))
    assert plain.setup.checkpointing == ("quantization_config" in loading)  # peft leaves it to others of such a base


@pytest.mark.parametrize(
    "line", ["from sliced import SliceTrainer as T", "import fast.train\nT = fast.train.MyTrainer"]
)
def test_a_trainer_of_an_unknown_package_is_not_taken_for_transformers_own(line: str) -> None:
    body = LOAD + f"{line}\nT(model=model, args=SFTConfig({ARGUMENTS})).train()\n"
    assert open_fields(read(body)) == {"objective"}
    subclass = "class T(SFTTrainer):\n    pass\n"
    assert read(body.replace(line, subclass)).missing == ()


def test_another_packages_trainer_of_the_same_name_is_refused() -> None:
    body = "import verifiers as vf\nmodel, tok = vf.get_model_and_tokenizer(NAME)\n"
    body += "vf.GRPOTrainer(model=model, processing_class=tok, args=vf.grpo_defaults(run_name='x')).train()\n"
    with pytest.raises(NotPlanned, match="verifiers's GRPOTrainer"):
        read(body)


def test_the_earlier_name_of_liger_is_read_with_its_versions() -> None:
    config = read(trained("use_liger=True"))
    assert (config.setup.kernels, config.setup.loss) == ("liger", "liger")
    assert any("TRL 0.17" in line for line in config.assumptions)
    assert read(trained("use_liger=False")).setup.kernels == "eager"


RL = "model:\n  name: Qwen/Qwen3-0.6B\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\nseq_len: 2048\n"


@pytest.mark.parametrize(
    "more",
    ["orchestrator:\n  batch_size: 512\n", "rollout:\n  n: 8\n", "algo:\n  kl_coef: 0.01\n", "reward_fn: f.py\n"],
)
def test_settings_of_reinforcement_learning_are_refused(more: str) -> None:
    with pytest.raises(NotPlanned, match="reinforcement learning"):
        read_text(RL + more, "rl.yaml")
    assert read_text(RL + "scheduler:\n  name: cosine\n", "a.yaml").setup.micro_batch_seqs == 2


@pytest.mark.parametrize("prefix", ["train_", "sft_", "training_", ""])
def test_settings_with_something_before_their_name_are_read(prefix: str) -> None:
    names = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_seq_length": 512, "bf16": "true"}
    text = "model_name: Qwen/Qwen3-0.6B\nlora_r: 8\n" + "".join(
        f"{prefix}{key}: {value}\n" for key, value in names.items()
    )
    setup = read_text(text, "own.yaml").setup
    assert (setup.micro_batch_seqs, setup.accumulation_steps, setup.seq_len_tokens) == (2, 4, 512)


@pytest.mark.parametrize(
    "loop",
    [
        "engine, *_ = deepspeed.initialize(model=build(), config='ds.json')\nengine.backward(loss)\nengine.step()\n",
        "model_engine = deepspeed.initialize(args=a, model=net)[0]\nmodel_engine.step()\n",
        "optimizer.zero_grad()\nloss.backward()\noptimizer.step()\n",
    ],
)
def test_a_loop_of_its_own_is_called_one(loop: str) -> None:
    with pytest.raises(ConfigError, match="loop of its own") as caught:
        read_text("import deepspeed, torch\nfrom mymodel import build, net, optimizer, loss, a\n" + loop, "t.py")
    assert "plan trace -- python FILE" in caught.value.hint


LAYOUTS = {
    "--use_deepspeed --deepspeed_config_file ds.json --num_processes 4": ("zero3", 4),
    "--num_processes 2 --use_deepspeed --zero_stage 2": ("zero2", 2),
    "--use_fsdp --fsdp_sharding_strategy FULL_SHARD --num_processes=8": ("fsdp2", 8),
    "--multi_gpu --num_processes 2": ("ddp", 2),
    "--mixed_precision bf16 --num_processes 1": ("none", 1),
}


@pytest.mark.parametrize("words", LAYOUTS)
def test_what_accelerate_is_told_in_words_is_read_as_its_file_is(words: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    (tmp_path / "train.py").write_text(HEAD + trained())
    (tmp_path / "run.sh").write_text(f"accelerate launch {words} train.py\n")
    config = read_config(tmp_path / "run.sh")
    assert (config.setup.parallel, config.setup.num_gpus, config.missing) == (*LAYOUTS[words], ())


def test_a_case_of_a_known_value_is_followed() -> None:
    match = "match KIND:\n    case 'lora' | 'dora':\n        p = LoraConfig(r=4)\n    case None:\n        p = None\n"
    match += "    case _:\n        p = LoraConfig(r=64)\n"
    ranks = {"'lora'": 4, "'dora'": 4, "'x'": 64, "None": 0}
    for kind, rank in ranks.items():
        says(read(f"KIND = {kind}\n{match}" + trained(trainer="peft_config=p")), "lora_rank", rank)
    assert open_fields(read(f"KIND = cfg['k']\n{match}" + trained(trainer="peft_config=p")))


WITHOUT = [
    "try:\n    import flash_attn\n    ATTN = 'flash_attention_2'\nexcept ImportError:\n    ATTN = 'sdpa'\n",
    "ATTN = 'flash_attention_2'\ntry:\n    from flash_attn import x\nexcept ModuleNotFoundError:\n    ATTN = 'eager'\n",
    "try:\n    import flash_attn\n    HAS = True\nexcept Exception:\n    HAS = False\n"
    "ATTN = 'flash_attention_2' if HAS else 'sdpa'\n",
    "def kind():\n    try:\n        import flash_attn\n        return 'flash_attention_2'\n    except Exception as e:\n"
    "        print(e)\n    return 'sdpa'\nATTN = kind()\n",
    "ATTN = 'sdpa'\ntry:\n    import flash_attn\n    ATTN = 'flash_attention_2'\nexcept ImportError:\n    pass\n",
]


@pytest.mark.parametrize("body", WITHOUT)
def test_whether_a_package_is_there_is_asked_for_where_it_decides(body: str) -> None:
    load = LOAD.replace("dtype", "attn_implementation=ATTN, dtype")
    assert open_fields(read(body + trained(load=load))) == {"attention"}
    agreeing = body.replace("'sdpa'", "'flash_attention_2'").replace("'eager'", "'flash_attention_2'")
    assert read(agreeing + trained(load=load)).missing == ()


def test_a_trainer_that_is_not_known_is_said_to_be_one() -> None:
    with pytest.raises(Undetermined, match="a trainer that is not known"):
        read("KINDS = {'sft': SFTTrainer}\nT = KINDS[cfg['kind']]\nT(model=NAME, args=SFTConfig, **cfg['a']).train()\n")


OF_A_KNOWN_CLASS = {
    "adapters put on": "model = get_peft_model(model, LoraConfig())\nN = 2 if isinstance(model, PeftModel) else 16\n",
    "a plain model": "N = 16\nif not isinstance(model, peft.PeftModel):\n    N = 2\n",
    "in a function, behind the preparation": "from peft.peft_model import PeftModel as Wrapped\n"
    "def size(m):\n    if isinstance(m, (Wrapped, str)):\n        return 16\n    return 2\n"
    "N = size(prepare_model_for_kbit_training(model))\n",
    "transformers' own": "N = 2 if isinstance(model, transformers.PreTrainedModel) else 16\n",
    "not transformers' own": "model = PeftModel.from_pretrained(model, 'a/b', is_trainable=True)\n"
    "N = 16 if isinstance(model, transformers.PreTrainedModel) and not isinstance(model, PeftModel) else 2\n",
    "PyTorch's": "from torch import nn\nassert isinstance(model, nn.Module)\n"
    "N = 2 if isinstance(model, nn.Module) else 16\n",
    "data": "WORD = '2'\nN = int(WORD) if isinstance(WORD, str) else 16\n",
    "no data": "GIVEN = None\nN = 16 if isinstance(GIVEN, (int, float)) else 2\n",
}
OF_AN_UNKNOWN_CLASS = {
    "a builder": "from mine import build\nother = build()\nN = 2 if isinstance(other, PeftModel) else 16\n",
    "another wrapper": "from mine import wrap\nother = wrap(model)\nN = 2 if isinstance(other, PeftModel) else 16\n",
    "a class of its own": "from mine import Kind\nN = 2 if isinstance(model, Kind) else 16\n",
    "peft's for a task": "other = get_peft_model(model, LoraConfig(r=4))\nfrom peft import PeftModelForCausalLM\n"
    "N = 2 if isinstance(other, PeftModelForCausalLM) else 16\n",
    "data of a file": "N = 2 if isinstance(cfg['x'], str) else 16\n",
}


@pytest.mark.parametrize("name", [*OF_A_KNOWN_CLASS, *OF_AN_UNKNOWN_CLASS])
def test_a_branch_on_a_class_is_asked_for_where_it_is_not_known(name: str) -> None:
    body = (OF_A_KNOWN_CLASS | OF_AN_UNKNOWN_CLASS)[name]
    text = "import peft, transformers\nfrom peft import PeftModel, get_peft_model, prepare_model_for_kbit_training\n"
    text += trained("gradient_accumulation_steps=N", before=body)
    is_open = "accumulation_steps" in open_fields(config := read(text))
    assert is_open == (name in OF_AN_UNKNOWN_CLASS)
    assert is_open or config.setup.accumulation_steps == 2


CACHED = '"""\n2026.3.1\n2026.3.3\n5.2.0\n0.24.0\n__UNSLOTH_VERSIONING__\n"""\n'
CACHED_CLASS = "from trl import {0}Config\n@dataclass\nclass Unsloth{0}Config({0}Config):\n    seed: int = 3407\n"


@pytest.mark.parametrize(
    "text",
    [CACHED + "import torch\n", CACHED_CLASS.format("KTO"), CACHED_CLASS.format("SFT"), CACHED.replace("\n0.24.0", "")],
)
def test_what_unsloth_caches_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(NotATraining, match="unsloth_compiled_cache"):
        read_text(text, "UnslothKTOTrainer.py")


def test_a_program_that_names_the_cache_is_read() -> None:
    body = "# remove the cache first: __UNSLOTH_VERSIONING__\nclass UnslothSettings(SFTConfig):\n    pass\n"
    assert read(body + trained()).missing == ()


PARSERS = {
    "args, = HfArgumentParser(SFTConfig).parse_yaml_file('a.yaml')": "a.yaml",
    "(args,) = HfArgumentParser((SFTConfig,)).parse_json_file(json_file='conf/a.json')": "conf/a.json",
    "P = os.path.join('conf', 'b.yml')\nargs = HfArgumentParser([SFTConfig]).parse_yaml_file(P)[0]": "conf/b.yml",
}


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("body", PARSERS)
def test_a_parsers_file_says_all_where_it_is_at_hand(body: str, there: bool, tmp_path: Path) -> None:
    """`parse_yaml_file` takes no word of the command line: what it does not say has TRL's defaults."""
    text = HEAD + LOAD + f"from transformers import HfArgumentParser\n{body}\nSFTTrainer(model, args=args).train()\n"
    (tmp_path / "t.py").write_text(text)
    if there:
        path = tmp_path / PARSERS[body]
        path.parent.mkdir(exist_ok=True)
        path.write_text('{"output_dir": "o", "per_device_train_batch_size": 3, "max_length": 256}')
    for arguments in (None, ("--per_device_train_batch_size", "9")):
        config = read_config(tmp_path / "t.py", arguments=arguments)
        assert ("micro_batch_seqs" in open_fields(config)) != there
        assert not there or (config.setup.micro_batch_seqs, config.setup.seq_len_tokens, config.missing) == (3, 256, ())
