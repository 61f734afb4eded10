"""v4graph: declarative, graph-compiled inference for the DeepSeek-V4 family."""
