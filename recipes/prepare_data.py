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
  shards.
- mix: a mixture of prepared data, with the weight of each.

One document in 20 is held out for validation: a file by a hash of its name, a row by a hash of its
text. If that is less than 1% or more than 15% of the text, the last 5% of each document is held out
instead.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from gpt2_accel import cli
from gpt2_accel.data.conversations import prepare_conversations, summary
from gpt2_accel.data.documents import HELD_OUT
from gpt2_accel.data.mixture import write_mixture
from gpt2_accel.data.prepare import SHARD_TOKENS, plan_of, prepare_one, prepare_sources
from gpt2_accel.data.rows import ROW_SUFFIXES, row_suffix
from gpt2_accel.data.shards import TOKEN_ID, read_manifest
from gpt2_accel.data.source import open_data, verify_data
from gpt2_accel.data.sources import Source, corpus_files, find_files, hub_files, is_text, row_files
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
TOKENIZERS = "gpt2, bytes, bpe (trained on the text), or an HF directory or Hub id"
TEXT = "UTF-8 text, JSON, Parquet or CSV"
ROWS = (
    "Packs conversations into windows. A row has one of: messages (with role and content); "
    "conversations (with from and value); prompt and completion; instruction, input, and output or "
    "response. Files have the same formats as the rows of the command text."
)


# Text


def prepare_shakespeare(options: argparse.Namespace) -> dict:
    """Writes the shards of one text; returns the manifest."""
    characters = options.command == "shakespeare-char"
    tokenizer_of = char_tokenizer if characters else lambda _: gpt2_tokenizer()
    return prepare_one(options.input, options.data_dir, tokenizer_of, options.line)


def prepare_files(options: argparse.Namespace) -> dict:
    """Writes the shards of files and folders of text; returns the manifest."""
    files: dict[Path, str] = {}
    for path in options.source:
        files |= find_files(path, is_text, TEXT, options.pattern)
    tokenizer = build_tokenizer(options.tokenizer, options.vocab_size)
    sources = corpus_files(files, options.column, tokenizer, options.separator)
    chosen = [] if options.separator is None else [options.separator]
    return prepare_corpus(options, sources, tokenizer, *chosen, source=", ".join(options.source))


def prepare_hub(options: argparse.Namespace) -> dict:
    """Writes the shards of a data set on the Hub; returns the manifest."""
    paths, revision = hub_files(options.source, **hub_part(options))
    tokenizer = build_tokenizer(options.tokenizer, options.vocab_size)
    sources = row_files(paths, options.column, options.one_in)
    return prepare_corpus(options, sources, tokenizer, source=options.source, revision=revision)


def hub_part(options: argparse.Namespace) -> dict[str, str]:
    """Returns the given options that choose a part of a data set."""
    values = vars(options)
    return {name: values[name] for name in HUB if values[name]}


def build_tokenizer(name: str, vocab_size: int | None) -> "PreTrainedTokenizerBase | None":
    """Loads or builds the tokenizer of `--tokenizer`; returns None for one that is trained on the
    text. Raises `ValueError` or `OSError` if there is no such tokenizer."""
    if name == "bpe":
        return None
    if vocab_size is not None:
        raise ValueError(f"--vocab_size is for --tokenizer bpe: leave it out with {name}")
    build = {"gpt2": gpt2_tokenizer, "bytes": byte_tokenizer}.get(name)
    try:
        return build() if build else load_tokenizer(name)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}, or choose another --tokenizer, {TOKENIZERS}") from error


def prepare_corpus(
    options: argparse.Namespace,
    sources: Sequence[Source],
    tokenizer: "PreTrainedTokenizerBase | None",
    *chosen: str,
    source: str,
    revision: str | None = None,
) -> dict:
    """Writes the shards of sources with a tokenizer, or with a BPE trained on their training text.

    `chosen` are more options that the text depends on, `source` describes the sources. Returns the
    manifest.
    """
    if tokenizer is None:
        documents = (document for source in sources for document in source.documents())
        texts = (chunk for own in documents if own.split == "train" for chunk in own.chunks)
        tokenizer = train_bpe(islice(texts, BPE_CHUNKS), options.vocab_size or BPE_SIZE)
    return prepare_sources(
        sources,
        tokenizer,
        options.data_dir,
        source=source,
        plan=plan_of(sources, tokenizer, options.command, options.shard_tokens, *chosen),
        shard_tokens=options.shard_tokens,
        validation_tokens=options.shard_tokens if options.command == "fineweb-edu" else 0,
        workers=options.workers,
        revision=revision,
        command=options.line,
    )


