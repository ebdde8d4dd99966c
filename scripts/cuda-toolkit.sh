#!/usr/bin/env bash
# Lays out a CUDA 13.0 compiler and link-time libraries from PyPI wheels under a folder (1.2 GB, twice that while it
# installs), for a machine without a CUDA toolkit. It compiles and links, and runs nothing on a GPU. Prints the
# variables to export.
#
#   source <(scripts/cuda-toolkit.sh target/cuda-toolkit)
#   cargo build --features cuda
set -euo pipefail

dest="$(mkdir -p "${1:?usage: cuda-toolkit.sh FOLDER}" && cd "$1" && pwd)"
wheels="nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88
    nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-cuda-nvrtc==13.0.88
    nvidia-curand==10.4.0.35 nvidia-cublas==13.1.0.3
    nvidia-cuda-cuobjdump==13.5.37 nvidia-cuda-nvdisasm==13.5.37"
if [ "$(cat "$dest/ready" 2>/dev/null)" != "$wheels" ]; then
    command -v python3 >/dev/null || { echo "cuda-toolkit.sh: needs python3 with pip" >&2; exit 1; }
    # What an interrupted run left would be taken for whole.
    rm -rf "$dest/ready" "$dest/site" "$dest/tmp"
    mkdir "$dest/tmp"
    # shellcheck disable=SC2086 # a list
    TMPDIR="$dest/tmp" python3 -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-deps \
        --target "$dest/site" $wheels >&2
    rm -rf "$dest/tmp"
    root="$dest/site/nvidia/cu13"
    ln -sfn "$root" "$dest/cuda"
    cd "$root"
    # The wheels have the libraries under their versioned names only, and `lib` for `lib64`.
    for lib in cublas:13 cublasLt:13 cudart:13 curand:10 nvrtc:13; do
        ln -sf "lib${lib%%:*}.so.${lib##*:}" "lib/lib${lib%%:*}.so"
    done
    ln -sfn lib lib64
    # A stand-in for the driver's library: every function of its headers, with the version suffixes that their
    # macros add; each fails with CUDA_ERROR_UNKNOWN.
    mkdir -p lib/stubs
    { cat include/cuda*.h | grep -ohE '\bcu[A-Z][A-Za-z0-9]+(_v[0-9]+)?\b'; echo cuProfilerInitialize; } |
        sed -E 's/_v[0-9]+$//' | sort -u |
        awk '{for (i = 1; i <= 5; i++) print "int " $1 (i > 1 ? "_v" i : "") "(void) { return 999; }"}' >lib/stubs/stub.c
    gcc -w -shared -fPIC -Wl,-soname,libcuda.so.1 -o lib/stubs/libcuda.so lib/stubs/stub.c
    ln -sf libcuda.so lib/stubs/libcuda.so.1
    printf '%s' "$wheels" >"$dest/ready"
fi
echo "export CUDA_HOME='$dest/cuda' CUDA_PATH='$dest/cuda' PATH='$dest/cuda/bin':\"\$PATH\""
