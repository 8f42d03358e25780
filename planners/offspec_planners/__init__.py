"""Planning for models that do not fit: numbers in, a plan out. Knows nothing of models or devices."""
