"""Where the tables and texts lie that ship beside the code."""

from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "data"
