#!/usr/bin/env python3
"""How much a bundle's weights lose: its pictures and tensors against those of the f32 bundle of the same checkpoint.

  quality.py F32_BUNDLE BUNDLE...      a row of docs/quality.md for each bundle

For every prompt both draw from the same seed, on the CPU provider. PSNR is that of the 8-bit pictures, dB: their rounding alone
costs as much as 58 dB. Cosine errors (1 - cos) are teacher-forced: the text encoder gets the prompt, the transformer in each
step what the f32 bundle had there (`viaduct verify`); the mean over all prompts and steps. Needs numpy, and the built program.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "setup"))
from check_picture import read_png  # noqa: E402

PROGRAM = Path(__file__).parent.parent / "target/release/viaduct"
PROMPTS = Path(__file__).parent.parent / "bundles/klein-emoji/quality.txt"
# Prompts of one command, which share a seed.
GROUP = 8
FIRST_SEED = 500
COMPONENTS = {
    "text, real rows": "prompt_embeds (real rows)",
    "text, padding": "prompt_embeds (padding rows)",
    "transformer": "pred_step",
}


def pixels(path):
    """-> uint8 [height, width, 3]"""
    width, height, samples = read_png(path)
    return np.array(samples, np.uint8).reshape(height, width, 3)


def run(program, *arguments):
    command = [str(program), *map(str, arguments), "--ep", "cpu", "--progress", "none"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def checked(result):
    if result.returncode:
        raise SystemExit(f"{' '.join(result.args)}: {result.stderr.strip()}")


def draw(program, bundle, prompts, folder):
    """-> pictures in 0..1 [prompts, height, width, 3]"""
    pictures = []
    for group, start in enumerate(range(0, len(prompts), GROUP)):
        flags = [flag for prompt in prompts[start : start + GROUP] for flag in ("-p", prompt)]
        out = folder / f"{group}.png"
        count = len(flags) // 2
        checked(run(program, "generate", "-b", bundle, "-o", out, "--seed", FIRST_SEED + group, "--in-process", "--force", *flags))
        files = [out] if count == 1 else [folder / f"{group}-{i + 1}.png" for i in range(count)]
        pictures += [pixels(file) for file in files]
    return np.stack(pictures) / 255.0


def oracles(program, bundle, prompts, folder):
    """Writes a folder of reference tensors for each prompt. -> the folders"""
    folders = [folder / f"oracle-{index}" for index in range(len(prompts))]
    for index, (prompt, out) in enumerate(zip(prompts, folders)):
        picture = folder / "oracle.png"
        seed = FIRST_SEED + index // GROUP
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
        result = run(program, "verify", bundle, "--oracle", folder, "--json")
        if result.returncode not in (0, 3):
            checked(result)
        for row in json.loads(result.stdout)["rows"]:
            for name, prefix in COMPONENTS.items():
                if row["name"].startswith(prefix):
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
    return parser.parse_args()


def main():
    args = parse()
    prompts = [line.strip() for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        reference = draw(args.program, args.reference, prompts, folder)
        folders = oracles(args.program, args.reference, prompts[:: max(1, len(prompts) // max(1, args.oracles))][: args.oracles], folder)
        print("| bundle | MB | PSNR, mean | PSNR, p10 | " + " | ".join(f"cosine error, {name}" for name in COMPONENTS) + " |")
        print("|" + "---|" * (4 + len(COMPONENTS)))
        for bundle in args.bundles:
            error = ((draw(args.program, bundle, prompts, folder) - reference) ** 2).mean((1, 2, 3))
            psnr = -10 * np.log10(np.maximum(error, 1e-12))
            cosines = " | ".join(f"{value:.2e}" for value in cosine_errors(args.program, bundle, folders).values())
            figures = f"{size(bundle) / 1e6:.2f} | {psnr.mean():.2f} | {np.quantile(psnr, 0.1):.2f} | {cosines}"
            print(f"| `{bundle.name}` | {figures} |", flush=True)


if __name__ == "__main__":
    main()
