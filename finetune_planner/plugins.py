"""What a plug-in's own launch target is made of, under names that hold in a checkout and in a wheel, where the planner
lies below `finetune_planner`."""

from planner.frameworks.exporters.types import PLACEHOLDER_DATASET as PLACEHOLDER_DATASET
from planner.frameworks.exporters.types import Difference as Difference
from planner.frameworks.exporters.types import Draft as Draft
from planner.frameworks.exporters.types import ExportRequest as ExportRequest
from planner.frameworks.exporters.types import LaunchFile as LaunchFile
from planner.models.spec import ModelSpec as ModelSpec
from planner.setup import TrainSetup as TrainSetup
from planner.setup.interchange import setup_to_dict as setup_to_dict
