"""Decoding loops of other packages, each in its own process: two pools of CPU threads in one would slow both down.

Peers run the weights of this engine in the same number format, in transformers' layers, and drafts with the whole head.
Only `hf-float32`, `llama-server` and `openvino` with their variants run the published weights.
"""
