"""The speed ladder: its hand-written models equal `GPT`, and its command measures every rung."""

import sys
from dataclasses import replace

import pytest
import torch
from conftest import load_recipe, long, read_json
from launching import ROOT

from gpt2_accel import GPT, GPTConfig

sys.path.append(str(ROOT / "benchmarks"))

import ladder
from reference_model import PlainLoss, slow_gpt

TINY = ladder.first_job("tiny", 2, 32, on_cpu=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("hand_norm_gelu", [True, False])
@pytest.mark.parametrize("stored_mask", [True, False])
def test_hand_written_model_equals_gpt(stored_mask, hand_norm_gelu, bias):
    config = GPTConfig(vocab_size=300, n_positions=16, n_layer=2, n_head=2, n_embd=32, bias=bias)
    torch.manual_seed(3)
    initial = GPT(config).state_dict()
    torch.manual_seed(3)
    slow = slow_gpt(config, stored_mask=stored_mask, hand_norm_gelu=hand_norm_gelu)
    torch.testing.assert_close(slow.state_dict(), initial, rtol=0, atol=0)
    for parameter in slow.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model = GPT(config)
    model.load_state_dict(slow.state_dict())
    input_ids, targets = torch.randint(300, (2, 3, 12))
    torch.testing.assert_close(slow(input_ids), model(input_ids), rtol=1e-5, atol=1e-5)
    loss = PlainLoss(slow)(input_ids, targets)
    torch.testing.assert_close(loss, model(input_ids, targets), rtol=1e-5, atol=1e-5)
    masks = [buffer for name, buffer in slow.named_buffers() if name.endswith("seen")]
    assert [tuple(mask.shape) for mask in masks] == ([(16, 16)] * 2 if stored_mask else [])


@long
def test_the_command_measures_every_rung_that_the_device_has(tmp_path, monkeypatch, capsys):
    rungs = [ladder.RUNGS[number] for number in (0, 2, 14)]  # TF32 is CUDA's
    monkeypatch.setattr(ladder, "RUNGS", rungs)
    flags = "--size tiny --sequence_length 32 --steps 2 --output_dir"
    monkeypatch.setattr(sys, "argv", ["speed_ladder.py", *flags.split(), str(tmp_path)])
    load_recipe("speed_ladder").main()
    assert "| TF32 |  |  |  | 27,648 | 333 | lacking: CUDA only |" in capsys.readouterr().out
    rows = read_json(tmp_path / "cpu/ladder.json")["rows"]
    assert [row["name"] for row in rows] == [rung.name for rung in rungs]
    first, last = (rows[place]["tokens_per_second"]["median"] for place in (0, 2))
    assert rows[2]["gain"] == pytest.approx(last / first) and rows[0]["memory"] > 2**26


@long
def test_a_rung_without_memory_or_with_an_error_is_marked(capfd):
    giant = ladder.measured(replace(TINY, batch_size=2**50), 1, 1)
    assert giant == {"remark": "not enough memory"}
    found = ladder.measured(replace(TINY, shape={"n_embd": 31}), 1, 1)
    assert found["remark"].startswith("failed: ValueError: n_embd (31) is not divisible")
    assert "Traceback" in capfd.readouterr().err
