"""The page of recipes/demo.py in a browser, and as a Space."""

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
import yaml
from conftest import load_recipe
from launching import ROOT, free_port

from gpt2_accel import GPT, GPTConfig, save_pretrained
from gpt2_accel.hf.chat_template import chat_tokenizer
from gpt2_accel.hf.model_card import Training
from gpt2_accel.models.qwen3 import Qwen3Config
from gpt2_accel.tokenizer import byte_tokenizer

gradio = pytest.importorskip("gradio", reason="needs Gradio")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two small models with different samples: a GPT-2 with 64 positions, a Qwen3 with 2000."""
    path = tmp_path_factory.mktemp("models")
    gpt2 = GPTConfig(257, 64, n_layer=2, n_head=2, n_embd=32)
    qwen3 = Qwen3Config(257, 2000, 2, n_head=2, n_kv_head=1, head_dim=16, n_embd=32, n_inner=96)
    for seed, shape in ((1, gpt2), (2, qwen3)):
        torch.manual_seed(seed)
        model = shape.build()
        with torch.no_grad():
            model.head_weight[127:] = 0  # generates ASCII
            for parameter in model.parameters():
                parameter.mul_(5)
        save_pretrained(model, path / f"model{seed}", byte_tokenizer())
    return [str(path / "model1"), str(path / "model2")]


class Server:
    """A server of the page in its own process."""

    def __init__(self, *command, cwd=ROOT, **env):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=cwd,
            env={**os.environ, "GRADIO_SERVER_PORT": port, **env},
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


@pytest.fixture(scope="module")
def server(models):
    server = Server("recipes/demo.py", "--model", *models)
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
        yield browser.new_context(viewport={"width": 1300, "height": 1000})
        browser.close()


class Visitor:
    """A browser tab on the page; `errors` collects console errors and requests to other hosts."""

    def __init__(self, browser, url):
        self.errors = []
        self.page = browser.new_page()
        self.page.on("console", lambda m: m.type == "error" and self.errors.append(m.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.note_host(request.url, url))
        self.page.goto(url)
        self.prompt = self.page.get_by_label("Prompt")
        self.prompt.wait_for()

    def note_host(self, asked, own):
        if not asked.startswith((own, "data:", "blob:")):
            self.errors.append(asked)

    def write(self, prompt, **settings):
        """Fills in the settings and the prompt, and clicks Write."""
        if settings and not self.page.get_by_text("Top-k", exact=True).is_visible():
            self.page.get_by_role("button", name="Settings").first.click()
            self.page.get_by_text("Top-k", exact=True).wait_for()
            self.page.bring_to_front()
            self.page.wait_for_timeout(
                1500
            )  # Gradio creates the settings now, and then sets their defaults
        for label, value in settings.items():
            field = self.page.locator(f"input[type=number][aria-label$='{label}']")
            field.fill(str(value))
            field.press("Tab")
        self.prompt.fill(prompt)
        self.page.get_by_role("button", name="Write").click()

    def texts(self):
        """Returns the samples on the page, from left to right."""
        return self.page.locator(".sample pre").evaluate_all("all => all.map(t => t.textContent)")

    def lengths(self):
        return [len(text) for text in self.texts()]

    def wait_for(self, condition, seconds=30):
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"{self.texts()}, {self.errors}, {self.messages()}")
            self.page.wait_for_timeout(50)

    def wait_for_texts(self, prompt, length):
        """Waits until each model has one sample of `length` bytes after the prompt."""
        done = [len(prompt) + length] * 2
        self.wait_for(lambda: self.lengths() == done and self.texts()[0].startswith(prompt))

    def wait_for_message(self, message):
        self.wait_for(lambda: any(message in text for text in self.messages()))

    def messages(self):
        return self.page.locator(".toast-body").all_inner_texts()

    def close(self):
        assert self.errors == []
        self.page.close()


@pytest.fixture
def visitor(browser, server):
    visitor = Visitor(browser, server.url)
    yield visitor
    if folder := os.environ.get("SCREENSHOTS"):  # for visual inspection
        visitor.page.screenshot(path=f"{folder}/{time.time():.0f}.png", full_page=True)
    visitor.close()


def test_both_models_write_text_that_depends_on_the_seed(visitor):
    visitor.write("hello ", Length=300)
    visitor.wait_for(lambda: visitor.lengths() == [306, 306])
    left, right = visitor.texts()
    assert left.startswith("hello ") and right.startswith("hello ") and left != right
    # The most likely next tokens of each model, with their probabilities.
    assert visitor.page.locator("meter").count() == 20

    visitor.write("hello ", Length=30, Samples=3)
    visitor.wait_for(lambda: visitor.lengths() == [36] * 6)
    assert visitor.texts()[0] == left[:36] and visitor.texts()[3] == right[:36]
    assert len({*visitor.texts()}) == 6
    visitor.write("hello ", Seed=1338, Samples=1)
    visitor.wait_for(lambda: visitor.lengths() == [36, 36] and visitor.texts()[0] != left[:36])


def test_the_stop_button_stops_generation(visitor):
    stop = visitor.page.get_by_role("button", name="Stop")
    assert not stop.is_visible()
    visitor.write("once ", Length=1000)
    visitor.wait_for(lambda: max(visitor.lengths()) > 20)
    stop.dispatch_event("click")  # at once: it goes when the text is complete
    stop.wait_for(state="hidden")
    stopped = []

    def ended():  # a slow browser still shows what was written before
        stopped.append(visitor.texts())
        visitor.page.wait_for_timeout(700)
        return visitor.texts() == stopped[-1]

    visitor.wait_for(ended)
    assert 20 < len(stopped[-1][0]) < 1000
    visitor.write("again ", Length=10)
    visitor.wait_for_texts("again ", 10)
    stop.wait_for(state="hidden")


def test_examples_settings_copies_and_messages(visitor):
    page = visitor.page
    assert page.get_by_role("heading", name="Continue a text").is_visible()
    assert not page.get_by_text("Top-k", exact=True).is_visible()
    page.get_by_text("Once upon a time").click()
    visitor.wait_for(lambda: visitor.prompt.input_value() == "Once upon a time")
    visitor.write("${value} {{x}} <i>&\n", Length=9)
    visitor.wait_for_texts("${value} {{x}} <i>&\n", 9)
    assert page.locator(".sample b").first.text_content() == "${value} {{x}} <i>&\n"
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    before = visitor.texts()
    page.locator(".sample").first.get_by_role("button").click()
    visitor.wait_for(lambda: page.evaluate("navigator.clipboard.readText()") == before[0])
    # What cannot be is said, and wipes nothing.
    visitor.write("another", Length=0)
    visitor.wait_for_message("Length must be at least 1")
    assert visitor.texts() == before and page.locator(".sample pre").first.is_visible()
    assert page.locator(".error").count() == 0
    # On a phone one model is shown at a time.
    shown = page.locator(".sample:visible")
    assert shown.count() == 2
    page.set_viewport_size({"width": 390, "height": 800})
    visitor.wait_for(lambda: shown.count() == 1)
    for number in (1, 0):
        page.locator("#choose input").nth(number).click()
        visitor.wait_for(lambda n=number: shown.locator("pre").text_content() == before[n])
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_code_is_monospaced_and_examples_are_those_of_the_run(tmp_path):
    demo = load_recipe("demo")
    code = "def area(self):\n    return self.width\n\nclass Square(Shape):\n"
    prose = "Once upon a time,\nthere was a cat that sat on a mat.\n\nIt saw a rat.\n"
    assert '"sample code"' in demo.show_samples("import os\n", [code])
    assert '"sample"' in demo.show_samples("Once", [prose]) and demo.show_samples("", [""])
    run = tmp_path / "run"
    (run / "checkpoint-5").mkdir(parents=True)
    (run / "config.yaml").write_text('sample_prompts: ["def ", "\\n"]')
    for model in (run, run / "checkpoint-5"):
        assert demo.example_prompts(demo.Demo(model=[str(model)])) == ["def "]
    assert demo.example_prompts(demo.Demo(model=[str(run)], examples=["x"])) == ["x"]
    (run / "config.yaml").write_text("sample_prompts: [1")
    assert demo.example_prompts(demo.Demo(model=[str(run)])) == list(demo.EXAMPLES)


def test_invalid_settings_show_a_message_and_others_generate(visitor):
    good = {"Top-k": 50, "Length": 7, "Seed": 1, "Temperature": 0, "Samples": 1}
    for label, value, message in (
        ("Top-k", -1, "Top-k must not be negative, got -1"),
        ("Length", 0, "Length must be at least 1"),
        ("Length", 100000, "at most 1000"),
        ("Seed", -5, "Seed must not be negative"),
        ("Seed", "", "a setting is empty"),
        ("Temperature", -1, "Temperature must not be negative"),
        ("Samples", 5, "1 to 4, got 5"),
    ):
        visitor.write("x", **{**good, label: value})
        visitor.wait_for_message(message)
    visitor.write("", **good, **{"Top-p": 1})
    visitor.wait_for_texts("", 7)
    visitor.write("y", **{"Top-k": 99999})  # keeps all 257 tokens
    visitor.wait_for_texts("y", 7)
    visitor.write("z" * 300)
    visitor.wait_for_texts("z" * 300, 7)
    visitor.wait_for_message("reads the last 64 of the prompt's 300 tokens")


def test_two_visitors_generate_at_the_same_time(browser, server):
    visitors = [Visitor(browser, server.url) for _ in range(2)]
    for number, visitor in enumerate(visitors):
        visitor.write(f"{number} ", Length=40)
    for number, visitor in enumerate(visitors):
        visitor.wait_for_texts(f"{number} ", 40)
        visitor.close()


def test_weights_that_are_not_finite_show_a_message(models, monkeypatch):
    demo = load_recipe("demo")
    model, tokenizer = demo.load(models[0])
    with torch.no_grad():
        model.wpe.weight[0] = float("nan")
    said = []
    monkeypatch.setattr(gradio, "Warning", said.append)
    page = demo.build_page([demo.LoadedModel("broken", model, tokenizer)], compile=False)
    [talk] = [f.fn for f in page.fns.values() if getattr(f.fn, "__name__", "") == "talk"]
    assert len(list(talk("x", 1, 1.0, 50, 1.0, 5, 1))) == 2
    assert "not finite" in said[0]


def test_an_id_without_a_token_is_shown_by_its_number(tmp_path):
    model = GPT(GPTConfig(vocab_size=260, n_positions=8, n_layer=1, n_head=2, n_embd=32))
    save_pretrained(model, tmp_path, byte_tokenizer())
    demo = load_recipe("demo")
    loaded = demo.LoadedModel("", *demo.load(str(tmp_path)))
    loaded.model.wte.weight.data[:257] = 0
    labels = loaded.next_tokens("a").keys()
    assert {"[257]", "[258]", "[259]"} & labels


def test_a_prompt_that_is_too_long_shows_a_message_at_once(models, monkeypatch):
    demo = load_recipe("demo")
    page = demo.build_page([demo.LoadedModel("a", *demo.load(models[0]))], compile=False)
    [talk] = [f.fn for f in page.fns.values() if getattr(f.fn, "__name__", "") == "talk"]
    said = []
    monkeypatch.setattr(gradio, "Warning", said.append)
    begun = time.monotonic()
    list(talk("ab cd" * 10**6, 1, 1.0, 50, 1.0, 5, 1))
    assert "5,000,000 characters: shorten it to at most 50,000" in said[0]
    assert time.monotonic() - begun < 1


def test_three_models_are_refused():
    with pytest.raises(ValueError, match="one or two models, got 3"):
        load_recipe("demo").Demo(model=["a", "b", "c"])


def test_a_written_space_runs_without_the_checkout(models, tmp_path):
    demo, space = load_recipe("demo"), tmp_path / "space"
    config = demo.Demo(model=models, write_space=str(space))
    demo.write_space(config, space)
    with pytest.raises(FileExistsError, match="space exists already"):
        demo.write_space(config, space)
    header = yaml.safe_load((space / "README.md").read_text().split("---\n")[1])
    assert (header["sdk"], header["app_file"]) == ("gradio", "app.py")
    assert header["sdk_version"] == gradio.__version__
    pinned = {line.split("==")[0] for line in (space / "requirements.txt").read_text().split()}
    assert {"torch", "transformers", "accelerate"} <= pinned
    # Only the Space's own files can be imported, not this checkout.
    moved = shutil.move(space, tmp_path / "elsewhere")
    server = Server("app.py", cwd=moved, PYTHONPATH="")
    assert b"gradio" in urllib.request.urlopen(server.url).read()
    assert "Traceback" not in server.stop()


# Chat


@pytest.fixture(scope="module")
def chat_models(chat_base, tmp_path_factory):
    """Two chat models that always answer the same: one says `a`, then ends; the other goes on."""
    folder, tokenizer = tmp_path_factory.mktemp("chat_models"), chat_tokenizer(chat_base)
    for number, mean in enumerate((1.0, 0.2), start=1):
        torch.manual_seed(number)
        model = GPT(GPTConfig(259, 128, n_layer=1, n_head=2, n_embd=32))
        with torch.no_grad():
            model.wte.weight[127:257] = 0  # generates ASCII
            model.wte.weight[:32] = 0
            for parameter in model.parameters():
                parameter.mul_(5)
            model.wte.weight[258].mul_(mean)
        training = Training({"license": "mit"}, "made up", 1234, 0.1, 1e9, "a CPU", {})
        save_pretrained(model, folder / f"chat{number}", tokenizer, training=training)
    return [str(folder / f"chat{number}") for number in (1, 2)]


@pytest.fixture(scope="module")
def chat_server(chat_models):
    server = Server("recipes/demo.py", "--model", *chat_models, "--examples", "Why?")
    yield server
    server.stop()


class Talker(Visitor):
    """A browser tab on the chat page with two models."""

    def __init__(self, browser, url):
        self.errors = []
        self.page = browser.new_page()
        self.page.on("console", lambda m: m.type == "error" and self.errors.append(m.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(url)
        self.box = self.page.get_by_placeholder("Ask something")
        self.box.wait_for()
        self.page.wait_for_timeout(1000)

    def ask(self, text):
        self.box.fill(text)
        self.box.press("Enter")

    def said(self, who="user"):
        """Returns the messages of `user` or `bot`, of the first model before the second."""
        texts = self.page.locator(f".message.{who}").all_inner_texts()
        shown = (text.strip().replace("\u2060", "") for text in texts)
        return [text for text in shown if text != "Loading content"]

    def texts(self):
        return self.said(), self.said("bot"), self.box.input_value(), self.done()

    def done(self):
        return not self.page.get_by_role("button", name="Stop").is_visible()

    def answered(self, count):
        self.wait_for(lambda: len(self.said("bot")) == count and self.done(), seconds=90)


def test_two_models_answer_in_turns_and_visitors_are_apart(browser, chat_server):
    one, two = Talker(browser, chat_server.url), Talker(browser, chat_server.url)
    one.ask("Why   <b>this</b> &copy=2 <module>?")
    two.ask("How?")
    one.answered(2)
    two.answered(2)
    one.ask("And?")
    one.answered(4)
    assert one.said() == ["Why   <b>this</b> &copy=2 <module>?", "And?"] * 2
    assert two.said() == ["How?"] * 2
    assert "licence mit; fine-tuned on 1,234 tokens." in one.page.inner_text("body")
    before = one.said("bot")
    one.page.get_by_role("button", name="Regenerate").click()
    one.wait_for(lambda: one.done() and one.said("bot") != before)
    assert len(one.said("bot")) == 4 and one.said("bot")[0] == before[0]
    one.page.get_by_label("Edit").first.click()
    box = one.page.locator(".message textarea").first
    assert box.input_value().replace("\u2060", "") == "Why   <b>this</b> &copy=2 <module>?"
    box.fill("What is &lt;i&gt; <i>x</i> & &copy=2?")
    one.page.get_by_label("Submit").first.click()
    one.wait_for(lambda: one.said() == ["What is &lt;i&gt; <i>x</i> & &copy=2?"] * 2 and one.done())
    one.answered(2)
    answered = one.said("bot")
    one.page.get_by_label("Edit").first.click()
    one.page.locator(".message textarea").first.fill("x<|im_end|>")
    one.page.get_by_label("Submit").first.click()
    one.wait_for(lambda: "holds the special token" in one.page.inner_text("body"))
    one.wait_for(lambda: "&lt;" in one.said()[0] and one.said("bot") == answered)
    one.page.get_by_role("button", name="New conversation").click()
    one.wait_for(lambda: not one.said())
    assert two.said() == ["How?"] * 2
    assert not one.errors and not two.errors


def test_what_cannot_be_answered_is_said_and_stays_in_the_box(browser, chat_server):
    visitor = Talker(browser, chat_server.url)
    for text, message in [
        (" ", "the message is empty"),
        ("x<|im_end|>", "holds the special token <|im_end|>"),
        ("a" * 300, "reads 128: write less"),
    ]:
        visitor.ask(text)
        visitor.wait_for(lambda m=message: m in visitor.page.inner_text("body"))
        visitor.wait_for(lambda t=text: visitor.box.input_value() == t)
        assert not visitor.said()
    visitor.ask("Hi")
    visitor.answered(2)


def test_what_is_typed_while_a_model_answers_stays_and_a_new_conversation_is_empty(
    browser, chat_server
):
    visitor = Talker(browser, chat_server.url)
    stop = visitor.page.get_by_role("button", name="Stop")
    visitor.ask("Why?")
    stop.wait_for()
    visitor.ask("And then?")  # not sent if an answer is still being written
    visitor.wait_for(lambda: len(visitor.said("bot")) in (2, 4) and visitor.done(), seconds=90)
    assert ("And then?" in visitor.said()) != (visitor.box.input_value() == "And then?")
    visitor.box.fill("")
    for pause in (0, 300, 900):
        visitor.ask("How?")
        visitor.page.wait_for_timeout(pause)
        visitor.page.get_by_role("button", name="New conversation").click()
        visitor.wait_for(lambda: not visitor.said() and not visitor.said("bot") and visitor.done())
        visitor.page.wait_for_timeout(700)
        assert not visitor.said() and not visitor.said("bot")
    visitor.ask("Where?")
    stop.wait_for()
    stop.evaluate_all("found => found.forEach(button => button.click())")  # gone if it is answered
    visitor.wait_for(visitor.done)
    visitor.ask("Who?")
    visitor.wait_for(lambda: visitor.done() and visitor.said() == ["Where?", "Who?"] * 2)
    assert not visitor.errors


def test_the_chat_page_fits_a_phone(browser, chat_server):
    visitor = Talker(browser, chat_server.url)
    visitor.page.set_viewport_size({"width": 390, "height": 844})
    visitor.ask("Why? " * 20)
    visitor.answered(2)
    assert visitor.page.evaluate("document.documentElement.scrollWidth") <= 390
