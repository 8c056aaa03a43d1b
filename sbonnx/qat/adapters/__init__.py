"""Low-rank adapters (LoRA) on quantized layers."""
