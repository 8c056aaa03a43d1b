"""Training loop: losses, augmentation, schedules, checkpoints, weight averages."""
