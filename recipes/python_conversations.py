"""Write conversations about Python's standard library, from the docstrings of this interpreter.

    python recipes/python_conversations.py --output data/python_questions
    make chat    # a base model, these conversations, fine-tuning, and the accuracy of the answers

There are two questions about each of 300 functions: what it does, answered by the first sentence of
its docstring, and how to call it, answered by its signature. Each question has six wordings; two of
them, drawn for each function, are held out. Questions about the library's other functions, and
about functions that do not exist, have the answer "I don't know."; some of these names are held
out. Each question comes in 12 conversations, after different questions: otherwise the model
memorizes the order of the answers.

Writes `train.jsonl` with `messages`, `held_out.jsonl` for `evaluate.py --tasks chat`, with the
groups `known`, `other` and `invented`, and `functions.txt`, which lists the 300 functions. The
docstrings are part of Python, under the PSF License Agreement,
https://docs.python.org/3/license.html. They differ between versions of Python, and so do the
results of `make chat`.
"""

import importlib
import inspect
import json
import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpt2_accel import cli
from gpt2_accel.config import check_ranges, parse_config, setting
from gpt2_accel.runtime.files import write_file

MODULES = """
    argparse ast asyncio base64 bisect calendar collections colorsys contextlib copy csv dataclasses
    datetime decimal difflib email enum filecmp fnmatch fractions functools gc getpass glob gzip
    hashlib heapq hmac html inspect io ipaddress itertools json keyword linecache locale logging
    lzma math mimetypes operator os os.path pathlib pickle platform plistlib pprint random re
    secrets shlex shutil signal socket sqlite3 ssl stat statistics string struct subprocess sys
    tarfile tempfile textwrap threading time timeit tokenize traceback types typing unicodedata
    urllib.parse urllib.request uuid warnings weakref zipfile zlib
""".split()  # noqa: SIM905
DOES = (
    "What does {} do?",
    "Explain {}.",
    "What is {} for?",
    "Tell me about {}.",
    "I found {} in some code. What does it do?",
    "Can you describe the function {}?",
)
CALL = (
    "How do I call {}?",
    "What arguments does {} take?",
    "Show me the signature of {}.",
    "Which parameters does {} have?",
    "How is {} called?",
    "I want to use {}. What do I pass to it?",
)
HELD_OUT = 2  # wordings of each question
HELD_OUT_NAMES = 150  # names of other functions, and as many that do not exist
SEED = 1337
SYSTEM = (  # the system prompts
    "You answer questions about Python's standard library.",
    "You are a helpful assistant.",
    "Answer in one sentence.",
    "Be brief.",
    "You help people who learn Python. Say so if you do not know something.",
    "Answer from the documentation.",
)
SYSTEM_SHARE = 0.25  # share of conversations with a system prompt
# Modules whose functions are documented under another module's name.
BUILT_IN = {"posix", "builtins", "posixpath", "genericpath"}
LONGEST_CONVERSATION = 10  # questions
SHORTEST = 15  # characters of an answer
LONGEST = 100
DO_NOT_KNOW = "I don't know."


@dataclass
class PythonConversations:
    output: str = setting("data/python_questions", "folder to write")
    functions: int = setting(300, "functions to ask about")
    invented: int = setting(500, "names of functions that do not exist, for training")
    repeats: int = setting(12, "conversations per question")

    def __post_init__(self) -> None:
        check_ranges(self, positive="functions invented repeats")


def library() -> Iterator[tuple[str, Callable[..., object]]]:
    """Yields the public functions of `MODULES`, with their names."""
    for module in MODULES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some are deprecated
            members = vars(importlib.import_module(module))
        for name, member in sorted(members.items()):
            if name.startswith("_") or not inspect.isroutine(member):
                continue
            defined_in = getattr(member, "__module__", None) or module
            home = defined_in.split(".")[0].lstrip("_")
            if home != module.split(".")[0] and home not in BUILT_IN:
                continue  # imported from another module
            yield f"{module}.{name}", member


def documented() -> dict[str, tuple[str, str | None]]:
    """Returns the functions of `MODULES` with a docstring, by name: its first sentence, which no
    other function has, and `signature`."""
    found: dict[str, tuple[str, str | None]] = {}
    for name, member in library():
        sentence = first_sentence(inspect.getdoc(member) or "")
        if sentence and all(sentence != other for other, _ in found.values()):
            found[name] = sentence, signature(name, member)
    return found


