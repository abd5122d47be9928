"""What stands beside the targets' files in `launch/`: README.md, and run.sh, which starts any of them.

Both say the same: what to install, whether to log in, the one command, what to change.
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from planner.frameworks.exporters import chat, prepare
from planner.frameworks.exporters.common import RESUMED
from planner.frameworks.exporters.install import from_hub, gate_of, install_calls, on_hub
from planner.frameworks.exporters.text import one_line, shipped, shown_path
from planner.frameworks.exporters.trl import REWARDS, STAND_IN
from planner.frameworks.exporters.types import PLACEHOLDER_DATASET, ExportRequest, Launch, LaunchFile
from planner.options.stacks import TARGET_ROWS

README, RUN = "README.md", "run.sh"
LOGIN = "hf auth login"
RESUMABLE = {
    "trl": "--resume_from_checkpoint", "axolotl": "--resume-from-checkpoint",
    **dict.fromkeys(("hf", "unsloth", "sentence-transformers"), ""),
}  # fmt: skip
"""Targets whose runs go on from a checkpoint -> their option for it; "": the variable RESUMED. LLaMA-Factory and
torchtitan look for one themselves."""
BY_TRANSFORMERS = ("trl", "hf", "axolotl", "sentence-transformers")
"""Targets whose transformers takes flash attention from the hub."""
_BY_HAND = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def folder_files(
    launches: Sequence[Launch], request: ExportRequest, *, jobs: Sequence[str] = ()
) -> tuple[LaunchFile, ...]:
    """README.md, run.sh and the job files of a launch folder; nothing where no target has files.

    Args:
        jobs: names of `planner.frameworks.exporters.jobs`; their jobs start the first target.

    Raises:
        UsageError: a scheduler does not have the GPUs.
    """
    written = [launch for launch in launches if launch.files]
    if not written:
        return ()
    started = [launch for launch in written if launch.complete]
    submitted: dict[str, LaunchFile] = {}
    of_slurm: dict[str, LaunchFile] = {}
    if started and (jobs or request.setup.num_processes > 1):
        from planner.frameworks.exporters.jobs import SLURM, job_files, slurm_file  # late: one GPU asks for none

        submitted = job_files(jobs, started[0], request) if jobs else {}
        if request.setup.num_processes > 1 or SLURM in jobs:
            of_slurm = {launch.target: slurm_file(launch, request) for launch in started}
    readme = LaunchFile(path=README, text=_readme(launches, started, request, submitted, of_slurm))
    launch_files = [readme, *submitted.values(), *of_slurm.values()]
    if started:
        launch_files.append(LaunchFile(path=RUN, text=_run(started, request), executable=True))
    if any(launch.prepare for launch in started):
        launch_files.append(prepare.file(request))
    return tuple(launch_files)


def start_command(launch: Launch) -> str:
    """What starts a target, from the directory that holds `launch/`: on several nodes Slurm, which starts each."""
    several = _BY_HAND[0] in launch.command
    return f"sbatch launch/{launch.target}/slurm.sbatch" if several else f"bash launch/{RUN} {launch.target}"


def login_words(request: ExportRequest) -> str:
    """Whether the hub wants a login for the model; "" for a directory."""
    name = shown_path(request.model_id)
    if not on_hub(request.model_id):
        return ""
    gate = gate_of(request.model_id)
    if gate is not None and gate.asks:
        return f"{name} is gated: {gate.asks} on its page on the hub, then `{LOGIN}`, or set HF_TOKEN."
    state = (
        "is gated is not known here" if gate is None else f"is still gated is not known here (it was in {gate.seen})"
    )
    return (
        f"Whether {name} {state}: where its download is refused (401 or 403), accept its terms on its page on the hub, "
        f"then `{LOGIN}`, or set HF_TOKEN."
    )


def _readme(
    launches: Sequence[Launch],
    started: Sequence[Launch],
    request: ExportRequest,
    submitted: Iterable[str],
    of_slurm: Mapping[str, LaunchFile],
) -> str:
    lines = [f"# {_plain(shown_path(request.model_id))}", ""]
    if started:
        first = started[0].target
        lines += [
            "Run all commands from the directory that holds `launch/`.",
            "",
            "```bash",
            f"bash launch/{RUN} install {first}   # a virtual environment .venv-{first} with the tested versions",
            f"{start_command(started[0])}           # the run",
            "```",
            "",
            *(f"As a job, instead (its first lines say what it needs): `{command}`\n" for command in submitted),
        ]
    if words := login_words(request):
        lines += [_plain(words, code=True), ""]
    for launch in launches:
        if not launch.files:
            continue
        pip = [f"pip install {shlex.join(call)}" for call in install_calls(launch, request)]
        lines += [f"## {launch.target}", "", *(f"{_plain(words)}." for words in launch.about), ""]
        if launch.complete:
            lines += [
                "```bash",
                *pip,
                *([launch.prepare] if launch.prepare else []),
                *([f"{launch.server} &"] if launch.server else []),
                launch.command,
                "```",
                "",
            ]
        else:
            lines += ["A part, for use with another target's files.", ""]
        remarks = [_plain(words) for words in (*launch.unsupported, *launch.notes)]
        if launch.target in of_slurm:
            remarks.append(f"With Slurm, instead: `sbatch launch/{of_slurm[launch.target].path}`")
        lines += [f"- {words}" for words in remarks] + [""] * bool(remarks)
    left_out = [launch for launch in launches if launch.refused]
    if left_out:
        lines += ["## Not written", "", *(f"- {launch.target}: {_plain(launch.refused)}" for launch in left_out), ""]
    if not started:  # parts alone name no data, and write nowhere
        return "\n".join(lines) + "\n"
    lines += ["## What to change", ""]
    where = f"`launch/{prepare.NAME}` names it" if prepare.needed(request) else "every target's file names it"
    if request.dataset is None:
        where = f"`{PLACEHOLDER_DATASET}` stands where yours belongs (or plan with --dataset); {where}"
    lines.append(f"- the dataset: {where}")
    if prepare.needed(request) and request.setup.objective_spec.supervised and request.setup.images is None:
        lines.append(
            f"- what the loss is on: {prepare.loss_words(request)}; plan with --loss-on to change it everywhere"
        )
    lines += [f"- the reward: {STAND_IN}"] * request.setup.objective_spec.rolls_out
    lines += [
        f"- where the run writes: `{_plain(shown_path(request.output_dir))}`",
        "- learning rate, epochs, logging and saving: as you like; they change no memory",
        "- batch, lengths, precision, rank, checkpointing, optimizer: what was planned; change them and plan again",
    ]
    if any(resumes(launch, request) for launch in started):
        lines += [
            "",
            "## After a stop",
            "",
            f"`bash launch/{RUN}` goes on from the last checkpoint in `{_plain(shown_path(request.output_dir))}`; to "
            "start over, move that folder away (a run deletes older checkpoints in it). Where a launch file is newer "
            "than the checkpoint it stops, and goes on with `RESUME=1` in front. By hand: "
            f"`--resume_from_checkpoint FOLDER` behind trl's command (axolotl's: `--resume-from-checkpoint`, before "
            f"`--launcher`), `{RESUMED}=FOLDER` in front of a script's.",
        ]
    return "\n".join(lines) + "\n"


def resumes(launch: Launch, request: ExportRequest) -> bool:
    """Whether a run that was stopped can go on from its checkpoints: those of transformers' Trainer can."""
    return launch.target in RESUMABLE and request.save and not request.setup.sharded_at_loading


