#!/usr/bin/env python3
"""Renders the training pictures: Noto Emoji of six groups at 256 px into WORK/emoji.zip, captions into WORK/meta.json.

Wants the npm packages @iconify-json/noto (drawings) and emojibase-data (labels, tags, groups) unpacked in a folder.
"""

import argparse
import collections
import io
import json
import zipfile
from pathlib import Path

import resvg_py
from PIL import Image

SIDE = 256
GROUPS = {
    "objects",
    "travel & places",
    "smileys & emotion",
    "animals & nature",
    "food & drink",
    "activities",
}


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def code_of(hexcode):
    """Code points of an emoji without variation selectors: the two packages disagree on those."""
    return "-".join(part for part in hexcode.lower().split("-") if part != "fe0f")


class Drawings:
    """The SVGs of @iconify-json/noto by emoji code."""

    def __init__(self, folder):
        self.set = read_json(folder / "icons.json")
        self.name = {code_of(code): name for code, name in read_json(folder / "chars.json").items()}

    def svg(self, code):
        icon = self.set["icons"][self.name[code]]
        width, height = (icon.get(side, self.set.get(side, 16)) for side in ("width", "height"))
        return (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
            f' viewBox="0 0 {width} {height}" width="{SIDE}" height="{SIDE}">{icon["body"]}</svg>'
        )

    def png(self, code):
        """Rendered with transparent ground, as RGBA PNG bytes."""
        rendered = resvg_py.svg_to_bytes(svg_string=self.svg(code), width=SIDE, height=SIDE)
        out = io.BytesIO()
        Image.open(io.BytesIO(bytes(rendered))).convert("RGBA").save(out, "PNG", compress_level=6)
        return out.getvalue()


def emoji_list(folder, drawings):
    """Emoji of GROUPS that have a drawing, in Unicode order, as the dicts of meta.json."""
    messages = read_json(folder / "messages.json")
    groups = {group["order"]: group["message"] for group in messages["groups"]}
    subgroups = {group["order"]: group["message"] for group in messages["subgroups"]}
    for emoji in sorted(read_json(folder / "data.json"), key=lambda emoji: emoji.get("order", 0)):
        group, code = groups.get(emoji.get("group")), code_of(emoji["hexcode"])
        if group in GROUPS and code in drawings.name:
            yield {
                "code": code,
                "label": emoji["label"],
                "tags": emoji.get("tags", []),
                "group": group,
                "sub": subgroups.get(emoji.get("subgroup")),
                "emoji": emoji["emoji"],
            }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--npm", type=Path, default=Path("node_modules"), help="folder of the packages (%(default)s)")
    parser.add_argument("--work", type=Path, default=Path("work"), help="folder to write to (%(default)s)")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    drawings = Drawings(args.npm / "@iconify-json/noto")
    meta = list(emoji_list(args.npm / "emojibase-data/en", drawings))
    with zipfile.ZipFile(args.work / "emoji.zip", "w", zipfile.ZIP_STORED) as archive:
        for m in meta:
            entry = zipfile.ZipInfo(m["code"] + ".png")  # carries no date: the same drawings give the same archive
            archive.writestr(entry, drawings.png(m["code"]))
    (args.work / "meta.json").write_text(json.dumps(meta, ensure_ascii=False), encoding="utf-8")
    print(len(meta), "emoji:", dict(collections.Counter(m["group"] for m in meta)))


if __name__ == "__main__":
    main()
