"""The Hub data sets of the benchmarks."""

from typing import NamedTuple


class Source(NamedTuple):
    """A split of a data set on the Hub, and its text column."""

    repo_id: str
    config: str
    split: str
    column: str | None = None

    @property
    def file(self) -> str:
        """The Hub's Parquet file of the split; all splits here fit into one file."""
        return f"{self.config}/{self.split}/0000.parquet"


SOURCES = {
    "hellaswag": Source("Rowan/hellaswag", "default", "validation"),
    "hellaswag_lm_eval": Source("Rowan/hellaswag", "default", "validation"),
    # OpenAI's own copy of LAMBADA, which keeps case and punctuation.
    "lambada": Source("EleutherAI/lambada_openai", "default", "test", "text"),
    # The files of Salesforce/wikitext, an article a row.
    "wikitext2": Source("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", "test", "page"),
    "wikitext103": Source(
        "EleutherAI/wikitext_document_level", "wikitext-103-raw-v1", "test", "page"
    ),
    "ptb": Source("ptb-text-only/ptb_text_only", "penn_treebank", "test", "sentence"),
}
