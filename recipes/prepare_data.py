"""Tokenize text into shards, on which any recipe trains.

    python recipes/prepare_data.py fineweb-edu --data_dir data/fineweb_edu
    python recipes/prepare_data.py openwebtext --data_dir data/openwebtext
    python recipes/prepare_data.py shakespeare --data_dir data/shakespeare
    python recipes/prepare_data.py text folder/ more.jsonl.zst --data_dir data/mine
    python recipes/prepare_data.py hf roneneldan/TinyStories --data_dir data/tinystories
    python recipes/prepare_data.py chat USER/NAME --model MODEL --sequence_length 1024 \\
        --data_dir data/chat
    python recipes/prepare_data.py import nanoGPT/data/openwebtext --data_dir data/openwebtext
    python recipes/prepare_data.py mix data/mine=0.3 data/fineweb_edu=0.7 --data_dir data/both
    python recipes/prepare_data.py --data_dir data/mine  # prints its content; --verify checks it

After an interruption, the same command continues the preparation.

- fineweb-edu: the sample of 10 billion tokens, as in build-nanogpt. The first documents, of
  `--shard_tokens` tokens, are for validation.
- openwebtext: as Parquet, from the Hub; one row in 2,000 for validation.
- shakespeare, shakespeare-char: tiny Shakespeare in GPT-2's BPE or in characters, as in nanoGPT;
  the last 10% for validation.
- text: files and folders. Each row of a .json, .jsonl, .ndjson, .parquet, .csv or .arrow file,
  compressed (.gz, .zst, .bz2) or not, is a document, and so is every other file of UTF-8 text,
  also as .gz.
- hf: a data set on the Hub with such files of rows.
- chat: conversations from a data set on the Hub or from such files, in the chat template of
  `--model` or ChatML, packed into windows of `--sequence_length` tokens. See docs/chat.md.
- import: token files of nanoGPT, build-nanogpt, llm.c, modded-nanogpt or datatrove, copied into
  shards. A run that 0.5 began on such files goes on with the new folder.
- mix: a mixture of prepared data, with the weight of each.

One document in 20 is held out for validation: a file by a hash of its name, a row by a hash of its
text. If that is less than 1% or more than 15% of the text, the last 5% of each document is held out
instead.
"""

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from gpt2_accel import cli
from gpt2_accel.data.conversations import (
    prepare_conversations,
    summary,
)
from gpt2_accel.data.documents import HELD_OUT
from gpt2_accel.data.mixture import write_mixture
from gpt2_accel.data.prepare import SHARD_TOKENS, plan_of, prepare_sources
from gpt2_accel.data.rows import ROW_SUFFIXES, row_suffix
from gpt2_accel.data.shards import (
    TOKEN_ID,
    read_manifest,
)
from gpt2_accel.data.source import open_data, verify_data
from gpt2_accel.data.sources import (
    Source,
    corpus_files,
    find_files,
    hub_files,
    is_text,
    one_text,
    row_files,
    text_source,
)
from gpt2_accel.data.third_party import import_tokens
from gpt2_accel.runtime.cores import usable_cpus
from gpt2_accel.runtime.options import Parser
from gpt2_accel.runtime.recipe_command import recipe_command
from gpt2_accel.tokenizer import (
    LOSSY,
    PreTrainedTokenizerBase,
    byte_tokenizer,
    char_tokenizer,
    gpt2_tokenizer,
    load_tokenizer,
    train_bpe,
)

SHOWN_TOKENS = 40  # tokens shown of each split
BPE_SIZE = 4096  # default vocabulary size of a trained BPE
BPE_CHUNKS = 100_000  # chunks of text on which a BPE is trained, at most

# Command -> its data set on the Hub.
DATASETS = {
    "fineweb-edu": {"source": "HuggingFaceFW/fineweb-edu", "config": "sample-10BT"},
    "openwebtext": {
        "source": "Skylion007/openwebtext",
        "revision": "refs/convert/parquet",
        "data_files": "plain_text/*/*.parquet",
    },
}
# Command -> one row in how many is held out, if not in `HELD_OUT`. nanoGPT has the same share.
ONE_IN = {"fineweb-edu": 2000, "openwebtext": 2000}
TOKENIZERS = "gpt2, bytes, bpe (trained on the text), or an HF directory or Hub id"
TEXT = "UTF-8 text, JSON, Parquet or CSV"
CHAT = (
    "Packs conversations into windows. A row has one of: messages (with role and content); "
    "conversations (with from and value); prompt and completion; instruction, input, and output or "
    "response. Files have the same formats as the rows of the command text."
)


