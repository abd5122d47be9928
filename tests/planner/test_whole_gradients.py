"""FSDP2 with accumulation: the launch files ask for gradients that are cut every micro-batch; others' are counted."""

import pytest

from planner.frameworks.exporters import EXPORTERS
from planner.frameworks.readers import FileContext
from planner.frameworks.readers.read import WHOLE_GRADIENTS, read_text
from planner.frameworks.readers.rewrite import rewrite
from planner.frameworks.readers.types import canonical
from planner.frameworks.tools import tool_of
from planner.setup import TrainSetup
from tests.planner.launch_sweep import request

SETUP = TrainSetup(num_gpus=8, parallel="fsdp2", accumulation_steps=4)


@pytest.mark.parametrize("target", ["trl", "hf", "axolotl"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_whole_gradients_are_said_where_the_file_does_not_forbid_them(target: str, accumulation: int) -> None:
    launch = EXPORTERS[target](request(SETUP.replace(accumulation_steps=accumulation)))
    text, path = launch.files[0].text, launch.files[0].path
    launcher = next((file.text for file in launch.files if file.path.endswith("accelerate.yaml")), None)

    def whole(config: str) -> bool:
        reading = read_text(config, path, around=FileContext(num_gpus=8), launcher=launcher)
        assert (WHOLE_GRADIENTS in reading.assumptions) == (not canonical(reading.setup).sync_each_batch)
        return WHOLE_GRADIENTS in reading.assumptions

    assert ("sync_each_batch" in text) == (accumulation > 1)
    assert not whole(text)
    switched_off = text.replace("sync_each_batch: true", "sync_each_batch: false")
    switched_off = switched_off.replace("'sync_each_batch': True", "'sync_each_batch': False")
    switched_off = switched_off.replace('"sync_each_batch": True', '"sync_each_batch": False')
    assert (switched_off != text) == (accumulation > 1)
    assert whole(switched_off) == (accumulation > 1)
    without = "".join(line for line in text.splitlines(keepends=True) if "sync_each_batch" not in line)
    if accumulation > 1 and "accelerator_config:" in without:  # YAML in several lines
        without = without.replace("gradient_accumulation_kwargs:", "gradient_accumulation_kwargs: {}")
    assert whole(without) == (accumulation > 1)


def test_fix_sets_what_cuts_them() -> None:
    text = "base_model: Qwen/Qwen3-14B\nmicro_batch_size: 1\ngradient_accumulation_steps: 4\n"
    text += "fsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n"
    reading = read_text(text, "a.yaml", around=FileContext(num_gpus=8))
    edits = tool_of("axolotl").edits(reading.keys, reading.setup, reading.setup.replace(sync_each_batch=True), "a.yaml")
    fixed = read_text(rewrite(text, "a.yaml", edits), "a.yaml", around=FileContext(num_gpus=8))
    assert (reading.setup.sync_each_batch, fixed.setup.sync_each_batch) == (False, True)