# Conversations, token files, mixtures


def prepare_chat(options: argparse.Namespace) -> dict:
    """Writes the shards of conversations; returns the manifest."""
    from chat_sft import chat_model

    from gpt2_accel.checkpoint.find import verified_directory  # imports torch

    length = options.sequence_length
    directory = verified_directory(options.model)
    tokenizer, _, packed = chat_model(directory, length, "--sequence_length", options.chatml)
    revision = None
    part = hub_part(options)
    if Path(options.source).exists() and not part:
        kind = f"conversations, in files that end in {', '.join(ROW_SUFFIXES)}"
        paths = find_files(options.source, lambda path: bool(row_suffix(path)), kind)
        files = [str(path) for path in paths]
    else:
        files, revision = hub_files(options.source, **part)
    return prepare_conversations(
        files,
        tokenizer,
        options.data_dir,
        sequence_length=length,
        source=options.source,
        model=options.model,
        cut=options.cut,
        packed=options.pairs or packed,
        pairs=options.pairs,
        longer="--sequence_length" + ("" if options.pairs else " (or give --cut)"),
        revision=revision,
        command=options.line,
    )


def prepare_mixture(options: argparse.Namespace) -> dict:
    """Writes a mixture of prepared data; returns the manifest."""
    weights = dict(map(weighted, options.source))
    if len(weights) < len(options.source):
        raise ValueError("mix: a folder is named twice, give it one weight")
    phases = [(weighted(share)[1], dict(map(weighted, own))) for share, *own in options.phases]
    return write_mixture(options.data_dir, weights, phases)


def weighted(word: str) -> tuple[str, float]:
    """Parses DATA_DIR=WEIGHT, or a number alone. Raises `ValueError` for other text."""
    folder, _, weight = word.rpartition("=")
    try:
        return folder, float(weight)
    except ValueError as error:
        raise ValueError(
            f"mix: {word} is neither DATA_DIR=WEIGHT, as in data/mine=0.3, nor a SHARE of the run"
        ) from error


# The command line


