#!/usr/bin/env bash
# Unsloth cannot be imported without a GPU: its wheel (29 MB) is unpacked and read as text.
source "$(dirname "$0")/common.sh"
mkdir -p "$VALIDATORS/unsloth"
cd "$VALIDATORS/unsloth"
[ -d unsloth ] || {
    "$ROOT/.venv/bin/python" -m pip download --quiet --no-deps unsloth==2026.10.9
    "$ROOT/.venv/bin/python" -m zipfile -e unsloth-2026.10.9-*.whl .
}
cd "$ROOT"
exec .venv/bin/python tools/validators/snapshot.py unsloth "$VALIDATORS/unsloth"
