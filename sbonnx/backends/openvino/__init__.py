"""OpenVINO on Intel-architecture CPUs: rules, costs and execution."""
