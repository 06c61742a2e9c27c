"""The outer search over meshes, stages, micro-batches and recipes."""