def positive(text: str) -> int:
    """Parses a positive integer. Raises `ArgumentTypeError` for other text."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def weighted(text: str) -> tuple[str, float]:
    """Parses DATA_DIR=WEIGHT. Raises `ArgumentTypeError` for other text."""
    folder, _, weight = text.rpartition("=")
    try:
        return folder or text, float(weight)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be DATA_DIR=WEIGHT, as in data/mine=0.3, got {text!r}"
        ) from error


HELP = {
    "data_dir": "folder of the shards",
    "verify": "check the checksums of all shards",
    "workers": "threads; default all cores",
    "shard_tokens": "approximate number of tokens per shard; default 100 million",
    "tokenizer": f"{TOKENIZERS}; default gpt2",
    "vocab_size": f"of a trained bpe; default {BPE_SIZE}",
    "column": "column or field with the text; default text",
    "input": "text file; default tiny Shakespeare, downloaded",
    "separator": "line between documents of plain text, '' for none; default <|endoftext|> or the "
    "tokenizer's end of text",
    "pattern": "pattern of the files in a folder, such as '*.py'",
    "config": "configuration of the data set",
    "split": "split of the data set; default train",
    "revision": "branch, tag or commit",
    "data_files": "pattern of the files in the data set",
    "model": "model to fine-tune: HF directory or Hub id",
    "sequence_length": "tokens per window, at most the model's positions",
    "chatml": "ChatML instead of the model's chat template",
    "cut": "cut conversations that are longer than a window, instead of leaving them out",
    "pairs": "pairs of answers for chat_dpo.py: rows with chosen and rejected, and a prompt beside "
    "them or in them; each answer with its prompt has at most --sequence_length tokens",
}
SWITCHES = ("verify", "chatml", "cut", "pairs")
POSITIVE = ("workers", "shard_tokens", "vocab_size", "sequence_length")
REQUIRED = ("model", "sequence_length")
DEFAULTS = {
    "workers": usable_cpus(),
    "shard_tokens": SHARD_TOKENS,
    "tokenizer": "gpt2",
    "column": "text",
}
# The options of every command, of those that tokenize text, of data sets on the Hub, and of chat.
ALWAYS = ("data_dir", "verify")
CORPUS = ("workers", "shard_tokens", "tokenizer", "vocab_size", "column")
HUB_PART = ("config", "split", "revision", "data_files")
CONVERSATIONS = ("model", "sequence_length", "chatml", "cut", "pairs")


class Command(NamedTuple):
    """The arguments of a command: its options, and the metavar and `nargs` of its source."""

    options: tuple[str, ...] = ()
    source: str | None = None
    nargs: str | None = None


COMMANDS = {
    "shakespeare": Command(("input",)),
    "shakespeare-char": Command(("input",)),
    "text": Command((*CORPUS, "pattern", "separator"), "PATH", "+"),
    "hf": Command(CORPUS + HUB_PART, "NAME"),
    "fineweb-edu": Command(CORPUS + HUB_PART, "NAME", "?"),
    "openwebtext": Command(CORPUS + HUB_PART, "NAME", "?"),
    "chat": Command(HUB_PART + CONVERSATIONS, "FILE_OR_HUB_ID"),
    "import": Command((), "FILE_OR_FOLDER"),
    "mix": Command((), "DATA_DIR=WEIGHT", "+"),
}


def add_options(
    parser: argparse.ArgumentParser, names: Sequence[str], default: str | None = None
) -> None:
    """Adds the named options of `HELP` to a parser."""
    for name in names:
        if name in SWITCHES:
            parser.add_argument(
                f"--{name}", action="store_true", default=default or False, help=HELP[name]
            )
        else:
            parser.add_argument(
                f"--{name}",
                type=positive if name in POSITIVE else str,
                required=name in REQUIRED,
                default=default,
                help=HELP[name],
            )


def parse_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the words of a command line, by default this process's.

    `--data_dir` and `--verify` may precede the command.
    """
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, ALWAYS)
    commands = parser.add_subparsers(dest="command")
    for name, (options, source, nargs) in COMMANDS.items():
        command = commands.add_parser(name, description=CHAT if name == "chat" else None)
        if source:
            convert = weighted if name == "mix" else str
            command.add_argument("source", metavar=source, nargs=nargs, type=convert)
        if name == "mix":
            command.add_argument(
                "--from",
                dest="phases",
                action="append",
                default=[],
                nargs="+",
                metavar="SHARE DATA_DIR=WEIGHT",
                help="other weights from a share of the run on, as in --from 0.8 data/code=1",
            )
        add_options(command, options)
        add_options(command, ALWAYS, default=argparse.SUPPRESS)  # keeps those before the command
        command.set_defaults(**DEFAULTS | DATASETS.get(name, {}))
    try:
        parsed = parser.parse_args(words)
    except ValueError as error:
        if "invalid choice" in str(error):
            raise ValueError(f"{error}; the command for files and folders is text PATH") from error
        raise
    if not parsed.data_dir:
        parser.error("the following arguments are required: --data_dir")
    return parsed