def positive(text: str) -> int:
    """Parses a positive integer. Raises `ArgumentTypeError` for other text."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


# Command -> its data set on the Hub.
DATA_SETS = {
    "fineweb-edu": {"source": "HuggingFaceFW/fineweb-edu", "config": "sample-10BT"},
    "openwebtext": {
        "source": "Skylion007/openwebtext",
        "revision": "refs/convert/parquet",
        "data_files": "plain_text/*/*.parquet",
    },
}
ONE_IN = 2000  # one row of these in how many is held out; nanoGPT has the same share
# Option -> its settings for argparse.
NUMBER: dict[str, Any] = {"type": positive}
SWITCH = {"action": "store_true"}
ALWAYS = {
    "data_dir": {"help": "folder of the shards"},
    "verify": SWITCH | {"help": "check the checksums of all shards"},
}
ONE_TEXT = {"input": {"help": "text file; default tiny Shakespeare, downloaded"}}
CORPUS = {
    "workers": NUMBER | {"default": usable_cpus(), "help": "threads; default all cores"},
    "shard_tokens": NUMBER
    | {"default": SHARD_TOKENS, "help": "approximate tokens per shard; default 100 million"},
    "tokenizer": {"default": "gpt2", "help": f"{TOKENIZERS}; default gpt2"},
    "vocab_size": NUMBER | {"help": f"of a trained bpe; default {BPE_SIZE}"},
    "column": {"default": "text", "help": "column or field with the text; default text"},
}
PLAIN = {
    "pattern": {"help": "pattern of the files in a folder, such as '*.py'"},
    "separator": {
        "help": "line between documents of plain text, '' for none; default <|endoftext|> or the "
        "tokenizer's end of text"
    },
}
HUB = {
    "config": {"help": "configuration of the data set"},
    "split": {"help": "split of the data set; default train"},
    "revision": {"help": "branch, tag or commit"},
    "data_files": {"help": "pattern of the files in the data set"},
}
CHAT = {
    "model": {"required": True, "help": "model to fine-tune: HF directory or Hub id"},
    "sequence_length": NUMBER
    | {"required": True, "help": "tokens per window, at most the model's positions"},
    "chatml": SWITCH | {"help": "ChatML instead of the model's chat template"},
    "cut": SWITCH
    | {"help": "cut conversations that are longer than a window, instead of leaving them out"},
    "pairs": SWITCH
    | {
        "help": "pairs of answers for chat_dpo.py: rows with chosen and rejected, and a prompt "
        "beside them or in them; each answer with its prompt has at most --sequence_length tokens"
    },
}
PHASES = {
    "from": {
        "dest": "phases",
        "action": "append",
        "default": [],
        "nargs": "+",
        "metavar": "SHARE DATA_DIR=WEIGHT",
        "help": "other weights from a share of the run on, as in --from 0.8 data/code=1",
    }
}


def add_options(parser: Parser, options: Mapping, **others: str) -> None:
    """Adds options with their settings, and `others`, to a parser."""
    for name, settings in options.items():
        parser.add_argument(f"--{name}", **settings | others)


def parse_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the words of a command line, by default this process's.

    `--data_dir` and `--verify` may precede the command. The function of the command is in
    `prepare`, the line as it was typed in `line`.
    """
    words = sys.argv[1:] if words is None else words
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(line=shlex.join(["prepare_data.py", *words]))
    add_options(parser, ALWAYS)
    commands = parser.add_subparsers(dest="command")

    def add(name: str, prepare: Callable, options: Mapping, *source: Any, **defaults: Any) -> None:
        command = commands.add_parser(name, description=ROWS if name == "chat" else None)
        if source:
            command.add_argument("source", metavar=source[0], nargs=source[1])
        add_options(command, options)
        add_options(command, ALWAYS, default=argparse.SUPPRESS)  # keeps those before the command
        command.set_defaults(prepare=prepare, **defaults)

    add("shakespeare", prepare_shakespeare, ONE_TEXT)
    add("shakespeare-char", prepare_shakespeare, ONE_TEXT)
    add("text", prepare_files, CORPUS | PLAIN, "PATH", "+")
    add("hf", prepare_hub, CORPUS | HUB, "NAME", None, one_in=HELD_OUT)
    for name, defaults in DATA_SETS.items():
        add(name, prepare_hub, CORPUS | HUB, "NAME", "?", one_in=ONE_IN, **defaults)
    add("chat", prepare_chat, HUB | CHAT, "FILE_OR_HUB_ID", None)
    add("import", lambda o: import_tokens(o.source, o.data_dir, o.line), {}, "FILE_OR_FOLDER", None)
    add("mix", prepare_mixture, PHASES, "DATA_DIR=WEIGHT", "+")
    try:
        parsed = parser.parse_args(words)
    except ValueError as error:
        if "invalid choice" in str(error):
            raise ValueError(f"{error}; the command for files and folders is text PATH") from error
        raise
    if not parsed.data_dir:
        parser.error("the following arguments are required: --data_dir")
    return parsed


# What was prepared


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
    if manifest.get("unknown"):
        print(LOSSY.format(manifest["unknown"]))


def print_next(data_dir: str, manifest: dict) -> None:
    """Prints commands that look at prepared data, estimate a run on it, and train."""
    recipe = "quickstart"
    if manifest.get("sequence_length"):
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
            ids = stream.read(0, min(SHOWN_TOKENS, stream.tokens)) & TOKEN_ID
            print(f"{split} begins with {data.tokenizer.decode(ids.tolist())!r}")


def main(words: Sequence[str] | None = None) -> None:
    options = parse_options(words)
    if options.command:
        manifest = options.prepare(options)
        summarize(manifest)
        if words is None:  # not for a recipe
            print_next(options.data_dir, manifest)
    if options.verify:
        print(f"all {verify_data(options.data_dir)} shards are intact")
    elif not options.command:
        show(options.data_dir)


if __name__ == "__main__":
    cli.run(main)
