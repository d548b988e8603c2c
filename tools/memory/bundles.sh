#!/usr/bin/env bash
# Makes the bundles that compare.py measures, in the folder WORK: narrow networks with a wide feed-forward part, so that
# activations are large and arithmetic is little.
#
#     tools/memory/bundles.sh WORK
set -euo pipefail
work=$1
here=$(dirname "$0")
viaduct=${VIADUCT:-target/release/viaduct}

export_() { # bundle profile options...
    "$viaduct" export "$work/checkpoint" -o "$work/$1" --force --profile "$2" \
        --set text_encoder.taps=1,3,4 --set text_encoder.length=512 "${@:3}"
}

mkdir -p "$work"
cargo run --release -q -p viaduct-procedural --example write_checkpoint -- "$here/checkpoint.json" "$work/checkpoint"
export_ split f32
export_ half f16
export_ unsplit f32 --set vae_decoder.cuts=
