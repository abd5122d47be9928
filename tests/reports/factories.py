"""Plans made by hand for the report tests. Figures are plausible, not measured: these tests are about rendering."""

from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from itertools import product
from typing import Any

from rich.console import Console

from planner.core.units import GIB, MIB
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
from planner.memory.workload import Workload
from planner.models.catalogue import load
from planner.models.spec import ModelSpec
from planner.planning.plan import Alternative, Answer, NoPlan, Plan, PrunedBranch, SpaceCount, Suggestion
from planner.planning.trace_result import TraceResult
from planner.setup import TrainSetup
from planner.setup.memory_terms import PHASES, MemoryTerm
from planner.setup.outcome import Candidate, Environment, FailureKind, Fidelity, Measurement, Prediction, ProbeFailure


def printed(render: Callable[[Console], object], width: int = 80, **options: Any) -> str:
    """What a function writes on a console."""
    stream = StringIO()
    render(Console(file=stream, width=width, **options))
    return stream.getvalue()


def make_gpu(key: str = "rtx-4090", name: str = "RTX 4090", memory_gib: float = 23.51, **changes: Any) -> GpuSpec:
    names = {"key": key, "name": name, "memory_basis": "test", "source": "test"}
    return replace(find_gpu("rtx-4090"), memory_bytes=int(memory_gib * GIB), **{**names, **changes})


def make_model(model_id: str = "Qwen/Qwen2.5-7B") -> ModelSpec:
    """Qwen2.5-7B's shape: 7,615,616,512 parameters at 28 layers."""
    spec = load("Qwen/Qwen2.5-7B")
    return replace(spec, model_id=model_id, config={"model_type": "qwen2"}, config_source="catalogue")


def make_workload(**changes: Any) -> Workload:
    gpu = changes.pop("gpu", None) or make_gpu()
    values: dict[str, Any] = {
        "model": changes.pop("model", None) or make_model(),
        "gpu": gpu,
        "memory_bytes": gpu.memory_bytes,
        "headroom_bytes": GIB,
        "seq_len_tokens": 2048,
        "global_batch_seqs": 16,
        "min_rank": 16,
        "min_rank_reason": "the default where the data set is unknown",
    }
    return Workload(**{**values, **changes})


def make_terms(setup: TrainSetup, scale: float = 1.0) -> tuple[MemoryTerm, ...]:
    """Terms that grow with micro-batch, sequence length and rank, and shrink with quantization."""
    tokens, rank = setup.tokens_per_micro_batch, setup.lora_rank
    weights = {"full": 14.19, "lora": 14.19, "qlora": 5.43}[setup.method]
    trained = 7.6e9 if setup.method == "full" else rank * 2.5e6
    terms = [
        MemoryTerm(category="weights", name="base weights", size_bytes=int(weights * GIB)),
        MemoryTerm(category="gradients", name="gradients", size_bytes=int(trained * 4), phases=("backward", "step")),
        MemoryTerm(category="optimizer", name="optimizer state", size_bytes=int(trained * 2)),
        MemoryTerm(
            category="activations",
            name="stored layer inputs" if setup.checkpointing else "layer activations",
            size_bytes=int(tokens * (0.6 if setup.checkpointing else 1.9) * MIB * scale),
            phases=("forward", "loss", "backward"),
        ),
        MemoryTerm(
            category="loss", name="logits chunk", size_bytes=int(tokens * 0.19 * MIB), phases=("loss", "backward")
        ),
        MemoryTerm(category="workspace", name="cuBLAS workspace", size_bytes=8 * MIB + 512),
    ]
    if setup.method != "full":
        terms.append(MemoryTerm(category="adapters", name="LoRA matrices", size_bytes=int(trained * 4)))
    if setup.quantized:
        terms.append(
            MemoryTerm(
                category="dequantization",
                name="dequantized matrix",
                size_bytes=130 * MIB,
                phases=("forward", "backward"),
            )
        )
    return tuple(sorted(terms, key=lambda term: -term.size_bytes))


