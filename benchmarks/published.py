"""Computes the tables of docs/scaling.md and docs/results.md from the recorded runs of the studies.

`python benchmarks/table.py` writes them between the markers of the pages, and
`tests/benchmarks/test_benchmarks.py` compares them with the pages.
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from table import markdown

from gpt2_accel.tools.study import compare
from gpt2_accel.tools.study.scaling import LEVEL, fit_law
from gpt2_accel.tools.study.scaling import NAMES as COEFFICIENTS

# Budgets in FLOPs, parameters and tokens of the predicted run, and the file of the original law.
LAWS = (
    ((5e11, 1e12, 2e12, 4e12, 1e13), (803_200, 4706 * 4096), "law-1e14.json"),
    ((2e12, 4e12, 1e13, 2e13), (803_200, 4706 * 8192), "law-2e14.json"),
)
CORPORA = {"Python's library": "python", "tiny Shakespeare": "shakespeare"}
# For each corpus, the runs with the finally tuned settings among those with other seeds than 0.
CHOSEN = {
    "python": "optimizer == 'muon' or beta2 == 0.9999",
    "shakespeare": "optimizer == 'adamw' or min_lr_ratio == 0",
}

# For `epochs`: the usual weight decay of each optimizer, and the tokens of each training text.
USUAL_DECAY = {"muon": 0.3, "adamw": 0.1}
TEXTS = {"data/little_python": 75_426, "data/little_shakespeare": 77_858}
TEXTS |= {"data/own_python": 243_393, "data/own_shakespeare": 274_527}

# Of `equal_flops`: the architectures, and the rows of all their embeddings (4,096 tokens).
NAMES = {"gpt2": "GPT-2", "qwen3": "Qwen3", "nanochat": "nanochat"}
ROWS = {"gpt2": 4096 + 128, "qwen3": 4096, "nanochat": 2 * 4096}

# Of `real_models`: data -> how the table names it.
DATA = {
    "facts30": "30 conversations",
    "facts200": "200 conversations",
    "facts300": "300 conversations",
    "gsm60": "60 problems of GSM8K",
    "pairs200": "200 pairs (DPO; margin)",
}

# Study -> its setting, and the names of the values, the baseline first.
NANOGPT_LIST = {
    "clipping": ("max_grad_norm", {1.0: "clipped at norm 1", 0.0: "never clipped"}),
    "initialization": (
        "initialization",
        {
            "gpt2": "GPT-2's initial weights",
            "pytorch": "PyTorch's",
            "linear": "PyTorch's, but GPT-2's embeddings",
        },
    ),
    "beta2": ("beta2", {value: f"beta2 {value}" for value in (0.95, 0.99, 0.999)}),
}


def read_runs(path: Path) -> pd.DataFrame:
    """Returns the runs of a study's table, with a column for each setting."""
    runs = pd.read_csv(path)
    return runs.join(pd.DataFrame([json.loads(text) for text in runs.pop("settings")]))


def scaling(folder: Path) -> str:
    """Returns the table of both laws: the fit, the test of its form, the predictions."""
    folder = folder / "cpu/scaling"
    runs = read_runs(folder / "runs.csv")
    columns = []
    for budgets, target, name in LAWS:
        column = law_column(runs, budgets, target)
        column["predicted before the run"] = predicted(folder / name, target)
        columns.append(column)
    rows = []
    for name in columns[0]:
        rows.append([name] + [column[name] for column in columns])
    return markdown(("", "first", "second"), rows)


def predicted(path: Path, target: tuple[int, int]) -> str:
    """Returns the prediction and its interval as the original release computed them from draws of
    the law: their quantiles and 1.96 standard deviations of the residuals, added in quadrature."""
    law = json.loads(path.read_text(encoding="utf-8"))
    loss = loss_of(law["law"], *target)
    drawn = loss_of(np.array(law["samples"]).T, *target)
    ends = []
    for quantile in np.quantile(drawn, (0.025, 0.975)):
        apart = quantile - loss
        ends.append(loss + math.copysign(math.hypot(apart, 1.96 * law["spread"]), apart))
    low, high = ends
    return f"{loss:.3f}, {low:.3f} to {high:.3f}"


def loss_of(law: Sequence, N: float, D: float) -> Any:
    """Returns the loss of N parameters after D tokens. `law` is E, A, alpha, B, beta: numbers, or
    arrays for several laws."""
    E, A, alpha, B, beta = law
    return E + A * N**-alpha + B * D**-beta


