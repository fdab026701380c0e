"""Gradio pages for a model or two: `chat_page` for conversations, `text_page` for continuations of a text.

`Guard` is the middleware that closes a page to other sites.
"""

import html
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import gradio as gr
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gpt2_accel.generation.chat import Chat
from gpt2_accel.generation.sampling import Completion, Sampling, stream, user_turn
from gpt2_accel.models import LanguageModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CUT = " …"  # the end of a text that is incomplete, was stopped or has reached its length
MAX_REQUEST = 1_000_000  # bytes
# Routes that Gradio registers also for pages without files.
UPLOADS = tuple(
    f"/gradio_api/{name}" for name in ("upload", "process_recording", "component_server")
)
# A text that is stopped is sometimes covered by Gradio's "Error"; what is wrong is in a message of its own.
CSS = """
.text [data-testid=status-tracker] { display: none }
.message .md { white-space: pre-wrap }
@media (max-width: 640px) { .one-of-2 { height: 34dvh !important } }
"""
# A `text_chatbot` has escaped text, which the copy buttons would copy.
COPY_TEXT = """() => {
  const clipboard = navigator.clipboard;  // only with https or on localhost
  if (!clipboard) return;
  const write = clipboard.writeText.bind(clipboard);
  clipboard.writeText = text => write(
    text.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&"));
}"""

# A reload of a browser's tab keeps the conversation. A chatbot also changes when the page opens, before it is restored.
SAVE = """messages => {
  if (window.restored?.has("KEY")) sessionStorage.setItem("KEY", JSON.stringify(messages));
}"""
RESTORE = """() => {
  window.restored = (window.restored ?? new Set()).add("KEY");
  return [JSON.parse(sessionStorage.getItem("KEY") ?? "[]")];
}"""

Messages = list[dict[str, str]]


@dataclass
class LoadedModel:
    """A model with its tokenizer, under the name that the page shows."""

    name: str
    model: LanguageModel
    tokenizer: "PreTrainedTokenizerBase"
    compile: bool = False
    idle: list[Chat] = field(default_factory=list)

    def answer(self, messages: Messages, sampling: Sampling) -> Iterator[str]:
        """Yields the answer to a conversation as it grows."""
        # A chat answers one conversation at a time, and keeps the KV cache of its last.
        chat = self.idle.pop() if self.idle else Chat(self.model, self.tokenizer, self.compile)
        try:
            for answer in chat.answer(messages, sampling):
                if len(answer.ids) == 1 and chat.dropped:
                    gr.Info(f"{self.name} no longer reads the first {chat.dropped} messages.")
                yield shown(answer)
        finally:
            self.idle.append(chat)

    def continuation(self, prompt: str, sampling: Sampling) -> Iterator[str]:
        """Yields the prompt with its continuation as it grows."""
        samples = stream(self.model, self.tokenizer, [prompt], sampling, compile=self.compile)
        for (sample,) in samples:
            yield prompt + shown(sample)


def shown(completion: Completion) -> str:
    """Returns the text of a completion, with `CUT` if the model has not ended it."""
    return completion.text + (CUT if completion.ended in (None, "length") else "")


def in_turns(streams: Sequence[Iterator[str]]) -> Iterator[list[str]]:
    """Yields the texts of all streams, a token of each in turn, at least once. A `ValueError` is shown as a warning and ends
    them."""
    texts = [""] * len(streams)
    try:
        for step in zip_longest(*streams):
            texts = [new or old for new, old in zip(step, texts, strict=True)]
            yield texts
    except ValueError as error:
        gr.Warning(str(error))  # `gr.Error` would leave the message box disabled
        yield texts


