"""Evaluations: functions of (accelerator, model, interrupted) that return {"TASK/METRIC": value}.

All ranks call an evaluation; they share the samples by index, and each sample counts once.
`interrupted` is called before each round of batches and must agree on all ranks; if it is True, the
result is empty.
"""
