"""One file for `plan check`: read, its model and GPU resolved, predicted; its answer as JSON; of a
program that cannot be read its `plan trace` command."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from functools import cache, partial
from importlib.util import find_spec
from os.path import isfile  # Path.is_file raises where a folder is closed to this user, or a name too long
from pathlib import Path
from typing import Any

from finetune_planner.cli.answer import data_of, read_data
from finetune_planner.cli.request_options import NO_DATA_OPTIONS, DataOptions
from planner.core.errors import ConfigError, PlannerError, UnknownModelError, UsageError
from planner.core.inputs import parse_json
from planner.core.notes import measured
from planner.core.records import dataclass
from planner.core.units import percent, seconds
from planner.frameworks.exporters.install import BRINGS
from planner.frameworks.readers import ReadConfig, read_config
from planner.frameworks.readers.loading import read_bounded
from planner.frameworks.readers.read import installs
from planner.frameworks.readers.sharding import LAUNCHERS
from planner.frameworks.readers.shell import SUFFIXES as SHELL_SUFFIXES
from planner.frameworks.readers.types import Missing, determined, overrides, parse_sets, parse_versions
from planner.frameworks.tools import TOOLS
from planner.hardware.cluster import Cluster
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
from planner.memory.attention_kernels import linear_attention_refusal
from planner.memory.workload import Workload
from planner.models.earlier import built_by_transformers_4, of_transformers_4
from planner.models.encoders import image_tokens, with_vision
from planner.models.resolve import of_folder, resolve_model
from planner.models.spec import ModelSpec
from planner.planning.check import CheckResult, check
from planner.planning.option_values import memory_and_headroom
from planner.planning.predict import predict_with_padding
from planner.planning.single_changes import Predict
from planner.planning.useful import useful_fraction
from planner.samples.dataset import COUNTED, DatasetStats, choose_length
from planner.samples.lengths import PAD_TO
from planner.setup import TrainSetup
from planner.setup.interchange import SCHEMA_VERSION, setup_to_dict, to_jsonable
from planner.setup.outcome import Prediction, speed_level
from planner.setup.packages import DELTA


def read_samples(data: DataOptions, spec: ModelSpec, setup: TrainSetup) -> DatasetStats:
    """Lengths of the samples that a file trains on.

    Raises:
        UsageError: no such data, or of an objective or a model whose lengths they do not say.
    """
    objective = setup.objective_spec
    if objective.rolls_out or spec.front_end is not None:
        what = "completions are made" if objective.rolls_out else "clips are cut to one length"
        raise UsageError(f"--dataset says nothing of how long samples are where {what}", hint="leave --dataset out")
    stats = read_data(data.checked(), spec, objective)
    if stats is None:
        raise UsageError(f"no data set {data.dataset} on this machine", hint="--dataset FILE, or leave it out")
    # the file's own trainer cuts what is longer, and drops nothing
    stats = replace(stats, columns="", starts_tokens=())
    return stats.with_pictures(image_tokens(spec, setup.images)) if setup.images is not None else stats


def data_beside(file: Path, config: ReadConfig) -> str:
    """What is said where a file names data that lie here and nobody gave them; "" where it names none."""
    for name, path in _named_data(file, config):
        if path.suffix in (".jsonl", ".json", ".csv", ".parquet") and isfile(path):
            return f"{name} lies here: --dataset {path} counts its samples, which may be shorter"
    return ""


def _named_data(file: Path, config: ReadConfig) -> Iterator[tuple[str, Path]]:
    """What a file calls its data, and where that may lie: LLaMA-Factory's names stand in a table."""
    listed = config.values.get("datasets")
    entries = [entry.get("path") for entry in listed if isinstance(entry, Mapping)] if isinstance(listed, list) else []
    names = [name for name in (config.dataset, *entries) if isinstance(name, str) and name]
    folders = dict.fromkeys((file.parent, Path()))
    yield from ((name, folder / name) for name in names for folder in folders)
    for folder in folders:
        table = folder / str(config.values.get("dataset_dir", "data")) / "dataset_info.json"
        if config.format == "llamafactory" and isfile(table):
            with suppress(ConfigError):
                described = parse_json(read_bounded(table), table.name, hint="")
                for name in ",".join(names).split(","):
                    entry = described.get(name.strip()) if isinstance(described, Mapping) else None
                    if isinstance(entry, Mapping) and isinstance(entry.get("file_name"), str):
                        yield name.strip(), table.parent / entry["file_name"]


