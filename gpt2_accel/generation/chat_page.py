"""The chat page of `recipes/demo.py`: one conversation with a model, or the same questions to two."""

import html
import re
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import gradio as gr

from gpt2_accel.generation.chat import Chat
from gpt2_accel.generation.sampling import Completion, Sampling
from gpt2_accel.models import LanguageModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TITLE = "Chat"
VISITORS = 8  # whose caches are kept; another visitor's turn is computed from the start
MAX_NEW_TOKENS = 1000  # of an answer: other visitors wait
# Label, hint and step of each setting of `Sampling` that a page has.
SETTINGS = {
    "temperature": ("Temperature", "0: greedy", 0.1),
    "top_k": ("Top-k", "0 keeps all", 1),
    "top_p": ("Top-p", "1 keeps all", 0.05),
    "max_new_tokens": ("Length", "new tokens", 1),
    "seed": ("Seed", "fixes the text", 1),
}

# `gr.Chatbot` shows HTML, also without Markdown, and copies what it was given.
TAG = re.compile(r"<(?=[a-zA-Z/!])|&(?=[#\w])")
COPY_TEXT = """() => {
  const clipboard = navigator.clipboard;  // only with https or on localhost
  if (!clipboard) return;
  const write = clipboard.writeText.bind(clipboard);
  clipboard.writeText = shown => {
    const area = document.createElement("textarea");
    area.innerHTML = shown;
    return write(area.value);
  };
}"""

CSS = """
.bot .message .md { white-space: pre-wrap }
.bot .edit-textarea { width: min(32rem, 55vw) !important; min-height: 5rem !important }
"""

History = list[dict]
"""The messages that a `gr.Chatbot` shows."""


class ChatModel(NamedTuple):
    """A model with its tokenizer, its name, and a line on it for the page."""

    name: str
    about: str
    model: LanguageModel
    tokenizer: "PreTrainedTokenizerBase"


class Visitors:
    """The `Chat` of each model for each of the last visitors. A conversation itself is on the visitor's page."""

    def __init__(self, models: Sequence[ChatModel], compile: bool):
        self.models, self.compile = models, compile
        self._chats: OrderedDict[str | None, list[Chat]] = OrderedDict()

    def chats(self, visitor: str | None) -> list[Chat]:
        """Returns a chat per model."""
        if visitor not in self._chats:
            self._chats[visitor] = [
                Chat(loaded.model, loaded.tokenizer, compile=self.compile) for loaded in self.models
            ]
        self._chats.move_to_end(visitor)
        while len(self._chats) > VISITORS:
            self._chats.popitem(last=False)
        return self._chats[visitor]


def build_chat_page(
    models: Sequence[ChatModel], compile: bool, examples: Sequence[str]
) -> "gr.Blocks":
    """Returns the page: a column for each model, one below the other on a phone, and the message below."""
    visitors = Visitors(models, compile)
    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_height=True) as page:
        bots, notes = [], []
        with gr.Row(elem_id="bots"):
            for loaded in models:
                with gr.Column(min_width=300):
                    gr.Markdown(f"### {loaded.name}\n{loaded.about}")
                    bots.append(
                        gr.Chatbot(
                            show_label=False,
                            height="55vh" if len(models) == 1 else "40vh",
                            editable="user",
                            buttons=["copy", "copy_all"],
                            render_markdown=False,
                            feedback_options=None,
                            elem_classes="bot",
                        )
                    )
                    notes.append(gr.Markdown(elem_classes="note"))
        with gr.Row(equal_height=True):
            message = gr.Textbox(
                placeholder="Ask something",
                show_label=False,
                lines=1,
                max_lines=8,
                scale=6,
                autofocus=True,
            )
            send = gr.Button("Send", variant="primary", min_width=80)
            stop = gr.Button("Stop", visible=False, min_width=80)
        with gr.Row():
            again = gr.Button("Regenerate", size="sm", min_width=100)
            clear = gr.Button("New conversation", size="sm", min_width=100)
        gr.Examples([[text] for text in examples], message, label="Examples")
        with gr.Accordion("Settings", open=False):
            system = gr.Textbox(label="System prompt", lines=2, info="Empty: none.")
            with gr.Row():
                settings = setting_inputs(length=200)
        tries = gr.State(0)  # of the last answer
        inputs, outputs = [system, *settings, *bots], [send, stop, message, *bots, *notes]

        def answer(
            visitor: str | None,
            asked: str,
            attempt: int,
            system: str,
            values: tuple,
            histories: list[History],
            before: Sequence[History],
        ) -> Iterator[list]:
            """Yields the outputs while the models answer conversations that end with the user's message `asked`. If they
            cannot be answered, the page shows those `before`."""
            same = [gr.skip()] * (len(bots) + len(notes))
            try:
                sampling = read_settings(values)
                sampling = replace(sampling, seed=sampling.seed + attempt)
                yield [*buttons(running=True), "", *same]
                for shown in answers(visitors.chats(visitor), models, system, histories, sampling):
                    yield [gr.skip(), gr.skip(), gr.skip(), *shown]
                yield [*buttons(running=False), gr.skip(), *same]
            except ValueError as error:  # the message stays in its box
                gr.Warning(str(error))
                yield [*buttons(running=False), asked, *before, *(gr.skip() for _ in notes)]

        def say(
            request: gr.Request, text: str | None, system: str, *rest: object
        ) -> Iterator[list]:
            values, histories = rest[: -len(bots)], rest[-len(bots) :]
            said = [[*history, shown_message("user", text or "")] for history in histories]
            visitor = request.session_hash
            yield from answer(visitor, text or "", 0, system, values, said, histories)

        def retry(request: gr.Request, attempt: int, system: str, *rest: object) -> Iterator[list]:
            values, histories = rest[: -len(bots)], rest[-len(bots) :]
            said = [up_to_the_last_question(history) for history in histories]
            if all(said):
                visitor = request.session_hash
                yield from answer(visitor, "", attempt, system, values, said, histories)

        def edited(
            change: gr.EditData, request: gr.Request, system: str, *rest: object
        ) -> Iterator[list]:
            values, histories = rest[: -len(bots)], rest[-len(bots) :]
            place = change.index if isinstance(change.index, int) else change.index[0]
            old, new = (
                shown_message("user", text_of({"content": text}))
                for text in (change.previous_value, change.value)
            )
            said = [[*history[:place], new] for history in histories]
            # Gradio has put the new text into one of them.
            before = [[*history[:place], old, *history[place + 1 :]] for history in histories]
            yield from answer(request.session_hash, "", 0, system, values, said, before)

        first = gr.on([send.click, message.submit], say, [message, *inputs], outputs)
        changed = gr.on([bot.edit for bot in bots], edited, inputs, outputs)
        raised = gr.on(
            [again.click, *(bot.retry for bot in bots)], lambda n: n + 1, tries, tries, queue=False
        )
        repeated = raised.then(retry, [tries, *inputs], outputs)
        for begun in (first, changed):
            begun.then(lambda: 0, None, tries, queue=False)
        running = [first, changed, repeated]
        ended = {"cancels": running, "queue": False}
        stop.click(lambda: buttons(running=False), None, [send, stop], **ended)
        page.load(None, js=COPY_TEXT)

        def empty() -> list:
            return [*buttons(running=False), gr.skip(), *([] for _ in bots), *("" for _ in notes)]

        for cleared in (clear.click, *(bot.clear for bot in bots)):
            cleared(empty, None, outputs, **ended)
    return page


