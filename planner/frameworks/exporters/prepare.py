"""`launch/prepare_data.py`: whatever the data are, once, for every target; each reads one of its forms.

Which target takes which columns, roles and files differs, and so does what it computes the loss on: TRL 1.16 refuses
`assistant_only_loss` for chat templates that it does not know (Llama 3.1's, Mistral's; `get_training_chat_template`),
Axolotl 0.21 leaves the end of an answer out of the loss where a template ends it in more than three tokens, Unsloth
looks for the template's markers. Tokens with labels mean the same to all four.
"""

from pathlib import Path

from planner.frameworks.exporters import chat
from planner.frameworks.exporters.text import comments, constant, program, shipped, shown_path
from planner.frameworks.exporters.types import PLACEHOLDER_DATASET, ExportRequest, LaunchFile
from planner.options.stacks import TARGET_ROWS

NAME = "prepare_data.py"
CACHE = "launch/data/axolotl"
"""Where Axolotl 0.21 keeps its copy, under a name made of settings and not of contents (`utils/data/shared.py`
generate_dataset_hash_from_config)."""
FORMS = {
    "trl": "tokens",
    "hf": "tokens",
    "unsloth": "tokens",
    "axolotl": "tokens",
    "torchtitan": "text",
    "mlx": "answers",
    "loggetta": "chats",
}
"""Target -> what it reads of supervised data; LLaMA-Factory reads pieces of chats, chats or texts."""
LINES = ("json", "csv")
"""How files are read that hold no picture, but paths to them."""


def needed(request: ExportRequest) -> bool:
    """Whether the data have to be made into a form that targets read: all but sound; of pictures those that a local
    file names by their paths; of prompts, whose columns are what rewards ask for, files and names that no target takes.

    TRL takes preferences as chats and texts, and Axolotl 0.21 hands it both as they are where it is told to prepare
    nothing (its user-defined type writes a list as Python does, and of texts with a template in them its TRL 1.14
    begins with two BOS); LLaMA-Factory 0.9.5 takes texts, which its template `empty` leaves as they are."""
    setup, dataset = request.setup, request.dataset
    if setup.images is not None:
        from planner.samples.rows import loader_of  # late: a plan asks for none

        return dataset is not None and dataset.local and loader_of(Path(dataset.path)) in LINES
    if request.model is not None and request.model.front_end is not None:
        return False
    if not setup.objective_spec.rolls_out:
        return True
    lacking = bool(request.lacks_template)  # chats are written as texts
    return dataset is not None and (bool(dataset.names) or lacking or (dataset.local and not dataset.plain))


def form(request: ExportRequest, target: str) -> str:
    """What a target reads."""
    if request.setup.images is not None:
        return "pictures" if target == "trl" else ""
    if not request.setup.objective_spec.supervised:
        return "pairs" if target == "llamafactory" else "rows"
    if target == "llamafactory":
        if request.columns == "text":
            return "text"
        return "chats" if chat.brought_along(request) else "pieces"
    if target in ("mlx", "loggetta") and (request.columns == "text" or request.loss_on == "all"):
        return "text"
    return FORMS.get(target, "")


def folder(request: ExportRequest, target: str) -> str:
    """Where a target finds train and test."""
    return f"launch/data/{form(request, target)}"


def command(request: ExportRequest, target: str) -> str:
    """What makes the data for a target, from the directory that holds `launch/`; "" where nothing has to be made."""
    if not needed(request) or not (made := form(request, target)):
        return ""
    return f"python launch/{NAME} {made}"


def refusal(target: str, columns: str, loss_on: str) -> str:
    """Why a target cannot train on samples of such columns ("": nobody knows them), "" where it can."""
    if not columns or loss_on == "all":
        return ""
    from planner.samples.dataset import SUPERVISED  # late: a plan without data needs none

    answered = columns in SUPERVISED[:2]
    if target == "torchtitan" and answered:
        return "torchtitan 0.2.2 trains on all tokens of plain text: plan with --loss-on all"
    if target in ("mlx", "loggetta") and answered and columns == "prompt-completion":
        title = TARGET_ROWS[target].title
        return f"{title} puts a chat template around prompts and completions: plan with --loss-on all"
    return ""


def loss_words(request: ExportRequest) -> str:
    """What the loss is on, for people."""
    if request.loss_on == "all" or request.columns == "text":
        return "all tokens"
    stated = request.dataset is not None and request.dataset.columns
    return "the answers alone" if stated else "answers, where there are"


def file(request: ExportRequest) -> LaunchFile:
    """The program: what a person changes, how rows are read (the planner's own code), what is written."""
    from importlib.resources import files  # late: a plan writes none

    from planner.samples.dataset import SUPERVISED
    from planner.samples.rows import SUFFIXES

    dataset, setup = request.dataset, request.setup
    head = (
        "Makes launch/data/ of a data set for all: python launch/prepare_data.py FORM",
        "FORM is tokens, pieces, chats, answers, text, pairs, pictures or rows.",
        f"Files ending in {', '.join(SUFFIXES)} (and .gz), a directory of them, or a data set on the hub.",
    )
    placeholder = "" if dataset else "PUT YOURS HERE: a file, a directory or a hub id"
    kinds = list(SUPERVISED) if setup.objective_spec.supervised else list(setup.objective_spec.data)
    held_out = request.held_out if setup.objective_spec.supervised else 0  # nothing else is evaluated
    held_words = "None: a share of the samples" if held_out is None else "samples to evaluate on"
    lines = [
        constant("DATASET", shown_path(dataset.path) if dataset else PLACEHOLDER_DATASET, placeholder),
        constant("SPLIT", dataset.split if dataset else "train", "of a data set on the hub"),
        constant("CONFIG", None, "its name, where a data set on the hub has several"),
        constant("COLUMNS", dict(dataset.names) if dataset else {}, 'for example {"question": "Frage"}; others unread'),
        constant("KINDS", kinds),
        constant("LOSS_ON", request.loss_on, 'or "all": questions too'),
        constant("MODEL", shown_path(request.model_id), "whose chat template and tokenizer are used"),
        constant("MAX_LENGTH", setup.seq_len_tokens, "tokens; longer chats are cut, longer texts go on in another row"),
        constant("HELD_OUT", held_out, held_words),
        constant("FORM", form(request, "trl")),
        constant("TEMPLATE", chat.TEMPLATE, "of chats, where the tokenizer has none"),
    ]
    shared = files("planner").joinpath("samples/rows.py").read_text("utf-8").partition('"""\n\n')[2]
    imports, row, reading = shared.partition("Row = ")  # where the shared module's imports end
    _, chats, rendering = files("planner").joinpath("samples/chats.py").read_text("utf-8").partition("class ")
    writes = shipped("prepare_data.py.txt")
    parts = [comments(head), "\n", program("PREPARE_IMPORTS"), imports, *lines, "\n", row, reading, "\n\n"]
    return LaunchFile(path=NAME, text="".join([*parts, chats, rendering, "\n", writes]))
