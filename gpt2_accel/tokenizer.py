"""Tokenizers: GPT-2's BPE, a BPE trained on text, bytes, characters; special tokens of any kind.

Each is a Hugging Face tokenizer: `save_pretrained` writes it beside the weights, and
`AutoTokenizer` and `pipeline` load it.
"""

import functools
import hashlib
import json
import re
import sys
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from gpt2_accel.runtime.files import first_line, read_json, write_json
from gpt2_accel.runtime.recipe_command import recipe_command

if TYPE_CHECKING:
    import tiktoken
    from transformers import PreTrainedTokenizerBase
else:  # the name for annotations in other modules: to import transformers takes seconds
    PreTrainedTokenizerBase = "PreTrainedTokenizerBase"

END_OF_TEXT = "<|endoftext|>"
LOSSY = (
    "the tokenizer does not give back {:,} characters: bits per byte is not comparable with other "
    "tokenizers"
)
GPT2_VOCAB_SIZE = 50257
# OpenAI's file of GPT-2's merges, by the address under which tiktoken caches it.
GPT2_MERGES = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
GPT2_MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
# `fingerprint` of GPT-2's BPE; tiktoken gives the same ids.
GPT2_FINGERPRINT = "98de00669996e48e8db9590e7c13d37461bb11178e80fa2abcafb3e49f542baf"
# Text that tokenizers with other pre-tokenizers or normalizers encode differently. In order: a word
# without a leading space, runs of spaces, line ends and tabs; contractions in both cases; digits,
# also after two spaces and line ends; case, underscores and punctuation; special tokens of several
# models; NUL, a byte order mark, invisible and wide spaces; composed and combining accents,
# compatibility characters; emoji of several code points; right-to-left, Chinese, Japanese, Korean,
# Thai, Devanagari; trailing spaces.
PROBE = (
    "Word  two   three\r\nfour\n\n\n\tfive \t six\u2028it's we'LL 'tis I\u2019m don'T "
    "0 12 345 2024 1234567  3.14\n\n1e-5 x2y CamelCase snake_case ALLCAPS İı ß "
    "a.b(c)[d]{e}<f>==!=/* */ --- ... <|endoftext|> a<|endoftext|>b <s></s>"
    "<unk> [CLS] \0 \ufeff\u200b\u200d\u00ad\u00a0\u3000 caf\u00e9 cafe\u0301 "
    "\u1e9b\u0323 \ufb01 \u2460 \uff21 x\u00b2 \U0001f469\u200d\U0001f469\u200d\U0001f467 "
    "\U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd \u2764\ufe0f "
    "\u202eabc\u202c שלום عَرَبِيّ 漢字かなカナ。ｶﾅ 한국어 ᄒ\u1161ᆫ ภาษาไทย हिन्दी क्षि "
    "\U00020000 \U0010ffff \n   "
)


def gpt2_tokenizer() -> "PreTrainedTokenizerBase":
    """Returns GPT-2's byte-level BPE of 50,257 tokens, built from OpenAI's list of merges.

    tiktoken downloads the list once, to `TIKTOKEN_CACHE_DIR` if that is set. Raises `OSError` if it
    is neither cached nor reachable.
    """
    from tiktoken.load import read_file_cached

    try:
        lines = read_file_cached(GPT2_MERGES, GPT2_MERGES_SHA256).decode().split("\n")
    except Exception as error:  # whatever the HTTP client raises
        raise OSError(
            "tiktoken cannot load GPT-2's vocabulary: connect to a network once, or set "
            f"TIKTOKEN_CACHE_DIR to a folder that holds it ({error})"
        ) from error
    merges = [tuple(line.split()) for line in lines[1:-1]]  # the first line is a version
    tokens = sorted(byte_symbols()) + ["".join(merge) for merge in merges] + [END_OF_TEXT]
    return _bpe(tokens, merges)


def byte_symbols() -> list[str]:
    """Returns the printable symbol of each byte in a byte-level BPE's vocabulary, in byte order."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [symbol for _, symbol in sorted(bytes_to_unicode().items())]


def byte_tokenizer() -> "PreTrainedTokenizerBase":
    """Returns a tokenizer with one token per UTF-8 byte, its id; `<|endoftext|>` is 256."""
    return _bpe(byte_symbols() + [END_OF_TEXT], [])


def _bpe(tokens: Iterable[str], merges: Any) -> "PreTrainedTokenizerBase":
    """Returns a byte-level BPE with GPT-2's word splitting; token ids are positions in `tokens`."""
    from transformers import GPT2Tokenizer

    return GPT2Tokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)


