"""Training with another model, objective, optimizer or callbacks, and what is saved of each."""

import math
import threading
from dataclasses import replace

import pytest
import seams_script
import torch
import torch.nn.functional as F
from conftest import (
    as_flags,
    assert_status,
    chat_rows,
    load_recipe,
    losses,
    metrics,
    read_json,
    refused,
    reset_accelerate,
    tiny_config,
    weights_digest,
    write_lines,
)
from launching import launch, sharded
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from gpt2_accel import GPT, GPTConfig, from_pretrained
from gpt2_accel.callbacks import Callback
from gpt2_accel.checkpoint.find import find_corruption, list_checkpoints
from gpt2_accel.data.conversations import prepare_conversations
from gpt2_accel.data.loader import TrainLoader
from gpt2_accel.data.source import open_data
from gpt2_accel.generation.sampling import load
from gpt2_accel.hf.chat_template import chat_tokenizer
from gpt2_accel.hf.comparison import ModelFiles
from gpt2_accel.hf.convert import configured_shape
from gpt2_accel.models import gpt2
from gpt2_accel.optim import build_optimizer, learning_rate, set_learning_rate
from gpt2_accel.train import accumulate_gradients, next_token_loss, train


def go(config, **seams):
    """Trains with these seams; returns the lines of metrics.jsonl."""
    reset_accelerate()
    train(config, **seams)
    return metrics(config.output_dir)


