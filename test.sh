#!/usr/bin/env bash
# All set-up and all tests on a fresh machine: makes .venv, installs the tested versions, runs every test.
# With VALIDATE=1 (and in CI) every launch file of a sweep goes through its tool's own parser, one venv per tool (1.2 GB).
set -euo pipefail
cd "$(dirname "$0")"
export PIP_COMPILE=0 # of 16,900 modules a run imports a third: Python compiles those as it meets them,
unset PYTHONDONTWRITEBYTECODE # once
bash ./setup.sh torch,train,search,cluster,report,mcp,prices,test,check
# A browser for the report's tests, where this machine lets us install one; the tests skip with a reason otherwise.
if ! command -v chromium >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver; } >/dev/null 2>&1 || true
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false
if [ -n "${VALIDATE:-${CI:-}}" ] && [ $# = 0 ]; then
    logs=$(mktemp -d)
    for tool in deepspeed torchtitan unsloth llamafactory axolotl; do
        log="$logs/$tool"
        if bash "tools/validators/$tool.sh" >"$log" 2>&1; then
            tail -1 "$log"
        elif grep -q "accepted, .* refused by the tool" "$log"; then
            tail -40 "$log" && exit 1 # the tool ran and refused a file
        else
            echo "$tool: could not be set up here, its files are not validated ($(tail -1 "$log"))"
        fi
    done
fi
exec .venv/bin/python -m pytest -n "${PYTEST_WORKERS:-auto}" --dist loadfile --no-loadscope-reorder "$@"
