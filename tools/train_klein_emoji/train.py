#!/usr/bin/env python3
"""Trains klein-emoji, one stage at a time, in a work folder that prep.py has filled.

tokenizer  trains the tokenizer on the captions
vae        trains the autoencoder
dit        trains text encoder and transformer (flow matching)
tune       trains them further on the states of the 4-step sampler (optional)
eval       prints adherence figures of the saved weights and draws a contact sheet
export     writes the checkpoint folder in the layout of diffusers, bf16
"""

import argparse
import sys

import torch

from klein_emoji import train_flow, train_vae
from klein_emoji.captions import load_meta
from klein_emoji.export import export
from klein_emoji.tokenizer import train_tokenizer


def add_loop_options(parser):
    parser.add_argument(
        "--seconds", type=float, default=200, help="time for the steps, compilation included (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=sys.maxsize, help="stop after so many steps (no limit)")
    parser.add_argument("--batch", type=int, help=f"pictures a step (vae {train_vae.BATCH}, else {train_flow.BATCH})")
    parser.add_argument("--rate", type=float, help=f"AdamW rate (vae {train_vae.RATE}, else {train_flow.RATE})")
    parser.add_argument("--resume", action="store_true", help="start from the weights in the work folder")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--log-every", type=int, help="steps between two log lines (accelerator 200, CPU 5)")


def add_flow_options(parser):
    add_loop_options(parser)
    parser.add_argument("--muon-rate", type=float, default=4e-3, help="Muon rate (%(default)s)")
    parser.add_argument("--ema", type=float, default=0.999, help="decay of the averaged weights (%(default)s)")
    parser.add_argument("--warm", type=int, default=150, help="warm-up steps (%(default)s)")
    parser.add_argument("--decay", type=float, default=0.4, help="share of the run with a falling rate (%(default)s)")
    parser.add_argument("--eval-every", type=int, default=0, help="steps between two evaluations (0: only at the end)")
    add_count(parser)


def add_count(parser):
    parser.add_argument("--count", type=int, default=200, help="prompts of an evaluation (%(default)s)")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--work", default="work", help="work folder (%(default)s)")
    device = argparse.ArgumentParser(add_help=False, parents=[shared])
    device.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    device.add_argument("--concepts", type=int, help="use the first so many emoji only (accelerator: all; CPU: 8)")
    stages = parser.add_subparsers(dest="stage", required=True)
    stages.add_parser("tokenizer", parents=[shared])
    vae = stages.add_parser("vae", parents=[device])
    add_loop_options(vae)
    vae.add_argument("--kl", type=float, default=1e-3, help="weight of the KL divergence (%(default)s)")
    add_flow_options(stages.add_parser("dit", parents=[device]))
    add_flow_options(stages.add_parser("tune", parents=[device]))
    add_count(stages.add_parser("eval", parents=[device]))
    stages.add_parser("export", parents=[shared]).add_argument("--dest", default="klein-emoji", help="(%(default)s)")
    return parser.parse_args()


def set_device_defaults(args):
    """On a CPU the loops only show that they run: few concepts, a log line every few steps."""
    cuda, total = args.device == "cuda", len(load_meta(args.work))
    args.concepts = min(args.concepts or (total if cuda else 8), total)
    if "log_every" in args:
        args.log_every = args.log_every or (200 if cuda else 5)


def set_backends(compiled):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    if compiled:
        from torch._dynamo import config  # slow to load

        config.suppress_errors = True  # a block that fails to compile runs as it is
        config.cache_size_limit = 64


def main():
    args = parse()
    if args.stage == "tokenizer":
        print(train_tokenizer(args.work).get_vocab_size(), "tokens")
        return
    if args.stage == "export":
        export(args.work, args.dest)
        return
    set_device_defaults(args)
    set_backends(getattr(args, "compile", False))
    run = {"vae": train_vae.train, "dit": train_flow.train, "tune": train_flow.train, "eval": train_flow.evaluate_saved}
    run[args.stage](args)


if __name__ == "__main__":
    main()
