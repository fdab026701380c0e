"""Turn text into token shards that any recipe trains on.

    python recipes/prepare_data.py text my_file.txt --data_dir data/mine
    python recipes/prepare_data.py text folder/ --pattern '*.py' --data_dir data/code
    python recipes/prepare_data.py hf roneneldan/TinyStories --data_dir data/tinystories

Of several documents one in 20 is held out for validation, by a hash of its name; of a single file the
last 5% of its characters.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator

from gpt2_accel import cli
from gpt2_accel.data.prepare import dataset_texts, held_out, prepare, read_text, text_files
from gpt2_accel.tokenizer import byte_tokenizer, gpt2_tokenizer, load_tokenizer, train_bpe

BPE_DOCUMENTS = 100_000  # a BPE is trained on this many at most

Splits = dict[str, Callable[[], Iterator[str]]]


def splits_of_files(sources: list[str], pattern: str) -> Splits:
    """The documents of some files and folders, one a file."""
    files = [(path, source) for source in sources for path in text_files(source, pattern)]
    if len(files) == 1:
        text = read_text(files[0][0])
        cut = int(len(text) * 0.95)
        return {"train": lambda: iter([text[:cut]]), "val": lambda: iter([text[cut:]])}
    names = {
        path: path.name if str(path) == source else path.relative_to(source).as_posix()
        for path, source in files
    }
    return {
        "train": lambda: (read_text(path) for path in names if not held_out(names[path])),
        "val": lambda: (read_text(path) for path in names if held_out(names[path])),
    }


def splits_of_dataset(options: argparse.Namespace) -> Splits:
    """The documents of a `datasets` data set, one a row."""

    def rows(validation: bool) -> Iterator[str]:
        texts = dataset_texts(
            options.dataset, options.column, name=options.config, split=options.split
        )
        return (text for i, text in enumerate(texts) if held_out(str(i)) == validation)

    return {"train": lambda: rows(False), "val": lambda: rows(True)}


def build_tokenizer(name: str, vocab_size: int, splits: Splits):
    """The tokenizer that `--tokenizer` names."""
    if name == "gpt2":
        return gpt2_tokenizer()
    if name == "bytes":
        return byte_tokenizer()
    if name == "bpe":
        return train_bpe(itertools.islice(splits["train"](), BPE_DOCUMENTS), vocab_size)
    return load_tokenizer(name)


def main() -> None:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--data_dir", required=True, help="folder to make")
    common.add_argument(
        "--tokenizer",
        default="gpt2",
        help="gpt2, bytes, bpe (trained on the text), or an HF directory",
    )
    common.add_argument("--vocab_size", type=int, default=4096, help="tokens of a trained bpe")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    text = commands.add_parser("text", parents=[common], help="text files and folders")
    text.add_argument("sources", nargs="+", metavar="PATH")
    text.add_argument("--pattern", default="*.txt", help="which files of a folder")
    hf = commands.add_parser("hf", parents=[common], help="a data set of the Hugging Face Hub")
    hf.add_argument("dataset", metavar="NAME")
    hf.add_argument("--config", help="its configuration")
    hf.add_argument("--split", default="train", help="its split")
    hf.add_argument("--column", default="text", help="the column that holds the text")
    options = parser.parse_args()

    if options.command == "text":
        splits = splits_of_files(options.sources, options.pattern)
        source = ", ".join(options.sources)
    else:
        splits, source = splits_of_dataset(options), options.dataset
    tokenizer = build_tokenizer(options.tokenizer, options.vocab_size, splits)
    documents = {split: read() for split, read in splits.items()}
    manifest = prepare(documents, tokenizer, options.data_dir, source=source)
    for split, entry in manifest["splits"].items():
        print(
            f"{split}: {entry['documents']:,} documents, {entry['tokens']:,} tokens, {entry['bytes']:,} bytes"
        )


if __name__ == "__main__":
    cli.run(main)
