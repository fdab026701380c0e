"""The training loop. Read `train` from top to bottom; the rest of the file is what it calls."""

import json
import math
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from gpt2_accel.build import (
    build_batch_schedule,
    build_evaluations,
    build_loaders,
    build_model,
    build_tokenizer,
    check_data,
    check_optimizer,
    document_separator,
)
from gpt2_accel.checkpoint import (
    CheckpointWriter,
    clean_up,
    find_checkpoint,
    list_checkpoints,
    load_training_state,
)
from gpt2_accel.config import AUTO, TrainConfig
from gpt2_accel.convert import save_pretrained
from gpt2_accel.data.loader import TrainLoader, hash64
from gpt2_accel.data.shards import data_fingerprint
from gpt2_accel.dry_run import dry_run
from gpt2_accel.files import exclusive, write_json
from gpt2_accel.fit import fitting_batch_size
from gpt2_accel.generate import Sampling, complete
from gpt2_accel.guard import Guard, Patience
from gpt2_accel.hub import Uploads, check_repo_id
from gpt2_accel.launch import build_accelerator, close, is_sharded, profiler
from gpt2_accel.metrics import RunLog, peak_flops
from gpt2_accel.optim import BatchSchedule, build_optimizer, learning_rate, set_learning_rate
from gpt2_accel.pictures import draw_loss
from gpt2_accel.stopping import StopRequest
from gpt2_accel.summary import Facts, closing, describe_run, describe_training, opening
from gpt2_accel.tensors import full_model, unwrap, whole
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
    if config.dry_run:
        accelerator.print(dry_run(config, accelerator))
        return False
    check_optimizer(config, accelerator)
    run_dir = Path(config.output_dir)
    checkpoint = find_checkpoint(config.resume_from, run_dir, accelerator.print)
    tokenizer = build_tokenizer(config)
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
    model.checkpoint_activations = config.checkpoint_activations
    if config.document_mask:
        model.separator = document_separator(config.data_dir)
    model, optimizer = accelerator.prepare(model, optimizer)
    if config.micro_batch_size == AUTO:
        config.micro_batch_size = fitting_batch_size(config, accelerator, model)
    schedule = build_batch_schedule(config, accelerator)
    train_loader, val_loader = build_loaders(config, accelerator)
    evaluations = build_evaluations(config, accelerator, gpt_config, tokenizer, val_loader)
    if config.eval_only:
        for _, evaluate in evaluations:
            accelerator.print(json.dumps(evaluate(accelerator, model)))
        close(accelerator)
        return False
    guard, patience = Guard(config.spike_z), Patience(config.patience)
    step, run_id = 0, None
    if checkpoint is not None:
        state = load_training_state(checkpoint, accelerator, optimizer)
        check_data(config, state["data"], checkpoint)
        guard.load(state["guard"])
        patience.load(state["guard"])
        step, run_id = state["step"], state["run_id"]
    updates = schedule.updates(config.max_steps)  # more than max_steps if some are smaller
    run_id = run_identity(config, checkpoint, run_id)
    facts = describe_run(config, gpt_config, accelerator, train_loader, schedule, run_id)
    model.train()

    with (
        hold_folder(run_dir, accelerator),
        StopRequest(config.max_hours) as stop,
        start_log(config, facts, accelerator, schedule, step) as log,
        Trackers(config, facts, accelerator, log),
        start_uploads(config, accelerator, log) as uploads,
        profiler(config.profile, run_dir, accelerator) as profile,
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
                guard=guard.state() | patience.state(),
                data=data_fingerprint(config.data_dir),
                val_loss=log.at_this_step("val/loss"),
                run_id=run_id,
            )

        stopping = diverged = converged = False
        while step < updates and not (stopping or diverged or converged):
            # Learning rate, data and dropout are functions of the step: nothing else to resume.
            first, sequences = schedule.first(step), schedule.sequences(step)
            lr = learning_rate(
                first / schedule.full,
                peak=config.learning_rate,
                schedule=config.lr_schedule,
                warmup_steps=config.warmup_steps,
                max_steps=config.max_steps,
                min_ratio=config.min_lr_ratio,
                decay_share=config.decay_share,
            )
            set_learning_rate(optimizer, lr)
            torch.manual_seed(int(hash64(config.seed, step, accelerator.process_index)[0]))
            loss = accumulate_gradients(accelerator, model, train_loader, first, sequences)
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
                log.skipped(problem, train_loader.samples(first, sequences))
                diverged = guard.bad_in_a_row == config.max_bad_steps
            elif due(config.log_every, step, updates):
                log.training(loss, grad_norm, lr)
            for every, evaluate in evaluations:
                if due(every, step, updates) and not stopping:
                    results = evaluate(accelerator, model, lambda: to_stop(accelerator, stop))
                    stopping = not results
                    log.evaluation(results)
                    converged = converged or patience.exhausted(results.get("val/loss"))
            if due(config.sample_every, step, updates) and not stopping:
                write_samples(config, accelerator, model, tokenizer, log)
            last = stopping or converged or step == updates
            if (last or due(config.save_every, step, updates)) and not diverged:
                save(step)
            log.end_step()
            profile.step()

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
        if converged:
            log.say(f"no lower validation loss in {config.patience} evaluations: ended early")
        finished = converged or step == updates
        if not finished:
            log.stopped(stop.reason or "a signal to another process", stop.requeue)
        else:
            plain = full_model(accelerator, model)
            if accelerator.is_main_process:
                training = describe_training(config, accelerator, log)
                save_pretrained(plain, run_dir, tokenizer, training=training)
                if config.push_to_hub:
                    draw_loss(run_dir, run_dir)
                newest = (list_checkpoints(run_dir) or [checkpoint])[-1]
                uploads.push(run_dir, newest, final=True)
    close(accelerator)
    return finished


