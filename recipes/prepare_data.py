"""Tokenize text into shards, on which any recipe trains.

    python recipes/prepare_data.py fineweb-edu --data_dir data/fineweb_edu
    python recipes/prepare_data.py openwebtext --data_dir data/openwebtext
    python recipes/prepare_data.py shakespeare --data_dir data/shakespeare
    python recipes/prepare_data.py text folder/ more.jsonl.zst --data_dir data/mine
    python recipes/prepare_data.py hf roneneldan/TinyStories --data_dir data/tinystories
    python recipes/prepare_data.py chat USER/NAME --model MODEL --sequence_length 1024 --data_dir data/chat
    python recipes/prepare_data.py mix data/mine=0.3 data/fineweb_edu=0.7 --data_dir data/both
    python recipes/prepare_data.py --data_dir data/mine  # shows what it holds; --verify checks it

The same command, started again after a kill, does what is missing.

- fineweb-edu: its sample of 10 billion tokens, as in build-nanogpt: the first `--shard_tokens` tokens for validation.
- openwebtext: as in nanoGPT, 0.05% of the documents for validation, drawn with seed 2357.
- shakespeare, shakespeare-char: tiny Shakespeare in GPT-2's BPE or in characters, as in nanoGPT, the last 10% for
  validation.
- text: files and folders. Each file of UTF-8 text is a document, and so is each row of .jsonl, .jsonl.gz, .jsonl.zst and
  .parquet files.
- hf: any data set that `datasets` can load.
- chat: conversations, of a data set on the Hub or of .jsonl, .json or .parquet files, in the chat template of `--model` or
  ChatML, packed whole into windows of `--sequence_length`. See docs/chat.md.

One document in 20 is held out for validation: a file by a hash of its name, a row by a hash of its text. If that is less
than 1% or more than 15% of the text, the last 5% of each document is held out instead.
"""

import argparse
import itertools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt2_accel import cli
from gpt2_accel.cores import usable_cpus
from gpt2_accel.data.conversations import (
    SUFFIXES,
    file_rows,
    plural,
    prepare_conversations,
    summary,
)
from gpt2_accel.data.corpus import file_parts, rule_for
from gpt2_accel.data.data_sets import hub_parts
from gpt2_accel.data.documents import Drawn
from gpt2_accel.data.prepare import SHARD_TOKENS, TextWriter
from gpt2_accel.data.rows import Column
from gpt2_accel.data.shards import (
    TOKEN_ID,
    load_data_tokenizer,
    read_manifest,
    verify_data,
    write_mixture,
)
from gpt2_accel.data.sources import (
    Joined,
    Source,
    Texts,
    split_text,
    text_files,
    text_source,
    tiny_shakespeare,
)
from gpt2_accel.data.workers import plan_of, run_parts, worker_context
from gpt2_accel.tokenizer import (
    byte_tokenizer,
    char_tokenizer,
    gpt2_tokenizer,
    load_tokenizer,
    train_bpe,
)

SHOWN_TOKENS = 40  # of each split
BPE_SIZE = 4096  # tokens of a BPE, unless --vocab_size says otherwise
BPE_DOCUMENTS = 100_000  # a BPE is trained on at most this number of chunks of documents

# nanoGPT's split of OpenWebText, data/openwebtext/prepare.py: share and seed of its validation documents.
OPENWEBTEXT_VAL, OPENWEBTEXT_SEED = 0.0005, 2357
DATASETS: dict[str, dict[str, Any]] = {
    "fineweb-edu": {"dataset": "HuggingFaceFW/fineweb-edu", "config": "sample-10BT"},
    "openwebtext": {
        "dataset": "Skylion007/openwebtext",
        "revision": "refs/convert/parquet",
        "data_files": "plain_text/*/*.parquet",
    },
}
TOKENIZERS = "gpt2, bytes, bpe (trained on the text), or an HF directory or Hub id"
CHAT = (
    "Packs conversations into windows. A row has the field messages (role and content), conversations (from and value), prompt "
    "and completion, or instruction, input and output or response. Files are .jsonl, .json (an array, or lines), .jsonl.gz, "
    ".jsonl.zst or .parquet."
)


