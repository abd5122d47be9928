"""What `--out` hands out: targets that fit, README.md and run.sh that work, and one number for each run everywhere."""

import ast
import json
import os
import re
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

import pytest
import yaml

from finetune_planner.cli.answer import workload_for
from finetune_planner.cli.app import run
from finetune_planner.cli.request_options import RequestOptions
from finetune_planner.cli.writing import launch_files
from planner.core.errors import UsageError
from planner.core.locks import folder_lock, try_lock
from planner.core.units import gib
from planner.frameworks.exporters import EXPORTERS, DatasetChoice, ExportRequest, prepare, text
from planner.frameworks.exporters.common import RESUMED
from planner.frameworks.exporters.folder import README, RUN, folder_files
from planner.frameworks.exporters.install import gate_of, gates
from planner.frameworks.exporters.jobs import SLURM_NAME, slurm_file
from planner.memory.workload import Data
from planner.models import catalogue
from planner.options.stacks import written_by
from planner.planning.answer import plan_workload
from planner.setup import TrainSetup
from reports.brief_json import brief
from tests.planner.launch_sweep import request, setups
from tests.whole import some

LLAMA = ["meta-llama/Llama-3.1-8B", "--gpu", "rtx-4090", "--no-dry-run"]
PURE = [*LLAMA, "--memory-gib", "20", "--method", "qlora", "--precision", "bf16-pure", "--kernels", "liger"]
"""What Axolotl, LLaMA-Factory and Unsloth cannot say: their own variants need more than the card has."""
HOSTILE = "evil'; touch pwned; `touch pwned` $(touch pwned) \"x"


def planned(tmp_path: Path, arguments: Sequence[str], code: int = 0) -> Path:
    out = tmp_path / "plan"
    assert run([*arguments, "--out", str(out)]) == code
    return out


def predicted(out: Path) -> dict[str, int]:
    """Target -> peak by plan.json, of the targets with files."""
    launch = json.loads((out / "plan.json").read_text())["launch"]
    return {entry["target"]: entry["peak_device_bytes"] for entry in launch if entry.get("files")}


