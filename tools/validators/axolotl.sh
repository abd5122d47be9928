#!/usr/bin/env bash
# Axolotl 0.21.0 needs Python 3.12 by its metadata; its config classes and loader run on 3.11. About 900 MB, 3 min.
source "$(dirname "$0")/common.sh"
make_venv axolotl
borrow_torch
own_project
if [ ! -e "$VENV/ready" ]; then
    $PIP transformers==5.20.1 accelerate==1.15.0 peft==0.21.2 datasets==5.2.0 addict pillow pyyaml
    $PIP bitsandbytes==0.50.2 triton posthog==6.7.11 einops scipy requests python-dotenv colorama art evaluate fire \
        sentencepiece mistral-common==1.12.0 schedulefree fastcore numba pytest
    $PIP --no-deps --ignore-requires-python axolotl==0.21.0 trl==1.14.1 liger-kernel==0.8.4
    touch "$VENV/ready"
fi
"$VENV/bin/python" tools/validators/snapshot.py axolotl
# Its own loader on a model of every type takes about ten minutes: by hand, not in every test run (`--kept FILE` goes on).
[ -n "${CI:-}${VALIDATE:-}" ] || "$VENV/bin/python" tools/validators/every_type.py axolotl
exec "$VENV/bin/python" tools/validators/validate.py axolotl "$@"