def law_column(
    runs: pd.DataFrame, budgets: Sequence[float], target: tuple[int, int]
) -> dict[str, str]:
    """Returns the cells of one law by title."""
    away = np.abs(np.divide.outer(runs.flops.to_numpy(), budgets) - 1)  # (runs, budgets)
    near = away.min(1) < 0.05  # a run has full updates, so its FLOPs are not exactly the budget
    budget_of_run = np.array(budgets)[away.argmin(1)[near]]
    N, D, losses = runs.loc[near, ["parameters", "tokens", "loss"]].to_numpy(float).T
    fit = fit_law(N, D, losses, budget_of_run)
    residuals = losses - loss_of(fit.values, N, D)
    means = [f"{residuals[budget_of_run == budget].mean():+.3f}" for budget in budgets]
    powers = [f"{budget:.0e}".replace("e+", "e") for budget in budgets]
    cells = {"budgets in FLOPs": f"{powers[0]} to {powers[-1]}, {len(N)} runs"}
    for name, value in zip(COEFFICIENTS, fit.values, strict=True):
        cells[name] = f"{value:.3g}"
    cells["standard deviation of the residuals"] = f"{fit.spread:.3f}"
    cells["mean residual by budget"] = ", ".join(means)
    cells["test of the form"] = "p < 0.001" if fit.form < 0.001 else f"p = {fit.form:.2g}"
    cells["form"] = "refused" if fit.form < LEVEL else "holds"
    tokens = f"{target[1] / 1e6:.2f}M tokens"
    cells["loss of 2 layers of 160"] = f"{loss_of(fit.values, *target):.3f} after {tokens}"
    return cells


def rates(folder: Path) -> str:
    """Returns the lowest loss and the best rate of each width."""
    rows = []
    for width, runs in read_runs(folder / "cpu/scaling_rates.csv").groupby("n_embd"):
        losses = by_rate(runs)
        span = f"{losses.index[0]:g} to {losses.index[-1]:g}"
        lowest = f"{losses.min():.3f} at {losses.idxmin():g}"
        rows.append([str(width), span, lowest, f"{best_rate(losses):.4f}"])
    return markdown(("width", "rates", "lowest loss", "minimum of the parabola"), rows)


def by_rate(runs: pd.DataFrame) -> pd.Series:
    """Returns the losses of runs by learning rate, the lowest rate first."""
    return runs.set_index("learning_rate").loss.sort_index()


def best_rate(losses: pd.Series) -> float:
    """Returns the minimum of a parabola in the logarithm of the rate, through the lowest loss and
    up to two neighbours on each side. `losses` maps a rate to its loss."""
    best = losses.argmin()
    near = losses.iloc[max(0, best - 2) : best + 3]
    a, b, _ = np.polyfit(np.log(near.index), near, 2)
    return math.exp(-b / (2 * a))


def widths(folder: Path) -> str:
    """Returns Muon's best rate by width on two corpora, and the fitted power of the width."""
    rows = []
    lines = []
    for corpus, name in CORPORA.items():
        runs = read_runs(folder / f"cpu/widths_{name}.csv").groupby(["n_embd", "seed"])
        best = runs.apply(lambda group: best_rate(by_rate(group))).unstack()  # (widths, seeds)
        lowest = runs.loss.min().unstack().mean(axis=1)
        for width in best.index:
            best_rates = ", ".join(f"{rate:.4f}" for rate in best.loc[width])
            rows.append((corpus, str(width), best_rates, f"{lowest[width]:.3f}"))
        slopes, starts = np.polyfit(np.log(best.index), np.log(best), 1)
        at_768 = np.exp(slopes * math.log(768) + starts)
        values = f"{at_768.min():.4f} to {at_768.max():.4f}"
        power = plus_minus(slopes, ".2f")
        lines.append(
            f"- {corpus}: the rate falls as the width to the power of {power}; at 768 {values}."
        )
    heads = ("corpus", "width", "best rate of each seed", "mean of the lowest losses")
    return "\n\n".join([markdown(heads, rows), "\n".join(lines)])


def ratios(folder: Path) -> str:
    """Returns the differences in loss with another rate for Muon's AdamW part."""
    rows = []
    for corpus, name in CORPORA.items():
        runs = read_runs(folder / f"cpu/adamw_ratio_{name}.csv")
        losses = runs.pivot(index="adamw_ratio", columns="seed", values="loss")
        others = losses.index.drop(1.0)
        changes = [plus_minus(losses.loc[ratio] - losses.loc[1.0], "+.4f") for ratio in others]
        rows.append([corpus, plus_minus(losses.loc[1.0])] + changes)
    heads = ["corpus", "ratio 1"]
    heads += [f"ratio {ratio:g}" for ratio in others]
    return markdown(heads, rows)


