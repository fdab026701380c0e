"""What surrounds the training loop: launch, setup, logs, trackers, signals, guards."""
