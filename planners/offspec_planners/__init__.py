"""Planning for models that do not fit in memory: numbers in, a plan out, without models or devices."""
