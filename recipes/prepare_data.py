"""Tokenize text into shards, on which any recipe trains.

    python recipes/prepare_data.py fineweb-edu --data_dir data/fineweb_edu
    python recipes/prepare_data.py openwebtext --data_dir data/openwebtext
    python recipes/prepare_data.py shakespeare --data_dir data/shakespeare
    python recipes/prepare_data.py text folder/ more.jsonl.zst --data_dir data/mine
    python recipes/prepare_data.py hf roneneldan/TinyStories --data_dir data/tinystories
    python recipes/prepare_data.py chat HuggingFaceTB/smoltalk --config all --model runs/pretrain_124m \
        --sequence_length 1024 --data_dir data/smoltalk
    python recipes/prepare_data.py mix data/mine=0.3 data/fineweb_edu=0.7 --data_dir data/both
    python recipes/prepare_data.py --verify --stats --data_dir data/mine

The same command resumes after a kill. The shards are the same, byte for byte, with any number of workers.

- fineweb-edu: its sample of 10 billion tokens, as in build-nanogpt: shards of 100M tokens, the first for validation.
- openwebtext: as in nanoGPT, 0.05% of the documents for validation, drawn with seed 2357.
- shakespeare, shakespeare-char: tiny Shakespeare in GPT-2's BPE or in characters, as in nanoGPT, the last 10% for
  validation.
- text: files and folders of .txt (one document per file), .jsonl, .jsonl.gz, .jsonl.zst and .parquet (one per row).
  `--unique` leaves out files whose content an earlier one has.
- hf: any data set that `datasets` can load.
- chat: conversations, of a data set on the Hub or of .jsonl, .json or .parquet files, in the chat template of `--model` or
  ChatML, packed whole into windows of `--sequence_length`. See docs/chat.md.

One document in 20 is held out for validation, by a hash of its name. If there are too few documents, the last 5% of
each is held out. `--executor slurm` and `ray` run on a cluster through datatrove; they are not tested. `--executor
datatrove`, its local executor, is tested.
"""

import argparse
import itertools
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gpt2_accel import cli
from gpt2_accel.cores import usable_cpus
from gpt2_accel.data.conversations import (
    SUFFIXES,
    file_rows,
    left_out,
    plural,
    prepare_conversations,
)
from gpt2_accel.data.documents import LARGEST_PIECE, Drawn, Piece
from gpt2_accel.data.hub import hub_pieces
from gpt2_accel.data.plan import SHARD_TOKENS, Plan
from gpt2_accel.data.prepare import plan_hash, run_plan
from gpt2_accel.data.shards import verify_data, write_mixture
from gpt2_accel.data.sources import (
    Texts,
    file_pieces,
    split_text,
    text_files,
    text_source,
    tiny_shakespeare,
    unique_files,
    with_retries,
)
from gpt2_accel.data.tokenizing import worker_context
from gpt2_accel.tokenizer import (
    byte_tokenizer,
    char_tokenizer,
    gpt2_tokenizer,
    load_tokenizer,
    train_bpe,
)

BPE_SIZE = 4096  # tokens of a BPE, unless --vocab_size says otherwise
BPE_DOCUMENTS = 100_000  # a BPE is trained on at most this number of chunks of documents

