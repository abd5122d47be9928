"""The formula's memory band is wider where it was seen to err more."""

from planner.calibration_bands import SMALL_MODEL_BAND, USUAL_BAND, WIDE_BAND, memory_band
from planner.models import catalogue
from planner.setup import TrainSetup


def test_band_widens_where_the_comparison_does() -> None:
    llama, small, gpt2 = (
        catalogue.load(name)
        for name in ("meta-llama/llama-3.1-8b", "huggingfacetb/smollm-135m", "openai-community/gpt2-xl")
    )
    assert llama is not None
    assert small is not None
    assert gpt2 is not None
    plain = TrainSetup()
    assert memory_band(llama, plain) == USUAL_BAND
    assert memory_band(small, plain) == SMALL_MODEL_BAND
    assert memory_band(gpt2, plain) == WIDE_BAND
    assert memory_band(llama, plain.with_(lora_dropout=0.1)) == WIDE_BAND
    assert memory_band(llama, TrainSetup(method="qlora", quantization="int8")) == WIDE_BAND
    assert USUAL_BAND < SMALL_MODEL_BAND < WIDE_BAND
