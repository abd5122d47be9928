"""Inside the trainer: the prediction before the first step, a receipt after the last.

    from finetune_planner.callback import PlanCallback

    trainer = SFTTrainer(..., callbacks=[PlanCallback()])       # transformers' Trainer and TRL's alike

Before the first step it says what `plan check` says of this very run (model, arguments, adapters, quantization as they
lie in memory, written as a program and read like any other) beside what the card has, and warns where that is more.
After training it says what was taken, and keeps it in the store, where later plans of this card find it.
"""

import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from planner.core.errors import PlannerError, UsageError
from planner.core.units import gib
from planner.frameworks.exporters.text import Code, Line, call
from planner.models.config_file import read_config
from planner.planning.check import CheckResult, Verdict
from planner.setup.codec import decode
from planner.setup.outcome import Measurement
from probes.launched.watch import memory_seen, step_times

TIMED_STEPS = 12
"""Steps whose times are taken, each with a wait for the device; those after it are left alone."""
LOOKED_AT_ROWS = 256
FILE = "train.py"


class PredictedOutOfMemory(UserWarning):
    """The run is predicted to need more memory than the card has."""


class PlanCallback(TrainerCallback):  # type: ignore[misc]
    """Prediction and receipt of a run on one GPU.

    Attributes (after the event that makes them, else None):
        checked: what was predicted; measured: what was taken.

    Args:
        gpu: its card by name; None: what the driver says. On the CPU a rehearsal for that card.
        seq_len: tokens per sequence, where neither the arguments nor the tokenized data set tell.
        stop: raise UsageError before the first step where it is predicted not to fit, instead of a warning.
        store: where the receipt is kept; None: the user's store, False: nowhere.
        report_to: "wandb", "trackio": also there, in the run that the trainer opened.
    """

    def __init__(
        self,
        gpu: str | None = None,
        *,
        seq_len: int | None = None,
        stop: bool = False,
        store: str | Path | bool | None = None,
        report_to: Iterable[str] = (),
    ) -> None:
        self._gpu, self._seq_len, self._stop, self._store = gpu, seq_len, stop, store
        self._report_to = (report_to,) if isinstance(report_to, str) else tuple(report_to)
        self.checked: CheckResult | None = None
        self.measured: Measurement | None = None
        self._config: Mapping[str, Any] = {}
        self._model_id = ""
        self._tokens_before = 0
        self._began: list[float] = []
        self._ended: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began, self._ended, self._tokens_before = [], [], state.num_input_tokens_seen
        if not state.is_world_process_zero:
            return
        if args.include_num_input_tokens_seen == "no":
            args.include_num_input_tokens_seen = "all"  # whether sequences had the length that was predicted for
        self.checked = None
        with _harmless("nothing is predicted"):
            self._predict(args, kwargs["model"], kwargs.get("train_dataloader"))
        if self.checked is None:
            return
        result = self.checked
        _tell(_words(result))
        if result.verdict is Verdict.DOES_NOT_FIT:
            enough = [change.label for change in result.changes if change.verdict is Verdict.FITS]
            best = f"would fit: {enough[0]}" if enough else "no single change makes it fit"
            if self._stop:
                raise UsageError(_words(result), hint=best)
            warnings.warn(PredictedOutOfMemory(f"{_words(result)}; {best}"), stacklevel=2)
        speed = {"predicted_tokens_per_s": result.prediction.tokens_per_s}
        with _harmless("nothing is reported"):
            self._report({"predicted_peak_device_bytes": result.prediction.peak_device_bytes, **speed})

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if len(self._began) < TIMED_STEPS:
            self._began.append(time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if len(self._ended) < len(self._began):
            torch = sys.modules["torch"]
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self._ended.append(time.perf_counter())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        from probes.launched.run import WARM_UP_STEPS

        if self.checked is None or len(self._ended) <= WARM_UP_STEPS:
            return
        with _harmless("no receipt is kept"):
            self._keep(args, state)

    def _predict(self, args: Any, model: Any, loader: Any) -> None:
        from finetune_planner.cli.checking import CheckRequest, checked

        if args.world_size > 1 or args.n_gpu > 1:
            raise UsageError("several GPUs", hint="plan check FILE --gpus N")
        sets = []
        if getattr(args, "max_length", None) is None:
            tokens = self._seq_len or _longest(getattr(loader, "dataset", None))
            sets = [f"seq_len={tokens}"] if tokens else []
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            model.config.save_pretrained(place / "model")
            self._config = read_config(place / "model" / "config.json")
            self._model_id = str(getattr(model.config, "_name_or_path", "") or model.config.model_type)
            (place / FILE).write_text(program(args, model, self._model_id), encoding="utf-8")
            request = CheckRequest.of(sets=sets, model=str(place / "model"))
            self.checked = checked(place / FILE, self._gpu or "local", request)[0]

    def _keep(self, args: Any, state: Any) -> None:
        from finetune_planner.app.machine import open_store
        from probes.gpu.evaluate import record_of
        from probes.gpu.request import ProbeRequest
        from probes.launched.run import LaunchedFile, Seen, measurement

        assert self.checked is not None
        setup = self.checked.config.setup
        target = "trl" if _library_class(args).__module__.startswith("trl.") else "hf"
        taken = memory_seen()
        request = ProbeRequest(
            model_id=self._model_id,
            config=self._config,
            setup=setup,
            device=taken["device"],
            depths=(0,),
            gpu_key=self.checked.gpu.key if taken["device"] != "cpu" else None,
        )
        file = LaunchedFile(
            target=target,
            command=f"python {FILE}",
            files={},
            model_name=self._model_id,
            dataset_names=(),
            model_here=True,
            data_here=True,
        )
        times = step_times(self._began, self._ended)
        seen = decode(Seen, {**times, "loaded_bytes": 0, **taken}, "the run")
        self.measured = replace(measurement(file, request, seen, None), device_peak_is_nvml=False)
        steps = max(1, state.global_step)
        fraction = (state.num_input_tokens_seen - self._tokens_before) / (steps * setup.tokens_per_step)
        speed = fraction * self.measured.tokens_per_step / self.measured.step_time_s
        predicted = self.checked.prediction
        store_note = ""
        if self._store is not False and fraction == 1:
            path = Path(self._store) if isinstance(self._store, (str, Path)) else None
            here = self.measured.environment
            store_note = f"; kept in {open_store(path).append(record_of(request, here, self.measured))}"
        elif fraction != 1:
            store_note = f"; not kept: its sequences held {fraction:.0%} of the tokens that were predicted for"
        _tell(
            f"taken: {gib(self.measured.peak_device_bytes)} (predicted {gib(predicted.peak_device_bytes)}), "
            f"{speed:,.0f} tokens/s (predicted {predicted.tokens_per_s or 0:,.0f}){store_note}"
        )
        self._report({"measured_peak_device_bytes": self.measured.peak_device_bytes, "measured_tokens_per_s": speed})

    def _report(self, figures: Mapping[str, float | None]) -> None:
        named = {f"plan/{name}": value for name, value in figures.items() if value is not None}
        for tool in self._report_to:
            module = sys.modules.get(tool)
            if tool == "wandb" and module is not None and module.run is not None:
                module.run.summary.update(named)
            elif tool == "trackio" and module is not None:
                module.log(named)
            else:
                _tell(f"{tool} has no open run: report_to of the training arguments opens one")


@contextmanager
def _harmless(otherwise: str) -> Iterator[None]:
    """Whatever goes wrong within is said, and the training goes on."""
    try:
        yield
    except PlannerError as error:
        _tell(f"{otherwise}: {error.message} ({error.hint})")
    except Exception as error:  # a fault of ours, or of a tool that is reported to, is no reason to end somebody's run
        _tell(f"{otherwise}: an internal error, {type(error).__name__}: {error}"[:500])


def program(args: Any, model: Any, model_id: str) -> str:
    """The run as a program: the calls that would make its model, adapters and arguments."""
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    quantization = _plain_fields(getattr(inner.config, "quantization_config", None), "load_in", "bnb_4bit")
    weights = inner.config.dtype if quantization else next(inner.parameters()).dtype
    lines = [
        Line("dtype", Code(str(weights))),
        Line("attn_implementation", inner.config._attn_implementation),
        Line("quantization_config", Code("quantization")) if quantization else None,
    ]
    kind = "SequenceClassification" if type(inner).__name__.endswith("SequenceClassification") else "CausalLM"
    parts = ["import torch\n"]
    parts.append(f"from transformers import AutoModelFor{kind}, BitsAndBytesConfig, Trainer, TrainingArguments\n")
    if quantization:
        parts.append(call("quantization", "BitsAndBytesConfig", _lines(quantization)))
    parts.append(call("model", f"AutoModelFor{kind}.from_pretrained", lines, first=repr(model_id)))
    if hasattr(model, "peft_config"):
        adapter = next(iter(model.peft_config.values()))
        settings = _plain_fields(adapter, "r", "lora_", "target_modules", "use_", "init_lora", "modules_to_save")
        parts[1] += f"from peft import {type(adapter).__name__}, get_peft_model\n"
        parts.append(call("adapter", type(adapter).__name__, _lines(settings)))
        parts.append("model = get_peft_model(model, adapter)\n")
    class_name = _library_class(args).__name__
    trainer = f"{class_name.removesuffix('Config')}Trainer" if class_name.endswith("Config") else "Trainer"
    if class_name.endswith("Config"):
        parts[1] += f"from trl import {class_name}, {trainer}\n"
    # what is not its default, of plain values; what is asked is a card's, also of a run that is rehearsed on the CPU
    arguments = {}
    for field in fields(args):
        default = field.default if field.default is not MISSING else None
        value = getattr(args, field.name, None)
        value = getattr(value, "value", value)  # of an enumeration
        if field.init and value != default and _is_plain(value) and field.name not in ("use_cpu", "no_cuda"):
            arguments[field.name] = value
    parts.append(call("arguments", class_name, _lines(arguments)))
    parts.append(f"trainer = {trainer}(model=model, args=arguments, train_dataset=rows)\ntrainer.train()\n")
    return "".join(parts)


def _library_class(args: Any) -> type:
    """The library's own class of these arguments, also of a program's subclass."""
    return next(base for base in type(args).__mro__ if base.__module__.startswith(("trl.", "transformers.")))


def _plain_fields(settings: Any, *begins: str) -> dict[str, Any]:
    if settings is None:
        return {}
    values = settings if isinstance(settings, dict) else settings.to_dict()
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in values.items()}
    return {name: value for name, value in plain.items() if name.startswith(begins) and value and _is_plain(value)}


def _lines(values: Mapping[str, Any]) -> list[Line]:
    return [Line(name, value) for name, value in values.items()]


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (bool, int, float, str))


def _longest(dataset: Any) -> int:
    try:
        rows = [dataset[place] for place in range(min(LOOKED_AT_ROWS, len(dataset)))]
        return max((len(row["input_ids"]) for row in rows), default=0)
    except (KeyError, TypeError, IndexError):
        return 0


def _words(result: CheckResult) -> str:
    peak, speed = gib(result.prediction.peak_device_bytes), result.prediction.tokens_per_s
    verdict = str(result.verdict.value).replace("_", " ")
    fast = f", about {speed:,.0f} tokens/s" if speed else ""
    budget = f"{gib(result.budget_bytes)} of {result.gpu.name}"
    return f"{verdict}: {peak} (±{result.band_fraction:.0%}) of the {budget}{fast}"


def _tell(words: str) -> None:
    print(f"finetune-planner: {words}", file=sys.stderr)