def _plain(text: str, *, code: bool = False) -> str:
    """Text on one line that is no Markdown of its own."""
    line = one_line(text).replace("<", "&lt;")
    return line if code else line.replace("`", "'")


def _run(started: Sequence[Launch], request: ExportRequest) -> str:
    gate, login = gate_of(request.model_id) if on_hub(request.model_id) else None, ""
    if gate is not None and gate.asks:
        ask = "from huggingface_hub import get_token; raise SystemExit(get_token() is None)"
        refused = shlex.quote("error: " + login_words(request))
        login = f"if ! python3 -c {shlex.quote(ask)} 2>/dev/null; then\n  printf '%s\\n' {refused} >&2\n  exit 3\nfi\n"
    oldest = min(launch.python for launch in started)
    old = [launch.target for launch in started if launch.python == oldest]
    replacements = {
        "@OLDER@": f"; of Python {oldest}: {', '.join(old)}" if len(old) < len(started) else "",
        "@NAMES@": " ".join(launch.target for launch in started),
        "@FIRST@": started[0].target,
        "@CASES@": "\n".join(line for launch in started for line in _case(launch, request)),
        "@LOGIN@": login,
        "@DATASET@": PLACEHOLDER_DATASET,
        "@MODEL@": shlex.quote(request.model_id if on_hub(request.model_id) else ""),
    }
    return re.sub("|".join(replacements), lambda mark: replacements[mark[0]], shipped("run.sh.txt"))


