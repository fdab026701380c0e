#!/bin/bash
# GPT-2 as a job on Hugging Face, from data on the Hub; the checkpoints are in a repository, from which a new job resumes:
#   hf jobs run --detach --flavor a100-large --timeout 12h --secrets HF_TOKEN --env REPO=USER/gpt2-124m \
#       --env DATA=USER/fineweb-edu --env SOURCE=git+ADDRESS pytorch/pytorch bash -c "$(cat recipes/cluster/hf_job.sh)"
# Without --timeout a job ends after 30 minutes. The job's disk is lost with it, so a run ends itself before, by --max_hours.
set -e
pip install --quiet "$SOURCE"
hf download "$DATA" --repo-type dataset --local-dir data/job

# The repository's last checkpoint, if there is one yet.
RESUME=$(python - <<'PYTHON'
import os
from huggingface_hub import file_exists
state = file_exists(os.environ["REPO"], "last-checkpoint/training_state/state.json")
print(f"--resume_from {os.environ['REPO']}" if state else "")
PYTHON
)

gpt2-accel launch 1xgpu pretrain-124m --data_dir data/job --output_dir runs/job --max_hours "${HOURS:-11.5}" \
    --push_to_hub "$REPO" --hub_strategy checkpoint $RESUME
