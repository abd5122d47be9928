"""Every form of data with every target that trains from the emitted files: what was measured is what is trained on, the
loss is on the answers and nothing else, and one process trains every case."""

import io
import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

transformers = pytest.importorskip("transformers")
pytest.importorskip("trl")

from accelerate.state import AcceleratorState  # noqa: E402

from finetune_planner.cli.app import run  # noqa: E402
from planner.frameworks.exporters import EXPORTERS, DatasetChoice, prepare, trl  # noqa: E402
from planner.samples import TEMPLATE_FILE  # noqa: E402
from planner.samples.dataset import measure, path_of  # noqa: E402
from planner.setup import TrainSetup  # noqa: E402
from tests.launch.conftest import make_data, prepared, run_script, run_trl  # noqa: E402
from tests.launch.data_formats import FORMATS, NUM, RAW, TEXTS, answers_of, pairs  # noqa: E402
from tests.launch.tiny_models import save_tiny, tiny_request, tokenizer  # noqa: E402
from tests.whole import some, these  # noqa: E402

END = "<|end|>"
SETUP = TrainSetup(seq_len_tokens=256, loss="chunked")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with every form of data and two tiny models, in which commands run; the hub is out of reach."""
    folder = tmp_path_factory.mktemp("data")
    for name, write in FORMATS.items():
        write(folder if name == "who/what" else folder / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.chdir(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for model_type in ("llama", "qwen2"):
                save_tiny(model_type, folder / model_type)
        yield folder
    AcceleratorState._reset_state(reset_partial_state=True)


def asked(name: str, **changes: Any) -> Any:
    """A request for a form of data as `plan` makes it."""
    path = path_of(name)
    assert path is not None
    kind = measure(path).columns
    data = DatasetChoice(path=name, columns=kind, local=Path(name).exists())
    return replace(tiny_request("llama", SETUP), dataset=data, **changes)


def made(place: Path, form: str, name: str = "train") -> list[dict[str, Any]]:
    if form == "tokens":
        import pyarrow.parquet

        return list(pyarrow.parquet.read_table(place / "launch" / "data" / form / f"{name}.parquet").to_pylist())
    lines = (place / "launch" / "data" / form / f"{name}.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def taught(row: dict[str, Any]) -> str:
    """What the loss of a row is on."""
    assert all(label in (-100, token) for label, token in zip(row["labels"], row["input_ids"], strict=True))
    return str(tokenizer().decode([label for label in row["labels"] if label != -100]))


@pytest.mark.parametrize("name", some([*FORMATS], 2))
def test_what_is_measured_is_what_is_trained_on(name: str, place: Path) -> None:
    """Number, kind and length in tokens of every sample; the loss is on the answers with their ends, in their order."""
    path = path_of(name)
    assert path is not None
    stats = measure(path, tokenizer=place / "llama")
    assert stats.columns == ("text" if name in TEXTS else "prompt-completion" if name in RAW else "messages")
    prepared(place, asked(name))
    rows = made(place, "tokens")
    assert len(rows) == stats.num_samples == NUM
    assert sorted(len(row["input_ids"]) for row in rows) == list(stats.lengths_tokens)
    assert [taught(row) for row in rows] == [
        "".join(answer + END for answer in answers) for answers in answers_of(name)
    ]
    assert (stats.answers_fraction is None) == (name in TEXTS)


def test_an_address_is_read_as_its_file_is(place: Path) -> None:
    """A table whose delimiter has to be found, behind an address."""
    prepared(place, asked("faq.csv"))
    rows = made(place, "tokens")
    data = DatasetChoice(path=(place / "faq.csv").as_uri(), columns="", local=False)
    prepared(place, replace(asked("faq.csv"), dataset=data))
    assert made(place, "tokens") == rows


def test_a_model_out_of_reach_is_said(place: Path) -> None:
    with pytest.raises(Exception, match="who/where: its tokenizer cannot be had") as raised:
        prepared(place, replace(asked("faq.csv"), model_id="who/where"))
    assert type(raised.value).__name__ == "DataError"


@pytest.mark.parametrize("name", FORMATS)
def test_the_loss_on_all_is_on_all(name: str, place: Path) -> None:
    prepared(place, asked(name, loss_on="all"))
    assert all(row["labels"] == row["input_ids"] for row in made(place, "tokens"))


def test_a_chat_that_the_template_does_not_take_is_said_before_and_where_it_stands(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer().save_pretrained(place / "strict")
    shutil.copy(place / "llama" / "config.json", place / "strict")
    refusing = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('No tools') }}{% endif %}{% endfor %}"
    )
    (place / "strict" / TEMPLATE_FILE).write_text(refusing + tokenizer().chat_template)
    plain = {"messages": [ASKED, BEE]}
    (place / "tools.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in (plain, {"messages": []}, plain, CHAT))
    )
    words = ["./strict", "--gpu", "rtx-3060-12gb", "--dataset", "tools.jsonl", "--no-dry-run", "--out", "strict-plan"]
    assert run(words) == 0
    refusal = "the model's chat template takes no chat of user, assistant, tool, assistant, user: No tools"
    assert f"warning: tools.jsonl, sample 4: {refusal}" in capsys.readouterr().err
    with pytest.raises(Exception, match=f"tools.jsonl, row 4: {refusal}"):
        make_data(place / "strict-plan", "tokens")


@pytest.mark.parametrize("loss_on", ["answers", "all"])
def test_pieces_are_the_tokens_that_others_train_on(loss_on: str, place: Path) -> None:
    """Tools and reasoning too. Of a template that it is not named LLaMA-Factory 0.9.5 takes what it makes of a system
    alone: Gemma's refuses it, Llama 3.1's begins every question with it (run, 30 November 2026)."""
    turns = [turn for turn in CHAT["messages"] if loss_on == "answers" or turn is not BAD]
    (place / "talk.jsonl").write_text(json.dumps(CHAT | {"messages": turns}) + "\n")
    request = asked("talk.jsonl", loss_on=loss_on)
    prepared(place, request, "tokens")
    prepared(place, request, prepare.form(request, "llamafactory"))
    (whole,), (row,) = made(place, "tokens"), made(place, "pieces")
    text = "".join(turn["content"] for turn in row["messages"])
    assert tokenizer().decode(whole["input_ids"]).rstrip() == text
    learned = "".join(turn["content"] for turn in row["messages"] if loss_on == "all" or turn["role"] == "assistant")
    assert taught(whole).rstrip() == learned


@pytest.mark.parametrize("name", FORMATS)
def test_what_other_targets_read_says_the_same(name: str, place: Path) -> None:
    """LLaMA-Factory's pieces and torchtitan's text; `tools/validators/llamafactory.sh` shows them to its own loader."""
    request = asked(name)
    info = json.loads(next(file.text for file in EXPORTERS["llamafactory"](request).files if file.path.endswith("n")))
    form, (entry, *_) = prepare.form(request, "llamafactory"), info.values()
    prepared(place, request, form)
    assert (
        place / "launch" / "llamafactory" / entry["file_name"]
    ).resolve() == place / f"launch/data/{form}/train.jsonl"
    for row, answers in zip(made(place, form), answers_of(name), strict=True):
        if form == "text":
            assert [row["text"]] == answers
            continue
        tags = entry["tags"]
        turns = [
            (message[tags["role_tag"]], message[tags["content_tag"]]) for message in row[entry["columns"]["messages"]]
        ]
        assert [text for role, text in turns if role == tags["assistant_tag"]] == [answer + END for answer in answers]
        assert [role for role, _ in turns] == ["user", "assistant"] * (len(turns) // 2)
    prepared(place, request, "text")
    assert len(made(place, "text")) == NUM
    assert all(
        "".join(answers[-1:]) in row["text"] for row, answers in zip(made(place, "text"), answers_of(name), strict=True)
    )


CASES = [(name, ("trl", "hf")[at % 2], ("llama", "qwen2")[at // 2 % 2]) for at, name in enumerate(FORMATS)]
"""Each form once, each target with each model."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target", "model"), these(CASES[::6], CASES))
def test_a_step_trains_from_the_emitted_files(
    name: str, target: str, model: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan` as it is typed, `prepare_data.py` and the target's file as they are written; only precision and kernels
    are those of a CPU."""
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", False)
    out = place / f"{target}-{Path(name).name}"
    words = ["--precision", "fp32", "--attention", "sdpa", "--kernels", "eager", "--loss", "full", "--epochs", "0.4"]
    plan_request = [f"./{model}", "--gpu", "rtx-3060-12gb", "--dataset", name, "--out", str(out), "--no-dry-run"]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as output, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run([*plan_request, *words, "--no-packing", "--optimizer", "adamw"]) == 0, output.getvalue()
        monkeypatch.chdir(out)
        make_data(out, prepare.FORMS[target])
        file = out / "launch" / {"trl": "trl/trl-sft.yaml", "hf": "hf/train_hf.py"}[target]
        trainer = {"trl": run_trl, "hf": run_script}[target](file.read_text(), out)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses
    assert all(1 < loss < 20 for loss in losses)
    batch = next(iter(trainer.get_train_dataloader()))
    said_then = {"".join(answer + END for answer in answers) for answers in answers_of(name)}
    for labels in batch["labels"]:
        assert tokenizer().decode([label for label in labels.tolist() if label != -100]) in said_then


@pytest.mark.parametrize("target", ["trl", "hf", "axolotl", "llamafactory", "unsloth"])
def test_every_file_says_what_its_loss_is_on_and_reads_what_is_made(target: str, place: Path) -> None:
    for name, loss_on, words in (
        ("faq.csv", "answers", "the answers alone"),
        ("faq.csv", "all", "all tokens"),
        ("notes.txt", "answers", "all tokens"),
    ):
        request = asked(name, loss_on=loss_on)
        launch = EXPORTERS[target](request)
        assert launch.prepare == f"python launch/prepare_data.py {prepare.form(request, target)}"
        text = "".join(file.text for file in launch.files)
        assert prepare.folder(request, target) in text
        assert words in text or target in ("hf", "unsloth") or name in TEXTS
        assert f'LOSS_ON = "{loss_on}"' in prepare.file(request).text
    assert EXPORTERS["torchtitan"](asked("faq.csv")).refused


def test_hundreds_of_samples_are_evaluated_and_saved_within_the_run(place: Path) -> None:
    """A twentieth is held out, the same for every form; nothing else of the data is trained on."""
    rows = [{"question": question, "answer": answer} for question, answer in pairs(400)]
    file = place / "many.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = place / "many"
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        assert run(["./llama", "--gpu", "rtx-3060-12gb", "--dataset", file.name, "--out", "many", "--no-dry-run"]) == 0
    document = json.loads((out / "plan.json").read_text())["workload"]
    assert (document["held_out_samples"], document["loss_on"]) == (20, "answers")
    trl = yaml.safe_load((out / "launch" / "trl" / "trl-sft.yaml").read_text())
    assert trl["eval_strategy"] == "steps"
    steps = -(-document["epoch_seqs"] // document["global_batch_seqs"]) * trl["num_train_epochs"]
    assert trl["save_steps"] == trl["eval_steps"] == -(-steps // 4)
    assert trl["logging_steps"] <= steps
    written = {}
    for form in ("tokens", "chats"):
        make_data(out, form)
        written[form] = [made(out, form, part) for part in ("train", "test")]
    assert [len(part) for part in written["tokens"]] == [380, 20]
    for tokens, chats in zip(*written.values(), strict=True):
        assert [taught(row) for row in tokens] == [row["messages"][-1]["content"] + END for row in chats]


def test_columns_with_names_of_their_own_are_read(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "german.csv").write_text("Frage,Antwort,text\nWer?,Er.,never read\nWas?,Das.,never read\n")
    plan_request = ["./llama", "--gpu", "rtx-3060-12gb", "--dataset", "german.csv", "--no-dry-run"]
    assert run([*plan_request, "--json=full"]) == 0
    assert json.loads(capsys.readouterr().out)["workload"]["dataset_kind"] == "text"
    refusal = "question=frage,answer=Antwort"  # as a refusal lists them, or as the file does
    assert run([*plan_request, "--columns", refusal, "--out", "german"]) == 0
    make_data(place / "german", "chats")
    assert [row["messages"][1]["content"] for row in made(place / "german", "chats")] == ["Er.", "Das."]
    capsys.readouterr()
    for words, message in (
        (["--columns", "frage=Frage"], "--columns takes NAME=COLUMN"),
        (["--columns", "text=Frag"], "no column 'Frag'"),
        (["--loss-on", "answers"], "has text and no answers"),
        (["--loss-on", "questions"], "--loss-on must be one of"),
    ):
        assert run([*plan_request, *words]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert "hint:" in error


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED, BEE, SEA = say("user", "a {x}?"), say("assistant", "bee"), say("assistant", "sea")
PREFERENCES = {
    "turns": {"prompt": [ASKED], "chosen": [BEE], "rejected": [SEA]},
    "whole chats": {"chosen": [ASKED, BEE], "rejected": [ASKED, SEA]},
    "a prompt beside whole chats": {"prompt": "a {x}?", "chosen": [ASKED, BEE], "rejected": [ASKED, SEA]},
    "from and value": {
        "conversations": [{"from": "human", "value": "a {x}?"}],
        "chosen": {"from": "gpt", "value": "bee"},
        "rejected": {"from": "gpt", "value": "sea"},
    },
    "texts": {"prompt": "Q: a {x}?", "chosen": " bee", "rejected": " sea"},
    "whole texts": {"chosen": "Q: a {x}? bee", "rejected": "Q: a {x}? sea"},
}


@pytest.mark.parametrize("form", PREFERENCES)
def test_preferences_of_every_form_are_the_same_pairs_for_every_target(form: str, place: Path) -> None:
    """TRL 1.16 and 1.14 (Axolotl's), and LLaMA-Factory 0.9.5's converter and template `empty` made the same tokens of
    them, of seven templates (30 November 2026); Axolotl's user-defined type wrote Python's lists, LLaMA-Factory's
    Alpaca form stopped at them."""
    rows = [PREFERENCES[form], {"chosen": "same", "rejected": "same"}]
    (place / "pref.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dpo = TrainSetup(objective="dpo", seq_len_tokens=256, loss="full")
    data = DatasetChoice(path="pref.jsonl", columns="preference", local=True)
    request = replace(tiny_request("llama", dpo), dataset=data)
    read = {}
    for target in ("trl", "axolotl", "llamafactory"):
        assert f"python launch/prepare_data.py {prepare.form(request, target)}" == EXPORTERS[target](request).prepare
        prepared(place, request, prepare.form(request, target))
        (read[target],) = made(place, prepare.form(request, target))
    chats = "texts" not in form
    expected = {"prompt": [ASKED], "chosen": [BEE], "rejected": [SEA]} if chats else PREFERENCES["texts"]
    assert read["trl"] == read["axolotl"] == PREFERENCES[form] | expected
    for half, answer in (("chosen", "bee"), ("rejected", "sea")):
        chat = tokenizer().apply_chat_template([ASKED, say("assistant", answer)], tokenize=False)
        whole = chat.rstrip() if chats else f"Q: a {{x}}? {answer}{END}"
        assert read["llamafactory"]["prompt"] + read["llamafactory"][half] == whole
        assert read["llamafactory"][half].strip() == answer + END


@pytest.mark.parametrize(
    ("objective", "row"),
    [
        ("dpo", {"prompt": [ASKED], "chosen": [BEE], "rejected": [SEA]}),
        ("kto", {"prompt": [ASKED], "completion": [BEE], "label": True}),
        ("grpo", {"prompt": [ASKED], "answer": "bee"}),
        ("grpo", {"prompt": ASKED["content"], "chosen": [BEE]}),  # a text: what else a row has is the reward's
    ],
)
def test_chats_are_texts_where_no_template_can_write_them(objective: str, row: dict[str, Any], place: Path) -> None:
    """TRL's commands for these take no template: `Cannot use chat template functions` (30 November 2026)."""
    (place / "chats.jsonl").write_text(json.dumps(row) + "\n")
    tokenizer().save_pretrained(place / "bare")
    (place / "bare" / TEMPLATE_FILE).unlink()
    setup = TrainSetup(objective=objective, micro_batch_seqs=8, seq_len_tokens=64, loss="chunked", packing=False)
    data = DatasetChoice(path="chats.jsonl", columns=setup.objective_spec.data[0], local=True, plain=True)
    request = replace(tiny_request("llama", setup), dataset=data, model_id="./bare", lacks_template=True)
    assert EXPORTERS["trl"](request).prepare.endswith("rows")
    prepared(place, request, "rows")
    question = f"<|im_start|>user\n{ASKED['content']}<|im_end|>\n<|im_start|>assistant\n"
    answers = {name: f"{half[0]['content']}<|im_end|>{END}" for name, half in row.items() if half in ([BEE], [SEA])}
    texts = {"prompt": question} | answers if row["prompt"] == [ASKED] else {}
    assert made(place, "rows") == [row | texts]


def test_rows_of_other_objectives_keep_what_their_trainers_read(place: Path) -> None:
    (place / "labelled.csv").write_text("Satz,label\ngood,1\nbad,0\n")
    data = DatasetChoice(path="labelled.csv", columns="text", local=True, names={"text": "Satz", "label": "label"})
    classifier = TrainSetup(objective="classification", seq_len_tokens=64, loss="full", packing=False)
    prepared(place, replace(tiny_request("llama", classifier), dataset=data), "rows")
    assert made(place, "rows") == [{"text": "good", "label": "1"}, {"text": "bad", "label": "0"}]


@pytest.mark.parametrize("answered", ["", "answer", "solution"])
def test_a_reward_that_asks_for_what_the_data_have_not_stops_before_training(
    answered: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan says so, and run.sh looks: TRL itself would find out after a model and vLLM are loaded."""
    (place / "asked.jsonl").write_text(json.dumps({"prompt": "Why?"} | ({answered: 42} if answered else {})) + "\n")
    out = place / f"grpo-{answered}"
    words = ["./llama", "--gpu", "rtx-3060-12gb", "--dataset", "asked.jsonl", "--objective", "grpo", "--no-dry-run"]
    assert run([*words, "--attention", "sdpa", "--out", str(out), "--target", "trl"]) == 0
    screen, readme = capsys.readouterr(), (out / "launch/README.md").read_text()
    assert ("has no column answer, solution" in screen.err) is not bool(answered)
    assert ("has prompt: write your own" in readme) is not bool(answered)
    assert "rewards.py is a stand-in to replace" in " ".join(screen.out.split())
    assert "- the reward: launch/trl/rewards.py is a stand-in to replace" in readme
    look, config = "launch/trl/rewards.py", "launch/trl/trl-grpo.yaml"
    assert f"python {look} {config}" in (out / "launch" / "run.sh").read_text()
    assert "max_completion_length: 512  # planned for prompts of 64 tokens" in (out / config).read_text()
    scope = {"__name__": "rewards", "__file__": look}
    exec((out / look).read_text(), scope)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(out)
        if answered:
            scope["main"](config)
            rewards = scope["contains_answer"](["It is 1,142.", "It is 42."] * 2, answer=[42, 42, "a\n#### 1142", None])
            assert rewards == [0, 1, 1, 0]
            return
        with pytest.raises(
            SystemExit, match="needs a column answer, solution, ground_truth or target; the data have prompt"
        ):
            scope["main"](config)


def test_a_file_that_says_nothing_to_learn_is_an_error_with_a_row(place: Path) -> None:
    (place / "bad.jsonl").write_text(
        '{"question": "a", "answer": "b"}\n{"question": "a", "answer": ["b", {"text": 1}]}\n'
    )
    prepared(place, replace(asked("faq.csv"), dataset=DatasetChoice(path="bad.jsonl", local=True)))
    (place / "worse.jsonl").write_text('{"question": "a", "answer": "b"}\n{"conversations": 5, "question": "a"}\n')
    with pytest.raises(ValueError, match="row 2"):
        prepared(place, replace(asked("faq.csv"), dataset=DatasetChoice(path="worse.jsonl", local=True)))


# Templates of chats


TEMPLATES = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
TALK = [("Why is it so?", "Because."), ("And then?", "Then <b>it</b> ends.")]


def spans_with(template: str | None, place: Path, **changes: Any) -> Any:
    """`spans` of the program for a chat template, which prepares nothing."""
    scope: dict[str, Any] = {"__name__": "made", "__file__": str(place / "launch" / prepare.NAME)}
    exec(prepare.file(asked("faq.csv", setup=TrainSetup(seq_len_tokens=8192), **changes)).text, scope)
    made_with = tokenizer_with(template or scope["TEMPLATE"])
    scope["tokenizer"] = lambda: made_with
    return scope


def tokenizer_with(template: str) -> Any:
    import copy

    made_with = copy.deepcopy(tokenizer())
    made_with.chat_template = template
    made_with.add_special_tokens({"bos_token": "<s>"})
    return made_with


def turns(num: int, system: bool = False) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": "Be brief."}] * system
    for question, answer in TALK[:num]:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


NOT_COMPARED = {"idefics3", "smolvlm", "llava_next", "glm4moe"}
"""Of pictures, whose contents come in parts; and one that ends an answer with the beginning of the next question."""
BEGIN_IN_THE_PROMPT = {
    "deepseek_r1_distill", "deepseekv3", "gptoss", "muse_glimmer", "nemotron_3_5_lightning", "nemotron_3_nano",
    "nemotron_3_super", "nemotron_3_ultra", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8",
}  # fmt: skip
"""TRL also marks what the prompt for an answer says already: who speaks, an opened thought."""
NAMES = [path.stem for path in sorted(TEMPLATES.glob("*.jinja")) if not path.stem.endswith("_training")]


@pytest.mark.parametrize("name", [*some(NAMES, 3), "ours"])
def test_every_template_that_trl_ships_has_its_loss_on_the_answers(name: str, place: Path) -> None:
    """One turn, two turns, with a system and without: every answer is learned once, whole, with an end, and no
    question; as TRL's own template for training marks it, where there is one."""
    text = None if name == "ours" else (TEMPLATES / f"{name}.jinja").read_text()
    scope = spans_with(text, place)
    training = TEMPLATES / f"{name}_training.jinja"
    for num in (1, 2):
        for system in (False, True):
            talk = turns(num, system)
            rows = scope["encode"]({"messages": talk})
            learned = [scope["tokenizer"]().decode([label for label in row[1] if label != -100]) for row in rows]
            assert len(rows) in (1, num)
            whole = "".join(learned)
            for question, answer in TALK[:num]:
                assert whole.count(answer) == 1, (name, learned)
                assert question not in whole
            assert "Be brief." not in whole
            for piece in learned:
                assert not piece.endswith(tuple(answer for _, answer in TALK)), "an answer has to end"
            if num == 1 and not system and training.exists() and name not in NOT_COMPARED:
                theirs = tokenizer_with(training.read_text()).apply_chat_template(
                    talk, return_assistant_tokens_mask=True, return_dict=True
                )
                marked = [token for token, on in zip(theirs["input_ids"], theirs["assistant_masks"], strict=True) if on]
                theirs = scope["tokenizer"]().decode(marked).strip()
                assert theirs.endswith(whole.strip())
                assert theirs == whole.strip() or name in BEGIN_IN_THE_PROMPT


TOOL = {"name": "weather", "description": "Of <a> city.", "parameters": {"type": "object", "properties": {}}}
CALL = {"role": "assistant", "content": None, "thinking": "Ask.", "tool_calls": [{"function": {"name": "weather"}}]}
CALL["tool_calls"][0]["function"]["arguments"] = {"city": "Zürich"}  # type: ignore[index]
RESULT = {"role": "tool", "name": "weather", "content": "0"}
BAD = {"role": "assistant", "content": "BAD", "weight": 0}
THOUGHT = {"role": "assistant", "reasoning_content": "Zero it is.", "content": "<b>cold</b>"}
CHAT = {"tools": [{"type": "function", "function": TOOL}], "messages": [ASKED, CALL, RESULT, BAD, ASKED, THOUGHT]}


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "glm4moe", "qwen3_instruct_2507", "llama3"])
def test_tools_and_reasoning_are_counted_as_they_are_trained_on(
    name: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every row is what the tokenizer's own template writes of the chat as far as an answer; a turn of weight 0 is in
    no label; an end stands once; reasoning and calls are learned, or it is said that they are not."""
    scope = spans_with((TEMPLATES / f"{name}.jinja").read_text(), place)
    scope["tokenizer"]().save_pretrained(tmp_path)
    (tmp_path / "chat.jsonl").write_text(json.dumps(CHAT) + "\n")
    stats = measure(tmp_path / "chat.jsonl", tokenizer=tmp_path)
    rows = scope["encode"](scope["sample_of"](CHAT, "messages"))
    assert sorted(len(ids) for ids, _, _ in rows) == list(stats.lengths_tokens)
    assert stats.rows_per_sample == len(rows) == (2 if name in ("qwen3", "gptoss", "glm4moe") else 1)
    turns = [{**turn, "content": turn["content"] or ""} for turn in CHAT["messages"]]
    made = scope["tokenizer"]()
    written = [made.apply_chat_template(turns[:num], tools=CHAT["tools"], tokenize=False).rstrip() for num in (2, 6)]
    assert {made.decode(ids).rstrip().removesuffix(END) for ids, _, _ in rows} <= {
        text.removesuffix(END) for text in written
    }
    learned = "".join(made.decode([label for label in labels if label != -100]) for _, labels, _ in rows)
    assert "BAD" not in learned
    assert END + END not in learned
    assert rows[0][2]["unwritten"] == (name in ("llama3", "qwen3_instruct_2507"))
    assert rows[0][2]["unwritten"] or all(
        learned.count(part) == 1 for part in ("Ask.", "Zürich", "Zero it is.", "cold")
    )


def test_readers_of_chats_alone_get_questions_and_answers_as_such(place: Path) -> None:
    """A person puts such data into a launch that was planned without any: LLaMA-Factory reads "messages"."""
    (place / "pairs.jsonl").write_text(json.dumps({"prompt": "a?", "completion": "bee"}) + "\n")
    prepared(place, replace(asked("pairs.jsonl"), dataset=DatasetChoice(path="pairs.jsonl", local=True)), "chats")
    assert made(place, "chats") == [{"messages": [say("user", "a?"), say("assistant", "bee" + END)]}]


def test_readers_of_role_and_content_get_no_chat_that_says_more(place: Path) -> None:
    """LLaMA-Factory would learn a call as an empty answer, and no reasoning."""
    (place / "more.jsonl").write_text(json.dumps(CHAT) + "\n")
    request = replace(asked("faq.csv"), dataset=DatasetChoice(path="more.jsonl", local=True))
    with pytest.raises(ValueError, match="tools, reasoning or turns of weight 0"):
        prepared(place, request, "chats")
    with pytest.raises(ValueError, match="weight 0 and the loss is on all"):
        prepared(place, request, "text")
    prepared(place, replace(request, setup=TrainSetup(seq_len_tokens=1024)), "answers")
    first, second = (row["messages"][-1] for row in made(place, "answers"))
    assert (first["thinking"], second["reasoning_content"], second["thinking"]) == (
        "Ask.",
        "Zero it is.",
        "Zero it is.",
    )


@pytest.mark.parametrize("name", NAMES)
def test_no_result_of_a_tool_is_learned(name: str, place: Path) -> None:
    """gpt-oss writes the reasoning of a call no more once it is answered: all from there on was learned."""
    scope = spans_with((TEMPLATES / f"{name}.jinja").read_text(), place)
    result, final = {"role": "tool", "name": "weather", "content": "RESULT"}, say("assistant", "FINAL")
    sample = scope["sample_of"]({**CHAT, "messages": [ASKED, CALL, result, final]}, "messages")
    try:
        rows = scope["chat_template"]().rows(sample)
    except ValueError:
        pytest.skip("the template takes no tools")
    learned = [text[slice(*span)] for text, spans in rows for span in spans]
    assert not any("RESULT" in piece or "{x}" in piece for piece in learned)
    assert sum(piece.count("FINAL") for piece in learned) == 1
    assert sum(piece.count("Z\u00fcrich") for piece in learned) <= 1


def test_pictures_have_no_tools_beside_them_and_parts_may_be_texts(place: Path) -> None:
    scope = spans_with(None, place)
    with pytest.raises(ValueError, match="nothing here trains beside pictures"):
        scope["pictured"]({}, scope["sample_of"](CHAT, "messages"))
    scope["FORM"] = "pictures"
    marked = scope["marked"]({"messages": [{"role": "user", "content": ["What is", {"type": "image"}, "?"]}]})
    assert marked == {"messages": [say("user", "What is<image>?")]}


def test_an_answer_like_the_end_of_an_end_gets_no_second_one(place: Path) -> None:
    scope = spans_with((TEMPLATES / "qwen2_5.jinja").read_text(), place)
    ((text, _),) = scope["chat_template"]().rows({"messages": [ASKED, say("assistant", ">")]})
    assert text.endswith("><|im_end|>\n")


def test_what_is_cut_is_said(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": "a?", "answer": "b" * num} for num in (5, 100)] + [{"question": "a" * 100, "answer": "b"}]
    (place / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DatasetChoice(path="long.jsonl", local=True)
    prepared(place, replace(asked("faq.csv", setup=TrainSetup(seq_len_tokens=64)), dataset=data, held_out=0))
    told = capsys.readouterr().out
    lengths = measure(place / "long.jsonl", tokenizer=place / "llama").lengths_tokens
    assert f"2 of 3 rows are longer than MAX_LENGTH (64 tokens): {sum(lengths[1:]) - 128} tokens are cut off" in told
    assert "2 answers cut short or off; 1 rows keep none and are left out" in told
    assert len(made(place, "tokens")) == 2


def test_the_stand_in_reward_asks_for_the_columns_that_a_plan_looks_for() -> None:
    text = resources.files("planner").joinpath("data/trl_rewards.py.txt").read_text("utf-8")
    assert f"ANSWERS = {json.dumps(trl.REWARDED_BY)}".replace("[", "(").replace("]", ")") in text
