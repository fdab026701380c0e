"""The table of results, with what others published for GPT-2 beside it, and by which convention."""

from collections.abc import Collection, Mapping

# What OpenAI's four checkpoints are called on the Hub.
BASELINES = tuple(
    f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
)
PAPER = "GPT-2 paper, table 3"
# Metric -> who published it; gpt2, gpt2-medium, gpt2-large, gpt2-xl, None where nothing is known.
PUBLISHED: dict[str, tuple[str, tuple[float | None, ...]]] = {
    "train/loss": ("nanoGPT, on OpenWebText", (3.11, 2.85, 2.66, 2.56)),
    "val/loss": ("nanoGPT, on OpenWebText", (3.12, 2.84, 2.67, 2.54)),
    "hellaswag/acc_norm_per_token": ("llm.c", (0.2945, 0.3752, 0.4320, 0.4889)),
    "hellaswag_lm_eval/acc": ("lm-evaluation-harness", (0.2892, None, None, None)),
    "hellaswag_lm_eval/acc_norm_per_char": ("lm-evaluation-harness", (0.3114, None, None, None)),
    "lambada/last_word_acc": ("lm-evaluation-harness", (0.3256, None, None, None)),
    "lambada/last_word_perplexity": ("lm-evaluation-harness", (40.06, None, None, None)),
    "lambada/last_token_acc": (
        f"{PAPER}, with a stop-word filter",
        (0.4599, 0.5548, 0.6012, 0.6324),
    ),
    "lambada/last_token_perplexity": (PAPER, (35.13, 15.60, 10.87, 8.63)),
    "wikitext2/perplexity_per_word": (PAPER, (29.41, 22.76, 19.93, 18.34)),
    "wikitext2/lm_eval_word_perplexity": ("lm-evaluation-harness", (37.37, None, None, None)),
    "wikitext103/perplexity_per_word": (PAPER, (37.50, 26.37, 22.05, 17.48)),
    "ptb/perplexity_per_word": (PAPER, (65.85, 47.33, 40.31, 35.76)),
}
# The convention of a metric, by its whole name, its task or its own name, the first that is here.
CONVENTIONS = {
    "train": "mean over all tokens of the windows",
    "val": "mean over all tokens of the windows",
    "hellaswag/acc": "completion, text as it is; highest likelihood",
    "hellaswag/acc_norm_per_token": "the same; log-likelihood by tokens, as build-nanogpt and llm.c",
    "hellaswag/acc_norm_per_char": "the same; log-likelihood by characters",
    "hellaswag_lm_eval/acc": "lm-eval's prompt; highest likelihood",
    "hellaswag_lm_eval/acc_norm_per_token": "the same; log-likelihood by tokens",
    "hellaswag_lm_eval/acc_norm_per_char": "the same; log-likelihood by characters, lm-eval's acc_norm",
    "lambada/last_word_acc": "all tokens of the last word are first choice, as lm-eval",
    "lambada/last_word_perplexity": "per last word, as lm-eval",
    "lambada/last_token_acc": "the last token is first choice",
    "lambada/last_token_perplexity": "per last token",
    "perplexity_per_word": "nats by words before de-tokenization, line ends counted; one stream",
    "perplexity_per_token": "nats by the model's own tokens; does not compare across tokenizers",
    "bits_per_byte": "bits by the UTF-8 bytes of the text that is read",
    "loss": "nats per token",
    "lm_eval_word_perplexity": "lm-eval's: document by document, its de-tokenizer, its count of words",
    "lm_eval_byte_perplexity": "the same, by bytes of the original",
    "lm_eval_bits_per_byte": "the same, in bits",
}


def convention(metric: str) -> str:
    """In words, how the metric `TASK/NAME` is computed."""
    task, _, name = metric.partition("/")
    if name.endswith("_stderr"):
        return "standard error over items, windows or documents"
    if task.startswith("lm_eval:"):
        return "lm-evaluation-harness itself"
    return next((CONVENTIONS[key] for key in (metric, task, name) if key in CONVENTIONS), "")


def markdown_table(
    results: Mapping[str, Mapping[str, float]], comparable: Collection[str] = ()
) -> str:
    """Results, model -> metric -> value, as a table with a row a metric and its standard error after "±".

    `comparable` are the tasks that ran on what the published figures are of. What was published in them for the four
    released models stands in columns of their own, or, where they are among those evaluated, in brackets after the
    value.
    """
    nothing = ("", (None,) * len(BASELINES))
    sizes = [name.rpartition("/")[2] for name in BASELINES]
    metrics = {
        metric: PUBLISHED.get(metric, nothing)
        if metric.partition("/")[0] in comparable
        else nothing
        for found in results.values()
        for metric in found
        if not metric.endswith("_stderr")
    }
    others = [size for size in sizes if size not in {name.rpartition("/")[2] for name in results}]
    if all(found == nothing for found in metrics.values()):
        others = []
    rows = [["metric", *results, *(f"{size}, published" for size in others), "convention"]]
    for metric, (publisher, figures) in metrics.items():
        published = dict(zip(sizes, figures, strict=True))
        cells = [
            cell(metric, found, published.get(name.rpartition("/")[2]))
            for name, found in results.items()
        ]
        cells += ["" if published[size] is None else f"{published[size]:.4g}" for size in others]
        said = f" (published: {publisher})" if publisher else ""
        rows.append([metric, *cells, convention(metric) + said])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(map(str.ljust, row, widths)) + " |"  # readable as it is, too
        for row in [rows[0], ["-" * width for width in widths], *rows[1:]]
    ]
    return "\n".join(lines)


def cell(metric: str, results: Mapping[str, float], published: float | None) -> str:
    """A value with its standard error, and the published one in brackets."""
    if metric not in results:
        return ""
    text = f"{results[metric]:.4f}"
    if f"{metric}_stderr" in results:
        text += f" ± {results[f'{metric}_stderr']:.4f}"
    return text if published is None else f"{text} ({published:.4g})"
