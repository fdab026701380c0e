"""Corpora of words between spaces -> text as people write it, which is what GPT-2 was trained on.

The GPT-2 paper (section 3.1) undoes the tokenization of WikiText and Penn Treebank by "invertible
de-tokenizers", which it did not publish. `detokenize` is one: what it joins, the corpus's own rules would
split again. `lm_eval_wikitext` is that of lm-evaluation-harness, after Megatron-LM's; it is not quite
invertible, and its word perplexity is defined by it.
"""

import re
from typing import NamedTuple


class Joins(NamedTuple):
    """Words that are written without a space before them, after them, or on either side."""

    left: frozenset[str]
    right: frozenset[str]
    both: dict[str, str]


CONTRACTIONS = ("n't", "'s", "'re", "'ve", "'ll", "'d", "'m", "'")
CORPORA = {
    # Moses' tokenizer, with marks for a hyphen, comma or point inside a word.
    "wikitext": Joins(
        left=frozenset((*CONTRACTIONS, *".,;:!?)]}%", "...")),
        right=frozenset("([{$£€"),
        both={"@-@": "-", "@,@": ",", "@.@": "."},
    ),
    # Lower case, no punctuation, N for numbers (Mikolov's version).
    "ptb": Joins(left=frozenset((*CONTRACTIONS, "%")), right=frozenset("$#"), both={}),
}
LM_EVAL_RULES = (
    (r"s '", r"s'"),
    (r"/' [0-9]/", r"/'[0-9]/"),
    *((f" @{mark}@ ".replace(".", r"\."), mark) for mark in "-,."),
    *((rf" {re.escape(mark)} ", f"{mark} ") for mark in ":;.!?,"),
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
    *((" ".join("=" * n), "=" * n) for n in (4, 3, 2)),
    (" ° ", "°"),
    (r" \n", "\n"),
    (r"\n ", "\n"),
    (r" N ", " 1 "),
    (r" 's", "'s"),
)


def detokenize(text: str, corpus: str) -> str:
    """The text of `corpus`, "wikitext" or "ptb", without the spaces that its tokenizer put in.

    Lines stay lines. Double quotes open and close in turn within a line.
    """
    return "\n".join(join_words(line.split(), CORPORA[corpus]) for line in text.split("\n"))


def join_words(words: list[str], joins: Joins) -> str:
    """The words of one line as written text."""
    parts: list[str] = []
    glued, quoted = True, False  # glued: the next word follows without a space
    for word in words:
        opens = word == '"' and not quoted
        closes = word == '"' and quoted
        quoted = opens or (quoted and not closes)
        if not (glued or closes or word in joins.left or word in joins.both):
            parts.append(" ")
        parts.append(joins.both.get(word, word))
        glued = opens or word in joins.right or word in joins.both
    return "".join(parts)


def lm_eval_wikitext(text: str) -> str:
    """A page of WikiText as lm-evaluation-harness hands it to the model."""
    for pattern, replacement in LM_EVAL_RULES:
        text = re.sub(pattern, replacement, text)
    return text


def count_words(text: str) -> int:
    """The words between the spaces of a corpus, each line's end one more: the unit of the published
    perplexities (245,569 for WikiText-2's test split, 82,430 for Penn Treebank's)."""
    lines = text.removesuffix("\n").split("\n")
    return sum(len(line.split()) for line in lines) + len(lines)
