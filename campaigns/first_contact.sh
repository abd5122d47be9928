#!/usr/bin/env bash
# One call of the first contact on a machine with a GPU that is not set up for this project and has no network
# (docs/probes.md, "First contact").
#   bash campaigns/first_contact.sh CALL [SECONDS]     CALL: 1 to 4
# $OUT: where results go. .whl/: wheels to install first. What earlier calls brought back lies in benchmarks/data/contact.
set -euo pipefail
cd "$(dirname "$0")/.."
call=${1:?which call, 1 to 4}
"${PYTHON:-python3}" -P -c 'import torch, transformers' >/dev/null 2>&1 & # reads them from the disk while wheels unpack
if compgen -G ".whl/*.whl" >/dev/null; then
    site=${TMPDIR:-/tmp}/planner-site
    [ -d "$site" ] || python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" .whl/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec "${PYTHON:-python3}" -m benchmarks.contact.calls "$call" --out "${OUT:-out/contact}" --budget "${2:-540}" ${REHEARSE:+--rehearse}