def text_chatbot(label: str, css_class: str) -> gr.Chatbot:
    """Returns a chatbot whose messages are text. Gradio's own also shows HTML in them, and takes files and components from the
    browser."""
    bot = gr.Chatbot(
        label=label,
        height="70dvh",
        elem_classes=css_class,
        min_width=300,
        render_markdown=False,
        latex_delimiters=[],
        buttons=["copy", "copy_all"],
    )
    # Not a subclass: for each component class Gradio writes a .pyi file into the package. An update of the component
    # (`gr.update`, `gr.skip`) would replace it by one without these functions.
    draw = bot.postprocess
    bot.preprocess = received
    bot.postprocess = lambda messages: draw(
        [text_message(m["role"], html.escape(text_of(m), quote=False)) for m in messages or []]
    )
    return bot


def received(payload: Any) -> list[dict]:
    """Returns the messages that the browser sent to a `text_chatbot`, without files and components."""
    messages = []
    for message in payload.root if payload else []:
        text = "".join(part.text for part in message.content if part.type == "text")
        messages.append(text_message(message.role, html.unescape(text)))
    return messages


def text_message(role: str, text: str) -> dict:
    """Returns a message of a chatbot. Gradio would remove the indentation of a plain string."""
    return {"role": role, "content": [{"type": "text", "text": text}]}


def text_of(message: dict) -> str:
    """Returns the text of a chatbot's message."""
    content = message["content"]
    parts = [content] if isinstance(content, str) else content
    return "".join(part if isinstance(part, str) else part["text"] for part in parts)


def conversation(history: Sequence[dict], message: str, system: str | None) -> Messages:
    """Returns what the model reads: a chatbot's history without unanswered messages and without `CUT`, and the message."""
    messages = [{"role": "system", "content": system}] if system and system.strip() else []
    for asked, answer in pairwise(history):
        answered = text_of(answer).removesuffix(CUT)
        if (asked["role"], answer["role"]) == ("user", "assistant") and answered:
            messages += user_turn(text_of(asked))
            messages.append({"role": "assistant", "content": answered})
    return messages + user_turn(message)


def settings(length: int) -> list[gr.Slider]:
    """Returns the inputs that `sampling_of` reads."""
    default = Sampling()
    ranges = (
        ("Temperature", "0: greedy", 0, 2, default.temperature, 0.1),
        ("Top-k", "0 keeps all", 0, 200, default.top_k, 1),
        ("Top-p", "1 keeps all", 0.05, 1, default.top_p, 0.05),
        ("Length", "longest text, in tokens", 1, 1000, length, 1),
    )
    return [
        gr.Slider(low, high, value, step=step, label=label, info=info, render=False)
        for label, info, low, high, value, step in ranges
    ]


def sampling_of(temperature: float, top_k: float, top_p: float, length: float) -> Sampling:
    """Returns the values of `settings` with a random seed, so that another try gives another text."""
    return Sampling(int(length), temperature, int(top_k), top_p, seed=random.randrange(2**31))


def chat_page(models: Sequence[LoadedModel], examples: Sequence[str]) -> gr.Blocks:
    """Returns a page for conversations. The chatbot of a second model shows the same messages with its own answers."""
    sliders = settings(length=200)

    def answer(message: str, history: list[dict], system: str | None, *rest: Any) -> Iterator[Any]:
        """Yields the first model's answer, and the second model's conversation if there is one."""
        values, second = rest[: len(sliders)], rest[len(sliders) :]
        histories = [history, *(said[: len(history)] for said in second)]
        sampling = sampling_of(*values)
        streams = [
            loaded.answer(conversation(said, message, system), sampling)
            for loaded, said in zip(models, histories, strict=True)
        ]
        asked = text_message("user", message)
        for texts in in_turns(streams):
            answers = [text_message("assistant", text) for text in texts]
            if len(models) == 1:
                yield answers[0]
            else:
                yield answers[0], [*histories[1], asked, answers[1]]

    with gr.Blocks(title="Chat", analytics_enabled=False) as page:
        row = gr.Row()
        bots = [text_chatbot(loaded.name, f"one-of-{len(models)}") for loaded in models]
        chat = gr.ChatInterface(
            answer,
            chatbot=bots[0],
            textbox=gr.Textbox(
                label="Message",
                placeholder="Type a message",
                max_lines=6,
                autofocus=True,
                submit_btn=True,
                stop_btn=True,
            ),
            additional_inputs=[
                gr.Textbox(label="System prompt", lines=2, render=False),
                *sliders,
                *bots[1:],
            ],
            additional_inputs_accordion=gr.Accordion("Settings", open=False, render=False),
            additional_outputs=bots[1:],
            examples=[[text] for text in examples] or None,
            api_visibility="private",
        )
        with row:  # the interface has rendered its own below
            for bot in bots:
                bot.unrender()
                bot.render()
        keep_after_reload(page, chat, bots)
        page.load(None, js=COPY_TEXT)
    return page


