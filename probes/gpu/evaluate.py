"""`Prober`: `evaluate(setup) -> Measurement | ProbeFailure` for a search. With a store nothing is measured twice."""

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

from planner.core.errors import EnvironmentProblem
from planner.core.units import seconds
from planner.hardware.gpu import GpuSpec
from planner.models.spec import ModelSpec
from planner.setup import LAYOUT_FIELDS, TrainSetup
from planner.setup.codec import Outcome
from planner.setup.interchange import setup_from_dict, setup_to_dict
from planner.setup.outcome import Environment, FailureKind, Fidelity, Measurement, ProbeFailure
from probes.fingerprint import conditions_digest, config_digest, fingerprint
from probes.gpu.executors import Executor
from probes.gpu.request import Limits, ProbeRequest
from probes.store import Record, Store, now_text


@dataclass(kw_only=True)
class Prober:
    """Measures setups of one model on one device; callable, as the search wants it.

    Attributes:
        gpu: row of the GPU table the device belongs to (model FLOPs utilisation); None on the CPU.
        depths: () truncated, (0,) full depth.
        ends_at: of `time.monotonic`, when the last probe has to be over.
        least_s: the seconds that a setup's probe takes at least: one that cannot end in time is not begun.
        link: key of the one between the GPUs of a job on several, for the record.
    """

    model: ModelSpec
    gpu: GpuSpec | None
    executor: Executor
    store: Store | None
    device: str = "cuda:0"
    limits: Limits = field(default_factory=Limits)
    depths: tuple[int, ...] = ()
    level: Fidelity = Fidelity.PROBE
    ends_at: float = math.inf
    least_s: Callable[[TrainSetup], float] = lambda setup: 0.0
    link: str = ""

    @cached_property
    def environment(self) -> Environment:
        return self.executor.environment(self.device, self.gpu.key if self.gpu is not None else None)

    def request(self, setup: TrainSetup) -> ProbeRequest:
        return ProbeRequest(
            model_id=self.model.model_id,
            config=self.model.config,
            setup=setup,
            device=self.device,
            level=self.level,
            depths=self.depths,
            limits=self.limits,
            gpu_key=self.gpu.key if self.gpu is not None else None,
        )

    def refused(self, setup: TrainSetup) -> ProbeFailure | None:
        """Why no engine runs this setup on several GPUs, as an outcome; None where one does."""
        if setup.num_gpus == 1:
            return None
        from planner.memory.engines import why_not

        reason = why_not(self.model, setup)
        return ProbeFailure(level=self.level, kind=FailureKind.UNSUPPORTED, message=reason) if reason else None

    def conditions(self, setup: TrainSetup) -> str:
        """What else keeps a measurement of such a setup apart from others, as digits."""
        return conditions_digest(self.request(setup), self.environment)

    def stored(self, setup: TrainSetup) -> Outcome | None:
        """The outcome that the store already has."""
        if self.store is None:
            return None
        record = self.store.reusable(fingerprint(self.request(setup), self.environment), time_s=self.limits.time_s)
        return record.outcome if record is not None else None

    def __call__(self, setup: TrainSetup) -> Outcome | str:
        """The outcome of one setup, measured now if the store does not know it; in words why the time that is left does
        not hold its probe, which is then not begun, or left to the executor's end."""
        stored = self.stored(setup)
        if stored is not None:
            return stored
        left_s = self.ends_at - time.monotonic()
        least_s = self.least_s(setup) if math.isfinite(left_s) else 0.0
        if left_s <= least_s:
            left = f"{seconds(max(0.0, left_s))} of the budget are left"
            return f"a probe takes {seconds(least_s)} here at least, {left}" if least_s else left
        future = self.submit(setup)
        # A wait without a limit cannot be interrupted by Ctrl-C on every platform.
        while not future.done():
            if time.monotonic() >= self.ends_at:
                return f"the budget ended in a probe, {seconds(left_s)} after its start"
            wait((future,), timeout=min(1.0, max(0.01, self.ends_at - time.monotonic())))
        return self.finish(setup, future)

    def submit(self, setup: TrainSetup) -> "Future[Outcome]":
        """Starts measuring one setup; hand the future to `finish`."""
        refused = self.refused(setup)
        if refused is not None:
            answered: Future[Outcome] = Future()
            answered.set_result(refused)
            return answered
        return self.executor.submit(self.request(setup))

    def finish(self, setup: TrainSetup, future: "Future[Outcome]") -> Outcome:
        """The outcome of a finished future: completed and stored.

        Raises:
            EnvironmentProblem: the machine, not the setup, kept it from being measured: nothing is stored.
        """
        outcome = future.result()
        gpu = self.gpu if isinstance(outcome, Measurement) and outcome.environment.device != "cpu" else None
        if isinstance(outcome, Measurement) and gpu is not None and not outcome.speed_spoiled_by:
            outcome = replace(outcome, mfu_fraction=mfu_fraction(self.model, gpu, setup, outcome.step_time_s))
        if isinstance(outcome, ProbeFailure) and outcome.kind is FailureKind.MACHINE:
            log = f" (log: {outcome.log_path})" if outcome.log_path else ""
            raise EnvironmentProblem(f"this machine cannot measure: {outcome.message}{log}")
        self.remember(setup, outcome)
        return outcome

    def remember(self, setup: TrainSetup, outcome: Outcome) -> None:
        """Stores an outcome, where there is a store. What was refused before anything ran (it has no log) is answered
        at once anyway, and may change with the machine."""
        refused = isinstance(outcome, ProbeFailure) and outcome.kind is FailureKind.UNSUPPORTED and not outcome.log_path
        if self.store is not None and not refused:
            self.store.append(record_of(self.request(setup), self.environment, outcome, self.link))


