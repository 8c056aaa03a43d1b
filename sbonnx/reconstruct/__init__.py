"""Layer-wise and block-wise weight reconstruction: rounding that minimizes output errors on samples."""