# nanoGPT's split of OpenWebText, data/openwebtext/prepare.py: share and seed of its validation documents.
OPENWEBTEXT_VAL, OPENWEBTEXT_SEED = 0.0005, 2357
DATASETS: dict[str, dict[str, Any]] = {
    "fineweb-edu": {
        "dataset": "HuggingFaceFW/fineweb-edu",
        "config": "sample-10BT",
    },
    "openwebtext": {
        "dataset": "Skylion007/openwebtext",
        "revision": "refs/convert/parquet",
        "data_files": "plain_text/*/*.parquet",
    },
}


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
    common.add_argument("--stats", action="store_true", help="print statistics of the shards")
    parser = cli.Parser(
        description=__doc__,
        parents=[common],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    corpus = argparse.ArgumentParser(add_help=False, parents=[common])
    corpus.add_argument("--workers", type=positive, default=usable_cpus())
    corpus.add_argument(
        "--shard_tokens", type=positive, default=SHARD_TOKENS, help="tokens per shard"
    )
    corpus.add_argument("--executor", choices=EXECUTORS, help="datatrove executor")
    corpus.add_argument("--slurm_partition", help="for --executor slurm")
    corpus.add_argument("--slurm_time", default="20:00:00", help="for --executor slurm")
    tokens = argparse.ArgumentParser(add_help=False)
    tokens.add_argument(
        "--tokenizer",
        default="gpt2",
        help="gpt2, bytes, bpe (trained on the text), or an HF directory or Hub id",
    )
    tokens.add_argument(
        "--vocab_size",
        type=positive,
        help=f"vocabulary size of a trained bpe, {BPE_SIZE} if not given",
    )
    tokens.add_argument("--column", default="text", help="the column or field that holds the text")
    commands = parser.add_subparsers(dest="command")
    for name in ("shakespeare", "shakespeare-char"):
        command = commands.add_parser(name, parents=[corpus])
        command.add_argument("--input", help="text file; downloaded if not given")
    text = commands.add_parser("text", parents=[corpus, tokens])
    text.add_argument("sources", nargs="+", metavar="PATH")
    text.add_argument("--pattern", help="pattern of a folder's files, such as '*.py'")
    text.add_argument(
        "--unique", action="store_true", help="leave out files whose content an earlier one has"
    )
    for name in ("hf", *DATASETS):
        command = commands.add_parser(name, parents=[corpus, tokens])
        command.add_argument("dataset", metavar="NAME", nargs="?" if name in DATASETS else None)
        command.add_argument("--config", help="configuration of the data set")
        command.add_argument("--split", default="train", help="split of the data set")
        command.add_argument("--revision", help="a branch, tag or commit")
        command.add_argument("--data_files", help="pattern of the data set's files")
    chat = commands.add_parser("chat", parents=[common], description=CHAT)
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
    chat.add_argument("--workers", type=positive, default=usable_cpus(), help="processes")
    chat.add_argument(
        "--shard_tokens", type=positive, default=SHARD_TOKENS, help="tokens per shard"
    )
    chat.add_argument("--config", help="configuration of the data set")
    chat.add_argument("--split", help="split of the data set, train if not given")
    chat.add_argument("--revision", help="a branch, tag or commit")
    chat.add_argument("--data_files", help="pattern of the data set's files")
    mix = commands.add_parser("mix", parents=[common])
    mix.add_argument("parts", nargs="+", type=weighted, metavar="DATA_DIR=WEIGHT")
    options = parser.parse_args()
    if "data_dir" not in options:
        parser.error("the following arguments are required: --data_dir")
    given = {name: value for name, value in vars(options).items() if value is not None}
    defaults = {"verify": False, "stats": False, **vars(options)}
    return argparse.Namespace(**{**defaults, **DATASETS.get(options.command, {}), **given})


EXECUTORS = ("datatrove", "slurm", "ray")


def pieces_of(
    options: argparse.Namespace, piece_bytes: int | None = None
) -> tuple[list[Piece], str, str | None]:
    """Returns the pieces of the corpus, its source for the manifest, and its revision."""
    if options.command == "text":
        found = [(path, s) for s in options.sources for path in text_files(s, options.pattern)]
        names = {
            path: path.name if str(path) == source else path.relative_to(source).as_posix()
            for path, source in found
        }
        source, all_files = ", ".join(options.sources), len(names)
        if options.unique:
            names = unique_files(names)
            source += f" ({all_files - len(names):,} of {all_files:,} files are copies, left out)"
        return file_pieces(names, options.column, piece_bytes), source, None
    draws = {
        "openwebtext": partial(Drawn, share=OPENWEBTEXT_VAL, seed=OPENWEBTEXT_SEED),
        "fineweb-edu": partial(Drawn, share=0, seed=0),  # no row, since a whole shard is held out
    }
    names = ("config", "split", "column", "revision", "data_files")
    pieces, revision = hub_pieces(
        options.dataset,
        **{name: getattr(options, name) for name in names},
        hold_out=draws.get(options.command),
        piece_bytes=piece_bytes,
    )
    return pieces, options.dataset, revision


def build_tokenizer(name: str, vocab_size: int | None, pieces: list[Piece]):
    """Loads, builds or trains the tokenizer of `--tokenizer`."""
    if vocab_size is not None and name != "bpe":
        raise ValueError(f"--vocab_size is for --tokenizer bpe: leave it out with {name}")
    if name == "gpt2":
        return gpt2_tokenizer()
    if name == "bytes":
        return byte_tokenizer()
    if name == "bpe":
        size = vocab_size or BPE_SIZE
        return with_retries(
            lambda: train_bpe(itertools.islice(training_texts(pieces), BPE_DOCUMENTS), size)
        )
    return load_tokenizer(name)


def training_texts(pieces: list[Piece]) -> Iterator[str]:
    """Yields the chunks of the training documents."""
    documents = (document for piece in pieces for document in piece.documents())
    return (chunk for d in documents if d.split == "train" for chunk in d.chunks)


def prepare_corpus(options: argparse.Namespace) -> dict | None:
    """Writes the shards; returns the manifest, None after submitting Slurm jobs."""
    if options.workers > 1 and not options.executor:
        worker_context()  # starts while the tokenizer is built
    plan = plan_of(options)
    plan.command = shlex.join(["prepare_data.py", *sys.argv[1:]])
    if not options.executor:
        return run_plan(plan, options.workers)
    from gpt2_accel.data.cluster import run_on

    slurm = {"partition": options.slurm_partition, "time": options.slurm_time}
    return run_on(options.executor, plan, options.workers, slurm)


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
    names = ("config", "split", "revision", "data_files")
    hub = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if hub and source.is_file():
        raise ValueError(
            f"--{next(iter(hub))} is for a data set of several files: leave it out with {source}"
        )
    if source.exists() and not hub:
        rows = file_rows(source)
    elif source.name.endswith(SUFFIXES):
        raise FileNotFoundError(f"{source} does not exist: give a file, a folder or a Hub id")
    else:
        rows, revision = hub_pieces(options.dataset, column="", **hub)
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


def plan_of(options: argparse.Namespace) -> Plan:
    """Builds the plan of the command line."""
    data_dir = Path(options.data_dir)
    if options.command.startswith("shakespeare"):
        text = tiny_shakespeare(options.input)
        return Plan(
            [Texts(split, texts) for split, texts in split_text(text).items()],
            char_tokenizer(text) if "char" in options.command else gpt2_tokenizer(),
            data_dir,
            source=text_source(text, options.input),
            shard_tokens=options.shard_tokens,
        )
    pieces, source, revision = pieces_of(options)
    plan = Plan(
        pieces,
        build_tokenizer(options.tokenizer, options.vocab_size, pieces),
        data_dir,
        source,
        revision,
        shard_tokens=options.shard_tokens,
        validation_shard=options.command == "fineweb-edu",
    )
    begun = {plan_hash(data_dir), plan_hash(plan.work)}
    if begun <= {None, plan.hash}:
        return plan
    # Release 0.2 had larger pieces: continue its work, recognize its data.
    pieces, *_ = pieces_of(options, min(LARGEST_PIECE, 4 * options.shard_tokens))
    former = replace(plan, pieces=pieces)
    return former if former.hash in begun else plan


def summarize(manifest: dict) -> None:
    """Prints the counts of a manifest."""
    total = sum(entry["tokens"] for entry in manifest["splits"].values())
    for split, entry in manifest["splits"].items():
        line = f"{split}: {entry['tokens']:,} tokens ({entry['tokens'] / total:.1%})"
        if entry["shards"]:  # a mixture has none of its own
            line = (
                f"{split}: {entry['documents']:,} documents, {entry['tokens']:,} tokens ({entry['tokens'] / total:.1%}), "
                f"{entry['bytes']:,} bytes, {len(entry['shards'])} shards"
            )
        print(line)
    counts = manifest.get("counts", {})
    labels = {
        "empty": "documents without text, left out",
        "not_utf8": "documents with bytes that are not UTF-8, replaced by U+FFFD",
        "literal_separator": "documents that hold <|endoftext|>, encoded as text",
    }
    for name, label in labels.items():
        if counts.get(name):
            first = manifest.get("first_not_utf8") if name == "not_utf8" else None
            print(f"{counts[name]:,} {label}" + (f", the first: {first}" if first else ""))
    if counts:
        print(f"the longest document has {counts['longest']:,} bytes")


def summarize_chat(manifest: dict) -> None:
    """Prints the counts of a manifest of conversations."""
    length = manifest["sequence_length"]
    for split, entry in manifest["splits"].items():
        tokens = entry["tokens"] - entry["padding"]
        print(
            f"{split}: {plural(entry['documents'], 'conversation')}, {tokens:,} tokens, of which "
            f"{entry['counted'] / tokens:.0%} count in the loss, in {plural(entry['tokens'] // length, 'window')} of "
            f"{length:,} ({tokens / entry['tokens']:.1%} full)"
        )
    for line in left_out(manifest["counts"], manifest["first"]):
        print(line)


def main() -> None:
    options = parse_options()
    if options.command == "mix":
        if len(dict(options.parts)) < len(options.parts):
            raise ValueError("mix: a folder is named twice, give it one weight")
        summarize(write_mixture(options.data_dir, dict(options.parts)))
    elif options.command == "chat":
        summarize_chat(prepare_chat(options))
    elif options.command:
        manifest = prepare_corpus(options)
        if manifest is None:
            print(f"Slurm has the jobs; {options.data_dir} is there when they have ended")
            return
        summarize(manifest)
    if options.verify:
        print(f"all {verify_data(options.data_dir)} shards are intact")
    if options.stats or not (options.command or options.verify):
        from gpt2_accel.data.stats import describe

        print(describe(options.data_dir))


if __name__ == "__main__":
    cli.run(main)