def make_prediction(
    setup: TrainSetup, level: Fidelity = Fidelity.FORMULA, *, scale: float = 1.0, **changes: Any
) -> Prediction:
    terms = make_terms(setup, scale)
    phase_peaks = {phase: sum(term.size_bytes for term in terms if phase in term.phases) for phase in PHASES}
    peak_phase = max(PHASES, key=lambda phase: phase_peaks[phase])
    at_peak = tuple(term for term in terms if peak_phase in term.phases)
    allocated = phase_peaks[peak_phase]
    speed = 3100.0 * (1 - 0.5 / setup.micro_batch_seqs) * (0.75 if setup.checkpointing else 1.0) - setup.lora_rank
    known_speed = level is Fidelity.FORMULA
    values: dict[str, Any] = {
        "level": level,
        "peak_allocated_bytes": allocated,
        "peak_reserved_bytes": allocated + 412 * MIB,
        "peak_device_bytes": allocated + 412 * MIB + 430 * MIB,
        "peak_phase": peak_phase,
        "phase_peaks_bytes": phase_peaks,
        "terms": at_peak,
        "memory_band_fraction": 0.08 if level is Fidelity.FORMULA else 0.015,
        "step_time_s": setup.tokens_per_step / speed if known_speed else None,
        "tokens_per_s": speed if known_speed else None,
        "time_band_fraction": 0.2 if known_speed else None,
        "mfu_fraction": 0.43 if known_speed else None,
        "time_parts_s": {"matmul": 9.1, "attention": 1.2, "optimizer": 0.1} if known_speed else {},
    }
    return Prediction(**{**values, **changes})


def make_environment() -> Environment:
    return Environment(
        gpu_name="NVIDIA GeForce RTX 4090",
        gpu_key="rtx-4090",
        driver="580.65.06",
        cuda="13.0",
        python="3.11.2",
        platform="Linux-6.1-x86_64",
        libraries={"torch": "2.13.0", "transformers": "5.23.0", "peft": "0.21.0"},
        power_limit_w=450.0,
    )


def make_measurement(setup: TrainSetup, prediction: Prediction, **changes: Any) -> Measurement:
    values: dict[str, Any] = {
        "level": Fidelity.PROBE,
        "peak_allocated_bytes": int(prediction.peak_allocated_bytes * 0.996),
        "peak_reserved_bytes": int(prediction.peak_reserved_bytes * 1.01),
        "peak_device_bytes": int(prediction.peak_device_bytes * 1.008),
        "phase_peaks_bytes": dict(prediction.phase_peaks_bytes),
        "step_times_s": (14.31, 14.22, 14.26),
        "tokens_per_step": setup.tokens_per_step,
        "layers_measured": (2, 4),
        "environment": make_environment(),
        "extrapolation_error_fraction": 0.004,
        "mfu_fraction": 0.41,
    }
    return Measurement(**{**values, **changes})


def make_trace(**changes: Any) -> TraceResult:
    """Two steps that took 5 GiB."""
    values: dict[str, Any] = {
        "status": "done", "num_steps": 2, "num_events": 9, "peak_allocated_bytes": 5 * GIB,
        "peak_reserved_bytes": 5 * GIB, "context_bytes": GIB // 2, "peak_phase": "backward",
        "phase_peaks_bytes": {"forward": 4 * GIB, "backward": 5 * GIB}, "refusal": None, "kernels": {}, "libraries": {},
        **dict.fromkeys(
            ("by_category", "by_module", "by_line", "by_code", "by_op", "notes", "questions", "timeline"), ()
        ),
    }  # fmt: skip
    return TraceResult(**{**values, **changes})


def make_setup(**changes: Any) -> TrainSetup:
    values: dict[str, Any] = {
        "method": "qlora",
        "quantization": "nf4-double",
        "lora_rank": 64,
        "optimizer": "paged-adamw-8bit",
        "loss": "chunked",
        "micro_batch_seqs": 4,
        "accumulation_steps": 4,
    }
    return TrainSetup(**{**values, **changes})


def make_candidate(
    setup: TrainSetup | None = None, workload: Workload | None = None, *, level: Fidelity = Fidelity.FORMULA
) -> Candidate:
    """A candidate known up to `level`."""
    setup, workload = setup or make_setup(), workload or make_workload()
    formula = make_prediction(setup)
    dry_run = make_prediction(setup, Fidelity.DRY_RUN, scale=1.03) if level is not Fidelity.FORMULA else None
    probe = make_measurement(setup, dry_run) if dry_run is not None and level is Fidelity.PROBE else None
    return Candidate(setup=setup, budget_bytes=workload.budget_bytes, formula=formula, dry_run=dry_run, probe=probe)


def make_failed_dry_run() -> ProbeFailure:
    return ProbeFailure(
        level=Fidelity.DRY_RUN, kind=FailureKind.UNSUPPORTED, message="aten::_grouped_mm has no meta kernel for bf16"
    )


