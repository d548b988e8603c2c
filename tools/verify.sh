#!/usr/bin/env bash
# The long acceptance run. It prints each command before it runs it, so that any of them can be repeated by hand; it stops at
# the first that fails, and ends with a table. Output of the commands goes to out/verify/*.log.
#
#     tools/verify.sh              everything: some 16 minutes on a software Vulkan device, 10 GB of disk for a while
#     EPS=cpu tools/verify.sh      without a Vulkan device
#     SHARED=DIR tools/verify.sh   also the larger reference runs of DIR, which are not part of the repository (default ../shared)
set -euo pipefail
cd "$(dirname "$0")/.."

viaduct=${VIADUCT:-target/release/viaduct}
shared=${SHARED:-../shared}
read -ra eps <<<"${EPS:-cpu webgpu}"
work=out/verify
rm -rf "$work"
mkdir -p "$work"
# Shader compilation is most of a first run on a software device.
export MESA_SHADER_CACHE_DIR=${MESA_SHADER_CACHE_DIR:-$PWD/.cache/mesa}
mkdir -p "$MESA_SHADER_CACHE_DIR"

rows=()
running=
check() { # name command...
    running=$1
    local log start=$SECONDS
    log=$work/$(tr -c 'a-zA-Z0-9.\n' - <<<"$running").log
    shift
    printf '\n$ %s\n' "$*"
    "$@" >"$log" 2>&1 || { code=$?; tail -n 40 "$log"; echo "error: '$running' ended with $code" >&2; exit 1; }
    rows+=("$(printf '%-42s %5d s  ok      %s' "$running" $((SECONDS - start)) "$(figure "$log")")")
    running=
}

# What is worth a column: the free run's PSNR, sizes, a peak of memory, or the command's own last line.
figure() { # log
    awk '$1 == "image_01" && $2 == "psnr" { found = "image " $3 " dB" }
         /: [0-9]+ stages, / { sub(/.*: /, ""); found = $0 }
         /, peak [0-9]+ MB$/ || $1 == "hashes:" { found = $0 }
         /^test result/ { found = $3 " " $4 " " $5 }
         NF { last = $0 }
         END { print found == "" ? last : found }' "$1"
}

summary() {
    [[ -z $running ]] || rows+=("$(printf '%-42s %7s  FAILED' "$running" '')")
    printf '\n==== %d checks\n' "${#rows[@]}"
    printf '%s\n' "${rows[@]}"
}
trap summary EXIT

export_() { # bundle checkpoint options...
    check "export $1" "$viaduct" export "$2" -o "$work/$1" "${@:3}"
}

verify() { # bundle oracle name
    local ep
    for ep in "${eps[@]}"; do
        check "$1, $3, $ep" "$viaduct" verify "$work/$1" --oracle "$2" --ep "$ep" --no-store
    done
}

klein_emoji() {
    local profile oracle
    for profile in f32 f16 q8 q4; do
        export_ "klein-emoji-$profile" bundles/klein-emoji/source --profile "$profile"
        for oracle in 0 1; do
            verify "klein-emoji-$profile" "tests/fixtures/klein-emoji/$oracle" "request $oracle"
        done
        check "klein-emoji-$profile draws what is asked" .venv/bin/python tools/adherence "$work/klein-emoji-$profile" --program "$viaduct"
    done
}

procedural() { # fixture taps length
    check "checkpoint $1" cargo run --release -p viaduct-procedural --example write_checkpoint -- \
        "tests/fixtures/$1/checkpoint.json" "$work/$1-checkpoint"
    export_ "$1" "$work/$1-checkpoint" --profile f32 --set "text_encoder.taps=$2" --set "text_encoder.length=$3"
    verify "$1" "tests/fixtures/$1/oracle" reference
}

# Graphs as torch's two exporters wrote them, assembled into bundles.
imported() { # bundle text-encoder transformer decoder
    export_ "$1" "$shared/oracles/onnx-tiny/$2.onnx" "$shared/oracles/onnx-tiny/$3.onnx" "$shared/oracles/onnx-tiny/$4.onnx" \
        --tokenizer "$shared/oracles/flux2-tiny/ckpt/tokenizer"
    verify "$1" "$shared/oracles/flux2-tiny/oracle" reference
}

