"""Entries for other tools: model folders of Hugging Face, passes of Olive, runs of MLflow. Each needs its package."""
