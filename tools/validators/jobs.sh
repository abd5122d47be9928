#!/usr/bin/env bash
# Job files of --job by the parsers of SkyPilot 0.14.1, dstack 0.22.5 and Kubeflow's TrainJob models 2.3. About 600 MB.
source "$(dirname "$0")/common.sh"
WRITTEN=$(mktemp -d)
trap 'rm -rf "$WRITTEN"' EXIT
"$ROOT/.venv/bin/python" tools/validators/jobs.py write "$WRITTEN" > /dev/null 2>&1
for tool in skypilot dstack kubernetes; do
    make_venv "jobs-$tool"
    case $tool in
    skypilot) $PIP skypilot==0.14.1 ;;
    dstack) $PIP dstack==0.22.5 gpuhunt==0.1.34 ;;
    kubernetes) $PIP kubeflow-trainer-api==2.3.0 pyyaml ;;
    esac
    HOME="$WRITTEN" "$VENV/bin/python" tools/validators/jobs.py $tool "$WRITTEN"
done
