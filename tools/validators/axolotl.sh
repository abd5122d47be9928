#!/usr/bin/env bash
# Axolotl 0.21.0 needs Python 3.12 by its metadata; its config classes run on 3.11. About 400 MB, 40 s.
source "$(dirname "$0")/common.sh"
make_venv axolotl
borrow_torch
own_project
if [ ! -e "$VENV/ready" ]; then
    $PIP transformers==5.20.1 accelerate==1.15.0 peft==0.21.2 datasets==5.2.0 addict pillow pyyaml
    $PIP --no-deps --ignore-requires-python axolotl==0.21.0
    touch "$VENV/ready"
fi
"$VENV/bin/python" tools/validators/snapshot.py axolotl
exec "$VENV/bin/python" tools/validators/validate.py axolotl "$@"
