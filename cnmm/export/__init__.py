"""From an operating point to files: slim networks, ONNX, ladders."""
