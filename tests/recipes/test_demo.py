"""The pages of recipes/demo.py: over HTTP, and in a browser."""

import http.client
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from conftest import long
from launching import ROOT, free_port, wait_for

from gpt2_accel import GPT, GPTConfig, from_pretrained, save_pretrained
from gpt2_accel.hf.chat_template import chat_tokenizer
from gpt2_accel.tokenizer import load_tokenizer

pytestmark = pytest.mark.skipif(not find_spec("gradio"), reason="needs Gradio")
HTML = "**Why**   <b>this</b> &copy=2 <module>?\n    $$x$$ <img src=x onerror=alert(1)>\n"


def save_model(folder, tokenizer, vocab_size):
    """Saves a model that writes HTML again and again, from any byte on; returns its directory."""
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
        wait_for(self.is_there, 60)

    def is_there(self):
        assert self.process.poll() is None, self.process.stdout.read()
        try:
            return self.status() == 200
        except OSError:
            return False

    def stop(self):
        """Stops the server with SIGINT; returns its output."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.communicate(timeout=10)[0]
        finally:
            self.process.kill()

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


def test_other_host_names_uploads_and_files_are_refused(chat_server):
    status = chat_server.status
    assert status() == status(Host="localhost") == status(Host="my.site") == 200
    for host in ("evil.com", "evil.com:80", "127.0.0.1.evil.com", ""):
        assert status(Host=host) == status("/config", Host=host) == 400
    for path in ("file=/etc/passwd", f"file={ROOT}/README.md", "file=../../../etc/passwd"):
        assert status(f"/gradio_api/{path}") == 403
    part = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\n'
    part += b"long\r\n--x--\r\n"
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    assert status("/gradio_api/upload", "POST", part, **kind) == 413


def test_the_model_reads_answered_messages():
    from gpt2_accel.tools.pages import conversation, escaped

    turns = [("user", "a"), ("user", "b"), ("assistant", "c"), ("user", "e"), ("assistant", "")]
    history = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]
    history.append({"role": "user", "content": escaped("g")["content"]})
    history.append({"role": "assistant"} | escaped(HTML))
    messages = conversation(history, "f", "Be kind.")
    assert [m["content"] for m in messages] == ["Be kind.", "b", "c", "g", HTML, "f"]
    assert conversation([], "f", None) == [{"role": "user", "content": "f"}]


def test_the_text_page_continues_a_prompt(chat_base):
    from gpt2_accel.tools.pages import text_page

    page = text_page("mine", from_pretrained(chat_base), load_tokenizer(chat_base), [], "")
    temperature, top_k, top_p, length = 0, 0, 1, 5
    texts = list(page.fn("the <b>", temperature, top_k, top_p, length))
    assert len(texts) == 5
    assert all(text.startswith("<pre><mark>the &lt;b&gt;</mark>") for text in texts)


@pytest.fixture
def chromium():
    """A browser; skips the test without playwright or without Chromium."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install it")
    path = shutil.which("chromium") or pytest.skip("needs Chromium: apt-get install chromium")
    with api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


@long
def test_a_phone_shows_a_conversation_as_text_and_asks_no_other_host(chromium, chat_server):
    """The page shows HTML as text, is not wider than the phone, and asks no other host."""
    phone = chromium.new_context(
        viewport={"width": 390, "height": 844}, permissions=["clipboard-read", "clipboard-write"]
    )
    page = phone.new_page()
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    allowed = (chat_server.url, "data:", "blob:")
    page.on(
        "request", lambda request: request.url.startswith(allowed) or errors.append(request.url)
    )
    page.goto(chat_server.url)
    box = page.locator("textarea").last
    box.wait_for()
    page.wait_for_timeout(1000)
    box.fill("x<|im_end|>")
    box.press("Enter")
    page.get_by_text("holds the special token <|im_end|>").first.wait_for()
    page.wait_for_timeout(500)
    box.fill("Why?")
    box.press("Enter")
    answer = page.locator(".message.bot .md")
    answer.filter(has_text=HTML.split()[0]).wait_for()
    page.locator(".stop-button").wait_for(state="detached", timeout=60_000)
    page.wait_for_timeout(500)
    assert HTML in answer.inner_text()
    assert page.locator(".message.bot .md *").count() == 0
    page.locator("button[title='Copy message']").last.click()
    page.wait_for_timeout(500)
    assert page.evaluate("navigator.clipboard.readText()") == answer.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert errors == []
