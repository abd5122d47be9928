#!/usr/bin/env bash
# All set-up and all tests on a fresh machine: makes .venv, installs the tested versions, runs every test.
set -euo pipefail
cd "$(dirname "$0")"
bash ./setup.sh torch,train,search,cluster,report,test,check
exec .venv/bin/python -m pytest "$@"
