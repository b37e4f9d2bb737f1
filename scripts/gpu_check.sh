#!/usr/bin/env bash
# The kernels on this machine's GPU: first whether they are right, then how fast, as one line of JSON.
# PYTHON= names another interpreter; it needs torch, triton and pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=.
# The tests here need no fixtures of the others, nor what those import.
"${PYTHON:-python3}" -m pytest -q --noconftest -p no:cacheprovider tests/gpu/test_kernels_gpu.py
"${PYTHON:-python3}" scripts/bench_kernels.py
