"""A model in NF4 beside the same in bfloat16."""
