"""Serve a web page to try a model: a chat, or for a base model the continuation of a text.

    pip install 'gradio>=6.0'
    python recipes/demo.py --model runs/quickstart

The page is at http://127.0.0.1:7860, or at the next free port. `--host 0.0.0.0` opens it to the
network, and `--share` gives it a public address for a week. Visitors take turns.
"""

import socket
from dataclasses import dataclass

from gpt2_accel import cli
from gpt2_accel.config import ModelChoice, parse_config, setting
from gpt2_accel.runtime.files import sentence
from gpt2_accel.runtime.options import run_of

MAX_WAITING = 32  # visitors
LOCAL = ["127.0.0.1", "localhost"]


@dataclass
class Demo(ModelChoice):
    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 for the whole network")
    port: int | None = setting(None, "port to listen on; default the first free one from 7860")
    names: list[str] = setting([], "more host names of the page, for instance behind a proxy")
    share: bool = setting(False, "also give the page a public address, on Gradio's servers")
    examples: list[str] = setting([], "prompts to click on; default those of the run")
    dtype: str = setting("float32", "dtype of the weights: 'float32' or 'bfloat16'")

    def __post_init__(self) -> None:
        if ":" in self.host:
            self.host = f"[{self.host.strip('[]')}]"  # URLs have IPv6 addresses in brackets
        if self.port is not None and not 0 < self.port < 2**16:
            raise ValueError(f"port must be between 1 and 65535, got {self.port}")


def check_address(host: str, port: int | None) -> None:
    """Raises `ValueError` if a server cannot listen on the port of `host` and, as Gradio needs, of
    localhost."""
    try:
        for name in (host, "127.0.0.1"):
            addresses = socket.getaddrinfo(name.strip("[]"), port or 0, type=socket.SOCK_STREAM)
            family, _, _, _, address = addresses[0]
            socket.create_server(address, family=family).close()
    except OSError as error:
        raise ValueError(
            f"{host}, port {port or 'any'}, cannot be used here ({sentence(error)}): give another "
            "--host or --port"
        ) from error


def main() -> None:
    config = parse_config(Demo)
    check_address(config.host, config.port)
    try:
        import gradio as gr
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware

        from gpt2_accel.generation.sampling import load
        from gpt2_accel.tools import pages
    except ImportError as error:
        raise ValueError("the page needs Gradio: pip install 'gradio>=6.0'") from error
    model, tokenizer = load(
        config.model,
        config.dtype,
        verify=config.verify,
        model_class=config.model_class,
        base=config.base,
    )
    new_page = pages.chat_page if tokenizer.chat_template else pages.text_page
    settings, run = run_of(config.model)
    about = f"{model.config.parameter_count:,} parameters"
    if run.get("data"):
        about += f", trained on {run['data']}"
    examples = config.examples or settings.get("sample_prompts", [])
    page = new_page(config.model, model, tokenizer, examples, about)
    names = ["*"]
    if config.host in LOCAL:  # refuses other names, against DNS rebinding
        names = LOCAL + ["*.gradio.live"] + config.names
    guard = Middleware(TrustedHostMiddleware, allowed_hosts=names)
    page.queue(max_size=MAX_WAITING, api_open=False).launch(
        server_name=config.host,
        server_port=config.port,
        share=config.share,
        app_kwargs={"middleware": [guard]},
        max_file_size=1,
        ssr_mode=False,  # Gradio's Node server would answer before the middleware
        footer_links=[],
        css=pages.CSS,
        js=pages.JS,
        # System fonts: the page loads nothing from other hosts.
        theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"]),
    )


if __name__ == "__main__":
    cli.run(main)
