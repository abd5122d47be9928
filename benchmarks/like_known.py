"""`--like` against the truth: the catalogue's models of other types, read as if nobody knew them.

    python -m benchmarks.like_known

Each model whose sizes `--like` can read, with LoRA checkpointed and not and with full fine-tuning: parameters, peak and
step time by its adapter over those by its sizes alone, less 1. `planner.planning.evidence.bands.LIKE_BANDS` are the
worst.
"""

from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from planner.hardware.gpus import find_gpu
from planner.memory.attention_kernels import default_attention
from planner.models import catalogue
from planner.models.families import alike
from planner.models.families.fields import Fields
from planner.models.spec import ModelSpec
from planner.planning.predict import predict
from planner.setup import TrainSetup

CARD = "h200"
LORA = TrainSetup(method="lora", lora_rank=16, micro_batch_seqs=2, seq_len_tokens=2048, checkpointing=1)
SETUPS = {
    "LoRA": LORA,
    "LoRA, no checkpointing": LORA.replace(checkpointing=0),
    "full": LORA.replace(method="full", lora_rank=0, precision="bf16-mixed", micro_batch_seqs=1),
}


def pairs() -> Iterator[tuple[ModelSpec, ModelSpec]]:
    """(a model by its sizes alone, the same by its adapter)."""
    for entry in catalogue.entries():
        fields = Fields(entry.config, "config.json")
        kind = "" if entry.model_type in ("llama", "t5", "whisper") else alike.kind_of(fields)
        adapted = catalogue.load(entry.model_id)
        if (
            kind
            and adapted is not None
            and not adapted.reads_both_ways
            and not {"vision_config", "audio_config"} & set(entry.config)
        ):
            read = alike.build(fields, kind)
            yield replace(read, model_id=adapted.model_id, model_type="unknown", config=adapted.config), adapted


def errors(read: ModelSpec, adapted: ModelSpec) -> Iterator[tuple[str, float, float]]:
    """(setup, error of the peak, error of the step time) of every setup."""
    card = find_gpu(CARD)
    for name, setup in SETUPS.items():
        by_sizes, true = (
            predict(spec, card, setup.replace(attention=default_attention(spec))) for spec in (read, adapted)
        )
        assert by_sizes.step_time_s
        assert true.step_time_s
        yield name, true.peak_device_bytes / by_sizes.peak_device_bytes - 1, true.step_time_s / by_sizes.step_time_s - 1


def main() -> None:
    for kind in alike.KINDS:
        of_kind = [(read, adapted) for read, adapted in pairs() if read.like == kind]
        print(f"--like {kind}: {len(of_kind)} models of {len({adapted.model_type for _, adapted in of_kind})} types")
        params = [abs(adapted.num_params / read.num_params - 1) for read, adapted in of_kind]
        print(f"  parameters: median {median(params):.1%}, worst {max(params):.1%}")
        rows = [row for pair in of_kind for row in errors(*pair)]
        for name in SETUPS:
            for what, place in (("peak", 1), ("step time", 2)):
                deviations = sorted(float(row[place]) for row in rows if row[0] == name)
                middle = median(map(abs, deviations))
                print(f"  {name}: {what} median {middle:.1%}, from {deviations[0]:+.1%} to {deviations[-1]:+.1%}")


if __name__ == "__main__":
    main()
