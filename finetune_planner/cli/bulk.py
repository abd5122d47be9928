"""`plan table`: every configuration x card x length x method to Parquet, on all cores, resumable."""

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from finetune_planner.app.cores import on_cores
from finetune_planner.app.progress import steps
from finetune_planner.cli import options
from finetune_planner.cli.output import print_json
from planner import __version__
from planner.core.errors import EnvironmentProblem, PlannerError, UsageError
from planner.core.install import packages_command
from planner.core.records import dataclass
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import all_gpus, find_gpu
from planner.models import catalogue
from planner.models.config_file import CONFIG_NAME, read_config
from planner.models.families import spec_from_config
from planner.models.spec import ModelSpec
from planner.planning.answer import plan_workload
from planner.planning.groups import WalkCache
from planner.planning.option_values import choices, length, positive
from planner.planning.plan import NoPlan, Plan
from planner.planning.plan_request import PlanRequest
from planner.setup import DEFAULTS

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What every configuration is planned for.

    Attributes:
        cards: GPUs, one of each.
        seq_lens: tokens per sequence.
        methods: full, lora, qlora.
        global_batch: sequences per optimizer step; None: the planner's usual number.
    """

    cards: tuple[GpuSpec, ...]
    seq_lens: tuple[int, ...]
    methods: tuple[str, ...]
    global_batch: int | None = None

    @property
    def num_plans(self) -> int:
        return len(self.cards) * len(self.seq_lens) * len(self.methods)


@dataclass(frozen=True, kw_only=True)
class Config:
    """One configuration to plan for: a catalogue's by name (`config` None), or a config.json's content."""

    model_id: str
    config: Mapping[str, Any] | None = None

    def load(self) -> ModelSpec:
        """Its inventory.

        Raises:
            PlannerError: an architecture that nobody knows, a field that is missing.
        """
        if self.config is not None:
            return spec_from_config(self.config, model_id=self.model_id, source="plan table --configs")
        spec = catalogue.load(self.model_id)
        if spec is None:
            raise UsageError(f"no model of the catalogue is called {self.model_id!r}", hint="`plan models` lists all")
        return spec

    def file_name(self, grid: Grid) -> str:
        """Of its rows: another configuration, grid or version has another one, so that a file that is there holds what
        would be planned."""
        key: list[Any] = [__version__, self.model_id, self.config, [asdict(card) for card in grid.cards]]
        key += [grid.seq_lens, grid.methods, grid.global_batch]
        digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:16]
        slug = "".join(sign if (sign.isascii() and sign.isalnum()) or sign in ".-" else "_" for sign in self.model_id)[
            -80:
        ]
        return f"{slug}.{digest}.parquet"


def configs_of(place: Path | None, match: str = "") -> list[Config]:
    """The configurations of a directory (every config.json below it, and every other JSON file in it), or of the
    catalogue (None), whose names contain `match`.

    Raises:
        UsageError: nothing there.
        ConfigError: a configuration that is none.
    """
    if place is None:
        configs = [Config(model_id=name) for name in catalogue.names_with("")]
    elif place.is_dir():
        files = sorted({*place.rglob(CONFIG_NAME), *place.glob("*.json")})
        configs = [Config(model_id=_name_in(place, file), config=read_config(file)) for file in files]
    else:
        raise UsageError(f"no such directory: {place}", hint="--configs takes a directory of config.json files")
    configs = [config for config in configs if match.lower() in config.model_id.lower()]
    if not configs:
        where = "the catalogue" if place is None else str(place)
        raise UsageError(f"no configuration in {where} with {match!r} in its name", hint="leave --match out")
    return configs


def _name_in(place: Path, file: Path) -> str:
    inside = file.relative_to(place)
    named = inside.parent if inside.name == CONFIG_NAME else inside.with_suffix("")
    return named.as_posix() if named.parts else place.resolve().name


def write_rows(config: Config, rows: list[Row], grid: Grid, folder: Path) -> int:
    """Writes a configuration's file, whole or not at all; the number of rows.

    Raises:
        EnvironmentProblem: no pyarrow, or the file cannot be written.
    """
    parquet = parquet_writer()
    from pyarrow import Table

    path = folder / config.file_name(grid)
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    try:
        import pyarrow

        kinds = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64(), bool: pyarrow.bool_()}
        parquet.write_table(
            Table.from_pylist(
                rows,
                schema=pyarrow.schema(
                    [(name, kinds[kind]) for name, kind in COLUMNS.items()], metadata={"version": __version__}
                ),
            ),
            unfinished,
        )
        os.replace(unfinished, path)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {path}: {error}", hint="free some space; the rest is kept") from error
    return len(rows)


def rows_of(config: Config, grid: Grid) -> Iterator[Row]:
    """A row for each card, length and method. What cannot be planned has its reason under `problem`."""
    try:
        spec = config.load()
    except PlannerError as error:
        spec, reason = None, error.message
    walks = WalkCache()  # walks of one model share their layers, and of cards with the same kernels all of their memory
    for card in grid.cards:
        for seq_len in grid.seq_lens:
            for method in grid.methods:
                row: Row = dict.fromkeys(COLUMNS)
                row |= {"model": spec.model_id if spec is not None else config.model_id, "gpu": card.key}
                row |= {"seq_len_tokens": seq_len, "method": method}
                if spec is None:
                    yield row | {"fits": False, "problem": reason}
                    continue
                request = PlanRequest(fixed={"method": (method,)}, seq_len=seq_len, global_batch=grid.global_batch)
                try:
                    workload = request.workload(spec, card)
                    answer = plan_workload(workload, cache=walks, num_ranked=1, helped=False, explained=False)
                except UsageError as error:
                    yield row | {"num_params": spec.num_params, "fits": False, "problem": error.message}
                    continue
                yield row | figures(answer)


def figures(answer: Plan | NoPlan) -> Row:
    """What an answer says of its setup; of a refusal the setup that is nearest, without a speed."""
    candidate, fits = answer.subject, isinstance(answer, Plan)
    setup, formula = candidate.setup, candidate.formula
    speeds = ("tokens_per_s", "step_time_s", "time_band_fraction")
    return {
        "num_params": answer.workload.model.num_params,
        "fits": fits,
        "verdict": str(candidate.verdict),
        "missing_bytes": 0 if isinstance(answer, Plan) else answer.missing_bytes,
        "budget_bytes": candidate.budget_bytes,
        "peak_device_bytes": formula.peak_device_bytes,
        "memory_band_fraction": formula.memory_band_fraction,
        **{name: getattr(formula, name) if fits else None for name in speeds},
        "usd_per_hour": answer.workload.price_per_hour,
        **{name: getattr(setup, name) for name in _SETUP_FIELDS},
    }


_SETUP_FIELDS: dict[str, type] = {
    name: type(DEFAULTS[name])
    for name in (
        "precision", "quantization", "lora_rank", "optimizer", "attention", "loss", "kernels", "checkpointing",
        "packing", "compile", "offload", "micro_batch_seqs", "accumulation_steps", "stack",
    )
}  # fmt: skip
COLUMNS: dict[str, type] = {
    "model": str,
    "num_params": int,
    "gpu": str,
    "seq_len_tokens": int,
    "method": str,
    "fits": bool,
    "verdict": str,
    "missing_bytes": int,
    "budget_bytes": int,
    "peak_device_bytes": int,
    "memory_band_fraction": float,
    "tokens_per_s": float,
    "step_time_s": float,
    "time_band_fraction": float,
    "usd_per_hour": float,
    **_SETUP_FIELDS,
    "problem": str,
}
"""Column -> its type; all but the first may be null."""


def parquet_writer() -> Any:
    """pyarrow's module of Parquet files.

    Raises:
        EnvironmentProblem: it is not installed.
    """
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise EnvironmentProblem(
            "plan table writes Parquet, which needs pyarrow", hint=packages_command("pyarrow")
        ) from error
    return parquet


def table(
    out: Annotated[Path, typer.Option(help="Directory of the Parquet files; call again to go on.")],
    configs: Annotated[
        Path | None,
        typer.Option(help="Directory of config.json files. Default: the catalogue."),
    ] = None,
    match: Annotated[str, typer.Option(help="Only configurations whose names contain this.")] = "",
    gpus: Annotated[str, typer.Option(help="Cards, comma-separated; 'all': all but laptops and modules.")] = "all",
    seq_lens: Annotated[str, typer.Option(help="Tokens per sequence, comma-separated.")] = "1024,2048,4096,8192",
    methods: Annotated[str, typer.Option(help="Of full, lora, qlora.")] = "full,lora,qlora",
    global_batch: options.GlobalBatch = None,
    as_json: options.Json = False,
) -> None:
    """Plan every configuration on every card, at every length, by every method (formula level), and write Parquet.

    A row is what `plan MODEL --gpu GPU --seq-len N --method M --no-dry-run` chooses.
    """
    lengths = [positive("seq-lens", length(word)) for word in _words(seq_lens)]
    separate = [card for card in all_gpus() if not card.is_built_in]
    grid = Grid(
        cards=tuple(separate if gpus == "all" else dict.fromkeys(find_gpu(name) for name in _words(gpus))),
        seq_lens=tuple(dict.fromkeys(filter(None, lengths))),
        methods=choices("methods", [methods], ("full", "lora", "qlora")),
        global_batch=positive("global-batch", global_batch),
    )
    configurations = configs_of(configs, match)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot write {out}: {error.strerror}", hint="choose another --out directory"
        ) from error
    left = [config for config in configurations if not (out / config.file_name(grid)).exists()]
    if len(left) < len(configurations):
        print(
            f"{len(configurations) - len(left)} of {len(configurations)} configurations are in {out} already",
            file=sys.stderr,
        )
    parquet_writer()  # not missed after an hour
    # planned in forks, which lack pyarrow's threads; written here
    answers = on_cores(lambda config: (config, list(rows_of(config, grid))), left)
    bar = steps(answers, f"planning {grid.num_plans} times each", num=len(left))
    rows = sum(write_rows(config, rows, grid, out) for config, rows in bar)
    if as_json:
        print_json({"out": str(out), "configurations": len(configurations), "planned": len(left), "rows": rows})
    else:
        print(f"{rows:,} plans of {len(left)} configurations written to {out}")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
