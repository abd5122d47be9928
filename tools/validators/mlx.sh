#!/usr/bin/env bash
# mlx-lm 0.32.2 on MLX's build for Linux CPUs. About 250 MB, 40 s.
source "$(dirname "$0")/common.sh"
make_venv mlx
borrow_torch  # writes the tiny models
own_project
if [ ! -e "$VENV/ready" ]; then
    $PIP mlx_lm==0.32.2 'mlx[cpu]' datasets==5.2.0
    touch "$VENV/ready"
fi
MLX_DISABLE_COMPILE=1 "$VENV/bin/python" tools/validators/product.py mlx  # compiling calls a C++ compiler for every kernel
