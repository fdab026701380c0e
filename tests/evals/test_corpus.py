"""The word count of a corpus's perplexity."""

from gpt2_accel.evals.perplexity import load_corpus
from gpt2_accel.tokenizer import byte_tokenizer


def test_line_ends_are_counted_as_in_lm_eval():
    def words(*texts):
        [document] = load_corpus("text", texts, byte_tokenizer())
        return document.words

    # The words, and one per line end.
    assert words("one two\n") == words("one two") == 3
    assert words("one two\n\n") == 4
    assert words("one two\n\n", "three\n") == words("one two\n\nthree\n") == 6
