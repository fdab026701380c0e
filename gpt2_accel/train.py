"""The training loop. Read `train` from top to bottom; the rest of the file is what it calls."""

import math
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from gpt2_accel.checkpoint import (
    CheckpointWriter,
    clean_up,
    find_checkpoint,
    list_checkpoints,
    load_training_state,
    unwrap,
)
from gpt2_accel.config import TrainConfig
from gpt2_accel.convert import from_pretrained, local_directory, save_pretrained
from gpt2_accel.data.loader import EvalLoader, TrainLoader, hash64
from gpt2_accel.data.shards import TokenStream, data_fingerprint, read_manifest, verify_data
from gpt2_accel.evals.validation import validation_loss
from gpt2_accel.files import exclusive, write_json
from gpt2_accel.generate import complete
from gpt2_accel.guard import Guard
from gpt2_accel.hub import Uploads, check_repo_id
from gpt2_accel.launch import build_accelerator
from gpt2_accel.metrics import RunLog, peak_flops
from gpt2_accel.model import GPT, GPTConfig
from gpt2_accel.optim import build_optimizer, learning_rate, set_learning_rate
from gpt2_accel.pictures import draw_loss
from gpt2_accel.stopping import StopRequest
from gpt2_accel.summary import Facts, closing, describe_run, describe_training, opening
from gpt2_accel.tokenizer import fingerprint, load_tokenizer
from gpt2_accel.trackers import Trackers, check_trackers, run_identity


def train(config: TrainConfig) -> bool:
    """Trains as `config` says, on the hardware and in the precision that the Accelerate config says.

    Leaves in `config.output_dir` checkpoints, logs and the final model, an HF directory. Every rank
    calls it. Returns whether all updates are done: a signal or `max_hours` ends it earlier, with a
    checkpoint. Raises `ValueError` or an `OSError` for settings or data that cannot work, before anything
    is written, and `ValueError` if the run diverges.
    """
    if config.push_to_hub:
        check_repo_id(config.push_to_hub)
    check_trackers(config.report_to)
    accelerator = build_accelerator(config.deterministic)
    run_dir = Path(config.output_dir)
    checkpoint = find_checkpoint(config.resume_from, run_dir, accelerator.print)
    train_loader, val_loader = build_loaders(config, accelerator)
    tokenizer = load_tokenizer(Path(config.data_dir) / "tokenizer")
    torch.manual_seed(config.seed)
    model = build_model(config, len(tokenizer), checkpoint)
    optimizer = build_optimizer(
        model,
        config.optimizer,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        betas=(config.beta1, config.beta2),
    )
    gpt_config = model.config
    model, optimizer = accelerator.prepare(model, optimizer)
    guard, step, run_id = Guard(config.spike_z), 0, None
    if checkpoint is not None:
        state = load_training_state(checkpoint, accelerator, optimizer)
        check_data(config, state["data"], checkpoint)
        guard.load(state["guard"])
        step, run_id = state["step"], state["run_id"]
    run_id = run_identity(config, checkpoint, run_id)
    facts = describe_run(config, gpt_config, accelerator, train_loader, run_id)
    model.train()

    with (
        hold_folder(run_dir, accelerator),
        StopRequest(config.max_hours) as stop,
        start_log(config, facts, accelerator, step) as log,
        Trackers(config, facts, accelerator, log),
        start_uploads(config, accelerator, log) as uploads,
    ):
        writer = start_writer(config, tokenizer, log, uploads)
        if checkpoint is not None and accelerator.is_main_process:
            writer.rotate(step)  # a kill may have come before that

        def save(step: int) -> None:
            writer.save(
                step,
                accelerator,
                model,
                optimizer,
                describe_training(config, accelerator, log),
                guard=guard.state(),
                data=data_fingerprint(config.data_dir),
                val_loss=log.at_this_step("val/loss"),
                run_id=run_id,
            )

        stopping = diverged = False
        while step < config.max_steps and not stopping and not diverged:
            # Learning rate, data and dropout are functions of the step: nothing else to resume.
            lr = learning_rate(
                step,
                peak=config.learning_rate,
                schedule=config.lr_schedule,
                warmup_steps=config.warmup_steps,
                max_steps=config.max_steps,
                min_ratio=config.min_lr_ratio,
            )
            set_learning_rate(optimizer, lr)
            torch.manual_seed(int(hash64(config.seed, step, accelerator.process_index)[0]))
            loss = accumulate_gradients(accelerator, model, train_loader, step)
            grad_norm = accelerator.clip_grad_norm_(
                model.parameters(), config.max_grad_norm or math.inf
            )
            loss, grad_norm, stopping = agree(accelerator, stop, loss, grad_norm)
            problem = guard.check(loss, grad_norm, scaled=accelerator.scaler is not None)
            if problem is None:
                optimizer.step()
            elif accelerator.scaler is not None:
                accelerator.scaler.update()
            optimizer.zero_grad()
            step += 1

            log.advance(step)
            if problem is not None:
                log.skipped(problem, train_loader.samples(step - 1))
                diverged = guard.bad_in_a_row == config.max_bad_steps
            elif due(config.log_every, step, config.max_steps):
                log.training(loss, grad_norm, lr)
            if due(config.eval_every, step, config.max_steps) and not stopping:
                results = validation_loss(
                    accelerator, model, val_loader, lambda: to_stop(accelerator, stop)
                )
                stopping = not results
                log.evaluation(results)
            if due(config.sample_every, step, config.max_steps) and not stopping:
                write_samples(config, accelerator, model, tokenizer, log)
            last = stopping or step == config.max_steps
            if (last or due(config.save_every, step, config.max_steps)) and not diverged:
                save(step)
            log.end_step()

        if diverged:
            # The weights are those from before the first of the bad updates.
            save(step - guard.bad_in_a_row)
            writer.wait()
            raise ValueError(
                f"{guard.bad_in_a_row} updates in a row were bad, the last since {problem}: "
                f"checkpoint-{step - guard.bad_in_a_row} is from before; lower --learning_rate or look at "
                f"the samples that {run_dir / 'metrics.jsonl'} names"
            )
        writer.wait()
        log.say(closing(log))
        if step < config.max_steps:
            log.stopped(stop.reason or "a signal to another process", stop.requeue)
        elif accelerator.is_main_process:
            training = describe_training(config, accelerator, log)
            save_pretrained(unwrap(accelerator, model), run_dir, tokenizer, training=training)
            if config.push_to_hub:
                draw_loss(run_dir, run_dir)
            uploads.push(run_dir, list_checkpoints(run_dir)[-1], final=True)
    accelerator.wait_for_everyone()
    accelerator.end_training()  # an open process group can abort the interpreter as it exits
    return step == config.max_steps


