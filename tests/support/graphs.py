"""CUDA graphs."""

import torch


def captured(function):
    """(graph, what the function returned while it was captured), after the warm-up that PyTorch asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    # PyTorch writes the generator's seed for the graph on the stream that captures, and a replay's seed on the current
    # one: nothing else keeps the first from coming last.
    torch.cuda.synchronize()
    return graph, results
