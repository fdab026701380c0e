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
from conftest import long
from launching import ROOT, free_port, in_process

from gpt2_accel import GPT, GPTConfig, from_pretrained, save_pretrained
from gpt2_accel.hf.chat_template import chat_tokenizer
from gpt2_accel.tokenizer import byte_tokenizer, load_tokenizer

pytest.importorskip("gradio", reason="needs Gradio")
HTML = "**Why**   <b>this</b> &copy=2 <module>?\n    $$x$$ <img src=x onerror=alert(1)>\n"


def save_model(folder, tokenizer, vocab_size):
    """Saves a model of 512 positions that writes HTML again and again, from any byte on; returns its directory."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocab_size, 512, n_layer=6, n_head=4, n_embd=256))
    ids = torch.tensor(list(HTML.encode())).repeat(512)[:512]
    with torch.no_grad():
        model.wte.weight.normal_()
        model.wpe.weight.copy_(1000 * model.wte.weight[ids])
    save_pretrained(model, folder, tokenizer)
    return folder


class Server:
    """A server of the page in its own process."""

    def __init__(self, model):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        flags = f"--port {self.port} --names my.site --examples How? --model {model}"
        self.process = subprocess.Popen(
            [sys.executable, "recipes/demo.py", *flags.split()],
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


def test_other_host_names_uploads_and_files_are_refused(chat_server):
    status = chat_server.status
    assert status() == status(Host="localhost") == status(Host="my.site") == 200
    for host in ("evil.com", "evil.com:80", "127.0.0.1.evil.com", ""):
        assert status(Host=host) == status("/config", Host=host) == 400
    for path in ("file=/etc/passwd", f"file={ROOT}/README.md", "file=../../../etc/passwd"):
        assert status(f"/gradio_api/{path}") == 403
    part = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\nlong\r\n--x--\r\n'
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    assert status("/gradio_api/upload", "POST", part, **kind) == 413


def test_the_model_reads_answered_messages():
    from gpt2_accel.tools.pages import conversation, escaped

    said = [("user", "a"), ("user", "b"), ("assistant", "c"), ("user", "e"), ("assistant", "")]
    history = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in said]
    found = conversation(history, "f", "Be kind.")
    assert [m["content"] for m in found] == ["Be kind.", "b", "c", "f"]
    history = [
        {"role": "user", "content": escaped("a")["content"]},
        {"role": "assistant", **escaped(HTML)},
    ]
    assert conversation(history, "f", None)[1]["content"] == HTML
    assert conversation([], "f", None) == [{"role": "user", "content": "f"}]


def test_the_text_page_continues_a_prompt(chat_base):
    from gpt2_accel.tools.pages import text_page

    page = text_page("mine", from_pretrained(chat_base), load_tokenizer(chat_base), [])
    temperature, top_k, top_p, length = 0, 0, 1, 5
    texts = list(page.fn("the ", temperature, top_k, top_p, length))
    assert len(texts) == 5 and all(text.startswith("the ") for text in texts)


def test_a_conversation_on_a_phone(browser, chat_server):
    one = Visitor(browser, chat_server.url)
    one.page.set_viewport_size({"width": 390, "height": 844})
    one.ask("x<|im_end|>")
    one.wait_for(lambda: "holds the special token <|im_end|>" in one.page.inner_text("body"))
    one.wait_for(lambda: one.box.is_enabled() and one.is_done())
    one.page.wait_for_timeout(500)
    one.ask("Why?")
    one.wait_for(lambda: any(map(len, one.said("bot"))))
    one.wait_for_answers(1)
    [answer] = one.said("bot")
    assert HTML in answer and one.page.locator(".message.bot .md *").count() == 0
    one.page.locator("button[title='Copy message']").last.click()
    one.wait_for(lambda: one.page.evaluate("navigator.clipboard.readText()") == answer)
    assert one.page.evaluate("document.documentElement.scrollWidth") <= 390
    one.close()


@long
def test_a_browser_shows_how_a_text_goes_on(browser, text_server):
    visitor = Visitor(browser, text_server.url)
    visitor.page.get_by_label("Prompt").fill(HTML)
    visitor.page.get_by_role("button", name="Write").click()
    visitor.wait_for(lambda: len(visitor.texts()[1]) > len(HTML) + 10)
    visitor.page.get_by_role("button", name="Stop").dispatch_event("click")
    visitor.page.get_by_role("button", name="Write").wait_for()
    visitor.page.wait_for_timeout(500)
    prompt, text = visitor.texts()
    assert prompt == HTML and len(text) <= len(HTML) + 100
    assert text.startswith(HTML)
    visitor.close()