def positive(text: str) -> int:
    """Parses a whole number above 0."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def weighted(text: str) -> tuple[str, float]:
    """Parses DATA_DIR=WEIGHT."""
    folder, _, weight = text.rpartition("=")
    try:
        return folder or text, float(weight)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be DATA_DIR=WEIGHT, as in data/mine=0.3, got {text!r}"
        ) from error


def parse_options() -> argparse.Namespace:
    """Parses the command line."""
    # Suppressed defaults let these options stand before or after the command.
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument("--data_dir", help="folder of the shards")
    common.add_argument("--verify", action="store_true", help="check all shards' checksums")
    parser = cli.Parser(
        description=__doc__,
        parents=[common],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    work = argparse.ArgumentParser(add_help=False, parents=[common])
    work.add_argument(
        "--workers", type=positive, default=usable_cpus(), help="processes, all cores if not given"
    )
    work.add_argument(
        "--shard_tokens",
        type=positive,
        default=SHARD_TOKENS,
        help="tokens per shard, about; 100 million if not given",
    )
    data_set = argparse.ArgumentParser(add_help=False)
    data_set.add_argument("--config", help="configuration of the data set")
    data_set.add_argument("--split", help="split of the data set, train if not given")
    data_set.add_argument("--revision", help="a branch, tag or commit")
    data_set.add_argument("--data_files", help="pattern of the data set's files")
    tokens = argparse.ArgumentParser(add_help=False)
    tokens.add_argument("--tokenizer", default="gpt2", help=TOKENIZERS)
    tokens.add_argument(
        "--vocab_size", type=positive, help=f"of a trained bpe, {BPE_SIZE} if not given"
    )
    tokens.add_argument("--column", default="text", help="the column or field that holds the text")

    commands = parser.add_subparsers(dest="command")
    for name in ("shakespeare", "shakespeare-char"):
        command = commands.add_parser(name, parents=[common])
        command.add_argument("--input", help="text file; downloaded if not given")
    text = commands.add_parser("text", parents=[work, tokens])
    text.add_argument("sources", nargs="+", metavar="PATH")
    text.add_argument("--pattern", help="pattern of a folder's files, such as '*.py'")
    for name in ("hf", *DATASETS):
        command = commands.add_parser(name, parents=[work, tokens, data_set])
        command.add_argument("dataset", metavar="NAME", nargs="?" if name in DATASETS else None)
    chat = commands.add_parser("chat", parents=[work, data_set], description=CHAT)
    chat.add_argument(
        "dataset", metavar="FILE_OR_HUB_ID", help="a file, a folder of files, or a data set's id"
    )
    chat.add_argument("--model", required=True, help="model to fine-tune: HF directory or Hub id")
    chat.add_argument(
        "--sequence_length",
        type=positive,
        required=True,
        help="tokens per window, at most the model's positions",
    )
    chat.add_argument(
        "--chatml", action="store_true", help="ChatML in place of the model's own chat template"
    )
    chat.add_argument(
        "--cut",
        action="store_true",
        help="cut conversations that are longer than a window; else they are left out",
    )
    mix = commands.add_parser("mix", parents=[common])
    mix.add_argument("parts", nargs="+", type=weighted, metavar="DATA_DIR=WEIGHT")
    options = parser.parse_args()
    if "data_dir" not in options:
        parser.error("the following arguments are required: --data_dir")
    given = {name: value for name, value in vars(options).items() if value is not None}
    defaults = {"verify": False, **vars(options)}
    return argparse.Namespace(**{**defaults, **DATASETS.get(options.command, {}), **given})


def hub_options(options: argparse.Namespace) -> dict[str, str]:
    """Returns the options that choose a part of a data set, those that are given."""
    names = ("config", "split", "revision", "data_files")
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def corpus_parts(options: argparse.Namespace) -> tuple[list[Source], str, str | None]:
    """Returns the parts of the corpus, its source for the manifest, and its revision."""
    tokens, column = options.shard_tokens, options.column
    if options.command == "text":
        files, lines = text_files(options.sources, options.pattern)
        for line in lines:
            print(line, file=sys.stderr)
        return file_parts(files, column, tokens), ", ".join(options.sources), None
    numbered = options.command == "openwebtext"
    rows, revision = hub_parts(
        options.dataset,
        shard_tokens=tokens,
        column=column,
        numbered=numbered,
        **hub_options(options),
    )
    if numbered:
        rule = Drawn(rows[0].total_rows, OPENWEBTEXT_VAL, OPENWEBTEXT_SEED)
    else:
        # Of FineWeb-Edu no row is drawn: its first tokens are for validation.
        rule = Drawn(0, 0, 0) if options.command == "fineweb-edu" else rule_for(rows, column)
    return [Column(part, column, rule) for part in rows], options.dataset, revision


def build_tokenizer(name: str, vocab_size: int | None, parts: Sequence[Source]):
    """Loads, builds or trains the tokenizer of `--tokenizer`."""
    if vocab_size is not None and name != "bpe":
        raise ValueError(f"--vocab_size is for --tokenizer bpe: leave it out with {name}")
    if name == "bpe":
        documents = (document for part in parts for document in part.documents())
        texts = (chunk for d in documents if d.split == "train" for chunk in d.chunks)
        return train_bpe(itertools.islice(texts, BPE_DOCUMENTS), vocab_size or BPE_SIZE)
    try:
        built = {"gpt2": gpt2_tokenizer, "bytes": byte_tokenizer}.get(name)
        return built() if built else load_tokenizer(name)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}: choose another --tokenizer, {TOKENIZERS}") from error


def prepare_corpus(options: argparse.Namespace) -> dict:
    """Writes the shards of text; returns the manifest."""
    if options.command.startswith("shakespeare"):
        text = tiny_shakespeare(options.input)
        parts = [Joined(tuple(Texts(split, found) for split, found in split_text(text).items()))]
        tokenizer = char_tokenizer(text) if "char" in options.command else gpt2_tokenizer()
        source, revision, workers, validation = text_source(text, options.input), None, 1, 0
    else:
        if (workers := options.workers) > 1:  # they start while the corpus is read
            sources = [Path(source) for source in getattr(options, "sources", [])]
            plain = sources and not any(
                path.suffix == ".parquet" or any(path.rglob("*.parquet")) for path in sources
            )
            worker_context(*([] if plain else ["datasets"]))
        parts, source, revision = corpus_parts(options)
        tokenizer = build_tokenizer(options.tokenizer, options.vocab_size, parts)
        validation = options.shard_tokens if options.command == "fineweb-edu" else 0
    return run_parts(
        parts,
        TextWriter(tokenizer, source, validation_tokens=validation),
        tokenizer,
        options.data_dir,
        source=source,
        plan=plan_of(parts, tokenizer, validation),
        revision=revision,
        command=shlex.join(["prepare_data.py", *sys.argv[1:]]),
        workers=workers,
    )


def prepare_chat(options: argparse.Namespace) -> dict:
    """Writes the shards of conversations; returns the manifest."""
    # Only here: they import torch, which no other command needs.
    from gpt2_accel.checkpoint.find import verified_directory
    from gpt2_accel.hf.chat_template import chat_tokenizer
    from gpt2_accel.hf.convert import local_directory, read_config

    directory = verified_directory(options.model, hint="use another model")
    tokenizer, length = chat_tokenizer(directory, options.chatml), options.sequence_length
    if length > (positions := read_config(local_directory(directory)).n_positions):
        raise ValueError(
            f"--sequence_length {length} exceeds the {positions} positions of {options.model}: lower it"
        )
    revision, source = None, Path(options.dataset)
    hub = hub_options(options)
    if hub and source.is_file():
        raise ValueError(
            f"--{next(iter(hub))} is for a data set of several files: leave it out with {source}"
        )
    if source.exists() and not hub:
        rows = file_rows(source)
    elif source.name.endswith(SUFFIXES):
        raise FileNotFoundError(f"{source} does not exist: give a file, a folder or a Hub id")
    else:
        rows, revision = hub_parts(options.dataset, shard_tokens=options.shard_tokens, **hub)
    return prepare_conversations(
        rows,
        tokenizer,
        options.data_dir,
        sequence_length=length,
        source=options.dataset,
        model=options.model,
        cut=options.cut,
        workers=options.workers,
        revision=revision,
        command=shlex.join(["prepare_data.py", *sys.argv[1:]]),
        shard_tokens=options.shard_tokens,
    )


def summarize(manifest: dict) -> None:
    """Prints the counts of a manifest."""
    if "sequence_length" in manifest:
        print(*summary(manifest), sep="\n")
        return
    total = sum(entry["tokens"] for entry in manifest["splits"].values())
    for split, entry in manifest["splits"].items():
        known = {name: entry[name] for name in ("documents", "bytes") if entry[name] is not None}
        counts = [f"{count:,} {name}" for name, count in known.items()]
        counts.insert(1, f"{entry['tokens']:,} tokens ({entry['tokens'] / total:.1%})")
        print(f"{split}: {', '.join(counts)}")
    counts, first = manifest.get("counts", {}), manifest.get("first_not_utf8")
    labels = {
        "empty": "documents without text, left out",
        "not_utf8": f"bytes that are not UTF-8, replaced by U+FFFD, the first in {first}",
        "literal_separator": "times the text holds <|endoftext|>, encoded as text",
    }
    for name, label in labels.items():
        if counts.get(name):
            print(f"{counts[name]:,} {label}")


def show(data_dir: str) -> None:
    """Prints what a data folder holds, and the beginning of each split."""
    from gpt2_accel.data.loader import open_split  # imports torch

    manifest, tokenizer = read_manifest(data_dir), load_data_tokenizer(data_dir)
    print(
        f"{manifest['source']}; tokenizer {manifest['tokenizer'].get('name')} of {len(tokenizer):,}"
    )
    summarize(manifest)
    for split in manifest["splits"]:
        for stream, _ in open_split(data_dir, split):
            ids = stream.read(0, min(SHOWN_TOKENS, stream.tokens)) & int(TOKEN_ID)
            print(f"{split} begins with {tokenizer.decode(ids.tolist())!r}")


def main() -> None:
    options = parse_options()
    if options.command == "mix":
        if len({Path(folder).resolve() for folder, _ in options.parts}) < len(options.parts):
            raise ValueError("mix: a folder is named twice, give it one weight")
        summarize(write_mixture(options.data_dir, dict(options.parts)))
    elif options.command == "chat":
        summarize(prepare_chat(options))
    elif options.command:
        summarize(prepare_corpus(options))
    if options.verify:
        count = verify_data(options.data_dir)
        if "format" in read_manifest(options.data_dir):
            print(f"all {count} shards are intact")
        else:  # other trainers' files
            print(f"{plural(count, 'file')} of the right size; there are no checksums to compare")
    if not (options.command or options.verify):
        show(options.data_dir)


if __name__ == "__main__":
    cli.run(main)