def agree(
    accelerator: Accelerator, stop: StopRequest, loss: torch.Tensor, grad_norm: torch.Tensor
) -> tuple[float, float, bool]:
    """The loss over all ranks, the gradient norm, and whether any rank is to stop.

    The one moment of an update at which the host waits for the device.
    """
    flag = torch.full_like(loss, float(stop.reason is not None))
    mean_loss, flags = accelerator.reduce(torch.stack((loss, flag)), "mean")
    loss_value, norm_value, flag_value = torch.stack((mean_loss, whole(grad_norm), flags)).tolist()
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


def start_log(
    config: TrainConfig, facts: Facts, accelerator: Accelerator, schedule: BatchSchedule, step: int
) -> RunLog:
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
        max_steps=facts.updates,
        tokens_at=lambda step: schedule.first(step) * config.sequence_length,
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
    accelerator: Accelerator,
    model: torch.nn.Module,
    loader: TrainLoader,
    first: int,
    sequences: int,
) -> torch.Tensor:
    """Backward over this rank's micro-batches of the update that has `sequences` sequences from position
    `first` on; returns their mean loss, a scalar.

    Ranks exchange gradients in the last backward only.
    """
    _, count = loader.micro_batches(sequences)
    total = torch.zeros((), device=accelerator.device)
    for number, (input_ids, targets) in enumerate(loader.update(first, sequences), start=1):
        with nullcontext() if number == count else accelerator.no_sync(model):
            loss = model(input_ids, targets) / count
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
    """Continues each of the run's prompts; on the main process only, uncompiled, in fp32."""
    sharded = is_sharded(accelerator)
    plain = full_model(accelerator, model) if sharded else unwrap(accelerator, model)
    if accelerator.is_main_process:
        sampling = Sampling(max_new_tokens=config.sample_tokens, seed=config.seed)
        for sample in complete(plain, tokenizer, config.sample_prompts, sampling):
            log.sample(sample.prompt, sample.prompt + sample.text)


def due(every: int, step: int, max_steps: int) -> bool:
    """Whether something that happens every so many updates, and after the last, happens at `step`.

    With 0 it never does.
    """
    return every > 0 and (step % every == 0 or step == max_steps)
