"""Example command lines at the end of the help of each command. Tests parse every line."""

from __future__ import annotations

from typing import Final

EXAMPLES: Final[dict[str, tuple[str, ...]]] = {
    "quantize": (
        "sbonnx quantize model.onnx --data calib/ -o model.int8.onnx",
        "sbonnx quantize model.onnx --data calib/ -o model.trt.onnx --backend tensorrt@10 --exclude after:Conv_193",
        "sbonnx quantize model.onnx --data calib/ -o model.w4a8.onnx --bits w4a8 --effort best --report report.html",
    ),
    "batch": ("sbonnx batch jobs.yaml --dry-run", "sbonnx batch jobs.yaml --workers 4"),
    "qat": ("sbonnx qat model.onnx --data train/ -o model.w4a4.onnx --bits w4a4 --epochs 5",),
    "prune": (
        "sbonnx prune model.onnx --data calib/ -o pruned.onnx --macs 0.5",
        "sbonnx prune model.onnx -o sparse.onnx --pattern 2:4",
    ),
    "simplify": ("sbonnx simplify model.onnx -o simple.onnx",),
    "init": ("sbonnx init model.onnx -o recipe.yaml", "sbonnx init model.onnx --jobs -o jobs.yaml"),
    "recipe": ("sbonnx recipe > recipe.yaml", "sbonnx recipe recipe.yaml --set W.QUANTIZER.BIT=4"),
    "inspect": ("sbonnx inspect model.onnx", "sbonnx inspect model.int8.onnx --json"),
    "plan": (
        "sbonnx plan model.onnx --backend tensorrt@10",
        "sbonnx plan model.onnx --exclude 're:/head/.*(reg|cls).*' -o plan.json",
    ),
    "lint": (
        "sbonnx lint model.int8.onnx --target tensorrt@10",
        "sbonnx lint model.int8.onnx --target tensorrt@10 --fix -o model.fixed.onnx",
        "sbonnx lint model.int8.onnx --target onnxruntime --output-format github",
    ),
    "run": (
        "sbonnx run model.onnx --data test/ -o outputs/",
        "sbonnx run model.onnx --shape image=1x3x224x224 -o outputs.npz",
    ),
    "bench": (
        "sbonnx bench model.onnx model.int8.onnx --threads 1,4 --batch 1,8",
        "sbonnx bench model.onnx --data test/ --seconds 10 --json",
    ),
    "compare": ("sbonnx compare model.onnx model.int8.onnx --data test/ --min-sqnr 20",),
    "eval": (
        "sbonnx eval model.onnx model.int8.onnx --data test/ --metric top1",
        "sbonnx eval yolov8n.onnx coco/ --metric map50 --preprocess yolo",
    ),
    "diff": ("sbonnx diff model.int8.onnx model.best.onnx", "sbonnx diff yesterday.onnx today.onnx --json"),
    "profile": (
        "sbonnx profile model.onnx model.int8.onnx --data calib/",
        "sbonnx profile model.onnx model.int8.onnx --data calib/ --eval test/ --metric top1 --top 5",
    ),
    "demo": ("sbonnx demo",),
    "explain": (
        "sbonnx explain T04",
        "sbonnx explain W.ROUNDING.TYPE",
        "sbonnx explain 'it would be slower in integers'",
        "sbonnx explain /layer1/conv1/Conv --model model.onnx --backend tensorrt@10",
    ),
    "tune": ("sbonnx tune", "sbonnx tune --output laptop.json"),
    "doctor": ("sbonnx doctor",),
    "view": (
        "sbonnx view report.json",
        "sbonnx view model.onnx --backend tensorrt",
        "sbonnx view model.onnx model_int8.onnx --data calib.npz --no-open -o graph.html",
    ),
    "schema": ("sbonnx schema", "sbonnx schema quantize > quantize.schema.json"),
    "version": ("sbonnx version --json",),
    "completion": (
        'eval "$(sbonnx completion bash)"  # in ~/.bashrc',
        "sbonnx completion zsh > ~/.zfunc/_sbonnx  # with ~/.zfunc in fpath, before compinit",
        "sbonnx completion fish > ~/.config/fish/completions/sbonnx.fish",
    ),
    "help": ("sbonnx help quantize", "sbonnx help llm adapt"),
    "llm inspect": ("sbonnx llm inspect decoder/",),
    "llm quantize": (
        "sbonnx llm quantize decoder/ -o decoder.w4/ --text texts.jsonl",
        "sbonnx llm quantize decoder/ -o decoder.mixed/ --text texts.jsonl --average-bits 3.5 --kv 8",
    ),
    "llm evaluate": ("sbonnx llm evaluate decoder.w4/ --against decoder/ --text test.txt",),
    "llm adapt": ("sbonnx llm adapt decoder.w4/ --against decoder/ --text texts.jsonl -o decoder.adapted/",),
}
"""Lines by command; a comment begins with two blanks and #."""
