"""The words that were retired stay so: names in the field's own terms, and sentences as an engineer writes them."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

import hpcdist

pytestmark = pytest.mark.once

ROOT = Path(hpcdist.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Retired in names, as a word of its own between underscores: what to say instead.
NAMES = {
    "anchor": "graph_input", "apart": "disjoint", "arm": "install", "bereaved": "on_peer_death",
    "board": "shared_record", "carried": "differentiable", "desk": "header buffers", "disarm": "uninstall",
    "front": "foreground", "giver": "source", "landing": "recv_buffer", "lane": "thread_record",
    "litter": "temp_files", "mail": "header_comm", "mates": "local_ranks", "memo": "typed fields",
    "mourn": "on_peer_death", "packing": "message", "parcels": "data_comm", "rivals": "conflicts_with",
    "room": "scratch", "said": "argument", "seat": "slot", "survey": "status_query", "taker": "dest",
    "tidy": "cleanup", "ward": "supervisor", "way": "route", "ways": "routes", "wire": "datagrams",
}  # fmt: skip

# Retired in docstrings, comments and messages.
PHRASES = {
    r"\bif (?:it|there) is none\b": "if there is no ...",
    r"\bgets? on\b": "make progress",
    r"\b(?:is|are|was|were) worked out\b|\bwork(?:s|ed)? out\b": "compute",
    r"\bmourns?\b|\bbereaved\b": "the death of a peer",
    r"\bwho waits for somebody\b": "chains of waiting ranks",
    r"\bone behind the other\b": "one after the other",
    r"\bso that they are\b": "say what it achieves",
}


def _tokens(path: Path) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(path.read_text()).readline))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_retired_words(path: Path) -> None:
    for token in _tokens(path):
        if token.type == tokenize.NAME:
            odd = NAMES.keys() & set(re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", token.string).lower()))
            assert not odd, f"line {token.start[0]}: {token.string}: say {[NAMES[word] for word in odd]}"
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            for phrase, instead in PHRASES.items():
                found = re.search(phrase, token.string)
                assert not found, f"line {token.start[0]}: {found and found[0]!r}: say {instead!r}"
