#!/usr/bin/env bash
# Makes .venv with `plan` in it. Argument: extras, comma-separated ("" for the light core).
# torch is installed first and by exact version: a CPU machine's local wheel is taken where one is provided.
set -euo pipefail
cd "$(dirname "$0")"
extras="${1:-}"
[ -x .venv/bin/python ] || python3 -m venv .venv
pip() { .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$@"; }
case ",$extras," in *,torch,*) pip "torch==$(sed -n 's/^torch==//p' constraints.txt)" ;; esac
if [ -n "$extras" ]; then pip -e ".[$extras]"; else pip -e .; fi
