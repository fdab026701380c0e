"""Gradio pages for a model: `chat_page` for conversations, `text_page` for continuations of a text.

`Guard` is the middleware that closes a page to other sites.
"""

import html
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from ipaddress import ip_address
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import gradio as gr
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gpt2_accel.generation import chat
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
  if (window.restored) sessionStorage.setItem("gpt2_accel_chat", JSON.stringify(messages));
}"""
RESTORE = """() => {
  window.restored = true;
  return [JSON.parse(sessionStorage.getItem("gpt2_accel_chat") ?? "[]")];
}"""

Messages = list[dict[str, str]]


def shown(completion: Completion) -> str:
    """Returns the text of a completion, with `CUT` if the model has not ended it."""
    return completion.text + (CUT if completion.ended in (None, "length") else "")


def with_warnings(write: Callable[..., Iterator]) -> Callable[..., Iterator]:
    """Decorates a generator of outputs: a `ValueError` is shown as a warning, and ends it with its last output, or ""."""

    @wraps(write)
    def warned(*inputs: Any) -> Iterator:
        output = ""
        try:
            for output in write(*inputs):
                yield output
        except ValueError as error:
            gr.Warning(str(error))  # `gr.Error` would leave the message box disabled
            yield output

    return warned


def text_chatbot(label: str) -> gr.Chatbot:
    """Returns a chatbot whose messages are text. Gradio's own also shows HTML in them, and takes files and components from the
    browser."""
    bot = gr.Chatbot(
        label=label,
        height="70dvh",
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
    return [
        gr.Slider(0, 2, default.temperature, step=0.1, label="Temperature", info="0: greedy"),
        gr.Slider(0, 200, default.top_k, step=1, label="Top-k", info="0 keeps all"),
        gr.Slider(0.05, 1, default.top_p, step=0.05, label="Top-p", info="1 keeps all"),
        gr.Slider(1, 1000, length, step=1, label="Length", info="longest text, in tokens"),
    ]


def sampling_of(temperature: float, top_k: float, top_p: float, length: float) -> Sampling:
    """Returns the values of `settings` with a random seed, so that another try gives another text."""
    return Sampling(int(length), temperature, int(top_k), top_p, seed=random.randrange(2**31))


def chat_page(
    name: str,
    model: LanguageModel,
    tokenizer: "PreTrainedTokenizerBase",
    examples: Sequence[str],
) -> gr.Blocks:
    """Returns a page for conversations with a model, whose name it shows. A reload of the browser's tab keeps the
    conversation."""

    @with_warnings
    def write(message: str, history: list[dict], system: str, *values: float) -> Iterator[dict]:
        messages = conversation(history, message, system)
        dropped, written = chat.answer(model, tokenizer, messages, sampling_of(*values))
        if dropped:
            gr.Info(f"{name} no longer reads the first {dropped} messages.")
        for (completion,) in written:
            yield text_message("assistant", shown(completion))

    inputs = [gr.Textbox(label="System prompt", lines=2), *settings(length=200)]
    accordion = gr.Accordion("Settings", open=False)
    with gr.Blocks(title="Chat", analytics_enabled=False) as page:
        bot = text_chatbot(name)
        interface = gr.ChatInterface(
            write,
            chatbot=bot,
            textbox=gr.Textbox(
                label="Message",
                placeholder="Type a message",
                max_lines=6,
                autofocus=True,
                submit_btn=True,
                stop_btn=True,
            ),
            additional_inputs=inputs,
            additional_inputs_accordion=accordion,
            examples=[[text] for text in examples] or None,
            api_visibility="private",
        )
        bot.change(None, bot, js=SAVE)
        restored = page.load(None, None, bot, js=RESTORE)
        restored.then(lambda messages: messages, bot, interface.chatbot_state, queue=False)
        page.load(None, js=COPY_TEXT)
    return page


def text_page(
    name: str,
    model: LanguageModel,
    tokenizer: "PreTrainedTokenizerBase",
    examples: Sequence[str],
) -> gr.Blocks:
    """Returns a page on which a model, whose name it shows, continues a text."""

    @with_warnings
    def write(prompt: str | None, *values: float) -> Iterator[str]:
        prompt = prompt or ""
        for (completion,) in stream(model, tokenizer, [prompt], sampling_of(*values)):
            yield prompt + shown(completion)

    return gr.Interface(
        write,
        gr.Textbox(label="Prompt", lines=4, max_lines=8, autofocus=True),
        gr.Textbox(label=name, lines=8, max_lines=16, buttons=["copy"], elem_classes="text"),
        additional_inputs=settings(length=100),
        additional_inputs_accordion=gr.Accordion("Settings", open=False),
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
        app = self.app
        refused = self.refusal(scope) if scope["type"] == "http" else None
        if refused is not None:
            status, text = refused
            app = PlainTextResponse(text, status)
        await app(scope, receive, send)

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
