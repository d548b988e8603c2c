#!/usr/bin/env bash
# Makes the bundles that compare.py measures, in the folder WORK: narrow networks with a wide feed-forward part, so that
# activations are large and arithmetic is little; and a decoder as wide as FLUX.2's, which is mostly weights.
#
#     tools/memory/bundles.sh WORK
set -euo pipefail
work=$1
here=$(dirname "$0")
viaduct=${VIADUCT:-target/release/viaduct}

checkpoint() { # name specification
    cargo run --release -q -p viaduct-procedural --example write_checkpoint -- "$2" "$work/$1"
}

export_() { # bundle checkpoint profile options...
    "$viaduct" export "$work/$2" -o "$work/$1" --force --profile "$3" \
        --set text_encoder.taps=1,3,4 --set text_encoder.length=512 "${@:4}"
}

mkdir -p "$work"
checkpoint narrow "$here/checkpoint.json"
export_ split narrow f32
export_ half narrow f16
export_ unsplit narrow f32 --set vae_decoder.cuts=

sed -z 's/"block_out_channels": \[[^]]*\]/"block_out_channels": [128, 256, 512, 512]/' "$here/checkpoint.json" >"$work/wide.json"
checkpoint wide "$work/wide.json"
export_ wide-f32 wide f32
# Its decoder is f16.
export_ wide-q8 wide q8