def agree(
    accelerator: Accelerator, stop: StopRequest, loss: torch.Tensor, grad_norm: torch.Tensor
) -> tuple[float, float, bool]:
    """The loss over all ranks, the gradient norm, and whether any rank is to stop.

    The one moment of an update at which the host waits for the device.
    """
    flag = torch.full_like(loss, float(stop.reason is not None))
    mean_loss, flags = accelerator.reduce(torch.stack((loss, flag)), "mean")
    loss_value, norm_value, flag_value = torch.stack((mean_loss, grad_norm, flags)).tolist()
    return loss_value, norm_value, flag_value > 0


def to_stop(accelerator: Accelerator, stop: StopRequest) -> bool:
    """Whether any rank is to stop."""
    flag = torch.tensor(float(stop.reason is not None))
    if accelerator.num_processes > 1:
        flag = accelerator.reduce(flag.to(accelerator.device), "sum")
    return flag.item() > 0


def hold_folder(run_dir: Path, accelerator: Accelerator) -> AbstractContextManager:
    """Holds the run's folder on the main process, and removes there what a kill left half-written."""
    if not accelerator.is_main_process:
        return nullcontext()
    held = ExitStack()
    held.enter_context(exclusive(run_dir))
    clean_up(run_dir)
    return held


def start_writer(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, log: RunLog, uploads: Uploads
) -> CheckpointWriter:
    """The writer of the run's checkpoints, each of which then goes to the Hub if that is asked for."""
    return CheckpointWriter(
        config.output_dir,
        tokenizer,
        keep_last=config.keep_last,
        keep_every=config.keep_every,
        keep_best=config.keep_best,
        saved=lambda path: uploads.push(path, path),
        say=log.say,
    )


def check_data(config: TrainConfig, fingerprint: str, checkpoint: Path) -> None:
    """Raises `ValueError` if the data is not what the checkpoint was trained on."""
    if fingerprint != data_fingerprint(config.data_dir) and not config.ignore_changes:
        raise ValueError(
            f"{config.data_dir} is not the data that {checkpoint} was trained on: give that by --data_dir, "
            "or --ignore_changes to go on with this"
        )


def build_model(config: TrainConfig, vocab_size: int, checkpoint: Path | None) -> GPT:
    """A new model, or the one of the checkpoint, or of `config.init_from`.

    Raises `ValueError` if it does not fit the data's tokenizer or the sequence length, or if the
    checkpoint's model is not the configured one.
    """
    source = checkpoint or config.init_from
    if source is not None:
        source = local_directory(source)
        model = from_pretrained(source, config.dropout)
    if config.init_from is None:
        names = ("n_positions", "n_layer", "n_head", "n_embd", "bias", "dropout")
        shape = GPTConfig(vocab_size, **{name: getattr(config, name) for name in names})
        if source is None:
            model = GPT(shape)
        elif model.config != shape and not config.ignore_changes:
            raise ValueError(
                f"{source} holds {model.config}, but the settings say {shape}: resume with the "
                "settings of the first run, which are in its config.yaml, or with --ignore_changes"
            )
    if model.config.vocab_size != vocab_size:
        raise ValueError(
            f"{source} has a vocabulary of {model.config.vocab_size}, but {config.data_dir} was "
            f"tokenized with one of {vocab_size}: prepare the text with the model's tokenizer, in "
            "another --data_dir"
        )
    if source and (source / "tokenizer.json").exists() and not config.ignore_changes:
        expected = read_manifest(config.data_dir)["tokenizer"]["fingerprint"]
        if fingerprint(load_tokenizer(source)) != expected:
            raise ValueError(
                f"{config.data_dir} was tokenized with another tokenizer than that of {source}: prepare "
                "the text with the model's tokenizer, in another --data_dir"
            )
    if config.sequence_length > model.config.n_positions:
        raise ValueError(
            f"sequence_length ({config.sequence_length}) exceeds n_positions "
            f"({model.config.n_positions}): lower the one or raise the other"
        )
    return model


