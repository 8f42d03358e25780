"""Link utilization while a model streams."""
