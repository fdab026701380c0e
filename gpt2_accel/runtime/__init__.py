"""Everything around the training loop: launch, setup, logs, trackers, signals, anomalies, early stopping."""
