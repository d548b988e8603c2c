#!/usr/bin/env bash
# Makes the bundles that compare.py measures, in the folder WORK: narrow networks with a wide feed-forward part, so that
# activations are large and arithmetic is little.
#
#     tools/memory/bundles.sh WORK
set -euo pipefail
work=$1
here=$(dirname "$0")
viaduct=${VIADUCT:-target/release/viaduct}

export_() { # bundle options...
    "$viaduct" export "$work/checkpoint" -o "$work/$1" --force --profile f32 \
        --set text_encoder.taps=1,3,4 --set text_encoder.length=512 "${@:2}"
}

mkdir -p "$work"
cargo run --release -q -p viaduct-procedural --example write_checkpoint -- "$here/checkpoint.json" "$work/checkpoint"
export_ split
export_ unsplit --set vae_decoder.cuts=
