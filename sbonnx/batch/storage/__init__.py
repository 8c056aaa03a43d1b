"""Remote files of a batch: download, upload, and publication of outputs."""
