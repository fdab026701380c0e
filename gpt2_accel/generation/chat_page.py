"""The chat page of `recipes/demo.py`: one conversation with a model, or the same questions to two."""

import re
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, zip_longest
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

# `gr.Chatbot` shows HTML, also without Markdown. An invisible character (a word joiner) behind < and & makes them text.
TAG, JOINER = re.compile(r"<(?=[a-zA-Z/!?])|&(?=[#\w])"), "\u2060"
COPY_TEXT = """() => {
  const clipboard = navigator.clipboard;  // only with https or on localhost
  if (!clipboard) return;
  const write = clipboard.writeText.bind(clipboard);
  clipboard.writeText = shown => write(shown.replace(/([<&])\u2060/g, "$1"));
}"""
# Replaces the first input of an event by the time.
NOW = "(_, ...inputs) => [Date.now(), ...inputs]"
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


@dataclass(frozen=True)
class Turn:
    """What is answered: the conversations `said`, which end with the user's message `asked`. If they cannot be answered,
    the page shows those `before`. `attempt` counts the tries of one message."""

    number: int
    asked: str
    said: Sequence[History]
    before: Sequence[History]
    attempt: int = 0


class Visitors:
    """The `Chat` of each model for each of the last visitors, the number of the turn that each of them waits for, and the
    time at which each began a new conversation. A conversation itself is on the visitor's page. Times are those of the
    visitor's clock, since requests may arrive in another order than they were sent."""

    def __init__(self, models: Sequence[ChatModel], compile: bool):
        self.models, self.compile = models, compile
        self._chats: OrderedDict[str | None, list[Chat]] = OrderedDict()
        self._waits: dict[str | None, int] = {}
        self._cleared: dict[str | None, float] = {}
        self._numbers = count(1)

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

    def begin(self, visitor: str | None, sent: float) -> int | None:
        """Returns the number of a new turn, None if the visitor waits for one or has begun a new conversation since `sent`."""
        if self.is_waiting(visitor) or sent < self._cleared.get(visitor, 0):
            return None
        self._cleared.pop(visitor, None)
        self._waits[visitor] = next(self._numbers)
        return self._waits[visitor]

    def waits(self, visitor: str | None, number: int) -> bool:
        """Whether the visitor still waits for this turn."""
        return self._waits.get(visitor) == number

    def end(self, visitor: str | None) -> None:
        """Notes that the visitor waits for nothing."""
        self._waits.pop(visitor, None)

    def clear(self, visitor: str | None, sent: float) -> None:
        """Notes that the visitor begins a new conversation."""
        self.end(visitor)
        self._cleared[visitor] = sent

    def is_waiting(self, visitor: str | None) -> bool:
        """Whether the visitor waits for a turn."""
        return visitor in self._waits

    def is_clear(self, visitor: str | None) -> bool:
        """Whether the visitor's new conversation has no turn yet."""
        return visitor in self._cleared


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
        turn = gr.State(None)  # the last one that has begun; None if the visitor waited for another
        refused = gr.State("")  # its message, if it cannot be answered
        sent = gr.Number(0, visible=False)  # when the visitor sent an event; `NOW` sets it

        def begin(
            visitor: str | None, sent: float, asked: str, said: list, before: list, attempt: int = 0
        ) -> list:
            number = visitors.begin(visitor, sent)
            if number is None:
                return [None, *(gr.skip() for _ in begun[1:])]
            return [Turn(number, asked, said, before, attempt), *buttons(running=True), "", *said]

        def say(request: gr.Request, sent: float, text: str | None, *histories: History) -> list:
            asked = shown_message("user", text or "")
            said = [[*history, asked] for history in histories]
            return begin(request.session_hash, sent, text or "", said, list(histories))

        def retry(request: gr.Request, sent: float, last: Turn | None, *histories: History) -> list:
            said = [up_to_the_last_question(history) for history in histories]
            if not all(said):
                return [None, *(gr.skip() for _ in begun[1:])]
            same = last is not None and said == list(last.said)
            attempt = last.attempt + 1 if same else 1
            return begin(request.session_hash, sent, "", said, list(histories), attempt)

        def edited(
            change: gr.EditData, request: gr.Request, sent: float, *histories: History
        ) -> list:
            place = change.index if isinstance(change.index, int) else change.index[0]
            old, new = (
                shown_message("user", text_of({"content": text}))
                for text in (change.previous_value, change.value)
            )
            said = [[*history[:place], new] for history in histories]
            # Gradio has put the new text into one of them.
            before = [[*history[:place], old, *history[place + 1 :]] for history in histories]
            return begin(request.session_hash, sent, "", said, before)

        def answer(
            request: gr.Request, asked: Turn | None, system: str, *values: float | None
        ) -> Iterator[list]:
            """Yields the outputs while the models answer, until the visitor no longer waits for it."""
            visitor = request.session_hash
            if asked is None or not visitors.waits(visitor, asked.number):
                yield [gr.skip() for _ in outputs]
                return
            try:
                sampling = read_settings(values)
                sampling = replace(sampling, seed=sampling.seed + asked.attempt)
                for shown in answers(visitors.chats(visitor), models, system, asked.said, sampling):
                    if not visitors.waits(visitor, asked.number):
                        return
                    yield [*buttons(running=True), "", *shown]
            except ValueError as error:
                gr.Warning(str(error))
                skipped = [gr.skip() for _ in notes]
                yield [*buttons(running=False), asked.asked, *asked.before, *skipped]
            finally:
                if visitors.waits(visitor, asked.number):
                    visitors.end(visitor)

        def settle(request: gr.Request, refused: str, box: str) -> list:
            return [put_back(refused, box), *shown_now(request.session_hash)]

        def stopped(request: gr.Request) -> list[gr.Button]:
            visitors.end(request.session_hash)
            return buttons(running=False)

        def emptied(request: gr.Request, sent: float) -> list:
            visitors.clear(request.session_hash, sent)
            return shown_now(request.session_hash)

        def shown_now(visitor: str | None) -> list:
            """Returns what `outputs` should be. It follows each answer, since the page may show what was written before it
            stopped or was emptied only later."""
            if visitors.is_clear(visitor):
                shown = [*([] for _ in bots), *("" for _ in notes)]
            else:
                shown = [gr.skip() for _ in [*bots, *notes]]
            return [*buttons(running=visitors.is_waiting(visitor)), "", *shown]

        begun = [turn, send, stop, message, *bots]
        outputs = [send, stop, refused, *bots, *notes]
        for events, first, inputs in (
            ([send.click, message.submit], say, [sent, message, *bots]),
            ([again.click, *(bot.retry for bot in bots)], retry, [sent, turn, *bots]),
            ([bot.edit for bot in bots], edited, [sent, *bots]),
        ):
            answered = gr.on(events, first, inputs, begun, queue=False, js=NOW).then(
                answer, [turn, system, *settings], outputs, trigger_mode="multiple"
            )
            answered.then(settle, [refused, message], [message, *outputs], queue=False)
        stop.click(stopped, None, [send, stop], queue=False)
        cleared = [clear.click, *(bot.clear for bot in bots)]
        gr.on(cleared, emptied, sent, outputs, queue=False, js=NOW)
        page.load(None, js=COPY_TEXT)
    return page


def put_back(refused: str, box: str) -> str | dict:
    """Returns what the message box shows: a message that cannot be answered. Changes nothing if there is none, or if the
    box has a text: what is typed meanwhile stays."""
    return refused if refused and not box else gr.skip()


def buttons(running: bool) -> list[gr.Button]:
    """Returns the buttons Send and Stop. Only Stop is visible while a model answers, only Send otherwise."""
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
    """Returns a message for a `gr.Chatbot`, in which nothing is HTML."""
    return {"role": role, "content": TAG.sub(lambda found: found[0] + JOINER, text)}


def text_of(message: dict) -> str:
    """Returns the text of a message of a `gr.Chatbot`, whose content may be a list of parts."""
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content if part.get("type") == "text")
    return re.sub(f"([<&]){JOINER}", r"\1", content)


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
    plural = "s" * (len(answer.ids) != 1)
    text = f"{len(answer.ids)} token{plural}, {len(answer.ids) / max(seconds, 1e-3):.0f} a second"
    if answer.ended == "length":
        text += (
            "; cut at the length"
            if len(answer.ids) == length
            else f"; cut after the model's {reads}"
        )
    if chat.dropped:
        text += f"; the first {chat.dropped} messages are no longer read, the model reads {reads}"
    return text
