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
from pydoc import ErrorDuringImport, importfile
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from gpt2_accel.checkpoint.state_dict import unwrap
from gpt2_accel.data.documents import text_digest
from gpt2_accel.data.loader import hash64
from gpt2_accel.data.messages import Problem, as_messages, read_messages
from gpt2_accel.data.rows import read_rows
from gpt2_accel.evals.formulas import mean_loss
from gpt2_accel.generation.sampling import (
    Sampling,
    complete,
    encode_prompt,
    tokens,
)
from gpt2_accel.models import LanguageModel, evaluating
from gpt2_accel.rounding import round_up
from gpt2_accel.run import Interrupted, MicroBatches, Run
from gpt2_accel.tokenizer import PreTrainedTokenizerBase, text_ends

Reward = Callable[[Mapping[str, Any], str], float]
"""(row, text of the answer) -> its reward."""

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
LEVEL = 10  # updates with equal rewards in each group, after which a line is printed
MULTIPLE = 64  # of tokens, to which rows are padded: a compiled model has few shapes


class Task(NamedTuple):
    """A row with a prompt: its fields, the messages, and their token ids."""

    row: dict[str, Any]
    messages: list[dict[str, str]]
    ids: list[int]


def read_tasks(path: str, tokenizer: PreTrainedTokenizerBase) -> list[Task]:
    """Reads the tasks of a file of rows. A row has a `prompt`, a text or messages, or a `question`.

    Raises `ValueError` for a row without one, for a prompt that the chat template refuses, and if
    the tokenizer has no chat template.
    """
    tasks = []
    for row, place in read_rows(path):
        prompt = row.get("prompt", row.get("question")) if isinstance(row, dict) else None
        if not prompt:
            raise ValueError(f"{place}, has no prompt and no question: add one")
        try:
            messages, _ = read_messages({"messages": as_messages(prompt, "user")}, place)
            tasks.append(Task(row, messages, encode_prompt(tokenizer, messages)))
        except Problem as problem:
            raise ValueError(f"{place}, has a prompt {problem}: correct it") from problem
    if not tasks:
        raise ValueError(f"{path} holds no tasks: add rows with a prompt and an answer")
    return tasks


class Prompts:
    """The source of a run on tasks: the window of a task is its prompt, padded, and counts 1."""

    def __init__(self, tasks: Sequence[Task]):
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

    1,000 equals 1000. Raises `ValueError` if the answer has no number.
    """
    expected, found = (
        [float(word.replace(",", "")) for word in NUMBER.findall(part)]
        for part in (str(row.get("answer", "")), text)
    )
    if not expected:
        raise ValueError("the answer of the row has no number: take another --reward")
    return float(found[-1:] == expected[-1:])


def exact_reward(row: Mapping[str, Any], text: str) -> float:
    """Returns 1.0 if a text is the row's `answer`, but for spaces at both ends, else 0.0."""
    return float(text.strip() == str(row.get("answer", "")).strip())


def load_reward(name: str) -> Reward:
    """Returns `number_reward`, `exact_reward`, or the function that `FILE.py:FUNCTION` names.

    Raises `ValueError` if there is no such function.
    """
    known = {"number": number_reward, "exact": exact_reward}
    if name in known:
        return known[name]
    place, _, function = name.rpartition(":")
    if not place:
        raise ValueError(f"--reward {name} is not number, exact or FILE.py:FUNCTION")
    try:
        return getattr(importfile(place), function)
    except (ImportError, AttributeError, OSError, ErrorDuringImport) as error:
        raise ValueError(
            f"--reward {name} is not number, exact or FILE.py:FUNCTION ({error})"
        ) from error


def score(reward: Reward, row: Mapping[str, Any], text: str) -> float:
    """Returns the reward of a text. Raises `ValueError` if it fails or is not a finite number."""
    try:
        value = reward(row, text)
    except Exception as error:  # the user's function
        raise ValueError(
            f"the reward raises {type(error).__name__} ({error}) for the text {text[:80]!r}: "
            "return a number for each text"
        ) from error
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"the reward is {value!r}, not a finite number: return an int or a float")
    return float(value)