def first_sentence(docstring: str) -> str | None:
    """Returns the first sentence of a docstring, or None if it is not a short sentence in ASCII."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?])\s", paragraph)[0]
    fits = SHORTEST <= len(sentence) <= LONGEST and sentence.isascii()
    # An old docstring begins with the signature.
    if fits and sentence.endswith(".") and "->" not in sentence:
        return sentence
    return None


def signature(name: str, function: Callable[..., object]) -> str | None:
    """Returns how to call a function, or None if that is unknown or too long."""
    try:
        text = name + re.sub(r" at 0x\w+", "", str(inspect.signature(function)))
    except (TypeError, ValueError):
        return None
    return text if len(text) <= LONGEST and text.isascii() else None


def invented_names(known: dict[str, tuple], count: int, draw: random.Random) -> list[str]:
    """Returns `count` names of functions that do not exist, in real modules, from the words in the
    names of real functions. Raises `ValueError` if these are too few."""
    words: set[str] = set()
    for name in known:
        words.update(name.split(".")[-1].split("_"))
    parts = sorted(words - {""})
    if count > len(MODULES) * len(parts) ** 2:
        raise ValueError(
            f"{len(known)} functions have too few words for {count:,} names: raise --functions"
        )
    names: dict[str, None] = {}
    while len(names) < count:
        module = draw.choice(MODULES)
        name = "_".join(draw.sample(parts, min(len(parts), draw.choice((1, 2, 2, 3)))))
        if not hasattr(importlib.import_module(module), name):
            names[f"{module}.{name}"] = None
    return list(names)


def conversations(asked: list[tuple[str, str]], draw: random.Random) -> Iterator[dict]:
    """Yields conversations with all questions and answers, in random order, one to
    `LONGEST_CONVERSATION` in each. Some begin with a system prompt."""
    left = draw.sample(asked, len(asked))
    while left:
        count = draw.randint(1, LONGEST_CONVERSATION)
        turns = left[:count]
        left = left[count:]
        messages = [{"role": "system", "content": draw.choice(SYSTEM)}]
        if draw.random() >= SYSTEM_SHARE:
            messages = []
        for question, answer in turns:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        yield {"messages": messages}


def main() -> None:
    config = parse_config(PythonConversations)
    draw = random.Random(SEED)
    everything = documented()
    if len(everything) < config.functions:
        raise ValueError(
            f"this Python has {len(everything)} functions with a short docstring: lower --functions"
        )
    chosen = sorted(draw.sample(sorted(everything), config.functions))
    known = {name: everything[name] for name in chosen}
    training: list[tuple[str, str]] = []  # questions and answers
    items = []
    for name, answers in known.items():
        for wordings, answer in zip((DOES, CALL), answers, strict=True):
            if answer is None:
                continue
            held_out = draw.sample(wordings, HELD_OUT)
            for wording in wordings:
                question = wording.format(name)
                if wording in held_out:
                    items.append({"prompt": question, "answer": answer, "group": "known"})
                else:
                    training.append((question, answer))
    others = sorted({name for name, _ in library()} - {*known})
    others = draw.sample(others, len(others))
    invented = invented_names(known, config.invented + HELD_OUT_NAMES, draw)
    # Other functions look like those that are known: they need more questions (docs/chat.md).
    unknown = ("other", 5, others), ("invented", 1, invented)
    for group, asked, names in unknown:
        for number, name in enumerate(names):
            questions = [each.format(name) for each in draw.sample(DOES + CALL, asked)]
            if number < HELD_OUT_NAMES:
                items.append({"prompt": questions[0], "answer": DO_NOT_KNOW, "group": group})
            else:
                training += [(question, DO_NOT_KNOW) for question in questions]
    rows: list[dict] = []
    for _ in range(config.repeats):
        rows += conversations(training, draw)
    files = {
        "train.jsonl": map(json.dumps, rows),
        "held_out.jsonl": map(json.dumps, items),
        "functions.txt": chosen,
    }
    for name, lines in files.items():
        path = Path(config.output, name)
        text = "".join(f"{line}\n" for line in lines)
        if path.exists() and path.read_text() != text:
            raise FileExistsError(
                f"{path} has other questions: choose another --output, or remove it"
            )
        write_file(path, text)
    print(
        f"{config.output}: {len(rows):,} conversations about {len(known)} functions, which "
        f"functions.txt lists, {len(others) - HELD_OUT_NAMES} others and {config.invented:,} "
        f"invented names; held out: {len(items) - 2 * HELD_OUT_NAMES:,} questions about the same "
        f"functions and {HELD_OUT_NAMES} each about others and invented names"
    )


if __name__ == "__main__":
    cli.run(main)
