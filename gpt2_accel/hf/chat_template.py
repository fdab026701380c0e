"""Prepares a tokenizer and a model for chat: the chat template, its special tokens, their rows.

A model without a template gets ChatML, the format of OpenAI's first chat models, SmolLM2 and Qwen3.
Its `{% generation %}` marks the assistant's tokens, so that `transformers` and TRL know which
tokens count in the loss. For a template without it see `chat_tokens.conversation_tokens`; the model
is saved with its original template.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from gpt2_accel.data.chat_tokens import conversation_tokens
from gpt2_accel.hf.any_model import with_rows_of_class
from gpt2_accel.hf.convert import model_tokenizer
from gpt2_accel.hf.tensors import conversion
from gpt2_accel.models import LanguageModel, filled
from gpt2_accel.models.any_model import AnyModel
from gpt2_accel.tokenizer import PreTrainedTokenizerBase

BEGIN_TURN = "<|im_start|>"
END_TURN = "<|im_end|>"
CHATML = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' -}}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}
            {{- (message['content'] or '') | trim + '<|im_end|>' -}}
        {%- endgeneration -%}
    {%- else -%}
        {{- (message['content'] or '') | trim + '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
TURN = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]


def chat_tokenizer(name: str | Path, chatml: bool = False) -> "PreTrainedTokenizerBase":
    """Loads the tokenizer of a model, an HF directory or Hub id, with a chat template.

    It is the tokenizer's own template, or ChatML if there is none or with `chatml`. `eos_token` is
    then the end of a turn. `pad_token` is another token if the tokenizer has one for padding or for
    the end of a text, otherwise also the end of a turn: which tokens count does not depend on ids.
    New tokens come after the old ones, whose ids do not change.

    Raises `ValueError` if the template is not suitable for training or the model cannot be trained,
    `FileNotFoundError` if it has no tokenizer or weights.
    """
    tokenizer = model_tokenizer(name)
    if chatml or tokenizer.chat_template is None:
        tokenizer.chat_template = CHATML
        tokenizer.add_tokens([BEGIN_TURN, END_TURN], special_tokens=True)
    end = end_of_turn(tokenizer, name)
    others = (tokenizer.pad_token, tokenizer.eos_token)
    padding = next((token for token in others if token not in (None, end)), end)
    tokenizer.add_tokens([padding], special_tokens=True)
    tokenizer.eos_token = end
    tokenizer.pad_token = padding
    return tokenizer


def end_of_turn(tokenizer: "PreTrainedTokenizerBase", name: str | Path) -> str:
    """Returns the token that ends the assistant's turn: the last that the chat template marks.

    It is an added token. Raises `ValueError` if the model `name` cannot be trained with the
    template. The template must mark all answers and meet TRL's conditions for training on the
    assistant's tokens.
    """
    try:
        # Two rows each: the ids of the tokens, and which of them count.
        once = np.stack(conversation_tokens(tokenizer, TURN))
        twice = np.stack(conversation_tokens(tokenizer, TURN + TURN))
        counted = once[0, once[1] > 0].tolist()
        marked = [token for token in counted if str(tokenizer.decode([token])).strip()]
        if marked and np.array_equal(twice[:, : once.shape[1]], once):
            token = str(tokenizer.convert_ids_to_tokens(marked[-1]))
            if token in tokenizer.get_added_vocab():
                return token
        problem = ""
    except Exception as error:  # templates raise many types
        problem = f" ({error})"
    raise ValueError(
        f"the chat template of {name} cannot be used for training{problem}: each answer has to "
        "end with a special token, inside {% generation %}, and to render equally if another one "
        "follows; pip install 'trl>=1.16' for the templates that TRL has corrected, or replace it "
        "by ChatML with --chatml"
    )


@torch.no_grad()
def with_rows(model: LanguageModel, known: int, tokens: int) -> LanguageModel:
    """Returns the model with a vocabulary of at least `tokens` tokens; it knows the first `known`.

    The rows of the others, in the embedding and in an untied head, are the mean of the known rows,
    so their logits are the mean of the known logits (Hewitt, 2021, "Initializing New Word
    Embeddings for Pretrained Language Models"). They take rows that pad the vocabulary, or that a
    published model has beyond its tokenizer. The vocabulary grows if these are too few.
    """
    if isinstance(model, AnyModel):
        return with_rows_of_class(model, known, tokens)
    rows = model.config.vocab_size
    config = replace(model.config, vocab_size=max(rows, tokens))
    state = model.state_dict()
    for name in conversion(config.architecture).padded:
        if name in state:
            grown = torch.zeros(config.padded_vocab_size, config.n_embd)
            grown[:rows] = state[name][:rows]
            grown[known:tokens] = grown[:known].mean(dim=0)
            state[name] = grown
    with torch.device("meta"):
        empty = config.build()
    empty.generation = model.generation
    return filled(empty, state)
