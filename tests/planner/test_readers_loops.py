"""Plain loops of PyTorch and Accelerate are judged as the step that they make; every other loop is refused."""

from pathlib import Path

import pytest

from planner.core.errors import NotATraining, NotPlanned
from planner.frameworks.readers import FileContext, ReadConfig, read_text
from tests.planner.helpers import open_fields, says

HEAD = """
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler
tok = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
ds = load_dataset("x", split="train").map(lambda r: tok(r["t"], truncation=True, max_length=256))
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", dtype=torch.float32)
"""
PARTS = "loader = DataLoader(ds, batch_size=3)\nopt = torch.optim.AdamW(model.parameters(), lr=1e-4)\n"
LOOPS = {
    "of a script": PARTS + "model.train()\nfor epoch in range(3):\n    for i, batch in enumerate(tqdm(loader)):\n"
    "        with torch.autocast('cuda', dtype=torch.bfloat16):\n            out = model(**batch, labels=batch['x'])\n"
    "        loss = out.loss / 4\n        loss.backward()\n        if (i + 1) % 4 == 0 or i + 1 == len(loader):\n"
    "            opt.step()\n            opt.zero_grad()\n",
    "of a class": "class Fit:\n    def __init__(self, model, every):\n"
    "        self.model, self.every = model.cuda(), every\n"
    "        self.loader = DataLoader(ds, 3)\n        self.opt = torch.optim.AdamW(model.parameters())\n"
    "        self.scaler = torch.amp.GradScaler()\n"
    "    def step(self, batch):\n        with torch.amp.autocast(device_type='cuda', dtype=torch.bfloat16):\n"
    "            return self.model(batch['a'], labels=batch['a']).loss\n"
    "    def run(self):\n        self.model.train()\n        count = 0\n        for batch in self.loader:\n"
    "            self.scaler.scale(self.step(batch) / self.every).backward()\n            count += 1\n"
    "            if count == self.every:\n                self.scaler.step(self.opt)\n                count = 0\n"
    "Fit(model, every=4).run()\n",
    "of functions under Accelerate": "acc = Accelerator(gradient_accumulation_steps=4, mixed_precision='bf16')\n"
    + PARTS
    + "s = get_scheduler('cosine', opt)\nmodel, opt, loader, s = acc.prepare(model, opt, loader, s)\n"
    "def epoch(model, data):\n    model.train()\n    for batch in data:\n        with acc.accumulate(model):\n"
    "            loss = model(**batch).loss\n            acc.backward(loss)\n            opt.step()\n"
    "            s.step()\n"
    "for _ in range(2):\n    epoch(model, loader)\n",
}
STACKS = {
    "of a script": "plain-loop",
    "of a class": "plain-loop-drops-outputs",
    "of functions under Accelerate": "accelerate-loop-drops-outputs",
}


def read(body: str) -> ReadConfig:
    return read_text(HEAD + body, "t.py")


@pytest.mark.parametrize("case", LOOPS)
def test_a_plain_loop_is_read_as_the_step_that_it_makes(case: str) -> None:
    says(
        read(LOOPS[case]),
        "micro_batch_seqs accumulation_steps seq_len_tokens precision optimizer method stack",
        (3, 4, 256, "bf16-mixed", "adamw", "full", STACKS[case]),
    )
    halves = (HEAD + LOOPS[case]).replace("bfloat16", "float16").replace("bf16", "fp16").replace("float32", "float16")
    assert len(read_text(halves, "t.py").refusals) == (case != "of a script")  # which has no loss scaler


