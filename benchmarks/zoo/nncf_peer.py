"""Quantize a model with NNCF; run by an interpreter that has it: nncf_peer.py MODEL FOLDER OUTPUT."""

import sys
from pathlib import Path

import nncf
import numpy as np
import onnx

model, folder, output = sys.argv[1:]
files = sorted(Path(folder).glob("*.npz"))
dataset = nncf.Dataset(files, lambda file: dict(np.load(file)))
proto = onnx.load(model)
onnx.save(nncf.quantize(proto, dataset, preset=nncf.QuantizationPreset.MIXED, subset_size=len(files)), output)