def hub_options(options: argparse.Namespace) -> dict[str, str]:
    """Returns the given options that choose a part of a data set."""
    values = vars(options)
    return {name: values[name] for name in HUB_PART if values[name]}


def build_tokenizer(name: str, vocab_size: int | None) -> "PreTrainedTokenizerBase | None":
    """Loads or builds the tokenizer of `--tokenizer`; returns None for one that is trained on the
    text. Raises `ValueError` or `OSError` if there is no such tokenizer."""
    if name == "bpe":
        return None
    if vocab_size is not None:
        raise ValueError(f"--vocab_size is for --tokenizer bpe: leave it out with {name}")
    if name == "bytes":
        return byte_tokenizer()
    try:
        return gpt2_tokenizer() if name == "gpt2" else load_tokenizer(name)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}, or choose another --tokenizer, {TOKENIZERS}") from error


def training_texts(sources: Sequence[Source]) -> Iterator[str]:
    """Yields the training text of sources of text, in chunks."""
    for source in sources:
        for document in source.documents():
            if document.split != "train":
                continue
            yield from document.chunks


def prepare_corpus(options: argparse.Namespace, command: str) -> dict:
    """Writes the shards of files of text; returns the manifest."""
    if options.command == "text":
        files: dict[Path, str] = {}
        for path in options.source:
            files |= find_files(path, is_text, TEXT, options.pattern)
        source = ", ".join(options.source)
        revision = None
        tokenizer = build_tokenizer(options.tokenizer, options.vocab_size)
        sources = corpus_files(files, options.column, tokenizer, options.separator)
    else:
        source = options.source
        paths, revision = hub_files(source, **hub_options(options))
        tokenizer = build_tokenizer(options.tokenizer, options.vocab_size)
        one_in = ONE_IN.get(options.command, HELD_OUT)
        sources = row_files(paths, options.column, one_in)
    if tokenizer is None:
        texts = islice(training_texts(sources), BPE_CHUNKS)
        tokenizer = train_bpe(texts, options.vocab_size or BPE_SIZE)
    chosen = [options.command, options.shard_tokens]
    if getattr(options, "separator", None) is not None:
        chosen.append(options.separator)
    return prepare_sources(
        sources,
        tokenizer,
        options.data_dir,
        source=source,
        plan=plan_of(sources, tokenizer, *chosen),
        shard_tokens=options.shard_tokens,
        validation_tokens=options.shard_tokens if options.command == "fineweb-edu" else 0,
        workers=options.workers,
        revision=revision,
        command=command,
    )


def prepare_shakespeare(options: argparse.Namespace, command: str) -> dict:
    """Writes the shards of one text; returns the manifest."""
    text, name = one_text(options.input)
    characters = options.command == "shakespeare-char"
    tokenizer = char_tokenizer(text) if characters else gpt2_tokenizer()
    source = text_source(text, name, tokenizer)
    return prepare_sources(
        [source],
        tokenizer,
        options.data_dir,
        source=name,
        plan=plan_of([source], tokenizer),
        command=command,
    )