def keep_after_reload(page: gr.Blocks, chat: gr.ChatInterface, bots: Sequence[gr.Chatbot]) -> None:
    """Saves the conversations in the browser's tab, and restores them when the page opens."""
    for number, bot in enumerate(bots):
        key = f"gpt2_accel_chat_{number}"
        bot.change(None, bot, js=SAVE.replace("KEY", key))
        restored = page.load(None, None, bot, js=RESTORE.replace("KEY", key))
        if number == 0:
            restored.then(lambda messages: messages, bot, chat.chatbot_state, queue=False)
        else:  # the second model's conversation is as long as the first's
            shorter = "(first, second) => [second.slice(0, first.length)]"
            bots[0].change(None, [bots[0], bot], bot, js=shorter)
            both = [bots[0], chat.chatbot_state]
            bot.clear(lambda: ([], []), None, both, queue=False)


def text_page(models: Sequence[LoadedModel], examples: Sequence[str]) -> gr.Blocks:
    """Returns a page on which each model continues the same text."""

    def write(prompt: str | None, *values: float) -> Iterator[Any]:
        sampling = sampling_of(*values)
        streams = [loaded.continuation(prompt or "", sampling) for loaded in models]
        for texts in in_turns(streams):
            yield texts if len(models) > 1 else texts[0]

    return gr.Interface(
        write,
        gr.Textbox(label="Prompt", lines=4, max_lines=8, autofocus=True),
        [
            gr.Textbox(
                label=loaded.name, lines=8, max_lines=16, buttons=["copy"], elem_classes="text"
            )
            for loaded in models
        ],
        additional_inputs=settings(length=100),
        additional_inputs_accordion=gr.Accordion("Settings", open=False, render=False),
        examples=[[text] for text in examples] or None,
        title="Continue a text",
        submit_btn="Write",
        flagging_mode="never",
        analytics_enabled=False,
        api_visibility="private",
    )


class Guard:
    """ASGI middleware that refuses requests under a foreign host name (DNS rebinding), from another site's page, and large
    ones, and answers 404 to uploads."""

    def __init__(self, app: ASGIApp, names: Iterable[str], share: bool):
        self.app, self.share = app, share
        self.names = {"localhost", *names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self.refusal(scope) if scope["type"] == "http" else None
        if refused is None:
            await self.app(scope, receive, send)
        else:
            status, text = refused
            await PlainTextResponse(text, status)(scope, receive, send)

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Returns the status and the text of a refusal, None for a request that is answered."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self.is_own(host):
            return (
                403,
                f"This page is not at {host}. Open it by its IP address, or start it with --names.",
            )
        if origin is not None and origin.partition("://")[2] != host:
            return 403, "This page answers its own requests only."
        if scope["path"].startswith(UPLOADS):
            return 404, "This page takes no files."
        if "transfer-encoding" in headers or int(headers.get("content-length", 0)) > MAX_REQUEST:
            return 413, f"A request has at most {MAX_REQUEST:,} bytes."
        return None

    def is_own(self, host: str) -> bool:
        """Whether `host`, with or without a port, is an IP address or a name of this page."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            by_name = name in self.names or (self.share and name.endswith(".gradio.live"))
            return by_name or ip_address(name) is not None
        except ValueError:
            return False