def build_loaders(
    config: TrainConfig, accelerator: Accelerator
) -> tuple[TrainLoader, EvalLoader | None]:
    """This rank's share of the training and the validation data, None where nothing is evaluated.

    The micro-batches of an update follow from the total batch size.
    Raises `ValueError` if they do not come out even, and what `TokenStream` raises.
    """
    tokens = config.micro_batch_size * config.sequence_length * accelerator.num_processes
    if config.total_batch_size % tokens:
        nearest = max(1, round(config.total_batch_size / tokens)) * tokens
        raise ValueError(
            f"total_batch_size ({config.total_batch_size} tokens) is not a multiple of "
            f"micro_batch_size x sequence_length x processes = {config.micro_batch_size} x "
            f"{config.sequence_length} x {accelerator.num_processes} = {tokens}: try {nearest}"
        )
    if config.verify_data:
        verify_data(config.data_dir)
    share = {
        "sequence_length": config.sequence_length,
        "rank": accelerator.process_index,
        "world_size": accelerator.num_processes,
        "device": accelerator.device,
    }
    train_loader = TrainLoader(
        TokenStream(config.data_dir, "train"),
        micro_batch_size=config.micro_batch_size,
        sequences_per_update=config.total_batch_size // config.sequence_length,
        seed=config.seed,
        **share,
    )
    if not config.eval_every:
        return train_loader, None
    val_loader = EvalLoader(
        TokenStream(config.data_dir, "val"),
        batch_size=config.micro_batch_size,
        max_tokens=config.eval_tokens,
        **share,
    )
    return train_loader, val_loader


def start_log(config: TrainConfig, facts: Facts, accelerator: Accelerator, step: int) -> RunLog:
    """Creates the run's folder, writes there what the run is and says what is about to run."""
    if accelerator.is_main_process:
        run_dir = Path(config.output_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        config.save(run_dir / "config.yaml")
        write_json(run_dir / "run.json", asdict(facts))
        print(opening(config, facts, accelerator, step), flush=True)
    device, peak = accelerator.device, None
    if device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(device))
    return RunLog(
        config.output_dir,
        first_step=step,
        max_steps=config.max_steps,
        tokens_per_update=config.total_batch_size,
        flops_per_token=facts.flops_per_token,
        flops_per_second=peak and peak * accelerator.num_processes,
        device_type=device.type,
        enabled=accelerator.is_main_process,
    )


def start_uploads(config: TrainConfig, accelerator: Accelerator, log: RunLog) -> Uploads:
    """The uploads to the Hub beside the run, from the main process only."""
    return Uploads(
        config.push_to_hub if accelerator.is_main_process else None,
        config.output_dir,
        log.say,
        strategy=config.hub_strategy,
        private=config.hub_private_repo,
    )


def accumulate_gradients(
    accelerator: Accelerator, model: torch.nn.Module, loader: TrainLoader, step: int
) -> torch.Tensor:
    """Backward over this rank's micro-batches of one update; returns their mean loss, a scalar.

    Ranks exchange gradients in the last backward only.
    """
    total = torch.zeros((), device=accelerator.device)
    for number, (input_ids, targets) in enumerate(loader.update(step), start=1):
        last = number == loader.micro_batches
        with nullcontext() if last else accelerator.no_sync(model):
            loss = model(input_ids, targets) / loader.micro_batches
            accelerator.backward(loss)
        total += loss.detach()
    return total


def write_samples(
    config: TrainConfig,
    accelerator: Accelerator,
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    log: RunLog,
) -> None:
    """Continues each of the run's prompts; on the main process only."""
    if accelerator.is_main_process:
        for prompt in config.sample_prompts:
            plain = unwrap(accelerator, model)
            [text] = complete(
                plain, tokenizer, prompt, config.sample_tokens, temperature=0.8, seed=config.seed
            )
            log.sample(prompt, text)


def due(every: int, step: int, max_steps: int) -> bool:
    """Whether something that happens every so many updates, and after the last, happens at `step`.

    With 0 it never does.
    """
    return every > 0 and (step % every == 0 or step == max_steps)
