"""The pages of recipes/demo.py: over HTTP, and in a browser."""

import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
from launching import ROOT, free_port, in_process

from gpt2_accel import GPT, GPTConfig, save_pretrained
from gpt2_accel.hf.chat_template import chat_tokenizer
from gpt2_accel.tokenizer import byte_tokenizer

pytest.importorskip("gradio", reason="needs Gradio")
HTML = "Why   <b>this</b> &copy=2 <module>?\n    $$x$$ <img src=x onerror=alert(1)>"


def save_model(folder, tokenizer, vocab_size):
    """Saves a model of 512 positions that writes printable ASCII; returns its directory."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocab_size, 512, n_layer=12, n_head=4, n_embd=256))
    with torch.no_grad():
        model.wte.weight[:32] = model.wte.weight[127:] = 0
        for parameter in model.parameters():
            parameter.mul_(5)
    save_pretrained(model, folder, tokenizer)
    return folder


class Server:
    """A server of the page in its own process."""

    def __init__(self, model):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [
                sys.executable,
                "recipes/demo.py",
                "--port",
                str(self.port),
                "--names",
                "my.site",
                "--examples",
                "How?",
                "--model",
                str(model),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A shell's background jobs and their children ignore SIGINT otherwise.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        for _ in range(600):
            if self.process.poll() is not None:
                raise RuntimeError(self.process.stdout.read())
            try:
                urllib.request.urlopen(self.url).close()
                return
            except OSError:
                time.sleep(0.1)
        raise TimeoutError(f"no page at {self.url}")

    def stop(self):
        """Stops the server with SIGINT; returns its output."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.communicate(timeout=10)[0]
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def status(self, path="/", method="GET", body=b"", **headers):
        """Returns the status of the answer to a request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        try:
            connection.request(method, path, body, headers)
            return connection.getresponse().status
        finally:
            connection.close()


@pytest.fixture(scope="module")
def chat_server(chat_base, tmp_path_factory):
    model = save_model(tmp_path_factory.mktemp("chat"), chat_tokenizer(chat_base), 259)
    server = Server(model)
    yield server
    printed = server.stop()
    assert "Traceback" not in printed, printed


@pytest.fixture(scope="module")
def text_server(tmp_path_factory):
    server = Server(save_model(tmp_path_factory.mktemp("text"), byte_tokenizer(), 257))
    yield server
    printed = server.stop()
    assert "Traceback" not in printed, printed


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install it")
    with api.sync_playwright() as playwright:
        names = ("chromium", "chromium-browser", "google-chrome")
        found = next(filter(None, map(shutil.which, names)), playwright.chromium.executable_path)
        if not os.path.exists(found):
            pytest.skip("needs Chromium: apt-get install chromium, or playwright install chromium")
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser.new_context(
            viewport={"width": 1300, "height": 900},
            permissions=["clipboard-read", "clipboard-write"],
        )
        browser.close()


class Visitor:
    """A browser tab on a page; `errors` collects console errors and requests to other hosts."""

    def __init__(self, browser, url):
        self.errors = []
        self.page = browser.new_page()
        self.page.on("console", lambda m: m.type == "error" and self.errors.append(m.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        own = (url, "data:", "blob:")
        self.page.on("request", lambda r: r.url.startswith(own) or self.errors.append(r.url))
        self.page.goto(url)
        self.box = self.page.locator("textarea").last
        self.box.wait_for()
        self.page.wait_for_timeout(1000)

    def wait_for(self, condition, seconds=30):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, (self.page.inner_text("body"), self.errors)
            self.page.wait_for_timeout(50)

    def ask(self, text):
        self.box.fill(text)
        self.box.press("Enter")

    def said(self, who="user"):
        """Returns the messages of `user` or `bot`."""
        return self.page.locator(f".message.{who} .md").evaluate_all("m => m.map(e => e.innerText)")

    def texts(self):
        return self.page.locator("textarea").evaluate_all("all => all.map(t => t.value)")

    def is_done(self):
        return not self.page.locator(".stop-button").count()

    def wait_for_answers(self, count):
        self.wait_for(lambda: len(self.said("bot")) == count and self.is_done(), seconds=60)
        self.page.wait_for_timeout(500)

    def click(self, title):
        self.page.locator(f"button[title='{title}']").first.click()

    def close(self):
        assert self.errors == []
        self.page.close()


def test_an_address_that_cannot_be_used_is_named():
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        for host in ("127.0.0.1", "0.0.0.0"):
            done = in_process("recipes/demo.py", "--host", host, "--port", port, fails=True)
            assert f"demo.py: port {port} cannot be used" in done.stderr
    for host in ("192.0.2.1", "no.such.host.invalid", "2001:db8::1"):  # addresses of no machine
        done = in_process("recipes/demo.py", "--host", host, fails=True)
        assert " is not an address of this machine: " in done.stderr


def test_requests_of_other_sites_uploads_and_large_ones_are_refused(chat_server):
    status, url = chat_server.status, chat_server.url
    assert status(Host="my.site", Origin="https://my.site") == 200
    assert status() == status(Origin=url) == status(Host="localhost") == status(Host="[::1]") == 200
    for host in ("evil.com", "evil.com:80", "127.0.0.1.evil.com", "[::1", "", "x.gradio.live"):
        assert status(Host=host) == status("/config", Host=host) == 403
    for origin in ("http://evil.com", "null", "http://127.0.0.1:1", "http://["):
        assert status("/gradio_api/queue/join", "POST", b"{}", Origin=origin) == 403
    for path in ("upload", "upload/", "%75pload", "process_recording", "component_server"):
        assert status(f"/gradio_api/{path}", "POST", b"x") == 404
    large = b"[" * 2_000_000
    assert status("/gradio_api/queue/join", "POST", large) == 413
    assert status("/gradio_api/queue/join", "POST", iter([large])) == 413  # chunked
    for path in ("file=/etc/passwd", f"file={ROOT}/README.md", "file=../../../etc/passwd"):
        assert status(f"/gradio_api/{path}") == 403


def test_what_the_browser_sends_is_text_and_what_is_shown_is_escaped():
    from gradio.components.chatbot import ChatbotDataMessages, FileMessage, Message
    from gradio.data_classes import FileData

    from gpt2_accel.tools import pages

    bot = pages.text_chatbot("")
    shown = bot.postprocess([{"role": "user", "content": HTML}])
    assert "<" not in shown.root[0].content[0].text
    file = FileMessage(file=FileData(path="/etc/passwd"))
    received = bot.preprocess(
        ChatbotDataMessages([*shown.root, Message(role="assistant", content=[file])])
    )
    assert [pages.text_of(message) for message in received] == [HTML, ""]


def test_the_model_reads_answered_messages():
    from gpt2_accel.tools.pages import CUT, conversation

    said = [("user", "a"), ("user", "b"), ("assistant", f"c{CUT}"), ("system", "d"), ("user", "e")]
    said += [("assistant", "")]
    history = [{"role": role, "content": text} for role, text in said]
    found = conversation(history, "f", "Be kind.")
    assert [m["content"] for m in found] == ["Be kind.", "b", "c", "f"]
    assert conversation([], "f", None) == [{"role": "user", "content": "f"}]


def test_stop_is_visible_and_a_reload_keeps_the_conversation(browser, chat_server):
    one = Visitor(browser, chat_server.url)
    one.ask("x<|im_end|>")
    one.wait_for(lambda: "holds the special token <|im_end|>" in one.page.inner_text("body"))
    one.wait_for(one.is_done)
    assert not any(one.said("bot"))
    one.page.wait_for_timeout(500)
    one.click("Undo")
    one.wait_for(lambda: not one.said() and one.box.input_value() == "x<|im_end|>")
    one.ask(HTML)
    one.wait_for(lambda: any(map(len, one.said("bot"))))
    assert not one.is_done()  # the text streams in
    one.wait_for_answers(1)
    assert one.said() == [HTML] and one.page.locator(".md *").count() == 0
    one.click("Copy message")
    one.wait_for(lambda: one.page.evaluate("navigator.clipboard.readText()") == HTML)
    one.ask("And?")
    one.wait_for(lambda: len(one.said("bot")) == 2 and one.said("bot")[1])
    one.page.locator(".stop-button").dispatch_event("click")
    one.wait_for_answers(2)
    stopped = one.said("bot")[1]
    assert stopped.endswith(" …")
    one.page.wait_for_timeout(2000)  # the browser saves the conversation after the answer
    one.page.reload()
    one.wait_for(lambda: one.said("bot")[1:] == [stopped])
    one.page.wait_for_timeout(500)
    one.click("Retry")
    one.wait_for(lambda: one.said("bot")[1:] != [stopped])
    one.wait_for_answers(2)
    one.click("Undo")
    one.wait_for(lambda: one.said() == [HTML] and one.box.input_value() == "And?")
    one.page.locator("button[title='Clear']").last.click()
    one.wait_for(lambda: not one.said() and not one.said("bot"))
    one.page.reload()  # what is cleared stays so
    one.page.wait_for_timeout(2000)
    assert not one.said()
    one.close()


@pytest.mark.parametrize("width", [390, 1300])
def test_the_box_stays_in_the_window(browser, chat_server, width):
    visitor = Visitor(browser, chat_server.url)
    visitor.page.set_viewport_size({"width": width, "height": 844})
    visitor.page.get_by_text("How?").first.click()
    visitor.wait_for_answers(1)
    visitor.ask("Why?\n" * 60)
    visitor.wait_for_answers(2)
    assert visitor.said()[0] == "How?"
    box = visitor.page.locator(".submit-button").bounding_box()
    assert 0 < box["y"] and box["y"] + box["height"] < 844
    assert visitor.page.evaluate("document.documentElement.scrollWidth") <= width
    visitor.click("Clear")
    visitor.close()


def test_the_model_continues_a_text(browser, text_server):
    visitor = Visitor(browser, text_server.url)
    visitor.page.get_by_label("Prompt").fill(HTML)
    visitor.page.get_by_role("button", name="Write").click()
    visitor.wait_for(lambda: len(visitor.texts()[1]) > len(HTML) + 10)
    visitor.page.get_by_role("button", name="Stop").dispatch_event("click")
    visitor.page.get_by_role("button", name="Write").wait_for()
    visitor.page.wait_for_timeout(500)
    prompt, text = visitor.texts()
    assert prompt == HTML and len(text) < len(HTML) + 100
    assert text.startswith(HTML) and text.endswith(" …")
    visitor.close()
