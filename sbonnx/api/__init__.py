"""Functions of `sbonnx` that are verbs of the command line, with the same words and defaults.

`create` has those that write models, and each other module one verb. They are imported one by one, so that a verb loads
only what it needs. `view` is in `sbonnx.viewing`, above the pages that it writes.
"""
