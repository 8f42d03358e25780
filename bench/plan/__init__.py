"""Plans beside measurements, sweeps, calibration and published figures."""
