"""Tokens per second of generation: a loop without a KV cache, HF's `generate`, and this toolkit.

    python benchmarks/generate.py --batch_sizes 1 16 --dtypes float32 bfloat16

All use the same random weights of GPT-2 124M's shape, a prompt of 16 tokens and 48 new tokens, greedy. Every contestant
runs once per round, so that all share the state of the machine. The result is the median over the rounds; the ratio to
HF is the median of the rounds' ratios. The time includes the forward of the prompt and the choice of tokens, but not
compilation, which happens in a warmup round. The loop without a KV cache is nanoGPT's: a forward of the whole text for
each new token. It runs for `--no_cache_tokens` tokens in the middle of the text, where a token has the mean cost, and
only for batches up to `--no_cache_batch`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from results import RESULTS, ratios, summary, write_result
from timing import seconds_of
from transformers import GPT2LMHeadModel

from gpt2_accel import GPT, GPTConfig, cli
from gpt2_accel.config import parse_config, setting
from gpt2_accel.device import best_device
from gpt2_accel.generation.sampling import DTYPES, Sampling, tokens
from gpt2_accel.hf.gpt2 import hf_config, to_hf


@dataclass
class Benchmark:
    size: str = setting("gpt2", "gpt2, gpt2-medium, gpt2-large or gpt2-xl")
    batch_sizes: list[int] = setting([1, 16], "batch sizes")
    dtypes: list[str] = setting(["float32", "bfloat16"], "dtypes of the weights")
    prompt_tokens: int = setting(16, "length of the prompt")
    new_tokens: int = setting(48, "length of the continuation")
    rounds: int = setting(3, "rounds; each contestant runs once per round")
    no_cache_tokens: int = setting(8, "new tokens of the loop without a KV cache; 0 skips it")
    no_cache_batch: int = setting(1, "largest batch of the loop without a KV cache")
    threads: int = setting(0, "torch's threads on a CPU; 0 is torch's default")
    results: str = setting(str(RESULTS), "folder of the results")


def main() -> None:
    config = parse_config(Benchmark)
    if config.threads:
        torch.set_num_threads(config.threads)
    print("| dtype | batch | generation | tokens/s | x HF | fastest round |\n" + "|---" * 6 + "|")
    rows = []
    for dtype in config.dtypes:
        model, hf = build_models(config.size, DTYPES[dtype])
        for batch_size in config.batch_sizes:
            runs = contestants(config, model, hf, batch_size)
            rows += compete(config, dtype, batch_size, runs)
    settings = ("size", "prompt_tokens", "new_tokens", "rounds")
    figures = {name: getattr(config, name) for name in settings} | {"rows": rows}
    write_result("generate", figures, config.results)


def build_models(size: str, dtype: torch.dtype) -> tuple[GPT, GPT2LMHeadModel]:
    """Builds a model, and the same model in `transformers`."""
    torch.manual_seed(0)
    model = GPT(GPTConfig.from_name(size)).eval()
    hf = GPT2LMHeadModel(hf_config(model.config, {"bos_token_id": None, "eos_token_id": None}))
    hf.load_state_dict(to_hf(model), strict=False)  # the head is tied
    return model.to(best_device(), dtype), hf.to(best_device(), dtype).eval()


def contestants(
    config: Benchmark, model: GPT, hf: GPT2LMHeadModel, batch_size: int
) -> dict[str, Callable[[], object]]:
    """Returns the contestants by name; each generates once."""
    prompt = torch.randint(50257, (batch_size, config.prompt_tokens), device=model.device)

    @torch.no_grad()
    def without_cache() -> None:
        before = (config.new_tokens - config.no_cache_tokens) // 2
        input_ids = torch.cat((prompt, prompt.new_zeros(batch_size, before)), dim=1)
        for _ in range(config.no_cache_tokens):
            x = model(input_ids)[:, -1]
            input_ids = torch.cat((input_ids, x.argmax(-1, keepdim=True)), dim=1)

    def hf_generate() -> None:
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        options |= {"attention_mask": torch.ones_like(prompt)}
        hf.generate(prompt, max_new_tokens=config.new_tokens, **options)

    def toolkit(compile: bool) -> None:
        sampling = Sampling(config.new_tokens, temperature=0)
        for _ in tokens(model, prompt.tolist(), sampling, compile=compile):
            pass

    found = {
        "HF generate": hf_generate,
        "gpt2_accel": partial(toolkit, compile=False),
        "gpt2_accel, compiled": partial(toolkit, compile=True),
    }
    if config.no_cache_tokens and batch_size <= config.no_cache_batch:
        found = {"no cache": without_cache, **found}
    return found


def compete(
    config: Benchmark, dtype: str, batch_size: int, runs: dict[str, Callable[[], object]]
) -> list[dict]:
    """Runs all contestants in turn; prints and returns a row for each."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(config.rounds + 1):
        for name, run in runs.items():
            new = config.no_cache_tokens if name == "no cache" else config.new_tokens
            took = seconds_of(run, best_device())
            if number:  # round 0 warms up and compiles
                seconds[name].append(took / new)
    rows = []
    for name, each in seconds.items():
        speed = summary([batch_size / one for one in each])
        ratio = summary(ratios(seconds["HF generate"], each))
        row = {"dtype": dtype, "batch_size": batch_size, "name": name}
        rows.append({**row, "tokens_per_second": speed, "speed": ratio})
        cells = f"{speed['median']:.1f} | {ratio['median']:.2f} | {speed['high']:.1f}"
        print(f"| {dtype} | {batch_size} | {name} | {cells} |", flush=True)
    return rows


if __name__ == "__main__":
    cli.run(main)
