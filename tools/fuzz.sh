#!/usr/bin/env bash
# Generated graphs and broken files through reader, passes and writer, for so many minutes (10 by default). What fails is in
# target/fuzz-failures. Where a nightly compiler and cargo-fuzz are there, its targets get a fifth of the time.
set -euo pipefail
cd "$(dirname "$0")/.."

minutes=${1:-10}
targets=(read rewrite)
coverage=0
if cargo +nightly fuzz --version >/dev/null 2>&1; then
    coverage=$((minutes * 60 / 5))
else
    echo "fuzz: no nightly compiler with cargo-fuzz here: the targets in export/fuzz are skipped"
fi

cargo test --release ${CI:+--locked} --test fuzz --no-run
(
    # What reserves memory by a size that a file names is stopped here.
    ulimit -v $((16 << 20))
    VIADUCT_FUZZ_SECONDS=$((minutes * 60 - coverage)) \
        cargo test --release ${CI:+--locked} --test fuzz many_seeds -- --ignored --nocapture
)

((coverage > 0)) || exit 0
for target in "${targets[@]}"; do
    mkdir -p "export/fuzz/corpus/$target"
    find tests/fixtures/foreign/patterns -name '*.onnx' | while read -r file; do
        cp "$file" "export/fuzz/corpus/$target/$(tr / - <<<"$file")"
    done
    (cd export && cargo +nightly fuzz run "$target" -- \
        -max_total_time=$((coverage / ${#targets[@]})) -rss_limit_mb=4096 -timeout=30)
done