def prepare_chat(options: argparse.Namespace, command: str) -> dict:
    """Writes the shards of conversations; returns the manifest."""
    # These import torch, which most commands do not need.
    from gpt2_accel.checkpoint.find import verified_directory
    from gpt2_accel.hf.chat_template import chat_tokenizer
    from gpt2_accel.hf.convert import local_directory, read_config
    from gpt2_accel.models.any_model import keeps_documents_apart

    directory = verified_directory(options.model)
    tokenizer = chat_tokenizer(directory, options.chatml)
    shape = read_config(local_directory(directory))
    length = options.sequence_length
    if length > shape.n_positions:
        raise ValueError(
            f"--sequence_length {length} exceeds the {shape.n_positions} positions of "
            f"{options.model}: lower it"
        )
    revision = None
    hub = hub_options(options)
    if Path(options.source).exists() and not hub:
        kind = f"conversations, in files that end in {', '.join(ROW_SUFFIXES)}"
        paths = find_files(options.source, lambda path: bool(row_suffix(path)), kind)
        files = [str(path) for path in paths]
    else:
        files, revision = hub_files(options.source, **hub)
    return prepare_conversations(
        files,
        tokenizer,
        options.data_dir,
        sequence_length=length,
        source=options.source,
        model=options.model,
        cut=options.cut,
        packed=options.pairs or keeps_documents_apart(shape),
        pairs=options.pairs,
        longer="--sequence_length" + ("" if options.pairs else " (or give --cut)"),
        revision=revision,
        command=command,
    )


PREPARE = {
    "shakespeare": prepare_shakespeare,
    "shakespeare-char": prepare_shakespeare,
    "chat": prepare_chat,
    "import": lambda options, command: import_tokens(options.source, options.data_dir, command),
}


def summarize(manifest: dict) -> None:
    """Prints the counts of a manifest."""
    if "template" in manifest:
        print(*summary(manifest), sep="\n")
        return
    total = sum(entry["tokens"] for entry in manifest["splits"].values())
    for split, entry in manifest["splits"].items():
        tokens = entry["tokens"]
        line = f"{split}: {tokens:,} tokens ({tokens / total:.1%})"
        for name in ("documents", "bytes"):
            if entry[name] is not None:
                line += f", {entry[name]:,} {name}"
        print(line)
    if "separation" in manifest:
        print(manifest["separation"])
    for token, count in manifest.get("special", {}).items():
        print(f"{count:,} times {token}, kept as ordinary text")
    unknown = manifest.get("unknown")
    if unknown:
        print(LOSSY.format(unknown))


def print_next(data_dir: str, manifest: dict) -> None:
    """Prints commands that look at prepared data, estimate a run on it, and train."""
    recipe = "quickstart"
    if "template" in manifest:
        recipe = "chat-dpo" if manifest.get("pairs") else "chat-sft"
    print(f"\nThe data is in {data_dir}. To look at it, to estimate a run, and to train:")
    train = [recipe, "--output_dir", f"runs/{Path(data_dir).name}"]
    for words in (["prepare-data"], [recipe, "--dry_run"], train):
        print(f"  {recipe_command(*words, '--data_dir', data_dir)}")


def show(data_dir: str) -> None:
    """Prints the source, tokenizer and counts of prepared data, and the beginning of each split."""
    manifest = read_manifest(data_dir)
    data = open_data(data_dir)
    name = manifest["tokenizer"].get("name")
    print(f"{manifest['source']}; tokenizer {name} of {len(data.tokenizer):,} tokens")
    summarize(manifest)
    for split in manifest["splits"]:
        for stream, _ in data.split(split):
            ids = stream.read(0, min(SHOWN_TOKENS, stream.tokens)) & int(TOKEN_ID)
            print(f"{split} begins with {data.tokenizer.decode(ids.tolist())!r}")


def verify(data_dir: str) -> None:
    """Checks the files of prepared data, and prints the result."""
    print(f"all {verify_data(data_dir)} shards are intact")


def main(words: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if words is None else words
    options = parse_options(given)
    command = shlex.join(["prepare_data.py", *given])
    if options.command == "mix":
        weights = dict(options.source)
        if len(weights) < len(options.source):
            raise ValueError("mix: a folder is named twice, give it one weight")
        phases = [(float(share), dict(map(weighted, own))) for share, *own in options.phases]
        summarize(write_mixture(options.data_dir, weights, phases))
    elif options.command:
        prepare = PREPARE.get(options.command, prepare_corpus)
        manifest = prepare(options, command)
        summarize(manifest)
        if words is None:  # not for a recipe
            print_next(options.data_dir, manifest)
    if options.verify:
        verify(options.data_dir)
    elif not options.command:
        show(options.data_dir)


if __name__ == "__main__":
    cli.run(main)
