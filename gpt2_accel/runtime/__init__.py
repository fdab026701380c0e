"""Around the training loop: launch, devices, files, logs, trackers, signals, anomalies."""