@pytest.mark.parametrize("target", some(["unsloth", "trl", "hf", "llamafactory", "axolotl", "trl --gpus 2"], 4))
def test_a_named_target_is_planned_written_and_agrees_everywhere(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In `plan check` of its file too, which is told by its head: alone eager attention may take 50 % more, and two
    GPUs that nobody shards for hold the whole model each."""
    target, *more = target.split()
    out = planned(tmp_path, [*LLAMA, "--target", target, *more, *["--parallel", "fsdp2"] * bool(more)])
    shown = " ".join(capsys.readouterr().out.split())
    document = json.loads((out / "plan.json").read_text())
    chosen = document["chosen"]
    peak = chosen["formula"]["peak_device_bytes"]
    assert peak <= chosen["budget_bytes"]
    assert predicted(out) == {target: peak}
    file = next(path for path in (out / "launch" / target).iterdir() if path.suffix in (".yaml", ".py"))
    head = " ".join(file.read_text().replace("\n#", " ").split())
    level = chosen["formula"]["level"]
    words = f"peak {gib(peak)} of {gib(document['workload']['memory_bytes'])} ({level})"
    assert words in head
    assert words in (out / "launch" / "README.md").read_text()
    assert "Differs from the plan" not in head
    assert f"{gib(peak)} of {gib(chosen['budget_bytes'])} (" in shown
    assert f"bash launch/run.sh {target}" in shown
    for report in ("report.md", "report.html"):
        assert gib(peak) in (out / report).read_text()
    assert run(["check", str(file), "--gpu", "rtx-4090", *more, "--no-dry-run", "--json"]) == 0
    answer, short = json.loads(capsys.readouterr().out), brief(document)
    assert (answer["memory"], answer["speed"]) == (short["memory"], short["speed"])


def test_forced_files_say_in_file_and_verdict_that_they_run_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = planned(tmp_path, [*PURE, "--force"])
    shown = " ".join(capsys.readouterr().out.split())
    peak = predicted(out)["axolotl"]
    text = (out / "launch" / "axolotl" / "axolotl.yaml").read_text()
    assert peak > json.loads((out / "plan.json").read_text())["chosen"]["budget_bytes"]
    assert "PREDICTED OUT OF MEMORY" in text
    assert gib(peak) in text
    assert "launch/axolotl, written with --force: PREDICTED OUT OF MEMORY" in shown
    start = "bash launch/run.sh install trl && bash launch/run.sh trl"  # makes the data that the files read, too
    assert start in shown
    assert start in (out / "report.md").read_text()
    page = (out / "report.html").read_text()
    assert escape(start) in page
    assert "bash launch/run.sh install axolotl" not in page  # of what is predicted to run out of memory


def test_a_target_without_any_setup_is_no_silent_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(tmp_path, [*LLAMA, "--target", "torchtitan"], code=2)
    error = capsys.readouterr().err
    assert "several GPUs" in error
    assert "hint:" in error
    assert not (tmp_path / "plan").exists()


def test_nothing_that_fits_is_forced_as_the_nearest_setup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_request = ["meta-llama/Llama-3.1-8B", "--gpu", "rtx-4090", "--no-dry-run", "--method", "full"]
    out = planned(tmp_path, plan_request, code=1)
    assert not (out / "launch").exists()
    capsys.readouterr()
    out = planned(tmp_path, [*plan_request, "--force"], code=1)
    shown = " ".join(capsys.readouterr().out.split())
    assert "Nothing fits" in shown
    assert "launch/trl, written with --force: PREDICTED OUT OF MEMORY" in shown
    assert "PREDICTED OUT OF MEMORY" in (out / "launch" / "trl" / "trl-sft.yaml").read_text()


def test_a_headers_command_is_one_line_that_a_shell_takes() -> None:
    seen, checked = set(), set()
    for target, export in EXPORTERS.items():
        for setup in setups()[::5]:
            launch = export(request(setup))
            for file in launch.files:
                for line in file.text.splitlines():
                    if line.startswith("# Launch:") and target == file.path.split("/")[0]:
                        command = line.removeprefix("# Launch:").strip()
                        whole = f"{launch.prepare} && {launch.command}" if launch.prepare else launch.command
                        assert not file.path.startswith(f"{target}/{target}") or command == whole
                        if command not in checked:
                            assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0
                        checked.add(command)
                        seen.add(target)
    assert seen == set(written_by("sft")) - {
        "deepspeed",
        "loggetta",
        "torchtitan",
    }  # JSON has no comments; torchtitan has no Qwen2.5, Loggetta takes mixtures


def test_the_first_files_do_what_the_plan_says(tmp_path: Path) -> None:
    """TRL computes no loss but its own in chunks: of a plan with Liger's, the plain Trainer's files come first."""
    options = RequestOptions(loss=["liger"], kernels=["liger"], method=["lora"])
    plan = plan_workload(workload_for("Qwen/Qwen3-0.6B", "rtx-4090", options))
    first, *others = launch_files(plan, None, tmp_path)
    assert (first.target, first.differences) == ("hf", ())
    assert next(launch for launch in others if launch.target == "trl").differences


def test_another_targets_own_setup_is_what_its_install_line_is_for(tmp_path: Path) -> None:
    """xformers is Axolotl's alone: on a T4 the others attend otherwise, and have their files all the same."""
    options = RequestOptions(packing=True, method=["lora"], seq_len=1024)
    plan = plan_workload(workload_for("Qwen/Qwen3-0.6B", "t4", options))
    assert plan.subject.setup.attention == "xformers"
    launches = launch_files(plan, ["axolotl", "trl"], tmp_path)
    assert [launch.runs.attention for launch in launches if launch.runs] == ["xformers", "sdpa"]
    assert "## trl" in launches[-1].files[0].text


def test_a_target_that_packs_nothing_counts_samples_not_the_plans_rows(tmp_path: Path) -> None:
    data = Data(epoch_seqs=100, samples_per_seq=4.0, epoch_tokens=90_000)
    options = RequestOptions(packing=True, method=["lora"], seq_len=1024, global_batch=4, epochs=1)
    plan = plan_workload(replace(workload_for("Qwen/Qwen3-0.6B", "m3 max 64gb", options), data=data))
    mlx = next(launch for launch in launch_files(plan, ["mlx"], tmp_path) if launch.files)
    assert not mlx.runs.packing
    assert f"iters: {400 // mlx.runs.micro_batch_seqs} " in mlx.files[0].text


def launched(tmp_path: Path, export_request: ExportRequest, targets: Sequence[str] = ("trl", "hf")) -> Path:
    """A launch folder of a request, as `--out` writes it."""
    launches = [EXPORTERS[target](export_request) for target in targets]
    files = [file for launch in launches for file in launch.files] + list(folder_files(launches, export_request))
    for file in files:
        path = tmp_path / "launch" / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text)
        path.chmod(0o755 if file.executable else 0o644)
    return tmp_path / "launch"