# The synthetic checkpoint's tensors, in name, shape and order.
synth() { # preset component list
    check "tensors of $1, $2" bash -c 'diff "$3" <(python3 tools/synth --preset "$1" --only "$2" --list)' - \
        "$1" "$2" "$shared/oracles/keys/$3.txt"
}

shared_oracles() {
    local oracle
    imported imported-legacy te_legacy dit_legacy_rms_f32rope vae_legacy
    imported imported-nofold te_legacy dit_legacy_rms_f32rope_nofold vae_legacy
    imported imported-dynamo te_dynamo dit_dynamo vae_dynamo
    imported imported-f16 te_dynamo dit_legacy_rms_f32rope_fp16 vae_legacy
    export_ flux2-tiny "$shared/oracles/flux2-tiny/ckpt" --profile f32 \
        --set text_encoder.taps=2,4,6 --set text_encoder.length=64
    verify flux2-tiny "$shared/oracles/flux2-tiny/oracle" reference
    for oracle in "$shared"/models/klein-emoji-oracle/*; do
        verify klein-emoji-f32 "$oracle" "shared request ${oracle##*/}"
    done
    synth klein-4b text_encoder keys_text_encoder
    synth klein-4b transformer keys_transformer
    synth klein-9b transformer keys_transformer9b
    synth klein-4b vae keys_vae
    check 'shapes as ONNX Runtime computes them' env VIADUCT_SHARED="$(realpath "$shared")" \
        cargo test --release -p viaduct-export --test shapes_onnxruntime --test shapes_decoder -- --ignored
    check 'rewritten exports: the same numbers, nothing on the CPU, every layer quantised' env VIADUCT_SHARED="$(realpath "$shared")" \
        cargo test --release --test passes models -- --ignored
}

# A checkpoint of 2 GB must pass through less memory than it has bytes, pages of mapped files included.
memory() {
    check 'checkpoint of 2 GB' python3 tools/bench/synthetic_checkpoint.py "$work/synthetic" --megabytes 2000
    check 'peak memory of its export below 1.1 GB' python3 tools/bench/measure.py --cold "$work/synthetic" --below-mb 1100 -- \
        "$viaduct" export "$work/synthetic" -o "$work/synthetic-q8"
    rm -r "$work/synthetic" "$work/synthetic-q8"
}

# A model of 3 GiB is read and written in little memory, in about the time of a copy.
round_trip() {
    check 'ONNX model of 3 GiB' .venv/bin/python tools/bench/synthetic_model.py "$work/round-trip/model.onnx"
    check 'the program that reads and writes it' cargo build --release -p viaduct-export --example round_trip
    check 'round trip within 300 MiB and 1.3 x cp' python3 tools/bench/round_trip.py "$work/round-trip/model.onnx" \
        --program target/release/examples/round_trip
    rm -r "$work/round-trip"
}

# Predicted against measured peak of every stage, up to 3 GiB.
prediction() {
    check 'bundles for the memory model' env VIADUCT="$viaduct" tools/memory/bundles.sh "$work/memory"
    check 'the program that runs one stage' cargo build --release --example stage_memory
    check 'predicted peak memory within 15 %' python3 tools/memory/compare.py "$work/memory" --ep "${eps[@]}"
    rm -r "$work/memory"
}

klein_emoji
procedural flux2-a 1,3,4 40
procedural flux2-b 2,3 24
if [[ -d $shared/oracles ]]; then
    shared_oracles
fi
export_ klein-emoji-again bundles/klein-emoji/source --profile q8
# The manifest lists every file's SHA-256, so equal folders with right sums are equal bundles.
check 'two exports are equal' diff -r "$work/klein-emoji-q8" "$work/klein-emoji-again"
check 'SHA-256 of every file' "$viaduct" inspect "$work/klein-emoji-again" --hashes
memory
round_trip
prediction
check 'ONNX models beyond 2 GiB' cargo test --release -p viaduct-export --test onnx_large -- --ignored
