"""De-tokenizers: turn the space-separated words of WikiText and Penn Treebank into natural text.

The GPT-2 paper (section 3.1) uses "invertible de-tokenizers" for these corpora, but did not publish them. `detokenize`
is invertible: the corpus's own rules would split its output into the same words. `lm_eval_wikitext` is the
de-tokenizer of lm-evaluation-harness, after Megatron-LM's. It is not quite invertible; the harness's word perplexity
is defined by it.
"""

import re
from typing import NamedTuple


class Joins(NamedTuple):
    """Words without a space before them (`left`), after them (`right`), or on both sides (`both`: word -> its text)."""

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
    """Returns the text of `corpus`, "wikitext" or "ptb", without the spaces that its tokenizer inserted.

    Line breaks are kept. Double quotes open and close in turn within a line.
    """
    return "\n".join(join_words(line.split(), CORPORA[corpus]) for line in text.split("\n"))


def join_words(words: list[str], joins: Joins) -> str:
    """Joins the words of one line."""
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
    """Returns a page of WikiText as lm-evaluation-harness passes it to the model."""
    for pattern, replacement in LM_EVAL_RULES:
        text = re.sub(pattern, replacement, text)
    return text


def count_words(text: str) -> int:
    """Counts the space-separated words of a corpus, with each line end as one more.

    This is the unit of the published perplexities: 245,569 in WikiText-2's test split, 82,430 in Penn Treebank's.
    """
    lines = text.removesuffix("\n").split("\n")
    return sum(len(line.split()) for line in lines) + len(lines)
