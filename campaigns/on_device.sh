#!/usr/bin/env bash
# One call on a machine with a GPU that is not set up for this project and has no network (docs/probes.md).
#   bash campaigns/on_device.sh [BUDGET] [SPEC]
# $OUT: where the store goes (default: out). .whl/: optional wheels to install first (bitsandbytes, liger-kernel).
set -euo pipefail
cd "$(dirname "$0")/.."
budget=${1:-8m}
spec=${2:-campaigns/h200.yaml}
out=${OUT:-out}
name=$(basename "$spec" .yaml)
mkdir -p "$out"
if compgen -G ".whl/*.whl" >/dev/null; then
    site=$(mktemp -d)
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" .whl/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
# What was committed before is not measured again.
if [ -f "benchmarks/data/$name.jsonl" ] && [ ! -f "$out/$name.jsonl" ]; then
    cp "benchmarks/data/$name.jsonl" "$out/$name.jsonl"
fi
plan() { PYTHONUNBUFFERED=1 python3 -c 'from planner.cli.app import main; main()' "$@"; }
plan doctor --json >"$out/$name-doctor.json" || true
plan campaign "$spec" --budget "$budget" --store "$out/$name.jsonl" --ahead 2 ${DEVICE:+--device "$DEVICE"} 2>&1 |
    tee -a "$out/$name.log"
