#!/usr/bin/env bash
# Makes .venv with `plan` in it. Argument: extras, comma-separated ("" for the light core).
# torch is installed first and by exact version: a CPU machine's local wheel is taken where one is provided.
# uv installs in a third of pip's CPU time. It is told what pip is configured to find; where it cannot be had or
# fails, pip does it.
set -euo pipefail
cd "$(dirname "$0")"
extras="${1:-}"
# $PYTHON, else python3. Built without optimization (pyenv's default) it takes a quarter more CPU time: then the system's
# of the same version, where that is whole (pip, and the headers for which Triton asks).
optimized='import sys, sysconfig; sys.exit("--enable-optimizations" not in (sysconfig.get_config_var("CONFIG_ARGS") or ""))'
whole='import ensurepip, os, sys, sysconfig
sys.exit(sys.argv[1] != sysconfig.get_python_version() or not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
python="${PYTHON:-python3}"
recent='import sys; sys.exit(sys.version_info < (3, 11))'
if ! "$python" -c "$recent"; then
    echo "error: Python 3.11 or newer is needed, $python is older or not there" >&2
    echo "hint: PYTHON=python3.11 bash setup.sh $extras" >&2
    exit 3
fi
version=$("$python" -c 'import sysconfig; print(sysconfig.get_python_version())')
if [ -z "${PYTHON:-}" ] && ! python3 -c "$optimized" && /usr/bin/python3 -c "$whole" "$version" 2>/dev/null; then
    python=/usr/bin/python3
fi
.venv/bin/python -c "$recent" 2>/dev/null || "$python" -m venv --clear .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
configured() { # NAME of a setting of pip: its words; a variable counts before a file, [install] before [global]
    local section found
    for section in ':env:.' install. global.; do
        found=$(sed -n "s/^$section$1='\(.*\)'\$/\1/p" <<<"$pip_config" | sed 's/\\n/ /g')
        [ -z "$found" ] || { echo $found && return; } # unquoted: a list of several lines begins with an empty one
    done
}
pip_config=$(pip config list)
export UV_FIND_LINKS UV_INDEX UV_INDEX_STRATEGY=unsafe-best-match # pip's: the best version of all places
UV_FIND_LINKS=$(configured find-links | tr ' ' ,)
UV_INDEX=$(configured extra-index-url)
index=$(configured index-url) && [ -z "$index" ] || export UV_DEFAULT_INDEX="$index"
cert=$(configured cert) && [ -z "$cert" ] || export SSL_CERT_FILE="$cert"
uv=$(command -v uv) || { pip install --quiet uv && uv=.venv/bin/uv; } 2>/dev/null || uv=false
add() {
    "$uv" pip install --quiet --python .venv/bin/python -c constraints.txt "$@" || pip install --quiet -c constraints.txt "$@"
}
case ",$extras," in *,torch,*) add "torch==$(sed -n 's/^torch==//p' constraints.txt)" ;; esac
if [ -n "$extras" ]; then add -e ".[$extras]"; else add -e .; fi
# Gemma 3n's tower, alone and where only its tests look: it would bring torchvision, which a CPU's build of torch does not
# load, and Accelerate's commands do not start beside a timm without torchvision.
case ",$extras," in *,test,*) add --no-deps --target .venv/timm timm ;; esac
