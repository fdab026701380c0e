"""What a user may replace in training: the model, the objective, the optimizer, callbacks. What is saved of each."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import losses, metrics, reset_accelerate, run, tiny_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from gpt2_accel import GPT, from_pretrained
from gpt2_accel.callbacks import Callback
from gpt2_accel.checkpoint.find import list_checkpoints
from gpt2_accel.generation.sampling import load
from gpt2_accel.hf import comparison
from gpt2_accel.models import configured_shape, gpt2
from gpt2_accel.train import train


def go(config, **seams):
    """Trains with these seams; returns the lines of metrics.jsonl."""
    reset_accelerate()
    train(config, **seams)
    return metrics(config.output_dir)


class Counted(torch.optim.SGD):
    """SGD with a counter in its groups, and a list and a number in its state."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["seen"] = [*state.get("seen", []), group["count"]][-2:]
                parameter.data.add_(parameter, alpha=-1e-3 * state["seen"][0])
        return super().step(closure)


def counted(model, config):
    others = [p for name, p in model.named_parameters() if "wte" not in name]
    groups = [{"params": [model.wte.weight], "lr": config.learning_rate / 10}, {"params": others}]
    return Counted(groups, lr=config.learning_rate, momentum=0.9)


def test_an_optimizer_resumes_with_all_of_its_state(tiny, tmp_path):
    """Two rates, a counter in its groups, a list in its state."""
    whole = go(tiny("whole", save_every=4), optimizer=counted)
    state = json.loads((tmp_path / "whole/checkpoint-4/training_state/state.json").read_text())
    assert state["optimizer_values"]["groups"] == [{"count": 4}, {"count": 4}]
    assert state["optimizer_values"]["state"]["wte.weight/seen"] == [3, 4]
    go(tiny("cut", save_every=4, max_steps=8, max_hours=1e-9), optimizer=counted)
    resumed = go(tiny("other", resume_from=str(tmp_path / "whole/checkpoint-4")), optimizer=counted)
    assert losses(resumed) == losses(whole)[4:]
    final = [load_file(tmp_path / f"{name}/model.safetensors") for name in ("whole", "other")]
    assert all(torch.equal(final[0][name], final[1][name]) for name in final[0])
    # The same update by hand: the rate of the embedding is a tenth.
    rates = []

    class Rates:
        def on_pre_optimizer_step(self, run):
            rates.append([group["lr"] for group in run.optimizer.param_groups])

    config = tiny("rates")
    go(config, optimizer=counted, callbacks=[Rates()])
    expected = [config.learning_rate_at(step) for step in range(8)]
    assert [rate for _, rate in rates] == expected
    assert [rate for rate, _ in rates] == pytest.approx([rate / 10 for rate in expected])


