#!/usr/bin/env bash
# DeepSpeed 0.19.8 without its kernels, over the packages of .venv. About 50 MB, 15 s.
source "$(dirname "$0")/common.sh"
make_venv deepspeed
borrow_dev_packages
own_project
if [ ! -e "$VENV/ready" ]; then
    $PIP wheel hjson msgpack ninja py-cpuinfo einops pydantic
    DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $PIP --no-deps --no-build-isolation deepspeed==0.19.8
    touch "$VENV/ready"
fi
export DS_ACCELERATOR=cpu
"$VENV/bin/python" tools/validators/snapshot.py deepspeed
"$VENV/bin/python" tools/validators/validate.py accelerate # its DeepSpeed plugin needs DeepSpeed beside it
exec "$VENV/bin/python" tools/validators/validate.py deepspeed "$@"