# An update


class PolicyGradient:
    """The `gradients` of a run on `Prompts`.

    For each prompt it samples `group` answers of at most `max_new_tokens` tokens, at temperature 1
    and without dropout, in batches of one group: rows of other batches do not change them. With
    `scale_rewards` advantages are divided by the standard deviation of the group plus 1e-4 (as in
    GRPO: Shao et al., 2024, arXiv:2402.03300). With `mask_cut` answers that do not end by
    themselves do not count.

    Figures: `reward`, the mean; `solved_all` and `solved_none`, shares of the groups in which all
    rewards are 1 or more, or 0 or less; `answer_tokens`, the mean length; `entropy`, the
    mean of -log p of the answers' tokens in nats.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
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
        self.max_new_tokens = max_new_tokens
        self.scale_rewards = scale_rewards
        self.mask_cut = mask_cut
        self.equal = 0  # updates in a row whose rewards teach nothing

    def __call__(self, run: Run, batches: MicroBatches) -> dict[str, torch.Tensor | float]:
        if run.accelerator.is_fsdp2:
            raise ValueError("a sharded model cannot sample: take a launch config without FSDP2")
        found = [batch.numbers for batch in batches if batch.numbers is not None]
        numbers = torch.cat(found).tolist()
        with evaluating(run.model):
            groups = [self.sample(run, number) for number in numbers if not run.stop.reason]
            rows = [row for group in groups for row in group]
            counted = sum(row.counts * len(row.answer) for row in rows)
            stopped = float(len(groups) < len(numbers) or not all(groups))
            device = run.accelerator.device
            sums = torch.tensor([float(counted), stopped], device=device)
            total, stopped = run.accelerator.reduce(sums, "sum").tolist()
            if stopped:
                raise Interrupted
            figures = self.train(run, rows, max(total, 1))
        rewards = np.array([[row.reward for row in group] for group in groups])
        self.remark(run, rewards)
        self.log(run, numbers[0], groups[0])
        return figures | {
            "reward": rewards.mean(),
            "solved_all": (rewards >= 1).all(axis=1).mean(),
            "solved_none": (rewards <= 0).all(axis=1).mean(),
            "answer_tokens": np.mean([len(row.answer) for row in rows]),
        }

    def sample(self, run: Run, number: int) -> list["Row"]:
        """Returns the rows of a prompt's group, none if this rank has to stop."""
        task = self.tasks[number]
        model = unwrap(run.accelerator, run.model)
        seed = int(hash64(run.config.seed, 3, run.step, number)[0] >> np.uint64(2))
        sampling = Sampling(self.max_new_tokens, 1.0, 0, 1.0, self.group, seed)
        ends = set(text_ends(run.tokenizer))
        answers: list[list[int]] = [[] for _ in range(self.group)]
        for ids in tokens(model, [task.ids], sampling):
            if run.stop.reason:
                return []
            for answer, token in zip(answers, ids, strict=True):
                if not (answer and answer[-1] in ends):
                    answer.append(token)
            if all(answer[-1] in ends for answer in answers):
                break
        rewards = []
        for answer in answers:
            text = str(run.tokenizer.decode(answer, skip_special_tokens=True))
            rewards.append(score(self.reward, task.row, text))
        advantages = np.array(rewards) - np.mean(rewards)
        if self.scale_rewards:
            advantages /= np.std(rewards, ddof=1) + 1e-4
        return [
            Row(task.ids, answer, reward, advantage, answer[-1] in ends or not self.mask_cut)
            for answer, reward, advantage in zip(answers, rewards, advantages, strict=True)
        ]

    def train(self, run: Run, rows: Sequence["Row"], total: float) -> dict[str, torch.Tensor]:
        """Adds the gradients of the rows; `total` are the counted tokens of the update."""
        size = run.train_loader.micro_batch_size * self.group
        ranks = run.accelerator.num_processes
        device = run.accelerator.device
        sums = torch.zeros(2, device=device)  # the loss, and the nats
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            inputs, targets = (x.to(device) for x in padded(part))
            nats = run.model(inputs, targets, reduction="none").float()
            advantages = torch.tensor([row.advantage for row in part], device=device)
            loss = (nats * advantages[:, None].float()).sum() * (ranks / total)
            run.backward(loss, last=start + size >= len(rows))
            sums += torch.stack((loss, nats.sum() * (ranks / total))).detach()
        return {"loss": sums[0], "entropy": sums[1]}

    def remark(self, run: Run, rewards: np.ndarray) -> None:
        """Prints a line if the rewards have been equal in each group for `LEVEL` updates."""
        self.equal = 0 if np.ptp(rewards, axis=1).any() else self.equal + 1
        if self.equal == LEVEL:
            run.log.print_line(
                f"for {LEVEL} updates all answers to a prompt had equal rewards, from which "
                "nothing is learnt: take easier or harder prompts, a larger --group, or another "
                "--reward"
            )

    def log(self, run: Run, number: int, group: Sequence["Row"]) -> None:
        """Logs the first and the last answer of a group by reward, where samples are due."""
        if run.config.sample_every and run.step % run.config.sample_every == 0:
            prompt = self.tasks[number].messages[-1]["content"]
            for row in sorted(group, key=lambda row: row.reward)[:: max(1, self.group - 1)]:
                text = run.tokenizer.decode(row.answer, skip_special_tokens=True)
                run.log.sample(prompt, f"reward {row.reward:g}: {text}")


