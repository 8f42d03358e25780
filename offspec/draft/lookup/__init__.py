"""Draft tokens that are copied from earlier text: suffix automaton and n-gram lookup."""
