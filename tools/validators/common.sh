# Sourced by the scripts beside it: one venv per tool, because their pins conflict. VALIDATORS says where (default
# .cache/validators in the repository).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
ROOT="$PWD"
VALIDATORS="${VALIDATORS:-$ROOT/.cache/validators}"
make_venv() { # NAME: a fresh venv, kept between runs
    VENV="$VALIDATORS/$1"
    [ -x "$VENV/bin/python" ] || python3 -m venv "$VENV"
    PIP="$VENV/bin/python -m pip install --quiet --no-compile --disable-pip-version-check"
}
borrow_dev_packages() { # the tool sees the packages of .venv behind its own
    SITE=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    DEV=$("$ROOT/.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    echo "$DEV" > "$SITE/zz_dev.pth"
}
borrow_torch() { # torch and all that it needs from .venv, nothing else of it
    "$ROOT/.venv/bin/python" -c 'import pathlib, sys; from finetune_planner.cli.diff import link; link(pathlib.Path(sys.argv[1]), ["torch"])' "$VALIDATORS/borrowed"
    SITE=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    echo "$VALIDATORS/borrowed" > "$SITE/zz_torch.pth"
}
own_project() { # only this repository's packages and two small ones that they import, nothing else of .venv
    $PIP platformdirs rapidfuzz
    SITE=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    echo "$ROOT" > "$SITE/zz_planner.pth"
}
