#!/usr/bin/env bash
# Writes requirements.lock: the tested set (constraints.txt) with the hash of every file that this platform installs.
# Then: pip install --require-hashes --no-deps -r requirements.lock
# Of torch the file is taken that the configured index gives (a CPU build where one is provided): hashes differ by platform.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
.venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" -r constraints.txt
.venv/bin/python - "$work" <<'PY'
import hashlib, platform, re, sys
from pathlib import Path

def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()

lines = [line.split("#")[0].strip() for line in Path("constraints.txt").read_text().splitlines()]
wanted = {plain(name): version for name, _, version in (line.partition("==") for line in lines if line)}
found = {}
for path in sorted(Path(sys.argv[1]).iterdir()):
    name, version = re.match(r"(.+?)-(\d[^-]*?)(?:-|\.tar\.gz$|\.zip$)", path.name).groups()
    assert wanted[plain(name)] == version.partition("+")[0], path.name
    found[plain(name)] = hashlib.sha256(path.read_bytes()).hexdigest()
if missing := sorted(wanted.keys() - found.keys()):
    sys.exit(f"no file for {', '.join(missing)}")
head = f"# Python {platform.python_version()}, {platform.system()} {platform.machine()}; made by tools/hashes.sh from constraints.txt\n"
text = "".join(f"{name}=={wanted[name]} --hash=sha256:{found[name]}\n" for name in sorted(found))
Path("requirements.lock").write_text(head + text)
print(f"requirements.lock: {len(found)} of {len(wanted)}")
PY
