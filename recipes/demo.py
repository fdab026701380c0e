"""Serve a web page to try a checkpoint, or to compare two: type a prompt, and the text streams in.

A model with a chat template is opened as a chat, others continue a text.

    pip install 'gradio>=6.0'
    python recipes/demo.py --model runs/quickstart
    python recipes/demo.py --model runs/quickstart/checkpoint-750 runs/quickstart

Gradio's environment variables set the address: GRADIO_SERVER_NAME (0.0.0.0 for the whole network) and
GRADIO_SERVER_PORT. Visitors take turns; those who wait see their place in the queue. `--write_space FOLDER` writes the
page as a complete Hugging Face Space.
"""

import html
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path

import yaml
from transformers import PreTrainedTokenizerBase

try:
    import gradio as gr

    from gpt2_accel.generation.chat_page import CSS as CHAT_CSS
    from gpt2_accel.generation.chat_page import (
        ChatModel,
        build_chat_page,
        read_settings,
        setting_inputs,
    )
except (ImportError, ValueError):  # it is missing, or reads a port that is none: said in `main`
    gr = None

import gpt2_accel
from gpt2_accel import GPT, cli, save_pretrained
from gpt2_accel.checkpoint.find import model_directory
from gpt2_accel.config import parse_config, setting
from gpt2_accel.files import atomic_directory
from gpt2_accel.generation.sampling import (
    Sampling,
    complete,
    encode_prompt,
    likeliest,
    load,
    stream,
)
from gpt2_accel.hf.convert import describe, local_directory
from gpt2_accel.hf.model_card import licence_and_tokens
from gpt2_accel.recipe_command import FOLDERS

TITLE = "Continue a text"
EXAMPLES = ("Hello, I'm a language model,", "Once upon a time", "The most important thing is")
MAX_SAMPLES = 4
QUEUE = 32  # visitors who may wait
# What the page imports, for a Space's requirements.txt; Gradio itself is the Space's SDK.
REQUIREMENTS = (
    "accelerate huggingface_hub numpy PyYAML safetensors tokenizers torch tqdm transformers"
)
SPACE_SETTINGS = "demo.yaml"
# A line of code in most languages: indented, a comment, ended by a bracket or such, or begun by a keyword.
CODE_LINE = re.compile(
    r"( {4}|\t|#|\"\"\").*|.*[:;{}()\[\],]|(def|class|import|from|return|func|fn|var|let) .*"
)
CSS = """
.samples { display: grid; grid-template-columns: repeat(auto-fit, minmax(240px, 1fr)); gap: .75rem }
.sample { position: relative; border: 1px solid var(--border-color-primary); border-radius: .5rem;
  background: var(--block-background-fill); min-width: 0 }
.sample pre { margin: 0; padding: 2.1rem 1rem 1rem; min-height: 9rem; font: inherit; line-height: 1.5;
  white-space: pre-wrap; overflow-wrap: anywhere; color: var(--body-text-color) }
.sample.code pre { font-family: monospace; font-size: .9em }
.sample b { font-weight: 600; color: var(--color-accent) }
.sample button { position: absolute; top: .4rem; right: .5rem; padding: .1rem .6rem; font-size: .8rem;
  border: 1px solid var(--border-color-primary); border-radius: .3rem; color: var(--body-text-color-subdued) }
#choose { display: none }
@media (max-width: 640px) {
  #choose { display: block }
  #models:not([data-shown="1"]) > :nth-child(2), #models[data-shown="1"] > :nth-child(1) { display: none }
}
"""
COPY = """
element.addEventListener("click", event => {
  if (!event.target.matches("button")) return;
  const text = event.target.parentElement.querySelector("pre");
  if (navigator.clipboard) navigator.clipboard.writeText(text.textContent);
  else { getSelection().selectAllChildren(text); document.execCommand("copy") }  // without https
  event.target.textContent = "Copied";
});
"""


@dataclass
class Demo:
    model: list[str] = setting(
        ["runs/quickstart"], "run's folder, HF model directory or Hub id; two to compare them"
    )
    dtype: str = setting("float32", "of the weights: 'float32' or 'bfloat16'")
    compile: bool = setting(False, "compile the forward of one token: slow to start, faster then")
    examples: list[str] = setting([], "prompts to click on; default those of the run's samples")
    verify: bool = setting(True, "compare a checkpoint's files with their checksums first")
    write_space: str | None = setting(None, "write a Hugging Face Space to this new folder instead")

    def __post_init__(self) -> None:
        if not 1 <= len(self.model) <= 2:
            raise ValueError(f"model takes one or two models, got {len(self.model)}")


