"""Chat logic shared by both user interfaces, without widgets or tensors."""