def epochs(folder: Path) -> str:
    """Returns the changes of the loss by weight decay and dropout, by passes over a text."""
    rows = []
    for corpus, name in CORPORA.items():
        runs = read_runs(folder / f"cpu/epochs_{name}.csv").query("seed > 0")
        runs = runs.fillna({"dropout": 0.0})
        keys = ["optimizer", "data_dir", "n_embd", "tokens"]
        for (optimizer, data, width, tokens), group in sorted(runs.groupby(keys), reverse=True):
            columns = ["weight_decay", "dropout"]
            losses = group.pivot(index="seed", columns=columns, values="loss")
            usual = USUAL_DECAY[optimizer]
            before = losses[usual, 0.0]
            name = "Muon" if optimizer == "muon" else "AdamW"
            ratio = TEXTS[data] / group.parameters.iloc[0]
            row = [corpus, f"{name}, {width} wide", f"{tokens / TEXTS[data]:.0f}", f"{ratio:.2f}"]
            row.append(plus_minus(before))
            for changed in ((0.03, 0.0), (1.6, 0.0), (usual, 0.1), (1.6, 0.1)):
                known = changed in losses
                row.append(plus_minus(losses[changed] - before, "+.3f") if known else "")
            rows.append(row)
    heads = ["corpus", "model", "passes", "tokens per parameter", "loss as it was", "decay 0.03"]
    heads += ["decay 1.6", "dropout 0.1", "both"]
    return markdown(heads, rows)


def optimizers(folder: Path) -> str:
    """Returns the losses of AdamW and Muon, and the share of AdamW's tokens that Muon needs."""
    rows = []
    shares = []
    for corpus, name in CORPORA.items():
        runs = read_runs(folder / f"cpu/muon_{name}.csv").query(f"seed > 0 and ({CHOSEN[name]})")
        both = runs.pivot(index="tokens", columns=["optimizer", "seed"], values="loss")
        adamw = both["adamw"]
        muon = both["muon"]
        for tokens in adamw.index:
            row = [corpus, f"{tokens:,.0f}"]
            row += [plus_minus(adamw.loc[tokens]), plus_minus(muon.loc[tokens])]
            row.append(plus_minus(muon.loc[tokens] - adamw.loc[tokens], "+.4f"))
            rows.append(row)
        needed = tokens_needed(adamw.iloc[-1], muon.to_numpy(), muon.index / adamw.index[-1])
        shares.append(f"{plus_minus(needed, '.1%')} on {corpus}")
    return (
        f"{markdown(('corpus', 'tokens', 'AdamW', 'Muon', 'Muon - AdamW'), rows)}\n\n"
        f"Muon's tokens to AdamW's last loss, as a share of AdamW's: {', '.join(shares)}."
    )


def tokens_needed(goals: pd.Series, losses: np.ndarray, tokens: pd.Index) -> np.ndarray:
    """Returns the tokens at which `losses` reach the `goals`, (seeds,).

    `losses` are (budgets, seeds), the smallest budget first, and `tokens`, (budgets,), those of
    each budget, or a share. Interpolates over the logarithm of the tokens; a goal that the
    smallest budget exceeds needs at most its tokens.
    """
    lowest = np.minimum.accumulate(losses)
    both = zip(goals, lowest.T, strict=True)
    return np.exp([np.interp(-goal, -curve, np.log(tokens)) for goal, curve in both])


def plus_minus(values: Iterable[float], form: str = ".3f") -> str:
    """Formats the mean ± half the width of the 95% interval."""
    return compare.plus_minus(list(values), form)


def architectures(folder: Path) -> str:
    """Returns losses of models, each with one more change, after equal tokens and equal time."""
    runs = pd.read_csv(folder / "cpu/architectures.csv").query("seed > 0")  # 0 tuned the rate
    rows = {name: [name] for name in runs.model.unique()}
    heads = ["model"]
    for corpus, name in (("Python", "python_stdlib"), ("Shakespeare", "shakespeare_char")):
        heads += [f"{corpus}: equal tokens", "change", "equal time"]
        before = None
        for model, row in rows.items():
            chosen = runs[(runs.corpus == f"data/{name}") & (runs.model == model)]
            losses = chosen.pivot(index="tokens", columns="seed", values="loss")
            most = losses.iloc[-1]  # tokens
            fewest = losses.iloc[0]
            change = "" if before is None else plus_minus(most - before, "+.3f")
            row += [plus_minus(most), change, f"{fewest.mean():.3f}"]
            before = most
    return markdown(heads, rows.values())


