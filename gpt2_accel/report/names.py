"""The names of metrics in words, as figures and tables show them."""

TASKS = {
    "val": "validation",
    "train": "training",
    "hellaswag": "HellaSwag",
    "text": "own text,",
}
METRICS = {
    "loss": "loss in nats per token",
    "acc": "accuracy",
    "acc_norm_per_token": "accuracy by likelihood per token",
    "acc_norm_per_char": "accuracy by likelihood per character",
    "grad_norm": "gradient norm before clipping",
    "mfu": "model FLOPs utilization",
    "memory_gb": "memory in GB",
}
# Metrics of these endings depend on the tokenizer.
PER_TOKEN = ("/loss", "/perplexity", "/perplexity_per_token")


def in_words(metric: str) -> str:
    """Returns a metric's name in words: `val/bits_per_byte` becomes `validation bits per byte`."""
    task, _, name = metric.rpartition("/")
    words = METRICS.get(name, name.replace("_", " "))
    if task.startswith("lm_eval:"):
        return f"{task.removeprefix('lm_eval:')} {words}, by lm-evaluation-harness"
    return f"{TASKS.get(task, task)} {words}".lstrip()


def compares(metric: str) -> bool:
    """Whether the metric is comparable across tokenizers."""
    return metric.startswith("lm_eval:") or not metric.endswith(PER_TOKEN)