class Counted(torch.optim.SGD):
    """SGD whose state holds lists, bf16, a large int64 and a tensor that is not contiguous.

    Its groups hold tensors too.
    """

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["d"] = 0.9 * group.get("d", torch.ones((), dtype=torch.float64))
            group["k"] = 0.9 * group.get("k", torch.ones(2, dtype=torch.bfloat16))
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["half"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                    state["number"] = torch.tensor([2**24])
                    state["turned"] = torch.ones(2, 3).t()
                    state["seen"] = []
                    state["GG"] = [torch.zeros(2, 3), []]
                state["seen"].append(group["count"])
                state["number"] += 1
                state["half"].mul_(0.9).add_(parameter.grad)
                state["GG"][0] += state["half"].float().abs().mean()
                rate = group["lr"] * state["seen"][-1] + state["GG"][0].mean().item() / 100
                parameter.sub_(state["half"], alpha=rate)


def counted(model, config):
    others = [p for name, p in model.named_parameters() if "wte" not in name]
    groups = [{"params": [model.wte.weight], "lr": config.learning_rate / 10}, {"params": others}]
    return Counted(groups, lr=config.learning_rate)


def test_an_optimizer_resumes_with_all_of_its_state(tiny, tmp_path):
    """Its groups of parameters keep their shares of the learning rate."""
    rates = []

    class Rates:
        def on_pre_optimizer_step(self, run):
            rates.append([group["lr"] for group in run.optimizer.param_groups])

    config = tiny("whole", save_every=4)
    uninterrupted = go(config, optimizer=counted, callbacks=[Rates()])
    expected = [learning_rate(config, step) for step in range(8)]
    assert rates == [pytest.approx([rate / 10, rate]) for rate in expected]
    checkpoint = tmp_path / "whole/checkpoint-4"
    values = read_json(checkpoint / "training_state/state.json")["optimizer_values"]
    assert values["groups"] == [{"count": 4}, {"count": 4}]
    assert values["state"]["wte.weight"]["seen"] == [1, 2, 3, 4]
    resumed = go(tiny("other", resume_from=str(checkpoint)), optimizer=counted)
    assert losses(resumed) == losses(uninterrupted)[4:]
    assert weights_digest(tmp_path / "other") == weights_digest(tmp_path / "whole")
    state = load_file(tmp_path / "other/checkpoint-8/training_state/optimizer.safetensors")
    assert state["wte.weight/number"].tolist() == [2**24 + 8]
    assert state["wte.weight/half"].dtype == torch.bfloat16
    assert state["wte.weight/GG/0"].shape == (2, 3)
    assert state["group#1/d"].dtype == torch.float64
    assert state["group#1/k"].dtype == torch.bfloat16

    def one_group(model, config):
        return Counted(model.parameters(), lr=config.learning_rate)

    with refused("2 parameter groups of Counted, not 1"):
        go(tiny("groups", resume_from=str(checkpoint)), optimizer=one_group)


class Doubling(torch.optim.SGD):
    """An optimizer with modes: the weights to evaluate and save are twice those of training."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.training = False

    def switch(self, training, factor):
        if self.training != training:
            self.training = training
            for parameter in self.param_groups[0]["params"]:
                parameter.data.mul_(factor)

    def train(self):
        self.switch(True, 0.5)

    def eval(self):
        self.switch(False, 2.0)


def test_the_modes_of_an_optimizer_are_switched(tiny, tmp_path):
    """To evaluation for evaluations and saves, also those of callbacks, and back for updates."""
    modes = []
    evaluated = []

    class Notes:
        def on_train_begin(self, run):
            run.model.register_forward_pre_hook(lambda model, _: self.note(run))

        def note(self, run):
            modes.append((run.model.training, run.optimizer.optimizer.training))
            if not run.model.training:
                evaluated.append(run.model.wte.weight[:257].clone())

        def on_step_end(self, run, skipped):
            if run.step == 4:
                run.validate("mine/")
                run.save_model(tmp_path / "mine")

    def doubling(model, config):
        return Doubling(model.parameters(), lr=config.learning_rate)

    settings = {"max_steps": 6, "save_every": 4, "eval_every": 6, "eval_tokens": 64}
    uninterrupted = go(tiny("whole", **settings), optimizer=doubling, callbacks=[Notes()])
    assert set(modes) == {(True, True), (False, False)}
    for folder, weight in (("mine", 0), ("whole/checkpoint-4", 0), ("whole", -1)):
        saved = load_file(tmp_path / folder / "model.safetensors")["transformer.wte.weight"]
        assert torch.equal(saved, evaluated[weight])
    checkpoint = str(tmp_path / "whole/checkpoint-4")
    resumed = go(tiny("more", **settings, resume_from=checkpoint), optimizer=doubling)
    assert losses(resumed) == losses(uninterrupted)[4:]


# The last file of a model; a mounted bucket cannot rename.
@pytest.mark.parametrize("place", ["gpt2_accel.hf.convert.model_card", "pathlib.Path.rename"])
def test_a_run_that_cannot_be_saved_stops_before_its_first_update(
    place, tiny, tmp_path, monkeypatch
):
    def fail(*_, **__):
        raise KeyError("planted")

    monkeypatch.setattr(place, fail)
    with pytest.raises(KeyError, match="planted"):
        go(tiny())
    assert not metrics(tmp_path)
    assert not list(tmp_path.glob("*rehearsal*"))


# The model


class Squared(gpt2.MLP):
    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Changed(GPT):
    """A GPT-2 with ReLU², which has the tensors' names of one without."""

    def __init__(self, config):
        super().__init__(config)
        for block in self.h:
            block.mlp.__class__ = Squared


def changed(config, tokenizer):
    return Changed(configured_shape(config, len(tokenizer)))


def test_a_changed_model_is_saved_as_itself(tiny, tmp_path):
    """`transformers` refuses it from the first checkpoint on; its class opens it."""
    go(tiny("whole", save_every=4), model=changed)
    checkpoint = tmp_path / "whole/checkpoint-4"
    for folder in (checkpoint, tmp_path / "whole"):
        with pytest.raises(ValueError, match="gpt2_accel_custom"):
            AutoModelForCausalLM.from_pretrained(folder)
        with refused("--model_class"):
            from_pretrained(folder)
    model, _ = load(str(tmp_path / "whole"), model_class=f"{__file__}:Changed")
    assert [type(block.mlp).__name__ for block in model.h] == ["Squared", "Squared"]
    with refused("Changed, not .*GPT"):
        load(str(tmp_path / "whole"), model_class="gpt2_accel.models.gpt2:GPT")


def test_a_model_that_is_edited_in_the_package_opens_without_its_class(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(gpt2.MLP, "forward", Squared.forward)
    go(tiny("run"))
    with pytest.raises(ValueError, match="gpt2_accel_custom"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    model, _ = load(str(tmp_path / "run"))
    assert type(model) is GPT
    saved = load_file(tmp_path / "run/model.safetensors")
    assert torch.equal(saved["wpe.weight"], model.wpe.weight)


# The objective


@pytest.fixture(scope="module")
def chats(chat_base, tmp_path_factory):
    """Conversations in windows of 64 tokens with unequal numbers of counted targets."""
    folder = tmp_path_factory.mktemp("chats")
    rows = write_lines(folder / "rows.jsonl", chat_rows(60))
    prepare_conversations(
        [str(rows)],
        chat_tokenizer(chat_base),
        folder / "shards",
        sequence_length=64,
        source="made up",
        model=str(chat_base),
    )
    return folder / "shards"


@pytest.mark.parametrize("how", ["on two processes", "sharded"])
def test_an_update_does_not_depend_on_how_it_is_divided(how, chats, chat_model, tmp_path):
    """The update by hand, with unequal numbers of counted targets and two calls of the model."""
    model = from_pretrained(chat_model)
    loader = TrainLoader(
        open_data(chats).split("train"), sequence_length=64, micro_batch_size=8, seed=1337
    )
    batch = next(loader.update(0, 8))
    counted = batch.targets != -100
    assert len(counted.sum(dim=1).unique()) > 3

    def mean_loss(input_ids):
        logits = model(input_ids, documents=batch.documents)
        return F.cross_entropy(logits[counted], batch.targets[counted])

    other = mean_loss(batch.input_ids.roll(1, dims=1))
    loss = mean_loss(batch.input_ids) + other / 4
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert min(gradient.abs().max() for gradient in gradients.values()) > 1e-3

    batch_size = {"total_batch_size": 8 * 64, "micro_batch_size": 2, "sequence_length": 64}
    changes = {"init_from": str(chat_model), "max_steps": 1, "max_grad_norm": 0} | batch_size
    config = tiny_config(chats, tmp_path, **changes)
    command = ("tests/seams_script.py", *as_flags(config))
    if how == "sharded":
        sharded(*command, CASE="two")
    else:
        launch(*command, processes=2, CASE="two")
    [line] = metrics(tmp_path)
    assert line["train/loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert line["train/other"] == pytest.approx(other.item(), rel=1e-6)
    actual = load_file(tmp_path / "gradients.safetensors")
    assert actual.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-6, rtol=0)


def test_each_update_and_process_has_random_numbers_of_its_own(data_dir, tmp_path):
    one = tiny_config(data_dir, tmp_path / "one", max_steps=4)
    first = [line["train/draw"] for line in go(one, **seams_script.CASES["random"])]
    two = tiny_config(data_dir, tmp_path / "two", max_steps=4, micro_batch_size=2)
    launch("tests/seams_script.py", *as_flags(two), processes=2, CASE="random")
    means = [line["train/draw"] for line in metrics(tmp_path / "two")]
    seconds = [2 * mean - first_mean for mean, first_mean in zip(means, first, strict=True)]
    assert all(0 <= number <= 1 for number in seconds)
    assert len({round(number, 4) for number in first + seconds}) == 8


# Callbacks


class Recorder:
    """Notes each call; its state is a number and a tensor."""

    def __init__(self):
        self.calls = []
        self.total = torch.zeros(2)

    def __getattr__(self, event):
        if not event.startswith("on_"):
            raise AttributeError(event)

        def call(run, **arguments):
            self.calls.append((run.step, event))
            if event == "on_step_end":
                self.total += run.step

        return call

    def state_dict(self):
        return {"total": self.total, "count": len(self.calls)}

    def load_state_dict(self, state):
        self.total, self.count = state["total"], state["count"]


ORDER = """
0 on_train_begin
0 on_pre_optimizer_step
1 on_step_end
1 on_log
1 on_pre_optimizer_step
2 on_step_end
2 on_evaluate
2 on_log
2 on_train_end
"""


def test_callbacks_are_called_in_order_and_resume(tiny, tmp_path):
    first, second = Recorder(), Recorder()
    config = tiny("run", max_steps=2, eval_every=2, eval_tokens=64, save_every=1)
    go(config, callbacks=[first, second])
    assert first.calls == second.calls
    # The first checkpoint is complete at some time before the second.
    calls = [f"{step} {name}" for step, name in first.calls if name != "on_save"]
    assert "\n".join(calls) == ORDER.strip()
    assert first.calls[-2:] == [(2, "on_save"), (2, "on_train_end")]
    assert all(hasattr(Callback, name) for _, name in first.calls)
    checkpoint = str(tmp_path / "run/checkpoint-1")
    again, other = Recorder(), Recorder()
    go(tiny("more", max_steps=2, resume_from=checkpoint), callbacks=[again, other])
    assert other.total.tolist() == [3.0, 3.0]
    assert other.count == 4
    with refused("Recorder#2"):
        go(tiny("fewer", resume_from=checkpoint), callbacks=[Recorder()])


def test_requests_of_callbacks_are_kept(tiny, tmp_path):
    """Also a checkpoint that is asked for before a skipped update."""

    class Asks:
        def on_train_begin(self, run):
            run.log_metrics({"mine/begin": torch.tensor(1.5)})

        def on_step_end(self, run, skipped):
            skips.append(skipped)
            if run.step == 1:
                run.validate("ema/")
            if run.step == 3:
                run.request_save()
            if run.step == 6:
                run.request_stop("enough")

        def on_train_end(self, run, finished):
            run.log_metrics({"mine/end": 2.5})

    def objective(model, batch):
        factor = math.nan if len(skips) == 3 else 1
        return model(batch.input_ids, batch.targets) * factor

    skips = []
    config = tiny("run", eval_every=6, eval_tokens=64)
    lines = go(config, objective=objective, callbacks=[Asks()])
    saved = [path.name for path in list_checkpoints(tmp_path / "run")]
    assert saved == ["checkpoint-5", "checkpoint-6"]
    assert skips == [False, False, False, True, False, False]
    assert lines[0] == {"step": 0, "tokens": 0, "mine/begin": 1.5}
    assert "ema/loss" in lines[1]
    assert lines[-1] == {"step": 6, "tokens": 6 * 128, "mine/end": 2.5}
    state = read_json(tmp_path / "run/checkpoint-5/training_state/state.json")
    assert state["best"] is None  # validations of callbacks do not count
    assert_status(tmp_path / "run", state="stopped", reason="enough", requeue=False)


def test_a_callback_finishes_a_run_which_only_more_updates_continue(tiny, tmp_path, capsys):
    config = tiny(eval_every=9, eval_tokens=64, resume_from="latest")
    ends = callback(on_step_end=lambda self, run, skipped: run.request_finish("enough"))
    lines = go(config, **ends)
    assert "val/loss" in lines[1]
    assert (tmp_path / "model.safetensors").exists()
    assert go(config) == lines
    words = capsys.readouterr().out
    assert words.index("finished: enough") < words.index("nothing left to train after 2 updates")
    assert len(go(replace(config, max_steps=9))) == 9


RANKS = [
    ("stop", "stopped"),
    ("finish", "finished"),
    ("names", "figures ['loss', 'one'], the first had ['loss', 'zero']"),
    ("inner", "the objective does not call the model that it gets"),
]


@pytest.mark.parametrize(("case", "words"), RANKS)
def test_ranks_agree_on_names_on_the_model_and_on_why_a_run_ends(case, words, tiny, tmp_path):
    """A second run in the same program has a process group of its own."""
    flags = as_flags(tiny(micro_batch_size=2))
    script = "tests/seams_script.py"
    fails = " " in words
    done = launch(script, *flags, processes=2, fails=fails, CASE=case)
    if fails:
        assert words in done.stderr
    else:
        assert_status(tmp_path, state=words, reason="rank 1 has enough")
        assert len(metrics(tmp_path / "second")) == 2


def test_a_checkpoint_has_the_state_of_its_own_step(tiny, tmp_path, monkeypatch):
    """Although it is written while training goes on, to its end, and changes the lists."""
    save = ModelFiles.save
    release = threading.Event()

    def slow(*arguments, **options):
        assert release.wait(20)
        save(*arguments, **options)

    class Growing:
        def __init__(self):
            self.steps = []

        def on_step_end(self, run, skipped):
            self.steps.append(run.step)
            if run.step == 5:
                monkeypatch.setattr(ModelFiles, "save", slow)
            elif run.step == 8:
                release.set()

        def state_dict(self):
            return {"steps": self.steps}

    settings = {"save_every": 6, "eval_every": 1, "eval_tokens": 64}
    lines = go(tiny("run", **settings), callbacks=[Growing()], optimizer=counted)
    checkpoint = tmp_path / "run/checkpoint-6"
    assert find_corruption(checkpoint) is None
    assert f"| val/loss | {lines[5]['val/loss']:.4f} ± " in (checkpoint / "README.md").read_text()
    state = read_json(checkpoint / "training_state/state.json")
    assert state["callbacks"]["Growing"]["steps"] == [1, 2, 3, 4, 5, 6]
    values = state["optimizer_values"]
    assert values["groups"] == [{"count": 6}, {"count": 6}]
    assert {tuple(each["seen"]) for each in values["state"].values()} == {(1, 2, 3, 4, 5, 6)}


class Recurrent(torch.nn.Module):
    """A model with what `Trainable` lists and a buffer, and nothing else of the package."""

    config_class = GPTConfig
    separator = None
    checkpoint_activations = False

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = torch.nn.Embedding(config.vocab_size, 16)
        self.gru = torch.nn.GRU(16, 16, batch_first=True)
        self.head = torch.nn.Linear(16, config.vocab_size)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    device = property(lambda self: self.head.weight.device)
    dtype = property(lambda self: self.head.weight.dtype)

    def forward(self, input_ids, targets=None, *, reduction="mean", documents=None):
        self.count += int(self.training)
        logits = self.head(self.gru(self.embed(input_ids))[0]) * (1 + self.count / 100)
        if targets is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
        return loss.view_as(targets) if reduction == "none" else loss

    def tie_weights(self):
        pass


def test_any_module_with_the_protocol_trains_resumes_and_is_saved(tiny, tmp_path):
    def model(config, tokenizer):
        return Recurrent(GPTConfig.from_settings(config, len(tokenizer)))

    settings = {"eval_every": 4, "eval_tokens": 64, "save_every": 4}
    uninterrupted = go(tiny("run", **settings), model=model)
    assert losses(uninterrupted)[-1] < losses(uninterrupted)[0]
    checkpoint = str(tmp_path / "run/checkpoint-4")
    resumed = go(tiny("resumed", **settings, resume_from=checkpoint), model=model)
    assert losses(resumed) == losses(uninterrupted)[4:]
    assert load_file(tmp_path / "resumed/model.safetensors")["count"] == 8
    # The config's class is not imported, so a config cannot run code.
    config = tmp_path / "run/config.json"
    config.write_text(config.read_text().replace("Recurrent", "Recurrent.exploded"))
    with refused("exploded"):
        from_pretrained(tmp_path / "run")


# Gradients


def sam_by_hand(model, batches, config, rho=0.05):
    """Updates of SAM as in its paper, with AdamW; returns the losses."""
    optimizer = build_optimizer(model, config)
    losses = []
    for step, batch in enumerate(batches):
        set_learning_rate(optimizer, learning_rate(config, step), config.learning_rate)
        loss = model(batch.input_ids, batch.targets)
        loss.backward()
        before = [p.detach().clone() for p in model.parameters()]
        norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
        with torch.no_grad():
            for p in model.parameters():
                p += rho * p.grad / norm
        optimizer.zero_grad()
        model(batch.input_ids, batch.targets).backward()
        with torch.no_grad():
            for p, weight in zip(model.parameters(), before, strict=True):
                p.copy_(weight)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_sam_equals_a_loop_by_hand(data_dir, tmp_path):
    config = tiny_config(data_dir, tmp_path, micro_batch_size=2, max_steps=3, learning_rate=3e-3)
    torch.manual_seed(config.seed)
    model = configured_shape(config, 257).build()
    size = {"sequence_length": 32, "micro_batch_size": 4, "seed": config.seed}
    loader = TrainLoader(open_data(data_dir).train, **size)
    batches = [next(loader.update(4 * step, 4)) for step in range(3)]
    expected = sam_by_hand(model, batches, config)
    launch("tests/changes_script.py", *as_flags(config), processes=2, CHANGE="sam")
    assert losses(metrics(tmp_path)) == pytest.approx(expected, abs=1e-5)


def without_loss(run, batches):
    return {"other": accumulate_gradients(run, batches)["loss"]}


def not_last(run, batches):
    for batch in batches:
        run.backward(next_token_loss(run.model, batch), last=False)
    return {"loss": torch.ones(())}


def reserved(run, batches):
    return accumulate_gradients(run, batches) | {"step": torch.ones(())}


def say(self, run, skipped):
    run.log_metrics({"mine/mood": "good"})


def remove(self, run):
    run.optimizer.zero_grad()


def constant(model, batch):
    return torch.nn.Parameter(torch.ones(()))


class Strange(torch.optim.SGD):
    """An optimizer whose groups hold what no file can, after an update."""

    def step(self, closure=None):
        self.param_groups[0]["history"] = [{1, 2}]
        return super().step(closure)


def strange(model, config):
    return Strange(model.parameters(), lr=0.01)


def with_another_parameter(model, config):
    other = torch.nn.Parameter(torch.ones(3))
    return torch.optim.SGD([*model.parameters(), other], lr=0.01)


def callback(**methods):
    return {"callbacks": [type("Own", (), methods)()]}


CANNOT_TRAIN = [
    ({"gradients": 3}, "3 is not a function"),
    ({"gradients": without_loss}, "return a dict of scalars that has loss"),
    ({"gradients": not_last}, "not reduced over the processes"),
    ({"gradients": reserved}, "none of grad_norm, learning_rate, step"),
    ({"data": (1, 2)}, "data is a tuple: give a Data"),
    ({"objective": constant}, "no weight of the model has a gradient"),
    ({"objective": lambda m, b: next_token_loss(m, b).detach()}, "does not depend on"),
    ({"objective": lambda m, b: m(b.input_ids)[0, 0]}, "return a scalar"),
    ({"optimizer": strange}, "history"),
    ({"optimizer": with_another_parameter}, r"shape \(3,\)"),
    ({"callbacks": None}, "callbacks is a NoneType"),
    ({"callbacks": [None]}, "none of the methods"),
    ({"callbacks": [TrainerCallback()]}, "on_epoch_begin"),
    (callback(on_step_end=say), "metric mine/mood is 'good': give a number"),
    (callback(on_pre_optimizer_step=remove), "no weight of the model has a gradient"),
    (callback(state_dict=lambda self: 3), "is a int"),
    (callback(state_dict=lambda self: {"found": [(1, 2)]}), "cannot hold .*found"),
    (callback(on_train_end=lambda self, run: 0), "on_train_end does not take run, finished"),
]


@pytest.mark.parametrize(("seams", "words"), CANNOT_TRAIN)
def test_parts_that_cannot_train_end_the_run_before_its_second_update(seams, words, tiny, tmp_path):
    with refused(words):
        go(tiny(), **seams)
    assert len(losses(metrics(tmp_path))) <= 1


def test_a_resume_prints_the_parts_that_have_changed(tiny, tmp_path, capsys):
    go(tiny("run", save_every=4), gradients=load_recipe("changes/sam").sam)
    capsys.readouterr()
    go(tiny("more", resume_from=str(tmp_path / "run/checkpoint-4")))
    assert ":sam -> gpt2_accel.train:accumulate_gradients from update 4" in capsys.readouterr().out
