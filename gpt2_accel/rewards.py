"""Reinforcement learning from a checkable reward: prompts as a source, and the gradients of an
update.

For each prompt the model writes a group of answers, and a function scores them. The advantage of an
answer is its reward less the mean of its group (without division by the standard deviation: Liu et
al., 2025, arXiv:2503.20783). The loss is the mean over the counted tokens of the update, over all
ranks, of -advantage · log p (normalised over the update's tokens as in DAPO: Yu et al., 2025,
arXiv:2503.14476). The answers are from the current weights, and an update is made once of them, so
there are no ratios of probabilities to clip, and there is no KL term.

The seed of an answer is a function of the run's seed, the step, the prompt and the number of the
answer in its group, so a resume and other processes write the same answers, up to rounding.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from inspect import signature
from time import perf_counter
from typing import Any, NamedTuple, SupportsFloat

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from gpt2_accel.charts import fallen
from gpt2_accel.checkpoint.state_dict import unwrap
from gpt2_accel.data.conversations import plural
from gpt2_accel.data.documents import text_digest
from gpt2_accel.data.order import hash64
from gpt2_accel.evals.chat import Question, answers, read_question
from gpt2_accel.evals.formulas import mean
from gpt2_accel.evals.items import Item
from gpt2_accel.generation.sampling import Sampling, tokens
from gpt2_accel.hf.convert import load_name
from gpt2_accel.models import evaluating
from gpt2_accel.rounding import round_up
from gpt2_accel.run import Interrupted, MicroBatches, Run
from gpt2_accel.runtime.files import read_json_lines
from gpt2_accel.runtime.processes import all_or_none, on_main_process, process_state
from gpt2_accel.tokenizer import PreTrainedTokenizerBase, text_ends

Reward = Callable[[Mapping[str, Any], str], SupportsFloat | None]
"""(row, text of the answer) -> its reward, a finite number, or None to leave the answer out."""

# A sign does not follow a letter, digit or bracket. Three digits follow a comma (or LaTeX's).
NUMBER = re.compile(
    r"""(?x) (?: (?<![\w)\]}]) [-\u2212\uff0d\u2013] \$? )?
    (?: (?: \d{1,3}(?:(?:,|\{,}|\\!,|,\\!)\d{3})+(?!\d) | \d+ ) (?:\.\d+)? | (?<![\w.])\.\d+ )
    (?: [eE][-+\u2212]?\d{1,9}(?!\w) )?"""
)
PLAIN = str.maketrans("\u2212\uff0d\u2013", "---", ",{}!$\\")
# An answer with 0 for each number, if there is none, or if the last one is a part of 3/4, 12:30,
# 1 000, \sqrt{2} or the like, is before a raised digit or a fraction, or stands alone with others.
UNCLEAR = re.compile(
    r"""(?x) 0 (?: [^\s0=\#>]* | [^\S\n]*[-\u2212\u2013/^*\xd7\xb7\xf7+]?[^\S\n]* | \ +:\ * ) 0\D*\Z
    | (?: \\[dt]?frac | \\sqrt | \^ ) \W* 0\D*\Z | 0 (?: \W*\\pi | ! ) \D*\Z
    | 0\s*[\xb2\xb3\xb9\xbc-\xbe\u2070-\u2089\u2150-\u215f]\D*\Z
    | \A[^\w=\#>]* 0 (?: [^\w=\#>] | 0 | and | or | to )* 0 [^\w=\#>]*\Z | \A\D*\Z"""
)
LARGEST = 1e30  # a reward; squares of larger ones overflow in fp32
LEVEL = 10  # updates with equal rewards in each group, after which a line is printed
MULTIPLE = 16  # of tokens, to which rows are padded: a compiled model has few shapes


class Prompts:
    """The source of a run on tasks: the window of a task is its prompt, padded, and counts 1."""

    def __init__(self, tasks: Sequence[Question]):
        self.tasks = tasks
        self.length = max(len(task.ids) for task in tasks) + 1
        self.fingerprint = text_digest(repr([(task.row, task.ids) for task in tasks]))

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        ids = np.zeros(self.length, np.int64)
        targets = np.full(self.length, -100)
        own = self.tasks[number].ids
        ids[: len(own)] = own
        targets[len(own)] = 0  # stands for the answer
        return ids, targets

    def counts(self, number: int) -> int:
        """Returns 1."""
        return 1


# Rewards


def number_reward(row: Mapping[str, Any], text: str) -> float:
    """Returns 1.0 if the last number of a text is that of the row's `answer`, else 0.0.

    Numbers are equal by value: 1,000 and 1000.0, .5 and 0.50, 1e5 and 100000. Raises `ValueError`
    if the row has no answer, or if its last number is missing or ambiguous, such as 3/4, 12:30.
    """
    answer = answer_of(row)
    if UNCLEAR.search(NUMBER.sub("0", answer)):
        raise ValueError(
            f"has an answer without a number, or with an ambiguous last one ({answer[-40:]!r}): "
            "write one such as 0.75 or 1,000, or take another --reward"
        )
    expected, found = (
        [Decimal(word.translate(PLAIN)) for word in NUMBER.findall(part)[-1:]]
        for part in (answer, text)
    )
    return float(found == expected)


def exact_reward(row: Mapping[str, Any], text: str) -> float:
    """Returns 1.0 if a text is the row's `answer`, but for spaces at both ends, else 0.0.

    Raises `ValueError` if the row has no answer.
    """
    return float(text.strip() == answer_of(row))


def answer_of(row: Mapping[str, Any]) -> str:
    """Returns the `answer` of a row without spaces at both ends.

    Raises `ValueError` if it is missing, blank, or neither a text nor a finite number.
    """
    answer = row.get("answer")
    text = str(answer).strip()
    if type(answer) not in (str, int, float) or text in ("", "nan"):
        raise ValueError(
            f"has no answer that is a text or a number ({answer!r:.40}): give one, or take another "
            "--reward"
        )
    return text


def load_reward(name: str) -> Reward:
    """Returns `number_reward`, `exact_reward`, or the function that `FILE.py:FUNCTION` names.

    Raises `ValueError` if there is no such function, or if it does not take a row and a text.
    """
    known = {"number": number_reward, "exact": exact_reward}
    reward = known.get(name) or load_name(name, "number, exact or FILE.py:FUNCTION")
    with suppress(TypeError):
        others = {"completions", "solution_str"}
        if others.isdisjoint(signature(reward).bind({}, "").arguments):
            return reward
    raise ValueError(
        f"{name} does not fit: a reward takes (row, text) and returns a number; the text is one of "
        "TRL's completions, verl's solution_str, and the row has the columns of --data"
    )


def read_tasks(
    items: Sequence[Item], tokenizer: PreTrainedTokenizerBase, longest: int, reward: Reward
) -> list[Question]:
    """Returns the tasks of rows, without those whose prompt has more than `longest` tokens, which
    are counted in a printed line.

    Raises `ValueError` for a row that has no prompt or cannot be scored by `number_reward` or
    `exact_reward`, and if no task is left.
    """
    tasks = []
    for item in items:
        tasks.append(read_question(item, tokenizer))
        try:
            if reward in (number_reward, exact_reward):
                reward(item.fields, "")
        except ValueError as error:
            raise ValueError(f"{item.place} {error}") from error
    fitting = [task for task in tasks if len(task.ids) <= longest]
    if not fitting:
        raise ValueError(
            f"each prompt has more than {longest:,} tokens: take shorter ones, or fewer "
            "--max_new_tokens"
        )
    if len(fitting) < len(tasks):
        left = plural(len(tasks) - len(fitting), "task")
        process_state().print(f"left out {left} with a prompt of more than {longest:,} tokens")
    return fitting


def score(reward: Reward, row: Mapping[str, Any], text: str) -> float:
    """Returns the reward of a text, NaN for None.

    Raises `ValueError` if the reward fails, ends the process, or is not a finite number.
    """
    try:
        value = reward(row, text)
        number = float(value) if isinstance(value, SupportsFloat) else math.nan
    except (Exception, SystemExit) as error:  # the user's function
        raise ValueError(
            f"the reward raises {type(error).__name__} ({error}) for the text {text[:80]!r} and "
            f"the row {str(row)[:80]}: return a number for each text"
        ) from error
    if value is not None and not abs(number) < LARGEST:
        raise ValueError(
            f"the reward is {value!r:.80}, not a finite number: return one, or None to leave the "
            "answer out"
        )
    return number


# An update


class PolicyGradient:
    """The `gradients` of a run on `Prompts`.

    For each prompt it samples `group` answers of at most `max_new_tokens` tokens, at temperature 1
    and without dropout, in batches of one group: rows of other batches do not change them. With
    `scale_rewards` advantages are divided by the standard deviation of the group plus 1e-4 (as in
    GRPO: Shao et al., 2024, arXiv:2402.03300). With `mask_cut` answers that do not end by
    themselves do not count. Answers without a reward (None) do not count either, and their group's
    mean is that of the others.

    Figures: `reward`, the mean over prompts, and its standard error; `solved_all` and
    `solved_none`, shares of the groups in which all rewards are 1 or more, or 0 or less;
    `answer_tokens`, the mean length; `entropy`, the mean of -log p of the answers' tokens in nats;
    `logp_difference`, the mean distance between log p of a token in sampling and in training; the
    answers' tokens per second in sampling and in training.
    """

    def __init__(
        self,
        tasks: Sequence[Question],
        reward: Reward,
        *,
        group: int = 8,
        max_new_tokens: int = 128,
        scale_rewards: bool = False,
        mask_cut: bool = False,
    ):
        self.tasks = tasks
        self.reward = reward
        self.group = group
        self.sampling = Sampling(max_new_tokens, 1.0, 0, 1.0, group)
        self.scale_rewards = scale_rewards
        self.mask_cut = mask_cut
        self.equal = 0  # updates in a row whose rewards teach nothing
        self.fallen = ""  # the line that the reward has fallen

    def __call__(self, run: Run, batches: MicroBatches) -> dict[str, Any]:
        accelerator = run.accelerator
        if accelerator.is_fsdp2:
            raise ValueError("a sharded model cannot sample: take a launch config without FSDP2")
        start = perf_counter()
        groups: list[list[Row]] = []
        with evaluating(run.model):
            for batch in batches:
                assert batch.numbers is not None
                with all_or_none():  # a reward may fail on one rank
                    groups += self.sample(run, batch.numbers.tolist())
            rows = [row for group in groups for row in group]
            counted = sum(len(row.answer) for row in rows if row.counts)
            sums = torch.tensor([counted, bool(run.stop.reason)], device=accelerator.device)
            total, stopped = accelerator.reduce(sums, "sum").tolist()
            if stopped:
                raise Interrupted
            sampled = perf_counter()
            figures = self.train(run, rows, max(total, 1))
        found = gather_object([[row.reward for row in group] for group in groups])
        rewards = np.ma.masked_invalid(found)
        self.remark(run, rewards)
        self.log(run, groups[0])
        left = rewards.mean(axis=1).compressed().tolist() or [math.nan]
        return figures | {
            "reward_stderr": math.nan,  # of a single prompt
            "reward_stderr_n": len(left),
            **mean(left, name="reward"),
            "solved_all": float(np.ma.filled((rewards >= 1).all(axis=1), False).mean()),
            "solved_none": float(np.ma.filled((rewards <= 0).all(axis=1), False).mean()),
            "answer_tokens": np.mean([len(row.answer) for row in rows]),
            "sampled_tokens_per_second": total / (sampled - start),
            "trained_tokens_per_second": total / (perf_counter() - sampled),
        }

    def sample(self, run: Run, numbers: Sequence[int]) -> list[list["Row"]]:
        """Returns a group of rows for each task, by its number; none if this rank has to stop."""
        tasks = [self.tasks[number] for number in numbers]
        seeds = [int(hash64(run.config.seed, 3, run.step, n)[0] >> np.uint64(2)) for n in numbers]
        ends = set(text_ends(run.tokenizer))
        answers: list[list[int]] = [[] for _ in range(len(tasks) * self.group)]
        nats: list[torch.Tensor] = []
        model = unwrap(run.accelerator, run.model)
        for ids in tokens(model, [task.ids for task in tasks], self.sampling, seeds, nats):
            if run.stop.reason:
                return []
            for answer, token in zip(answers, ids, strict=True):
                if not (answer and answer[-1] in ends):
                    answer.append(token)
            if all(answer[-1] in ends for answer in answers):
                break
        groups = []
        steps = torch.stack(nats, 1).tolist()
        for i, task in enumerate(tasks):
            own = slice(i * self.group, (i + 1) * self.group)
            group = answers[own]
            texts = run.tokenizer.batch_decode(group, skip_special_tokens=True)
            rewards = np.ma.masked_invalid([score(self.reward, task.row, text) for text in texts])
            advantages = rewards - rewards.mean()
            if self.scale_rewards:
                advantages /= rewards.std(ddof=1) + 1e-4
            ended = [not self.mask_cut or answer[-1] in ends for answer in group]
            counts = np.array(ended) & ~rewards.mask
            figures = rewards.data, advantages.filled(0), counts, steps[own]
            rows = zip(group, texts, *figures, strict=True)
            groups.append([Row(task, *row) for row in rows])
        return groups

    def train(self, run: Run, rows: Sequence["Row"], total: float) -> dict[str, float]:
        """Adds the gradients of the rows; `total` are the counted tokens of the update."""
        size = run.train_loader.micro_batch_size * self.group
        device = run.accelerator.device
        factor = run.accelerator.num_processes / total
        positions = unwrap(run.accelerator, run.model).config.n_positions
        sums = torch.zeros(3, device=device)  # of the loss, the nats, and the distances
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            inputs, targets, sampled = (x.to(device) for x in padded(part, positions))
            nats = run.model(inputs, targets, reduction="none").float()
            advantages = torch.tensor([row.advantage for row in part], device=device)
            loss = (nats * advantages[:, None].float()).sum() * factor
            run.backward(loss, last=start + size >= len(rows))
            distance = (nats - sampled).abs().sum()
            sums += torch.stack((loss, nats.sum() * factor, distance * factor)).detach()
        return dict(zip(("loss", "entropy", "logp_difference"), sums.tolist(), strict=True))

    def remark(self, run: Run, rewards: np.ndarray) -> None:
        """Prints a line if the rewards have been equal in each group for `LEVEL` updates, and one
        if the reward has fallen at a half or three quarters of the run: see `charts.fallen`."""
        self.equal = 0 if np.ptp(rewards, axis=1).any() else self.equal + 1
        if self.equal == LEVEL:
            run.log.print_line(
                f"for {LEVEL} updates all answers to a prompt had equal rewards, from which "
                "nothing is learnt: take easier or harder prompts, a larger --group, or another "
                "--reward"
            )
        if not self.fallen and run.step in (run.updates // 2, run.updates * 3 // 4):
            self.fallen = fallen(read_json_lines(run.run_dir / "metrics.jsonl"))
            if self.fallen:
                run.log.print_line(self.fallen)

    def log(self, run: Run, group: Sequence["Row"]) -> None:
        """Logs the first and the last answer of a group by reward, where samples are due."""
        if run.config.sample_every and run.step % run.config.sample_every == 0:
            for row in sorted(group, key=lambda row: row.reward)[:: max(1, self.group - 1)]:
                prompt = row.task.prompt[-1]["content"]
                run.log.sample(prompt, f"{prompt}\nreward {row.reward:g}: {row.text}", ahead=1)


class Row(NamedTuple):
    """A task and an answer to it, as token ids and text; its reward, NaN for None, and advantage,
    whether its tokens count, and -log p of each in sampling."""

    task: Question
    answer: list[int]
    text: str
    reward: float
    advantage: float
    counts: bool
    nats: list[float]


def padded(rows: Sequence[Row], positions: int) -> tuple[torch.Tensor, ...]:
    """Returns inputs and targets of rows, (B, T) int64, T at most `positions`, and `Row.nats` of
    the targets, (B, T) fp32; only the answers' tokens are targets."""
    longest = max(len(row.task.ids) + len(row.answer) for row in rows) - 1
    inputs = torch.zeros(len(rows), min(round_up(longest, MULTIPLE), positions), dtype=torch.int64)
    targets = torch.full_like(inputs, -100)
    nats = torch.zeros(inputs.shape)
    for i, row in enumerate(rows):
        ids = torch.tensor(row.task.ids + row.answer)
        start = len(row.task.ids)
        inputs[i, : len(ids) - 1] = ids[:-1]
        if row.counts:
            targets[i, start - 1 : len(ids) - 1] = ids[start:]
            nats[i, start - 1 : len(ids) - 1] = torch.tensor(row.nats[: len(row.answer)])
    return inputs, targets, nats


class Solved:
    """The `Evaluation` on tasks that are held out: `solved/reward`, the mean reward of greedy
    answers, and its standard error over tasks.

    Answers without a reward (None) are left out.

    With several `samples` of each task, at temperature 1, also `solved/pass@k` for k = 1, 2, 4, …:
    the chance that one of k answers or more is solved, with a reward of 1 or more (the unbiased
    estimate of Chen et al., 2021, arXiv:2107.03374). It has no interval: where nearly each task is
    solved once, 20 tasks do not show how often one is not, and Student's t holds the true value in
    40 to 70% of cases. For the mean reward of several samples it is 83 to 88% below 0.1 and above
    0.9 with 20 tasks.
    """

    def __init__(
        self,
        tasks: Sequence[Question],
        reward: Reward,
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int,
        samples: int = 1,
    ):
        self.tasks = tasks
        self.reward = reward
        self.tokenizer = tokenizer
        self.sampling = Sampling(max_new_tokens, float(samples > 1), 0, num_samples=samples)
        self.notes = [f"rl: {len(tasks):,} tasks, {samples} answers to each"]

    def __call__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """All ranks call it; the result is empty if `interrupted`."""
        found = answers(accelerator, model, self.tokenizer, self.tasks, self.sampling, interrupted)
        if not found:
            return {}
        scores = on_main_process(
            lambda: [[score(self.reward, t.row, c.text) for c in own] for t, own in found]
        )
        rewards = np.ma.masked_invalid(scores)
        left = rewards.mean(axis=1).compressed().tolist()
        if not left:
            raise ValueError("the reward is None for all answers: return a number for most of them")
        results = mean(left, name="solved/reward")
        n = self.sampling.num_samples
        for k in (2**i for i in range(n.bit_length()) if n > 1):
            enough = rewards[rewards.count(axis=1) >= k]
            failed = [math.comb((x < 1).sum(), k) / math.comb(x.count(), k) for x in enough]
            if failed:
                results[f"solved/pass@{k}"] = 1 - math.fsum(failed) / len(failed)
        return results
