"""Graphs: a replay runs the captured work on the current memory contents."""

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_a_replay_reads_and_writes_where_the_capture_did(late: Any) -> None:
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
def test_what_waits_cannot_be_captured(late: Any, what: str) -> None:
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
    # torch leaves the stream of the capture selected: whoever catches must set it back
    torch.cuda.set_stream(torch.cuda.default_stream())


def test_a_graph_s_memory_stays_its_own(late: Any) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        between = torch.full((1000,), 3.0, device="cuda")
        found = between + 1
        del between
    others = [torch.zeros(1000, device="cuda") for _ in range(50)]
    graph.replay()
    assert found.sum().item() == 4000 and all(other.sum().item() == 0 for other in others)
