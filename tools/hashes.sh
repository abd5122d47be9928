#!/usr/bin/env bash
# Writes requirements.lock: the tested set (constraints.txt) with the hash of every file that this platform installs.
# Then: pip install --require-hashes --no-deps -r requirements.lock
# Of torch the file is taken that the configured index gives (a CPU build where one is provided): hashes differ by platform.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
.venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" -r constraints.txt
{
    echo "# $(.venv/bin/python -V), $(uname -sm); made by tools/hashes.sh from constraints.txt"
    for file in "$work"/*; do
        .venv/bin/python - "$file" <<'PY'
import hashlib, re, sys
from pathlib import Path
path = Path(sys.argv[1])
name, version = re.match(r"(.+?)-(\d[^-]*?)(?:-|\.tar\.gz$|\.zip$)", path.name).groups()
print(f"{name.replace('_', '-').lower()}=={version.partition('+')[0]} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}")
PY
    done
} >"$work/lock"
mv "$work/lock" requirements.lock
wc -l requirements.lock
