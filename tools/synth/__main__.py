#!/usr/bin/env python3
"""Writes a full-size checkpoint with random bf16 weights, in diffusers layout.

    python3 tools/synth DEST --preset klein-4b [--only transformer] [--set transformer.num_layers=1 ...]
    python3 tools/synth --preset klein-4b --only vae --list

For measurements at full size where the published weights are not at hand: every tensor has the published name, shape and
type, files are sharded as the published ones are, and the picture that it draws is noise of finite values. Sizes come from
export/recipes; tokenizer, scheduler and what else the config files say are klein-emoji's. `--set` makes a smaller one of the same
form. The same arguments give the same bytes: 16 GB for klein-4b, 35 GB for klein-9b, 30 GB for qwen-image. Needs Python 3.11 and
nothing else.
"""

import argparse
import json
import shutil
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from synth import qwen_image, shapes  # noqa: E402
from synth.weights import Pool, size, write_weights  # noqa: E402

KLEIN_EMOJI = ROOT / "bundles/klein-emoji/source"
RECIPES = ROOT / "export/recipes"
COMPONENTS = ("text_encoder", "transformer", "vae")
QWEN_IMAGE = {"transformer": {"_class_name": "QwenImage21Transformer2DModel"}, "vae": {"_class_name": "AutoencoderKLQwenImage21"}}
# The recipe of a preset, its tensors, and what its config files say besides.
PRESETS = {
    "klein-4b": ("flux2-klein-4b", shapes.COMPONENTS, {}),
    # Qwen3-8B has an output layer of its own.
    "klein-9b": ("flux2-klein-9b", shapes.COMPONENTS, {"text_encoder": {"tie_word_embeddings": False}}),
    "qwen-image": ("qwen-image-2.1", qwen_image.COMPONENTS, QWEN_IMAGE),
}
# Name of the weights' files, and the most bytes that the component's library puts into one.
FILES = {
    "text_encoder": ("model", 5_000_000_000),
    "transformer": ("diffusion_pytorch_model", 10_000_000_000),
    "vae": ("diffusion_pytorch_model", 10_000_000_000),
}
# These belong to the tokenizer.
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

Configs = dict[str, dict]


def main() -> None:
    arguments = parse_arguments()
    configs = preset_configs(arguments.preset)
    for component, key, value in arguments.set:
        configs[component][key] = value
    try:
        _, components, _ = PRESETS[arguments.preset]
        tensors = {component: components[component](configs[component]) for component in arguments.only}
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        sys.exit(f"tools/synth: no checkpoint has such a config: {error!r}")
    if arguments.list:
        lines = (f"{name}\t{list(shape)}" for own in tensors.values() for name, shape in own.items())
        print("\n".join(lines))
        return
    started = time.monotonic()
    if arguments.dest.exists():
        sys.exit(f"tools/synth: {arguments.dest} exists")
    try:
        write_checkpoint(arguments, configs, tensors)
    except BaseException as error:
        shutil.rmtree(arguments.dest, ignore_errors=True)
        if isinstance(error, (ArithmeticError, OSError, TypeError, ValueError)):
            sys.exit(f"tools/synth: {arguments.dest}: {error!r}")
        raise
    total = sum(map(size, tensors.values()))
    print(f"{arguments.dest}: {total / 1e9:.2f} GB of weights in {time.monotonic() - started:.1f} s")


def write_checkpoint(arguments: argparse.Namespace, configs: Configs, components: dict) -> None:
    write_small_files(arguments.dest, arguments.preset, configs)
    pool = Pool(arguments.seed)
    for component, tensors in components.items():
        name, most_bytes = FILES[component]
        write_weights(arguments.dest / component, name, tensors, pool, most_bytes)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/synth", description=__doc__.splitlines()[0])
    parser.add_argument("dest", type=Path, nargs="?", help="folder to make")
    parser.add_argument("--preset", choices=PRESETS, required=True)
    parser.add_argument(
        "--only", nargs="+", choices=COMPONENTS, default=list(COMPONENTS), metavar="COMPONENT",
        help=f"weights of these alone, of {', '.join(COMPONENTS)}; config files are written for all",
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", default=[], type=setting, metavar="COMPONENT.KEY=VALUE",
        help="change a config file's value, given as JSON; may be repeated",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="print names and shapes of all tensors and write nothing")
    arguments = parser.parse_args()
    if arguments.dest is None and not arguments.list:
        parser.error("name the folder to make, or ask for --list")
    if arguments.dest is not None and arguments.dest.exists():
        parser.error(f"{arguments.dest} exists")
    return arguments


def setting(text: str) -> tuple[str, str, object]:
    key, _, value = text.partition("=")
    component, _, key = key.partition(".")
    if component not in COMPONENTS or not key:
        raise argparse.ArgumentTypeError(f"'{text}' is not of the form COMPONENT.KEY=VALUE")
    try:
        return component, key, json.loads(value)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"'{text}': {error}") from error


def preset_configs(preset: str) -> Configs:
    """What the recipe states of the published config files, over klein-emoji's where these are of the same classes."""
    recipe, components, besides = PRESETS[preset]
    stated = recipe_configs(recipe)
    configs = {}
    for component in COMPONENTS:
        own = json.loads((KLEIN_EMOJI / component / "config.json").read_text())
        own = own if components is shapes.COMPONENTS else {}
        tokens = {key: own[key] for key in TOKENS if key in own}
        configs[component] = own | stated[component] | besides.get(component, {}) | tokens
    return configs


def recipe_configs(name: str) -> Configs:
    """The [configs] of a recipe, laid over those of its base."""
    recipe = tomllib.loads((RECIPES / f"{name}.toml").read_text())
    configs = recipe_configs(recipe["base"]) if "base" in recipe else {}
    for component, values in recipe.get("configs", {}).items():
        configs[component] = configs.get(component, {}) | values
    return configs


def write_small_files(dest: Path, preset: str, configs: Configs) -> None:
    shutil.copytree(KLEIN_EMOJI, dest, ignore=shutil.ignore_patterns(*COMPONENTS, "recipe.toml"))
    for component, config in configs.items():
        (dest / component).mkdir()
        (dest / component / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    recipe, _, _ = PRESETS[preset]
    source = 'repo = ""\nrevision = ""\nlicense = "random weights"\n'
    (dest / "recipe.toml").write_text(f'base = "{recipe}"\nname = "{recipe}"\n\n[source]\n{source}')


if __name__ == "__main__":
    main()
