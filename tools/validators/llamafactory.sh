#!/usr/bin/env bash
# LLaMA-Factory 0.9.5 takes transformers up to 5.6.0, whose flash attention stops: 5.5.4. About 600 MB, 50 s.
source "$(dirname "$0")/common.sh"
make_venv llamafactory
borrow_torch
own_project
if [ ! -e "$VENV/ready" ]; then
    $PIP --no-deps llamafactory==0.9.5 liger-kernel bitsandbytes==0.50.2
    $PIP transformers==5.5.4 peft==0.18.1 accelerate==1.11.0 datasets==4.0.0 trl==0.24.0 omegaconf pydantic pyyaml
    touch "$VENV/ready"
fi
"$VENV/bin/python" tools/validators/snapshot.py llamafactory
"$VENV/bin/python" tools/validators/every_type.py llamafactory
# The product's cases train a step each, half a minute on a busy machine: by hand, not in every test run.
[ -n "${CI:-}${VALIDATE:-}" ] || "$VENV/bin/python" tools/validators/product.py llamafactory
exec "$VENV/bin/python" tools/validators/validate.py llamafactory "$@"
