"""What the pages say follows from the recorded results."""

import re
import sys

from launching import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from results import read_results

README = (ROOT / "README.md").read_text()


def values(name: str, column: str, *names: str) -> list[str]:
    """Returns the figures of a column of a result on a CPU in the README's form, of rows by the start of name and setting."""
    rows = {f"{row['name']}, {row['setting']}": row for row in read_results(name)[0]["rows"]}
    found = [row[column] for start in names for key, row in rows.items() if key.startswith(start)]
    return [f"{value['median'] if isinstance(value, dict) else value:.2f}" for value in found]


def test_the_figures_of_the_readme_are_recorded():
    others = ("nanoGPT's loop", "HF Trainer")
    expected = {
        "speed-up over it: 124M on a CPU": values("gpt2", "speed_up", *others),
        "peak memory relative to it: 124M on a CPU": values("gpt2", "memory_ratio", *others),
        "speed-up over it: nanoGPT's CPU model": values("baby", "speed_up", *others),
        "speed-up of another recipe": values("shakespeare", "speed_up", others[0]),
        "speed-up over it: one sample": values("generate", "speed_up", "HF generate, bf16")[:1],
    }
    for head, found in expected.items():
        [line] = re.findall(rf"^\| {head}.*$", README, re.MULTILINE)
        assert re.findall(r"(\d\.\d\d) x", line) == found, line
    rate = read_results("gpt2")[0]["rows"][0]["matmul_flops"]["median"]
    assert f"here {rate / 1e12:.2f} TFLOP/s" in README
    [quickstart] = read_results("quickstart")
    line = "val/loss {val/loss:.4f} ± {val/loss_stderr:.4f}, val/perplexity {val/perplexity:.4f}, "
    assert (line + "val/bits_per_byte {val/bits_per_byte:.4f}").format(**quickstart) in README
    assert f"`xz -9` needs {quickstart['xz -9']:.3f} bits per byte" in README
    assert f"to {quickstart['val/bits_per_byte']:.2f} bits per byte" in README