@dataclass
class LoadedModel:
    """A model with its tokenizer, under the name that the page shows."""

    name: str
    model: GPT
    tokenizer: PreTrainedTokenizerBase

    def next_tokens(self, prompt: str) -> dict[str, float]:
        """The likeliest next tokens, made visible, with their probabilities. An id without a token is shown itself."""
        visible = str.maketrans({"Ġ": "␣", " ": "␣", "Ċ": "↵", "\n": "↵"})
        name = self.tokenizer.convert_ids_to_tokens
        return {
            (name(token) or f"[{token}]").translate(visible): probability
            for token, probability in likeliest(self.model, self.tokenizer, prompt)
        }


def main() -> None:
    settings = Path(__file__).with_name(SPACE_SETTINGS)
    in_space = len(sys.argv) == 1 and settings.exists()
    config = parse_config(Demo, ["--config", str(settings)] if in_space else None)
    check_ports()
    if gr is None:
        raise ValueError("the page needs Gradio: pip install 'gradio>=6.0'")
    if config.write_space is not None:
        write_space(config, Path(config.write_space))
        return
    models = [
        LoadedModel(name, *load(name, config.dtype, verify=config.verify)) for name in config.model
    ]
    for loaded in models if config.compile else []:
        complete(loaded.model, loaded.tokenizer, ["a"], Sampling(3), compile=True)
    examples = example_prompts(config)
    if all(loaded.tokenizer.chat_template for loaded in models):
        talkers = [
            ChatModel(loaded.name, about(loaded), loaded.model, loaded.tokenizer)
            for loaded in models
        ]
        page = build_chat_page(talkers, config.compile, examples)
    else:
        page = build_page(models, config.compile, examples)
    # Fonts of the visitor's system: the page works without a network.
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    page.queue(max_size=QUEUE).launch(theme=theme, css=CSS + CHAT_CSS)


def about(loaded: LoadedModel) -> str:
    """Returns a line on a model: its description, its licence and the tokens that it was trained on."""
    license, tokens = licence_and_tokens(local_directory(model_directory(loaded.name)))
    parts = [describe(loaded.model.config).rstrip(".")]
    parts.append(f"licence {license}" if license else "no licence is named")
    if tokens:
        parts.append(f"fine-tuned on {tokens:,} tokens")
    return "; ".join(parts) + "."


def check_ports() -> None:
    """Raises `ValueError` if one of Gradio's environment variables is not a valid port or number of ports."""
    for name in ("GRADIO_SERVER_PORT", "GRADIO_NUM_PORTS"):
        value = os.environ.get(name, "1")
        if not (value.isdecimal() and int(value) < 2**16):
            raise ValueError(f"{name} is {value!r}: give a number below 65536")


def example_prompts(config: Demo) -> list[str]:
    """Prompts for the page: those asked for, or those that a model's run continued while it trained."""
    found = list(config.examples)
    for name in [] if found else config.model:
        for folder in (Path(name), Path(name).parent):  # a checkpoint's settings are its run's
            try:
                settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
                found += [text for text in settings["sample_prompts"] if text.strip()]
            except (OSError, ValueError, yaml.YAMLError, LookupError, TypeError, AttributeError):
                continue  # no run, or one of something else
    return list(dict.fromkeys(found)) or list(EXAMPLES)


def build_page(
    models: list[LoadedModel], compile: bool, examples: Sequence[str] = EXAMPLES
) -> "gr.Blocks":
    """The Gradio page: the prompt above, a column for each model below, or a tab on a phone."""
    with gr.Blocks(title=TITLE, analytics_enabled=False) as page:
        gr.Markdown(f"# {TITLE}\nThe model continues the text that you begin.")
        prompt = gr.Textbox(label="Prompt", lines=3, autofocus=True, info="Empty: a text's start.")
        gr.Examples([[text] for text in examples], prompt, label="Examples")
        with gr.Row():
            write = gr.Button("Write", variant="primary", scale=4)
            stop = gr.Button("Stop", variant="secondary", visible=False, min_width=80)
        with gr.Accordion("Settings", open=False):
            with gr.Row():
                settings = setting_inputs(length=100)
                hint = f"1 to {MAX_SAMPLES}"
                samples = gr.Number(1, label="Samples", info=hint, precision=0, min_width=120)
            inputs = [prompt, samples, *settings]
        outputs = [stop]
        if len(models) == 2:
            names = [(loaded.name, number) for number, loaded in enumerate(models)]
            choice = gr.Radio(names, value=0, show_label=False, container=False, elem_id="choose")
            show = "shown => { document.querySelector('#models').dataset.shown = shown }"
            choice.change(None, choice, None, js=show)
        with gr.Row(elem_id="models"):
            for loaded in models:
                with gr.Column():
                    gr.Markdown(f"### {loaded.name}\n{describe(loaded.model.config)}")
                    outputs.append(gr.HTML(show_samples("", [""]), js_on_load=COPY))
                    outputs.append(
                        gr.Label(
                            label="Likeliest next tokens after the prompt",
                            num_top_classes=10,
                            show_heading=False,
                        )
                    )

        def talk(prompt: str | None, samples: int | None, *values: float | None) -> Iterator[list]:
            same = [gr.skip()] * (len(outputs) - 1)
            try:
                if not 1 <= (samples or 0) <= MAX_SAMPLES:
                    raise ValueError(f"Samples must be 1 to {MAX_SAMPLES}, got {samples}")
                sampling = replace(read_settings(values), num_samples=samples)
                yield [gr.Button(visible=True), *same]
                for written in write_all(models, compile, prompt or "", sampling):
                    yield [gr.skip(), *written]
            except ValueError as error:  # what is on the page stays there
                gr.Warning(str(error))
            yield [gr.Button(visible=False), *same]

        # A click while a text is still being written counts: it comes after it.
        writing = gr.on(
            [write.click, prompt.submit], talk, inputs, outputs, trigger_mode="always_last"
        )
        stop.click(None, cancels=[writing])
        stop.click(lambda: gr.Button(visible=False), None, stop, queue=False)
    return page