def _case(launch: Launch, request: ExportRequest) -> list[str]:
    words = shlex.split(launch.command)
    tool = TARGET_ROWS[launch.target].program or next(word for word in words if "=" not in word)
    placed = [file.path for file in launch.files]
    required = [prepare.NAME, *placed] if launch.prepare else placed
    command = launch.command
    asks: list[str] = []
    if any(path.endswith(chat.TEMPLATE_FILE) for path in placed) and request.lacks_template is None:
        path = f"launch/{launch.target}/{chat.TEMPLATE_FILE}"
        look = "import sys; from transformers import AutoTokenizer as T; " + (
            "sys.exit(T.from_pretrained(sys.argv[1]).chat_template is not None)"
        )
        asks = [
            "      local template=()",
            f"      if python3 -c {shlex.quote(look)} {shlex.quote(shown_path(request.model_id))} 2>/dev/null; then",
            f"        template=({chat.OPTION} {path})",
            "      fi",
        ]
        command += ' ${template[@]+"${template[@]}"}'
    if REWARDS in placed:
        config = next(path for path in placed if path.startswith("trl/trl-"))
        asks.append(f"      python launch/{REWARDS} launch/{config}  # do the data have what it asks for?")
    if resumes(launch, request):
        kept = shlex.quote(shown_path(request.output_dir))
        option = RESUMABLE[launch.target]
        says = f'resume=({option} "$last")' if option else f'export {RESUMED}="$last"'
        if option:
            before, launcher, handed = command.partition(" --launcher ")  # behind which Axolotl reads no option
            command = before + ' ${resume[@]+"${resume[@]}"}' + launcher + handed
        asks += [
            *["      local resume=()"] * bool(option),
            f"      local last; last=$(last_checkpoint {kept})",
            '      if [ -n "$last" ]; then',
            '        of_this_plan "$last"',
            '        echo "goes on from $last; to start over, move its folder away" >&2',
            f"        {says}",
            "      fi",
        ]
    needed = [name for name in _BY_HAND if f"${name}" in launch.command]
    kernel = "flash_attention_2" if launch.target in BY_TRANSFORMERS and launch.runs and from_hub(launch.runs) else ""
    folder = shlex.quote(shown_path(request.model_id)) if launch.target == "torchtitan" else ""
    return [
        f"  {launch.target})",
        f"    tool={shlex.quote(tool)} oldest={launch.python} kernel={kernel} folder={folder}",
        f"    files=({shlex.join(f'launch/{path}' for path in required)})",
        "    install() {",
        *(f"      pip install {shlex.join(call)}" for call in install_calls(launch, request)),
        "    }",
        "    run() {",
        *(f'      : "${{{name}:?set it on every node}}"' for name in needed),
        *([f'      [ -n "${{PREPARED:-}}" ] || {launch.prepare}'] if launch.prepare else []),
        *asks,
        *([f"      {launch.server} &", "      trap 'kill $! || true' EXIT"] if launch.server else []),
        f"      {command}",
        "    }",
        "    ;;",
    ]
