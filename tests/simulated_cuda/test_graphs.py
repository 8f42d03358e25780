"""Graphs: a replay runs the captured work on the current memory contents."""

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_replay_uses_the_memory_of_the_capture(late: Any) -> None:
    given = torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = (given + 1) * 2
        given += 1
    assert given.tolist() == [0, 0, 0], "nothing runs while it is captured"
    for value in (5.0, 7.0):
        given.fill_(value)
        graph.replay()
        assert found.tolist() == [2 * value + 2] * 3
    assert late.counts["replays"] == 2


@pytest.mark.parametrize("what", ["item", "upload", "wait"])
def test_synchronization_cannot_be_captured(late: Any, what: str) -> None:
    given, graph = torch.zeros(3, device="cuda"), torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="previous error during capture"),
        torch.cuda.graph(graph),
        pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
    ):
        if what == "item":
            given.sum().item()
        elif what == "upload":
            torch.ones(3).to("cuda")
        else:
            torch.cuda.synchronize()
    # torch keeps the stream of the capture selected: the caller must restore it
    torch.cuda.set_stream(torch.cuda.default_stream())


def test_memory_of_a_graph_is_not_reused(late: Any) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        between = torch.full((1000,), 3.0, device="cuda")
        found = between + 1
        del between
    others = [torch.zeros(1000, device="cuda") for _ in range(50)]
    graph.replay()
    assert found.sum().item() == 4000 and all(other.sum().item() == 0 for other in others)
