"""The words that a corpus's perplexity is divided by."""

from gpt2_accel.evals.perplexity import load_corpus
from gpt2_accel.tokenizer import byte_tokenizer


def test_an_empty_line_at_the_end_of_a_file_counts_as_lm_eval_counts_it():
    def words(*texts):
        [document] = load_corpus("text", texts, byte_tokenizer())
        return document.words

    # Words, and one for each line's end.
    assert words("one two\n") == words("one two") == 3
    assert words("one two\n\n") == 4
    assert words("one two\n\n", "three\n") == words("one two\n\nthree\n") == 6
