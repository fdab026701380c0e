"""What an Accelerate config says is done, or refused before anything is built."""

import os

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from conftest import as_flags, long, losses, metrics, refused
from launching import ROOT, launch, launched
from tables import table

from gpt2_accel.runtime.accelerator import REFUSED, build_accelerator

# Every field of an Accelerate config is refused or in one of two lists. Fields that have effect:
USED = """
    compute_environment distributed_type mixed_precision use_cpu debug num_processes
    num_machines machine_rank gpu_ids main_process_ip main_process_port rdzv_backend
    same_network enable_cpu_affinity mpirun_config dynamo_config fsdp_config fsdp_version
    fsdp_reshard_after_forward fsdp_auto_wrap_policy fsdp_cpu_ram_efficient_loading
    parallelism_config parallelism_config_dp_shard_size parallelism_config_dp_replicate_size
"""
# Fields without effect, or with an effect only beside a refused field or on a TPU.
HARMLESS = """
    main_training_function downcast_bf16 tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm
    tpu_env command_file commands fp8_config deepspeed_config megatron_lm_config
    fsdp_sharding_strategy fsdp_transformer_layer_cls_to_wrap fsdp_backward_prefetch
    fsdp_state_dict_type fsdp_forward_prefetch fsdp_use_orig_params fsdp_sync_module_states
    fsdp_min_num_params fsdp_activation_checkpointing_offload parallelism_config_cp_backend
    parallelism_config_cp_comm_strategy parallelism_config_sp_backend
    parallelism_config_sp_seq_length parallelism_config_sp_seq_length_is_variable
    parallelism_config_sp_attn_implementation
"""
FSDP2 = {"distributed_type": "FSDP", "num_processes": 4, "mixed_precision": "no"}


def written(folder, **values):
    """Writes a config of FSDP2 with other values, each in its section; returns its path."""
    config = FSDP2 | {"fsdp_config": {"fsdp_version": 2}, "parallelism_config": {}}
    for name, value in values.items():
        sections = {"fsdp": config["fsdp_config"], "parallelism": config["parallelism_config"]}
        sections.get(name.split("_")[0], config)[name] = value
    path = folder / "launch.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_every_field_is_used_harmless_or_refused():
    """Fails for a new field of Accelerate until it is in one of the three lists."""
    flags = {action.dest for action in launch_command_parser()._actions}
    fields = {flag for flag in flags if flag.startswith(("fsdp_", "parallelism_config_"))}
    fields |= ClusterConfig.__dataclass_fields__.keys()
    used, harmless = set(USED.split()), set(HARMLESS.split())
    refusals = {name.removeprefix("ACCELERATE_").lower() for name in REFUSED}
    assert used | harmless <= fields <= used | harmless | refusals
    assert not harmless & (used | refusals)
    page = (ROOT / "docs/hardware.md").read_text()
    assert [name for name in refusals & fields if f"`{name}" not in page] == []


@pytest.mark.parametrize(("field", "value"), table("runtime/cases")["refused fields"])
def test_unsupported_fields_are_refused(field, value, tmp_path, monkeypatch):
    """With the environment that the launcher computes from the file."""
    monkeypatch.setattr("accelerate.utils.launch.is_fp8_available", lambda: True)
    path = written(tmp_path, **{field: value})
    _, environments = launched(["--config_file", str(path), "script.py"], dict(os.environ))
    for name, variable in environments[0].items():
        # The variables of torch.distributed would make this process wait for others.
        if name.startswith(("ACCELERATE", "FSDP", "PARALLELISM")):
            monkeypatch.setenv(name, variable)
    with refused(f"(?i)the Accelerate config has {field} {value}: "):
        build_accelerator()


@pytest.mark.parametrize("name", ["DEEPSPEED", "MEGATRON_LM"])
def test_deepspeed_and_megatron_are_refused(name, monkeypatch):
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with refused(f"has use_{name.lower()} true: use FSDP2"):
        build_accelerator()


@long
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_replicas_of_two_shards_train_as_four_shards(optimizer, tiny, tmp_path):
    """HSDP, and its resume to the last bit."""
    replicas = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2}
    settings = {"total_batch_size": 256, "micro_batch_size": 1, "save_every": 2, "max_steps": 4}

    def trained(name, **changes):
        path = written(tmp_path, **({} if name == "shards" else replicas))
        config = tiny(name, optimizer=optimizer, **settings, **changes)
        flags = ("--config_file", path, "tests/fsdp_script.py", *as_flags(config))
        launch(*flags, config="8xa100_fsdp2", processes=4)
        return losses(metrics(tmp_path / name))

    expected, actual = trained("shards"), trained("replicas")
    assert actual == pytest.approx(expected, abs=1e-5)
    checkpoint = str(tmp_path / "replicas/checkpoint-2")
    assert trained("resumed", resume_from=checkpoint) == actual[2:]
