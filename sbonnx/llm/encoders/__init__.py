"""Encoders of encoder-decoder models (T5, Marian, BART, Whisper), as parts of their decoders."""
