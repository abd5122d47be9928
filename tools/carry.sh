#!/usr/bin/env bash
# Makes .whl/: what a bare GPU machine without network lacks, as wheels for its Python.
#   bash tools/carry.sh [PYTHON=3.12] [CUDA=130]
# Tested versions (constraints.txt); nothing that torch or transformers need is taken along but transformers itself: launch
# files use the names of its tested version. About 26 MB; at most 64 MiB may travel with the working tree.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-3.12} cuda=${2:-130}
carried=(transformers trl datasets multiprocess dill liger-kernel==0.8.5 bitsandbytes
    optuna alembic sqlalchemy mako colorlog platformdirs)
rm -rf .whl && mkdir .whl
platforms=()
for name in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014; do
    platforms+=(--platform "${name}_x86_64")
done
"${PIP_PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version "$python" --implementation cp "${platforms[@]}" -c constraints.txt -d .whl "${carried[@]}"
python3 tools/strip_bitsandbytes.py .whl/bitsandbytes-*.whl "$cuda"
total=$(($(git ls-files -z | xargs -0 cat | wc -c) + $(cat .whl/* | wc -c)))
echo "$(ls .whl/*.whl | wc -l) wheels, $(($(cat .whl/* | wc -c) / 1000000)) MB; with the working tree $((total / 1048576)) of 64 MiB"
[ "$total" -lt $((64 * 1048576)) ] || { echo "too much to travel" >&2; exit 1; }