# The time of training grows with the square of a word's length. Encoding does not.
LONG_WORD = re.compile(r"\w{1000,}")


def train_bpe(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerBase":
    """Trains a byte-level BPE with GPT-2's word splitting on `texts`, without words of `LONG_WORD`.

    `vocab_size` counts the 256 bytes and `<|endoftext|>`, the last id; a small corpus may yield
    fewer tokens. Raises `ValueError` if it leaves no room for a merge or has more than seven
    digits.
    """
    if not 257 < vocab_size < 10**7:  # the trainer allocates memory for all tokens at once
        raise ValueError(
            f"vocab_size of a BPE is at least 258, the bytes, {END_OF_TEXT} and a merge, and below "
            f"10 million, got {vocab_size:,}"
        )
    texts = (LONG_WORD.sub(" ", text) for text in texts)
    print(f"training a BPE of up to {vocab_size:,} tokens", file=sys.stderr, flush=True)
    progress = sys.stderr.isatty()  # elsewhere it prints empty lines to stdout
    trained = byte_tokenizer().train_new_from_iterator(texts, vocab_size, show_progress=progress)
    model = json.loads(trained.backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    tokens.remove(END_OF_TEXT)  # the library puts it first
    tokens.append(END_OF_TEXT)
    if len(tokens) < vocab_size:
        print(f"the BPE has {len(tokens):,} tokens: the text is small", file=sys.stderr)
    return _bpe(tokens, [tuple(merge) for merge in model["merges"]])


def char_tokenizer(text: Iterable[str]) -> "PreTrainedTokenizerBase":
    """Returns a tokenizer with one token per character of `text`, in code-point order (nanoGPT).

    It has no token for unknown characters and none for the end of a text. Encoding a character that
    is not in `text` raises an error.
    """
    from transformers import PreTrainedTokenizerFast

    vocab = {character: i for i, character in enumerate(sorted(set(text)))}
    characters = Tokenizer(models.WordLevel(vocab))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")  # m: with newlines
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters)


def load_tokenizer(name: str | Path) -> "PreTrainedTokenizerBase":
    """Loads the tokenizer of an HF directory or Hub id, with the token ids of `tokenizer.json`.

    `AutoTokenizer` changes some tokenizers: it replaces SmolLM2's splitting of digits by GPT-2's
    splitting. Then the file is loaded without it. Raises `FileNotFoundError` if there is none,
    `ValueError` if the token ids still differ, it is not of the `tokenizers` library, or decoding a
    text does not give it back.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import cached_file

    refuse_gguf(name)
    for kind in (AutoTokenizer, PreTrainedTokenizerFast):
        tokenizer = _from_pretrained(kind, name)
        if not tokenizer.is_fast:
            raise ValueError(
                f"{name} has a {type(tokenizer).__name__}, which is not of the tokenizers library: "
                "use a tokenizer that has a tokenizer.json"
            )
        file = cached_file(name, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
        if file is None or _same_ids(tokenizer, file):
            check_text(tokenizer, name)
            return tokenizer
    raise ValueError(
        f"transformers gives other token ids than the tokenizer.json of {name}: remove what its "
        "tokenizer_config.json changes"
    )


def refuse_gguf(name: str | Path) -> None:
    """Raises `ValueError` for a GGUF file, which is not a model directory."""
    if str(name).lower().endswith(".gguf"):
        command = recipe_command("import-checkpoint", "--input", name, "--output_dir", "FOLDER")
        raise ValueError(f"{name} is a GGUF file: convert it by {command}, and give FOLDER")


def save_tokenizer(
    tokenizer: "PreTrainedTokenizerBase", folder: str | Path, name: str | Path
) -> None:
    """Writes the files of a tokenizer; errors name the folder `name`.

    If the folder holds a model, with a `config.json`, and `AutoTokenizer` loads other token ids
    from it, the files name the class `PreTrainedTokenizerFast`. It prints a line if the class of
    the model's type is loaded all the same, as for Qwen 2. Raises `ValueError` if decoding does not
    give back a text.
    """
    check_text(tokenizer, name)
    # A `tokenizer.json` may have truncation or padding, and a call of the tokenizer may leave them.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.save_pretrained(folder)
    if not Path(folder, "config.json").is_file():
        return
    from transformers import AutoTokenizer

    file = Path(folder, "tokenizer.json")
    if _same_ids(_from_pretrained(AutoTokenizer, folder), file):
        return
    settings = Path(folder, "tokenizer_config.json")
    values = read_json(settings)
    write_json(settings, values | {"tokenizer_class": "PreTrainedTokenizerFast"})
    loaded = _from_pretrained(AutoTokenizer, folder)
    if not _same_ids(loaded, file):
        print_once(
            f"AutoTokenizer opens the tokenizer of this type of model as {type(loaded).__name__}, "
            "with other token ids: in transformers open it by PreTrainedTokenizerFast"
        )


@functools.cache
def print_once(text: str) -> None:
    """Prints a line to stderr, the first time."""
    print(text, file=sys.stderr)


def check_text(tokenizer: "PreTrainedTokenizerBase", name: str | Path) -> None:
    """Raises `ValueError` if a text decodes to another text, or differs after a context.

    Llama 2's tokenizer puts a space before each text, also before a continuation. The check uses a
    word of the vocabulary, and skips text that the tokenizer cannot encode, such as a comma by
    characters.
    """
    tokens = (tokenizer.decode([i], skip_special_tokens=True) for i in range(len(tokenizer)))
    words = (str(text).strip() for text in tokens)
    word = next((text for text in words if text.isalnum()), "")
    texts = [word, f",{word}", f"{word},{word}", f"{word} {word}".strip()]
    try:
        context, continuation, both, spaced = encode(tokenizer, texts)
    except ValueError:
        return
    decode = tokenizer.decode
    if decode(context + continuation) != decode(both) or decode(spaced) != texts[-1]:
        raise ValueError(
            f"{name} has a tokenizer that puts a space before each text, or changes it otherwise: "
            "take a model with another one, such as GPT-2, SmolLM2 or Gemma"
        )


def check_vocabulary(
    tokenizer: "PreTrainedTokenizerBase", vocab_size: int, name: str | Path
) -> None:
    """Raises `ValueError` if the tokenizer has more tokens than the model `name` has rows."""
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"{name} has a vocabulary of {vocab_size}, but the tokenizer has {len(tokenizer)} "
            "tokens: use the tokenizer that the model was trained with"
        )


def _from_pretrained(kind: Any, name: str | Path) -> "PreTrainedTokenizerBase":
    """Loads a tokenizer by the class `kind`. Raises `FileNotFoundError` if there is none."""
    reason = "no tokens"
    try:
        # Without the argument the library asks at the terminal whether to run the directory's code.
        tokenizer = kind.from_pretrained(name, trust_remote_code=False)
        # For a model without a tokenizer the library makes one without tokens, or with special
        # tokens only.
        if len(tokenizer) > len(tokenizer.all_special_tokens):
            return tokenizer
    except Exception as error:  # the library raises nothing narrower for a damaged file
        reason = first_line(error)
    if any(Path(name).glob("*.model")):
        raise FileNotFoundError(
            f"{name} has a SentencePiece file instead of a tokenizer.json, and transformers cannot "
            f"read it ({reason}): pip install sentencepiece protobuf, or add the tokenizer.json"
        )
    raise FileNotFoundError(
        f"{name} holds no tokenizer: put the files of the one that its model or data was made with "
        f"there ({reason})"
    )


def _same_ids(tokenizer: "PreTrainedTokenizerBase", file: str | Path) -> bool:
    """Whether a loaded tokenizer has the tokens of its `tokenizer.json` and encodes `PROBE` alike.

    `AutoTokenizer` may build the normalizer, pre-tokenizer and model options from the tokenizer's
    class instead.
    """
    from transformers import PreTrainedTokenizerFast

    plain = PreTrainedTokenizerFast(tokenizer_file=str(file))
    same_tokens = plain.get_vocab().items() <= tokenizer.get_vocab().items()
    return same_tokens and probe_ids(plain) == probe_ids(tokenizer)


def probe_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int] | None:
    """Returns the token ids of `PROBE`, None if the tokenizer fails on it."""
    try:
        return encode(tokenizer, [PROBE])[0]
    except ValueError:
        return None


def encode(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Returns the token ids of each text, on all cores, without special tokens.

    The literal `<|endoftext|>` is encoded as text. Raises `ValueError` for a character that is not
    in the vocabulary.
    """
    try:
        return tokenizer(
            list(texts), add_special_tokens=False, split_special_tokens=True, verbose=False
        )["input_ids"]
    except Exception as error:  # the library raises nothing narrower
        unknown = sorted(set("".join(texts)) - tokenizer.get_vocab().keys())
        raise ValueError(
            f"the tokenizer does not know the characters {unknown[:10]}: take them out of the "
            "text, or use a BPE or byte tokenizer, which know every character"
        ) from error


def token_encoder(tokenizer: "PreTrainedTokenizerBase") -> Callable[[str], np.ndarray]:
    """Returns a function that encodes a text as `encode` does, on one core, to (tokens,) integers.

    tiktoken encodes GPT-2's BPE, about ten times faster than `encode`. Each thread has its own
    encoding: a regular expression is a quarter slower in threads other than its first.
    """
    encodings = threading.local()

    def fast(text: str) -> np.ndarray:
        if not hasattr(encodings, "encoding"):
            encodings.encoding = _gpt2_encoding(tokenizer)
        return encodings.encoding.encode_to_numpy(text, disallowed_special=())

    same = fingerprint(tokenizer) == GPT2_FINGERPRINT
    # The same vocabulary and merges may have another normalizer or pre-tokenizer.
    if same and fast(PROBE).tolist() == probe_ids(tokenizer):
        return fast
    return lambda text: np.array(encode(tokenizer, [text])[0], np.int64)


def _gpt2_encoding(tokenizer: "PreTrainedTokenizerBase") -> "tiktoken.Encoding":
    """Returns tiktoken's encoding of GPT-2's BPE."""
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    byte_of = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    vocab = tokenizer.get_vocab()
    # `fast` above allows no special token. But without any, tiktoken searches for the empty string,
    # which takes one and a half times as long.
    specials = {END_OF_TEXT: vocab.pop(END_OF_TEXT)}
    ranks = {bytes(byte_of[symbol] for symbol in token): rank for token, rank in vocab.items()}
    return tiktoken.Encoding(
        "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=specials
    )


def special_pattern(tokenizer: "PreTrainedTokenizerBase") -> re.Pattern:
    """Returns a pattern of the texts that are one special token each, and of the end of a turn."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    tokens = sorted(special | {tokenizer.eos_token} - {None}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


def known_ids(tokenizer: "PreTrainedTokenizerBase", *tokens: str | None) -> list[int]:
    """Returns the different ids of those tokens that the vocabulary has."""
    # `convert_tokens_to_ids` would give the unknown token's for others.
    ids = (tokenizer.backend_tokenizer.token_to_id(token or "") for token in tokens)
    return list(dict.fromkeys(i for i in ids if i is not None))


def document_marks(tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int]]:
    """Returns the tokens that begin and that end each document, lists of at most one token.

    If the vocabulary has `<|endoftext|>`, it alone begins documents, also if EOS is another token,
    the end of a turn. Otherwise BOS begins and EOS ends them. If there is only one of the two, or
    both are the same token, it begins them.
    """
    separator = known_ids(tokenizer, END_OF_TEXT)
    ids = separator or known_ids(tokenizer, tokenizer.bos_token, tokenizer.eos_token)
    return ids[:1], ids[1:]


def text_start(tokenizer: "PreTrainedTokenizerBase", begins: bool = True) -> list[int]:
    """Returns the tokens before a text: the token that begins documents, if there is one.

    A text that does not begin a document (`begins` is False) follows only a BOS, and only if EOS,
    another token, ends the documents.
    """
    begin, end = document_marks(tokenizer)
    return begin if begins or end else []


def added_bos(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Returns BOS if a call of the tokenizer puts it before each text, as Gemma's does."""
    first = tokenizer("")["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


def text_ends(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Returns the tokens that end a text: EOS, and last the token after a document in data."""
    return known_ids(tokenizer, tokenizer.eos_token, END_OF_TEXT) or text_start(tokenizer)


def text_separators(tokenizer: "PreTrainedTokenizerBase | None") -> list[str]:
    """Returns the lines that separate documents of plain text: `<|endoftext|>` and the tokenizer's
    own token after a document."""
    lines = [END_OF_TEXT]
    if tokenizer is not None:
        lines += tokenizer.convert_ids_to_tokens(text_ends(tokenizer)[-1:])
    return lines


def describe_marks(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Describes the tokens between documents."""
    begin, end = document_marks(tokenizer)
    if not begin:
        return (
            f"documents are not separated: the tokenizer has neither {END_OF_TEXT} nor BOS nor EOS"
        )
    marks = tokenizer.convert_ids_to_tokens(begin + end)
    return "each document begins with " + " and ends with ".join(marks)


def lost_characters(tokenizer: "PreTrainedTokenizerBase", text: str, ids: list[int]) -> int:
    """Returns how many characters of a text its token ids do not give back, composed or not."""
    decoded = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    before, after = (Counter(unicodedata.normalize("NFC", each)) for each in (text, str(decoded)))
    return (before - after).total()


def fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Returns the SHA-256 (hex) of vocabulary and merges: equal if tokenizers encode alike."""
    backend = tokenizer.backend_tokenizer
    merges = json.loads(backend.to_str())["model"].get("merges", [])
    content = json.dumps([sorted(backend.get_vocab().items()), merges])
    return hashlib.sha256(content.encode()).hexdigest()