class Strange(torch.optim.SGD):
    """An optimizer whose groups hold what no file can."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.history = [{1, 2}]

    def step(self, closure=None):
        self.param_groups[0]["history"] = self.history
        return super().step(closure)


def test_a_state_that_a_checkpoint_cannot_hold_is_refused(tiny, tmp_path):
    with pytest.raises(ValueError, match="cannot hold the state of Strange .*set"):
        go(tiny("a"), optimizer=lambda m, c: Strange(m.parameters(), lr=c.learning_rate))
    other = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(
        ValueError, match=r"has a parameter of shape \(3,\) that the model does not"
    ):
        go(tiny("b"), optimizer=lambda m, c: torch.optim.SGD([*m.parameters(), other], lr=1.0))


def planted_faults():
    class NotJson:
        def state_dict(self):
            return {"names": {"a", "b"}}

        def load_state_dict(self, state):
            pass

    return {
        "tensor": ("gpt2_accel.hf.comparison.unknown_tensors", KeyError("lost")),
        "tokenizer": ("gpt2_accel.hf.convert.save_tokenizer", OSError("no tokenizer")),
        "card": ("gpt2_accel.hf.convert.model_card", TypeError("no card")),
        "callback": (None, NotJson()),
    }


@pytest.mark.parametrize("fault", planted_faults())
def test_what_cannot_be_saved_stops_before_the_first_update(fault, tiny, tmp_path, monkeypatch):
    place, what = planted_faults()[fault]
    callbacks = [] if place else [what]
    if place:

        def fail(*_, **__):
            raise what

        monkeypatch.setattr(place, fail)
    with pytest.raises(Exception) as raised:
        go(tiny(), callbacks=callbacks)
    assert type(raised.value) is (type(what) if place else TypeError)
    assert not metrics(tmp_path) and not list(tmp_path.glob("*rehearsal*"))


# The model


class Squared(gpt2.MLP):
    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Changed(GPT):
    """ReLU², of which the names of the tensors tell nothing."""

    def __init__(self, config):
        super().__init__(config)
        for block in self.h:
            block.mlp.__class__ = Squared


def changed(config, tokenizer):
    return Changed(configured_shape(config, len(tokenizer)))


def test_a_changed_model_is_saved_as_itself(tiny, tmp_path, capsys):
    """From its first checkpoint on: `transformers` refuses it, it samples, resumes and opens by its class."""
    whole = go(tiny("whole", save_every=4), model=changed)
    assert "its logits differ by" in capsys.readouterr().out
    checkpoint = tmp_path / "whole/checkpoint-4"
    for folder in (checkpoint, tmp_path / "whole"):
        assert json.loads((folder / "config.json").read_text())["model_type"] == "gpt2_accel_custom"
        assert "cannot open this model" in (folder / "README.md").read_text()
        with pytest.raises(ValueError, match="gpt2_accel_custom"):
            AutoModelForCausalLM.from_pretrained(folder)
        with pytest.raises(ValueError, match="name its code by --model_class FILE.py:CLASS"):
            from_pretrained(folder)
    model, _ = load(str(tmp_path / "whole"), model_class=f"{__file__}:Changed")
    assert [type(block.mlp).__name__ for block in model.h] == ["Squared", "Squared"]
    resumed = go(tiny("other", resume_from=str(checkpoint)), model=changed)
    assert losses(resumed) == losses(whole)[4:]
    with pytest.raises(ValueError, match="holds .*Changed, not .*GPT"):
        load(str(tmp_path / "whole"), model_class="gpt2_accel.models.gpt2:GPT")


def test_what_a_config_names_is_not_imported(tiny, tmp_path, monkeypatch):
    go(tiny("run", max_steps=2), model=changed)
    config = tmp_path / "run/config.json"
    config.write_text(config.read_text().replace("Changed", "Changed.exploded"))
    with pytest.raises(ValueError, match="exploded"):
        from_pretrained(tmp_path / "run")


@pytest.mark.parametrize("updates", [2, 60])
@pytest.mark.parametrize("change", ["epsilon", "residual", "positions", "cap"])
def test_a_model_that_differs_a_little_is_found(change, updates, tiny, monkeypatch, tmp_path):
    found = []
    honest = comparison.difference

    def noted(model, directory):
        found.append(honest(model, directory))
        return found[-1]

    monkeypatch.setattr(comparison, "difference", noted)
    hidden = GPT.hidden
    if change == "epsilon":
        norm = gpt2.LayerNorm.__init__
        monkeypatch.setattr(
            gpt2.LayerNorm, "__init__", lambda self, *a, **k: norm(self, *a, **{**k, "eps": 1e-3})
        )
    elif change == "residual":
        monkeypatch.setattr(GPT, "hidden", lambda self, *a: hidden(self, *a) * 1.01)
    elif change == "positions":
        monkeypatch.setattr(
            GPT, "hidden", lambda self, i, p, *rest: hidden(self, i, p.flip(-1), *rest)
        )
    else:
        monkeypatch.setattr(GPT, "hidden", lambda self, *a: 5 * torch.tanh(hidden(self, *a) / 5))
    run(tiny("run", max_steps=updates))
    assert found[0] > comparison.LIMIT
    assert "custom" in (tmp_path / "run/config.json").read_text()


# The objective


def test_figures_of_an_objective_are_means_over_all_that_an_update_counts(tiny):
    def objective(model, batch):
        logits = model(batch.input_ids)
        nats = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        return nats, {"first": batch.input_ids[:, 0].float().mean(), "two": nats * 2}

    plain = losses(go(tiny("plain", max_steps=4)))
    for size in (4, 1):
        lines = go(tiny(f"own{size}", max_steps=4, micro_batch_size=size), objective=objective)
        assert losses(lines) == pytest.approx(plain, abs=1e-6)
        assert [line["train/two"] for line in lines] == pytest.approx([2 * x for x in plain])
        assert len({round(line["train/first"], 4) for line in lines}) == 4


# Callbacks


class Recorder:
    """Notes each call; its state is a number and a tensor."""

    def __init__(self):
        self.calls, self.total = [], torch.zeros(2)

    def __getattr__(self, event):
        if not event.startswith("on_"):
            raise AttributeError(event)

        def call(run, **what):
            self.calls.append((run.step, event, *sorted(what)))
            if event == "on_step_end":
                self.total += run.step

        return call

    def state_dict(self):
        return {"total": self.total, "count": len(self.calls)}

    def load_state_dict(self, state):
        self.total, self.count = state["total"], state["count"]


def test_callbacks_are_called_in_order_and_resume(tiny, tmp_path, capsys):
    first, second = Recorder(), Recorder()
    config = tiny("run", max_steps=2, eval_every=2, eval_tokens=64, save_every=1)
    go(config, callbacks=[first, second])
    assert first.calls == second.calls
    assert [call[:2] for call in first.calls] == [
        (0, "on_train_begin"),
        (0, "on_pre_optimizer_step"),
        (1, "on_step_end"),
        (1, "on_log"),
        (1, "on_pre_optimizer_step"),
        *([(2, "on_save")] if (2, "on_save", "path") in first.calls[:7] else []),
        (2, "on_step_end"),
        (2, "on_evaluate"),
        (2, "on_log"),
        (2, "on_save"),
        (2, "on_train_end"),
    ]
    assert all(name.startswith("on_") and hasattr(Callback, name) for _, name, *_ in first.calls)
    checkpoint = str(tmp_path / "run/checkpoint-1")
    again, other = Recorder(), Recorder()
    go(tiny("more", max_steps=2, resume_from=checkpoint), callbacks=[again, other])
    assert other.total.tolist() == [3.0, 3.0] and other.count == 4
    capsys.readouterr()
    with pytest.raises(ValueError, match=r"has the state of the callback Recorder#2"):
        go(tiny("fewer", resume_from=checkpoint), callbacks=[Recorder()])
    go(tiny("new", max_steps=2, resume_from=checkpoint, ignore_changes=True))

    class Fresh(Recorder):
        pass

    fresh = [Recorder(), Recorder(), Fresh()]
    go(tiny("anew", max_steps=2, resume_from=checkpoint), callbacks=fresh)
    assert "the callback Fresh has no state" in capsys.readouterr().out


def test_a_callback_can_stop_save_and_validate(tiny, tmp_path):
    class Asks:
        def on_step_end(self, run, skipped):
            if run.step == 2:
                run.request_save()
            if run.step == 4:
                results = run.validate("ema/")
                assert results.keys() >= {"ema/loss"} and math.isfinite(results["ema/loss"])
                run.log_metrics({"asks/half": 0.5})
            if run.step == 5:
                run.request_stop("half of it")

    lines = go(tiny("run", eval_every=8, eval_tokens=64), callbacks=[Asks()])
    assert lines[3]["asks/half"] == 0.5 and "ema/loss" in lines[3]
    steps = [path.name for path in list_checkpoints(tmp_path / "run")]
    assert steps == ["checkpoint-3", "checkpoint-6"] and len(lines) == 6
    found = json.loads((tmp_path / "run/status.json").read_text())
    assert (found["state"], found["reason"], found["requeue"]) == ("stopped", "half of it", False)
    state = json.loads((tmp_path / "run/checkpoint-6/training_state/state.json").read_text())
    assert state["guard"]["best"] is None  # validations of callbacks do not count


def test_a_callback_of_transformers_is_refused(data_dir, tmp_path):
    class Theirs(TrainerCallback):
        pass

    with pytest.raises(ValueError, match="Theirs is a TrainerCallback of transformers"):
        go(tiny_config(data_dir, tmp_path / "run"), callbacks=[Theirs()])