SCRIPT = LOOPS["of a script"]
KEPT = LOOPS["of functions under Accelerate"].replace("loss = model(**batch)", "o = model(**batch); loss = o")
ADAPTED = "model = get_peft_model(model, LoraConfig(r=8, target_modules='all-linear'))\n"


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (ADAPTED + SCRIPT, {"method": "lora", "lora_rank": 8}),
        (SCRIPT.replace("torch.optim.AdamW", "torch.optim.SGD"), {"optimizer": "sgd"}),
        (SCRIPT.replace("lr=1e-4", "lr=1e-4, fused=True"), {"optimizer": "adamw-fused"}),
        ("model.gradient_checkpointing_enable()\n" + SCRIPT, {"checkpointing": 1}),
        ("model.gradient_checkpointing_enable()\n" + SCRIPT.replace("model.train()\n", ""), {"checkpointing": 0}),
        (SCRIPT.replace("grad()\n", "grad()\n        del out\n"), {"stack": "plain-loop-drops-outputs"}),
        (SCRIPT.replace("dtype=torch.bfloat16)", "dtype=torch.bfloat16, enabled=False)"), {"precision": "fp32"}),
        (KEPT, {"stack": "accelerate-loop"}),
    ],
)  # fmt: skip
def test_what_a_loop_says_of_its_step_counts(body: str, fields: dict[str, object]) -> None:
    config = read(body)
    assert config.missing == ()
    assert {name: getattr(config.setup, name) for name in fields} == fields
    unsaid = any("absent: off, the tool's default" in assumption for assumption in config.assumptions)
    assert unsaid == (config.setup.checkpointing == 0)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (SCRIPT.replace("batch_size=3", "batch_size=int(input())"), "micro_batch_seqs"),
        (SCRIPT.replace("enumerate(tqdm(loader))", "enumerate(batches(ds))"), "micro_batch_seqs"),  # no DataLoader
        (
            SCRIPT.replace("i, batch in enumerate(tqdm(loader))", "i in range(5)").replace(
                " or i + 1 == len(loader)", ""
            ),
            "accumulation_steps",
        ),
        (SCRIPT.replace("(i + 1) % 4 == 0 or i + 1 == len(loader)", "ready(i)"), "accumulation_steps"),
        (SCRIPT.replace("dtype=torch.bfloat16)", "dtype=KINDS[input()])"), "precision"),
        (
            SCRIPT
            + "for b in DataLoader(ds, batch_size=int(input())):\n    with torch.no_grad():\n        model(**b)\n",
            "eval_seqs",
        ),
    ],
)
def test_what_only_running_a_loop_tells_is_asked_for(body: str, field: str) -> None:
    assert field in {gap.field for gap in read(body).missing}


def test_a_condition_of_a_step_is_no_question_of_the_objective() -> None:
    """Where it never holds the loop takes no step: what it trains was asked for."""
    loop = "model.train()\nfor i in range(len(ds)):\n    loss = model(**ds[i]).loss\n    loss.backward()\n"
    body = "opt = torch.optim.AdamW(model.parameters())\n" + loop + "    if (i + 1) % 4 == 0:\n        opt.step()\n"
    assert "objective" not in open_fields(read(body))


def test_a_larger_evaluation_of_a_loop_counts() -> None:
    evaluates = "for b in DataLoader(ds, batch_size=16):\n    with torch.no_grad():\n        model(**b)\n"
    assert read(SCRIPT + evaluates).eval_seqs == 16


OTHERS = {
    "a loss of its own": SCRIPT.replace("loss = out.loss / 4", "loss = F.cross_entropy(out.logits, batch['y'])"),
    "more than the model's loss": SCRIPT.replace("out.loss / 4", "out.loss + penalty(model)"),
    "two models": "other = AutoModelForCausalLM.from_pretrained('gpt2')\n"
    + SCRIPT.replace("        loss = out", "        old = other(**batch)\n        loss = out"),
    "the model twice": SCRIPT.replace("        loss = out", "        again = model(**batch)\n        loss = out"),
    "sharded": "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\nmodel = FSDP(model)\n" + SCRIPT,
    "an optimizer of its own": SCRIPT.replace("torch.optim.AdamW", "Muon"),
    "two losses": SCRIPT + "for batch in loader:\n    model(**batch).loss.backward()\n",
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_loop_is_refused_with_the_command_that_runs_it(case: str) -> None:
    with pytest.raises(NotPlanned, match="a loop of its own") as refused:
        read(OTHERS[case])
    assert "plan trace -- python FILE" in refused.value.hint


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("train_policy.py", "import core\ncore.Agent(load()).learn()\n"),
        ("sft.py", "from core import Agent\nAgent.build(open('x')).go()\n"),
        ("main.py", "class Agent:\n    async def go(self, b):\n        self.net(b).mean().backward()\nrun(Agent)\n"),
    ],
)
def test_a_backward_that_nothing_is_known_to_call_is_a_loop_of_its_own(name: str, body: str, tmp_path: Path) -> None:
    (tmp_path / "core.py").write_text("def f(loss):\n    loss.backward()\nAgent = make(f)\n", "utf-8")
    with pytest.raises(NotPlanned, match="a loop of its own"):
        read_text(body, name, around=FileContext(roots=(tmp_path,)))


def test_a_program_that_only_imports_a_backward_trains_nothing(tmp_path: Path) -> None:
    (tmp_path / "core.py").write_text("def f(loss):\n    loss.backward()\n", "utf-8")
    with pytest.raises(NotATraining):
        read_text("import core\ncore.show(open('x'))\n", "chat.py", around=FileContext(roots=(tmp_path,)))