def equal_flops(folder: Path) -> str:
    """Returns the bits per byte of three architectures at equal FLOPs, and the tokens with which
    each reaches those of the worst."""
    rows = []
    for corpus, name in CORPORA.items():
        runs = read_runs(folder / f"cpu/equal_flops_{name}.csv").query("seed > 0")  # 0 tuned
        for width, size in runs.groupby("n_embd"):
            by_model = dict(list(size.groupby("architecture")))
            bits = {key: bits_by_budget(by_model[key]) for key in NAMES}  # (budgets, seeds)
            worst = max(NAMES, key=lambda key: bits[key].iloc[-1].mean())
            goals = bits[worst].iloc[-1]
            most = bits[worst].index[-1]
            for key, shown in NAMES.items():
                values = bits[key]
                first = by_model[key].iloc[0]
                outside = (first.parameters - ROWS[key] * width) / 1e6
                tokens = tokens_needed(goals, values.to_numpy(), values.index)
                share = plus_minus(tokens / most, ".0%")
                if (values.iloc[0] < goals).any():
                    share = f"at most {share}"
                verdict = "the worst"
                if key != worst:
                    verdict = compare.judge(list(tokens - most))
                row = [corpus, f"{outside:.2f}M", shown, f"{first.learning_rate:.3g}"]
                row += [plus_minus(values.iloc[-1]), f"{tokens.mean() / 1e3:,.0f}k", share, verdict]
                rows.append(row)
    heads = ("corpus", "outside embeddings", "model", "rate", "bits per byte")
    return markdown((*heads, "tokens to the worst's", "share", "verdict"), rows)


def bits_by_budget(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the bits per byte by tokens, the fewest first, and seed."""
    return runs.pivot(index="tokens", columns="seed", values="bits_per_byte").sort_index()


def nanogpt_list(folder: Path) -> str:
    """Returns the losses of nanoGPT's CPU model by clipping, initial weights and AdamW's beta2."""
    rows = []
    for study, (setting, names) in NANOGPT_LIST.items():
        runs = read_runs(folder / f"cpu/{study}.csv")
        losses = runs.pivot(index="seed", columns=setting, values="loss")
        base = next(iter(names))
        for value, name in names.items():
            difference = losses[value] - losses[base]
            row = [name, plus_minus(losses[value])]
            if value == base:
                row += ["", "baseline"]
            else:
                row += [plus_minus(difference, "+.4f"), compare.judge(list(difference))]
            rows.append(row)
    return markdown(("variant", "loss", "difference", "verdict"), rows)


def real_models(folder: Path) -> str:
    """Returns what fine-tuning of pretrained models taught and kept; seeds are averaged."""
    runs = pd.read_csv(folder / "cpu/real_models.csv")
    runs = runs[runs.data != "none"]
    order = runs.data.map(list(DATA).index)
    runs = runs.assign(order=order).sort_values(["model", "order", "lora", "learning_rate"])
    same = ["model", "order", "data", "lora", "alpha", "learning_rate", "updates", "batch"]
    rows = []
    for values, group in runs.groupby(same, sort=False):
        model, _, data, lora, alpha, rate, updates, batch = values
        held_out = group.val_margin if data == "pairs200" else group.val_loss
        mean = group[["exact", "general", "kept"]].mean()
        rows.append(
            [
                f"{'Gemma' if 'gemma' in model else 'SmolLM2'}, {DATA[data]}",
                f"LoRA {lora}, alpha {alpha}" if lora else "full",
                f"{rate:.0e}".replace("e-0", "e-"),
                f"{updates}" if data == "pairs200" else f"{updates} x {batch}",
                str(len(group)),
                f"{held_out.mean():.2g}",
                "" if math.isnan(mean.exact) else f"{mean.exact:.0%}",
                f"{mean.general:.3g}",
                f"{mean.kept:.2f}",
            ]
        )
    heads = ("", "trained", "rate", "updates x tokens", "seeds", "val/loss", "exact", "general")
    return markdown((*heads, "val/kept"), rows)


STUDIES = {
    "nanogpt_list": nanogpt_list,
    "scaling": scaling,
    "rates": rates,
    "widths": widths,
    "ratios": ratios,
    "epochs": epochs,
    "optimizers": optimizers,
    "architectures": architectures,
    "equal_flops": equal_flops,
    "real_models": real_models,
}
