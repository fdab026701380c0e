"""The table of results, with published results of GPT-2 and the convention of each metric."""

from collections.abc import Collection, Mapping

# Hub ids of OpenAI's four checkpoints.
BASELINES = tuple(
    f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
)
PAPER = "GPT-2 paper, table 3"
# Metric -> publisher and the results of gpt2, gpt2-medium, gpt2-large, gpt2-xl; None if unknown.
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
# The convention of a metric, found by `TASK/NAME`, `TASK` or `NAME`, in this order.
CONVENTIONS = {
    "train": "mean over all counted tokens of the windows",
    "val": "mean over all counted tokens of the windows",
    "hellaswag/acc": "completion, unchanged text; highest likelihood",
    "hellaswag/acc_norm_per_token": "the same; log-likelihood per token, as build-nanogpt and llm.c",
    "hellaswag/acc_norm_per_char": "the same; log-likelihood per character",
    "hellaswag_lm_eval/acc": "lm-eval's prompt; highest likelihood",
    "hellaswag_lm_eval/acc_norm_per_token": "the same; log-likelihood per token",
    "hellaswag_lm_eval/acc_norm_per_char": "the same; log-likelihood per character, lm-eval's acc_norm",
    "lambada/last_word_acc": "all tokens of the last word are first choice, as lm-eval",
    "lambada/last_word_perplexity": "per last word, as lm-eval",
    "lambada/last_token_acc": "the last token is first choice",
    "lambada/last_token_perplexity": "per last token",
    "chat/exact_match": "greedy answers through the chat template, equal to the expected ones",
    "chat/stop_rate": "greedy answers that end by themselves",
    "chat": "the same, of one group of items",
    "perplexity_per_word": "nats per word before de-tokenization, line ends counted; one stream",
    "perplexity_per_token": "nats per token; not comparable across tokenizers",
    "bits_per_byte": "bits per UTF-8 byte of the text that the model reads",
    "loss": "nats per token",
    "lm_eval_word_perplexity": "lm-eval's: per document, with its de-tokenizer and word count",
    "lm_eval_byte_perplexity": "the same, per byte of the original text",
    "lm_eval_bits_per_byte": "the same, in bits",
}


def convention(metric: str) -> str:
    """Describes how the metric `TASK/NAME` is computed; empty if unknown."""
    task, _, name = metric.partition("/")
    if name.endswith("_stderr"):
        return "standard error over items, windows or documents"
    if task.startswith("lm_eval:"):
        return "computed by lm-evaluation-harness"
    return next((CONVENTIONS[key] for key in (metric, task, name) if key in CONVENTIONS), "")


def markdown_table(
    results: Mapping[str, Mapping[str, float]], comparable: Collection[str] = ()
) -> str:
    """Formats results, model -> metric -> value, as a Markdown table: one row per metric, standard errors after "±".

    `comparable` are the tasks that ran on the data of the published results. Published results of a released model
    are in brackets after its value if the model is among `results`, and in a separate column if not.
    """
    sizes = [name.rpartition("/")[2] for name in BASELINES]
    names = dict.fromkeys(name for found in results.values() for name in found)
    metrics = [name for name in names if not name.endswith("_stderr")]
    known = {name for name in PUBLISHED.keys() & names if name.partition("/")[0] in comparable}
    shown = {name.rpartition("/")[2] for name in results}
    others = [size for size in sizes if known and size not in shown]
    rows = [["metric", *results, *(f"{size}, published" for size in others), "convention"]]
    for metric in metrics:
        publisher, figures = PUBLISHED[metric] if metric in known else ("", [None] * len(sizes))
        published = dict(zip(sizes, figures, strict=True))
        cells = [
            cell(metric, found, published.get(name.rpartition("/")[2]))
            for name, found in results.items()
        ]
        cells += ["" if published[size] is None else f"{published[size]:.4g}" for size in others]
        source = f" (published: {publisher})" if publisher else ""
        rows.append([metric, *cells, convention(metric) + source])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    # Aligned, to be readable as plain text.
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows)


def cell(metric: str, results: Mapping[str, float], published: float | None) -> str:
    """Formats a value with its standard error, and the published value in brackets."""
    if metric not in results:
        return ""
    text = f"{results[metric]:.4f}"
    if f"{metric}_stderr" in results:
        text += f" ± {results[f'{metric}_stderr']:.4f}"
    return text if published is None else f"{text} ({published:.4g})"
