"""Draft tokens copied from earlier text: suffix automaton and n-gram lookup."""
