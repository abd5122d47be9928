"""`plan check --dataset`: a file on its own samples, which are seldom as long as it cuts them: how long its
micro-batches get, and what padding and short rows leave of its speed."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from os.path import isfile  # Path.is_file raises where a folder is closed to this user, or a name too long
from pathlib import Path

from finetune_planner.cli.answer import data_of, read_data
from finetune_planner.cli.request_options import DataOptions
from planner.core.errors import ConfigError, UsageError
from planner.core.inputs import parse_json
from planner.core.units import percent, seconds
from planner.frameworks.readers import ReadConfig
from planner.frameworks.readers.loading import read_bounded
from planner.hardware.cluster import Cluster
from planner.hardware.gpu import GpuSpec
from planner.memory.workload import Workload
from planner.models.encoders import image_tokens
from planner.models.spec import ModelSpec
from planner.planning.single_changes import Predict
from planner.planning.useful import useful_fraction
from planner.samples.dataset import COUNTED, DatasetStats, choose_length
from planner.samples.lengths import PAD_TO
from planner.setup import TrainSetup
from planner.setup.outcome import Prediction


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