def as_long(setup: TrainSetup, longest_tokens: int | None) -> TrainSetup:
    """The setup at its longest micro-batch: that of the longest sample where that is sure, unless rows are packed."""
    if longest_tokens is None or setup.packing:
        return setup
    longest = -(-longest_tokens // PAD_TO) * PAD_TO
    return setup.replace(seq_len_tokens=longest) if longest < setup.seq_len_tokens else setup


class OfSamples:
    """Predictions of setups on these samples: memory of the longest micro-batch, tokens/s that are no padding."""

    def __init__(
        self, predict: Predict, stats: DatasetStats, spec: ModelSpec, card: GpuSpec, cluster: Cluster | None
    ) -> None:
        self._predict, self._stats = cache(predict), stats
        self._spec, self._card, self._cluster = spec, card, cluster
        self._lengths = cache(partial(choose_length, stats))

    def __call__(self, setup: TrainSetup) -> Prediction:
        """Raises as the prediction does."""
        setup = as_long(setup, self._stats.longest_tokens)
        prediction = self._predict(setup)
        if prediction.tokens_per_s is None:
            return prediction
        share = useful_fraction(self._workload(setup), setup)
        return replace(prediction, tokens_per_s=share * prediction.tokens_per_s)

    def per_row(self, setup: TrainSetup) -> float:
        """Samples that a packed row holds."""
        return self._lengths(seq_len_tokens=setup.seq_len_tokens, packing=True).samples_per_seq

    def less_fraction(self, setup: TrainSetup) -> float:
        """Share of the peak that is not reached where the longest sample, of which that is not sure, is as long as it
        seems."""
        if self._stats.longest_tokens is not None:
            return 0.0
        peaks = [
            self._predict(each).peak_device_bytes for each in (as_long(setup, self._stats.lengths_tokens[-1]), setup)
        ]
        return 1 - peaks[0] / peaks[1]

    def _workload(self, setup: TrainSetup) -> Workload:
        fixed = {"objective": (setup.objective,), "hard_negatives": (setup.hard_negatives,)}
        lengths = self._lengths(seq_len_tokens=setup.seq_len_tokens, packing=setup.packing)
        return Workload(
            model=self._spec,
            gpu=self._card,
            cluster=self._cluster,
            memory_bytes=self._card.memory_bytes,
            headroom_bytes=0,
            seq_len_tokens=setup.seq_len_tokens,
            global_batch_seqs=setup.global_batch_seqs,
            fixed=fixed,
            data=data_of(lengths, fixed),
        )

    def note(self, setup: TrainSetup, name: str) -> str:
        """What a person should know of the samples, and what an epoch of them takes."""
        stats, run = self._stats, as_long(setup, self._stats.longest_tokens)
        workload, longest = self._workload(run), stats.lengths_tokens[-1]
        text = f"{name}: {stats.num_samples:,} samples, {stats.counted_with}, the longest {longest:,} tokens"
        if run.seq_len_tokens < setup.seq_len_tokens:
            text += f" of the file's {setup.seq_len_tokens:,}: memory is that of {run.seq_len_tokens:,}"
        elif cut := stats.cut_fraction(setup.seq_len_tokens):
            text += f", {percent(cut)} of them longer than {setup.seq_len_tokens:,} and cut"
        elif stats.longest_tokens is None and not setup.packing:
            text += f": memory is that of {setup.seq_len_tokens:,}, {percent(self.less_fraction(setup))} less if so; "
            text += "the model's tokenizer tells " if stats.counted_with != COUNTED else "fewer samples tell "
            text += f"(hf download {self._spec.model_id} --include 'tokenizer*')" * (stats.counted_with != COUNTED)
        real = workload.data.real_fraction(setup.micro_batch_seqs * setup.data_degree)
        text += f"; {percent(1 - real)} of a micro-batch is padding, which tokens/s leave out"
        if speed := self(setup).tokens_per_s:
            text += f": an epoch takes {seconds((workload.data.epoch_tokens or 0) / speed)}"
        return text


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """What the command line says about a file.

    Attributes:
        model: where the file names none; num_gpus: of the job, where it says nothing of them; says_gpus: whether that
            was said.
        accelerate: the Accelerate config that the run is launched with.
        sets: fields of the setup; arguments: words of the program's command line; versions: package -> version.
        strict: whether unknown settings are errors.
        like: as `resolve_model` takes it.
    """

    model: str | None = None
    num_gpus: int = 1
    says_gpus: bool = False
    accelerate: Path | None = None
    sets: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False
    like: str | None = None

    @classmethod
    def of(
        cls,
        *,
        sets: Sequence[str] | None = None,
        arguments: str | None = None,
        assume: Sequence[str] | None = None,
        **rest: Any,
    ) -> "CheckRequest":
        """From the options.

        Raises:
            UsageError: one that makes no sense.
        """
        try:
            words = tuple(shlex.split(arguments)) if arguments is not None else None
        except ValueError as error:
            raise UsageError(f"--args cannot be taken apart: {error}", hint="close every quote") from error
        return cls(sets=parse_sets(sets or ()), arguments=words, versions=parse_versions(assume or ()), **rest)


def checked(
    file: Path,
    gpu: str,
    request: CheckRequest | None = None,
    *,
    memory_gib: float | None = None,
    headroom: float | None = None,
    cluster: Callable[[GpuSpec, ReadConfig], Cluster | None] = lambda card, config: None,
    data: DataOptions = NO_DATA_OPTIONS,
    dry_run: bool = False,
) -> tuple[CheckResult, ModelSpec, Predict]:
    """The answer for one config, with its model and the prediction that it stands on.

    Args:
        cluster: the GPUs of a config with their links.
        data: the samples that it trains on, where they are known.
        dry_run: whether a dry run of the config corrects the formula.

    Raises:
        PlannerError: as `load`; options that make no sense.
    """
    config, spec, card = load(file, gpu, request)
    memory, reserve = memory_and_headroom(card, memory_gib, headroom)
    links, setup = cluster(card, config), config.setup
    stats = read_samples(data, spec, setup) if data.dataset is not None else None
    predicted = predictor(spec, card, links, planned=config.planned)
    if dry_run:
        longest = setup if stats is None else as_long(setup, stats.longest_tokens)
        predicted = corrected(predicted, longest, spec, card, memory, planned=config.planned, cluster=links)
    if stats is None:
        result, own_data = check(config, spec, card, memory - reserve, predicted), data_beside(file, config)
        return replace(result, notes=(*result.notes, own_data)) if own_data else result, spec, predicted
    of_samples = OfSamples(predicted, stats, spec, card, links)
    of_rows = {"samples_per_row": of_samples.per_row(setup), "less_fraction": of_samples.less_fraction(setup)}
    result = check(config, spec, card, memory - reserve, of_samples, **of_rows)
    notes = (measured(of_samples.note(setup, str(data.dataset))), *result.notes)
    return replace(result, notes=notes, longest_tokens=stats.longest_tokens), spec, of_samples


def load(file: Path, gpu: str, request: CheckRequest | None = None) -> tuple[ReadConfig, ModelSpec, GpuSpec]:
    """A config with its model and GPU resolved.

    The file is read twice: once for the model's name, then with the model's modules and data types at hand.

    Raises:
        ConfigError, UnknownModelError, UnknownGpuError: each with a hint.
    """
    request, card = request or CheckRequest(), find_gpu(gpu)
    try:
        return _loaded(file, card, request)
    except PlannerError as error:
        started = file.suffix in (".py", ".ipynb") and not error.message.startswith(file.name)  # a job that it submits
        error.hint = exact(error.hint, Path("FILE") if started else file, card.key, request.arguments or ())
        raise


def _loaded(file: Path, card: GpuSpec, request: CheckRequest) -> tuple[ReadConfig, ModelSpec, GpuSpec]:
    first = determined(_named(_read(file, None, card, request), request.model, file.name))
    if request.strict and first.unknown_keys:
        raise ConfigError(
            f"{file.name}: {first.format} has no setting {', '.join(first.unknown_keys)}",
            hint="remove them, or leave --strict out",
        )
    name = request.model or first.model_id
    assert name is not None
    try:
        built = resolve_model(name, like=request.like or "")
    except UnknownModelError as error:
        named_after = of_folder(name) if request.model is None else None
        if named_after is None:
            error.hint = f"--model MODEL says what lies there; {error.hint}" if request.model is None else error.hint
            raise
        built = named_after
    spec = of_transformers_4(built) if first.older else built
    spec = with_vision(spec) if first.setup.builds_encoders else spec
    config = determined(_read(file, spec, card, request))
    assumptions = [built.taken_as, card.taken_as, *_not_followed(file, spec, card, request, first, config)]
    if built_by_transformers_4(spec):
        assumptions.append(
            f"{first.older}: experts are modules of their own there, which are quantized; no dry run builds them"
        )
    named = any(name in request.versions for name in _DELTA_NAMES) or installs(file, _DELTA_NAMES)
    setup, assumption = with_linear_attention(config, spec, card, named=named)
    config = replace(config, setup=setup)
    assumptions.append(assumption)
    model_id = config.model_id if request.model is None else spec.model_id
    return replace(config, model_id=model_id, assumptions=(*filter(None, assumptions), *config.assumptions)), spec, card


def with_linear_attention(config: ReadConfig, spec: ModelSpec, card: GpuSpec, *, named: bool) -> tuple[TrainSetup, str]:
    """The setup of a config with what computes a hybrid's gated delta rule, and how that is known: the package where
    the config's tool brings it, a requirements file names it, or it is installed here; else transformers' own loop.

    Args:
        named: whether what the run installs names the package.
    """
    setup = config.setup
    if linear_attention_refusal(spec, card):
        return setup, ""
    brought = DELTA in BRINGS.get(setup.stack, ())
    here = all(find_spec(name) is not None for name in ("fla", "triton"))
    if not (brought or named or here):
        return setup, ""
    how = "what it installs names it" if named else "it is installed here"
    how = f"{setup.trainer.title} brings it" if brought else how
    return setup.replace(linear_attention="fla"), f"linear attention by {DELTA}: {how}"


_DELTA_NAMES = (DELTA, "fla-core")


def _without_words(file: Path, spec: ModelSpec, card: GpuSpec, request: CheckRequest) -> tuple[Any, ...] | None:
    """Setup and what is missing without --args; None where it cannot be read so."""
    with suppress(PlannerError):
        bare = _read(file, spec, card, replace(request, arguments=()))
        return bare.setup, bare.missing
    return None


def _not_followed(
    file: Path, spec: ModelSpec, card: GpuSpec, request: CheckRequest, first: ReadConfig, config: ReadConfig
) -> Iterator[str]:
    if request.model is not None and first.model_id not in (None, request.model):
        yield f"planned for {request.model} (--model); the file names {first.model_id}"
    followed = {"trl", "transformers", *_DELTA_NAMES, *TOOLS} - {*LAUNCHERS}
    for package in sorted({*request.versions} - followed):
        yield f"--assume {package}: nothing that is read here hangs on its version"
    if request.arguments and (config.setup, config.missing) == _without_words(file, spec, card, request):
        yield f"--args: {file.name} does not read these words, or they change nothing that is read here"
    num_gpus = config.setup.num_gpus
    if request.num_gpus not in (1, num_gpus) and (num_gpus > 1 or file.suffix != ".ipynb"):  # its reader says that
        yield f"the launch config starts {num_gpus} processes: --gpus {request.num_gpus} is not followed"


def _read(file: Path, spec: ModelSpec | None, card: GpuSpec, request: CheckRequest) -> ReadConfig:
    """The file with what the command line says of it; a model is not asked for where one is named."""
    config = read_config(
        file,
        model=spec,
        num_gpus=request.num_gpus,
        launcher=request.accelerate,
        gpu=card,
        arguments=request.arguments,
        versions=request.versions,
        objective=request.sets.get("objective", ""),
    )
    config = overrides(config, request.sets)
    settled = {"model"} if request.model or config.model_id else set()
    settled |= {"num_gpus"} if request.says_gpus else set()
    settled |= {"parallel"} if request.says_gpus and request.num_gpus == 1 else set()
    return replace(config, missing=tuple(gap for gap in config.missing if gap.field not in settled))


def _named(config: ReadConfig, model: str | None, file: str) -> ReadConfig:
    if model or config.model_id or any(gap.field == "model" for gap in config.missing):
        return config
    return replace(config, missing=(Missing(field="model", reason=f"{file} names none"), *config.missing))


def command_of(model_id: str, setup: TrainSetup, gpu: GpuSpec, limits: Mapping[str, float | None]) -> str:
    """The command that writes launch files of a setup which a file's form does not take.

    Args:
        limits: `memory_gib` and `headroom` as they were given, None: not.
    """
    flags: dict[str, object] = {
        "gpu": gpu.key, "method": setup.method, "seq-len": setup.seq_len_tokens,
        "global-batch": setup.global_batch_seqs,
        **({"gpus": setup.num_gpus} if setup.num_gpus > 1 else {}),
        **({"rank": setup.lora_rank} if setup.lora_rank else {}),
        **({"objective": setup.objective} if setup.objective != "sft" else {}),
        **{name.replace("_", "-"): f"{given:g}" for name, given in limits.items() if given is not None},
    }  # fmt: skip
    words = [
        f"--{name}={value}" if str(value).startswith("-") else f"--{name} {value}" for name, value in flags.items()
    ]
    return f"plan {shlex.quote(model_id)} {' '.join(words)} --out plan"


def predictor(spec: ModelSpec, card: GpuSpec, cluster: Cluster | None = None, *, planned: bool = False) -> Predict:
    """The formula for setups of one model on one card; `planned`: of a plan's own file."""
    return lambda setup: predict_with_padding(spec, card, setup, cluster, planned=planned)


def dry_run_of(
    setup: TrainSetup, formula: Predict, spec: ModelSpec, card: GpuSpec, memory_bytes: int, **options: Any
) -> Prediction | None:
    """The dry run of a setup, with what only the formula says of it; None where none is possible. `options`: as
    `dry_run_setup` is."""
    from finetune_planner.app.levels import dry_run_possible, dry_run_setup  # late: the formula level needs none of it

    if dry_run_possible() or built_by_transformers_4(spec):
        return None
    dry = dry_run_setup(spec, card, setup, memory_bytes=memory_bytes, **options)
    if not isinstance(dry, Prediction):
        return None
    plain = formula(setup)
    # a dry run is more than the formula: where fewer published runs were dry, its band is the formula's
    memory = dry if dry.memory_band_fraction <= plain.memory_band_fraction else plain
    speed = dry if dry.step_time_s else plain
    return replace(
        dry,
        step_time_s=speed.step_time_s,
        tokens_per_s=speed.tokens_per_s,
        time_band_fraction=speed.time_band_fraction,
        terms=dry.terms or plain.terms,
        memory_band_fraction=memory.memory_band_fraction,
        bands={
            **{name: band for name, band in memory.bands.items() if name != "tokens_per_s"},
            **{name: band for name, band in speed.bands.items() if name == "tokens_per_s"},
        },
    )


def corrected(
    formula: Predict, setup: TrainSetup, spec: ModelSpec, card: GpuSpec, memory_bytes: int, **options: Any
) -> Predict:
    """The formula corrected by a dry run of the config: its own figures for the config itself, and for changed setups
    the formula's peak and speed times what the dry run found over them. The formula alone where no dry run is
    possible."""
    dry_run = dry_run_of(setup, formula, spec, card, memory_bytes, **options)
    if dry_run is None:
        return formula
    plain = formula(setup)
    peak_ratio = dry_run.peak_device_bytes / plain.peak_device_bytes
    speed_ratio = (dry_run.tokens_per_s or 1.0) / (plain.tokens_per_s or 1.0)  # a formula without a speed: neither has

    def corrected(changed: TrainSetup) -> Prediction:
        if changed == setup:
            return dry_run
        prediction = formula(changed)
        return replace(
            prediction,
            peak_device_bytes=round(prediction.peak_device_bytes * peak_ratio),
            tokens_per_s=prediction.tokens_per_s and prediction.tokens_per_s * speed_ratio,
            step_time_s=prediction.step_time_s and prediction.step_time_s / speed_ratio,
        )

    return corrected


def as_document(
    result: CheckResult, fixed: dict[str, Any] | None, together: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The JSON form of a check.

    Args:
        together: several changes after which it fits, where no single one is enough.
    """
    config, prediction = result.config, result.prediction
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "check",
        "file": config.path,
        "format": config.format,
        "model": config.model_id,
        "gpu": result.gpu.key,
        "setup": setup_to_dict(config.setup),
        "verdict": result.verdict.value,
        "exit_code": result.exit_code,
        "level": prediction.level.value,
        "speed_level": speed_level(prediction).value,
        "budget_bytes": result.budget_bytes,
        "margin_bytes": result.margin_bytes,
        "memory_band_fraction": result.band_fraction,
        "memory_band": list(result.band),
        "prediction": to_jsonable(prediction),
        "origins": dict(config.origins),
        "unknown_keys": list(config.unknown_keys),
        "assumptions": list(config.assumptions),
        "approximations": list(config.approximations),
        "notes": list(result.notes),
        "changes": [
            {
                "label": change.label,
                "fields": {name: to_jsonable(getattr(change.setup, name)) for name in change.fields},
                "verdict": change.verdict.value,
                "saves_bytes": change.saves_bytes,
                "speedup": change.speedup,
                "changes_training": change.changes_training,
                "in_place": change.in_place,
                "peak_device_bytes": change.prediction.peak_device_bytes,
                "tokens_per_s": change.prediction.tokens_per_s,
            }
            for change in result.changes
        ],
        "together": together,
        "fix": fixed,
    }


ANY = "plan trace -- python FILE"
"""How the readers' hints name it."""


def exact(hint: str, file: Path, card: str, words: Sequence[str] = ()) -> str:
    """A hint whose `plan trace` is the command for this file and card.

    Args:
        words: of the program's command line, as far as they are known.
    """
    traced = f"plan trace --gpu {card} --"
    if file.suffix in SHELL_SUFFIXES:
        return hint.replace(ANY, f"{traced} {shlex.join(['bash', str(file)])}")
    if file.suffix == ".py":
        return hint.replace(ANY, f"{traced} {shlex.join(['python', str(file), *words])}")
    if file.suffix == ".ipynb":
        return hint.replace(ANY, f"{traced} {shlex.quote(str(file))}")
    return hint.replace("plan trace --", traced)
