#!/usr/bin/env bash
# Makes what a release uploads: dist/ (wheel and sdist) and build/*.cdx.json, the bill of materials (CycloneDX) of what the
# wheel installs with the tested versions. Refuses a tree that is not ready. `twine upload dist/*` or the workflow
# .github/workflows/release.yml, which the tag starts, is all that follows.
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { echo "$1" >&2 && exit 1; }
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
[ -z "$(git status --porcelain)" ] || fail "there are uncommitted changes"
grep -q "^version: $version$" CITATION.cff || fail "CITATION.cff is of another version than $version"
grep -q "^__version__ = \"$version\"$" planner/__init__.py || fail "planner/__init__.py is of another version than $version"
grep -Eq "^## $version \([0-9]{4}-[0-9]{2}-[0-9]{2}\)$" CHANGELOG.md || fail "CHANGELOG.md has no '## $version (YYYY-MM-DD)'"
rm -rf dist build/lib build/bdist.* .release
python3 -m venv .release && .release/bin/pip install --quiet build twine cyclonedx-bom
.release/bin/python -m build --sdist --wheel # both from the tree: a wheel that is made from an sdist knows no commit
.release/bin/twine check --strict dist/*
python3 -m venv .release/installed
.release/installed/bin/pip install --quiet -c constraints.txt dist/*.whl
(cd .release && installed/bin/plan --version && installed/bin/plan meta-llama/Llama-3.1-8B --gpu rtx-4090 >/dev/null)
mkdir -p build
.release/bin/cyclonedx-py environment .release/installed/bin/python --output-reproducible -o "build/finetune-planner-$version.cdx.json"
ls dist build/*.cdx.json
