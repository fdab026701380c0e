"""Checks the course's exercises: says what came, what was expected, the usual mistake, and a hint.

`exercises.yaml` beside this file has an entry for each exercise, by the name of its function:

- `solution`: the source of a right function, the same as in the notebook's solution cell.
- `cases`: expressions that call the function. A function is right if each has the value that the
  solution gives. `setup` is code that runs before each case, in a copy of the notebook's names.
- `mistakes`: `[sentence, old, new, …]`, edits of the solution, or `[sentence, source]`. A function
  that gives the same wrong value as the edited solution gets the sentence.
- `hints`: a question, the idea, the line.
- `start`: the function in the exercise's cell, as the learner finds it.
"""

import io
import traceback
from collections import abc, defaultdict
from contextlib import redirect_stdout
from inspect import unwrap
from pathlib import Path
from signal import ITIMER_VIRTUAL, SIGVTALRM, setitimer, signal
from typing import Any

import torch
import yaml

import __main__

EXERCISES = yaml.safe_load(Path(__file__).with_name("exercises.yaml").read_bytes())
SECONDS = 5  # the limit of a case's CPU time
NOTEBOOK = vars(__main__)  # its names
tries: defaultdict[str, set[Any]] = defaultdict(set)  # the versions of a function that failed


def check(name: str, function: abc.Callable) -> None:
    """Prints whether a function solves its exercise; if not, what is wrong, and a hint.

    The first version that fails gets the first hint, the third and later ones the last. All
    versions with an unknown name count as one.
    """
    exercise = EXERCISES[name]
    version = code_of(function)
    wrong = problem(name, function)
    if function.__name__ == "solution":  # `keep` put it there
        print(f"{name} is the solution now. To check yours, run its cell, then this one.")
    elif version == code_of(build(name, exercise["start"])):
        print(f"{name}: not written yet. Complete the cell above and run it, then this one.")
    elif wrong:
        seen = "Unchanged: did its cell run without an error? " * (version in tries[name])
        tries[name].add("NameError" in wrong or version)
        print(f"{name}: not yet. {seen}{wrong}\nHint: {exercise['hints'][: len(tries[name])][-1]}")
    else:
        print(f"{name}: solved.")


def keep(name: str, function: abc.Callable, solution: abc.Callable | None = None) -> abc.Callable:
    """Returns the function if it solves its exercise, else the solution, and prints which.

    Without `solution`, as in the notebooks of `make course-handout`, it is the one of the table.
    """
    own = function.__name__ != "solution" and not problem(name, function)
    print(f"The notebook goes on with {'your' if own else 'the solution of'} {name}.")
    return function if own else solution or build(name, EXERCISES[name]["solution"])


def problem(name: str, function: abc.Callable) -> str:
    """Returns what is wrong with a function, "" if nothing is, and prints what it printed."""
    exercise = EXERCISES[name]
    right = exercise["solution"]
    for case in exercise["cases"]:
        came, output = outcome(name, function, case)
        expected, _ = outcome(name, build(name, right), case)
        if isinstance(expected, Exception):
            raise expected
        wrong = difference(came, expected)
        if wrong:
            print(output, end="")
            if isinstance(came, Exception):
                wrong = f"raises {came!r}{line_of(came, function)}"
            wrong = f"`{case}` {wrong}"
            none = f"It returns None and prints {output.strip() or 'nothing'}. Is `return` missing?"
            for sentence, *edits in exercise["mistakes"] + [[none, f"def {name}(*_): ..."]]:
                source = right if edits[1:] else edits[0]
                for old, new in zip(edits[::2], edits[1::2]):
                    source = source.replace(old, new)
                if not difference(came, outcome(name, build(name, source), case)[0]):
                    return f"{sentence} {wrong}"
            return wrong
    return ""


def too_long(*_: Any) -> None:
    """Ends a case that takes too long."""
    raise TimeoutError(f"it did not end in {SECONDS} seconds of computing. Does a loop never end?")


signal(SIGVTALRM, too_long)


def build(name: str, source: str) -> abc.Callable:
    """Returns the function that `source` defines, with the notebook's names."""
    names = dict(NOTEBOOK)
    exec(source, names)
    return names[name]


def outcome(name: str, function: abc.Callable, case: str) -> tuple[Any, str]:
    """Returns a case's value or exception, and what the function printed."""
    names = NOTEBOOK | {name: function}
    with redirect_stdout(io.StringIO()) as output, torch.random.fork_rng([]):
        try:
            exec(EXERCISES[name].get("setup", ""), names)
            setitimer(ITIMER_VIRTUAL, SECONDS)
            value = eval(case, names)
        except Exception as error:
            value = error
        finally:
            setitimer(ITIMER_VIRTUAL, 0)
    return value, output.getvalue()


def leaves(value: Any, place: str = "") -> abc.Iterator[tuple[str, Any]]:
    """Yields the numbers and texts in a value with their places; an array's kind at its own."""
    if hasattr(value, "tolist"):
        yield place, torch.is_tensor(value)  # replaced if it is a single number
        value = value.tolist()
    if isinstance(value, list | tuple | range):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, f"{place}[{key!r}]")
    else:
        yield place, value


def difference(came: Any, expected: Any) -> str:
    """Returns the first difference of two values in words, "" if they are the same.

    Floats may differ by 1e-4 of the largest one.
    """
    ours, theirs = dict(leaves(came)), dict(leaves(expected))
    largest = max((abs(one) for one in theirs.values() if isinstance(one, float)), default=0)
    for place in theirs | ours:
        mine, right = ours.get(place, ...), theirs.get(place, ...)
        numbers = {type(mine), type(right)} <= {bool, int, float}
        if repr(mine) != repr(right) and not (numbers and abs(mine - right) <= 1e-4 * largest):
            if show(came) == show(expected):  # arrays of one shape
                return f"gives {mine:g} at {place}, expected {right:g}."
            part = f"; at {place} {mine}, not {right}" if place and numbers else ""
            return f"gives {show(came)}, expected {show(expected)}{part}."
    return ""


def show(value: Any) -> str:
    """Returns a value in one line: dtype and shape of an array."""
    return f"{value.dtype} {tuple(value.shape)}" if getattr(value, "ndim", 0) else repr(value)


def line_of(error: Exception, function: abc.Callable) -> str:
    """Returns the line of the function's cell where an exception came from."""
    own = "."
    for line in traceback.extract_tb(error.__traceback__):
        if line.filename == unwrap(function).__code__.co_filename:
            own = f", in line {line.lineno}: `{line.line}`."
    return own


def code_of(function: abc.Callable) -> tuple:
    """Returns what differs between two versions of a function."""
    code = unwrap(function).__code__
    return code.co_code, code.co_consts, code.co_names
