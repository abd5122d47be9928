"""Types of arrays that the search's modules share."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]
Target = Literal["speed", "memory"]