def mfu_fraction(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup, step_time_s: float) -> float | None:
    """Model FLOPs utilisation: needed operations (recomputation not counted) over time and the data sheet's rate. Of a
    job on several GPUs that of one copy of the model, which is that of the job.

    Source: Chowdhery et al. 2022, PaLM, appendix B, https://arxiv.org/abs/2204.02311.
    """
    from planner.speed.roofline import throughput_profile

    nominal: float | None = getattr(gpu, f"{setup.compute_dtype}_flops_per_s")
    if not nominal or step_time_s <= 0 or setup.num_gpus > setup.data_degree:
        return None
    profile = throughput_profile(model, gpu, one_copy(setup))
    return profile.flops(setup.micro_batch_seqs, setup.accumulation_steps) / step_time_s / nominal


def one_copy(setup: TrainSetup) -> TrainSetup:
    """What each GPU of a data-parallel job trains, as a setup of its own."""
    if setup.num_gpus == 1:
        return setup
    job = ("num_gpus", "parallel", *LAYOUT_FIELDS)
    return setup_from_dict({name: value for name, value in setup_to_dict(setup).items() if name not in job})


def record_of(request: ProbeRequest, environment: Environment, outcome: Outcome, link: str = "") -> Record:
    return Record(
        key=fingerprint(request, environment),
        model_id=request.model_id,
        config_digest=config_digest(request.config),
        setup=setup_to_dict(request.setup),
        request={
            "level": request.level.value,
            "depths": list(request.depths),
            "limits": asdict(request.limits),
            "gpu_key": request.gpu_key,
            "gpu_name": environment.gpu_name,
            "link": link,
        },
        outcome=outcome,
        recorded_at=now_text(),
    )


def out_of_memory(outcome: Outcome) -> bool:
    """Whether more memory than there is was needed, really or by extension to the full depth."""
    if isinstance(outcome, ProbeFailure):
        return outcome.kind is FailureKind.OUT_OF_MEMORY
    return "beyond-device" in outcome.flags