def make_walk(budget_bytes: int) -> tuple[Answer, ...]:
    return (
        Answer(
            question="Does full fine-tuning fit with one sequence?",
            choice="no",
            reason="Weights, gradients and optimizer states alone need 5 copies of 14.19 GiB.",
            needed_bytes=int(71.4 * GIB),
            budget_bytes=budget_bytes,
            cuts=(
                PrunedBranch(
                    branch="full fine-tuning",
                    reason="the smallest setup does not fit",
                    num_setups=2304,
                    needed_bytes=int(43.1 * GIB),
                    budget_bytes=budget_bytes,
                ),
            ),
        ),
        Answer(
            question="Does LoRA on 16-bit weights fit with one sequence?",
            choice="yes",
            reason="The frozen weights take 14.19 GiB and leave room for activations of one sequence.",
            needed_bytes=int(17.9 * GIB),
            budget_bytes=budget_bytes,
        ),
        Answer(
            question="Is a quantized base faster as a whole?",
            choice="QLoRA",
            reason="It frees 8.76 GiB: the micro-batch goes from 2 to 4, and the whole is 12 % faster.",
            cuts=(PrunedBranch(branch="LoRA, micro-batch above 2", reason="does not fit", num_setups=310),),
        ),
    )


def make_plan(workload: Workload | None = None, *, level: Fidelity = Fidelity.FORMULA, **changes: Any) -> Plan:
    workload = workload or make_workload()
    chosen = make_candidate(make_setup(), workload, level=level)
    lora = make_setup(method="lora", quantization="none", micro_batch_seqs=2, accumulation_steps=8)
    setups = (
        ("next rank up", make_setup(lora_rank=128), "rank 128 for 64 tokens/s"),
        ("next rank down", make_setup(lora_rank=32), "32 tokens/s more, half the adapter's capacity"),
        ("LoRA", lora, "no quantization error, but 16-bit weights leave less room"),
        ("largest batch", make_setup(micro_batch_seqs=8, accumulation_steps=2), "146 tokens/s more, 6.32 GiB more"),
    )
    alternatives = tuple(
        Alternative(label=label, candidate=make_candidate(setup, workload), trade=trade)
        for label, setup, trade in setups
    )
    ranked = tuple(
        sorted(
            (chosen, *(alternative.candidate for alternative in alternatives if alternative.candidate.fits)),
            key=lambda c: -c.tokens_per_s,
        )
    )
    values: dict[str, Any] = {
        "workload": workload,
        "chosen": chosen,
        "alternatives": alternatives,
        "ranked": ranked,
        "tree": make_walk(workload.budget_bytes),
        "space": SpaceCount(walked=12480, infeasible=9120, impossible=340),
        "notes": ("bf16 LoRA would need 2.1 GiB less than QLoRA with the fp32 cast.",),
    }
    return Plan(**{**values, **changes})


def make_no_plan() -> NoPlan:
    gpu = make_gpu("t4", "T4", 14.56, bf16_flops_per_s=None, flash_attention_2=False)
    workload = make_workload(gpu=gpu, model=make_model("Qwen/Qwen2.5-14B"), seq_len_tokens=8192)
    setup = make_setup(seq_len_tokens=8192, micro_batch_seqs=2, precision="fp16-autocast", accumulation_steps=8)
    nearest = make_candidate(setup, workload)
    return NoPlan(
        workload=workload,
        nearest=nearest,
        missing_bytes=nearest.memory_evidence.peak_device_bytes - workload.budget_bytes,
        suggestions=(
            Suggestion(action="--seq-len 4096", saves_bytes=int(3.1 * GIB), fits=False),
            Suggestion(action="--seq-len 2048", saves_bytes=int(6.4 * GIB), fits=True),
            Suggestion(action="--gpu rtx-3090 (23.56 GiB)", saves_bytes=int(9 * GIB), fits=True),
        ),
        tree=make_walk(workload.budget_bytes)[:1],
        space=SpaceCount(walked=12480, infeasible=12480, impossible=340),
    )


def make_many(num_candidates: int) -> Plan:
    """A plan with `num_candidates` different ranked candidates, the chosen one and alternatives among them."""
    workload = make_workload(global_batch_seqs=64)
    plan = make_plan(workload)
    seen = {
        plan.chosen.setup: plan.chosen,
        **{alternative.candidate.setup: alternative.candidate for alternative in plan.alternatives},
    }
    grid = product(
        range(8, 8 * 40, 8),
        (1, 2, 4, 8, 16),
        ("paged-adamw-8bit", "adamw-fused", "adamw-8bit", "sgd"),
        (("qlora", "nf4-double"), ("qlora", "nf4"), ("lora", "none")),
        (1, 0),
    )
    for rank, micro_batch, optimizer, (method, quantization), checkpointing in grid:
        if len(seen) == num_candidates:
            break
        setup = make_setup(
            lora_rank=rank,
            micro_batch_seqs=micro_batch,
            accumulation_steps=64 // micro_batch,
            optimizer=optimizer,
            method=method,
            quantization=quantization,
            checkpointing=checkpointing,
        )
        if setup not in seen:
            seen[setup] = make_candidate(setup, workload)
    assert len(seen) == num_candidates
    return make_plan(workload, ranked=tuple(seen.values()))
