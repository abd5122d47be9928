"""FSDP2 with accumulation: the launch files ask for what the memory model counts on, and others' files are told."""

import pytest

from planner.frameworks.exporters import EXPORTERS
from planner.frameworks.readers import FileContext
from planner.frameworks.readers.read import WHOLE_GRADIENTS, read_text
from planner.setup import TrainSetup
from tests.planner.launch_sweep import request

SETUP = TrainSetup(num_gpus=8, parallel="fsdp2", accumulation_steps=4)


@pytest.mark.parametrize("target", ["trl", "hf", "axolotl"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_whole_gradients_are_said_where_the_file_does_not_forbid_them(target: str, accumulation: int) -> None:
    launch = EXPORTERS[target](request(SETUP.replace(accumulation_steps=accumulation)))
    text, path = launch.files[0].text, launch.files[0].path
    launcher = next((file.text for file in launch.files if file.path.endswith("accelerate.yaml")), None)

    def approximations(config: str) -> tuple[str, ...]:
        return read_text(config, path, around=FileContext(num_gpus=8), launcher=launcher).approximations

    assert ("sync_each_batch" in text) == (accumulation > 1)
    assert approximations(text) == ()
    switched_off = text.replace("sync_each_batch: true", "sync_each_batch: false")
    switched_off = switched_off.replace("'sync_each_batch': True", "'sync_each_batch': False")
    switched_off = switched_off.replace('"sync_each_batch": True', '"sync_each_batch": False')
    assert (switched_off != text) == (accumulation > 1)
    assert approximations(switched_off) == ((WHOLE_GRADIENTS,) if accumulation > 1 else ())
    without = "".join(line for line in text.splitlines(keepends=True) if "sync_each_batch" not in line)
    if accumulation > 1 and "accelerator_config:" in without:  # YAML in several lines
        without = without.replace("gradient_accumulation_kwargs:", "gradient_accumulation_kwargs: {}")
    assert approximations(without) == ((WHOLE_GRADIENTS,) if accumulation > 1 else ())
