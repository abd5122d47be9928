#!/usr/bin/env bash
# The GPU code against a CUDA build of torch, on a machine without a GPU (docs/probes.md).
#   bash tools/cuda_build.sh FOLDER [VERSION]     a venv in FOLDER (about 5 GB, 2.1 GB of downloads); default: the tested torch
# PYTHON: the interpreter; PIP_ARGS: for example an index of the build that is wanted.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?where the environment goes}
version=${2:-$(sed -n 's/^torch==//p' constraints.txt)}
[ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
pip() { "$folder/bin/python" -m pip install --quiet --disable-pip-version-check ${PIP_ARGS:-} "$@"; }
"$folder/bin/python" -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$version')" 2>/dev/null || pip "torch==$version"
pip transformers accelerate peft nvidia-ml-py psutil typer rich jinja2 pyyaml numpy
exec "$folder/bin/python" tools/cuda_build.py
