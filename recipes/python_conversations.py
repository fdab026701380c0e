"""Write conversations about Python's standard library, from this interpreter's docstrings.

    python recipes/python_conversations.py --output data/python_questions
    make chat    # the whole way: a base model, these conversations, fine-tuning, its share of right answers

For 300 functions: what it does, answered by the first sentence of its docstring, and how it is
called, answered by its signature. Each question has six wordings, of which two, drawn for each
function, are held out. Questions about functions that do not exist are answered "I don't know.";
some of these names are held out. Each question comes in 12 conversations, after other questions
each time: otherwise the model learns by heart which answer follows which.

Writes `train.jsonl` in the form `messages`, and `held_out.jsonl` in the form of `evaluate.py
--tasks chat`, in the groups `known` and `invented`. The docstrings are part of Python, under the
PSF License Agreement, https://docs.python.org/3/license.html. They differ between versions of
Python, so the figures of `make chat` do, too.
"""

import importlib
import inspect
import json
import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpt2_accel import cli
from gpt2_accel.config import check_ranges, parse_config, setting
from gpt2_accel.runtime.files import write_file

MODULES = """
    argparse ast asyncio base64 bisect calendar collections colorsys contextlib copy csv dataclasses datetime decimal difflib
    email enum filecmp fnmatch fractions functools gc getpass glob gzip hashlib heapq hmac html inspect io ipaddress itertools
    json keyword linecache locale logging lzma math mimetypes operator os os.path pathlib pickle platform plistlib pprint
    random re secrets shlex shutil signal socket sqlite3 ssl stat statistics string struct subprocess sys tarfile tempfile
    textwrap threading time timeit tokenize traceback types typing unicodedata urllib.parse urllib.request uuid warnings
    weakref zipfile zlib
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
HELD_OUT_NAMES = 150  # of functions that do not exist
SEED = 1337  # of what is drawn
SYSTEM = (  # prompts, of a part of the conversations
    "You answer questions about Python's standard library.",
    "You are a helpful assistant.",
    "Answer in one sentence.",
    "Be brief.",
    "You help people who learn Python. Say so if you do not know something.",
    "Answer from the documentation.",
)
SYSTEM_SHARE = 0.25
# Modules of functions that others show as theirs.
BUILT_IN = {"posix", "builtins", "posixpath", "genericpath"}
LONGEST_TALK = 10  # questions of a conversation
SHORTEST = 15  # characters of an answer
LONGEST = 100
DO_NOT_KNOW = "I don't know."


@dataclass
class PythonConversations:
    output: str = setting("data/python_questions", "folder to write")
    functions: int = setting(300, "functions that are asked about")
    invented: int = setting(1200, "names of functions that do not exist, in training")
    repeats: int = setting(12, "conversations that each question comes in")

    def __post_init__(self) -> None:
        check_ranges(self, positive="functions invented repeats")


def documented() -> dict[str, tuple[str, str | None]]:
    """Returns the functions of `MODULES` with a docstring: its first sentence, once each, and a
    signature if short."""
    found: dict[str, tuple[str, str | None]] = {}
    for module in MODULES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some are deprecated
            members = vars(importlib.import_module(module))
        for name, member in sorted(members.items()):
            home = (getattr(member, "__module__", None) or module).split(".")[0].lstrip("_")
            if name.startswith("_") or not inspect.isroutine(member):
                continue
            if home not in {module.split(".")[0], *BUILT_IN}:
                continue  # imported from elsewhere
            paragraph = " ".join((inspect.getdoc(member) or "").split("\n\n")[0].split())
            sentence = re.split(r"(?<=[.!?])\s", paragraph)[0]
            fits = SHORTEST <= len(sentence) <= LONGEST and sentence.isascii()
            # Old docstrings begin with the signature.
            if not fits or not sentence.endswith(".") or "->" in sentence:
                continue
            if all(sentence != other for other, _ in found.values()):
                found[f"{module}.{name}"] = sentence, signature(f"{module}.{name}", member)
    return found


def signature(name: str, function: object) -> str | None:
    """Returns how a function is called, None if that is unknown or too long."""
    try:
        text = name + re.sub(r" at 0x\w+", "", str(inspect.signature(function)))
    except (TypeError, ValueError):
        return None
    return text if len(text) <= LONGEST and text.isascii() else None


def invented_names(known: dict[str, tuple], count: int, draw: random.Random) -> list[str]:
    """Returns names of functions that do not exist: real modules, and parts of the names of real
    functions."""
    parts = sorted({part for name in known for part in name.split(".")[-1].split("_") if part})
    if count > len(MODULES) * len(parts) ** 2:  # more names than modules times pairs of words
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


def talks(asked: list[tuple[str, str]], draw: random.Random) -> Iterator[dict]:
    """Yields conversations of one to `LONGEST_TALK` questions, in random order; some begin with a
    system prompt."""
    left = draw.sample(asked, len(asked))
    while left:
        count = draw.randint(1, LONGEST_TALK)
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
    known = {n: everything[n] for n in sorted(draw.sample(sorted(everything), config.functions))}
    training = []
    held_out = []
    for name, answers in known.items():
        for wordings, answer in zip((DOES, CALL), answers, strict=True):
            if answer is not None:
                chosen = draw.sample(wordings, HELD_OUT)
                for wording in wordings:
                    asked = held_out if wording in chosen else training
                    asked.append((wording.format(name), answer))
    names = invented_names(known, config.invented + HELD_OUT_NAMES, draw)
    asked = [(draw.choice(DOES + CALL).format(name), DO_NOT_KNOW) for name in names]
    training += asked[HELD_OUT_NAMES:]
    rows = []
    for _ in range(config.repeats):
        rows += talks(training, draw)
    groups = {"known": held_out, "invented": asked[:HELD_OUT_NAMES]}
    items = []
    for group, pairs in groups.items():
        for question, answer in pairs:
            items.append({"prompt": question, "answer": answer, "group": group})
    for name, lines in {"train.jsonl": rows, "held_out.jsonl": items}.items():
        path = Path(config.output, name)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        if path.exists() and path.read_text() != text:
            raise FileExistsError(
                f"{path} has other questions: choose another --output, or remove it"
            )
        write_file(path, text)
    print(
        f"{config.output}: {len(rows):,} conversations on {len(known)} functions and "
        f"{config.invented:,} invented names; held out are {len(held_out):,} questions on the same "
        f"functions and {HELD_OUT_NAMES} on other invented names"
    )


if __name__ == "__main__":
    cli.run(main)
