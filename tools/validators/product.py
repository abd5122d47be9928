"""One tool's cases of the product (tests/launch/product.py), inside the tool's venv: product.py llamafactory|mlx

`plan` is typed, `launch/prepare_data.py` makes the data, and the tool itself loads them and trains one step of a tiny
model of the same type from the emitted file, of which weights, precision, quantization and GPU kernels are swapped.
Every eighth case; all with TESTS_WHOLE=1. Exit 1 when one did not train.
"""

import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import stand_ins
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.launch import data_formats, tiny_models  # noqa: E402
from tests.launch.product import Case, cases, on_cpu  # noqa: E402

STEP = 1 if os.environ.get("TESTS_WHOLE") else 8


def llamafactory(file: Path) -> None:
    """`llamafactory-cli train FILE` in this process."""
    stand_ins.llamafactory()
    from llamafactory.train.tuner import run_exp

    run_exp(yaml.safe_load(file.read_text()))


def mlx(file: Path) -> None:
    """`mlx_lm.convert ...` where the run starts with it, and `mlx_lm.lora --config FILE`, on MLX's own CPU build."""
    from mlx_lm import convert, lora  # the function and the program

    text = file.read_text()
    if made := re.search(r"(mlx_lm\.convert .*? --mlx-path \S+?);? ?(&& cp (\S+) (\S+?);)?", RUN.read_text()):
        words = shlex.split(made[1].rstrip(";"))
        base = Path(words[-1])
        model = re.search(r"(?m)^model: (.*?)(  #.*)?$", text)
        assert model is not None
        convert(model[1].strip('"'), str(base), quantize="-q" in words, q_bits=4, q_group_size=64)
        if made[2]:
            (base / "chat_template.jinja").write_bytes(Path(made[3]).read_bytes())
        text = text.replace(model[0], f"model: {base}")
    values = yaml.safe_load(text)
    losses: list[float] = []

    class Told(lora.TrainingCallback):  # type: ignore[misc, name-defined]
        def on_train_loss_report(self, train_info: dict[str, float]) -> None:
            losses.append(train_info["train_loss"])

    steps = values["grad_accumulation_steps"]
    args = {**lora.CONFIG_DEFAULTS, **values, "iters": steps, "steps_per_report": steps, "val_batches": 1}
    lora.get_reporting_callbacks = lambda *_, **__: Told()  # `run` takes no other
    lora.run(SimpleNamespace(**args))
    state = {"log_history": [{"loss": loss} for loss in losses]}
    Path("outputs/trainer_state.json").write_text(json.dumps(state))


RUN = Path("launch/run.sh")
MAC = "MacBook Pro M4 Max 64GB"
TOOLS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "llamafactory": ("llamafactory/llamafactory.yaml", llamafactory),
    "mlx": ("mlx/mlx.yaml", mlx),
}


def train(case: Case, place: Path, out: Path) -> str:
    """Why nothing is planned, "" where one step trained."""
    environment = {**os.environ, "HF_HUB_CACHE": str(place / "hub"), "HF_HUB_OFFLINE": "1"}
    plan = [str(ROOT / ".venv" / "bin" / "plan"), *case.words, "--out", str(out)]
    done = subprocess.run(plan, cwd=place, env=environment, capture_output=True, text=True)
    if done.returncode:
        return "nothing fits" if done.returncode == 1 else done.stderr.splitlines()[-2]
    model = place / "models" / case.kind
    if not model.exists():
        tiny_models.save_tiny(case.kind, model)
    launch = out / "launch"
    name, run = TOOLS[case.target]
    for path in (launch / "prepare_data.py", launch / name):
        path.write_text(on_cpu(path.read_text("utf-8"), model), "utf-8")
    form = re.search(r"python launch/prepare_data.py (\w+)", (launch / "run.sh").read_text())
    assert form is not None
    made = [sys.executable, "launch/prepare_data.py", form[1]]
    subprocess.run(made, cwd=out, env=environment, check=True, stdout=subprocess.DEVNULL)
    os.chdir(out)
    run(launch / name)
    states = sorted(out.glob("outputs/**/trainer_state.json"))
    losses = [row["loss"] for row in json.loads(states[-1].read_text())["log_history"] if "loss" in row]
    if len(losses) != 1 or not 0 < losses[0] < 20 or not math.isfinite(losses[0]):
        raise ValueError(f"losses {losses}")
    return ""


def chosen(tool: str) -> list[Case]:
    """The tool's cases; of MLX-LM, which is planned on two cards alone, every model and form of data on one."""
    if tool != "mlx":
        return [case for case in cases() if case.target == tool]
    return [*dict.fromkeys(case._replace(card=MAC) for case in cases() if case.target == tool)]


def main(tool: str) -> int:
    reasons: Counter[str] = Counter()
    failures = []
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as where:
        place = Path(where)
        for name, write in data_formats.FORMATS.items():
            write(place if name == "who/what" else place / name)
        for number, case in enumerate(chosen(tool)[::STEP]):
            try:
                reasons[train(case, place, place / f"out-{number}")] += 1
            except (Exception, SystemExit) as error:
                failures.append(f"{' | '.join(case)}: {type(error).__name__}: {str(error)[:400]}")
                print(failures[-1], flush=True)
        os.chdir(ROOT)
    print(f"{tool}: {reasons.pop('', 0)} cases of the product trained a step, {len(failures)} did not")
    for reason, num in reasons.items():
        print(f"  not planned ({num}): {reason}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