def show_samples(prompt: str, texts: list[str]) -> str:
    """Continuations of a prompt as HTML, each with its button; code is monospaced."""
    parts = []
    for text in texts:
        kind = "sample code" if is_code(prompt + text) else "sample"
        said = f"<b>{html.escape(prompt)}</b>{html.escape(text)}"
        said = said.replace("\0", "\ufffd").replace("\r", "&#13;")  # which HTML takes out
        parts.append(
            f'<div class="{kind}"><button type="button">Copy</button><pre>{said}</pre></div>'
        )
    return f'<div class="samples">{"".join(parts)}</div>'


def is_code(text: str) -> bool:
    """Whether most lines of a text look like code."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    code = sum(CODE_LINE.fullmatch(line) is not None for line in lines)
    return 2 * code > len(lines)


def write_all(
    models: list[LoadedModel], compile: bool, prompt: str, sampling: Sampling
) -> Iterator[list]:
    """The page's outputs, again and again while all models write, a token of each in turn."""
    for loaded in models:
        tokens = len(encode_prompt(loaded.tokenizer, prompt))
        if tokens > (read := loaded.model.config.n_positions):
            gr.Info(f"{loaded.name} reads the last {read} of the prompt's {tokens} tokens.")
    tables = [loaded.next_tokens(prompt) for loaded in models]
    streams = [
        stream(loaded.model, loaded.tokenizer, [prompt], sampling, compile=compile)
        for loaded in models
    ]
    written = [[] for _ in models]
    for step in zip_longest(*streams):
        written = [new or old for new, old in zip(step, written, strict=True)]
        outputs = []
        for samples, table in zip(written, tables, strict=True):
            outputs += [show_samples(prompt, [sample.text for sample in samples]), table]
        yield outputs


def write_space(config: Demo, folder: Path) -> None:
    """Writes a folder that runs as a Hugging Face Space as it is: the page as `app.py`, its settings,
    this package, the models that are directories here, README metadata and requirements.

    Raises `FileExistsError` if the folder is there already.
    """
    with atomic_directory(folder) as space:
        shutil.copy(__file__, space / "app.py")
        package = Path(gpt2_accel.__file__).parent
        shutil.copytree(
            package, space / package.name, ignore=shutil.ignore_patterns("__pycache__", *FOLDERS)
        )
        names = []
        for number, name in enumerate(config.model, start=1):
            if Path(name).is_dir():
                model, tokenizer = load(name, verify=config.verify)
                name = f"models/{number}-{Path(name).resolve().name}"
                save_pretrained(model, space / name, tokenizer)
            names.append(name)
        settings = {"model": names, "dtype": config.dtype, "compile": config.compile}
        settings["examples"] = example_prompts(config)
        (space / SPACE_SETTINGS).write_text(yaml.safe_dump(settings), encoding="utf-8")
        header = yaml.safe_dump(space_metadata(config), sort_keys=False, allow_unicode=True)
        (space / "README.md").write_text(f"---\n{header}---\n", encoding="utf-8")
        pins = (f"{name}=={version(name).split('+')[0]}\n" for name in REQUIREMENTS.split())
        (space / "requirements.txt").write_text("".join(pins), encoding="utf-8")
    print(
        f"The Space is in {folder}. Try it with\n  cd {folder} && python app.py\nand upload it with\n"
        f"  hf upload USER/NAME {folder} --repo-type space"
    )


def space_metadata(config: Demo) -> dict:
    """What the Hub reads at the top of a Space's README.

    Fields: https://huggingface.co/docs/hub/spaces-config-reference.
    """
    return {
        "title": TITLE,
        "emoji": "💬",
        "colorFrom": "blue",
        "colorTo": "gray",
        "sdk": "gradio",
        "sdk_version": gr.__version__,
        "python_version": f"{sys.version_info.major}.{sys.version_info.minor}",
        "app_file": "app.py",
        "models": [name.split("@")[0] for name in config.model if not Path(name).is_dir()],
    }


if __name__ == "__main__":
    cli.run(main)