def started(
    folder: Path, *words: str, stubs: Sequence[str] = ("trl", "python"), token: bool = True, **env: str
) -> tuple[int, str]:
    """Exit code and output of run.sh where only these tools exist; each says how it was called."""
    tools = folder.parent / "tools"
    tools.mkdir(exist_ok=True)
    for name in {*stubs, "pip", "python3"}:
        answer = f'case "$*" in *get_token*) exit {0 if token else 1};; *) echo CALLED {name} "$@";; esac'
        (tools / name).write_text(f"#!/bin/sh\n{answer}\n")
        (tools / name).chmod(0o755)
    for name in ("bash", "sh", "grep", "dirname", "env"):
        if not (tools / name).exists():
            (tools / name).symlink_to(f"/usr/bin/{name}" if Path(f"/usr/bin/{name}").exists() else f"/bin/{name}")
    done = subprocess.run(
        ["bash", str(folder / "run.sh"), *words],
        env={"PATH": str(tools), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


SETUP = TrainSetup(loss="chunked", method="qlora", quantization="nf4-double")


def test_run_sh_starts_the_one_command_of_each_target(tmp_path: Path) -> None:
    folder = launched(tmp_path, request(SETUP, lacks_template=False))
    assert os.stat(folder / "run.sh").st_mode & stat.S_IXUSR
    made = "CALLED python launch/prepare_data.py tokens\n"
    command = "python -m trl.scripts.sft --config launch/trl/trl-sft.yaml"
    assert started(folder) == (0, f"{made}CALLED {command}\n")
    assert started(folder, "hf") == (0, f"{made}CALLED python launch/hf/train_hf.py\n")
    looking = launched(tmp_path / "unknown", request(SETUP))  # the stub of python3 says: no template
    wanted = "--config launch/trl/trl-sft.yaml --chat_template_path launch/trl/chat_template.jinja"
    assert started(looking)[1].rstrip().endswith(wanted)
    code, output = started(folder, "axolotl")
    assert (code, "one of: trl hf" in output) == (2, True)


def test_run_sh_fetches_for_nodes_without_internet(tmp_path: Path) -> None:
    """The model, and the kernel of flash attention where the target's transformers takes the hub's."""
    for name, kernel in (("sdpa", ""), ("flash-attention-2", "flash_attention_2")):
        wanted = request(SETUP.replace(attention=name))
        folder = launched(tmp_path / name, wanted)
        code, output = started(folder, "fetch")
        assert (code, f"CALLED python3 - {wanted.model_id} {kernel} \n" in output) == (0, True)
        assert "run.sh fetch trl" in slurm_file(EXPORTERS["trl"](wanted), wanted).text.replace("\n# ", " ")
    local = launched(tmp_path / "local", replace(request(SETUP), model_id="./model"))
    assert "CALLED python3 -   \n" in started(local, "fetch")[1]


def test_run_sh_goes_on_from_the_last_whole_checkpoint(tmp_path: Path) -> None:
    folder = launched(tmp_path, request(SETUP, lacks_template=False))
    for name in ("checkpoint-90", "checkpoint-100"):
        (folder.parent / "outputs" / name).mkdir(parents=True)
        (folder.parent / "outputs" / name / "trainer_state.json").touch()
    (folder.parent / "outputs" / "checkpoint-110").mkdir()  # stopped while it was written
    code, output = started(folder)
    assert (code, "--resume_from_checkpoint outputs/checkpoint-100\n" in output) == (0, True)
    assert "goes on from outputs/checkpoint-100" in started(folder, "hf")[1]
    run = (
        launched(tmp_path / "several", request(SETUP.replace(num_gpus=2, parallel="ddp"), num_nodes=2), ("axolotl",))
        / "run.sh"
    )
    assert 'launch/axolotl/axolotl.yaml ${resume[@]+"${resume[@]}"} --launcher torchrun -- ' in run.read_text()
    os.utime(folder / "trl" / "trl-sft.yaml", (2e9, 2e9))  # a plan or a person wrote it anew
    code, output = started(folder)
    assert (code, "CALLED python -m trl" in output) == (2, False)
    assert "RESUME=1 in front" in output
    readme, script = (folder / "README.md").read_text(), (folder / "hf" / "train_hf.py").read_text()
    assert f"{RESUMED}=FOLDER" in readme
    assert f'resume_from_checkpoint=os.environ.get("{RESUMED}")' in script
    kept_none = launched(tmp_path / "none", request(SETUP, save=False))
    assert "goes on" not in (kept_none / "run.sh").read_text()


def test_run_sh_installs_the_tested_versions_and_names_the_step_where_they_are_missing(tmp_path: Path) -> None:
    folder = launched(tmp_path, request(SETUP))
    code, output = started(folder, stubs=())
    assert (code, "bash launch/run.sh install trl" in output) == (3, True)
    code, output = started(folder, "install", stubs=())
    assert code == 0
    assert "CALLED python3 -m venv .venv-trl" in output
    assert "CALLED python3 -c import sys; raise SystemExit(sys.version_info < (3, 11))" in output
    code, output = started(folder, "install", stubs=(), PYTHON="false")
    assert (code, "trl needs Python 3.11 or newer" in output, "venv" in output) == (3, True, False)
    newer = launched(tmp_path / "newer", request(SETUP), targets=("axolotl", "trl"))
    asked = started(newer, "install", stubs=(), PYTHON="false")[1]
    assert "PYTHON=python3.12 bash launch/run.sh install axolotl; of Python 3.11: trl" in asked
    _, output = started(folder, "install", stubs=())
    called = re.search(r"CALLED pip install (.+)", output)
    assert {"trl==1.16.0", "transformers==5.23.0", "bitsandbytes==0.50.2"} <= set(called[1].split())
    assert called[1] in (folder / "README.md").read_text()


def test_run_sh_stops_before_a_placeholder_and_before_a_gated_model_without_login(tmp_path: Path) -> None:
    folder = launched(tmp_path / "a", request(SETUP, dataset=None))
    code, output = started(folder)
    assert (code, "YOUR_DATASET" in output, "CALLED" in output) == (2, True, False)
    folder = launched(tmp_path / "b", request(SETUP, model_id="meta-llama/Llama-3.2-1B"))
    code, output = started(folder, token=False)
    assert (code, "hf auth login" in output, "CALLED" in output) == (3, True, False)
    assert started(folder, token=True)[0] == 0
    assert "hf auth login" in (folder / "README.md").read_text()
    unknown = launched(tmp_path / "c", request(SETUP))
    assert "is gated is not known here" in (unknown / "README.md").read_text()
    seen = launched(tmp_path / "d", request(SETUP, model_id="mistralai/Mistral-7B-v0.1"))
    assert "is still gated is not known here (it was in 2024-10-29)" in (seen / "README.md").read_text()
    for folder in (unknown, seen):
        assert "get_token" not in (folder / "run.sh").read_text()


def test_every_gate_has_a_source_a_date_and_models_of_the_catalogue() -> None:
    names = [name for entry in catalogue.entries() for name in entry.names]
    for gate in gates():
        assert gate.source
        assert re.fullmatch(r"20\d\d(-\d\d-\d\d)?", gate.seen), gate
        assert any(name.startswith(gate.begins.lower()) for name in names), gate
        assert gate_of(gate.begins) == gate, "an earlier row hides this one"


@pytest.mark.parametrize("name", [f"meta-llama/{HOSTILE}", f"./{HOSTILE}", "-rf", "a\nb"])
def test_hostile_names_run_nothing(tmp_path: Path, name: str) -> None:
    export_request = request(SETUP, model_id=name, dataset=DatasetChoice(path=f"./{HOSTILE}.jsonl", local=True))
    folder = launched(tmp_path, export_request, ("trl", "hf", "axolotl", "llamafactory", "unsloth"))
    assert subprocess.run(["bash", "-n", str(folder / "run.sh")], check=False).returncode == 0
    for token in (True, False):
        started(folder, token=token)
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("name", ["学習　データ", "a\N{NO-BREAK SPACE}b", "👩\N{ZERO WIDTH JOINER}💻", "a\nb\t"])
def test_names_in_files_are_those_on_disk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be printed is escaped, not replaced: the file is opened by this very name."""
    for target, key in {"trl": "model_name_or_path", "axolotl": "base_model"}.items():
        launch = EXPORTERS[target](request(SETUP, model_id=f"../{name}"))
        assert yaml.safe_load(launch.files[0].text)[key] == f"../{name}"
    assert ast.literal_eval(text.literal(text.shown_path(name))) == name
    spelled = os.fsencode(name).decode("ascii", "surrogateescape")  # as Python has it in an ASCII locale
    monkeypatch.setattr(os, "fsencode", lambda path: path.encode("ascii", "surrogateescape"))
    assert text.shown_path(spelled) == name
    with pytest.raises(UsageError, match="no UTF-8"):
        text.shown_path("\udce6")


def test_every_spread_gets_a_run_sh_that_a_shell_can_read(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    for setup in setups()[::22]:
        one_process = setup.parallel in ("dp", "device-map")
        export_request = request(setup, num_nodes=2 if setup.num_gpus % 2 == 0 and not one_process else 1)
        files = folder_files([export(export_request) for export in EXPORTERS.values()], export_request)
        for file in files:
            if file.executable:
                script.write_text(file.text)
                assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
                assert "MASTER_ADDR:?" in file.text or export_request.num_nodes == 1
        jobs = [file.path for file in files if file.path.endswith(SLURM_NAME)]
        assert bool(jobs) == (setup.num_processes > 1 and RUN in {file.path for file in files})
        readme = next((file.text for file in files if file.path == README), "")
        assert sorted(re.findall(r"`sbatch launch/(.*)`", readme)) == sorted(jobs)
        if jobs:  # run.sh alone waits for the other nodes
            assert bool(re.search(r"^sbatch launch/\w+/slurm.sbatch ", readme, re.M)) == (export_request.num_nodes > 1)


def test_a_readme_of_parts_alone_names_no_file_that_is_not_there() -> None:
    export_request = request(TrainSetup(num_gpus=2, parallel="ddp"))
    for targets, named in ((["accelerate"], False), (["accelerate", "trl"], True)):
        files = folder_files([EXPORTERS[name](export_request) for name in targets], export_request)
        assert (prepare.NAME in {file.path for file in files}) == (prepare.NAME in files[0].text) == named


def test_two_writers_of_one_folder_take_turns(tmp_path: Path) -> None:
    with folder_lock(tmp_path / "out"):
        descriptor = os.open(tmp_path / "out", os.O_RDONLY)
        assert not try_lock(descriptor)
    assert try_lock(descriptor)
    os.close(descriptor)
    assert not os.listdir(tmp_path / "out")
