#!/usr/bin/env python3
"""How much a bundle's weights lose: its pictures and tensors against those of the f32 bundle of the same checkpoint.

  quality.py F32_BUNDLE BUNDLE...      a row of docs/quality.md for each bundle

For every prompt both draw from the same seed, on the CPU provider. PSNR is that of the 8-bit pictures, dB: their rounding alone
costs as much as 58 dB. Cosine errors (1 - cos) are teacher-forced: the text encoder gets the prompt, the transformer in each
step what the f32 bundle had there (`viaduct verify`); the mean over all prompts and steps. --adherence, for klein-emoji alone, counts the
pictures that show the label and the background that the prompt names (tools/adherence), and, as a control, those that show the label
of the next prompt. Needs numpy, and the built program.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from adherence.judge import Judge
from drawing import PROGRAM, checked, draw, run, seed_of

PROMPTS = Path(__file__).parent.parent / "bundles/klein-emoji/quality.txt"
COMPONENTS = {
    "text, real rows": "prompt_embeds (real rows)",
    "text, padding": "prompt_embeds (padding rows)",
    "transformer": "pred_step",
}


def oracles(program, bundle, prompts, folder):
    """Writes a folder of reference tensors for each prompt. -> the folders"""
    folders = [folder / f"oracle-{index}" for index in range(len(prompts))]
    for index, (prompt, out) in enumerate(zip(prompts, folders)):
        picture, seed = folder / "oracle.png", seed_of(index)
        result = run(program, "generate", "-b", bundle, "-o", picture, "-p", prompt, "--seed", seed, "--dump", out, "--in-process", "--force", "--json")
        checked(result)
        made = json.loads(result.stdout)
        request = {"prompt": prompt, "noise": "noise_nchw.npy"} | {key: made[key] for key in ("width", "height", "steps")}
        (out / "request.json").write_text(json.dumps(request), encoding="utf-8")
        for internal in [*out.glob("dit_*.npy"), *out.glob("vae_*.npy")]:
            internal.unlink()
    return folders


def cosine_errors(program, bundle, folders):
    """-> mean cosine error by component"""
    found = {name: [] for name in COMPONENTS}
    for folder in folders:
        result = run(program, "verify", bundle, "--oracle", folder, "--no-controls", "--no-store", "--json")
        if result.returncode not in (0, 3):
            checked(result)
        for row in json.loads(result.stdout)["rows"]:
            for name, prefix in COMPONENTS.items():
                if row["name"].startswith(prefix) and "cosine_error" in row:
                    found[name].append(row["cosine_error"])
    return {name: np.mean(errors) for name, errors in found.items()}


def size(bundle):
    return sum(file.stat().st_size for file in Path(bundle).rglob("*") if file.is_file())


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", type=Path, metavar="F32_BUNDLE")
    parser.add_argument("bundles", type=Path, nargs="+", metavar="BUNDLE")
    parser.add_argument("--program", type=Path, default=PROGRAM, help="%(default)s")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="prompts, one a line (%(default)s)")
    parser.add_argument("--oracles", type=int, default=6, help="prompts of which tensors are compared (%(default)s)")
    parser.add_argument("--adherence", action="store_true", help="also count pictures that show what was asked for")
    return parser.parse_args()


def row(args, bundle, prompts, reference, folders, folder):
    """-> the figures of a bundle, in words"""
    pictures = draw(args.program, bundle, prompts, folder)
    psnr = -10 * np.log10(np.maximum(((pictures - reference) ** 2).mean((1, 2, 3)), 1e-12))
    figures = [f"{size(bundle) / 1e6:.2f}", f"{psnr.mean():.2f}", f"{np.quantile(psnr, 0.1):.2f}"]
    figures += [f"{value:.2e}" for value in cosine_errors(args.program, bundle, folders).values()]
    if args.adherence:
        judge = Judge()
        asked, swapped = judge.scores(prompts, pictures), judge.scores(prompts[1:] + prompts[:1], pictures)
        figures += [f"{asked[0]:.2f}", f"{asked[1]:.2f}", f"{swapped[0]:.2f}"]
    return figures


def main():
    args = parse()
    prompts = [line.strip() for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    columns = ["bundle", "MB", "PSNR, mean", "PSNR, p10", *(f"cosine error, {name}" for name in COMPONENTS)]
    columns += ["label", "background", "label, swapped"] if args.adherence else []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        reference = draw(args.program, args.reference, prompts, folder)
        chosen = prompts[:: max(1, len(prompts) // max(1, args.oracles))][: args.oracles]
        folders = oracles(args.program, args.reference, chosen, folder)
        print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        for bundle in args.bundles:
            figures = row(args, bundle, prompts, reference, folders, folder)
            print(f"| `{bundle.name}` | {' | '.join(figures)} |", flush=True)


if __name__ == "__main__":
    main()