class Row(NamedTuple):
    """A prompt and an answer, as token ids; its reward and advantage, and whether it counts."""

    prompt: list[int]
    answer: list[int]
    reward: float
    advantage: float
    counts: bool


def padded(rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs and targets of rows, (B, T) int64; only the answers' tokens are targets."""
    longest = max(len(row.prompt) + len(row.answer) for row in rows) - 1
    inputs = torch.zeros(len(rows), round_up(longest, MULTIPLE), dtype=torch.int64)
    targets = torch.full_like(inputs, -100)
    for i, row in enumerate(rows):
        ids = torch.tensor(row.prompt + row.answer)
        inputs[i, : len(ids) - 1] = ids[:-1]
        if row.counts:
            targets[i, len(row.prompt) - 1 : len(ids) - 1] = ids[len(row.prompt) :]
    return inputs, targets


class Solved:
    """The `Evaluation` on tasks that are held out: `solved/reward` of greedy answers."""

    def __init__(
        self,
        tasks: Sequence[Task],
        reward: Reward,
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int,
    ):
        self.tasks = tasks
        self.reward = reward
        self.tokenizer = tokenizer
        self.sampling = Sampling(max_new_tokens, temperature=0)

    def __call__(
        self, accelerator: Accelerator, model: torch.nn.Module, interrupted: Callable[[], bool]
    ) -> dict[str, float]:
        """Each rank answers a part of the tasks. Returns nothing if interrupted."""
        mine = self.tasks[accelerator.process_index :: accelerator.num_processes]
        plain: LanguageModel = unwrap(accelerator, model)
        alone = accelerator.num_processes == 1
        stop = interrupted if alone else lambda: False
        written = complete(plain, self.tokenizer, [t.messages for t in mine], self.sampling, stop)
        rewards = [score(self.reward, t.row, c.text) for t, c in zip(mine, written, strict=False)]
        found = gather_object(rewards)
        if len(found) < len(self.tasks):
            return {}
        results = mean_loss(found, [1] * len(found))
        return {
            f"solved/{name.replace('loss', 'reward')}": value for name, value in results.items()
        }
