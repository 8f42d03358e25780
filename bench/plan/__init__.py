"""Plans compared with measurements, what-ifs and published figures."""
