"""Captions as token ids on the training device: drawn at random for training, or encoded from given text."""

import torch

from .captions import load_meta, phrases, suffixes
from .config import PALETTE, TEXT_LENGTH
from .tokenizer import HEAD, PAD, TAIL, load_tokenizer

WHITE_SHARE = 0.45  # of the captions name no colour; the rest is spread evenly over the suffixes
EMPTY = -1  # marks the unused end of a row in a table of ids


class Prompts:
    """Tables of phrase and suffix ids; a prompt is HEAD + phrase + suffix + TAIL, padded right to TEXT_LENGTH.

    The parts are tokenised apart and joined as ids, so a training batch costs a few gathers and no tokenizer call.
    """

    def __init__(self, work, device):
        self.tokenizer, self.device = load_tokenizer(work), device
        self.pad = self.tokenizer.token_to_id(PAD)
        all_phrases, all_suffixes = phrases(load_meta(work)), suffixes()
        self.phrase_ids = self._table([phrase for _, phrase, _ in all_phrases])
        self.suffix_ids = self._table([suffix for _, suffix in all_suffixes])
        self.head = torch.tensor(self.tokenizer.encode(HEAD).ids, device=device)
        self.tail = torch.tensor(self.tokenizer.encode(TAIL).ids, device=device)
        self.concept = torch.tensor([concept for concept, _, _ in all_phrases], device=device)
        self.phrase_weight = torch.tensor([weight for _, _, weight in all_phrases], device=device)
        colours = list(PALETTE)
        self.suffix_colour = torch.tensor([colours.index(colour) for colour, _ in all_suffixes], device=device)
        weight = torch.ones(len(all_suffixes)) / (len(all_suffixes) - 1) * (1 - WHITE_SHARE)
        weight[0] = WHITE_SHARE
        self.suffix_weight = weight.to(device)

    def _table(self, texts):
        """Ids of each text, one row each, rows filled up with EMPTY: [len(texts), longest]."""
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch(texts)]
        table = torch.full((len(rows), max(map(len, rows))), EMPTY)
        for i, ids in enumerate(rows):
            table[i, : len(ids)] = torch.tensor(ids, dtype=torch.long)
        return table.to(self.device)

    def only_concepts(self, count):
        """From now on draws the first COUNT concepts only (smoke tests)."""
        self.phrase_weight *= self.concept < count

    def _assemble(self, phrase, suffix):
        """Indices [B] of phrases and suffixes -> ids and mask [B, TEXT_LENGTH]."""
        n = len(phrase)
        room = torch.full((n, TEXT_LENGTH), EMPTY, device=self.device)
        parts = [
            self.head.expand(n, -1),
            self.phrase_ids[phrase],
            self.suffix_ids[suffix],
            self.tail.expand(n, -1),
            room,
        ]
        ids = torch.cat(parts, 1)
        order = (ids < 0).int().argsort(dim=1, stable=True)  # moves EMPTY behind everything, keeps the rest in order
        ids = ids.gather(1, order)[:, :TEXT_LENGTH]
        return torch.where(ids < 0, self.pad, ids), ids >= 0

    def batch(self, n):
        """Draws N captions -> concept [n], colour [n], ids [n, TEXT_LENGTH], mask [n, TEXT_LENGTH]."""
        phrase = torch.multinomial(self.phrase_weight, n, replacement=True)
        suffix = torch.multinomial(self.suffix_weight, n, replacement=True)
        return self.concept[phrase], self.suffix_colour[suffix], *self._assemble(phrase, suffix)

    def encode(self, texts):
        """Free text -> ids and mask [len(texts), TEXT_LENGTH]; what is too long is cut."""
        ids = torch.full((len(texts), TEXT_LENGTH), self.pad)
        lengths = []
        for i, text in enumerate(texts):
            row = self.tokenizer.encode(HEAD + text + TAIL).ids[:TEXT_LENGTH]
            ids[i, : len(row)] = torch.tensor(row)
            lengths.append(len(row))
        lengths = torch.tensor(lengths, device=self.device)
        return ids.to(self.device), torch.arange(TEXT_LENGTH, device=self.device) < lengths[:, None]