def buttons(running: bool) -> list[gr.Button]:
    """Returns the buttons Send and Stop, of which one is shown."""
    return [gr.Button(visible=not running), gr.Button(visible=running)]


def setting_inputs(length: int) -> list[gr.Number]:
    """Returns the inputs that are settings, in the order in which `read_settings` takes them."""
    default, inputs = Sampling(max_new_tokens=length), []
    for name, (label, info, step) in SETTINGS.items():
        value = getattr(default, name)
        kind = {"step": step, "precision": 0 if isinstance(value, int) else None}
        inputs.append(gr.Number(value, label=label, info=info, min_width=120, **kind))
    return inputs


def read_settings(values: Sequence[float | None]) -> Sampling:
    """Returns the values of `setting_inputs`, None where one is empty; raises `ValueError` then, or with the name that the page
    shows."""
    if None in values:
        raise ValueError("a setting is empty: give a number")
    named = dict(zip(SETTINGS, values, strict=True))
    if named["max_new_tokens"] > MAX_NEW_TOKENS:
        raise ValueError(f"Length must be at most {MAX_NEW_TOKENS}, got {named['max_new_tokens']}")
    try:
        return Sampling(**named)
    except ValueError as error:
        name = str(error).split()[0]
        raise ValueError(str(error).replace(name, SETTINGS[name][0], 1)) from error


def shown_message(role: str, text: str) -> dict:
    """Returns a message for a `gr.Chatbot`, with HTML escaped."""
    return {"role": role, "content": TAG.sub(lambda found: html.escape(found[0]), text)}


def text_of(message: dict) -> str:
    """Returns the text of a message of a `gr.Chatbot`, whose content may be a list of parts."""
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content if part.get("type") == "text")
    return html.unescape(content)


def up_to_the_last_question(history: History) -> History:
    """Returns the conversation without what follows the user's last message."""
    last = max((i for i, message in enumerate(history) if message["role"] == "user"), default=-1)
    return history[: last + 1]


def answers(
    chats: Sequence[Chat],
    models: Sequence[ChatModel],
    system: str,
    histories: Sequence[History],
    sampling: Sampling,
) -> Iterator[list]:
    """Yields the conversations with their answers, and a note on each, a token of each model in turn."""
    begin = [{"role": "system", "content": system}] if system and system.strip() else []
    begun = time.perf_counter()
    streams = []
    for chat, history in zip(chats, histories, strict=True):
        said = [{"role": m["role"], "content": text_of(m)} for m in history]
        streams.append(chat.answer([*begin, *said], sampling))
    written: list[Completion | None] = [None] * len(chats)
    for step in zip_longest(*streams):
        written = [new or old for new, old in zip(step, written, strict=True)]
        seconds = time.perf_counter() - begun
        shown = [
            [*history, shown_message("assistant", answer.text)]
            for history, answer in zip(histories, written, strict=True)
        ]
        parts = zip(chats, models, written, strict=True)
        length = sampling.max_new_tokens
        yield shown + [
            note(chat, loaded, answer, length, seconds) for chat, loaded, answer in parts
        ]


def note(chat: Chat, loaded: ChatModel, answer: Completion, length: int, seconds: float) -> str:
    """Returns the line below a conversation whose answer may have `length` tokens."""
    reads = f"{loaded.model.config.n_positions:,} tokens"
    text = f"{len(answer.ids)} tokens, {len(answer.ids) / max(seconds, 1e-3):.0f} a second"
    if answer.ended == "length":
        text += (
            "; cut at the length"
            if len(answer.ids) == length
            else f"; cut after the model's {reads}"
        )
    if chat.dropped:
        text += f"; the first {chat.dropped} messages are no longer read, the model reads {reads}"
    return text
