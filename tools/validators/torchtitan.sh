#!/usr/bin/env bash
# torchtitan 0.2.2, the last with TOML configs, over the packages of .venv. About 15 MB, 15 s.
source "$(dirname "$0")/common.sh"
make_venv torchtitan
borrow_dev_packages
own_project
if [ ! -e "$VENV/ready" ]; then
    $PIP --no-deps torchtitan==0.2.2 torchdata==0.11.0 tyro==1.0.17 docstring-parser typeguard typing-extensions
    touch "$VENV/ready"
fi
"$VENV/bin/python" tools/validators/snapshot.py torchtitan
exec "$VENV/bin/python" tools/validators/validate.py torchtitan "$@"
