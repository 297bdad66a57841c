#!/bin/bash
# Builds .venv-peers beside the project's own environment: the peers that the benchmarks compare with, on a CPU.
#   perf/peers/install.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3.11}
"$python" -m venv .venv-peers
pip() { .venv-peers/bin/python -m pip "$@"; }
pip install torch==2.13.0  # first and by itself, so that a CPU build serves
pip install --no-deps areal==1.0.4 verl==0.9.1 torchrl==0.14.1  # what they pin cannot be had together
pip install -r perf/peers/requirements.txt
pip install --no-deps -e .
.venv-peers/bin/python - <<'CHECK'
import importlib

for name in (
    "areal.trainer.ppo.actor",
    "verl.trainer.ppo.core_algos",
    "verl.trainer.ppo.v1",
    "torchrl.objectives.value.functional",
):
    importlib.import_module(name)
    print("imports", name)
CHECK
touch .venv-peers/installed
