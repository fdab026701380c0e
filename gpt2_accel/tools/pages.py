"""Gradio pages for a model: `chat_page` for conversations, `text_page` to continue a text."""

import html
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import gradio as gr

from gpt2_accel.generation import chat
from gpt2_accel.generation.sampling import Sampling, stream, user_turn
from gpt2_accel.models import LanguageModel
from gpt2_accel.tokenizer import PreTrainedTokenizerBase

# Gradio sometimes covers a stopped text with "Error".
CSS = """
.text [data-testid=status-tracker] { display: none }
.message .md { white-space: pre-wrap }
.text pre { white-space: pre-wrap; overflow-wrap: anywhere; min-height: 12em; margin: 1.5em 0 0 }
.text mark { background: none; color: var(--link-text-color); font-weight: 600 }
.text pre, .prompt textarea { font: 13px/1.5 monospace }
"""
# Ctrl+Enter in a prompt writes. Copies an `escaped` answer as the model wrote it. Browsers have a
# clipboard only with https or on localhost.
JS = """() => {
  document.addEventListener("keydown", event => {
    const sends = event.key === "Enter" && (event.ctrlKey || event.metaKey);
    if (sends && event.target.closest(".prompt"))
      document.querySelector("button.primary").click();
  });
  const clipboard = navigator.clipboard;
  if (!clipboard) return;
  const write = clipboard.writeText.bind(clipboard);
  clipboard.writeText = text => write(
    text.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&"));
}"""


def settings(length: int) -> list[gr.Slider]:
    """Returns the inputs of `sampling_of`."""
    default = Sampling()
    return [
        gr.Slider(0, 2, default.temperature, step=0.1, label="Temperature", info="0: greedy"),
        gr.Slider(0, 200, default.top_k, step=1, label="Top-k", info="0 keeps all"),
        gr.Slider(0.05, 1, default.top_p, step=0.05, label="Top-p", info="1 keeps all"),
        gr.Slider(1, 1000, length, step=1, label="Length", info="maximum number of tokens"),
    ]


def options(examples: Sequence[str], about: str) -> dict[str, Any]:
    """Returns the options of both pages."""
    return {
        "description": about,
        "additional_inputs_accordion": gr.Accordion("Settings", open=False),
        "examples": [[text] for text in examples] or None,
        "analytics_enabled": False,
        "api_visibility": "private",
    }


def sampling_of(temperature: float, top_k: float, top_p: float, length: float) -> Sampling:
    """Returns the values of `settings` with a random seed: another try gives another text."""
    return Sampling(int(length), temperature, int(top_k), top_p, seed=random.randrange(2**31))


def conversation(history: Sequence[dict], message: str, system: str | None) -> list[dict[str, str]]:
    """Returns the messages that the model reads: a system prompt if there is one, the answered
    messages of a chatbot's `history` with their answers, and `message`."""
    messages = []
    if system and system.strip():
        messages.append({"role": "system", "content": system})
    for asked, answer in pairwise(history):
        if (asked["role"], answer["role"]) == ("user", "assistant") and text_of(answer):
            messages += user_turn(text_of(asked))
            messages.append({"role": "assistant", "content": html.unescape(text_of(answer))})
    return messages + user_turn(message)


def text_of(message: dict) -> str:
    """Returns the text of a chatbot's message."""
    return "".join(part["text"] for part in message["content"])


def escaped(text: str) -> dict:
    """Returns an answer for a chatbot without Markdown, which shows HTML. Gradio removes the
    indentation of a plain string."""
    return {"content": [{"type": "text", "text": html.escape(text, quote=False)}]}


def marked(prompt: str, text: str) -> str:
    """Returns a prompt, marked, and its continuation as HTML."""
    return f"<pre><mark>{html.escape(prompt)}</mark>{html.escape(text)}</pre>"


def chat_page(
    name: str,
    model: LanguageModel,
    tokenizer: "PreTrainedTokenizerBase",
    examples: Sequence[str],
    about: str,
) -> gr.Blocks:
    """Returns a page for conversations with a model, which it calls `name`, with prompts to click
    on and a sentence about the model. The browser stores the conversations."""

    def write(message: str, history: list[dict], system: str, *values: float) -> Iterator[dict]:
        messages = conversation(history, message, system)
        try:
            dropped, written = chat.answer(model, tokenizer, messages, sampling_of(*values))
        except ValueError as error:
            gr.Warning(str(error))  # `gr.Error` would leave the message box disabled
            return
        if dropped:
            gr.Info(f"{name} does not read the first {dropped} messages any more.")
        for (completion,) in written:
            yield escaped(completion.text)

    return gr.ChatInterface(
        write,
        chatbot=gr.Chatbot(label=name, height="70dvh", render_markdown=False, latex_delimiters=[]),
        additional_inputs=[gr.Textbox(label="System prompt", lines=2), *settings(length=200)],
        title="Chat",
        save_history=True,
        **options(examples, about),
    )


def text_page(
    name: str,
    model: LanguageModel,
    tokenizer: "PreTrainedTokenizerBase",
    examples: Sequence[str],
    about: str,
) -> gr.Blocks:
    """Returns a page on which a model continues a text. For the arguments see `chat_page`."""

    def write(prompt: str, *values: float) -> Iterator[str]:
        try:
            for (completion,) in stream(model, tokenizer, [prompt], sampling_of(*values)):
                yield marked(prompt, completion.text)
        except ValueError as error:
            gr.Warning(str(error))

    return gr.Interface(
        write,
        gr.Textbox(label="Prompt", lines=4, max_lines=8, autofocus=True, elem_classes="prompt"),
        gr.HTML(marked("", ""), label=name, show_label=True, container=True, elem_classes="text"),
        additional_inputs=settings(length=100),
        title="Continue a text",
        submit_btn="Write (Ctrl+Enter)",
        flagging_mode="never",
        **options(examples, about),
    )
