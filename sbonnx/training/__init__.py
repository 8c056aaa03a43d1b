"""Training loop: losses, augmentation, schedules, checkpoints, EMA of the weights."""
