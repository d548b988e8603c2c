"""What a caption can say: phrases that name one concept (an emoji), and suffixes that name the background."""

import json
from pathlib import Path

from .config import PALETTE

SUFFIXES = (
    " on {a} {c} background",
    " with {a} {c} background",
    ", {c} background",
    " on {c}",
    " with {c} background",
)
BOOSTED_GROUPS = ("food & drink", "animals & nature")  # seen more often: what people ask for first
CLOCK_FACES = "time"  # seen less often: two dozen pictures that hardly differ


def load_meta(work):
    """The emoji in rendering order: dicts with code, label, tags, group, sub, emoji (written by prep.py)."""
    return json.loads(Path(work, "meta.json").read_text(encoding="utf-8"))


def article(word):
    return "an" if word[:1].lower() in "aeiou" else "a"


def on_background(phrase, colour):
    """The plainest of the trained colour forms, used wherever colours are checked."""
    return phrase + SUFFIXES[0].format(a=article(colour), c=colour)


def short_names(meta):
    """Words and tags given to the one concept they fit best -> {concept: [(rank, length, word)]}.

    A word shared by several emoji ("cat", "heart") goes to a single owner, so that no phrase is ambiguous: first the
    emoji whose label ends in it (rank 0), then one whose label contains it (1), then one that is tagged with it (2).
    """
    labels = {m["label"].lower() for m in meta}
    claims = {}
    for i, m in enumerate(meta):
        words = m["label"].lower().split()
        for word in set(words) | {tag.lower() for tag in m["tags"]}:
            if len(word) > 2 and word not in labels and word.replace(" ", "").replace("-", "").isalpha():
                rank = 0 if word == words[-1] else 1 if word in words else 2
                claims.setdefault(word, []).append((rank, len(m["label"]), i))
    names = {}
    for word, claim in claims.items():
        rank, _, owner = min(claim)
        names.setdefault(owner, []).append((rank, len(word), word))
    return names


def phrase_weights(m, names):
    """Phrases of one emoji -> {phrase: relative frequency}, not normalised."""
    label, emoji = m["label"], m["emoji"]
    a = "" if label.endswith("s") or label[:1].isdigit() else article(label) + " "
    weights = {
        label: 0.32,
        a + label: 0.22,
        label + " emoji": 0.14,
        f"an emoji of {a}{label}": 0.04,
        f"a picture of {a}{label}": 0.05,
        f"a drawing of {a}{label}": 0.04,
        label + " icon": 0.03,
        label[:1].upper() + label[1:]: 0.03,
        (a + label).capitalize() + ".": 0.02,
        emoji: 0.015,
    }
    bare = emoji.replace("\ufe0f", "")  # the same emoji without its variation selector
    weights[bare] = weights.get(bare, 0) + 0.015
    tags = [t for t in m["tags"] if t.isascii() and t.lower() not in label.lower()][:3]
    for tag in tags:
        weights[f"{label}, {tag}"] = 0.05 / len(tags)
    for rank, _, word in sorted(names)[:6]:
        weights[word] = weights.get(word, 0) + (0.03 if rank < 2 else 0.012)
        if rank == 0 and not word.endswith("s"):
            weights[f"{article(word)} {word}"] = 0.03
    return weights


def phrases(meta):
    """Every phrase -> [(concept, phrase, weight)]; the weights of a concept sum to its share of the training."""
    names, out = short_names(meta), []
    for i, m in enumerate(meta):
        weights = phrase_weights(m, names.get(i, []))
        total = sum(weights.values())
        boost = 0.6 if m["sub"] == CLOCK_FACES else 1.5 if m["group"] in BOOSTED_GROUPS else 1.0
        out += [(i, phrase, weight / total * boost) for phrase, weight in weights.items()]
    return out


def suffixes():
    """Every background suffix -> [(colour, suffix)]; the first one is empty and means white."""
    return [("white", "")] + [(c, s.format(a=article(c), c=c)) for c in PALETTE for s in SUFFIXES]
