"""QNN execution provider of onnxruntime, for Qualcomm devices: rules. No device is needed or used."""
